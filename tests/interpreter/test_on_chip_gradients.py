"""Gradients of heads that are mixed on the chip: CUDA's kernels on a CPU that plays the GPU, as the host calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import hidden
import problems
import pytest
import torch
from emulator import load_emulated
from host_functions import retiled
from on_chip import mixed_on_chip
from torch import Tensor

import mtagen
from mtagen import Spec
from mtagen.codegen import render
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.planner.strip.kernels import PROGRAMS
from mtagen.planner.strip.module import StripModule
from mtagen.planner.strip.on_chip_gradients import PLANES
from mtagen.runtime.load import load_host

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

BOTH = Spec(None, 64, mixed_heads=16, post_mixed_heads=16, dtype="fp16")  # the interpreter computes bf16 wrongly
CASES: dict[str, Spec] = {
    "before and after": BOTH,
    "before, full, fp16": Spec(None, 32, mixed_heads=16, causal=False, dtype="fp16"),
    "before, wide values, a window": Spec(None, 16, 48, mixed_heads=16, window=(12, -1), dtype="fp16"),
    "after, wide values": Spec(None, 16, 48, post_mixed_heads=16, dtype="fp16"),
    "4 heads before, 16 after, a window": Spec(
        None, 48, 32, mixed_heads=4, post_mixed_heads=16, window=(12, -1), dtype="fp16"
    ),
    "16 heads before, 2 after, a window on both sides": Spec(
        None, 64, mixed_heads=16, post_mixed_heads=2, causal=False, window=(30, 9), dtype="fp16"
    ),
}
every_case = pytest.mark.parametrize("spec", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def build(
    spec: Spec,
    folder: Path,
    seed: int = 0,
    *,
    checked: bool = False,
    workspace_bytes: int = 2**30,
    chunks: int | None = None,
    patch: pytest.MonkeyPatch | None = None,
) -> AttentionOp:
    """The op with emulated kernels. If ``chunks`` is given, all kernels divide keys into that many chunks."""
    made = retiled(mixed_on_chip(spec), workspace_bytes=workspace_bytes)
    assert made["backward"].planes == PLANES
    load_emulated(made, folder, seed, checked=checked)
    if chunks is not None:
        assert patch
        host = load_host(made, render(made), "backward")
        divisions = {"_chunks", "_balanced_chunks"} & vars(host).keys()  # `delta` alone has _chunks
        assert "_balanced_chunks" in divisions
        for name in divisions:
            patch.setattr(host, name, lambda *_: chunks)
    return assemble(made, torch_on_cpu=False)


@every_case
def test_accurate(spec: Spec, folder: Path) -> None:
    """Grouped keys, several bundles; more keys; more queries; a row. Gradients come through the log-sum-exp, too."""
    op = build(spec, folder)
    for sizes in (Sizes(2, 32, 8, 17, 17), Sizes(1, 16, 1, 41, 140), Sizes(1, 16, 16, 75, 13)):
        assert not problems.failures_through_lse(op, spec, problems.random(spec, sizes)), sizes
    assert not problems.failures(op, spec, problems.random(spec, Sizes(3, 16, 16, 1, 1)))


@pytest.mark.parametrize(
    "name", ["before and after", "before, full, fp16", "16 heads before, 2 after, a window on both sides"]
)
def test_several_strips_and_chunks(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of 128 rows; three chunks of keys, some of which are empty."""
    op = build(CASES[name], folder, workspace_bytes=2**10, chunks=3, patch=monkeypatch)
    for sizes in (Sizes(2, 16, 4, 150, 200), Sizes(1, 32, 32, 140, 20)):
        assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, sizes)), sizes


