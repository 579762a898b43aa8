"""Fused decode: its plan, its index maps in NumPy, what the compiler makes of it; on a GPU, its results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from single_pass import Recorder, cheapest, on_gpu
from torch import Tensor

from mtagen import reference
from mtagen.accuracy import compare
from mtagen.codegen.cuda import render
from mtagen.codegen.host import MOST_KEYS, cache_shapes_of
from mtagen.dtypes import TORCH_DTYPES
from mtagen.errors import PlanError
from mtagen.planner import get_target, target_for_capability
from mtagen.planner.tile.decode import DecodeTile, TileDecode
from mtagen.runtime.nvrtc import compile_cubin
from mtagen.runtime.offline import usage_of_cubins
from mtagen.spec import MAX_NEW_TOKENS, Spec

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")
KERNELS = ((6, 11), (1, 1), (3, 3), (5, 2), (1, 7), (11, 1), (16, 17))
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
GROUPS = (1, 2, 3, 4, 7, 8, 32)


def plans() -> Iterator[TileDecode]:
    for target, kernel, dim in itertools.product(TARGETS, KERNELS, HEAD_DIMS):
        yield cheapest("decode", Spec(kernel, dim), get_target(target))


# ---- The plan ----


def test_tiles_fit_their_target() -> None:
    for plan in plans():
        target = get_target(plan.target)
        for tile in plan.tiles:
            assert tile.shared.size <= target.shared_per_block
            assert tile.rule(target).slots >= target.multiprocessors
            assert tile.keys % (16 * tile.warps) == 0
            assert 16 % tile.chunks == 0


class Call(NamedTuple):
    """How the emitted host function decodes: the kernel and its tile, heads of a CTA, splits, and the blocks."""

    tile: DecodeTile
    heads: int
    splits: int
    least_keys: int
    blocks: int


class Caller:
    """Calls the emitted host function of a plan on tensors without data; no kernel runs."""

    def __init__(self, plan: TileDecode) -> None:
        self._plan, self._decode = plan, Recorder(plan)

    def __call__(self, group: int, n_new: int, *, owners: int = 1, n: int = 100, splits: int | None = None) -> Call:
        """Of ``owners`` heads of keys, each with ``group`` heads of queries, against ``n`` keys."""
        spec = self._plan.spec

        def rows(heads: int, n: int) -> Tensor:
            return torch.empty(1, heads, n, spec.head_dim, dtype=torch.bfloat16, device="meta")

        q, k = rows(owners * group, spec.cq - 1 + n_new), rows(owners, n)
        weight = torch.empty(owners * group, *spec.kernel, device="meta")
        first, *merges = self._decode(q, k, k, weight, 1.0, None, splits)
        tile = next(tile for tile in self._plan.tiles if tile.role == first.kernel.role)
        numbers = (first.arguments[name] for name in ("cta_heads", "num_splits", "least_keys"))
        call = Call(tile, *numbers, *first.grid)
        assert [merge.kernel.role for merge in merges] == ["combine"] * (call.splits > 1)
        assert all(merge.grid == (owners * group * n_new,) for merge in merges)
        assert all(merge.arguments["num_splits"] == call.splits for merge in merges)
        return call


def test_every_call_has_a_kernel() -> None:
    for plan in plans():
        decode = Caller(plan)
        for group, n_new in itertools.product(GROUPS, range(1, MAX_NEW_TOKENS + 1)):
            tile, heads, splits, _, blocks = decode(group, n_new, owners=3)
            assert 1 <= heads <= tile.heads
            assert heads * (plan.spec.cq - 1 + n_new) <= tile.rows
            assert heads * n_new <= tile.pairs
            assert heads * -(-n_new // tile.tokens) <= tile.convolved_tiles
            assert blocks == 3 * -(-group // heads) * splits


def test_a_group_takes_the_smallest_kernel_that_holds_it() -> None:
    """If none does, it is shared out evenly among as few CTAs as hold it."""
    decode = Caller(cheapest("decode", Spec((6, 11), 128), get_target("sm_90a")))
    chosen = {call: decode(*call).tile.heads for call in [(1, 1), (1, 8), (2, 1), (4, 1), (2, 4), (4, 4), (8, 1)]}
    assert chosen == {(1, 1): 1, (1, 8): 1, (2, 1): 4, (4, 1): 4, (2, 4): 4, (4, 4): 8, (8, 1): 8}
    assert [decode(group, 1).heads for group in (8, 9, 16, 17)] == [8, 5, 8, 6]


def test_splits_fill_the_gpu() -> None:
    plan = cheapest("decode", Spec((6, 11), 128), get_target("sm_90a"))
    decode, tile = Caller(plan), plan.tiles[0]
    slots = plan.rule(tile).slots
    for owners in (1, 16, 128, 1000):
        call = decode(1, 1, owners=owners, n=2**20)
        assert call.tile == tile
        assert call.blocks == owners * call.splits
        assert call.blocks / (-(-call.blocks // slots) * slots) > 0.85
    assert decode(1, 1, owners=16, n=1).splits == 1
    assert 1 < decode(1, 1, n=10_000).splits <= 10_000 // tile.keys
    assert decode(1, 1, n=1000, splits=7).splits == 7


def test_splits_of_many_sequences() -> None:
    """They have as many keys as those of the longest sequence, if the sequences alone fill half of the GPU."""
    plan = cheapest("decode", Spec((6, 11), 128), get_target("sm_90a"))
    decode, slots = Caller(plan), plan.rule(plan.tiles[0]).slots
    few, many = (decode(1, 1, owners=owners, n=2**15) for owners in (slots // 2 - 1, slots // 2))
    assert few.splits > 1
    assert few.least_keys == 0
    assert many.splits > 1
    assert (many.least_keys - 1) * many.splits < 2**15 <= many.least_keys * many.splits
    assert decode(1, 1, owners=slots, n=2**15, splits=16).least_keys == 0  # so that no other sequence matters


@pytest.mark.parametrize("kernel", [(6, 11), (1, 1)])
def test_splits_of_pages_read_whole_tiles(kernel: tuple[int, int]) -> None:
    spec = Spec(kernel, 128, page_size=64)
    splits = eval(cache_shapes_of(spec).splits.format(planned=1, keys=2**15))
    tile = cheapest("decode", spec, get_target("sm_90a")).tiles[0]
    assert -(-(2**15 // splits + kernel[1] - 1) // tile.keys) * tile.keys <= MOST_KEYS
    assert eval(cache_shapes_of(spec).splits.format(planned=99, keys=2**15)) == 99


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Spec((17, 3), 64), "16"),
        (Spec((3, 18), 64), "17"),
        (Spec((6, 11), 64, dtype="fp32"), "bf16"),
        (Spec((6, 11), 72), "multiple of 16"),
    ],
)
def test_what_does_not_fit_is_refused(spec: Spec, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cheapest("decode", spec, get_target("sm_90a"))


# ---- The index maps ----


def mma(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """mma.m16n8k16 on fragments: a (32, 4, 2), b (32, 2, 2), c (32, 4), as the PTX manual lays them out."""
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for i, e in itertools.product(range(4), range(2)):
        left[g + 8 * (i % 2), 2 * t + 8 * (i // 2) + e] = a[:, i, e]
    for i, e in itertools.product(range(2), range(2)):
        right[2 * t + 8 * i + e, g] = b[:, i, e]
    product = left @ right
    for i in range(4):
        c[:, i] += product[g + 8 * (i // 2), 2 * t + i % 2]


def ldmatrix(memory: np.ndarray, address: np.ndarray) -> np.ndarray:
    """ldmatrix.x4: byte address of a row of 8 elements per lane -> fragments (32, 4, 2)."""
    rows = np.stack([memory[a // 2 : a // 2 + 8] for a in address]).reshape(4, 8, 8)
    lane = np.arange(32)
    return np.stack([rows[:, lane // 4, 2 * (lane % 4) + e].T for e in range(2)], axis=-1)


def convolved(plan: TileDecode, tile: DecodeTile, slab: np.ndarray, weight: np.ndarray, n_new: int) -> np.ndarray:
    """What decode.cu.j2 computes of one head's slab: (n_new, keys)."""
    cq, ck = plan.spec.kernel
    window, lane = plan.window_chunks, np.arange(32)
    g, t = lane // 4, lane % 4
    out = np.full((n_new, tile.keys), np.nan)

    def tap_offset(i: int) -> int:
        tap = min(i, cq * window - 1)
        return tap // window * tile.slab_row + tap % window * 16

    def fragment(tap: int) -> np.ndarray:
        u, v = tap // window, tap % window * 8 + 2 * t[:, None] + np.arange(2) - g[:, None]
        inside = (u < cq) & (v >= 0) & (v < ck)
        return np.where(inside, weight[min(u, cq - 1), np.clip(v, 0, ck - 1)], 0)

    for token in range(0, n_new, tile.tokens):
        row = np.minimum(token + lane % 16 // tile.chunks, n_new - 1)
        base = row * tile.slab_row + lane % 16 % tile.chunks * 16
        c = np.zeros((32, 4))
        for step in range(plan.steps):
            a = ldmatrix(slab, base + np.where(lane < 16, tap_offset(2 * step), tap_offset(2 * step + 1)))
            mma(c, a, np.stack([fragment(2 * step), fragment(2 * step + 1)], axis=1))
        for r, e in itertools.product(range(2), range(2)):
            m = g + 8 * r
            n = np.minimum(token + m // tile.chunks, n_new - 1)
            out[n, m % tile.chunks * 8 + 2 * t + e] = c[:, 2 * r + e]
    return out


@pytest.mark.parametrize("kernel", KERNELS)
def test_convolution(kernel: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    cq, ck = kernel
    weight = random.standard_normal(kernel)
    plans = [cheapest("decode", Spec(kernel, dim), get_target("sm_89")) for dim in (64, 128, 256)]
    tiles = {tile.keys: (plan, tile) for plan in plans for tile in plan.tiles}
    assert {32, 64} <= tiles.keys()
    for (plan, tile), n_new in itertools.product(tiles.values(), (1, 2, 3, 8)):
        slab = random.standard_normal((cq - 1 + n_new, tile.slab_row // 2))
        expected = np.zeros((n_new, tile.keys))
        for u, v in np.ndindex(cq, ck):
            expected += weight[u, v] * slab[u : u + n_new, v : v + tile.keys]
        np.testing.assert_allclose(convolved(plan, tile, slab.ravel(), weight, n_new), expected, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_slab_has_room_for_the_tile_and_the_one_before(kernel: tuple[int, int]) -> None:
    plan = cheapest("decode", Spec(kernel, 64), get_target("sm_90a"))
    carry = plan.window_chunks - 1
    assert 8 * (carry - 1) < kernel[1] - 1 <= 8 * carry
    for tile in plan.tiles:
        assert tile.slab_row >= 16 * (tile.chunks + carry)
        assert tile.slab_row // 16 % 2 == tile.weights_row // 16 % 2 == 1  # no bank conflicts


# ---- What the compiler makes of it ----


COMPILED = [
    *itertools.product(("sm_80", "sm_89", "sm_90a"), [(6, 11)], [(128, 128)], ["bf16"], ["source"]),
    ("sm_80", (6, 11), (80, 80), "fp16", "source"),
    ("sm_89", (6, 11), (256, 256), "bf16", "source"),
    ("sm_90a", (6, 11), (192, 192), "fp16", "source"),
    ("sm_90a", (6, 11), (32, 96), "bf16", "output"),
    ("sm_80", (1, 1), (64, 64), "bf16", "source"),
    ("sm_80", (3, 3), (96, 96), "bf16", "source"),
    ("sm_89", (5, 2), (64, 64), "fp16", "source"),
    ("sm_90a", (16, 17), (128, 128), "bf16", "output"),
]


@pytest.mark.parametrize(("target", "kernel", "dims", "dtype", "mask"), COMPILED)
def test_compiles_without_spills(
    target: str, kernel: tuple[int, int], dims: tuple[int, int], dtype: str, mask: str
) -> None:
    plan = cheapest("decode", Spec(kernel, *dims, dtype=dtype, mask=mask), get_target(target))
    cubin = compile_cubin(render(plan), target)
    usage = usage_of_cubins(cubin)
    for launched in plan.kernels:
        used = usage[launched.name]
        assert used.stack == 0
        assert used.registers <= launched.registers
        multiplies = sum(count for name, count in used.opcodes.items() if name.startswith("HMMA"))
        assert bool(multiplies) == (launched.role != "combine")


# ---- On a GPU ----


def gpu_plan(spec: Spec) -> TileDecode:
    return cheapest("decode", spec, target_for_capability(torch.cuda.get_device_capability()))


@cache
def build(spec: Spec) -> Callable[..., tuple[Tensor, Tensor]]:
    return on_gpu(gpu_plan(spec))


def inputs(
    spec: Spec, batch: int, heads: int, kv_heads: int, n: int, n_new: int, magnitude: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q_tail, k, v (as a projection leaves them), weight."""
    torch.manual_seed(0)

    def rows(n: int, heads: int, dim: int) -> Tensor:
        x = torch.randn(batch, n, heads, dim, device="cuda").transpose(1, 2)
        return x.to(TORCH_DTYPES[spec.dtype])

    weight = torch.randn(heads, *spec.kernel, device="cuda") * (spec.cq * spec.ck) ** -0.5
    q = rows(spec.cq - 1 + n_new, heads, spec.head_dim) * magnitude
    return q, rows(n, kv_heads, spec.head_dim) * magnitude, rows(n, kv_heads, spec.value_head_dim), weight


def expected(
    spec: Spec, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """The reference, each sequence alone; queries before its first key are left out, for they do not exist."""
    n_new = q.shape[2] - (spec.cq - 1)
    outs, lses = [], []
    for b, n in enumerate(lengths):
        out = torch.zeros(1, q.shape[1], n_new, v.shape[3], dtype=dtype, device=q.device)
        lse = torch.full(out.shape[:3], -torch.inf, dtype=dtype, device=q.device)
        if n:
            tensors = (x[b : b + 1].to(dtype) for x in (q[:, :, -n:], k[:, :, :n], v[:, :, :n]))
            options = {"causal": spec.causal, "key_padding": spec.key_padding, "mask": spec.mask, "scale": scale}
            part = reference(*tensors, weight, **options, return_lse=True)
            rows = min(n_new, n)
            out[:, :, n_new - rows :], lse[:, :, n_new - rows :] = (x[:, :, -rows:] for x in part)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def failures(
    spec: Spec,
    heads: int,
    kv_heads: int,
    n: int,
    n_new: int,
    *,
    lengths: list[int] | None = None,
    num_splits: int | None = None,
    magnitude: float = 1.0,
    scale: float | None = None,
) -> list[str]:
    """What breaks the accuracy rule; keys past the lengths and queries before the start are NaN."""
    batch = len(lengths) if lengths else 2
    q, k, v, weight = inputs(spec, batch, heads, kv_heads, n, n_new, magnitude)
    scale = spec.head_dim**-0.5 if scale is None else scale
    stop = torch.tensor(lengths or [n] * batch, dtype=torch.int32, device="cuda")
    stale = (torch.arange(n, device="cuda") >= stop[:, None])[:, None, :, None]
    position = stop[:, None] - q.shape[2] + torch.arange(q.shape[2], device="cuda")
    tail = q.masked_fill((position < 0)[:, None, :, None], torch.nan)
    caches = (x.masked_fill(stale, torch.nan) for x in (k, v))
    ours = build(spec)(tail, *caches, weight, scale, stop if lengths else None, num_splits)
    # A power of two in q changes nothing but that eager's fp16 scores, large before they are scaled, do not overflow.
    exact, eager = (
        expected(spec, dtype, q / magnitude, k, v, weight, stop.tolist(), scale * magnitude)
        for dtype in (torch.float64, q.dtype)
    )
    found = []
    for name, terms, *results in zip(("out", "lse"), (v.abs().max().item(), 0.0), ours, eager, exact, strict=True):
        verdict = compare(*results, terms=terms)
        if not verdict.ok:
            sizes = f"H={heads}/{kv_heads} N={n} new={n_new} lengths={lengths} splits={num_splits}"
            found.append(f"{spec} {sizes} {name}: {verdict.error:.3g} > {verdict.allowed:.3g}")
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(("kernel", "dim"), [((6, 11), dim) for dim in HEAD_DIMS] + [(k, 64) for k in KERNELS[1:]])
    def test_accuracy(self, kernel: tuple[int, int], dim: int, causal: bool, dtype: str) -> None:
        spec = Spec(kernel, dim, causal=causal, dtype=dtype)
        assert not [
            failure
            for heads, kv_heads, n, n_new in (
                (2, 2, 1000, 1),
                (2, 2, 331, 2),
                (8, 2, 517, 1),
                (4, 1, 260, 4),
                (3, 1, 700, 8),
            )
            for failure in failures(spec, heads, kv_heads, n, n_new)
        ]

    @pytest.mark.parametrize("key_padding", ["both", "left", "right"])
    @pytest.mark.parametrize("mask", ["source", "output"])
    def test_padding_and_mask(self, key_padding: str, mask: str) -> None:
        for kernel in ((6, 11), (4, 3), (2, 8)):
            spec = Spec(kernel, 64, key_padding=key_padding, mask=mask)
            for n, n_new in ((1, 1), (3, 2), (200, 1), (129, 4), (1025, 8)):
                assert not failures(spec, 4, 2, n, n_new)

    @pytest.mark.parametrize("causal", [True, False])
    def test_lengths(self, causal: bool) -> None:
        """Shorter than the halo, at the edges of tiles and splits, empty, shorter than the new tokens."""
        lengths = [0, 1, 2, 5, 11, 31, 32, 33, 53, 54, 55, 63, 64, 65, 255, 256, 257, 777]
        for dim, n_new, num_splits in itertools.product((64, 128), (1, 3, 8), (None, 1, 2, 5)):
            spec = Spec((6, 11), dim, causal=causal)
            assert not failures(spec, 2, 1 if n_new > 1 else 2, 777, n_new, lengths=lengths, num_splits=num_splits)

    @pytest.mark.parametrize("n", [1, 2, 3, 9, 16])
    def test_small(self, n: int) -> None:
        for kernel, n_new in itertools.product(((6, 11), (16, 17), (1, 1)), (1, 2, 8)):
            assert not failures(Spec(kernel, 64), 8, 4, n, n_new)

    @pytest.mark.parametrize("group", [2, 3, 5, 8, 12])
    def test_groups(self, group: int) -> None:
        for n_new in (1, 2, 4, 8):
            assert not failures(Spec((6, 11), 64), 2 * group, 2, 300, n_new)

    def test_value_head_dim(self) -> None:
        for dims in ((64, 128), (128, 64), (32, 256)):
            assert not failures(Spec((6, 11), *dims), 4, 2, 300, 2)

    def test_scale(self) -> None:
        for scale in (-0.2, 0.0, 1.0):
            assert not failures(Spec((6, 11), 64), 4, 2, 300, 2, scale=scale)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_large_scores(self, dtype: str) -> None:
        """q.k in the range of 1e6 does not overflow the slab's fp16."""
        spec = Spec((6, 11), 64, dtype=dtype)
        assert not failures(spec, 2, 2, 300, 1, magnitude=256, scale=2.0**-16)

    def test_overflow_is_nan(self) -> None:
        spec = Spec((6, 11), 64)
        q, k, v, weight = inputs(spec, 1, 1, 1, 300, 1, magnitude=2.0**14)
        out, lse = build(spec)(q, k, v, weight, 0.125, None, None)
        assert out.isnan().all()
        assert lse.isnan().all()

    def test_reads_in_place_whatever_the_strides(self) -> None:
        spec = Spec((6, 11), 64)
        q, k, v, weight = inputs(spec, 2, 4, 2, 300, 2)
        views = build(spec)(q, k, v, weight, 0.125, None, None)
        copies = build(spec)(q.contiguous(), k.contiguous(), v.contiguous(), weight, 0.125, None, None)
        assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))

    def test_bit_reproducible(self) -> None:
        spec = Spec((6, 11), 128)
        tensors = inputs(spec, 2, 8, 2, 4097, 2)
        first = build(spec)(*tensors, 0.1, None, None)
        for _ in range(20):
            again = build(spec)(*tensors, 0.1, None, None)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
