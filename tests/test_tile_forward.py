"""The forward kernel's plan: CTAs walked through on a model of their shared memory and barriers; the plan's limits."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fragments import Slabs, WarpScores, WarpSlab, make_toeplitz
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from single_pass import Launch, Recorder, cheapest
from tensor_cores import LANES, G, SharedMemory, T, Words, matrix, mma, swizzled, tile_address

from mtagen.errors import PlanError
from mtagen.planner.cuda.toeplitz import MAX_COLUMNS, MAX_ROWS
from mtagen.planner.targets import TARGETS
from mtagen.planner.tile.forward import TileForward
from mtagen.spec import KEY_PADDINGS, Spec

Array = NDArray[np.float64]
Waits = Iterator[Callable[[], bool]]  # a warp: yields what it waits for

OUTSIDE, IN_FLIGHT = -1, -2  # what a tile may hold other than keys
CUDA_TARGETS = [target for target in TARGETS.values() if "mma" in target.matrix]


class Barrier:
    """An mbarrier: a phase ends after so many arrivals."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.phase = arrivals, arrivals, 0

    def arrive(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.pending, self.phase = self.arrivals, self.phase + 1

    def wait(self, parity: int) -> Waits:
        """mbarrier.try_wait.parity: the phase of this parity has ended."""
        yield lambda: self.phase & 1 != parity

    def sync(self) -> Waits:
        """bar.sync."""
        phase = self.phase
        self.arrive()
        yield lambda: self.phase > phase


class Cta:
    """One CTA of the forward kernel, its warps in an order that changes at random.

    Scores are given, not multiplied; tiles of K and V hold which key each 16 bytes are of. ``seen`` counts, and
    ``convolved`` keeps, what the softmax takes of each row that is stored.
    """

    def __init__(self, plan: TileForward, scores: Array, taps: Array, block: int, seed: int) -> None:
        self.plan, self.scores, self.chance = plan, scores, random.Random(seed)
        self.n_q, self.n_k = scores.shape
        self.first = block * plan.geometry.owned - plan.geometry.halo
        self.off = self.n_k - self.n_q
        self.steps = self.steps_of(plan.geometry.rows)
        cq, ck = taps.shape
        if plan.toeplitz.pointwise:
            self.operands = taps
        else:
            self.slabs = Slabs(plan)
            self.slabs.clear_pads()
            self.operands = make_toeplitz(
                plan.toeplitz, lambda u, v: taps[u, v] if 0 <= u < cq and 0 <= v < ck else 0.0
            )
        stages = plan.stages if plan.hopper else 1
        self.k = np.full((stages, plan.keys, plan.spec.head_dim // 8), IN_FLIGHT)
        self.v = np.full((stages, plan.keys, plan.spec.value_head_dim // 8), IN_FLIGHT)
        self.seen = np.zeros(scores.shape, int)
        self.convolved = np.zeros(scores.shape)

    def run(self) -> None:
        warps = self.hopper_warps() if self.plan.hopper else self.ampere_warps()
        waiting: dict[Waits, Callable[[], bool]] = {warp: lambda: True for warp in warps}
        order: list[Waits] = []  # the first that can run does: a warp may fall far behind
        while waiting:
            if self.chance.random() < 0.03 or not order:
                order = self.chance.sample(list(waiting), len(waiting))
            ready = next((warp for warp in order if waiting[warp]()), None)
            assert ready, "deadlock"
            try:
                waiting[ready] = next(ready)
            except StopIteration:
                del waiting[ready]
                order.remove(ready)

    # Pieces of the kernels.

    def steps_of(self, rows: int) -> int:
        """Tiles of keys that some of the first rows see."""
        keys = min(self.n_k, self.first + rows + self.off) if self.plan.spec.causal else self.n_k
        return max(0, (keys + self.plan.geometry.lag + self.plan.keys - 1) // self.plan.keys)

    def pause(self) -> Waits:
        """Others may run."""
        yield lambda: True

    def load(self, tile: NDArray[np.int64], first: int, threads: range, copiers: int) -> Waits:
        """load_tile by some of its threads: the copies take time."""
        keys, columns = tile.shape
        lanes = next(lanes for lanes in (4, 8, 16, 32) if columns <= lanes)
        rows = (np.arange(thread // lanes, keys, copiers // lanes) for thread in threads)
        parts = [(row, 0 * row + thread % lanes) for row, thread in zip(rows, threads, strict=True)]
        place = tuple(np.concatenate([part[axis] for part in parts if part[1][:1] < columns]) for axis in (0, 1))
        row = first + place[0]
        tile[place] = IN_FLIGHT
        yield from self.pause()
        tile[place] = np.where((row >= 0) & (row < self.n_k), row, OUTSIDE)

    def held(self, tile: int) -> WarpScores | WarpSlab:
        """The scores of 16 rows."""
        return WarpScores() if self.plan.toeplitz.pointwise else WarpSlab(self.slabs, tile)

    def keys_of(self, tile: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """The keys that a tile holds, which must be those from ``first`` on."""
        key = first + np.arange(self.plan.keys)
        assert (tile == np.where((key >= 0) & (key < self.n_k), key, OUTSIDE)[:, None]).all()
        return tile[:, 0]

    def multiplied(self, tile: int, keys: NDArray[np.int64]) -> Words:
        """Scores of 16 rows as accumulators hold them; Q's rows are in the order of load_queries."""
        r = 16 * tile + np.arange(16)
        row = self.first + (r & ~15) + 2 * (r & 7) + (r >> 3 & 1)
        inside = ((row >= 0) & (row < self.n_q))[:, None] & (keys != OUTSIDE)
        scores = np.where(inside, self.scores[np.clip(row, 0, self.n_q - 1)[:, None], np.maximum(keys, 0)], 0.0)
        tiles = self.plan.geometry.tiles
        return scores.reshape(2, 8, tiles, 8).transpose(2, 0, 1, 3).reshape(tiles, 2, 32, 2)

    def places(self, column: int, top: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column of each accumulator of 16 rows."""
        tile, half, element = np.arange(self.plan.geometry.tiles), np.arange(2), np.arange(2)
        rows = top + 2 * G[:, None] + half[:, None, None]
        columns = column + 8 * tile[:, None, None, None] + 2 * T[:, None] + element
        return np.broadcast_arrays(rows, columns)

    def mask_scores(self, s: Words, column: int, tile: int) -> None:
        top = self.first + 16 * tile + self.off
        if self.plan.slab.masks_scores and column + self.plan.keys - 1 > top:
            row, key = self.places(column, top)
            s[key > row] = 0

    def position(self, t: int, tile: int) -> int | None:
        """Position of the first of 16 rows, counted in columns of the slab, where that matters."""
        if not self.plan.mask.zeroes_terms:
            return None
        return self.first + 16 * tile + self.off - t * self.plan.keys + self.plan.toeplitz.carry

    def take(self, c: Words, column: int, tile: int, v: NDArray[np.int64]) -> None:
        """What mask_outputs leaves and store_output stores."""
        plan, top = self.plan, self.first + 16 * tile
        row, key = self.places(column, top)
        hidden = np.zeros(c.shape, bool)
        last = top + self.off if plan.spec.causal else self.n_k - 1
        if (plan.geometry.lag and column < 0) or column + plan.keys - 1 > last:
            hidden = key > row + self.off if plan.spec.causal else key >= self.n_k
            if plan.geometry.lag:
                hidden |= key < 0
        stored = (row >= self.first + plan.geometry.halo) & (row < self.n_q) & ~hidden
        local = key - column
        assert (v[local[stored]] == key[stored]).all(), "P and V disagree"
        assert (key[stored] >= 0).all()
        np.add.at(self.seen, (row[stored], key[stored]), 1)
        self.convolved[row[stored], key[stored]] = c[stored]

    # forward_sm90.cu: one generator a warp.

    def hopper_warps(self) -> Iterator[Waits]:
        plan, warpgroups = self.plan, self.plan.warps // 4
        full = [[Barrier(64 // 32) for _ in range(plan.stages)] for _ in "kv"]
        empty = [[Barrier(4 * warpgroups) for _ in range(plan.stages)] for _ in "kv"]
        written, read = ([[Barrier(1) for _ in range(2)] for _ in range(plan.warps)] for _ in range(2))
        # The kernel may not count on the four warps of a product meeting in it, nor on their not meeting.
        meets = self.chance.choice((4, 1))
        products = [Barrier(meets) for _ in range(plan.warps // meets)]

        def loader(which: int, warp: int) -> Waits:
            tiles, loads_k = (self.k, self.v)[which], which == 0
            for t in range(self.steps + (loads_k and not plan.warpgroups_leave)):
                stage = t % plan.stages
                if t >= plan.stages:
                    yield from empty[which][stage].wait((t // plan.stages - 1) & 1)
                first = t * plan.keys - (0 if loads_k else plan.geometry.lag)
                yield from self.load(tiles[stage], first, range(32 * warp, 32 * warp + 32), 64)
                full[which][stage].arrive()

        def compute(warp: int) -> Waits:
            held, product = self.held(warp), products[warp // meets]
            gives, takes = plan.geometry.halo > 0 and warp < plan.warps - 1, plan.geometry.halo > 0 and warp > 0
            rows = 64 * (warp // 4 + 1)
            steps, below = map(self.steps_of, (rows, rows + 64)) if plan.warpgroups_leave else (self.steps, self.steps)

            def scores(t: int) -> Words:
                return self.multiplied(warp, self.keys_of(self.k[t % plan.stages], t * plan.keys))

            def issue_scores(t: int) -> Waits:
                yield from full[0][t % plan.stages].wait(t // plan.stages & 1)
                yield from product.sync()
                scores(t)  # what an asynchronous product reads is there now, and when it is waited for

            def write_scores(s: Words, t: int) -> Waits:
                self.mask_scores(s, t * plan.keys, warp)
                if gives and t >= 2:
                    yield from read[warp][t & 1].wait((t // 2 - 1) & 1)
                yield from self.pause()
                held.write(s, t)
                if gives:
                    written[warp][t & 1].arrive()

            if self.steps or not plan.warpgroups_leave:
                yield from issue_scores(0)
                s = scores(0)
                empty[0][0].arrive()
                yield from write_scores(s, 0)
            for t in range(steps):
                more = not plan.warpgroups_leave or t + 1 < steps
                if takes:
                    yield from written[warp - 1][t & 1].wait(t // 2 & 1)
                yield from self.pause()
                c = held.convolved(t, self.operands, self.position(t, warp))
                if takes:
                    read[warp - 1][t & 1].arrive()
                if more:
                    yield from issue_scores(t + 1)
                yield from full[1][t % plan.stages].wait(t // plan.stages & 1)
                column = t * plan.keys - plan.geometry.lag
                self.keys_of(self.v[t % plan.stages], column)
                if more:
                    s = scores(t + 1)
                    empty[0][(t + 1) % plan.stages].arrive()
                    yield from write_scores(s, t + 1)
                self.take(c, column, warp, self.keys_of(self.v[t % plan.stages], column))
                empty[1][t % plan.stages].arrive()
            if gives and warp % 4 == 3:
                for t in range(max(steps, 1), below):
                    yield from write_scores(np.zeros_like(s), t)

        yield from (loader(which, warp) for which in (0, 1) for warp in (0, 1))
        yield from (compute(warp) for warp in range(plan.warps))

    # forward_sm80.cu

    def ampere_warps(self) -> Iterator[Waits]:
        plan = self.plan
        meet = Barrier(plan.warps)

        def compute(warp: int) -> Waits:
            threads = range(32 * warp, 32 * warp + 32)
            mine = [plan.row_tiles * warp + m for m in range(plan.row_tiles)]
            held = {m: self.held(m) for m in mine}

            def load(tile: NDArray[np.int64], first: int) -> Waits:
                copies = self.load(tile, first, threads, plan.geometry.threads)
                next(copies)  # in flight until they are waited for
                return copies

            def land(copies: Waits) -> None:
                for _ in copies:
                    pass

            copies = load(self.k[0], 0)
            for t in range(self.steps):
                land(copies)
                yield from meet.sync()
                column = t * plan.keys - plan.geometry.lag
                copies = load(self.v[0], column)
                for m in mine:
                    yield from self.pause()
                    s = self.multiplied(m, self.keys_of(self.k[0], t * plan.keys))
                    self.mask_scores(s, t * plan.keys, m)
                    held[m].write(s, 0)
                land(copies)
                yield from meet.sync()
                copies = load(self.k[0], (t + 1) * plan.keys) if t + 1 < self.steps else iter(())
                for m in mine:
                    yield from self.pause()
                    c = held[m].convolved(0, self.operands, self.position(t, m))
                    self.take(c, column, m, self.keys_of(self.v[0], column))

        yield from (compute(warp) for warp in range(plan.warps))


def convolved(spec: Spec, scores: Array, taps: Array) -> tuple[Array, NDArray[np.bool_]]:
    """C, and which of it the softmax sees, from the definition."""
    n_q, n_k = scores.shape
    allowed = np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q if spec.causal else np.ones(scores.shape, bool)
    halo = ((spec.cq - 1, 0), (spec.pad_left, spec.pad_right))
    if spec.mask == "source":
        scores = np.where(allowed, scores, 0)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(scores, halo), taps.shape)
    if spec.mask == "output":  # column by column of the window, by the output's row
        seen = np.lib.stride_tricks.sliding_window_view(np.pad(allowed, ((0, 0), halo[1])), (1, spec.ck))
        windows = np.where(seen, windows, 0)
    return np.einsum("injk,jk->in", windows, taps), allowed


def assert_convolves(plan: TileForward, n_q: int, n_k: int, seed: int = 0) -> None:
    """Every allowed score, convolved, is seen exactly once, by all CTAs together."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-9, 10, (n_q, n_k)).astype(float)
    taps = rng.integers(-9, 10, plan.spec.kernel).astype(float)
    seen, got = np.zeros(scores.shape, int), np.zeros(scores.shape)
    for block in range(-(-n_q // plan.geometry.owned)):
        cta = Cta(plan, scores, taps, block, seed + block)
        cta.run()
        assert plan.toeplitz.pointwise or cta.slabs.shared.ways == 1, "bank conflicts"
        seen += cta.seen
        got += cta.convolved
    expected, allowed = convolved(plan.spec, scores, taps)
    assert np.array_equal(seen, allowed)
    assert np.array_equal(got, np.where(allowed, expected, 0))


KERNELS = [(6, 11), (1, 1), (1, 7), (11, 1), (5, 2), (3, 3), (4, 10), (16, 17), (9, 11)]
MASKED = [(False, "source"), (True, "source"), (True, "output")]
LENGTHS = [(1, 1), (67, 67), (5, 300), (113, 203), (203, 113), (301, 4)]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("causal", "mask"), MASKED)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_score_once(kernel: tuple[int, int], causal: bool, mask: str, target: str) -> None:
    for i, padding in enumerate(KEY_PADDINGS):
        plan = cheapest("forward", Spec(kernel, 16, causal=causal, key_padding=padding, mask=mask), TARGETS[target])
        assert_convolves(plan, *LENGTHS[(KERNELS.index(kernel) + 2 * i) % len(LENGTHS)])


@pytest.mark.parametrize("mask", ["source", "output"])
def test_rows_of_a_warpgroup_whose_last_keys_end_a_tile(mask: str) -> None:
    """The next warpgroup's first rows see the next tile's keys, and read of these rows what they do not see."""
    plan = cheapest("forward", Spec((11, 1), 16, mask=mask), TARGETS["sm_90a"])
    assert plan.warps == 12
    assert_convolves(plan, 100, 110)


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, MAX_ROWS), st.integers(1, MAX_COLUMNS)),
    masked=st.sampled_from(MASKED),
    padding=st.sampled_from(KEY_PADDINGS),
    value_dim=st.sampled_from([16, 48, 80, 144]),
    warpgroups=st.sampled_from([0, 1, 2, 3]),
    keys=st.sampled_from([32, 48, 64]),
    n_q=st.integers(1, 140),
    n_k=st.integers(1, 260),
    seed=st.integers(0, 2**16),
)
def test_every_score_once_whatever_the_shape(
    kernel: tuple[int, int],
    masked: tuple[bool, str],
    padding: str,
    value_dim: int,
    warpgroups: int,
    keys: int,
    n_q: int,
    n_k: int,
    seed: int,
) -> None:
    spec = Spec(kernel, 16, value_dim, causal=masked[0], key_padding=padding, mask=masked[1])
    hopper = TileForward(spec, "sm_90a", True, 4 * warpgroups, keys, 2, 1)
    ampere = TileForward(spec, "sm_80", False, 2, keys, 1, 1, row_tiles=1 + seed % 2)
    assert_convolves(hopper if warpgroups else ampere, n_q, n_k, seed)


def element_of(start: int, strides: tuple[int, int, int], row: Array, column: Array) -> Array:
    """Address of an element of a wgmma operand, swizzled by 128 bytes.

    ``strides``: bytes from 64 elements of the contiguous axis to the next 64, of the other from 8 to the next 8, and
    from one to the next.
    """
    panel, eight, one = strides
    return swizzled(start + column // 64 * panel + column % 64 * 2 + row // 8 * eight + row % 8 * one)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 256])
def test_operands_lie_as_tiles_are_copied(dim: int) -> None:
    """Descriptors with inner_columns (Q, K: along the inner axis) and inner_rows (V: across) find what was copied."""
    for rows in (32, 64, 192):
        row, column = np.meshgrid(np.arange(rows), np.arange(dim), indexing="ij")
        copied = tile_address(0, rows, row, column // 8) + column % 8 * 2
        assert copied.max() < rows * 128 * -(-dim // 64)
        assert np.unique(copied).size == copied.size
        for k in range(dim // 16):  # columns 16 k.. of all rows
            start = (k >> 2) * (rows * 128) + (k & 3) * 32
            inner = slice(16 * k, 16 * k + 16)
            found = element_of(start, (16, 1024, 128), row[:, inner], column[:, inner] - 16 * k)
            assert np.array_equal(found, copied[:, inner])
        for k in range(rows // 16):  # rows 16 k.. of all columns
            inner = slice(16 * k, 16 * k + 16)
            found = element_of(k * 16 * 128, (rows * 128, 1024, 128), row[inner] - 16 * k, column[inner])
            assert np.array_equal(found, copied[inner])


def test_addresses_relative_to_another() -> None:
    """tile_address_from, where its comment allows it: for ldmatrix from a lane's first row, for copies a thread's."""
    for rows in (32, 48, 64):
        for size in (1, 2, 4, 8, 16):  # of the part of rows below which the first row lies, and of columns, of which 2
            first, column = np.meshgrid(np.arange(size), np.arange(2), indexing="ij")
            at = tile_address(0, rows, first, column)
            steps = itertools.product(range(0, rows - size + 1, size), range(0, 32, 2 if size >= 8 else 32))
            for down, right in steps:
                found = (at ^ ((down ^ right) & 7) << 4) + down * 128 + (right >> 3) * (rows * 128)
                assert np.array_equal(found, tile_address(0, rows, first + down, column + right))


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_products_of_tiles_by_mma(dim: int) -> None:
    """What forward_sm80 loads with ldmatrix: q k^T and p v, without bank conflicts."""
    keys, rng = 32, np.random.default_rng(dim)
    q, k, v = (rng.integers(-9, 10, (n, dim)).astype(float) for n in (16, keys, keys))
    shared, sizes = SharedMemory(3 * keys * 128 * -(-dim // 64)), {}
    for name, tile, rows in (("q", q, 16), ("k", k, keys), ("v", v, keys)):
        sizes[name] = len(sizes) * keys * 128 * -(-dim // 64)
        row, column = np.meshgrid(np.arange(rows), np.arange(dim), indexing="ij")
        shared.elements[(tile_address(sizes[name], rows, row, column // 8) // 2 + column % 8)] = tile

    def load(name: str, row: Array, column: Array, *, transposed: bool = False) -> Words:
        return shared.load_matrices(
            tile_address(sizes[name], 16 if name == "q" else keys, row, column), transposed=transposed
        )

    s = np.zeros((keys // 8, 2, 32, 2))
    for kk in range(dim // 16):
        a = load("q", LANES & 15, 2 * kk + (LANES >> 4))
        for n in range(keys // 16):
            b = load("k", 16 * n + (LANES >> 4) * 8 + (LANES & 7), 2 * kk + (LANES >> 3 & 1))
            mma(s[2 * n], a, b[:2])
            mma(s[2 * n + 1], a, b[2:])
    scores = matrix(s).transpose(1, 2, 0, 3).reshape(16, keys)
    assert np.array_equal(scores, q @ k.T)
    o = np.zeros((dim // 8, 2, 32, 2))
    for kk in range(keys // 16):
        a = np.stack([s[2 * kk, 0], s[2 * kk, 1], s[2 * kk + 1, 0], s[2 * kk + 1, 1]])
        for n in range(dim // 16):
            b = load("v", 16 * kk + (LANES & 15), 2 * n + (LANES >> 4), transposed=True)
            mma(o[2 * n], a, b[:2])
            mma(o[2 * n + 1], a, b[2:])
    assert np.array_equal(matrix(o).transpose(1, 2, 0, 3).reshape(16, dim), scores @ v)
    assert shared.ways == 1


def launches(spec: Spec, batch: int, heads: int, n_q: int, n_k: int) -> list[Launch]:
    """What a call of the emitted host function launches on the H200."""
    q, k = (torch.empty(batch, heads, n, spec.head_dim, dtype=torch.bfloat16, device="meta") for n in (n_q, n_k))
    weight = torch.empty(heads, *spec.kernel, device="meta")
    return Recorder(cheapest("forward", spec, TARGETS["sm_90a"]))(q, k, k, weight, 1.0)


@pytest.mark.parametrize(
    "spec", [Spec((6, 11), 128), Spec((1, 1), 64, causal=False), Spec((6, 11), 64, window=(512, -1))]
)
def test_splits_fill_the_gpu_and_no_more(spec: Spec) -> None:
    """So partial results are of as many tiles of rows at most, or of twice as many where half of them are empty."""
    plan, slots = cheapest("forward", spec, TARGETS["sm_90a"]), TARGETS["sm_90a"].multiprocessors
    most = 2 * slots if spec.causal and spec.left is None else slots
    seen = set()
    for heads, n_q, n_k in itertools.product((1, 3, 16, 100), (1, 187, 900, 4096), (1, 300, 4096, 50_000)):
        first, *merges = launches(spec, 2, heads, n_q, n_k)
        whole = 2 * heads, -(-n_q // plan.geometry.owned)
        seen.add(first.kernel.role)
        if first.kernel.role == "forward":
            x, y, *z = first.grid
            assert ((x * math.prod(z), y), merges) == (whole, [])
            continue
        ((merge,), splits) = merges, first.grid[2]
        assert first.grid == (*whole, splits)
        assert (merge.kernel.role, merge.grid) == ("combine", (2 * heads * n_q,))
        assert 1 < splits == merge.arguments["num_splits"] <= n_k // (4 * plan.keys)
        assert splits * whole[0] * whole[1] <= most
    assert seen == {"forward", "forward_split"}


def test_one_head_is_split() -> None:
    """Half of 22 x 11 CTAs have keys, nearly one for each multiprocessor; eight heads have more without splits."""
    first, _ = launches(Spec((6, 11), 128), 1, 1, 4096, 4096)
    assert first.grid == (1, 22, 11)
    (whole,) = launches(Spec((6, 11), 128), 1, 8, 4096, 4096)
    assert whole.grid == (8, 22, 1)


@pytest.mark.parametrize(
    ("batch", "heads", "n_k", "sections"),
    [
        (1, 16, 32768, (4, 4)),
        (1, 16, 32767, (16, 1)),
        (3, 4, 32768, (4, 3)),
        (1, 6, 32768, (6, 1)),
        (2048, 128, 32768, (2**18, 1)),
    ],
)
def test_heads_of_long_sequences_come_in_sections(batch: int, heads: int, n_k: int, sections: tuple[int, int]) -> None:
    """Of four heads, where these are a divisor of all, and sections no more than a grid may have."""
    (launch,) = launches(Spec((6, 11), 128), batch, heads, 16384, n_k)
    x, tiles, z = launch.grid
    assert ((x, z), tiles) == (sections, 88)


@pytest.mark.parametrize("options", [{"window": (512, -1)}, {"packed": True}], ids=str)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_what_streams_a_part_has_no_sections(name: str, options: dict[str, Any]) -> None:
    assert cheapest(name, Spec((6, 11), 128, **options), TARGETS["sm_90a"]).grid.sections is None


@pytest.mark.parametrize("options", [{"packed": True}, {"dropout": True}], ids=str)
def test_documents_and_dropout_are_not_split(options: dict[str, bool]) -> None:
    plan = cheapest("forward", Spec((6, 11), 64, **options), TARGETS["sm_90a"])
    assert plan.split is None
    assert [*plan.cuda] == ["forward"]


def all_plans() -> Iterator[TileForward]:
    """Every forward plan of a grid of specs that there is."""
    kernels = [(1, 1), (6, 11), (2, 9), (16, 17), (9, 2)]
    dims = [(16, 16), (64, 64), (80, 48), (128, 128), (64, 256), (192, 192), (256, 256)]
    for kernel, (dim, value_dim), target in itertools.product(kernels, dims, CUDA_TARGETS):
        try:
            yield cheapest("forward", Spec(kernel, dim, value_head_dim=value_dim), target)
        except PlanError as error:
            assert target.name in str(error)  # noqa: PT017 - the message names the limit


def test_shared_memory_maps() -> None:
    assert sum(1 for _ in all_plans()) > 60
    for plan in all_plans():
        regions = plan.shared.regions
        alignment = {
            "Q": 1024,
            "K": 1024,
            "V": 1024,
            "SLAB": 16,
            "GATHER": 16,
            "DROPOUT": 4,
            "TAPS": 4,
            "BARRIERS": 8,
        }
        for region, following in itertools.pairwise(regions):
            assert region.offset + region.size <= following.offset
        for region in regions:
            assert region.offset % alignment[region.name] == 0
            assert region.size > 0
        assert plan.shared.size == regions[-1].offset + regions[-1].size == plan.kernels[0].shared
        assert plan.shared.size <= TARGETS[plan.target].shared_per_block
        # Panels, which are as wide as swizzled rows: tiles of whole 1024-byte atoms.
        assert {plan.shared[name].size % 1024 for name in "QKV"} == {0}
        assert plan.toeplitz.pointwise == ("SLAB" not in {region.name for region in regions})


def test_registers_that_warpgroups_trade() -> None:
    """setmaxnreg gives out what the launch has taken: the most registers that all threads can have."""
    for warpgroups in (1, 2, 3):
        plan = TileForward(Spec((6, 11), 64), "sm_90a", True, 4 * warpgroups, 64, 2, 4)
        computes, loads = plan.registers.split
        target, threads = TARGETS[plan.target], plan.geometry.threads
        launched = target.registers_of(threads // 32) * threads
        assert 128 * (warpgroups * computes + loads) <= launched <= target.registers_per_multiprocessor
        assert computes % 8 == loads % 8 == 0
        assert 24 <= loads < computes <= 255
    for plan in all_plans():
        assert plan.registers.needed <= plan.registers.split[0] <= TARGETS[plan.target].registers_per_thread
