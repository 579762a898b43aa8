"""The decoder for transformers: against examples/gpt, and against itself without padding or cache."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CompileConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    Trainer,
    TrainingArguments,
)

from examples.gpt import model as gpt
from mtagen import InputError, SpecError
from mtagen.transformers import MtaCache, MtaConfig, MtaForCausalLM, MtaModel
from mtagen.transformers.cache import CACHE_NAME
from mtagen.transformers.configuration import CACHE_NAMES

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
VOCABULARY = 50
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
}
STAGES: dict[str, Any] = {"kernel": (3, 5), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "stages": STAGES,
    "output mask": STAGES | {"mask": "output"},
    "window": STAGES | {"window": (4, 0), "rope_theta": 100.0},
    "paper": {
        "kernel": None,
        "mixed_heads": 4,
        "post_mixed_heads": 4,
        "group_norm": True,
        "gate": "scalar",
        "layer_overrides": {1: {"kernel": (3, 5), "post_kernel": (3, 5)}},
    },
}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
AUTOMATIC = {
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
    "QuestionAnswering": AutoModelForQuestionAnswering,
}
LEFT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 12, [0] * 11 + [1]])


def randomise(model: torch.nn.Module) -> None:
    """Stages that pass on what they get would hide what they reach."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "mta_kernel" in name or "wpsm" in name or "wposm" in name or "head_kernel" in name:
                x += 0.3 * torch.randn(x.shape, generator=generator)


def made(options: dict[str, Any], kind: type[MtaForCausalLM] = MtaForCausalLM) -> MtaForCausalLM:
    torch.manual_seed(0)
    model = kind(MtaConfig(**SIZES | options)).eval()
    randomise(model)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> MtaForCausalLM:
    return made(MODELS["paper"])


def close(left: Tensor, right: Tensor) -> None:
    """As fp32 rounds what is summed in another order; logits here are about 1, and norms round to fp32 in any dtype."""
    torch.testing.assert_close(left, right, rtol=2e-5, atol=2e-5)


# What is computed.


def test_is_the_decoder_of_the_example() -> None:
    """The paper's configuration, whose parameters have other names there."""
    size = gpt.Size(64, 4, 4)
    theirs = gpt.make_decoder(size, "mta", VOCABULARY)
    randomise(theirs)
    ours = MtaForCausalLM(
        MtaConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.dim,
            intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            **MODELS["paper"] | {"layer_overrides": {2: {"kernel": (6, 11), "post_kernel": (6, 11)}}},
        )
    )
    names = {
        "tok_embeddings": "model.embed_tokens",
        "layers": "model.layers",
        "norm": "model.norm",
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
        "w1": "gate_proj",
        "w3": "up_proj",
        "w2": "down_proj",
    }
    state = {".".join(names.get(part, part) for part in key.split(".")): x for key, x in theirs.state_dict().items()}
    ours.load_state_dict(state | {"lm_head.weight": theirs.tok_embeddings.weight})
    x = tokens(2, 30)
    close(ours(x).logits, theirs(x))


# Padding and packed documents: each document alone is what is expected.


def alone(model: torch.nn.Module, x: Tensor, mask: Tensor) -> list[Tensor]:
    """The results of each row without its padding."""
    return [model(row[real.bool()][None]).last_hidden_state[0] for row, real in zip(x, mask, strict=True)]


