"""The signatures that take an operator's options have the fields of Spec, with its defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import mtagen
from mtagen import cli
from mtagen.nn import MultiTokenAttention
from mtagen.spec import OPTIONS, RULES, STAGES, Spec

DEFAULTS = {name: x.default for name, x in inspect.signature(Spec).parameters.items()}


def defaults(function: Callable[..., Any], **others: Any) -> dict[str, Any]:
    """The options among a function's parameters, with their defaults; ``others`` are known to differ from Spec's."""
    taken = {name: x.default for name, x in inspect.signature(function).parameters.items() if name in DEFAULTS}
    for name, default in others.items():
        assert taken.pop(name) == default, name
    for name, default in taken.items():
        assert default == DEFAULTS[name], name
    return taken | others


def test_constants() -> None:
    assert set(DEFAULTS) - set(OPTIONS) == {"packed", "dropout", "page_size"}
    assert set(RULES) == {"causal", "window", "key_padding", "mask", "scores", "convolved", "logits", "visible"}
    assert set(STAGES.values()) <= set(OPTIONS)


def test_build() -> None:
    """Its dtype may be left to the device."""
    assert set(defaults(mtagen.build, dtype=None, parameters=None)) == set(DEFAULTS)


def test_reference() -> None:
    """It takes the parameters and the sink themselves."""
    assert set(defaults(mtagen.reference, parameters=None, sink=None)) == {*RULES, "parameters", "sink"}


def test_command_line() -> None:
    """Options of the command line that are no numbers are text; each parameter and constant is an option of its own."""
    assert set(defaults(cli._spec, post_kernel="none")) == set(DEFAULTS) - {"parameters", "constants"}
    assert set(defaults(cli.tune, post_kernel="none")) <= set(DEFAULTS)


def test_layer() -> None:
    """Its values have the head dim of its keys. Its dtype is that of parameters, and its dropout a probability.

    Callers freeze what it holds by requires_grad_.
    """
    others = {"kernel": (6, 11), "head_dim": None, "dtype": None, "dropout": 0.0, "parameters": None}
    assert set(defaults(MultiTokenAttention, **others)) == {*OPTIONS, "dropout"} - {"value_head_dim", "constants"}


def test_decoders() -> None:
    """The options of a decoder's attention are those of the layer, and may differ from layer to layer."""
    pytest.importorskip("transformers")
    from mtagen.transformers import MtaConfig, retrofit
    from mtagen.transformers.configuration import LAYER_OPTIONS

    of_layer = set(inspect.signature(MultiTokenAttention).parameters)
    options = defaults(MtaConfig, kernel=(6, 11), head_dim=None, dropout=0.0, parameters=None)
    assert set(options) == (of_layer & set(DEFAULTS)) - {"dtype"}
    fixed = {"dim", "n_heads", "n_kv_heads", "head_dim", "causal", "backend", "compute_dtype"}
    assert set(LAYER_OPTIONS) == of_layer - fixed - {"context_parallel", "device", "dtype"}
    config = MtaConfig(num_hidden_layers=1)
    assert set(config.attention_options(0)) == of_layer - {"dim", "n_heads", "context_parallel", "device", "dtype"}
    assert set(defaults(retrofit, kernel=(6, 11))) == {*STAGES.values(), "key_padding", "mask"}
