"""Adapters of PEFT: what they train, save and merge of a model of mtagen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_transformers import MODELS, close, llama, made, tokens
from torch import Tensor, nn

from mtagen import InputError
from mtagen.nn import MultiTokenAttention
from mtagen.nn.stages import Stages
from mtagen.transformers import MtaForCausalLM, lora_options, retrofit

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_thread")

STAGES: dict[str, Any] = {"kernel": (3, 5), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2}
BIASES: dict[str, Any] = {"scores": "s - slopes[h] * (i - j)", "parameters": {"slopes": "h"}, "sink": True}
X = tokens(2, 9)


def retrofitted() -> MtaForCausalLM:
    return retrofit(llama(), **STAGES)


BASES = {"retrofitted": retrofitted, "paper": lambda: made(MODELS["paper"]), "biases": lambda: made(BIASES)}


def stages_of(model: nn.Module) -> dict[str, Tensor]:
    """All weights of the layers that are of no projection."""
    return {
        f"{name}.{key}": x.detach().clone()
        for name, layer in model.named_modules()
        if isinstance(layer, MultiTokenAttention)
        for key, x in layer.named_parameters()
        if key.split(".")[0] not in ("wq", "wk", "wv", "wo")
    }


def trained(base: MtaForCausalLM, **options: Any) -> Any:
    """A copy with an adapter that has made some steps."""
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, **options))
    parameters = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.Adam(parameters, 1e-2)
    for _ in range(3):
        model(X, labels=X).loss.backward()
        optimizer.step()
        assert all(x.grad is not None for x in parameters)
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """PyTorch's CPU rounds a Linear with a bias, as the gate is, in another way if the bias needs a gradient."""
    return model.requires_grad_(False)(X).logits


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_saved_reloaded_merged(base: Any, tmp_path: Path) -> None:
    """Every weight of a stage is trained, is in the adapter's file, and is the layer's own after the merge."""
    base = base()
    before, names = logits(base), [*base.state_dict()]
    model = trained(base, **lora_options())
    after = logits(model)
    assert (after - before).abs().max() > 0.1
    with model.disable_adapter():
        close(logits(model), before)
    assert torch.equal(logits(copy.deepcopy(model)), after)

    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    start = "base_model.model."
    stages = {name.removeprefix(start).replace(".stages.", "."): x for name, x in saved.items() if "lora" not in name}
    assert stages.keys() == stages_of(base).keys()
    assert not any(torch.equal(x, stages[name]) for name, x in stages_of(base).items())

    reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits(reloaded), after)
    merged = reloaded.merge_and_unload()
    close(logits(merged), after)
    torch.testing.assert_close(stages_of(merged), stages, rtol=0, atol=0)
    assert [*merged.state_dict()] == names
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(MtaForCausalLM.from_pretrained(tmp_path / "merged")), logits(merged))


def test_stages_that_are_not_named_are_frozen(tmp_path: Path) -> None:
    """What ``lora_options`` is for: PEFT finds no module of a parameter's name, and says nothing."""
    base = retrofitted()
    model = trained(base, target_modules=["wq"], modules_to_save=["mta_kernel"])
    assert not any(x.requires_grad for name, x in model.named_parameters() if "lora" not in name)


def test_two_adapters() -> None:
    """Each has stages of its own."""
    base = retrofitted()
    model = trained(base, **lora_options())
    first = logits(model)
    model.add_adapter("second", peft.LoraConfig(r=4, **lora_options()))
    model.set_adapter("second")
    close(logits(model), logits(base))
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_generation() -> None:
    """Steps with a cache use the adapter's stages."""
    model = trained(retrofitted(), **lora_options())
    made_with = model.generate(input_ids=X, max_new_tokens=8, do_sample=False)
    without = model.generate(input_ids=X, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(made_with, without)
    assert made_with.shape == (2, 17)


def test_prefixes_without_queries_are_refused() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(InputError, match="cache: got 'DynamicCache'; the convolutions need a cache that holds queries"):
        peft.get_peft_model(retrofitted(), config)(input_ids=X)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["q_proj", "v_proj"], ["wq", "wv"]),
        (["wk", "o_proj", "up_proj"], ["wk", "wo", "up_proj"]),
        ("all-linear", ["wq", "wk", "wv", "wo", "gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_names_of_projections(given: Any, expected: list[str]) -> None:
    model = peft.get_peft_model(retrofitted(), peft.LoraConfig(**lora_options(given)))
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert adapted == {*expected}


# The module that stands for the weights.


def layer() -> MultiTokenAttention:
    torch.manual_seed(0)
    made = MultiTokenAttention(64, 4, **STAGES, **BIASES, group_norm=True, gate="scalar")
    with torch.no_grad():
        for x in made.parameters():
            x += 0.1 * torch.randn(x.shape)
    return made


def test_stages_have_no_parameters() -> None:
    """State dicts, and the order in which optimizers number parameters, are what they were without the module."""
    one = layer()
    assert [*one.stages.parameters()] == []
    assert [name for name, _ in one.named_parameters()][:4] == [
        "mta_kernel",
        "mta_kernel_after_sm",
        "head_kernel",
        "sink",
    ]
    assert not any("stages" in name for name in one.state_dict())


def test_copies_of_stages() -> None:
    """A copy of the layer has a view of its own; a copy of the stages alone has weights of its own."""
    one = layer()
    other = copy.deepcopy(one)
    assert other.stages.layer is other
    alone = copy.deepcopy(one.stages)
    torch.testing.assert_close(alone(), one.stages(), rtol=0, atol=0)
    with torch.no_grad():
        for x in alone.parameters():
            x += 1
    assert one.stages()["weight"].equal(other.stages()["weight"])
    expected = copy.deepcopy(alone)()
    one.stages = alone
    assert isinstance(one.stages, Stages)
    assert one.stages.layer is one
    torch.testing.assert_close(one.stages(), expected, rtol=0, atol=0)
    assert one.mta_kernel.equal(other.mta_kernel + 1)
