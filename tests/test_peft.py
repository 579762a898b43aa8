"""Adapters of PEFT: what they train, save and merge of a model of mtagen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_retrofit import STAGES, close
from test_retrofit import made as trained_model
from test_transformers import MODELS, tokens
from test_transformers import made as decoder
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mtagen import InputError, SpecError
from mtagen.nn import MultiTokenAttention
from mtagen.nn.stages import Stages
from mtagen.transformers import lora_options, retrofit
from mtagen.transformers.families import FAMILIES
from mtagen.transformers.stages import ScoreStages

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_thread")

BIASES: dict[str, Any] = {"scores": "s - slopes[h] * (i - j)", "parameters": {"slopes": "h"}, "sink": True}
X = tokens(2, 9)


def retrofitted(family: str = "llama") -> Any:
    return retrofit(trained_model(family), **STAGES, layer_overrides={1: {"kernel": None}})


BASES = {
    "llama": retrofitted,
    "gpt_oss": lambda: retrofitted("gpt_oss"),
    "paper": lambda: decoder(MODELS["paper"]),
    "biases": lambda: decoder(BIASES),
}


def stages_of(model: nn.Module) -> dict[str, Tensor]:
    """All weights of the layers that are of no projection, and those of stages in other attention."""
    return {
        f"{name}.{key}": x.detach().clone()
        for name, module in model.named_modules()
        if isinstance(module, (MultiTokenAttention, ScoreStages))
        for key, x in module.named_parameters()
        if key.split(".")[0] not in ("wq", "wk", "wv", "wo")
    }


def trained(base: Any, **options: Any) -> Any:
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
    model = trained(base, **lora_options(base))
    after = logits(model)
    assert (after - before).abs().max() > 0.1
    with model.disable_adapter():
        close(logits(model), before)
    assert torch.equal(logits(copy.deepcopy(model)), after)

    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    start = "base_model.model."
    saved = {name.removeprefix(start): x for name, x in saved.items() if "lora" not in name}
    if base.config.model_type == "mtagen":  # whose layers hold the weights under the names of the authors
        saved = {name.replace(".stages.", "."): x for name, x in saved.items()}
    assert saved.keys() == stages_of(base).keys()
    assert not any(torch.equal(x, saved[name]) for name, x in stages_of(base).items())

    reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    assert torch.equal(logits(reloaded), after)
    merged = reloaded.merge_and_unload()
    close(logits(merged), after)
    torch.testing.assert_close(stages_of(merged), saved, rtol=0, atol=0)
    assert [*merged.state_dict()] == names
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(merged))


def test_stages_that_are_not_named_are_frozen() -> None:
    """What ``lora_options`` is for: PEFT finds no module of a parameter's name, and says nothing."""
    model = trained(decoder(STAGES), target_modules=["wq"], modules_to_save=["mta_kernel"])
    assert not any(x.requires_grad for name, x in model.named_parameters() if "lora" not in name)


def test_two_adapters() -> None:
    """Each has stages of its own."""
    base = retrofitted()
    model = trained(base, **lora_options(base))
    first = logits(model)
    model.add_adapter("second", peft.LoraConfig(r=4, **lora_options(base)))
    model.set_adapter("second")
    close(logits(model), logits(base))
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_generation() -> None:
    """Steps with a cache use the adapter's stages."""
    base = retrofitted("gemma2")
    model = trained(base, **lora_options(base))
    made_with = model.generate(input_ids=X, max_new_tokens=8, do_sample=False)
    without = model.generate(input_ids=X, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(made_with, without)
    assert made_with.shape == (2, 17)


def test_prefixes_without_queries_are_refused() -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(InputError, match="cache: got 'DynamicCache'; the convolutions need a cache that holds queries"):
        peft.get_peft_model(retrofitted(), config)(input_ids=X)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_in_each_family(family: str) -> None:
    """All projections of attention, and the stages; no router of experts, which Mixtral calls ``gate``."""
    base = retrofitted(family)
    projections = {name for name, x in base.named_modules() if isinstance(x, nn.Linear) and "self_attn." in name}
    model = peft.get_peft_model(base, peft.LoraConfig(**lora_options(base)))
    trains = {name.removeprefix("base_model.model.") for name, x in model.named_parameters() if x.requires_grad}
    assert {name.partition(".lora_")[0] for name in trains if ".lora_" in name} == projections
    others = {name.partition(".modules_to_save")[0] for name in trains if ".lora_" not in name}
    assert others == {f"model.layers.{i}.self_attn.stages" for i in range(2)}


@pytest.mark.parametrize(
    ("base", "attention"),
    [("llama", ["q_proj", "k_proj", "v_proj", "o_proj"]), ("paper", ["wq", "wk", "wv", "wo"])],
)
def test_adapters_of_all_linear_modules(base: str, attention: list[str]) -> None:
    """Not of the gate, which is none, nor of the output layer."""
    model = BASES[base]()
    options = {**lora_options(model), "target_modules": "all-linear"}
    names = [name for name, _ in peft.get_peft_model(model, peft.LoraConfig(**options)).named_parameters()]
    adapted = {name.partition(".lora_A")[0].rpartition(".")[2] for name in names if ".lora_A" in name}
    assert adapted == {*attention, "gate_proj", "up_proj", "down_proj"}


def test_names_in_other_modules() -> None:
    """A layer alone has no parent, and tools replace projections by modules that are no ``torch.nn.Linear``."""
    one = MultiTokenAttention(64, 4, gate="scalar")
    one.wv = nn.Identity()
    assert lora_options(one) == {"target_modules": ["wq", "wk", "wv", "wo"], "modules_to_save": ["gate", "stages"]}
    model = nn.ModuleDict({"0": one, "1": nn.ModuleDict({"gate": nn.Linear(4, 4)})})
    assert lora_options(model)["modules_to_save"] == ["0.gate", "0.stages"]


def test_models_without_stages_are_refused() -> None:
    """Also those whose stages an adapter has taken already."""
    base = retrofitted()
    options = lora_options(base)
    for model in (trained_model(), peft.get_peft_model(base, peft.LoraConfig(**options))):
        with pytest.raises(SpecError, match=f"model: got '{type(model).__name__}'; has no attention with stages"):
            lora_options(model)


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
