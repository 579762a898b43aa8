"""FlexAttention with the expressions of the suite ``scores``, as its users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ..spec import Spec
from .expressions import name_expression

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, entry, head, query, key


def _add_bias_of_keys(bias: Tensor) -> ScoreMod:
    return lambda s, b, h, i, j: s + bias[b, h, j]


# FlexAttention's function by the name of an expression, given the expression's parameter, or the slopes of ALiBi.
SCORE_MODS: dict[str, Callable[[Tensor], ScoreMod]] = {
    "": lambda x: lambda s, b, h, i, j: s,
    "softcap": lambda x: lambda s, b, h, i, j: 50 * torch.tanh(s / 50),
    "alibi": lambda slopes: lambda s, b, h, i, j: s - slopes[h] * (i - j),
    "clipped distance": lambda x: lambda s, b, h, i, j: s + torch.clamp(i - j, max=64) / 8,
    "learned slopes": lambda slopes: lambda s, b, h, i, j: s - slopes[h] * (i - j),
    "table of distances": lambda table: lambda s, b, h, i, j: s + table[h, torch.clamp(i - j, 0, 64)],
    "bias of keys": _add_bias_of_keys,
    "constant bias of keys": _add_bias_of_keys,
    "temperatures": lambda factors: lambda s, b, h, i, j: s * factors[h],
}


def flex_op(
    spec: Spec, heads: int, n: int, device: torch.device, *, compiled: bool = True
) -> Callable[..., Tensor] | None:
    """Return FlexAttention on causal sequences: (q, k, v, the expression's parameter if any) -> out.

    The mask of blocks is made once, before the calls.

    Args:
        spec: causal plain attention, maybe with an expression of the suite.
        heads: number of heads.
        n: tokens of a sequence.
        device: where the calls run.
        compiled: whether FlexAttention is compiled.

    Returns:
        None if FlexAttention has no such function.
    """
    name = name_expression(spec, heads)
    if name not in SCORE_MODS:
        return None
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=str(device))
    attention = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, parameter: Tensor = slopes) -> Tensor:
        return attention(q, k, v, score_mod=SCORE_MODS[name](parameter), block_mask=mask)

    return attend
