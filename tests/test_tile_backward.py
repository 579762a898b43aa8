"""Fused backward: its plan, its index arithmetic in NumPy, what the compiler makes of it; on a GPU, its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from emulator import host_function, needs_compiler
from single_pass import Recorder, cheapest, on_gpu
from torch import Tensor

from mtagen import reference
from mtagen.accuracy import GRADIENT_FACTOR, compare
from mtagen.dtypes import TORCH_DTYPES
from mtagen.errors import PlanError
from mtagen.planner import get_target
from mtagen.planner.targets import Target
from mtagen.planner.tile.backward import TileBackward
from mtagen.planner.tile.backward_geometry import ROW_TILE
from mtagen.spec import Spec

HOPPER, AMPERE, ADA = (get_target(name) for name in ("sm_90a", "sm_80", "sm_89"))
TARGETS = (HOPPER, AMPERE, ADA)
KERNELS = ((6, 11), (1, 1), (3, 3), (2, 9), (7, 7), (4, 2), (11, 11), (5, 17), (16, 3), (16, 17), (1, 8), (5, 1))
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128)
Array = npt.NDArray[np.float64]


def case_id(value: object) -> str:
    return value.name if isinstance(value, Target) else str(value)


def plans() -> Iterator[TileBackward]:
    for kernel, dim, target in itertools.product(KERNELS, HEAD_DIMS, TARGETS):
        yield cheapest("backward", Spec(kernel, dim), target)
    for kernel, dim in itertools.product(KERNELS, HEAD_DIMS):
        yield cheapest("backward", Spec(kernel, dim, dtype="fp16"), HOPPER)
        yield cheapest("backward", Spec(kernel, dim, dropout=True), HOPPER)


# ---- The plan ----


def test_plans_fit_the_chip() -> None:
    for plan in plans():
        target, (main, helper) = get_target(plan.target), plan.registers.split
        assert plan.shared.size <= target.shared_per_block
        assert 32 * plan.warps * main + 128 * helper <= target.registers_per_multiprocessor
        assert plan.registers.needed <= main <= target.registers_per_thread


def test_the_next_scores_wait_for_the_helper_where_memory_is_short() -> None:
    for plan in plans():
        geometry = plan.geometry
        if not plan.hopper:
            assert plan.shared.score_ring == geometry.row_tiles + 1
            assert not plan.shared.waits_for_producer
            continue
        late = geometry.converts_scores  # the gradient of W, by a row tile
        read = {*range(-1 - late, geometry.row_tiles - late)}  # row tiles of S that a step's gradient of W takes
        stored = {*range(geometry.row_tiles, 2 * geometry.row_tiles)}  # while these are stored
        assert plan.shared.waits_for_producer == any(
            (a - b) % plan.shared.score_ring == 0 for a in stored for b in read
        )
        room = get_target(plan.target).shared_per_block - plan.shared.size
        assert not plan.shared.waits_for_producer or room < ROW_TILE * geometry.slab_row, "a row tile more has room"


def test_row_tiles_whose_place_is_taken_are_read_early() -> None:
    """Of the gradient of W, each takes the scores of its own row tile and of the one above."""
    for plan in (plan for plan in plans() if plan.shared.waits_for_producer):
        geometry = plan.geometry
        sets, first = plan.weight_gradient.sets, -geometry.converts_scores
        early = set()
        early_row_tiles = plan.shared.row_tiles_before_overwrite
        for warp, i in itertools.product(range(4), range(early_row_tiles)):  # as the helper's warps go
            early.add(first + warp // sets + i * (4 // sets))
        stored = range(geometry.row_tiles, 2 * geometry.row_tiles)
        for row_tile in range(first, first + geometry.row_tiles):
            taken = any((a - b) % plan.shared.score_ring == 0 for a in stored for b in (row_tile - 1, row_tile))
            assert row_tile in early or not taken, (plan.spec, row_tile)


@pytest.mark.parametrize("kernel", [(7, 6), (7, 7), (8, 8), (8, 9)], ids=str)
def test_widened_weights_save_the_helper_a_chunk(kernel: tuple[int, int]) -> None:
    plan, ampere = (cheapest("backward", Spec(kernel, 128), target) for target in (HOPPER, AMPERE))
    geometry = plan.geometry
    first, end = plan.weight_gradient.columns
    assert (geometry.taps, first % 8, (end - first) // 8) == (9, 0, 15)
    assert ampere.geometry.taps == kernel[1] | 1
    assert plan.weight_gradient.chunks == ampere.weight_gradient.chunks  # the zeros cost no products
    assert plan.toeplitz.mma_per_tile == ampere.toeplitz.mma_per_tile


def test_no_other_weights_are_widened() -> None:
    for kernel in ((6, 7), (9, 7), (13, 7), (7, 5), (7, 11), (8, 15), (7, 17)):
        plan = cheapest("backward", Spec(kernel, 128), HOPPER)
        geometry = plan.geometry
        assert geometry.taps == plan.spec.ck | 1


def test_operands_are_aligned() -> None:
    for plan in plans():
        geometry = plan.geometry
        assert geometry.owned % 2 == geometry.halo % 2 == 0  # G is stored two columns at a time
        assert geometry.slab_row % 32 == 16  # an odd number of 16-byte chunks: no bank conflicts
        assert plan.keys % (16 * geometry.parts) == 0  # steps of dS K, and whole chunks of dS for each part
        reached = plan.keys + 8 * (plan.toeplitz.chunks - 1)  # columns of the slab of G that windows of dS reach
        assert reached - geometry.slab_row // 2 <= geometry.halo  # past a row's end come the next row's zeros before G
        assert geometry.dq_columns * geometry.dq_parts >= plan.spec.head_dim
        assert geometry.dq_parts <= geometry.parts


@pytest.mark.parametrize(
    ("kernel", "head_dim", "makers"),
    [
        ((6, 11), 16, 1),
        ((6, 11), 32, 1),
        ((6, 11), 48, 1),
        ((6, 11), 64, 2),
        ((16, 17), 64, 1),
        ((6, 11), 96, 2),
        ((6, 11), 128, 2),
    ],
)
def test_few_warpgroups_make_the_gradient_of_queries(kernel: tuple[int, int], head_dim: int, makers: int) -> None:
    """Each reads all of dS. None of three warpgroups has registers for the sums of 64 columns."""
    plan = cheapest("backward", Spec(kernel, head_dim), HOPPER)
    geometry = plan.geometry
    assert geometry.dq_parts == makers
    assert geometry.parts < 3 or geometry.dq_columns < 64


def test_warps_share_products_evenly() -> None:
    for plan in plans():
        geometry = plan.geometry
        if plan.hopper:
            continue
        assert plan.keys % (16 * geometry.parts) == 0  # columns of scores
        assert geometry.key_warps * geometry.dim_warps == plan.warps
        assert plan.keys % (16 * geometry.key_warps) == plan.spec.head_dim % (16 * geometry.dim_warps) == 0
        sets = plan.weight_gradient.sets
        assert plan.warps % sets == geometry.row_tiles * sets % plan.warps == 0
        for sharing in (geometry.parts, geometry.key_warps, geometry.dim_warps):
            assert sharing & (sharing - 1) == 0  # addresses of their blocks differ from one another's by exclusive or


def test_every_row_shift_has_its_block() -> None:
    for plan in plans():
        share = plan.weight_gradient
        assert share.shifts * share.sets >= plan.spec.cq
        blocks = [(u, d) for u, d, _, _ in share.sums]
        assert sorted(blocks) == sorted(itertools.product(range(share.shifts), range(share.chunks)))
        for ((u, d), second), (operand, chunk) in zip(share.products, share.terms, strict=True):
            x = share.operands[operand]
            assert ((x.u, chunk), (x.u2, chunk + x.apart) if x.u2 >= 0 else None) == ((u, d), second)


@pytest.mark.parametrize(
    ("spec", "ahead"),
    [
        (Spec((4, 4), 64), 2),
        (Spec((9, 3), 128), 2),
        (Spec((6, 11), 64), 1),
        (Spec((7, 7), 64, dropout=True), 1),
        (Spec((6, 11), 64, dropout=True), 0),
        (Spec((7, 11), 64), 0),
    ],
    ids=case_id,
)
def test_operands_are_loaded_as_far_ahead_as_the_helper_has_registers(spec: Spec, ahead: int) -> None:
    assert cheapest("backward", spec, HOPPER).registers.weight_ahead == ahead


def test_a_loaded_operand_has_the_words_of_those_made_of_it() -> None:
    """Rows of outputs see the scores of a row shift and of the next; word_of_shift of weight_loaded.cuh finds them."""
    shares = [plan.weight_gradient for plan in plans() if plan.weight_gradient.loaded]
    made = [(share.operands[0], x) for share in shares for x in share.operands if x.apart]
    assert made
    for first, x in made:
        words = [first.u, first.u2, first.u + 1, first.u2 + 1]
        for shift in (x.u, x.u + 1):
            assert words[2 * (shift & 1) + (shift >> 1)] == shift
        assert (x.u2, x.apart) == (x.u, 1)


@pytest.mark.parametrize(
    ("spec", "target", "limit"),
    [
        (Spec((6, 11), 192), "sm_90a", "registers"),
        (Spec((6, 11), 64, value_head_dim=128), "sm_89", "value_head_dim"),
        (Spec((6, 11), 64, dtype="fp32"), "sm_90a", "dtype"),
        (Spec((17, 11), 64), "sm_90a", "kernel"),
        (Spec((6, 19), 64), "sm_90a", "kernel"),
        (Spec((6, 11), 256), "sm_89", "shared memory"),
    ],
)
def test_refusals_name_the_limit(spec: Spec, target: str, limit: str) -> None:
    with pytest.raises(PlanError, match=limit):
        cheapest("backward", spec, get_target(target))


# ---- The kernel's index arithmetic, in NumPy ----


class Gradients(NamedTuple):
    dq: Array
    dk: Array
    dv: Array
    dw: Array


def direct(spec: Spec, q: Array, k: Array, v: Array, w: Array, grad_out: Array) -> Gradients:
    """From the definition, by autograd in float64."""
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, w)]
    out = reference(
        *(x[None, None] for x in leaves[:3]),
        leaves[3][None],
        causal=spec.causal,
        key_padding=spec.key_padding,
        scale=1.0,
    )
    assert isinstance(out, Tensor)
    return Gradients(*(x.numpy() for x in torch.autograd.grad(out, leaves, torch.from_numpy(grad_out)[None, None])))


def modelled(
    plan: TileBackward, q: Array, k: Array, v: Array, w: Array, grad_out: Array, lse: Array, dot: Array
) -> Gradients:
    """As the kernel goes: CTA by CTA, step by step, through slabs whose columns and rows are the plan's."""
    spec = plan.spec
    n_q, n_k, rows, geometry = len(q), len(k), plan.rows, plan.geometry
    dq, dk, dv, dw = (np.zeros_like(x) for x in (q, k, v, w))
    taps = np.zeros((spec.cq, geometry.taps))
    taps[:, : spec.ck] = w
    off = n_k - n_q

    def rows_of(x: Array, first: int, count: int, outside: float = 0.0) -> Array:
        at = np.arange(first, first + count)
        inside = (at >= 0) & (at < len(x))
        return np.where(inside.reshape(-1, *[1] * (x.ndim - 1)), x[np.clip(at, 0, len(x) - 1)], outside)

    def window(slab: Array, begin: int, u: int, i: int) -> Array:
        return slab[(begin + np.arange(rows) + u) % len(slab)][:, i : i + plan.keys]

    for block in range(-(-n_k // geometry.owned)):
        c0 = block * geometry.owned - spec.pad_left
        first = max(0, c0 - off) if spec.causal else 0
        key_tile, value_tile = rows_of(k, c0, plan.keys), rows_of(v, c0 + spec.pad_left, plan.keys)
        scores = np.zeros((plan.shared.score_ring * ROW_TILE, plan.keys + 16))
        gradients = np.zeros((geometry.gradient_ring * ROW_TILE, plan.keys + geometry.halo))
        x, r = np.arange(plan.keys), np.arange(rows)[:, None]

        for step in range((n_q - first + ROW_TILE + rows - 1) // rows):
            row = first + step * rows
            tile_q, tile_do = rows_of(q, row, rows), rows_of(grad_out, row, rows)
            last = first + step * rows + r + off - c0  # column of S that each row sees last
            if not spec.causal:
                last = np.full_like(last, n_k + plan.keys)
            scores[(step * rows + r[:, 0]) % len(scores), : plan.keys] = np.where(x > last, 0, tile_q @ key_tile.T)

            c = np.zeros((rows, plan.keys))
            for u, i in np.ndindex(taps.shape):
                part = window(scores, step * rows - (spec.cq - 1), u, i)
                c[:, : part.shape[1]] += taps[u, i] * part
            exists = (x >= max(0, -(c0 + spec.pad_left))) & (x < min(geometry.owned, n_k - c0 - spec.pad_left))
            p = np.exp(c - rows_of(lse, row, rows, np.inf)[:, None])
            p = np.where(exists & (x + spec.pad_left <= last), p, 0)
            g = p * (tile_do @ value_tile.T - rows_of(dot, row, rows)[:, None])
            gradients[(step * rows + r[:, 0]) % len(gradients), geometry.halo : plan.keys] = g[:, : geometry.owned]

            ds = np.zeros((rows, plan.keys))
            for u, i in np.ndindex(taps.shape):
                part = window(gradients, step * rows - ROW_TILE, u, i)
                ds[:, : part.shape[1]] += taps[spec.cq - 1 - u, geometry.halo - i] * part
            ds = np.where(x <= last - ROW_TILE, ds, 0)

            above = np.concatenate([rows_of(q, row - ROW_TILE, ROW_TILE), tile_q[: rows - ROW_TILE]])
            part = ds @ key_tile
            for i in range(rows):
                if 0 <= row - ROW_TILE + i < n_q:
                    dq[row - ROW_TILE + i] += part[i]
            for sums, tile, lag, end in (
                (dk, ds.T @ above, 0, plan.keys),  # with parts of the neighbours' columns
                (dv, p.T @ tile_do, spec.pad_left, geometry.owned),
            ):
                for column in range(max(0, -(c0 + lag)), min(end, n_k - c0 - lag)):
                    sums[c0 + lag + column] += tile[column]

            begin, end = plan.weight_gradient.columns
            first_row = step * rows - geometry.converts_scores * ROW_TILE  # that the gradient of W takes
            for chunk in range(begin // 8, -(-end // 8)):
                columns = np.arange(8 * chunk, 8 * chunk + 8)
                owned = gradients[(first_row + np.arange(rows)) % len(gradients)][:, columns]
                owned = np.where((columns >= begin) & (columns < end), owned, 0)
                for u, d in itertools.product(range(spec.cq), range(plan.weight_gradient.chunks)):
                    at = 8 * (chunk + plan.weight_gradient.first_chunk + d)
                    if at < 0:
                        continue
                    shifted = scores[(first_row - (spec.cq - 1) + u + np.arange(rows)) % len(scores)]
                    part = shifted[:, at : at + 8].T @ owned
                    for diagonal in range(-7, 8):  # row - column
                        i = 8 * (plan.weight_gradient.first_chunk + d) + diagonal + geometry.halo
                        if 0 <= i < spec.ck:
                            dw[u, i] += part.diagonal(-diagonal).sum()
    return Gradients(dq, dk, dv, dw)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kernel", "padding"),
    [*((kernel, "both") for kernel in KERNELS), *itertools.product([(6, 11), (4, 2), (2, 17)], ["left", "right"])],
)
@pytest.mark.parametrize("target", TARGETS, ids=case_id)
def test_model_of_the_kernel(target: Target, kernel: tuple[int, int], padding: str, causal: bool) -> None:
    """Every pair of row and key in exactly one CTA, every window in its slab: the sums equal the definition's."""
    rng = np.random.default_rng(0)
    spec = Spec(kernel, 128, causal=causal, key_padding=padding)
    plan = cheapest("backward", spec, target)
    for n_q, n_k in ((100, 230), (140, 97)):
        q, k, v, grad_out = (rng.standard_normal((n, 4)) / 2 for n in (n_q, n_k, n_k, n_q))
        w = rng.standard_normal(kernel) / 4
        tensors = [torch.from_numpy(x)[None, None] for x in (q, k, v)]
        weight = torch.from_numpy(w)[None]
        out, lse = reference(*tensors, weight, causal=causal, key_padding=padding, scale=1.0, return_lse=True)
        dot = (out[0, 0].numpy() * grad_out).sum(1)
        row_lse = np.where(np.isinf(lse[0, 0].numpy()), np.inf, lse[0, 0].numpy())
        ours = modelled(plan, q, k, v, w, grad_out, row_lse, dot)
        for name, a, b in zip(Gradients._fields, ours, direct(spec, q, k, v, w, grad_out), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12, err_msg=f"{name}, {n_q} x {n_k}")


# ---- Gradients ----


class Problem(NamedTuple):
    """What the backward pass is given, and its gradients in eager PyTorch: in the same dtype, and in float64."""

    grad_out: Tensor
    grad_lse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    out: Tensor
    lse: Tensor
    eager: tuple[Tensor, ...]
    ref64: tuple[Tensor, ...]


def problem(
    spec: Spec,
    batch: int,
    heads: int,
    kv_heads: int,
    n_q: int,
    n_k: int,
    *,
    size: float = 1.0,
    strided: bool = False,
    device: str = "cuda",
) -> Problem:
    torch.manual_seed(0)

    def tensor(heads: int, n: int) -> Tensor:
        shape = (batch, n, heads, spec.head_dim) if strided else (batch, heads, n, spec.head_dim)
        x = torch.randn(shape, device=device).to(TORCH_DTYPES[spec.dtype])
        return x.transpose(1, 2) if strided else x

    q, k, v, grad_out = tensor(heads, n_q) * size, tensor(kv_heads, n_k), tensor(kv_heads, n_k), tensor(heads, n_q)
    weight = torch.randn(heads, spec.cq, spec.ck, device=device) / (spec.cq * spec.ck) ** 0.5
    grad_lse = torch.randn(batch, heads, n_q, device=device)

    def eager(dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        leaves.append(weight.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_())
        out, lse = reference(*leaves, causal=spec.causal, key_padding=spec.key_padding, mask=spec.mask, return_lse=True)
        seen = lse.isfinite()
        loss = (out * grad_out.to(dtype)).sum() + (lse * grad_lse.to(dtype))[seen].sum()
        return out.detach(), lse.detach(), torch.autograd.grad(loss, leaves)

    out64, lse64, ref64 = eager(torch.float64)
    if device == "cuda":
        out, lse = loaded("forward", spec, HOPPER)(q, k, v, weight, spec.head_dim**-0.5)
    else:
        out, lse = out64.to(q.dtype), lse64.float()
    return Problem(grad_out, grad_lse, q, k, v, weight, out, lse, eager(q.dtype)[2], ref64)


@cache
def loaded(name: str, spec: Spec, target: Target) -> Callable[..., tuple[Tensor, ...]]:
    return on_gpu(cheapest(name, spec, target))


def run(
    backward: Callable[..., tuple[Tensor, ...]],
    given: Problem,
    monkeypatch: pytest.MonkeyPatch,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients, written over NaN."""
    empty = Tensor.new_empty
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
        return backward(*given[:8], given.q.shape[-1] ** -0.5, deterministic=deterministic)


def assert_accurate(
    backward: Callable[..., tuple[Tensor, ...]],
    given: Problem,
    monkeypatch: pytest.MonkeyPatch,
    *,
    deterministic: bool = False,
) -> None:
    names = ("dq", "dk", "dv", "dweight")
    gradients = run(backward, given, monkeypatch, deterministic=deterministic)
    for name, gradient, eager, ref64 in zip(names, gradients, given.eager, given.ref64, strict=True):
        terms = ref64.abs().max().item()
        result = compare(gradient, eager, ref64, factor=GRADIENT_FACTOR, terms=terms)
        assert result.ok, (name, result)


def test_grids_are_legal_at_any_length() -> None:
    backward, grids = Recorder(cheapest("backward", Spec((6, 11), 128), HOPPER)), []
    for batch, n in ((1, 2**21), (8192, 16)):
        q = torch.empty(batch, 16, n, 128, dtype=torch.bfloat16, device="meta")
        weight, lse = torch.empty(16, 6, 11, device="meta"), torch.empty(batch, 16, n, device="meta")
        grids += [launch.grid for launch in backward(q, lse, q, q, q, weight, q, lse, 1.0)]
    assert len(grids) == 6
    assert all(0 < grid[0] < 2**31 and all(0 < y <= 65535 for y in grid[1:]) and len(grid) <= 3 for grid in grids)


@pytest.mark.parametrize(
    ("n_q", "deterministic", "sections"), [(32768, False, (2, 4)), (32767, False, (8, 1)), (32768, True, (8, 1))]
)
def test_heads_of_long_sequences_come_in_sections(n_q: int, deterministic: bool, sections: tuple[int, int]) -> None:
    """Of two heads of keys; not where a CTA waits for the one before of its head."""
    backward = Recorder(cheapest("backward", Spec((6, 11), 128), HOPPER))
    q, k = (torch.empty(1, heads, n_q, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 8))
    weight, lse = torch.empty(16, 6, 11, device="meta"), torch.empty(1, 16, n_q, device="meta")
    _, main, _ = backward(q, lse, q, k, k, weight, q, lse, 1.0, deterministic=deterministic)
    assert main.grid[::2] == sections


@needs_compiler
@pytest.mark.parametrize(
    ("target", "spec"),
    [
        (AMPERE, Spec((6, 11), 128)),
        (AMPERE, Spec((16, 17), 80, causal=False, dtype="fp16")),
        (AMPERE, Spec((1, 1), 64)),
        (AMPERE, Spec((3, 4), 48, key_padding="right")),
        (AMPERE, Spec((2, 9), 256, key_padding="left", causal=False)),
        (AMPERE, Spec((6, 11), 64, mask="output")),
        (AMPERE, Spec((11, 4), 48, mask="output", key_padding="right", dtype="fp16")),
        (ADA, Spec((5, 17), 64, mask="output", key_padding="left")),
        (ADA, Spec((6, 11), 64, causal=False)),
        (ADA, Spec((11, 11), 112)),
        (ADA, Spec((7, 2), 16, dtype="fp16")),
    ],
    ids=case_id,
)
def test_emulated(target: Target, spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emitted kernels themselves, on a CPU that plays the GPU; copies come early, then late."""
    plan = cheapest("backward", spec, target)
    for seed, size in enumerate([(1, 2, 1, 150, 150), (1, 2, 2, 70, 100)]):
        backward = host_function(plan, folder, seed)
        given = problem(spec, *size, strided=seed == 0, device="cpu")
        assert_accurate(backward, given, monkeypatch, deterministic=seed == 1)


# ---- On a GPU ----


GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
SIZES = (
    (8, 8, 4, 1, 1),  # enough rows that eager is not exact by luck
    (2, 4, 4, 5, 5),
    (2, 2, 2, 64, 64),
    (2, 4, 2, 113, 203),
    (2, 4, 4, 203, 113),  # when causal, most queries see no key
    (2, 4, 2, 799, 3),
    (1, 2, 1, 333, 333),
    (1, 2, 1, 1100, 1100),
)
WAYS = pytest.mark.parametrize("target", TARGETS, ids=case_id)  # the portable kernels are compiled for the GPU here
GRID = [
    *(Spec(kernel, 64, causal=causal) for kernel in KERNELS for causal in (True, False)),
    *(Spec((6, 11), dim) for dim in HEAD_DIMS),
    *(Spec((6, 11), dim, dtype="fp16") for dim in (64, 80, 128)),
    *(Spec((6, 11), 64, causal=causal, key_padding=side) for side in ("left", "right") for causal in (True, False)),
    Spec((16, 17), 128, causal=False, dtype="fp16"),
]


PORTABLE_GRID = [
    *(
        (AMPERE, spec)
        for spec in (GRID[0], Spec((1, 1), 64), Spec((16, 17), 128, causal=False, dtype="fp16"), Spec((3, 3), 256))
    ),
    *((AMPERE, Spec((6, 11), dim, causal=dim % 32 == 0)) for dim in HEAD_DIMS),
    *((ADA, Spec((6, 11), dim, causal=dim % 32 == 0)) for dim in (64, 80, 128)),
    (ADA, Spec((7, 7), 112, key_padding="right", dtype="fp16")),
]


class TestOnGpu:
    pytestmark = GPU_MARKS

    @pytest.mark.parametrize("spec", GRID, ids=str)
    def test_accuracy(self, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
        for size in SIZES:
            assert_accurate(loaded("backward", spec, HOPPER), problem(spec, *size), monkeypatch)

    @pytest.mark.parametrize(("target", "spec"), PORTABLE_GRID, ids=case_id)
    def test_accuracy_without_wgmma(self, target: Target, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
        for size in SIZES:
            assert_accurate(loaded("backward", spec, target), problem(spec, *size), monkeypatch)

    @WAYS
    def test_strided_inputs(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = Spec((6, 11), 128)
        assert_accurate(loaded("backward", spec, target), problem(spec, 2, 4, 2, 113, 203, strided=True), monkeypatch)

    @WAYS
    @pytest.mark.parametrize("spec", [Spec((6, 11), 128), Spec((6, 11), 64), Spec((3, 3), 64, causal=False)], ids=str)
    def test_bit_reproducible(self, spec: Spec, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        given = problem(spec, 2, 8, 4, 1500, 1500)
        backward = loaded("backward", spec, target)
        first = run(backward, given, monkeypatch, deterministic=True)
        for _ in range(50):
            again = run(backward, given, monkeypatch, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    @WAYS
    def test_all_but_dq_are_reproducible_without_being_asked(
        self, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = Spec((6, 11), 64)
        given = problem(spec, 2, 8, 4, 1500, 1500)
        backward = loaded("backward", spec, target)
        first = run(backward, given, monkeypatch)
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first[1:], run(backward, given, monkeypatch)[1:], strict=True))

    @WAYS
    def test_large_scores(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """|q . k| beyond fp16's range: the slabs hold a fraction of it."""
        spec = Spec((6, 11), 128)
        given = problem(spec, 1, 2, 2, 300, 300, size=4000.0)
        assert (given.q.float() @ given.k.float().mT).abs().max() > 2**17
        gradients = run(loaded("backward", spec, target), given, monkeypatch)
        assert all(x.isfinite().all() for x in gradients)
