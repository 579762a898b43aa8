"""Calls on pages on a GPU: the bits of keys one after another, and CUDA graphs that serve other requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import assert_alone_alike, contiguous, draw
from torch import Tensor

import mtagen
from mtagen import InputError
from mtagen.ops.checks import _waits_for_gpus
from mtagen.serving import Rings, Step

pytestmark = pytest.mark.gpu

REQUESTS = ((1, 1), (3, 200), (0, 70), (160, 160), (1, 330), (50, 400), (0, 0), (1, 17))
OTHERS = ((2, 90), (1, 3), (0, 0), (100, 350), (7, 7), (1, 260), (1, 16), (0, 40))
EVERYTHING = {"kernel": (3, 4), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2}
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "convolution": {"kernel": (6, 11)},
    "window": {"kernel": (6, 11), "window": (100, 0)},
    "everything": EVERYTHING,
}


@pytest.mark.parametrize("backend", ["auto", "cuda", "triton"])
@pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)
def test_has_the_bits_of_contiguous_keys(stages: dict[str, Any], backend: Any) -> None:
    op = mtagen.build(**{"head_dim": 64} | stages, backend=backend)
    given = draw(op.plan.spec, REQUESTS, 16, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        out = op.paged(**given.arguments)
        assert torch.equal(out, contiguous(op, given))
        assert_alone_alike(op, given, num_splits=4)
        assert_alone_alike(op, given, num_splits=4, decode_threshold=1)
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)
def test_steps_of_single_tokens(stages: dict[str, Any], backend: Any) -> None:
    op = mtagen.build(**{"head_dim": 64} | stages, backend=backend)
    requests = [(1, keys) for keys in (1, 17, 200, 330)]
    given = draw(op.plan.spec, requests, 16, dtype=torch.bfloat16, device="cuda")
    with torch.inference_mode():
        assert torch.equal(op.paged(**given.arguments | {"cu_seq_q": None}), contiguous(op, given))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_captured_call_serves_other_requests(backend: Any) -> None:
    op = mtagen.build((6, 11), 64, backend=backend)
    first, second = (
        draw(op.plan.spec, requests, 32, dtype=torch.bfloat16, device="cuda", spare_pages=60 - pages)
        for requests, pages in ((REQUESTS, _pages(REQUESTS)), (OTHERS, _pages(OTHERS)))
    )
    rows = max(len(given.arguments["q"]) for given in (first, second))
    width = max(given.arguments["block_table"].shape[1] for given in (first, second))
    largest = {"max_q": 200, "max_k": 400}

    def padded(given: dict[str, Any]) -> dict[str, Any]:
        q, table = given["q"], given["block_table"]
        more = torch.full((rows - len(q), *q.shape[1:]), torch.nan, dtype=q.dtype, device="cuda")
        wide = torch.nn.functional.pad(table, (0, width - table.shape[1]), value=-1)
        return given | largest | {"q": torch.cat([q, more]), "block_table": wide}

    held, others = padded(first.arguments), padded(second.arguments)
    others |= {name: held[name] for name in op.plan.spec.weight_names}
    with torch.inference_mode():
        expected = op.paged(**others)
        op.paged(**held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op.paged(**held)
        for name, x in others.items():
            if isinstance(x, Tensor):
                held[name].copy_(x)
        graph.replay()
    count = sum(new for new, _ in OTHERS)
    assert torch.equal(out[:count], expected[:count])
    assert not out[count:].any()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("block_table", 99, "must be a page"), ("lengths", 401, "number of keys"), ("cu_seq_q", 0, "must not decrease")],
)
def test_values_are_checked_for_debugging(monkeypatch: pytest.MonkeyPatch, name: str, value: int, message: str) -> None:
    op = mtagen.build((6, 11), 64, backend="triton")
    given = draw(op.plan.spec, REQUESTS, 16, dtype=torch.bfloat16, device="cuda").arguments
    wrong = given[name].clone()
    wrong[5] = value
    monkeypatch.setenv("MTAGEN_CHECK_VALUES", "1")
    _waits_for_gpus.cache_clear()
    try:
        with torch.inference_mode(), pytest.raises(InputError, match=message):
            op.paged(**given | {name: wrong})
    finally:
        _waits_for_gpus.cache_clear()


def test_a_captured_step_of_rings_serves_other_requests() -> None:
    """Appending has the results of PyTorch's indexing on the CPU, also in a CUDA graph that served other requests."""
    generator = torch.Generator().manual_seed(0)
    steps = (((7, 1, 20), (7, 40, 20)), ((1, 12, 0), (8, 52, 20)))  # new tokens, and lengths
    table = torch.tensor([[3, 0, 8], [5, 1, 2], [4, 6, 7]], dtype=torch.int32)
    held = {}
    for device in ("cpu", "cuda"):
        rings = Rings(torch.zeros(9, 7, 4, 64, dtype=torch.bfloat16, device=device), 32, 5)
        pages = torch.zeros(2, 9, 32, 2, 64, dtype=torch.bfloat16, device=device)
        held[device] = rings, {"k_pages": pages[0], "v_pages": pages[1]}
    given, graph = {}, torch.cuda.CUDAGraph()
    for counts, lengths in steps:
        q = torch.randn(28, 4, 64, generator=generator).bfloat16()
        k, v = torch.randn(2, 28, 2, 64, generator=generator).bfloat16()
        cu_seq_q = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        new = {"q": q, "k": k, "v": v, "cu_seq_q": cu_seq_q, "lengths": torch.tensor(lengths, dtype=torch.int32)}
        expected = _appended(*held["cpu"], table, **new)
        if not given:
            given = {name: x.cuda() for name, x in new.items()}
            _appended(*held["cuda"], table.cuda(), **given)
            on_gpu = table.cuda()
            with torch.cuda.graph(graph):
                rows = _appended(*held["cuda"], on_gpu, **given)
        for name, x in new.items():
            given[name].copy_(x)
        graph.replay()
        assert torch.equal(rows.cpu(), expected)
        for x, y in zip(_tensors(*held["cpu"]), _tensors(*held["cuda"]), strict=True):
            assert torch.equal(x, y.cpu())


def _appended(rings: Rings, pages: dict[str, Tensor], table: Tensor, **new: Tensor) -> Tensor:
    step = Step.of_tables(rings, new["cu_seq_q"], new["lengths"], len(new["q"]), table)
    return rings.append(new["q"], step, k=new["k"], v=new["v"], **pages)


def _tensors(rings: Rings, pages: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return rings.queries, *pages.values()


def _pages(requests: tuple[tuple[int, int], ...]) -> int:
    return sum(-(-keys // 32) for _, keys in requests)