@pytest.mark.parametrize("options", [*MODELS.values(), STAGES | {"causal": False}], ids=[*MODELS, "not causal"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_padding_is_not_seen(options: dict[str, Any], side: str, dtype: torch.dtype) -> None:
    model = made(options, MtaModel)
    mask = LEFT if side == "left" else LEFT.flip(1)
    x = tokens(*mask.shape)
    out = model(x, attention_mask=mask.to(dtype)).last_hidden_state
    for row, real, expected in zip(out, mask.bool(), alone(model, x, mask), strict=True):
        close(row[real], expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_a_padded_batch(side: str, model: MtaForCausalLM) -> None:
    mask = LEFT if side == "left" else LEFT.flip(1)
    x = tokens(*mask.shape)
    labels = x.masked_fill(mask == 0, -100)
    if side == "left":  # the loss shifts labels: what a document begins with, padding is not to predict
        labels[0, 5] = labels[2, 11] = -100
    model(x, attention_mask=mask, labels=labels).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    rows = [row[real.bool()][None] for row, real in zip(x, mask, strict=True)]
    count = sum(row.shape[1] - 1 for row in rows)
    for row in rows:
        model(row, labels=row, num_items_in_batch=count).loss.backward()
    for name, parameter in model.named_parameters():
        close(gradients[name], parameter.grad)


def test_a_mask_without_padding_changes_nothing(model: MtaForCausalLM) -> None:
    x = tokens(2, 9)
    assert torch.equal(model(x, attention_mask=torch.ones_like(x)).logits, model(x).logits)


def test_a_row_of_padding_alone(model: MtaForCausalLM) -> None:
    x, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0] = 0
    out = model(x, attention_mask=mask).logits
    close(out[1:], model(x[1:]).logits)
    assert out.isfinite().all()


@pytest.mark.parametrize("how", ["position_ids", "seq_idx", "cu_seq_lens"])
@every_model
def test_packed_documents(options: dict[str, Any], how: str) -> None:
    """As transformers' collator flattens them."""
    model = made(options)
    documents = [tokens(n)[:n].tolist() for n in (7, 1, 12, 4)]
    collate = DataCollatorWithFlattening(
        return_position_ids=how == "position_ids",
        return_seq_idx=how == "seq_idx",
        return_flash_attn_kwargs=how == "cu_seq_lens",
        return_tensors="pt",
    )
    batch = collate([{"input_ids": document} for document in documents])
    out = model(**batch)
    expected = [model(torch.tensor([document])).logits[0] for document in documents]
    close(out.logits[0], torch.cat(expected))
    assert out.loss.isfinite()
    with torch.no_grad():  # no cache by default
        assert torch.equal(model(**batch).logits, out.logits)


def test_documents_in_the_rows_of_a_padded_batch(model: MtaForCausalLM) -> None:
    x = tokens(2, 10)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
    position_ids = torch.tensor([[0, 0, 0, 1, 2, 0, 1, 2, 3, 4], [*range(6), *range(4)]])
    out = model(x, attention_mask=mask, position_ids=position_ids).logits
    for row, begin, end in [(0, 2, 5), (0, 5, 10), (1, 0, 6), (1, 6, 10)]:
        close(out[row, begin:end], model(x[row : row + 1, begin:end]).logits[0])


def test_positions_turn_queries_and_keys(model: MtaForCausalLM) -> None:
    """All by the same: nothing changes but rounding."""
    x = tokens(2, 9)
    close(model(x, position_ids=torch.arange(100, 109)[None]).logits, model(x).logits)


@torch.no_grad()
def test_positions_that_count_by_two(model: MtaForCausalLM) -> None:
    """Where boundaries are stated, or in single steps, they are positions and no more."""
    x, position_ids = tokens(1, 9), 2 * torch.arange(9)[None]
    out = model(x, position_ids=position_ids, cu_seq_lens_q=torch.tensor([0, 9]).int(), use_cache=False).logits
    past = MtaCache(model.config)
    steps = [model(x[:, i : i + 1], position_ids=position_ids[:, i : i + 1], cache=past) for i in range(9)]
    close(torch.cat([step.logits for step in steps], 1), out)
    assert not out.allclose(model(x).logits, atol=1e-2)


# Generation.


def cache_of(out: Any) -> Any:
    return getattr(out, CACHE_NAME)


def generate(model: MtaForCausalLM, x: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(x, max_new_tokens=10, pad_token_id=0, **options)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams that are sampled": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@every_model
def test_generation_with_and_without_a_cache(options: dict[str, Any], way: dict[str, Any], padded: bool) -> None:
    model, x = made(options), tokens(3, 12)
    way = way | ({"attention_mask": LEFT} if padded else {})
    assert torch.equal(generate(model, x, **way, use_cache=True), generate(model, x, **way, use_cache=False))


@every_model
def test_generation_with_an_assistant(options: dict[str, Any]) -> None:
    """Tokens that the model would not have chosen are taken back."""
    model, x = made(options), tokens(1, 12)
    torch.manual_seed(5)
    other = type(model)(model.config).to(model.dtype).eval()

    def with_all_tokens(x: Tensor, **how: Any) -> Tensor:
        how = {"max_new_tokens": 10, "pad_token_id": -1} | how  # no token is taken for padding
        return model.generate(x, **how)

    expected = with_all_tokens(x)
    assert torch.equal(with_all_tokens(x, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(with_all_tokens(x, assistant_model=other), expected)
    assert torch.equal(with_all_tokens(x, assistant_model=model), expected)
    for length in (1, 3):  # drafts are longer than the prompt
        long = partial(with_all_tokens, x[:, :length], max_new_tokens=30)
        assert torch.equal(long(assistant_model=other), long())
    repeated = torch.cat([x.repeat(1, 14), x], 1)  # drafts are longer than what is held from before the last crop
    assert torch.equal(with_all_tokens(repeated, prompt_lookup_num_tokens=140), with_all_tokens(repeated))
    found = torch.cat([x, expected[:, 12:17], x[:, :3]], 1)  # some continuations are in the prompt
    assert torch.equal(with_all_tokens(found, prompt_lookup_num_tokens=4), with_all_tokens(found))


def test_a_filled_cache_with_an_assistant(model: MtaForCausalLM) -> None:
    """transformers would process the prompt again."""
    x, past = tokens(1, 12), MtaCache(model.config)
    with torch.no_grad():
        model(x[:, :11], cache=past)
    with pytest.raises(InputError, match="cache: got '11 tokens'; generation with an assistant would process"):
        generate(model, x, cache=past, prompt_lookup_num_tokens=3)


def test_cropped_caches(model: MtaForCausalLM) -> None:
    x, other = tokens(2, 20), tokens(2, 40)[:, 20:]
    with torch.no_grad():
        past = MtaCache(model.config)
        past.activate_past_recording()
        model(x[:, :14], cache=past)
        past.crop(-3)
        assert past.get_seq_length() == 11
        logits = model(other[:, :5], cache=past).logits
        close(logits, model(torch.cat([x[:, :11], other[:, :5]], 1)).logits[:, 11:])
        past.crop(13)  # the number of tokens that stay
        logits = model(x[:, :2], cache=past).logits
        close(logits, model(torch.cat([x[:, :11], other[:, :2], x[:, :2]], 1)).logits[:, 13:])
        with pytest.raises(InputError, match=r"count: got 16; .* taking back at most 15 tokens"):
            past.crop(-16)


def test_generation_from_padded_prompts_and_from_each_alone(model: MtaForCausalLM) -> None:
    x = tokens(3, 12)
    together = generate(model, x, attention_mask=LEFT)
    for row, real, out in zip(x, LEFT.bool(), together, strict=True):
        assert torch.equal(out[12:], generate(model, row[real][None])[0, real.sum() :])


@pytest.mark.parametrize("padded", [False, True])
@every_model
def test_logits_of_a_prompt_in_parts(options: dict[str, Any], padded: bool) -> None:
    """Several tokens at once, parts that are padding alone in some rows, and a cache that grows."""
    model, x = made(options), tokens(3, 12 + 11)
    mask = torch.cat([LEFT if padded else torch.ones_like(LEFT), torch.ones(3, 11, dtype=torch.int64)], 1)
    position_ids = mask.cumsum(1) + 6  # from anywhere on
    expected = model(x, attention_mask=mask).logits
    past, seen = MtaCache(model.config), 0
    with torch.no_grad():
        for part in x.split([4, 5, 1, 3, 10], dim=1):
            new = slice(seen, seen + part.shape[1])
            given = {"attention_mask": mask[:, : new.stop] if padded else None, "position_ids": position_ids[:, new]}
            out = model(part, cache=past, **given)
            assert cache_of(out) is past
            seen = new.stop
            assert past.get_seq_length() == seen
            real = mask[:, new].bool()
            close(out.logits[real], expected[:, new][real])


@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_in_chunks(padded: bool, model: MtaForCausalLM) -> None:
    x, more = tokens(3, 12), {"attention_mask": LEFT} if padded else {}
    assert torch.equal(generate(model, x, prefill_chunk_size=5, **more), generate(model, x, **more))


STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_a_static_cache(model: MtaForCausalLM, way: dict[str, Any], padded: bool) -> None:
    x, way = tokens(3, 12), way | ({"attention_mask": LEFT} if padded else {})
    assert torch.equal(generate(model, x, **way, **STATIC), generate(model, x, **way))


def test_one_compiled_step_serves_all_lengths() -> None:
    torch._dynamo.reset()
    model, x, graphs = made(STAGES | {"num_hidden_layers": 1}), tokens(3, 12), []
    options = {"backend": lambda graph, _: graphs.append(graph) or graph, "fullgraph": True, "mode": None}
    config = CompileConfig(**options)
    config._compile_all_devices = True  # a CPU, too
    for way in ({}, {"attention_mask": LEFT}):
        out = generate(model, x, **way, **STATIC, compile_config=config, return_dict_in_generate=True)
        assert torch.equal(out.sequences, generate(model, x, **way))
        assert cache_of(out).get_seq_length() == 21
        assert len(graphs) == 1
    generate(model, x, compile_config=config)  # the default cache grows, so nothing is compiled
    assert len(graphs) == 1


def test_room_of_a_static_cache(model: MtaForCausalLM) -> None:
    with pytest.raises(InputError, match=r"max_len: got None; .*room from the start; legal: max_len"):
        MtaCache(model.config, static=True)
    x, past = tokens(2, 12), MtaCache(model.config, max_len=12, static=True)
    with torch.no_grad():
        model(x[:, :7], cache=past)
        close(model(x[:, 7:], cache=past).logits, model(x).logits[:, 7:])
        with pytest.raises(
            InputError, match=r"tokens: got 13; must fit a static cache; legal: 1\.\.12, or static=False"
        ):
            model(x[:, :1], cache=past)
        assert (past.get_seq_length(), past.layers[0].get_max_length()) == (12, 12)
        past.reset()
        close(model(x, cache=past).logits, model(x).logits)


def test_generation_goes_on(model: MtaForCausalLM) -> None:
    """From a cache that an earlier call returned, of which another copy is kept."""
    x = tokens(2, 12)
    first = model.generate(x, max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(cache_of(first), MtaCache)
    assert cache_of(first).get_seq_length() == 15
    more = torch.cat([first.sequences, tokens(2, 11)], 1)
    given = {"attention_mask": torch.ones_like(more)}  # a token that was generated may be that of padding
    for past in (copy.deepcopy(cache_of(first)), cache_of(first)):
        assert torch.equal(generate(model, more, **{CACHE_NAME: past}, **given), generate(model, more, **given))


def test_generation_from_embeddings(model: MtaForCausalLM) -> None:
    x = tokens(2, 12)
    out = generate(model, None, inputs_embeds=model.get_input_embeddings()(x).detach())
    assert torch.equal(out, generate(model, x)[:, 12:])


def test_room_of_a_cache(model: MtaForCausalLM) -> None:
    """What ``generate`` makes has room at once; what a call makes grows."""
    out = model.generate(tokens(2, 12), max_new_tokens=9, return_dict_in_generate=True)
    assert {layer.state.max_len for layer in cache_of(out).layers} == {20}
    past = MtaCache(model.config)
    with torch.no_grad():
        for count, room in ((5, 5), (1, 10), (4, 10), (20, 30)):
            model(tokens(2, count), cache=past)
            assert {layer.state.max_len for layer in past.layers} == {room}


def test_what_a_cache_does(model: MtaForCausalLM) -> None:
    x = tokens(2, 9)
    past = MtaCache(model.config, max_len=20)
    (layer, _) = past.layers
    assert (layer.batch_size, layer.get_seq_length(), layer.get_max_length()) == (-1, 0, -1)
    past.reorder_cache(torch.tensor([0]))  # nothing is held
    past.batch_repeat_interleave(2)
    with torch.no_grad():
        model(x, cache=past)
        assert past.get_mask_sizes(3, 0) == (12, 0)
        past.batch_repeat_interleave(2)
        past.batch_select_indices(torch.tensor([2, 0]))
        past.reorder_cache(torch.tensor([1, 0, 1]))
        assert layer.batch_size == 3
        rows = torch.stack([x[0], x[1], x[0]])
        new = tokens(3, 2)
        close(model(new, cache=past).logits, model(torch.cat([rows, new], 1)).logits[:, 9:])
        past.crop(0)
        past.reset()
        assert past.get_seq_length() == 0
        close(model(x, cache=past).logits, model(x).logits)


@pytest.mark.parametrize("kind", [MtaModel, MtaForCausalLM])
def test_a_cache_goes_by_either_name(kind: type[MtaModel | MtaForCausalLM]) -> None:
    model, x = made(STAGES, kind), tokens(1, 5)
    for name in CACHE_NAMES:
        past = MtaCache(model.config)
        with torch.no_grad():
            assert cache_of(model(x, **{name: past})) is past
        assert past.get_seq_length() == 5
    with pytest.raises(InputError, match="cache, past_key_values: got 'both'"):
        model(x, **dict.fromkeys(CACHE_NAMES, MtaCache(model.config)))


def test_when_a_call_returns_a_cache(model: MtaForCausalLM) -> None:
    x = tokens(1, 5)
    assert cache_of(model(x)) is None
    with torch.no_grad():
        assert isinstance(cache_of(model(x)), MtaCache)
        assert cache_of(model(x, use_cache=False)) is None
        mask = torch.tensor([[0, 1, 1, 1, 1]])
        assert cache_of(model(x, attention_mask=mask)) is None
        assert cache_of(model(x, attention_mask=mask, use_cache=True)).layers[0].state.lengths.tolist() == [4]
        assert cache_of(made(STAGES | {"causal": False}, MtaModel)(x)) is None


# What transformers does with models.


@pytest.mark.parametrize("head", AUTOMATIC)
def test_heads(head: str, tmp_path: Path) -> None:
    """Read the decoder's outputs, of padded batches too, learn, and are saved with it."""
    torch.manual_seed(0)
    automatic, config = AUTOMATIC[head], MtaConfig(**SIZES | STAGES, pad_token_id=0, num_labels=3)
    model, mask = automatic.from_config(config).eval(), LEFT.flip(1)
    assert type(model).__name__ == f"MtaFor{head}"
    randomise(model)
    x = tokens(3, 12) * mask  # a text ends at its last token that is no padding
    hidden = model.model(x, attention_mask=mask).last_hidden_state
    out = model(x, attention_mask=mask)
    if head == "SequenceClassification":
        close(out.logits, model.score(hidden[torch.arange(3), mask.sum(1) - 1]))
        labels = {"labels": torch.tensor([0, 2, 1])}
    elif head == "TokenClassification":
        close(out.logits, model.score(hidden))
        labels = {"labels": x % 3}
    else:
        close(torch.stack([out.start_logits, out.end_logits], -1), model.qa_outputs(hidden))
        labels = {"start_positions": torch.tensor([0, 1, 0]), "end_positions": torch.tensor([3, 4, 1])}
    model(x, attention_mask=mask, **labels).loss.backward()
    assert model.model.layers[0].self_attn.mta_kernel.grad.any()
    model.save_pretrained(tmp_path)
    assert torch.equal(automatic.from_pretrained(tmp_path)(x, attention_mask=mask)[0], out[0])
    with pytest.raises(SpecError, match="attn_implementation: got 'sdpa'; only mtagen's kernels"):
        automatic.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(InputError, match="output_attentions: got True; the kernels do not store"):
        model(x, output_attentions=True)


@every_model
def test_saved_and_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    model, x = made(options), tokens(2, 12)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is MtaForCausalLM
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert type(AutoConfig.from_pretrained(tmp_path)) is MtaConfig
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is MtaModel
    assert torch.equal(base(x).last_hidden_state, model.model(x).last_hidden_state)


@pytest.mark.parametrize("given", ["bfloat16", "bf16", torch.bfloat16], ids=str)
def test_compute_dtype_is_saved(given: str | torch.dtype, tmp_path: Path) -> None:
    model = made({"compute_dtype": given})
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert one.model.layers[0].self_attn.op.dtypes == (torch.bfloat16,)


def test_loaded_with_a_further_stage(tmp_path: Path) -> None:
    """It starts as the identity; what was saved stays."""
    model, x = made({"kernel": (3, 5)}), tokens(2, 12)
    model.save_pretrained(tmp_path)
    loaded = MtaForCausalLM.from_pretrained(tmp_path, post_kernel=(2, 3), post_mixed_heads=2)
    assert loaded.model.layers[0].self_attn.head_kernel is not None
    close(loaded(x).logits, model(x).logits)
    with_norm = MtaForCausalLM.from_pretrained(tmp_path, group_norm=True, gate="channel").model.layers[0].self_attn
    assert torch.equal(with_norm.subln.weight, torch.ones(16))
    assert torch.equal(with_norm.gate.bias, torch.zeros(16))
    assert torch.equal(with_norm.mta_kernel, model.model.layers[0].self_attn.mta_kernel)


def test_loaded_in_another_dtype(model: MtaForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = MtaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {x.dtype for x in loaded.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert loaded(tokens(1, 5)).logits.dtype == torch.bfloat16


def test_initial_values() -> None:
    options = MODELS["paper"] | {"post_mixed_heads": 2, "depth_rescale": True, "gate": "channel"}
    layers = MtaForCausalLM(MtaConfig(**SIZES | options)).model.layers
    attention = layers[1].self_attn
    taps = torch.zeros(4, 1, 3, 5)
    taps[..., -1, 2] = 1
    for x, expected in [
        (attention.mta_kernel, taps),
        (attention.mta_kernel_after_sm, taps),
        (attention.wpsm.weight, torch.eye(4)),
        (attention.head_kernel, torch.eye(2).expand(2, 2, 2)),
        (attention.subln.weight, torch.ones(16)),
        (attention.gate.bias, torch.zeros(16)),
    ]:
        assert torch.equal(x, expected)
    for matrix in (attention.wq.weight, attention.gate.weight):
        assert matrix.std().item() == pytest.approx(0.3, rel=0.1)
    assert [layer.self_attn.subln.factor for layer in layers] == pytest.approx([0.8, 0.64449], abs=1e-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_training(tmp_path: Path) -> None:
    """By ``Trainer``, of padded batches, with gradient checkpointing and evaluation, and resumed."""
    model = made(STAGES | {"pad_token_id": 0, "dropout": 0.1})
    data = [{"input_ids": tokens(n)[:n].tolist()} for n in (5, 12, 9, 7)] * 4

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        x = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        return {"input_ids": x, "attention_mask": (x != 0).long(), "labels": x.masked_fill(x == 0, -100)}

    def trainer(steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            gradient_checkpointing=True,
            save_steps=10,
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        return Trainer(model, arguments, data_collator=collate, train_dataset=data, eval_dataset=data)

    before = trainer(1).evaluate()["eval_loss"]
    trainer(10).train()
    resumed = trainer(20)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert resumed.state.global_step == 20
    assert resumed.evaluate()["eval_loss"] < 0.6 * before
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    x = tokens(1, 9)
    assert torch.equal(loaded(x).logits, model.eval()(x).logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(model: MtaForCausalLM, reentrant: bool) -> None:
    model.train()
    x = tokens(3, 12)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(x, attention_mask=LEFT, labels=x).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


def test_compile(model: MtaForCausalLM) -> None:
    torch._dynamo.reset()
    x = tokens(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x, labels=x).loss, model(x, labels=x).loss)


def test_compile_with_stated_documents(model: MtaForCausalLM) -> None:
    """As ``DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True)`` states them."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((7, 5), (3, 8, 2)):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        given = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens.clone(), "max_length_q": max(lengths)}
        x = tokens(1, sum(lengths))
        close(compiled(x, **given).logits, model(x, **given).logits)


def test_outputs(model: MtaForCausalLM) -> None:
    x = tokens(2, 9)
    out = model(x, output_hidden_states=True)
    assert [y.shape for y in out.hidden_states] == [(2, 9, 32)] * 3
    assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(x))
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert torch.equal(model(x, logits_to_keep=2).logits, out.logits[:, -2:])
    assert torch.equal(model(x, logits_to_keep=torch.tensor([1, 4])).logits, out.logits[:, [1, 4]])
    assert torch.equal(model(x, return_dict=False)[0], out.logits)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(model(x, labels=x).loss, expected)


def test_names_of_other_versions_are_kept() -> None:
    """Saved configurations have names that transformers, or a later mtagen, gives a meaning."""
    config = MtaConfig(**SIZES, sep_token_id=3, torch_dtype="float32", v_scaling=2, transformers_version="5.0")
    assert (config.sep_token_id, config.v_scaling) == (3, 2)


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "unheard of"])
def test_attention_of_transformers_is_refused(model: MtaForCausalLM, tmp_path: Path, name: str) -> None:
    model.save_pretrained(tmp_path)
    match = f"attn_implementation: got '{name}'; only mtagen's kernels can compute this model's attention"
    with pytest.raises(SpecError, match=match):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    with pytest.raises(SpecError, match=match):
        model.set_attn_implementation(name)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").config.hidden_size == 32


def test_import_without_the_package() -> None:
    """All else of mtagen does not miss it; the message says what to install."""
    script = """
import sys
import mtagen
mtagen.nn.MultiTokenAttention
assert not any(name.split(".")[0] == "transformers" for name in sys.modules)
sys.modules["transformers"] = None
import mtagen.transformers
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    message = "ModuleNotFoundError: import: got 'transformers'; .*; legal: pip install 'mtagen\\[transformers\\]'"
    assert re.search(message, done.stderr)


# Bad input.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layer_overrides": {2: {}}}, "layer_overrides: got '2'; the model has no such layer"),
        (
            {"layer_overrides": {0: {"causal": False}}},
            "layer_overrides: got 'causal'; layer 0 cannot override this option",
        ),
        ({"layer_overrides": {0: None}}, "layer_overrides: got {0: None}; must map layers' numbers to their options"),
        ({"layer_overrides": [{}]}, "layer_overrides: got .*must map"),
        ({"attention_dropout": 0.1}, "attention_dropout: got 0.1; this model has no option .*legal: dropout="),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters: got .*legal: rope_theta"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: got .*legal: frequency_scaling"),
        ({"frequency_scaling": {"rope_type": "linear", "factor": 2.0}}, "frequency_scaling: got .*must map names"),
        ({"frequency_scaling": {"low_freq_factor": 2.0}}, "frequency_scaling: got .*and have factor"),
        ({"frequency_scaling": 2.0}, "frequency_scaling: got 2.0; must map names"),
        ({"frequency_scaling": {"factor": -1}}, "factor: got -1; must be a positive number"),
        ({"causal": False}, "causal: got False; the model would predict a token from itself"),
        ({"kernel": (0, 3)}, "kernel: got"),
        ({"kernel": 3}, "kernel: got"),
        ({"compute_dtype": "int8"}, "compute_dtype: got 'int8'"),
        ({"kernal": (2, 3)}, r"kernal: got \(2, 3\); this model has no option .*legal: kernel="),
        ({"post_mixed_head": 2}, "post_mixed_head: got 2; .*legal: post_mixed_heads="),
        ({"n_heads": 4}, "n_heads: got 4; .*legal: num_attention_heads="),
        ({"hidden_size": 33, "head_dim": None}, "hidden_size: got 33; is no multiple of num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3; must divide num_attention_heads = 4"),
    ],
)
def test_illegal_configurations(options: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        MtaForCausalLM(MtaConfig(**SIZES | options))


HOLE = torch.tensor([[1, 1, 0, 1, 1]])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, r"attention_mask\.shape: got \(1, 1, 5, 5\); .*masks of scores"),
        ({"attention_mask": torch.ones(1, 4, dtype=torch.int64)}, r"attention_mask\.shape: got \(1, 4\)"),
        ({"attention_mask": [[1] * 5]}, r"attention_mask\.shape: got 'list'"),
        ({"attention_mask": torch.ones(1, 5)}, r"attention_mask\.dtype: got torch\.float32; .*added to scores"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2, 3]])}, "attention_mask: got 'values that are neither 0 nor 1'"),
        ({"attention_mask": HOLE}, "attention_mask: got 'padding between tokens'"),
        ({"attention_mask": 0 * HOLE}, "attention_mask: got 'padding alone'"),
        ({"position_ids": torch.arange(5)}, r"position_ids\.shape: got \(5,\)"),
        ({"seq_idx": torch.arange(5)}, r"seq_idx\.shape: got \(5,\)"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 5]).int(), "cu_seq_lens_k": torch.tensor([0, 2, 5]).int()},
            "cu_seq_lens_k: got .*keys and queries must have the same documents",
        ),
        (
            {"cu_seq_lens_k": torch.tensor([0, 5]).int()},
            r"cu_seq_lens_k: got tensor\(.*; is for packed documents; legal: None, or together with cu_seq_lens_q",
        ),
        (
            {"max_length_q": 5},
            "max_length_q: got 5; is for packed documents; legal: None, or together with cu_seq_lens_q",
        ),
        ({"max_length_k": 5, "use_cache": True}, "max_length_k: got 5; is for packed documents"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 5]).int(), "attention_mask": HOLE},
            "attention_mask: got 'together with cu_seq_lens_q'",
        ),
        ({"output_attentions": True}, "output_attentions: got True"),
        ({"use_cache": True}, "cache: got 'gradients enabled'"),
        ({"inputs_embeds": torch.zeros(1, 5, 32)}, "input_ids, inputs_embeds: got 'both'"),
        ({"input_ids": None}, "input_ids, inputs_embeds: got 'neither'"),
        ({"cache": DynamicCache()}, "cache: got 'DynamicCache'; .*queries"),
    ],
)
def test_illegal_calls(given: dict[str, Any], match: str, model: MtaForCausalLM) -> None:
    with pytest.raises(InputError, match=match):
        model(**{"input_ids": tokens(1, 5)} | given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"attention_mask": torch.ones(1, 5, dtype=torch.int64)}, r"attention_mask\.shape: got \(1, 5\); .*\(1, 9\)"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])}, "attention_mask: got 'another padding'"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1]])},
            "attention_mask: got 'padding after a token'",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0]])},
            "attention_mask: got 'padding after a token'",
        ),
        ({"attention_mask": torch.full((1, 9), 2)}, "attention_mask: got 'values that are neither"),
        ({"position_ids": torch.tensor([[4, 5, 0, 1, 2]])}, "position_ids: got 'positions that restart'"),
        ({"seq_idx": torch.zeros(1, 5, dtype=torch.int64)}, "cache: got 'together with packed documents'"),
        ({"cu_seq_lens_q": torch.tensor([0, 5]).int()}, "cache: got 'together with packed documents'"),
    ],
)
def test_illegal_calls_with_a_cache(given: dict[str, Any], match: str, model: MtaForCausalLM) -> None:
    past = MtaCache(model.config)
    with torch.no_grad():
        model(tokens(1, 4), cache=past)
        with pytest.raises(InputError, match=match):
            model(tokens(1, 5), cache=past, **given)
        assert past.get_seq_length() == 4


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"cache_implementation": "quantized"}, "cache_implementation: got 'quantized'; .*legal: None or 'static'"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "attention_mask: got 'padding on the right'"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 1, 0]]), "use_cache": False},
            "attention_mask: got 'padding on the right'",
        ),
        ({CACHE_NAME: DynamicCache()}, "cache: got 'DynamicCache'"),
    ],
)
def test_illegal_generation(given: dict[str, Any], match: str, model: MtaForCausalLM) -> None:
    with pytest.raises(InputError, match=match):
        generate(model, tokens(1, 5), **given)


def test_illegal_use_of_a_cache(model: MtaForCausalLM) -> None:
    past = MtaCache(model.config)
    x = torch.zeros(1, 2, 3, 16)
    with pytest.raises(InputError, match="update: got 'keys and values'; the layer writes"):
        past.update(x, x, 0)
    with pytest.raises(InputError, match="update: got 'keys and values'"):
        past.layers[0].lazy_initialization(x, x)
    with pytest.raises(InputError, match="tokens_to_remove: got -1; the cache holds no queries for taking back tokens"):
        past.crop(-1)
