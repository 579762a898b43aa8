"""Stages of multi-token attention inside another model's attention.

Attention of transformers calls a function that it finds by a name in the configuration, with
queries and keys after projection, norm and rotary embedding. :func:`attend` is that function for
:data:`NAME`. It finds the stages in the module that calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..errors import InputError, SpecError, explain
from ..expressions import softcap
from ..nn.checks import check_divisor
from ..nn.layer import build_for
from ..nn.parts import set_parameter
from ..ops.attention import autocast
from ..spec import WEIGHTS
from .batching import IMPLEMENTATION
from .cache import CACHE_NAME
from .calls import Batch, read_call
from .configuration import CACHE_NAMES

NAME = "mtagen"
# The arguments of a model without an output layer that may be passed by position.
POSITIONAL = ("input_ids", "attention_mask", "position_ids", CACHE_NAME, "inputs_embeds", "use_cache")


class ScoreStages(nn.Module):
    """The stages over the scores of a model's attention, at first the identity.

    Args:
        attention: an attention module of a model of transformers, whose window, soft-cap and sinks
            the op has, too.
        options: the stages and the other options of :func:`mtagen.build`; ``compute_dtype`` as in
            :class:`mtagen.nn.MultiTokenAttention`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        op: the built op. Its weights are the module's parameters, by the names of its arguments.
        window: how many keys a query sees, its own included; None for all earlier ones.
        cap: bound of the scores that the softmax takes, or None.

    Raises:
        SpecError: an option is not legal, or queries see later keys.
        PlanError: this machine's target has no plan of the stages; the message names the limit.
    """

    def __init__(
        self,
        attention: Any,
        options: Mapping[str, Any],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not attention.is_causal:
            rule = "its queries see later keys, but stages of a retrofit convolve over earlier keys only"
            raise SpecError(explain("model", "attention in both directions", rule, "a causal model"))
        config, dtype = attention.config, torch.get_default_dtype() if dtype is None else dtype
        self.heads: int = config.num_attention_heads
        for name in ("mixed_heads", "post_mixed_heads"):
            if options[name] is not None:
                check_divisor(name, options[name], self.heads)
        # Modules that have no such attribute pass the configuration's window.
        self.window: int | None = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        self.cap: float | None = getattr(attention, "attn_logit_softcapping", None)
        left = -1 if self.window is None else self.window - 1
        self.op = build_for(
            dtype,
            {
                **{name: value for name, value in options.items() if name != "compute_dtype"},
                "head_dim": attention.head_dim,
                "window": (left, -1),
                "logits": None if self.cap is None else softcap(self.cap),
                "sink": hasattr(attention, "sinks"),
                "dropout": attention.attention_dropout > 0,
                "dtype": options["compute_dtype"],
            },
        )
        weights = self.op.identity_weights(self.heads, device=device, dtype=dtype)
        for name in WEIGHTS:
            self.register_parameter(name, nn.Parameter(weights[name]) if name in weights else None)

    def reset_parameters(self) -> None:
        """Set the weights to the identity, sharded ones too."""
        for name, parameter in self.named_parameters():
            weights = self.op.identity_weights(self.heads, device=parameter.device, dtype=parameter.dtype)
            set_parameter(parameter, weights[name])

    def forward(self) -> dict[str, Tensor]:
        """Return the weights by the names of the op's arguments.

        They are read by a call, as tools expect that replace, load or gather the weights of a module
        when it is called.
        """
        return {name: getattr(self, name) for name in self.op.plan.spec.weight_names}

    def check(self, window: int | None, cap: float | None, sink: Tensor | None) -> None:
        """Check what a model's attention passes to :func:`attend`.

        Raises:
            InputError: the op was built for something else.
        """
        got, mine = (window, cap, sink is not None), (self.window, self.cap, self.op.plan.spec.sink)
        if got != mine:
            rule = "the op of its stages was built for another one"
            named = [dict(zip(("sliding_window", "softcap", "s_aux"), x, strict=True)) for x in (got, mine)]
            raise InputError(explain("attention", named[0], rule, named[1]))

    def extra_repr(self) -> str:
        """Return the shapes of the weights and what else the op has."""
        weights = ", ".join(f"{name}={tuple(weight.shape)}" for name, weight in self.named_parameters())
        return f"{weights or 'plain'}, window={self.window}, cap={self.cap}, sink={self.op.plan.spec.sink}"


def prepare(model: Any, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Read a call's arguments for all layers, as a hook before a model without its output layer.

    Raises:
        InputError: an argument does not fit, or asks for an unsupported feature.
    """
    if len(arguments) > len(POSITIONAL):
        rule = "only these arguments may be passed by position"
        raise InputError(explain("arguments", f"{len(arguments)} by position", rule, POSITIONAL))
    by_position = dict(zip(POSITIONAL, arguments, strict=False))
    if twice := sorted(by_position.keys() & named.keys()):
        raise InputError(explain(twice[0], "by position and by name", "must be passed once", f"{twice[0]}=..."))
    named = by_position | named
    tokens = named.get("input_ids") if named.get("inputs_embeds") is None else named["inputs_embeds"]
    if tokens is None:  # the model raises its own error
        return (), named
    batch, cache = read_call(model.config, tokens, named)
    for name in CACHE_NAMES:
        named.pop(name, None)
    return (), {**named, CACHE_NAME: cache, "use_cache": cache is not None, "mtagen_batch": batch}


