"""Models of mtagen under tools of low precision, beside a Llama of the same size under the same tool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mtagen.nn import MultiTokenAttention
from mtagen.transformers import MtaConfig, MtaForCausalLM, lora_options, retrofit
from mtagen.transformers.stages import ScoreStages

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
STAGES: dict[str, Any] = {"kernel": (3, 5), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
PROJECTIONS = ("wq", "wk", "wv", "wo")
LINEARS = SIZES["num_hidden_layers"] * 7  # without the output layer
X = torch.randint(1, 64, (4, 33), generator=torch.Generator().manual_seed(1))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().to(torch.bfloat16)


def randomised(model: Any) -> Any:
    """The model with stages as after some training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for x in stages_of(model).values():
            x += 0.1 * torch.randn_like(x)
    return model


def retrofitted(**options: Any) -> Any:
    return randomised(retrofit(llama(), **STAGES, **options))


def decoder() -> MtaForCausalLM:
    torch.manual_seed(0)
    config = MtaConfig(**SIZES, **STAGES, group_norm=True, gate="channel")
    return randomised(MtaForCausalLM(config).eval().to(torch.bfloat16))


with_stages = pytest.mark.parametrize("with_stages", [retrofitted, decoder], ids=lambda made: made.__name__)


def stages_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of stages, and of the layer's norm and gate."""
    return {
        f"{name}.{key}": x
        for name, module in model.named_modules()
        if isinstance(module, (MultiTokenAttention, ScoreStages))
        for key, x in module.named_parameters()
        if key.split(".")[0] not in PROJECTIONS
    }


# The tools. Each returns the model that it made, and tells the modules that it quantised.

Quantised = tuple[PreTrainedModel, Callable[[nn.Module], bool]]


def bitsandbytes(model: PreTrainedModel, folder: Path, kind: str, **options: Any) -> Quantised:
    tool = pytest.importorskip("bitsandbytes")
    model.save_pretrained(folder)
    config = BitsAndBytesConfig(**options)
    quantised = type(model).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    return quantised, lambda x: isinstance(x, getattr(tool.nn, kind))


def nf4(model: PreTrainedModel, folder: Path) -> Quantised:
    return bitsandbytes(model, folder, "Linear4bit", **NF4)


def llm_int8(model: PreTrainedModel, folder: Path) -> Quantised:
    return bitsandbytes(model, folder, "Linear8bitLt", load_in_8bit=True)


def quanto(model: PreTrainedModel, folder: Path) -> Quantised:
    tool = pytest.importorskip("optimum.quanto")
    tool.quantize(model, weights=tool.qint8, exclude="lm_head")
    tool.freeze(model)
    return model, lambda x: isinstance(x, tool.QLinear)


def torchao(model: PreTrainedModel, config: str) -> Quantised:
    tool = pytest.importorskip("torchao.quantization")
    tool.quantize_(model, getattr(tool, config)(), filter_fn=is_inner)
    return model, lambda x: isinstance(x, nn.Linear) and type(x.weight) is not nn.Parameter


def int8_weights(model: PreTrainedModel, folder: Path) -> Quantised:
    return torchao(model, "Int8WeightOnlyConfig")


def int8_activations(model: PreTrainedModel, folder: Path) -> Quantised:
    return torchao(model, "Int8DynamicActivationInt8WeightConfig")


def dynamic(model: PreTrainedModel, folder: Path) -> Quantised:
    tool = torch.ao.quantization
    kinds = {name: tool.default_dynamic_qconfig for name, x in model.named_modules() if is_inner(x, name)}
    return tool.quantize_dynamic(model.float(), kinds), lambda x: isinstance(x, torch.ao.nn.quantized.dynamic.Linear)


def float8(model: PreTrainedModel, folder: Path) -> Quantised:
    tool = pytest.importorskip("torchao.float8")
    config = tool.Float8LinearConfig(emulate=True)  # a CPU has no products of float8
    tool.convert_to_float8_training(model, config=config, module_filter_fn=is_inner)
    return model, lambda x: type(x).__name__ == "Float8Linear"


def is_inner(x: nn.Module, name: str) -> bool:
    """Whether a module is a Linear, but not the output layer, which bitsandbytes leaves as it is."""
    return isinstance(x, nn.Linear) and name != "lm_head"


Tool = Callable[[PreTrainedModel, Path], Quantised]
TOOLS = [nf4, llm_int8, quanto, int8_weights, int8_activations, dynamic, float8]
every_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)


