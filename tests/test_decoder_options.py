"""The decoder for transformers: options of single layers, how long documents are said to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import forward_calls
from test_transformers import MODELS, SIZES, STAGES, VOCABULARY, cache_of, made, tokens

from mtagen import SpecError
from mtagen.call import Call
from mtagen.nn import FrequencyScaling
from mtagen.transformers import MtaConfig, MtaForCausalLM, MtaModel
from mtagen.transformers.configuration import LAYER_OPTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

# A value of each option that a layer may have of its own, none the default; and what the layer is then made with.
OVERRIDES: dict[str, tuple[Any, Any]] = {
    "kernel": ([2, 3], (2, 3)),
    "mixed_heads": (2, 2),
    "post_kernel": ([2, 2], (2, 2)),
    "post_mixed_heads": (4, 4),
    "dynamic_ranks": ([2, 1], (2, 1)),
    "post_dynamic_ranks": ([0, 2], (0, 2)),
    "key_padding": ("left", "left"),
    "group_norm": (True, True),
    "depth_rescale": (True, 1),
    "gate": ("channel", "channel"),
    "rope_theta": (None, None),
    "frequency_scaling": ({"factor": 2.0}, FrequencyScaling(2.0)),
    "dropout": (0.25, 0.25),
    "window": ([4, -1], (4, -1)),
    "scores": ("3*tanh(s/3)", "3*tanh(s/3)"),
    "convolved": ("2*tanh(s/2)", "2*tanh(s/2)"),
    "logits": ("50*tanh(s/50)", "50*tanh(s/50)"),
    "visible": ("i // 4 == j // 4", "i // 4 == j // 4"),
    "parameters": ({"slopes": "h"}, {"slopes": "h"}),
    "sink": (True, True),
    "mask": ("output", "output"),
}


# Options of single layers.


def test_every_option_of_a_layer_is_tried() -> None:
    assert set(OVERRIDES) == set(LAYER_OPTIONS)


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_option_of_one_layer_is_that_of_no_other(name: str) -> None:
    given, expected = OVERRIDES[name]
    needed = {"group_norm": True} if name == "depth_rescale" else {}
    plain = MtaConfig(**SIZES | needed)
    config = MtaConfig(**SIZES | needed, layer_overrides={1: {name: given}})
    stored = MtaConfig.from_dict(config.to_dict())  # as JSON has it
    for one in (config, stored):
        assert one.attention_options(0) == plain.attention_options(0)
        assert one.attention_options(1) == plain.attention_options(1) | {name: expected}


def test_layers_are_made_with_their_own_options() -> None:
    """And compute with them: a token hears of another unless all layers let it see itself alone."""
    own, x = {"window": (0, 0)}, tokens(1, 9)
    changed = x.clone()
    changed[0, 0] = x[0, 0] % (VOCABULARY - 1) + 1
    for layers in ((0, 1), (1,), (0,)):
        model = made({"kernel": None, "layer_overrides": dict.fromkeys(layers, own)})
        lefts = [layer.self_attn.op.plan.spec.left for layer in model.model.layers]
        assert lefts == [0 if layer in layers else None for layer in range(2)]
        hears = (model(x).logits - model(changed).logits)[0, 1:].any()
        assert bool(hears) == (len(layers) < 2)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_sees_later_keys_is_enough(layer: int) -> None:
    """Any layer: then there is no cache, and no language model."""
    options = {"causal": False, "window": (-1, 0), "layer_overrides": {layer: {"window": (-1, 2)}}}
    with pytest.raises(SpecError, match="causal: got False; the model would predict a token from itself"):
        MtaForCausalLM(MtaConfig(**SIZES | options))
    model = made(STAGES | options, MtaModel)
    assert model.sees_later_keys
    with torch.no_grad():
        assert cache_of(model(tokens(1, 5))) is None
    blind = made(STAGES | options | {"layer_overrides": None}, MtaModel)
    assert not blind.sees_later_keys


# How long the longest document is said to be.


def longest(model: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> set[tuple[int, int]]:
    """What all layers tell their kernels."""
    calls = forward_calls(monkeypatch)
    model(**given)
    told = [(x.max_q, x.max_k) for call in calls for x in call if isinstance(x, Call)]
    assert len(told) == SIZES["num_hidden_layers"]
    return set(told)


@pytest.mark.parametrize(("stated", "expected"), [({}, 12), ({"max_length_q": 7, "max_length_k": 7}, 7)], ids=str)
def test_stated_documents(stated: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they are said to be; by default none is longer than all tokens."""
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    given = {"input_ids": tokens(1, 12), "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    assert longest(made(MODELS["stages"]), monkeypatch, **given, **stated) == {(expected, expected)}


@pytest.mark.parametrize("how", ["attention_mask", "position_ids", "seq_idx"])
def test_documents_that_are_found(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the longest is: memory may grow with it."""
    given = {
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]]),
        "seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 4, 5]]),
    }
    assert longest(made(MODELS["stages"]), monkeypatch, input_ids=tokens(2, 6), **{how: given[how]}) == {(4, 4)}
