"""Tile shapes, warps and pipeline depth of each kernel: candidates, a resource model, a cost model, measured tables.

The resource model says what a kernel needs on chip; a candidate over the target's limits is infeasible. The cost model
counts flop, bytes and exponentials of one tile and turns them into cycles of one multiprocessor; the cheapest feasible
candidate wins unless a table of measurements (:mod:`.tables`) names another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

from ..errors import PlanError
from ..spec import Spec
from .decode import DECODE_ROLES, decode_geometry
from .lift import Lift
from .targets import Target

TENSOR_ROLES = ("forward", "scores", "dq_lifted", "dq_shifted", "dk_lifted", "dk_shifted")
VECTOR_ROLES = ("lift", "band_scores", "band", "finish", "combine")
_EXP_PER_CYCLE = 16  # special-function results per cycle and multiprocessor
_LATENCY = 900  # cycles a load that nothing overlaps takes from L2


@dataclass(frozen=True)
class Tile:
    """The shape of one kernel.

    Attributes:
        block_m: rows of a tile; for the kernels that move vectors only, vectors per block; for decode, pairs of a query
            head and a new query.
        block_n: keys of a tile; 0 where there are none.
        num_warps, num_stages: warps per CTA; depth of the software pipeline.
        pipeline: what is pipelined: ``tiles`` (operands of the owned block stay on chip, one stage is a whole tile) or
            ``terms`` (one stage is the two operands of ``unroll`` terms).
    """

    block_m: int
    block_n: int = 0
    num_warps: int = 4
    num_stages: int = 1
    pipeline: str = "tiles"
    unroll: int = 1


@dataclass(frozen=True)
class Resources:
    """Modelled need of one CTA: bytes of shared memory, registers per thread."""

    shared: int
    registers: int


def block_dim(head_dim: int) -> int:
    """Head dims are padded on chip to a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def resources(role: str, tile: Tile, spec: Spec, lift: Lift) -> Resources:
    """What one CTA of ``role`` needs.

    Shared memory: every operand of a product, times the stages it is buffered in. Registers: fp32 accumulators and
    score tiles, the probabilities in the input's type, and an allowance for addresses and statistics.
    """
    d, dv, size = block_dim(spec.head_dim), block_dim(spec.value_head_dim), spec.itemsize
    m, n, threads = tile.block_m, tile.block_n, 32 * tile.num_warps
    if role in VECTOR_ROLES:
        vectors = lift.terms + 2 if role == "lift" else 3
        return Resources(shared=0, registers=40 + m * d * vectors // threads)
    if role in DECODE_ROLES:
        return _decode_resources(tile, spec)
    if role not in ("forward", "scores"):
        own, streamed = (m, n) if role.startswith("dq") else (n, m)
        shared = tile.num_stages * (m * n + streamed * d) * size
        return Resources(shared=shared, registers=50 + (own * d + m * n * size // 8) // threads)
    own, streamed = (m, n) if role == "forward" else (n, m)
    # The backward kernel keeps its values, and passes P and g (in fp32 also dO, S and dP) through shared memory.
    kept = n * dv * size if role == "scores" else 0
    passed = (2 * m * n if size == 2 else 4 * m * n + m * dv) * size if role == "scores" else n * dv * size
    if tile.pipeline == "terms":
        pipelined = tile.num_stages * tile.unroll * (m + n) * d * size
        shared = kept + (max(pipelined, passed) if size == 2 else pipelined + passed)
    else:
        stage = (streamed * d * lift.terms + streamed * dv) * size
        shared = own * d * lift.terms * size + tile.num_stages * stage + kept
        shared += passed if role == "scores" else 0
    tiles = 1 if role == "forward" else 2  # s; dP as well
    registers = 90 + (tiles * m * n + own * dv + m * n * size // 4) // threads
    return Resources(shared=shared, registers=registers)


def resident_ctas(need: Resources, tile: Tile, target: Target) -> int:
    """CTAs that one multiprocessor holds at once."""
    shared = target.shared_per_multiprocessor // max(1, need.shared + 1024)
    return max(1, min(shared, target.registers_per_multiprocessor // (need.registers * 32 * tile.num_warps)))


def cost(role: str, tile: Tile, spec: Spec, lift: Lift, target: Target) -> float:
    """Modelled multiprocessor cycles per score: the larger of arithmetic and traffic, plus what nothing hides."""
    if role in DECODE_ROLES:
        return _decode_cost(tile, spec, target)
    d, dv, size = block_dim(spec.head_dim), block_dim(spec.value_head_dim), spec.itemsize
    m, n = tile.block_m, tile.block_n
    flop_rate = target.tensor_flop_per_cycle * 2 / size
    need = resources(role, tile, spec, lift)
    score_bytes = (
        lift.terms * (m + n) if tile.pipeline == "terms" else lift.terms * (n if role == "forward" else m)
    ) * d
    if role == "forward":
        width, flop = lift.terms * d + dv, 2 * (lift.terms * d + dv)
        moved, exponentials = score_bytes + n * dv, 1
    elif role == "scores":
        width, flop = lift.terms * d + dv, 2 * (lift.terms * d + 2 * dv)
        moved, exponentials = score_bytes + m * dv + m * n, 1
    else:
        width, flop = d, 2 * d * (lift.terms if role.endswith("shifted") else 1)
        streamed = n if role.startswith("dq") else m
        moved = (m * n + streamed * d) * (lift.terms if role.endswith("shifted") else 1)
        exponentials = 0
    # Each warp takes 16 rows of a product; warps left over split its columns, so operands are read more often,
    # and wgmma wants 64 rows and 64 columns of every product to run at full rate.
    rows, columns = (m, n) if role in ("forward", "scores") else (m if role.startswith("dq") else n, width)
    split = max(1.0, 16 * tile.num_warps / rows)
    rate = math.sqrt(min(1.0, columns / split / 64) / split)
    if target.wgmma and rows < 64:
        rate /= 2
    arithmetic = flop * m * n / (flop_rate * rate)
    traffic = moved * size / target.l2_bytes_per_cycle
    resident = resident_ctas(need, tile, target)
    exposed = exponentials * m * n * (1 / _EXP_PER_CYCLE + 0.05) / min(resident, 2)
    loads = lift.terms / tile.unroll if tile.pipeline == "terms" else lift.terms + 1
    exposed += _LATENCY * (loads if tile.num_stages == 1 else 1 / (tile.num_stages - 1)) / resident
    return (max(arithmetic, traffic) + exposed) / (m * n)


def candidates(role: str, spec: Spec, lift: Lift, target: Target) -> Iterator[Tile]:
    """Every tile worth asking for on ``target``, feasible or not."""
    if role in DECODE_ROLES:
        yield from _decode_candidates(role, spec, target)
        return
    blocks = (16, 32, 64, 128) if spec.itemsize == 2 else (16, 32, 64)
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
    """The candidates that fit the target, the cheapest by the cost model first.

    Raises:
        PlanError: none does; the message names the limit and by how much it is passed.
    """
    if role in VECTOR_ROLES:
        return [_vector_tile(role, spec, lift)]
    fitting = []
    nearest: tuple[float, str] = (float("inf"), "")
    for tile in candidates(role, spec, lift, target):
        need = resources(role, tile, spec, lift)
        over = max(need.shared / target.shared_per_block, need.registers / target.registers_per_thread)
        if over > 1:
            nearest = min(nearest, (over, _shortfall(role, tile, need, target)))
        else:
            fitting.append(tile)
    if not fitting:
        raise PlanError(nearest[1])
    return sorted(fitting, key=lambda tile: cost(role, tile, spec, lift, target))


def table_key(role: str, spec: Spec, lift: Lift) -> str:
    """What a measured choice depends on: role, padded head dims, terms, element size."""
    d, dv = block_dim(spec.head_dim), block_dim(spec.value_head_dim)
    if role in DECODE_ROLES:
        return f"{role} d{d} dv{dv} taps{decode_geometry(spec).taps} bytes{spec.itemsize}"
    return f"{role} d{d} dv{dv} terms{lift.terms} bytes{spec.itemsize}"


def _decode_candidates(role: str, spec: Spec, target: Target) -> Iterator[Tile]:
    """A halo reaches back one tile at most, so a tile holds at least ck keys."""
    geometry = decode_geometry(spec)
    pairs = geometry.narrow if role == "decode" else geometry.wide
    stages = (1,) if target.backend == "hip" else (1, 2, 3)
    blocks = (32, 64, 128) if spec.itemsize == 2 else (16, 32, 64, 128)
    for n, warps, depth in product(blocks, (4, 8), stages):
        if n >= spec.ck:
            yield Tile(pairs, n, warps, depth)


def _decode_resources(tile: Tile, spec: Spec) -> Resources:
    """Shared memory: K and V tiles in flight, and scores on their way to another layout.

    Registers, fitted to what compilers used: per score the halo, the gather's indices and the product; K and V
    fragments. A kernel that has too few spills, which is slow but right: registers never rule a tile out.
    """
    d, dv, size = block_dim(spec.head_dim), block_dim(spec.value_head_dim), spec.itemsize
    rows, n = max(16, tile.block_m * decode_geometry(spec).taps), tile.block_n
    shared = n * (d + dv) * size * (tile.num_stages - 1) if tile.num_stages > 1 else n * max(d, dv) * size
    shared += 4 * rows * d * size if size == 4 else 0  # the queries, split for tf32x3
    registers = (10 * rows * n + n * (d + dv) * size // 2) // (32 * tile.num_warps) - 20
    return Resources(shared=shared + rows * n * 4, registers=max(110, min(255, registers)))


def _decode_cost(tile: Tile, spec: Spec, target: Target) -> float:
    """Modelled cycles per key and pair: the largest of traffic, instructions issued, latency of a tile's chain."""
    d, dv = block_dim(spec.head_dim), block_dim(spec.value_head_dim)
    rows, n = max(16, tile.block_m * decode_geometry(spec).taps), tile.block_n
    need = _decode_resources(tile, spec)
    threads = 32 * tile.num_warps
    traffic = n * (d + dv) * spec.itemsize / target.dram_bytes_per_cycle
    issue = (120 + (14 * rows * n + n * (d + dv) * spec.itemsize) / threads) * tile.num_warps / 4
    chain = 1500 + 20 * rows * n / threads + 50 * tile.num_warps + _LATENCY / max(0.5, tile.num_stages - 1)
    if need.registers == 255:
        chain, issue = 10 * chain, 10 * issue  # spills: the last resort
    resident = resident_ctas(need, tile, target)
    return (max(traffic, issue, chain / resident) + (issue + chain / resident) / 8) / (n * tile.block_m)


def _vector_tile(role: str, spec: Spec, lift: Lift) -> Tile:
    """Small kernels, shaped by rule: the fp32 vectors a thread holds stay near 32 to 48 registers.

    Measured on an H200 (benchmarks/NOTES.md): kernels that reduce over a vector run best with one warp per block, which
    needs no barrier. ``band_scores`` is one product of a block of rows with the window of keys its diagonals meet.
    """
    d = block_dim(spec.head_dim)
    if role == "band":
        return Tile(block_m=16, num_warps=1)
    if role == "band_scores":
        rows = 64 if spec.itemsize == 2 else 16
        return Tile(block_m=rows, block_n=1 << (rows + lift.reach - 1).bit_length())
    if role == "finish":
        return Tile(block_m=max(1, 1024 // d), num_warps=1)
    held = lift.terms if role == "lift" else 2
    vectors = max(1, min(64, 48 * 128 // (held * d)))
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
