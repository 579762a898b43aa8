"""The rendered kernels themselves, run on the CPU by Triton's interpreter (fp32 and fp16; its bf16 is wrong)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_functions
import problems
import pytest
import torch

import mtagen
from mtagen.check import failures
from mtagen.errors import BackendError
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.planner.lift.tiling import Tile

TINY = (Sizes(4, 2, 1, 1, 1), Sizes(2, 2, 1, 9, 13))
RAGGED = (Sizes(1, 2, 1, 41, 58), Sizes(1, 1, 1, 50, 7))
KERNELS = [(1, 1), (3, 3), (6, 11), (2, 9), (5, 2), (4, 1), (1, 7)]
VARIANTS = [
    *((kernel, 16, "fp32", True, "both", "source") for kernel in KERNELS),
    (None, 16, "fp32", True, "both", "source"),
    ((6, 11), 16, "fp32", False, "both", "source"),
    ((5, 2), 16, "fp32", False, "both", "source"),
    ((6, 11), 24, "fp16", True, "left", "source"),
    ((4, 3), 16, "fp16", True, "right", "source"),
    ((6, 11), 16, "fp32", True, "both", "output"),
    ((4, 3), 16, "fp32", True, "right", "output"),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def retiled(op: AttentionOp, tile: Tile, workspace_bytes: int) -> AttentionOp:
    """The op with small tiles of scores and a small workspace, so that small problems have many of both."""
    return assemble(host_functions.retiled(op.plan, tile, workspace_bytes), torch_on_cpu=False)


def assert_accurate(op: AttentionOp, sizes: tuple[Sizes, ...]) -> None:
    assert not failures(op, op.plan.spec, torch.device("cpu"), sizes)


@pytest.mark.parametrize(("kernel", "head_dim", "dtype", "causal", "key_padding", "mask"), VARIANTS)
def test_as_planned(
    kernel: tuple[int, int] | None, head_dim: int, dtype: str, causal: bool, key_padding: str, mask: str
) -> None:
    op = mtagen.build(
        kernel, head_dim, dtype=dtype, causal=causal, key_padding=key_padding, mask=mask, backend="triton"
    )
    assert_accurate(op, (*TINY, *RAGGED))


WINDOWS = [
    ((6, 11), (20, -1), True, "both", "source"),
    ((6, 11), (20, 9), False, "both", "source"),
    ((6, 11), (7, -1), False, "left", "output"),
    ((5, 2), (0, -1), True, "both", "source"),
    ((5, 2), (12, 3), False, "both", "output"),
    ((2, 9), (-1, 4), False, "right", "source"),
    ((2, 9), (1, 1), False, "both", "source"),  # narrower than the bands at its edges
    (None, (30, -1), True, "both", "source"),
    (None, (0, 0), False, "both", "source"),
]


@pytest.mark.parametrize(("kernel", "window", "causal", "key_padding", "mask"), WINDOWS)
def test_windows(
    kernel: tuple[int, int] | None, window: tuple[int, int], causal: bool, key_padding: str, mask: str
) -> None:
    options = {"dtype": "fp32", "causal": causal, "key_padding": key_padding, "mask": mask}
    op = mtagen.build(kernel, 16, window=window, backend="triton", **options)
    assert_accurate(op, (*TINY, *RAGGED))
    assert_accurate(retiled(op, Tile(16, 32), workspace_bytes=2**10), (Sizes(1, 1, 1, 150, 161),))


@pytest.mark.parametrize("kernel", [(6, 11), (5, 2)])
@pytest.mark.parametrize("pipeline", ["tiles", "terms"])
def test_many_tiles_and_strips(kernel: tuple[int, int], pipeline: str) -> None:
    op = mtagen.build(kernel, 16, dtype="fp32", value_head_dim=32, backend="triton")
    op = retiled(op, Tile(16, 32, pipeline=pipeline), workspace_bytes=2**10)
    assert_accurate(op, (Sizes(1, 1, 1, 150, 161),))


@pytest.mark.usefixtures("memory_starts_as_nan")
def test_bands_in_parts() -> None:
    """Terms of scores on the band are on more diagonals than a program has room for."""
    op = mtagen.build((2, 60), 16, dtype="fp32", backend="triton")
    (terms,) = (kernel for kernel in op.plan.lift["forward"].kernels if kernel.role == "band_terms")
    constants = dict(terms.constants)
    assert constants["DIAGONALS"] < constants["REACH"] == 60
    assert_accurate(op, (Sizes(2, 2, 1, 80, 85),))  # many blocks of many entries


@pytest.mark.usefixtures("memory_starts_as_nan")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ((6, 11), {"head_dim": 24, "value_head_dim": 40}),
        ((5, 2), {"head_dim": 16, "causal": False}),
        ((3, 4), {"head_dim": 40, "mask": "output", "key_padding": "right", "dtype": "fp32"}),
    ],
    ids=str,
)
def test_tiles_by_pointer_and_by_descriptor(kernel: tuple[int, int], options: dict[str, Any], target: str) -> None:
    """Both ways read zeros outside of a tensor, wherever a tile begins and ends, and of rows that are no power of 2."""
    op = mtagen.build(kernel, **{"dtype": "fp16"} | options, backend="triton", target=target)
    read_as = {argument.type for one in op.plan.lift.values() for made in one.kernels for argument in made.arguments}
    assert read_as & {"tiles", "descriptor"} == {"tiles" if target == "sm_80" else "descriptor"}
    op = retiled(op, Tile(16, 32), workspace_bytes=2**10)
    assert_accurate(op, (Sizes(1, 2, 1, 1, 1), Sizes(1, 2, 1, 37, 45), Sizes(1, 1, 1, 50, 35)))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 40)])
def test_keys_that_do_not_fill_a_vector(window: tuple[int, int]) -> None:
    """Pointers store rows of g to the end of a vector, which must not matter though all scores are far below 0."""
    op = mtagen.build((1, 1), 16, dtype="fp16", causal=False, window=window, backend="triton", target="sm_80")
    problem = problems.random(op.plan.spec, Sizes(1, 2, 1, 40, 37), scale=0.25)
    inputs = problem.inputs
    inputs = replace(inputs, q=inputs.q + 3, k=inputs.k - 3, weights={"weight": torch.ones(2, 1, 1)})
    assert not problems.failures(retiled(op, Tile(16, 32), 2**10), op.plan.spec, problem._replace(inputs=inputs))


@pytest.mark.parametrize(
    ("kernel", "sizes", "chunk"),
    [
        ((2, 3), Sizes(3, 3, 3, 18, 19), 2),  # chunks start and end in the midst of a batch entry; the last is smaller
        ((3, 2), Sizes(3, 3, 3, 18, 19), 2),
        ((2, 3), Sizes(2, 4, 2, 18, 19), 1),  # chunks hold a group of heads
    ],
    ids=str,
)
def test_chunks_of_heads(kernel: tuple[int, int], sizes: Sizes, chunk: int) -> None:
    """The workspace holds ``chunk`` heads of keys; 9 heads end on a section of one in the forward pass."""
    op = mtagen.build(kernel, 16, dtype="fp32", backend="triton")
    spec, (cq, ck) = op.plan.spec, kernel
    gradients = 128 * 20 * 4  # of one head's scores: a strip of 128 rows at least, padded to 16 bytes
    lifted = (sizes.nk if cq <= ck else sizes.nq) * min(cq, ck) * 16 * (4 + 4)  # operand and its gradient
    workspace = chunk * sizes.heads // sizes.kv_heads * (gradients + lifted)
    op = retiled(op, Tile(16, 32), workspace_bytes=workspace)
    assert not problems.failures(op, spec, problems.random(spec, sizes))


@pytest.mark.parametrize("kernel", [(2, 3), (3, 2)])
def test_gradient_through_the_log_sum_exp(kernel: tuple[int, int]) -> None:
    op = mtagen.build(kernel, 16, dtype="fp32", backend="triton")
    problem = problems.random(op.plan.spec, Sizes(2, 2, 1, 9, 13))
    assert not problems.failures_through_lse(op, op.plan.spec, problem)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale: float) -> None:
    op = mtagen.build((2, 3), 16, dtype="fp32", backend="triton")
    problem = problems.random(op.plan.spec, Sizes(2, 2, 1, 9, 13), scale)
    assert not problems.failures(op, op.plan.spec, problem)
    assert not problems.decode_failures(op, op.plan.spec, problem)


def test_scores_that_grow_along_the_keys() -> None:
    op = retiled(mtagen.build((2, 3), 16, dtype="fp32", backend="triton"), Tile(16, 16), 2**10)
    problem = problems.growing(op.plan.spec, Sizes(1, 2, 1, 20, 50))
    assert not problems.failures(op, op.plan.spec, problem)
    for splits in (1, 3):
        assert not problems.decode_failures(op, op.plan.spec, problem, num_splits=splits)


def test_largest_kernel() -> None:
    op = mtagen.build((16, 17), 16, dtype="fp32", backend="triton")
    assert_accurate(op, (*TINY, Sizes(1, 1, 1, 35, 38)))


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_bf16_is_refused(backend: str) -> None:
    with pytest.raises(BackendError, match="Triton's interpreter computes bf16 wrongly"):
        mtagen.build((2, 3), 16, dtype="bf16", backend=backend, target="generic")


def test_build_renders_the_module_once_and_calls_render_nothing(rendered: Counter[str]) -> None:
    op = mtagen.build((2, 3), 16, dtype="fp32", backend="triton")
    assert rendered == {"module.py.j2": 1}
    assert_accurate(op, TINY[:1])
    assert rendered == {"module.py.j2": 1}


def test_lengths_of_any_stride() -> None:
    op = mtagen.build((2, 3), 16, dtype="fp32", backend="triton")
    q, k, v, weight = torch.randn(3, 2, 2, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 16), torch.randn(2, 2, 3)
    table = torch.tensor([[9, 0], [4, 0], [7, 0]], dtype=torch.int32)
    for lengths in (table[:, 0], table[0, :1].expand(3)):
        expected = op.decode(q, k, v, weight, cache_seqlens=lengths.contiguous())
        assert torch.equal(op.decode(q, k, v, weight, cache_seqlens=lengths), expected)
