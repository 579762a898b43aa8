"""Models whose weights are elsewhere until a module is called: offloaded, dispatched, or not yet made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from test_retrofit import STAGES, close, randomise
from test_retrofit import made as trained_model
from test_transformers import SIZES, made, tokens

from mtagen import InputError
from mtagen.nn import MultiTokenAttention
from mtagen.transformers import MtaForCausalLM, retrofit

pytestmark = pytest.mark.usefixtures("one_thread")

# Weights of every kind: of the layer itself, and of each of its modules.
OPTIONS: dict[str, Any] = {
    "kernel": (3, 5),
    "mixed_heads": 4,
    "post_mixed_heads": 2,
    "group_norm": True,
    "gate": "channel",
    "scores": "s - slopes[h] * (i - j)",
    "parameters": {"slopes": "h"},
    "sink": True,
    "layer_overrides": {1: {"kernel": None, "post_mixed_heads": 4, "sink": False}},
}
CPU = torch.device("cpu")
# One layer on the CPU, the others on a disk.
PLACES = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}


def decoder() -> MtaForCausalLM:
    model = made(OPTIONS)
    with torch.no_grad():
        for layer in model.model.layers:
            for x in (layer.self_attn.sink, layer.self_attn.score_parameters["slopes"]):
                if x is not None:
                    x.normal_()
    return model


def retrofitted(family: str = "gpt_oss") -> Any:
    """By default with sinks, which are weights of its own attention, beside those of the stages."""
    return randomise(retrofit(trained_model(family), **STAGES))


MADE = {"decoder": decoder, "retrofitted": retrofitted}


def dispatched(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / "saved")
    places = PLACES | {"lm_head": "cpu"}
    return type(model).from_pretrained(folder / "saved", device_map=places, offload_folder=folder / "weights")


def from_the_meta_device(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder / "saved")
    with init_empty_weights():
        empty = type(model)(copy.deepcopy(model.config)).eval()
    assert all(x.is_meta for x in empty.parameters())
    empty.tie_weights()
    places = PLACES | {"lm_head": "cpu"}
    return load_checkpoint_and_dispatch(empty, folder / "saved", device_map=places, offload_folder=folder / "weights")


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "cpu_offload": lambda model, folder: cpu_offload(copy.deepcopy(model), execution_device=CPU),
    "disk_offload": lambda model, folder: disk_offload(copy.deepcopy(model), folder, execution_device=CPU),
    "device_map": dispatched,
    "meta": from_the_meta_device,
}


@pytest.mark.parametrize("whole", MADE.values(), ids=MADE)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_same_tokens(way: Callable[[Any, Path], Any], whole: Callable[[], Any], tmp_path: Path) -> None:
    """Calls with and without padding, and generation with a cache."""
    model = whole()
    offloaded = way(model, tmp_path)
    x, mask = tokens(2, 9), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    with torch.no_grad():
        for given in ({}, {"attention_mask": mask}):
            close(offloaded(x, **given).logits, model(x, **given).logits)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(offloaded.generate(x, **options), model.generate(x, **options))
    assert all(x.is_meta for x in offloaded.model.layers[1].parameters())  # so they have been brought for each call


def layer() -> MultiTokenAttention:
    return cpu_offload(decoder().model.layers[0].self_attn, execution_device=CPU)


def test_cache_of_an_offloaded_layer() -> None:
    """Its parameters are on no device; a projected key is."""
    one, x = layer(), torch.randn(2, 9, SIZES["hidden_size"])
    with torch.no_grad():
        cache = one.new_cache(2, 9, like=x)
        assert (cache.keys.device, cache.queries.dtype) == (CPU, torch.float32)
        parts = [one(part, cache=cache) for part in x.split([4, 5], 1)]
        close(torch.cat(parts, 1), one(x))


def test_cache_without_a_key() -> None:
    one, x = layer(), torch.randn(2, 9, SIZES["hidden_size"])
    with (
        torch.no_grad(),
        pytest.raises(InputError, match=r"cache\.keys\.device: got .*meta.*new_cache\(\.\.\., like=x\)"),
    ):
        one(x, cache=one.new_cache(2, 9))


@pytest.mark.parametrize("given", [{"dtype": torch.float64}, {"device": "meta"}], ids=str)
def test_what_is_asked_for_comes_first(given: dict[str, Any]) -> None:
    one, x = decoder().model.layers[0].self_attn, torch.randn(2, 9, SIZES["hidden_size"])
    cache = one.new_cache(2, 9, like=x, **given)
    assert all(getattr(cache.keys, name) == getattr(torch.empty(0, **given), name) for name in given)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [decoder, partial(retrofitted, "gemma2")], ids=MADE)
@pytest.mark.parametrize("way", ["cpu_offload", "two devices"])
def test_same_tokens_on_gpus(way: str, whole: Callable[[], Any], tmp_path: Path) -> None:
    """Offloaded to the CPU, or with a layer on each of two devices."""
    model = whole().to(torch.bfloat16)
    if way == "cpu_offload":
        spread = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cuda", 0))
    elif torch.cuda.device_count() > 1:
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)  # its rotation has frequencies in fp32, unlike the cast model's
        places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 0}
        if hasattr(model.model, "rotary_emb"):
            places["model.rotary_emb"] = 0
        spread = type(model).from_pretrained(tmp_path, device_map=places)
    else:
        pytest.skip("needs two GPUs")
    x, mask = tokens(2, 9).cuda(), torch.tensor([[0] * 4 + [1] * 5, [1] * 9]).cuda()
    model.cuda()
    with torch.no_grad():
        for given in ({}, {"attention_mask": mask}):
            assert torch.equal(spread(x, **given).logits, model(x, **given).logits)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(spread.generate(x, **options), model.generate(x, **options))
