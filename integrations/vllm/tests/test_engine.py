"""vLLM gives the tokens that ``generate`` gives, and needs the queries in the padding of pages for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS, SHARED, Served, again, engine, generate
from torch import Tensor
from vllm import LLM

from mtagen.errors import InputError, SpecError
from mtagen.serving import Rings, Step
from mtagen_vllm.attention import MtaMetadataBuilder

Steps = list[list[tuple[int, int]]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The new tokens and the earlier ones of each request, for each step."""
    seen: Steps = []
    build = MtaMetadataBuilder.build

    def recorded(builder: MtaMetadataBuilder, prefix: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        counts = common_attn_metadata.query_start_loc.diff().tolist()
        totals = common_attn_metadata.seq_lens.tolist()
        seen.append([(new, total - new) for new, total in zip(counts, totals, strict=True)])
        return build(builder, prefix, common_attn_metadata, fast_build)

    monkeypatch.setattr(MtaMetadataBuilder, "build", recorded)
    return seen


def test_chunks_of_prompts(served: Served, llm: LLM, steps: Steps) -> None:
    assert served.equal(generate(llm)) == len(PROMPTS)
    assert any(new > 1 and past for step in steps for new, past in step), "no prompt was divided"
    assert any({new == 1 for new, _ in step} == {True, False} for step in steps), "no step was mixed"


def test_shared_pages(served: Served, llm: LLM, steps: Steps) -> None:
    first, second = generate(llm), again(llm)
    assert served.equal(first) == served.equal(second) == len(PROMPTS)
    shared = len(SHARED) // 16 * 16  # tokens of whole pages
    assert [output.num_cached_tokens for output in first[-2:]] == [shared, shared]
    assert all(output.num_cached_tokens >= len(prompt) - 16 for output, prompt in zip(second, PROMPTS, strict=True))
    whole, rest = (len(SHARED) + 3, 0), (len(SHARED) + 9 - shared, shared)
    assert any(whole in step and rest in step for step in steps), "no page was read in the step that filled it"


def test_without_earlier_queries_tokens_differ(served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Rings.append

    def forgetful(rings: Rings, q: Tensor, step: Step, **stored: Tensor) -> Tensor:
        return append(rings, q, step, **stored).index_fill(0, step.places.earlier_rows.flatten().long(), 0)

    monkeypatch.setattr(Rings, "append", forgetful)
    assert served.equal(generate(llm)) < len(PROMPTS)


@pytest.mark.parametrize("is_late", [True, False])
def test_rings_that_are_read_at_another_time_are_seen(
    served: Served, llm: LLM, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    append = Rings.append

    def wrong(rings: Rings, q: Tensor, step: Step, **stored: Tensor) -> Tensor:
        before, places = rings.queries.clone(), step.places
        rows = append(rings, q, step, **stored)
        if is_late:  # after new queries have taken the slots
            needed = places.replaced >= 0
            row, place, read = places.replaced[needed], places.queries[needed], rings.queries
        else:  # before another request has filled a shared page
            needed = places.earlier >= 0
            row, place, read = places.earlier_rows[needed], places.earlier[needed], before
        rows[row] = read[place // rings.slots, place % rings.slots]
        return rows

    monkeypatch.setattr(Rings, "append", wrong)
    assert served.equal(generate(llm)) < len(PROMPTS)


def test_drafts(served: Served, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with engine(served, speculative_config=drafts) as llm:
        assert served.equal(generate(llm)) == len(PROMPTS)
        assert any(new == 4 and past for step in steps for new, past in step), "nothing was drafted"
        begin = Rings.in_padding.__func__
        monkeypatch.setattr(Rings, "in_padding", lambda *given, spare: begin(Rings, *given))
        assert served.equal(generate(llm)) < len(PROMPTS), "no draft was taken back"


def test_preempted_requests(served: Served, steps: Steps) -> None:
    few = {"max_model_len": 128, "block_size": 8, "num_gpu_blocks_override": 22, "enable_prefix_caching": False}
    with engine(served, **few) as llm:
        steps.clear()
        assert served.equal(generate(llm)) == len(PROMPTS)
    least = sum(len(prompt) + len(answer) - 1 for prompt, answer in zip(PROMPTS, served.answers, strict=True))
    assert sum(new for step in steps for new, _ in step) > least, "no request gave up its pages"


@pytest.mark.parametrize(
    "options",
    [
        {"layer_overrides": {0: {"kernel": None, "post_kernel": None}, 2: {"post_kernel": (6, 3)}}},
        {"window": (9, 0), "sink": True, "gate": "channel", "tie_word_embeddings": False},
    ],
    ids=["layers with other rings", "window and sink"],
)
def test_other_models(options: dict[str, Any], tmp_path: Path) -> None:
    other = Served(tmp_path, **options)
    with engine(other, block_size=32) as llm:
        assert other.equal(generate(llm)) == len(PROMPTS)


def test_compiled(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # torch.compile traces the model, and Inductor is left out
    with engine(served, enforce_eager=False, block_size=8) as llm:
        assert served.equal(generate(llm)) == len(PROMPTS)


def test_two_ranks(tmp_path: Path) -> None:
    other = Served(tmp_path, post_mixed_heads=2, sink=True, parameters={"slopes": "h"}, logits="s + slopes[h]")
    with engine(other, tensor_parallel_size=2) as llm:
        assert other.equal(generate(llm)) == len(PROMPTS)


def test_heads_mixed_across_ranks_are_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtagen_vllm.model.get_tensor_model_parallel_world_size", lambda: 2)
    rule = "post_mixed_heads: got 4; a rank has 2 heads, and cannot mix them with others"
    with pytest.raises(SpecError, match=rule), engine(served):
        pass


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"block_size": 24}, "page size: got 24; must be a power of two"),
        ({"hf_overrides": {"causal": False}}, "a token's output depends on later tokens, which vLLM does not know yet"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: got 'fp8'; keys and values must have the dtype of the model"),
    ],
)
def test_options_that_are_refused(served: Served, options: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule), engine(served, **options):
        pass