@pytest.mark.parametrize("name", ["before and after", "16 heads before, 2 after, a window on both sides"])
def test_keys_that_products_do_not_read(name: str, folder: Path) -> None:
    """They are not cleared: a strip of more than two tiles of rows and keys, of which most are hidden."""
    op = build(CASES[name], folder)
    assert not problems.failures(op, op.plan.spec, problems.random(op.plan.spec, Sizes(1, 16, 16, 290, 300)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "name", ["before and after", "before, wide values, a window", "4 heads before, 16 after, a window"]
)
def test_no_races(name: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies come early, then late. Buffers are used again."""
    op = build(CASES[name], folder, seed, checked=True, chunks=1, patch=monkeypatch)
    assert not problems.failures(op, op.plan.spec, problems.random(op.plan.spec, Sizes(1, 16, 8, 40, 150)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["before and after", "before, wide values, a window"])
def test_no_races_in_empty_chunks(name: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row warps that have no keys do not wait for head warps."""
    op = build(CASES[name], folder, seed, checked=True, chunks=3, patch=monkeypatch)
    assert not problems.failures(op, op.plan.spec, problems.random(op.plan.spec, Sizes(1, 16, 8, 40, 40)))


@pytest.mark.parametrize("spec", [BOTH, replace(BOTH, post_mixed_heads=None)], ids=["before and after", "before"])
def test_large_gradients(spec: Spec, folder: Path) -> None:
    """Gradients of log-sum-exps, and differences between gradients of probabilities, may exceed fp16's range."""
    inputs = Sampler.for_checks(spec, Sizes(1, 16, 16, 32, 256), torch.device("cpu")).inputs()
    weights = inputs.options(inputs.named)
    grad_out, values = torch.zeros_like(inputs.q), inputs.v.clone()
    grad_out[..., 0], values[..., 0] = 40_000.0, 1.0
    values[:, :, ::16, 0] = -1.0

    def gradients(attention: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.to(dtype).detach().requires_grad_() for x in (inputs.q, inputs.k, values))
        options = {name: x.to(torch.promote_types(dtype, torch.float32)) for name, x in weights.items()}
        out, lse = attention(q, k, v, **options, return_lse=True)
        return [*torch.autograd.grad([out, lse], [q, k], [grad_out.to(dtype), torch.full_like(lse, 1e5)])]

    ours = gradients(build(spec, folder), torch.float16)
    for grad, expected in zip(ours, gradients(partial(mtagen.reference, causal=True), torch.float64), strict=True):
        assert (grad - expected).norm() < 0.01 * expected.norm() < torch.inf


@pytest.mark.parametrize("spec", [BOTH, replace(BOTH, post_mixed_heads=None)], ids=["before and after", "before"])
def test_strided(spec: Spec, folder: Path) -> None:
    """Queries, keys, values and gradients of outputs whose heads alternate."""
    op = build(spec, folder)
    inputs = Sampler.for_checks(spec, Sizes(1, 16, 4, 37, 37), torch.device("cpu")).inputs()
    weights = inputs.options(inputs.named)

    def gradients(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(op(*leaves, **weights), leaves, grad_out)

    tensors = inputs.q, inputs.k, inputs.v, inputs.q.flip(1)
    alternating = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for ours, expected in zip(gradients(*alternating), gradients(*tensors), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "name", ["before and after", "before, wide values, a window", "4 heads before, 16 after, a window"]
)
def test_hidden_numbers(name: str, folder: Path) -> None:
    """Hidden keys, rows and gradients change no bit of other gradients."""
    spec = CASES[name]
    op = build(spec, folder)
    n_q, n_k, cut = 66, 71, 30
    inputs = Sampler.for_checks(spec, Sizes(1, 16, 16, n_q, n_k), torch.device("cpu")).inputs()

    def results(call: hidden.Call) -> dict[str, Tensor]:
        *qkv, grad_out = call
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = op(*leaves, **inputs.options(inputs.named), scale=0.25)
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
        return {"dq": dq, "dk": dk, "dv": dv}

    grad_out = torch.randn((*inputs.q.shape[:-1], spec.value_head_dim), generator=torch.Generator().manual_seed(1))
    call = hidden.Call(inputs.q, inputs.k, inputs.v, grad_out.to(inputs.q.dtype))
    edges = [
        edge._replace(kept={what: rows for what, rows in edge.kept.items() if what in ("dq", "dk", "dv")})
        for edge in hidden.edges(spec, n_q, n_k, cut)
    ]
    assert not hidden.failures(results, call, [edge for edge in edges if edge.kept])


def test_rows_of_a_strip() -> None:
    """A bundle has 512 sums of matrices' gradients, of which each block of 32 rows needs one or more."""
    backward = mixed_on_chip(BOTH).strip["backward"]
    assert StripModule.of([backward]).limits.max_rows == PROGRAMS * 32
    assert StripModule.of([mixed_on_chip(BOTH).strip["decode"]]).limits.max_rows is None


@pytest.mark.parametrize("bundles", [1, 4])
@pytest.mark.parametrize(
    "lines",
    [[256] * 64, [*range(1, 109)], [*range(109, 193)], [0] * 50 + [*range(1, 60)], [8] * 8, [256]],
    ids=["equal", "first rows", "later rows", "rows that see no key", "few", "one block"],
)
def test_chunks_of_keys(lines: list[int], bundles: int) -> None:
    """The chosen number of chunks takes at most an eighth longer than the best one.

    132 multiprocessors compute the chunks of the largest blocks first.
    """
    start, most = 2, PROGRAMS // len(lines)

    def time(chunks: int) -> int:
        free = [0] * 132
        for size in sorted(lines, reverse=True):
            for chunk in [*range(chunks)] * bundles:
                free[free.index(min(free))] += size * (chunk + 1) // chunks - size * chunk // chunks + start
        return max(free)

    made = mixed_on_chip(BOTH)
    chosen = load_host(made, render(made), "backward")._balanced_chunks(lines, bundles, 132, most, start)
    assert 1 <= chosen <= most
    assert time(chosen) <= 1.125 * min(map(time, range(1, min(most, max(lines)) + 1)))


def test_other_groups_have_planes_of_scores() -> None:
    """Bundles of smaller groups may lack heads, and values of small groups lie side by side."""
    for spec in (
        replace(BOTH, mixed_heads=8, post_mixed_heads=4),
        replace(BOTH, mixed_heads=10, post_mixed_heads=None),
    ):
        assert mixed_on_chip(spec)["backward"].planes == ("scores", "grad_shares", "shares")
    assert mixed_on_chip(replace(BOTH, dropout=True))["backward"].planes == ("scores", "grad_shares", "shares")
    assert mixed_on_chip(BOTH, backend="triton")["backward"].planes == ("scores", "grad_shares", "shares")
