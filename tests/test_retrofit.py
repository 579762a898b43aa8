"""Stages in the attention of other models: each family generates the same tokens with stages that are the identity."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from mtagen import InputError, SpecError  # noqa: E402
from mtagen.transformers import MtaCache, retrofit  # noqa: E402
from mtagen.transformers.cache import CACHE_NAME  # noqa: E402
from mtagen.transformers.families import FAMILIES  # noqa: E402
from mtagen.transformers.stages import POSITIONAL, ScoreStages  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 60
STAGES: dict[str, Any] = {"kernel": (3, 5), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# Models by the model types of transformers, with options that reach every part of their attention.
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "gemma2": {**MIXED, "tie_word_embeddings": False, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7},
    "gemma3_text": {**MIXED, "tie_word_embeddings": False, "query_pre_attn_scalar": 7},
    "gpt_oss": {**MIXED, **EXPERTS, "rope_parameters": YARN},
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "mixtral": {**EXPERTS, "sliding_window": 5},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {"attention_bias": True},
    "olmo3": MIXED,
    "phi": {
        "qk_layernorm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.5},
    "qwen2": {**MIXED, "use_sliding_window": True},
    "qwen3": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def made(family: str = "llama", automatic: Any = None, **options: Any) -> Any:
    """A model of a family whose biases, norms and sinks are no constants."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | MODELS[family] | options)
    kind = automatic or transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()  # some versions cap no scores in SDPA
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def randomise(model: Any) -> Any:
    """Stages that pass on what they get would hide what they reach."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ScoreStages):
                for parameter in module.parameters():
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def generate(model: Any, x: Tensor, **options: Any) -> Tensor:
    return model.generate(x, **{"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options)


def close(left: Tensor, right: Tensor) -> None:
    """As fp32 rounds what is summed in another order, in a model of several layers."""
    scale = right.abs().max().item()
    torch.testing.assert_close(left, right, rtol=0, atol=3e-5 * max(scale, 1))


def test_every_family_is_tried() -> None:
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_before(family: str) -> None:
    """And others from another prompt, and with stages that change something."""
    theirs, x = made(family), tokens(3, 11)
    ours = retrofit(theirs, **STAGES)
    assert isinstance(ours, type(theirs))
    assert (*inspect.signature(theirs.model.forward).parameters,)[: len(POSITIONAL)] == POSITIONAL
    expected = generate(theirs, x)
    assert len({tuple(row.tolist()) for row in expected[:, 11:]}) == 3
    assert torch.equal(generate(ours, x), expected)
    with torch.no_grad():
        close(ours(x).logits, theirs(x).logits)
    assert not torch.equal(generate(randomise(ours), x), expected)


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_scaled_frequencies(rope_type: str) -> None:
    """Also beyond the length from which on they change."""
    scaling = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 16}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 2.0} if rope_type == "llama3" else {}
    scaling |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8} if rope_type == "longrope" else {}
    options = {"max_position_embeddings": 16, "rope_parameters": {**PLAIN, **scaling}}
    theirs, x = made("llama", **options), tokens(2, 11)
    ours, expected = retrofit(theirs, **STAGES), generate(theirs, x)
    assert torch.equal(generate(ours, x), expected)
    unscaled = made("llama", rope_parameters=PLAIN)
    unscaled.load_state_dict(theirs.state_dict())
    assert not torch.equal(generate(unscaled, x), expected)


# Padding, documents, caches.

LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 11])


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama"])
def test_padded_prompts(family: str) -> None:
    """As each prompt alone, with and without a cache, and by beams."""
    ours, x = randomise(retrofit(made(family), **STAGES)), tokens(2, 11)
    together = generate(ours, x, attention_mask=LEFT)
    for row, real, out in zip(x, LEFT.bool(), together, strict=True):
        assert torch.equal(out[11:], generate(ours, row[real][None])[0, real.sum() :])
    assert torch.equal(generate(ours, x, attention_mask=LEFT, use_cache=False), together)
    beams = {"attention_mask": LEFT, "num_beams": 2}
    assert torch.equal(generate(ours, x, **beams), generate(ours, x, **beams, use_cache=False))


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_packed_documents(family: str) -> None:
    """And their gradients, those of sinks and stages too."""
    ours = randomise(retrofit(made(family), **STAGES))
    documents = [tokens(n)[:n].tolist() for n in (7, 1, 12)]
    for how in ("position_ids", "flash_attn_kwargs"):
        by_position = how == "position_ids"
        given = {"return_position_ids": by_position, "return_flash_attn_kwargs": not by_position}
        collate = transformers.DataCollatorWithFlattening(**given, return_tensors="pt")
        batch = collate([{"input_ids": document} for document in documents])
        del batch["labels"]
        ours.zero_grad()
        packed = ours(**batch, use_cache=False).logits[0]
        packed.sin().sum().backward()
        got = {name: x.grad.clone() for name, x in ours.named_parameters() if "self_attn" in name}
        ours.zero_grad()
        alone = torch.cat([ours(torch.tensor([document])).logits[0] for document in documents])
        alone.sin().sum().backward()
        close(packed, alone)
        for name, gradient in got.items():
            assert gradient.any(), name
            close(gradient, ours.get_parameter(name).grad)


@torch.no_grad()
def test_a_prompt_in_parts_and_back() -> None:
    ours, x = randomise(retrofit(made("gemma2"), **STAGES)), tokens(2, 20)
    expected, past, parts = ours(x).logits, MtaCache(ours.config), []
    past.activate_past_recording()
    for part in x.split([3, 9, 1, 7], 1):
        out = ours(part, **{CACHE_NAME: past})
        assert getattr(out, CACHE_NAME) is past
        parts.append(out.logits)
    close(torch.cat(parts, 1), expected)
    past.crop(-6)
    close(ours(x[:, 14:16], cache=past).logits, expected[:, 14:16])


def test_assistants() -> None:
    ours, x = randomise(retrofit(made("qwen2"), **STAGES)), tokens(1, 11)
    expected = generate(ours, x, pad_token_id=-1)
    for how in ({"assistant_model": made("llama")}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(generate(ours, x, pad_token_id=-1, **how), expected)


def test_continuous_batching() -> None:
    """Gives each request its tokens; layers with a window are refused, whose pages are given back."""
    ours = randomise(retrofit(made("qwen3"), **STAGES))
    prompts = [tokens(n).tolist() for n in (5, 19, 3)]
    options = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    size = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"  # in 5.17
    sizes = {size: 8, "num_blocks": 32, "max_batch_tokens": 16}
    batching = transformers.ContinuousBatchingConfig(**sizes, use_cuda_graph=False)
    for output in ours.generate_batch(prompts, options, batching).values():
        alone = generate(ours, torch.tensor([output.prompt_ids]), max_new_tokens=8)
        assert alone[0, len(output.prompt_ids) :].tolist() == output.generated_tokens
    with pytest.raises(InputError, match="sliding_window: got 5; transformers' pages hold no keys before a window"):
        retrofit(made("mistral")).generate_batch(prompts, options, batching)


# What transformers does with models.


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mixtral"])
def test_saved_and_loaded(family: str, tmp_path: Path) -> None:
    """From a checkpoint of the family, whose names of weights transformers may convert, to one of ours."""
    made(family).save_pretrained(tmp_path / "theirs")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    overrides = {1: {"kernel": None}}
    ours, x = randomise(retrofit(theirs, **STAGES, layer_overrides=overrides)), tokens(2, 11)
    ours.save_pretrained(tmp_path / "ours")
    loaded, how = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(how.values())
    assert type(loaded) is type(ours)
    expected = ours(x).logits
    for one in (loaded, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(one(x).logits, expected)
        assert one.model.layers[0].self_attn.stages.weight.any()
        assert one.model.layers[1].self_attn.stages.weight is None
    kind = transformers.AutoModelForSequenceClassification
    head = kind.from_pretrained(tmp_path / "ours")
    assert torch.equal(head.model(x).last_hidden_state, ours.model(x).last_hidden_state)


def test_loaded_with_a_further_stage(tmp_path: Path) -> None:
    """It starts as the identity; what was saved stays."""
    ours, x = randomise(retrofit(made(), kernel=(3, 5))), tokens(2, 11)
    ours.save_pretrained(tmp_path)
    loaded = type(ours).from_pretrained(tmp_path, post_kernel=(2, 3), post_mixed_heads=2)
    assert loaded.model.layers[0].self_attn.stages.post_weight.shape == (4, 2, 3)
    close(loaded(x).logits, ours(x).logits)
    narrow = type(ours).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert narrow.model.layers[0].self_attn.stages.weight.dtype == torch.bfloat16


HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


@pytest.mark.parametrize("head", HEADS)
def test_heads(head: str, tmp_path: Path) -> None:
    automatic = getattr(transformers, f"AutoModelFor{head}")
    theirs, x = made("qwen3", automatic), tokens(2, 11)
    ours, mask = retrofit(theirs, **STAGES), LEFT.flip(1)
    x = x * mask  # a text ends at its last token that is no padding
    real = slice(None) if head == "SequenceClassification" else mask.bool()
    with torch.no_grad():
        before, after = (model(x, attention_mask=mask, use_cache=False).to_tuple() for model in (theirs, ours))
    assert len(before) == len(after) == 1 + (head == "QuestionAnswering")
    for left, right in zip(after, before, strict=True):
        close(left[real], right[real])
    randomise(ours).save_pretrained(tmp_path)
    loaded = automatic.from_pretrained(tmp_path)
    assert type(loaded) is type(ours)
    assert torch.equal(loaded(x)[0], ours(x)[0])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_training() -> None:
    """With gradient checkpointing and dropout; stages, sinks and all other parts of attention learn."""
    ours, x = retrofit(made("gpt_oss", attention_dropout=0.1), **STAGES).train(), tokens(4, 12)
    ours.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    before = {name: parameter.clone() for name, parameter in ours.named_parameters() if "self_attn" in name}
    losses = []
    for _ in range(12):
        loss = ours(x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not [name for name, value in before.items() if torch.equal(ours.get_parameter(name), value)]


def test_a_copy_shares_nothing_with_the_model() -> None:
    theirs, x = made("gemma2"), tokens(2, 9)
    theirs.generation_config.max_new_tokens = 3
    before, kind = theirs(x).logits, type(theirs.config)
    ours = retrofit(theirs.train(), **STAGES)
    assert ours.training
    ours.generation_config.max_new_tokens = 5
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    assert torch.equal(theirs.eval()(x).logits, before)
    assert (theirs.generation_config.max_new_tokens, type(theirs.config)) == (3, kind)
    assert not hasattr(theirs.model.layers[0].self_attn, "stages")


def test_the_benchmark_of_generation_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "benchmarks/generation.py"
    runpy.run_path(str(path))["main"](dim=64, layers=1, batches=[2], prompt=5, count=3, json_file=tmp_path / "run.json")
    results = json.loads((tmp_path / "run.json").read_text())["results"]
    assert len(results) == 4
    assert all(result["same"] == 1 and result["tokens_per_s"] > 0 for result in results)
    assert capsys.readouterr().out.count("static") == 2


# Refusals.


@pytest.mark.parametrize(
    ("family", "changes", "options", "match"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, {}, "model: got 'attention in both directions'; its queries"),
        ("llama", {"head_dim": 12}, {}, "head_dim: got 12"),
        ("llama", {}, {"mixed_heads": 3}, "mixed_heads: got 3; must divide n_heads = 4"),
        ("llama", {}, {"layer_overrides": {0: {"gate": "scalar"}}}, "layer_overrides: got 'gate'; layer 0 cannot"),
        ("llama", {}, {"layer_overrides": {2: {"kernel": None}}}, r"layer_overrides: got '2'; .*no such layer"),
    ],
)
def test_what_cannot_be_retrofitted(family: str, changes: Any, options: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        retrofit(made(family, **changes), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_refuse_options_without_effect(family: str) -> None:
    family_type = f"mtagen_{family}"
    for name, value, match in (
        ("kernal", (2, 3), "this model has no option of that name; legal: kernel="),
        ("post_mixed_head", 2, "this model has no option of that name; legal: post_mixed_heads="),
        ("compute_dtyp", "float32", "this model has no option of that name; legal: compute_dtype="),
        ("group_norm", True, r"stages that are added to a model have no option of that name; legal: \('kernel', "),
    ):
        with pytest.raises(SpecError, match=f"{name}: got .*{match}"):
            transformers.AutoConfig.for_model(family_type, **{name: value})
    kept = transformers.AutoConfig.for_model(
        family_type, rope_theta=100.0, attention_dropout=0.0, group_norm=False, a_label="mine"
    )
    assert kept.a_label == "mine"


def test_only_known_classes_are_retrofitted() -> None:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY}
    for other in (transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), retrofit(made())):
        with pytest.raises(SpecError, match=f"model: got '{type(other).__name__}'; mtagen knows no place for stages"):
            retrofit(other)


def test_offloaded_models_are_not_retrofitted() -> None:
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(SpecError, match="model: got 'offloaded weights'; its stages would not be on the device"):
        retrofit(accelerate.cpu_offload(made(), execution_device="cpu"))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"output_attentions": True}, "output_attentions: got True; the kernels do not store"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, r"attention_mask\.shape: got \(1, 1, 5, 5\); .*masks of scores"),
        ({"attention_mask": {"full_attention": None}}, r"attention_mask\.shape: got 'dict'"),
        ({"cache": transformers.DynamicCache()}, "cache: got 'DynamicCache'; .*queries"),
        ({"use_cache": True}, "cache: got 'gradients enabled'"),
    ],
)
def test_illegal_calls(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        retrofit(made("gemma2"))(tokens(1, 5), **given)


def test_attention_is_mtagens_alone(tmp_path: Path) -> None:
    ours = retrofit(made())
    ours.save_pretrained(tmp_path)
    match = "attn_implementation: got 'sdpa'; only mtagen's kernels can compute this model's attention"
    with pytest.raises(SpecError, match=match):
        type(ours).from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(SpecError, match=match):
        ours.set_attn_implementation("sdpa")


def test_an_op_of_another_attention_is_refused() -> None:
    """As when a module's window changes after the retrofit."""
    ours = retrofit(made("gemma2"))
    ours.model.layers[0].self_attn.sliding_window = 7
    with pytest.raises(InputError, match=r"attention: got .*'sliding_window': 7.*; the op of its stages was built for"):
        ours(tokens(1, 5))


