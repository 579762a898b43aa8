"""Multi-token attention in torchtitan's models, by an override that its trainer takes by name.

The trainer's option ``--override.imports 'mtagen.torchtitan.multi_token_attention={"kernel": [6, 11]}'`` adds the
stages to every layer whose attention is torchtitan's ``GQAttention``. This module needs torchtitan, and nothing else of
mtagen imports it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .errors import InputError, SpecError, explain

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.attention import GQAttention, VarlenAttention, VarlenMetadata
    from torchtitan.protocols.module import Module
except ModuleNotFoundError as error:
    _rule, _legal = "mtagen.torchtitan needs this package", "pip install torchtitan"
    raise ModuleNotFoundError(explain("import", error.name, _rule, _legal), name=error.name) from error

from .nn.parts import set_parameter
from .op import build

_STAGES = ("kernel", "mixed_heads", "post_kernel", "post_mixed_heads", "key_padding", "mask", "backend")


class InnerAttention(Module):
    """The attention of a layer between its projections, with stages that start as the identity.

    Parameters have the names of the op's arguments, such as ``weight`` and ``post_head_weight``, in fp32 or the dtype
    to which a policy of mixed precision casts them.

    Args:
        config: the heads and the stages.

    Raises:
        SpecError: an option of the stages is not legal.
        PlanError: this machine's target has no plan of the stages; the message names the limit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The heads and the stages; a ``VarlenAttention.Config``, because torchtitan then passes where documents begin.

        Attributes:
            n_heads: heads of queries.
            head_dim: elements of a head.
            stages: arguments of :func:`mtagen.build`: ``kernel``, ``mixed_heads``, ``post_kernel``,
                ``post_mixed_heads``, ``key_padding``, ``mask``, ``backend``.
        """

        n_heads: int
        head_dim: int
        stages: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.op = build(head_dim=config.head_dim, window=config.window_size, causal=False, **config.stages)
        for name, weight in self.op.identity_weights(config.n_heads).items():
            self.register_parameter(name, nn.Parameter(weight))

    def reset_parameters(self) -> None:
        """Set the stages to the identity."""
        for name, parameter in self.named_parameters(recurse=False):
            weights = self.op.identity_weights(self.n_heads, device=parameter.device, dtype=parameter.dtype)
            set_parameter(parameter, weights[name])

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: VarlenMetadata | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: None = None,
    ) -> Tensor:
        """Return the outputs ``(B, N, H, D)``.

        Args:
            q: ``(B, N, H, D)``.
            k: ``(B, N, Hkv, D)``.
            v: ``(B, N, Hkv, D)``.
            attention_masks: the documents of the flattened batch; None if each row is one document.
            scale: factor of the scores, default ``D ** -0.5``.
            enable_gqa: not read, because the op takes any number of key heads that divides H.
            out_transform: not supported.

        Raises:
            InputError: an argument does not fit, or asks for something that is not supported.
        """
        if out_transform is not None:
            rule = "a function of outputs and log-sum-exps is not supported"
            raise InputError(explain("out_transform", out_transform, rule, None))
        options: dict[str, Any] = {**dict(self.named_parameters(recurse=False)), "scale": scale}
        out: Any
        if attention_masks is None:
            out = self.op(*(x.transpose(1, 2) for x in (q, k, v)), **options)
            return out.transpose(1, 2)  # type: ignore[no-any-return]
        if not isinstance(attention_masks, VarlenMetadata):
            rule = "must tell where documents begin"
            raise InputError(
                explain("attention_masks", type(attention_masks).__name__, rule, "VarlenMetadata, or None")
            )
        options |= {name: getattr(attention_masks, name) for name in ("cu_seq_q", "cu_seq_k", "max_q", "max_k")}
        out = self.op.varlen(*(x.flatten(0, 1) for x in (q, k, v)), **options)
        return out.view(q.shape)  # type: ignore[no-any-return]


@override(target=GQAttention.Config, exact=True, description="multi-token attention of mtagen")
def multi_token_attention(config: GQAttention.Config, **stages: Any) -> GQAttention.Config:
    """Return the configuration of an attention layer with stages.

    Args:
        config: the layer without stages. The window of a ``VarlenAttention`` stays, and all other attention becomes
            causal, within documents.
        **stages: arguments of :func:`mtagen.build`, as in :class:`InnerAttention.Config`; lists count as tuples.

    Raises:
        SpecError: an argument is no option of the stages.
    """
    if unknown := sorted(set(stages) - {*_STAGES}):
        raise SpecError(explain("override", unknown[0], "is no option of the stages", _STAGES))
    head_dim = config.dim // config.n_heads if config.head_dim is None else config.head_dim
    stages = {name: tuple(x) if isinstance(x, list) else x for name, x in ({"kernel": None} | stages).items()}
    inner = derive(
        config.inner_attention, InnerAttention.Config, n_heads=config.n_heads, head_dim=head_dim, stages=stages
    )
    return derive(config, GQAttention.Config, inner_attention=inner)