def withhold_cache(attention: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the cache to :func:`attend` alone, as a hook before an attention module.

    The module would add keys and values to the cache, without queries.
    """
    caches = [named.pop(name) for name in CACHE_NAMES if name in named]
    return arguments, {**named, "mtagen_cache": caches[0] if caches else None}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    mtagen_batch: Batch | None = None,
    mtagen_cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the stages of a module, as transformers asks for it.

    Args:
        module: the attention module, with :class:`ScoreStages` as ``stages``.
        query: ``(B, H, N, D)``.
        key: ``(B, Hkv, N, D)``, new tokens only.
        value: ``(B, Hkv, N, D)``.
        attention_mask: None. Documents and padding are in ``mtagen_batch``.
        scaling: factor of the scores.
        dropout: probability that a probability is dropped.
        sliding_window: how many keys a query sees.
        softcap: bound of the scores.
        s_aux: ``(H,)``, sinks.
        mtagen_batch: documents and padding.
        mtagen_cache: a cache of queries, keys and values.
        **others: what else transformers passes, e.g. positions, which are in queries and keys already.

    Returns:
        The outputs ``(B, N, H, D)``, and None for probabilities.

    Raises:
        InputError: the call asks for what the stages' op does not do.
    """
    stages: ScoreStages = module.stages
    stages.check(sliding_window, softcap, s_aux)
    if attention_mask is not None:
        rule = "masks of scores are not supported"
        raise InputError(explain("attention_mask", type(attention_mask).__name__, rule, "None"))
    options: dict[str, Any] = {**stages(), "scale": scaling}
    if s_aux is not None:
        options["sink"] = s_aux
    query, key, value = autocast(query, key, value)
    batch = Batch() if mtagen_batch is None else mtagen_batch
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if mtagen_cache is None:
        options["dropout_p"] = dropout
        if batch.packing is not None:
            return batch.packing.compute(stages.op, options, q, k, v), None
        out: Any = stages.op(query, key, value, **options)
        return out.transpose(1, 2), None
    if dropout:
        rule = "generation does not apply dropout"
        raise InputError(explain("cache", "a model in training mode, with dropout", rule, "model.eval()"))
    return mtagen_cache.layers[module.layer_idx].compute(stages.op, options, q, k, v, batch.padding), None


for _name in (NAME, IMPLEMENTATION):
    AttentionInterface.register(_name, attend)