def test_a_mask_by_position() -> None:
    ours, x = randomise(retrofit(made())), tokens(2, 11)
    assert torch.equal(ours.model(x, LEFT)[0], ours.model(x, attention_mask=LEFT)[0])


def test_dropout() -> None:
    """In training only, of batches and of packed documents."""
    theirs, x = made(attention_dropout=0.5), tokens(2, 11)
    ours, packed = retrofit(theirs, kernel=(2, 3)), {"attention_mask": LEFT}
    for given in ({}, packed):
        assert torch.equal(ours.eval()(x, **given).logits, ours(x, **given).logits)
        assert not torch.equal(ours.train()(x, **given).logits, ours(x, **given).logits)
    with torch.no_grad(), pytest.raises(InputError, match="cache: got 'a model in training mode, with dropout'"):
        ours(x, use_cache=True)


def test_float64() -> None:
    """Norms and angles are rounded to fp32 there, too."""
    theirs, x = made("olmo2").double(), tokens(2, 11)
    ours = retrofit(theirs, **STAGES)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float64}
    close(ours(x).logits, theirs(x).logits)


def test_one_compiled_step_serves_all_lengths() -> None:
    """As one graph, of padded prompts too."""
    torch._dynamo.reset()
    ours, x = randomise(retrofit(made("qwen3", num_hidden_layers=1), **STAGES)), tokens(2, 11)
    graphs = []
    options = {"backend": lambda graph, _: graphs.append(graph) or graph, "fullgraph": True, "mode": None}
    config = transformers.CompileConfig(**options)
    config._compile_all_devices = True  # a CPU, too
    static = {"cache_implementation": "static", "compile_config": config}
    for given in ({}, {"attention_mask": LEFT}):
        assert torch.equal(generate(ours, x, **given, **static), generate(ours, x, **given))
    assert len(graphs) == 1