@pytest.mark.filterwarnings("ignore")  # of the tools
@with_stages
@every_tool
def test_errs_as_a_llama_does(tool: Tool, with_stages: Callable[[], Any], tmp_path: Path) -> None:
    """Logits err as those of a Llama do, every Linear is quantised, and no weight of a stage changes."""
    errors = {}
    for name, model in (("llama", llama()), ("mtagen", with_stages())):
        with torch.no_grad():
            expected = copy.deepcopy(model).double()(X).logits
            quantised, is_quantised = tool(copy.deepcopy(model), tmp_path / name)
            errors[name] = error(quantised(X).logits, expected)
        assert sum(is_quantised(x) for x in quantised.modules()) == LINEARS
    stages, kept = stages_of(model), stages_of(quantised)
    assert stages.keys() == kept.keys()
    assert all(torch.equal(x, kept[key].to(x.dtype)) for key, x in stages.items())
    assert 1e-3 < errors["llama"] < 0.5
    assert errors["mtagen"] <= 1.5 * errors["llama"], errors

    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    made = quantised.eval().generate(X[:, :9], **options)
    with torch.no_grad():
        whole = quantised(made.sequences).logits[:, 8:-1]
    assert error(torch.stack(made.logits, 1), whole) <= 2 * errors["mtagen"]  # each of the two errs by as much


def error(x: Tensor, expected: Tensor) -> Tensor:
    """The mean error of logits, relative to them."""
    return (x - expected).square().mean().sqrt() / expected.square().mean().sqrt()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", [x for x in TOOLS if x is not quanto], ids=lambda tool: tool.__name__)
def test_retrofitted_after_quantisation(tool: Tool, tmp_path: Path) -> None:
    """The copy errs as the quantised Llama does, and its stages have the dtype of what is not quantised.

    Weights of optimum-quanto cannot be copied.
    """
    theirs, is_quantised = tool(llama(), tmp_path)
    ours = retrofit(theirs, **STAGES)
    assert sum(is_quantised(x) for x in ours.modules()) == LINEARS
    assert {x.dtype for x in stages_of(ours).values()} == {theirs.model.norm.weight.dtype}
    with torch.no_grad():
        expected = llama().double()(X).logits
        limit = 1.5 * error(theirs(X).logits, expected)
        assert error(ours(X).logits, expected) <= limit
        assert error(randomised(ours)(X).logits, expected) > limit


@pytest.mark.filterwarnings("ignore")
def test_float8_training(tmp_path: Path) -> None:
    """Every weight has a gradient, near to that without float8."""
    model = retrofitted().float().train()
    low, _ = float8(copy.deepcopy(model), tmp_path)
    for x in (model, low):
        x(X, labels=X).loss.backward()
    gradients, expected = ({key: x.grad for key, x in each.named_parameters()} for each in (low, model))
    assert gradients.keys() == expected.keys()
    for key, x in expected.items():
        assert torch.cosine_similarity(gradients[key].flatten(), x.flatten(), 0) > 0.8, key


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prepared", [False, True], ids=["bf16", "prepared"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_qlora(device: str, bits: int, prepared: bool, tmp_path: Path) -> None:
    """The recipe of QLoRA: a bf16 checkpoint in a few bits, adapters and stages that train.

    ``prepare_model_for_kbit_training`` makes all but the quantised weights fp32, so that autocast
    gets fp32 from their modules. ``compute_dtype`` is what a GPU has by default.
    """
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    checkpoint = retrofitted(compute_dtype="bfloat16")
    checkpoint.save_pretrained(tmp_path / "base")

    def load() -> Any:
        config = BitsAndBytesConfig(**(NF4 if bits == 4 else {"load_in_8bit": True}))
        options = {"dtype": torch.bfloat16, "device_map": {"": device}, "quantization_config": config}
        model = type(checkpoint).from_pretrained(tmp_path / "base", **options)
        return peft.prepare_model_for_kbit_training(model) if prepared else model

    x = X.to(device)
    base = load()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **lora_options(base)))
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], 1e-2)
    losses = []
    for _ in range(4):
        with torch.autocast(device, torch.bfloat16):
            losses.append(model(x, labels=x).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "adapter")
    reloaded = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter")
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=prepared):
        logits = model(x).logits
        assert torch.equal(reloaded(x).logits, logits)
        assert model.generate(input_ids=x[:, :9], max_new_tokens=3, do_sample=False).shape == (4, 12)
    # bitsandbytes 0.50 merges into 4 bits wrongly on a CPU, a Llama too; the unquantised checkpoint takes adapters.
    merged = stages_of(peft.PeftModel.from_pretrained(checkpoint, tmp_path / "adapter").merge_and_unload())
    start, copied = "base_model.model.", "modules_to_save.default."
    trained = {name: x.to("cpu", torch.bfloat16) for name, x in model.named_parameters() if copied in name}
    trained = {name.removeprefix(start).replace(copied, ""): x for name, x in trained.items()}
    assert merged.keys() == trained.keys()
    assert all(torch.equal(x, trained[name]) for name, x in merged.items())
