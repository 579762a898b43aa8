"""The forward pass of the lowering "heads", on a CPU that plays the GPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import hidden
import pytest
import torch
from emulator import emulated, needs_compiler
from on_chip import mixed_on_chip
from torch import Tensor

from mtagen import Spec
from mtagen.codegen import cuda
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Inputs, Sampler
from mtagen.measure.judge import eager_op, judge
from mtagen.planner.heads.kernels import OutputsKernel

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory_starts_as_nan")]

BOTH = Spec(None, 64, mixed_heads=16, post_mixed_heads=16)
WINDOW = Spec(None, 16, mixed_heads=13, causal=False, window=(30, 9), dtype="fp16")
CASES: dict[str, tuple[int, Spec]] = {  # heads of queries
    "before and after": (16, BOTH),
    "before and after, full, fp16": (32, replace(BOTH, causal=False, dtype="fp16")),
    "before, fp16": (16, replace(BOTH, post_mixed_heads=None, dtype="fp16")),
    "after, 4 heads before": (16, Spec(None, 32, mixed_heads=4, post_mixed_heads=16)),
    "after": (16, Spec(None, 16, post_mixed_heads=16)),
    "12 heads before, 6 after, wide values": (24, Spec(None, 48, 64, mixed_heads=12, post_mixed_heads=6)),
    "13 heads, a window on both sides": (13, WINDOW),
    "pairs of 10 heads": (10, Spec(None, 16, mixed_heads=2, post_mixed_heads=2)),
    "a window": (16, replace(BOTH, window=(40, -1))),
}
every_case = pytest.mark.parametrize(("heads", "spec"), CASES.values(), ids=CASES)


def sizes_of(heads: int) -> tuple[Sizes, ...]:
    """Blocks of rows, and grouped keys; one row; rows without keys; several chunks of keys."""
    shared = heads // 4 if heads % 4 == 0 else 1
    return (
        Sizes(1, heads, shared, 70, 150),
        Sizes(2, heads, heads, 1, 1),
        Sizes(1, heads, heads, 70, 9),
        Sizes(1, heads, shared, 17, 1100),
    )


def forward(
    spec: Spec, folder: Path, seed: int = 0, *, checked: bool = False, chunks: int | None = None
) -> Callable[..., Any]:
    """The emitted host function with emulated kernels, which takes weights by name. It divides keys into `chunks`."""
    made = mixed_on_chip(spec)
    module = ModuleType("heads")
    exec(compile(cuda.render_heads_host(made), "heads.py", "exec"), vars(module))
    if chunks is not None:
        module._chunks = lambda *_: chunks  # type: ignore[attr-defined]
    for role, source in made.heads["forward"].cuda.items():
        module.LOADED[role][None] = emulated(source, folder, seed, checked=checked)  # the index of a CPU

    def run(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **weights: Tensor) -> Any:
        return module.forward(q, k, v, *weights.values(), spec.head_dim**-0.5 if scale is None else scale)

    return run


def random(spec: Spec, sizes: Sizes) -> Inputs:
    return Sampler.for_checks(spec, sizes, torch.device("cpu")).inputs()


def failures(run: Callable[..., Any], spec: Spec, inputs: Inputs) -> list[str]:
    """Results that break the accuracy rule."""
    judged = judge(run, eager_op(spec, return_lse=True), inputs)
    assert judged.keys() == {"out", "lse"}
    return [f"{name}: {one.error:.3g} > {one.allowed:.3g}" for name, one in judged.items() if not one.ok]


@every_case
def test_accurate(heads: int, spec: Spec, folder: Path) -> None:
    # Copies come early, then late. The sizes after the first two concern what all specs have in common.
    for seed, sizes in enumerate(sizes_of(heads)[: 4 if spec == BOTH else 2]):
        assert not failures(forward(spec, folder, seed), spec, random(spec, sizes)), sizes


@pytest.mark.parametrize("name", ["before and after", "13 heads, a window on both sides"])
def test_no_races(name: str, folder: Path) -> None:
    heads, spec = CASES[name]
    for seed, sizes in enumerate((Sizes(1, heads, heads, 40, 150), Sizes(1, heads, heads, 33, 600))):
        assert not failures(forward(spec, folder, seed, checked=True), spec, random(spec, sizes))


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    [
        ("before and after", 16, 8),
        ("before and after", 16, 4),
        ("before and after", 16, 1),
        ("pairs of 10 heads", 20, 5),
        ("12 heads before, 6 after, wide values", 24, 4),
        ("12 heads before, 6 after, wide values", 24, 8),
    ],
)
def test_heads_share_tiles(name: str, heads: int, kv_heads: int, folder: Path) -> None:
    """The bits of heads that have copies of the same keys and values; without races."""
    _, spec = CASES[name]
    inputs = random(spec, Sizes(1, heads, kv_heads, 40, 150))
    results = [
        forward(spec, folder, seed, checked=not seed, chunks=2)(inputs.q, k, v, **inputs.weights)
        for seed, (k, v) in enumerate(
            [(inputs.k, inputs.v), [x.repeat_interleave(heads // kv_heads, 1) for x in (inputs.k, inputs.v)]]
        )
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_chunks_of_a_window(folder: Path) -> None:
    """Several chunks of keys, the first of which does not begin with the first key."""
    spec = replace(WINDOW, window=(200, 60))
    assert not failures(forward(spec, folder), spec, random(spec, Sizes(1, 13, 13, 70, 420)))


def with_scores(spec: Spec, heads: int, steps: Tensor) -> Inputs:
    """Inputs whose scores are about ``steps``, one a key, for all 33 queries and all heads."""
    inputs = random(spec, Sizes(1, heads, heads, 33, len(steps)))
    axis = torch.zeros(spec.head_dim)
    axis[0] = 1.0
    q = inputs.q * 0.25
    q[..., 0] = 8.0
    k = (inputs.k + steps[:, None] * axis).to(inputs.k.dtype)
    weights = {name: 0.05 * x + torch.eye(x.shape[-1]) for name, x in inputs.weights.items()}
    return replace(inputs, q=q, k=k, weights=weights)


@pytest.mark.parametrize("name", ["before and after", "before, fp16"])
@pytest.mark.parametrize("slope", [30.0, -30.0])
def test_scores_far_apart(slope: float, name: str, folder: Path) -> None:
    """Scores grow from -200 to -140 along the keys, or fall to -260: rows need new references, and sums of chunks
    differ by many orders of magnitude.
    """
    heads, spec = CASES[name]
    spec = replace(spec, causal=False)
    inputs = with_scores(spec, heads, torch.linspace(-1, 1, 720) * slope - 200 + slope)  # 45 tiles
    assert not failures(forward(spec, folder, chunks=2), spec, inputs)


def test_scores_jump(folder: Path) -> None:
    """Sums become infinite within a tile, from one key on. A score that is not a number before still counts."""
    spec = replace(BOTH, causal=False)
    inputs = with_scores(spec, 16, torch.where(torch.arange(96) < 53, -150.0, 30.0))
    run = forward(spec, folder, chunks=1)
    assert not failures(run, spec, inputs)
    inputs.k[:, :, 3] = torch.nan
    _, lse = run(inputs.q, inputs.k, inputs.v, **inputs.weights)
    assert lse.isnan().all()


@pytest.mark.parametrize("name", ["before and after", "13 heads, a window on both sides"])
def test_hidden_numbers(name: str, folder: Path) -> None:
    heads, spec = CASES[name]
    n_q, n_k, cut = 66, 71, 40
    run, inputs = forward(spec, folder), random(spec, Sizes(1, heads, heads, n_q, n_k))

    def results(call: hidden.Call) -> dict[str, Tensor]:
        out, lse = run(call.q, call.k, call.v, **inputs.weights)
        return {"out": out, "lse": lse}

    call = hidden.Call(inputs.q, inputs.k, inputs.v, inputs.q)
    edges = [
        edge._replace(kept={name: rows for name, rows in edge.kept.items() if name in ("out", "lse")})
        for edge in hidden.edges(spec, n_q, n_k, cut)
    ]
    assert not hidden.failures(results, call, [edge for edge in edges if edge.kept])


def test_scores_further_ahead(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another number of tiles between scores and products with values, also if there are fewer tiles."""
    monkeypatch.setattr(OutputsKernel, "lead", 3)
    for seed, sizes in enumerate((Sizes(1, 16, 16, 3, 5), Sizes(1, 16, 4, 40, 150))):
        assert not failures(forward(BOTH, folder, seed, checked=True), BOTH, random(BOTH, sizes))


def test_strided(folder: Path) -> None:
    """Slices of a packed projection, and heads that share memory."""
    inputs = random(BOTH, Sizes(1, 16, 1, 37, 37))
    packed = torch.cat((inputs.q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)), 2)
    q, k, v = (x.transpose(1, 2) for x in packed.split([16, 1, 1], 2))
    run = forward(BOTH, folder)
    for ours, expected in zip(
        run(q, k.expand(-1, 16, -1, -1), v.expand(-1, 16, -1, -1), **inputs.weights),
        run(*(x.contiguous() for x in (inputs.q, inputs.k, inputs.v)), **inputs.weights),
        strict=True,
    ):
        assert torch.equal(ours, expected)
