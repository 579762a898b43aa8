"""Tile shape, warps and pipeline depth of each kernel: candidates, a resource model and a cost
model.

The resource model estimates the on-chip memory of a kernel; a candidate over the target's limits is
infeasible. The cost model, which was fitted to measurements, estimates the cycles of a
multiprocessor for one tile. The cheapest feasible candidate is taken unless a table of measurements
(:mod:`mtagen.planner.tables`) names another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import NamedTuple

from ...errors import PlanError
from ...spec import Spec
from ..targets import REGISTER_UNIT, RESERVED_SHARED, SHARED_BYTES_PER_CYCLE, Target
from .bias import LARGEST_BLOCK, bias
from .decode import DECODE_ROLES, decode_geometry
from .operands import Lift

TENSOR_ROLES = ("forward", "scores", "dq_lifted", "dq_shifted", "dk_lifted", "dk_shifted")
VECTOR_ROLES = ("lift", "band_terms", "band", "band_gather", "rows", "finish", "combine", "bias")
_UNROLLED_SCRATCH = 5 * 1024  # bytes that the compiler was observed to need besides the operands of unrolled terms

# The cost model's constants, fitted to benchmarks/results/h200_tune_*.json. Times are cycles of a multiprocessor.
_SOFTMAX = 0.12  # vector units, per score: exponential and sums
_SCORE_GRADIENT = 0.25  # vector units, per score, for the gradient, which changes layouts through shared memory
_TILE = 100  # chain of reductions of a tile
_STEP = 340  # barriers of a step
_LATENCY = 740  # a load from L2
_STRIP_LATENCY = 490  # a load of the gradient of the scores
_STRIP_READ = 1.25  # time to read that gradient, over the time at full memory bandwidth
_COALESCING = 1.7  # requests of neighbouring CTAs for the same bytes that L2 answers at once
_CONTENTION = 0.5  # R CTAs of a multiprocessor take R**_CONTENTION times as long as one
_MEAN_ROW = 4096  # mean number of keys that a causal row sees in the measurements
_SHARPNESS = 5.3  # order of the norm that combines bounds
_TERM_REGISTERS = 52  # registers that a loop over terms needs beyond `resources` and spills
_UNROLLED_REGISTERS = 41  # the same for each unrolled term from the fourth on
# A bias, per score: its load, its spills, and in the backward pass the sums along diagonals. Fitted to ALiBi before
# (6, 11) at N = 8192, d = 64 and 128, on an H200.
_BIAS = {"forward": 0.2, "scores": 1.3}
# Constants for decode:
_DECODE_STEP = 340  # instructions of a warp per tile
_DECODE_ISSUE = 4.1  # instructions per tap of a score that a thread holds
_DECODE_CHAIN = 4.6  # cycles of dependent work per such tap
_DECODE_LATENCY = 1600  # a load from memory
_DECODE_REGISTERS = 7  # registers of a thread per score


@dataclass(frozen=True)
class Tile:
    """The tile shape, warps and pipeline of one kernel.

    Attributes:
        block_m: rows of a tile. For kernels that only move vectors, vectors per block; for decode,
            pairs of a query head and a new query.
        block_n: keys of a tile; 0 if the kernel has no keys.
        num_warps, num_stages: warps per CTA; depth of the software pipeline.
        pipeline: the stages of the pipeline. ``tiles``: a stage is a whole tile, and the operands
            of the owned block stay on chip. ``terms``: a stage is the two operands of ``unroll``
            terms.
        unroll: terms per stage, with ``terms``.
    """

    block_m: int
    block_n: int = 0
    num_warps: int = 4
    num_stages: int = 1
    pipeline: str = "tiles"
    unroll: int = 1


def reads_by_descriptor(spec: Spec, target: Target) -> bool:
    """Return whether tiles are loaded by tensor descriptors, which cannot stop at the end of a
    document.
    """
    return target.tensor_descriptors and not spec.packed


@dataclass(frozen=True)
class Resources:
    """Modelled resources of one CTA: bytes of shared memory, registers per thread."""

    shared: int
    registers: int


def block_dim(head_dim: int) -> int:
    """Return a head dim as padded on chip: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def resources(role: str, tile: Tile, spec: Spec, lift: Lift, target: Target) -> Resources:
    """Model the resources of one CTA of ``role``.

    Shared memory holds every operand of a product, times the stages in which it is buffered.
    Registers hold fp32 accumulators and score tiles, the probabilities in the input's type,
    addresses and statistics.

    If tiles are read by pointers, loads that are not pipelined go through registers. Operands of a
    product, except one of warpgroups, are then loaded from shared memory into registers before it
    begins. That frees their buffer, so that one stage less is needed.
    """
    d, dv, size = block_dim(spec.head_dim), block_dim(spec.value_head_dim), spec.itemsize
    m, n, threads = tile.block_m, tile.block_n, 32 * tile.num_warps
    by_descriptor = reads_by_descriptor(spec, target)
    in_place = by_descriptor or "wgmma" in target.matrix
    buffers = tile.num_stages if in_place else max(1, tile.num_stages - 1)
    is_staged = not by_descriptor and tile.num_stages == 1  # whether streamed tiles go through registers
    if role in VECTOR_ROLES:
        vectors = lift.terms + 2 if role == "lift" else 3
        return Resources(shared=0, registers=40 + m * d * vectors // threads)
    if role in DECODE_ROLES:
        return _decode_resources(tile, spec)
    if role not in ("forward", "scores"):
        owned, streamed = (m, n) if role.startswith("dq") else (n, m)
        shared = buffers * (m * n + streamed * d) * size
        staged = (m * n + streamed * d) * size // 4 if is_staged else 0
        loop = 50 + (owned * d + m * n * size // 8 + staged) // threads
        # Masks, and gradients of keys that start from the sums of earlier chunks, need more registers outside the loop.
        # Spills are cheap there, but a kernel's registers are allocated for all of it.
        started = owned * d // 2 if role.startswith("dk") else 0
        edges = 32 + (owned * d + started + m * n * size // 2) // threads
        if by_descriptor:
            edges = min(edges, 255)
        return Resources(shared=shared, registers=max(loop, edges))
    owned, streamed = (m, n) if role == "forward" else (n, m)
    # The backward kernel keeps its values, and passes P and g (in fp32 also dO, S and dP) through shared memory.
    values = n * dv * size if role == "scores" else 0
    passed = (2 * m * n if size == 2 else 4 * m * n + m * dv) * size if role == "scores" else n * dv * size
    # Dropout's mask is drawn in another layout than that of scores, so a byte per score is passed.
    drawn = m * n if spec.dropout else 0
    if tile.pipeline == "terms":
        pipelined = buffers * tile.unroll * (m + n) * d * size
        shared = values + (max(pipelined, passed, drawn) if size == 2 else pipelined + passed)
        shared += _UNROLLED_SCRATCH if tile.unroll > 1 else 0
    else:
        stage = (streamed * d * lift.terms + streamed * dv) * size
        shared = owned * d * lift.terms * size + buffers * stage + values + drawn
        shared += passed if role == "scores" else 0 if in_place else m * n * size
    tiles = 1 if role == "forward" else 2  # S, and in the backward pass dP
    # A loop over terms pipelines the operands of scores, but not values or gradients of outputs.
    staged = streamed * dv if tile.pipeline == "terms" and not by_descriptor else 0
    staged += streamed * d if is_staged else 0
    registers = 90 + (tiles * m * n + owned * dv + m * n * size // 4 + staged * size // 4) // threads
    return Resources(shared=shared, registers=registers)


def resident_ctas(need: Resources, tile: Tile, target: Target) -> int:
    """Return the number of CTAs that are resident on one multiprocessor."""
    shared = target.shared_per_multiprocessor // (need.shared + RESERVED_SHARED)
    registers = -(-min(need.registers, target.registers_per_thread) // REGISTER_UNIT) * REGISTER_UNIT
    return max(1, min(shared, target.registers_per_multiprocessor // (registers * 32 * tile.num_warps)))


def cost(role: str, tile: Tile, spec: Spec, lift: Lift, target: Target) -> float:
    """Model the multiprocessor cycles per score.

    The bounds are the tensor cores, the vector units, the multiprocessor's part of L2's bandwidth,
    the latency of loads in flight, and the chain of dependent work of a CTA.
    """
    if role in DECODE_ROLES:
        return _decode_cost(tile, spec, target)
    if role in _BIAS:
        return _score_cost(role, tile, spec, lift, target) + (_BIAS[role] if bias(spec) else 0)
    return _contraction_cost(role, tile, spec, lift, target)


def _score_cost(role: str, tile: Tile, spec: Spec, lift: Lift, target: Target) -> float:
    """Model the cost of a kernel that computes scores."""
    d, dv, size = block_dim(spec.head_dim), block_dim(spec.value_head_dim), spec.itemsize
    m, n, terms, threads = tile.block_m, tile.block_n, lift.terms, 32 * tile.num_warps
    by_terms = tile.pipeline == "terms"
    # Triton gives every warp whole rows of a product if another one reads its result in the same iteration. If there
    # are more warps than rows allow, the rest repeat the work of others.
    chained = not by_terms or tile.unroll > 1
    repeats = max(1.0, 16 * tile.num_warps / m) if chained else 1.0
    tensor = terms * repeats * _product_cycles(m, n, d, tile, size, target, splits=not chained)
    moved = terms * (m + n if by_terms else n if role == "forward" else m) * d
    need = resources(role, tile, spec, lift, target)
    registers = need.registers + (_TERM_REGISTERS if by_terms else _UNROLLED_REGISTERS * max(0, terms - 3))
    if role == "forward":
        tensor += _product_cycles(m, dv, n, tile, size, target, a_in_registers=True)
        moved += n * dv
        vector = _SOFTMAX * m * n * repeats
    else:
        tensor += _product_cycles(m, n, dv, tile, size, target) + _product_cycles(n, dv, m, tile, size, target)
        moved += m * dv + m * n
        vector = (_SOFTMAX * repeats + _SCORE_GRADIENT) * m * n
        registers += int(repeats - 1) * m * n // threads
    spilled = max(0, registers - target.registers_per_thread)
    vector += 2 * 4 * spilled * threads / SHARED_BYTES_PER_CYCLE  # written and read
    steps = terms // tile.unroll if by_terms else 1
    chain = tensor + vector + steps * _STEP + _TILE + (_LATENCY if by_terms else 0)  # a tile starts its own pipeline
    edges = _edges(tile, lift)
    bounds = _Bounds(max(tensor, vector), moved * size, chain, steps, _LATENCY, terms + 1, steps / 2, edges)
    return bounds.cycles(tile, resident_ctas(need, tile, target), target) / (m * n)


def _contraction_cost(role: str, tile: Tile, spec: Spec, lift: Lift, target: Target) -> float:
    """Model the cost of a kernel that multiplies the gradient of the scores by an operand, once per
    term.
    """
    d, size, m, n = block_dim(spec.head_dim), spec.itemsize, tile.block_m, tile.block_n
    owned, streamed = (m, n) if role.startswith("dq") else (n, m)
    tensor = _product_cycles(owned, d, streamed, tile, size, target)
    moved = (m * n + streamed * d) * size
    bounds = _Bounds(tensor, moved, tensor + _STEP, 1, _STRIP_LATENCY, 2, 1, _edges(tile, lift))
    resident = resident_ctas(resources(role, tile, spec, lift, target), tile, target)
    memory = _STRIP_READ * m * n * size / target.dram_bytes_per_cycle
    return _combined(lift.terms * bounds.cycles(tile, resident, target), memory) / (m * n)


def _edges(tile: Tile, lift: Lift) -> float:
    """Return the fraction of tiles that an edge of the mask crosses, which are not pipelined."""
    return (tile.block_m + tile.block_n) / _MEAN_ROW if lift.mask.hides else 0


class _Bounds(NamedTuple):
    """The quantities that bound the time of a tile.

    Attributes:
        busy: cycles of the busiest unit.
        moved: bytes loaded and stored.
        chain: cycles of the dependent work of a CTA.
        steps: steps of the pipeline.
        latency: cycles of a load.
        loads: loads of a tile; without a pipeline each of them waits.
        exposed: loads that two stages do not hide.
        edges: fraction of the tiles that are not pipelined.
    """

    busy: float
    moved: float
    chain: float
    steps: int
    latency: float
    loads: int
    exposed: float
    edges: float

    def cycles(self, tile: Tile, resident: int, target: Target) -> float:
        """Return the cycles of a multiprocessor for one tile, with ``resident`` CTAs.

        An operand is read until its product has ended, so s - 2 of s stages are in flight during a
        step.
        """
        depth, overlap = tile.num_stages, math.pow(resident, 1 - _CONTENTION)
        waits = {1: self.loads, 2: self.exposed}.get(depth, 0) * self.latency
        flow = self.steps * self.latency / (depth - 2) if depth > 2 else 0
        traffic = self.moved / (_COALESCING * target.l2_bytes_per_cycle)
        edges = self.edges * (self.chain + self.loads * self.latency) / overlap
        return _combined(max(self.busy, traffic), (self.chain + waits) / overlap, flow / resident) + edges


def _combined(*bounds: float) -> float:
    """Return about the largest bound, and a little more if several are close."""
    return math.pow(sum(math.pow(bound, _SHARPNESS) for bound in bounds), 1 / _SHARPNESS)


def _product_cycles(
    rows: int,
    columns: int,
    depth: int,
    tile: Tile,
    size: int,
    target: Target,
    *,
    splits: bool = True,
    a_in_registers: bool = False,
) -> float:
    """Return the cycles of a product on the tensor cores, or of reading its operands from shared
    memory.

    A wgmma takes 64 rows per warpgroup, an mma.sync 16 rows per warp. Further warps split the
    columns.
    """
    wgmma = "wgmma" in target.matrix and rows >= 64
    height = 64 if wgmma else max(16, rows // tile.num_warps)
    width = columns / max(1.0, 16 * tile.num_warps / rows) if splits else columns
    rate = (target.tensor_flop_per_cycle if wgmma else target.mma_flop_per_cycle) * 2 / size
    read = ((0 if a_in_registers else 1 / width) + 1 / height) * rows * columns * depth * size
    return max(2 * rows * columns * depth / rate, read / SHARED_BYTES_PER_CYCLE)


def candidates(role: str, spec: Spec, lift: Lift, target: Target) -> Iterator[Tile]:
    """Yield every tile that is worth a try on ``target``, feasible or not."""
    if role in DECODE_ROLES:
        yield from _decode_candidates(role, spec, target)
        return
    blocks = (16, 32, 64, LARGEST_BLOCK) if spec.itemsize == 2 else (16, 32, 64)
    stages = (1,) if target.backend == "hip" else (1, 2, 3, 4)
    for m, n, warps, depth in product(blocks, blocks, (4, 8), stages):
        if m * n < 256 or (warps == 8 and m * n < 4096):
            continue
        yield Tile(m, n, warps, depth)
        if role in ("forward", "scores") and lift.terms > 1:
            for unroll in (1, 2):
                if lift.terms % unroll == 0:
                    yield Tile(m, n, warps, depth, "terms", unroll)


def proposals(role: str, spec: Spec, lift: Lift, target: Target) -> list[Tile]:
    """Return the candidates that fit the target, the cheapest by the cost model first.

    Raises:
        PlanError: no candidate fits; the message names the limit and by how much it is exceeded.
    """
    if role in VECTOR_ROLES:
        return [_vector_tile(role, spec, lift)]
    fitting = []
    too_large: list[tuple[Tile, Resources]] = []
    for tile in candidates(role, spec, lift, target):
        need = resources(role, tile, spec, lift, target)
        if _over(need, target) > 1:
            too_large.append((tile, need))
        else:
            fitting.append(tile)
    if not fitting:
        nearest = min(too_large, key=lambda x: _over(x[1], target))
        raise PlanError(_shortfall(role, *nearest, target))
    return sorted(fitting, key=lambda tile: cost(role, tile, spec, lift, target))


def check_measured(role: str, tile: Tile, spec: Spec, lift: Lift, target: Target) -> None:
    """Check that a table's tile, which was measured with descriptors, also fits if it is read by
    pointers.

    Raises:
        PlanError: it does not fit, by the resource model.
    """
    if role in TENSOR_ROLES and target.tensor_descriptors and not reads_by_descriptor(spec, target):
        need = resources(role, tile, spec, lift, target)
        if _over(need, target) > 1:
            raise PlanError(_shortfall(role, tile, need, target))


def _over(need: Resources, target: Target) -> float:
    """Return the larger ratio of a kernel's need to the target's limit."""
    return max(need.shared / target.shared_per_block, need.registers / target.registers_per_thread)


def table_key(role: str, spec: Spec, lift: Lift) -> str:
    """Return the key of a decision: role, padded head dims, terms, element size."""
    d, dv = block_dim(spec.head_dim), block_dim(spec.value_head_dim)
    if role in DECODE_ROLES:
        return f"lift {role} d{d} dv{dv} taps{decode_geometry(spec).taps} bytes{spec.itemsize}"
    return f"lift {role} d{d} dv{dv} terms{lift.terms} bytes{spec.itemsize}"


def _decode_candidates(role: str, spec: Spec, target: Target) -> Iterator[Tile]:
    """Yield the tiles of a decode kernel.

    They hold at least ck keys, because a halo spans one tile at most.
    """
    geometry = decode_geometry(spec)
    pairs = geometry.narrow if role == "decode" else geometry.wide
    stages = (1,) if target.backend == "hip" else (1, 2, 3)
    blocks = (32, 64, 128) if spec.itemsize == 2 else (16, 32, 64, 128)
    for n, warps, depth in product(blocks, (4, 8), stages):
        if n >= spec.ck:
            yield Tile(pairs, n, warps, depth)


def _decode_resources(tile: Tile, spec: Spec) -> Resources:
    """Model the resources of a decode kernel.

    Shared memory holds K and V tiles in flight, and scores that change their layout. Registers were
    fitted to those that compilers used: the halo, the gather's indices and the product per score,
    and fragments of K and V. A kernel with too few registers spills, which is slow but correct, so
    registers never exclude a tile.
    """
    d, dv, size = block_dim(spec.head_dim), block_dim(spec.value_head_dim), spec.itemsize
    rows, n = max(16, tile.block_m * decode_geometry(spec).taps), tile.block_n
    shared = n * (d + dv) * size * (tile.num_stages - 1) if tile.num_stages > 1 else n * max(d, dv) * size
    shared += 4 * rows * d * size if size == 4 else 0  # the queries, split for tf32x3
    registers = (10 * rows * n + n * (d + dv) * size // 2) // (32 * tile.num_warps) - 20
    return Resources(shared=shared + rows * n * 4, registers=max(110, min(255, registers)))


def _decode_cost(tile: Tile, spec: Spec, target: Target) -> float:
    """Model the cycles per key and pair, bound by traffic, instruction issue, or a tile's latency."""
    d, dv = block_dim(spec.head_dim), block_dim(spec.value_head_dim)
    rows, n, threads = max(16, tile.block_m * decode_geometry(spec).taps), tile.block_n, 32 * tile.num_warps
    # As in `_score_cost`, every warp holds whole rows, and superfluous warps repeat the work of others.
    gathered = spec.ck * max(rows, 16 * tile.num_warps) * n / threads
    traffic = n * (d + dv) * spec.itemsize / target.dram_bytes_per_cycle
    issue = (_DECODE_STEP + _DECODE_ISSUE * gathered) * tile.num_warps / 4
    chain = _DECODE_CHAIN * gathered + _DECODE_LATENCY / max(0.5, tile.num_stages - 1)
    # wgmma reads K and V from shared memory. A tile that does not fit registers spills, so it is the last resort.
    fragments = 0 if "wgmma" in target.matrix and rows >= 64 else n * (d + dv) * spec.itemsize // 2 // threads
    if _DECODE_REGISTERS * rows * n // threads + fragments > target.registers_per_thread:
        chain, issue = 10 * chain, 10 * issue
    resident = resident_ctas(_decode_resources(tile, spec), tile, target)
    return _combined(max(traffic, issue), chain / resident) / (n * tile.block_m)


def _vector_tile(role: str, spec: Spec, lift: Lift) -> Tile:
    """Return the tile of a small kernel by rule: a thread's fp32 vectors take about 32 to 48
    registers.

    Kernels that reduce over a vector run best with one warp per block, which needs no barrier
    (measured on an H200, benchmarks/notes/triton.md). ``band_terms`` multiplies a block of rows by the
    window of keys on its diagonals. Its blocks are small enough for every target.
    """
    d = block_dim(spec.head_dim)
    if role in ("band_gather", "rows"):
        return Tile(block_m=16, num_warps=1)
    if role == "band":
        narrow = max(band.reach for band in lift.bands) <= 32
        return Tile(block_m=64, num_warps=2) if narrow else Tile(block_m=16, num_warps=4)
    if role == "band_terms":
        rows, widest = (64, 128) if spec.itemsize == 2 else (16, 64)
        reach = max(band.reach for band in lift.bands)
        return Tile(block_m=rows, block_n=min(widest, 1 << (rows + reach - 2).bit_length()))
    if role == "finish":
        return Tile(block_m=max(1, 1024 // d), num_warps=1)
    if role == "bias":
        return Tile(block_m=128)
    vectors_per_row = lift.terms if role == "lift" else 2
    vectors = max(1, min(64, 48 * 128 // (vectors_per_row * d)))
    return Tile(block_m=1 << (vectors.bit_length() - 1))


def _shortfall(role: str, tile: Tile, need: Resources, target: Target) -> str:
    limits = []
    if need.shared > target.shared_per_block:
        limits.append(
            f"{need.shared} bytes of shared memory, {need.shared - target.shared_per_block} over "
            f"{target.shared_per_block}"
        )
    if need.registers > target.registers_per_thread:
        limits.append(
            f"{need.registers} registers per thread, {need.registers - target.registers_per_thread} over "
            f"{target.registers_per_thread}"
        )
    return (
        f"{role}: no tile fits {target.name}; the nearest, {asdict(tile)}, needs {' and '.join(limits)}; "
        "legal: a smaller head_dim, a smaller kernel, or a target with more on-chip memory"
    )
