"""transformers' continuous batching gives the tokens that ``generate`` gives, and needs the earlier queries for it."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import mtagen
from mtagen.serving import Rings, Step

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching")

from mtagen.transformers import MtaConfig, MtaForCausalLM  # noqa: E402
from mtagen.transformers.batching import PagedCache  # noqa: E402

Configuration = transformers.generation.configuration_utils.ContinuousBatchingConfig
NEW = 12  # tokens
EVERYTHING: dict[str, Any] = {
    "kernel": (6, 11),
    "post_kernel": (4, 5),
    "mixed_heads": 2,
    "post_mixed_heads": 4,
    "group_norm": True,
    "gate": "scalar",
}


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


SHARED = tokens(33, 0)
PROMPTS = [tokens(count, count) for count in (5, 19, 33, 7, 40, 1, 3)] + [SHARED + tokens(n, n) for n in (2, 9, 17)]


def made(**options: Any) -> MtaForCausalLM:
    """Return a model whose tokens depend on all stages."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = MtaForCausalLM(MtaConfig(**sizes, **heads, **EVERYTHING | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("mta_kernel", "wpsm", "wposm", "head_kernel")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.ndim > 1:
                parameter.mul_(6)
    return model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> MtaForCausalLM:
    return made()


def options(**changes: Any) -> Any:
    """Return options of greedy search, unless ``changes`` say otherwise."""
    fixed = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 96, "pad_token_id": 0}
    return transformers.GenerationConfig(**fixed | changes)


def batched(
    model: MtaForCausalLM,
    page: int,
    most: int,
    prompts: list[list[int]] = PROMPTS,
    graphs: bool = False,
    **changes: Any,
) -> list[Any]:
    size = "page_size" if hasattr(Configuration, "page_size") else "block_size"  # in transformers 5.17
    config = Configuration(**{size: page}, num_blocks=160, max_batch_tokens=most, use_cuda_graph=graphs)
    outputs = [*model.generate_batch(prompts, options(**changes), config).values()]
    assert outputs
    assert not [output.error for output in outputs if output.error is not None]
    assert all(output.generated_tokens for output in outputs)
    return outputs


def alone(model: MtaForCausalLM, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        return model.generate(torch.tensor([prompt]), generation_config=options())[0, len(prompt) :].tolist()


def equal(model: MtaForCausalLM, outputs: list[Any]) -> int:
    """Return how many requests got the tokens of ``generate``."""
    return sum(alone(model, output.prompt_ids) == output.generated_tokens for output in outputs)


@pytest.mark.parametrize(("page", "most"), [(8, 16), (16, 24), (32, 200)])
def test_tokens_equal_generate(model: MtaForCausalLM, page: int, most: int) -> None:
    outputs = batched(model, page, most)
    assert len(outputs) == len(PROMPTS)
    assert equal(model, outputs) == len(PROMPTS)
    assert model.config._attn_implementation == "eager"


def forget_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier queries are zeros from now on."""
    append = Rings.append

    def forgetful(rings: Rings, q: torch.Tensor, step: Step) -> torch.Tensor:
        return append(rings, q, step).index_fill(0, step.places.earlier_rows.flatten().long(), 0)

    monkeypatch.setattr(Rings, "append", forgetful)


def test_without_earlier_queries_tokens_differ(model: MtaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_queries(monkeypatch)
    assert equal(model, batched(model, 8, 16)) < len(PROMPTS)


def distances_from_likeliest(model: MtaForCausalLM, outputs: list[Any]) -> torch.Tensor:
    """Return how far the logit of each token is below the largest one, in units of their standard deviation.

    The logits are those of a pass over the whole sequence.
    """
    distances = []
    for output in outputs:
        ids = torch.tensor([output.prompt_ids + output.generated_tokens], device=model.device)
        begin = len(output.prompt_ids)
        with torch.no_grad():
            logits = model(ids).logits[0, begin - 1 : -1].float()
        distances.append((logits.amax(1) - logits.gather(1, ids[0, begin:, None])[:, 0]) / logits.std(1))
    return torch.cat(distances)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_the_likeliest_on_a_gpu(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read pages round in bf16 in another order than those of a whole sequence."""
    model = made().to("cuda", torch.bfloat16)
    assert distances_from_likeliest(model, batched(model, 16, 64, graphs=graphs)).max() < 0.5
    forget_queries(monkeypatch)
    assert distances_from_likeliest(model, batched(model, 16, 64, graphs=graphs)).max() > 1


def test_prompts_share_pages(model: MtaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    begin = PagedCache.__init__

    def counting(cache: PagedCache, held: Any, layers: int, count: int, arguments: Any) -> None:
        counts.append(count)
        begin(cache, held, layers, count, arguments)

    monkeypatch.setattr(PagedCache, "__init__", counting)
    prompts = [SHARED + tokens(1, 5), *([SHARED + tokens(n, n) for n in (2, 9, 17)])]
    outputs = batched(model, 8, 40, prompts)  # the first request fills most of a step
    assert equal(model, outputs) == len(prompts)
    whole = sum(len(output.prompt_ids) + len(output.generated_tokens) - 1 for output in outputs)
    assert sum(counts) < whole


SAMPLES = {"num_return_sequences": 3, "do_sample": True, "top_k": 1}  # which are all the likeliest tokens


def samples(model: MtaForCausalLM) -> list[Any]:
    """Return three outputs for each of three prompts."""
    outputs = batched(model, 8, 64, PROMPTS[:3], **SAMPLES)
    if len(outputs) == 3 and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("generate_batch of this transformers returns one sample of a prompt")
    assert len(outputs) == 9
    return outputs


def test_several_samples_of_a_prompt(model: MtaForCausalLM) -> None:
    assert equal(model, samples(model)) == 9


def test_without_copied_rings_samples_differ(model: MtaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rings, "copy_pages", lambda *_: None)
    assert equal(model, samples(model)) < 9


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": None, "post_kernel": None, "mixed_heads": None, "post_mixed_heads": None},
        {"layer_overrides": {1: {"kernel": None, "mixed_heads": None}, 2: {"post_kernel": (6, 3)}}},
        {"window": (9, 0)},
    ],
    ids=["plain", "layers with other stages", "window"],
)
def test_other_models(changes: dict[str, Any]) -> None:
    model = made(**changes)
    assert equal(model, batched(model, 8, 24, PROMPTS[:5])) == 5


def test_a_prompt_of_whole_pages_is_shared() -> None:
    model = made(post_kernel=None, mixed_heads=None, post_mixed_heads=None)  # a page has more tokens than a ring
    prompts = [tokens(32, 3)] * 2 + [tokens(16, 4)] * 3
    assert equal(model, batched(model, 16, 32, prompts)) == 5


def test_requests_are_not_moved_to_the_cpu(model: MtaForCausalLM) -> None:
    config = Configuration(cpu_offload_space=1.0)
    with pytest.raises(mtagen.InputError, match="would lose their earlier queries"):
        model.generate_batch(PROMPTS, options(), config)


def test_the_script_that_measures_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU it leaves out the captured step, which is one of these."""
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    script = runpy.run_path(str(folder / "serving.py"))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.inference_mode():
        parameters, step = script["decode_step"](sizes, 130, "cpu")
        assert parameters > 0
        step()
    script["main"](tmp_path / "run.json", commit="abc", dim=64, layers=1, prompt=4, new=2)
    run = json.loads((tmp_path / "run.json").read_text())
    assert [result["same"] for result in run["continuous_batching"]] == [1, 1, 1]
    assert run["commit"] == "abc"
