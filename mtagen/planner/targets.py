"""The GPUs that kernels are planned for: one row per target.

Sizes are those that a kernel may use. Rates are the vendor's peaks for dense work. L2 rates are
estimates, for ranking plans only. Sources: the CUDA C++ Programming Guide (technical specifications
per compute capability); NVIDIA's data sheets of the A100, L40S and H200, its GA102 white paper for
the RTX 3090 and its RTX Blackwell white paper for the RTX 5090; AMD's CDNA 3 white paper and the
MI300X data sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import SpecError, check_choice, explain

GRID_X = 2**31 - 1  # upper limit of blocks along x of a grid
GRID_YZ = 2**16 - 1  # upper limit along y, and along z
SHARED_BYTES_PER_CYCLE = 128  # per NVIDIA multiprocessor
_KIB = 1024
RESERVED_SHARED = _KIB  # bytes of shared memory that the system reserves per CTA
REGISTER_UNIT = 8  # registers of a thread are allocated in multiples of this
# Families of matrix instructions, with the architecture if only one has them: instructions of a warp (NVIDIA GPUs since
# 8.0), of a warpgroup, and of AMD's wavefronts.
_MATRIX: dict[str, int | None] = {"mma": None, "wgmma": 90, "mfma": None}
# Shared memory in KiB that a block may use on GPUs without a row here, and on unknown GPUs.
_SHARED = {(8, 7): 163, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED = 99
_CLOCK_GHZ = 1.7  # about that of an H200 under load, where the cost models' cycles were measured


@dataclass(frozen=True)
class Target:
    """The properties of a GPU that plans depend on.

    Attributes:
        name: the target's name in plans, kernel names and cache paths.
        device: the product that has these rates.
        backend: Triton's backend, ``cuda`` or ``hip``.
        arch: the architecture: ten times the compute capability, such as 90, or a gfx name.
        warp_size: threads that run in lockstep.
        multiprocessors: SMs, or compute units on AMD.
        shared_per_block: bytes of shared memory that one block may use.
        shared_per_multiprocessor: bytes of shared memory for all resident blocks of a
            multiprocessor.
        registers_per_multiprocessor: 32-bit registers for all resident threads of a multiprocessor.
        registers_per_thread: registers that one thread can have before it spills.
        tensor_tflops: dense bf16 matrix rate with fp32 accumulation, TFLOP/s.
        dram_gbps: memory bandwidth, GB/s.
        l2_gbps: estimated bandwidth of the last-level cache, which all multiprocessors share, GB/s.
        matrix: families of matrix instructions that kernels may use: ``mma``, ``wgmma``, ``mfma``.
        dtypes: element types that kernels may have.

    Raises:
        SpecError: the architecture lacks a family of matrix instructions, or the name is that of
            another architecture.
    """

    name: str
    device: str
    backend: str
    arch: int | str
    warp_size: int
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    registers_per_multiprocessor: int
    registers_per_thread: int
    tensor_tflops: float
    dram_gbps: float
    l2_gbps: float
    matrix: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def __post_init__(self) -> None:
        for family in self.matrix:
            check_choice("matrix", family, tuple(_MATRIX), "is no family of matrix instructions")
            if _MATRIX[family] not in (None, self.arch):
                rule = f"architecture {self.arch} does not have it"
                raise SpecError(explain("matrix", family, rule, f"architecture {_MATRIX[family]} alone"))
        if re.match(r"sm_\d", self.name) and self.name != self.sm:
            raise SpecError(explain("name", self.name, "is not that of the target's architecture", self.sm))

    @property
    def is_specific(self) -> bool:
        """Whether kernels may use instructions that only this architecture has."""
        return any(_MATRIX[family] for family in self.matrix)

    @property
    def sm(self) -> str:
        """The architecture for which CUDA sources are compiled.

        ``a`` marks code that no other one runs.
        """
        return f"sm_{self.arch}{'a' if self.is_specific else ''}"

    @property
    def tensor_descriptors(self) -> bool:
        """Whether Triton's kernels load and store tiles by tensor descriptors (TMA) instead of
        pointers.

        Triton compiles descriptors for any target. Without TMA it does not know their alignment,
        and makes narrow loads that are not pipelined.
        """
        return isinstance(self.arch, int) and self.arch >= 90

    @property
    def tensor_flop_per_cycle(self) -> float:
        """Dense bf16 flop per cycle of one multiprocessor."""
        return self._per_cycle(1e3 * self.tensor_tflops)

    @property
    def mma_flop_per_cycle(self) -> float:
        """Dense bf16 flop per cycle with ``mma.sync``, which on an H200 reached 0.62 of the rate of
        ``wgmma``.
        """
        return self.tensor_flop_per_cycle * (0.62 if "wgmma" in self.matrix else 1)

    @property
    def l2_bytes_per_cycle(self) -> float:
        """One multiprocessor's share of the last-level cache's bandwidth."""
        return self._per_cycle(self.l2_gbps)

    @property
    def dram_bytes_per_cycle(self) -> float:
        """One multiprocessor's share of the memory bandwidth."""
        return self._per_cycle(self.dram_gbps)

    def registers_of(self, warps: int) -> int:
        """Return the upper limit of a thread's registers with ``warps`` resident warps per
        multiprocessor.
        """
        equal = self.registers_per_multiprocessor // (self.warp_size * warps)
        return min(self.registers_per_thread, equal // REGISTER_UNIT * REGISTER_UNIT)

    def shared_of(self, ctas: int) -> int:
        """Return the shared memory that a CTA may use with ``ctas`` resident CTAs per
        multiprocessor.
        """
        return min(self.shared_per_block, self.shared_per_multiprocessor // ctas - RESERVED_SHARED)

    def _per_cycle(self, giga: float) -> float:
        return giga / self.multiprocessors / _CLOCK_GHZ


_ROWS = (
    Target(
        name="sm_80",
        device="NVIDIA A100 SXM 80 GB",
        backend="cuda",
        arch=80,
        warp_size=32,
        multiprocessors=108,
        shared_per_block=163 * _KIB,
        shared_per_multiprocessor=164 * _KIB,
        registers_per_multiprocessor=65536,
        registers_per_thread=255,
        tensor_tflops=312,
        dram_gbps=2039,
        l2_gbps=5000,
        matrix=("mma",),
    ),
    Target(
        name="sm_86",
        device="NVIDIA GeForce RTX 3090",
        backend="cuda",
        arch=86,
        warp_size=32,
        multiprocessors=82,
        shared_per_block=99 * _KIB,
        shared_per_multiprocessor=100 * _KIB,
        registers_per_multiprocessor=65536,
        registers_per_thread=255,
        tensor_tflops=71,
        dram_gbps=936,
        l2_gbps=2500,
        matrix=("mma",),
    ),
    Target(
        name="sm_89",
        device="NVIDIA L40S",
        backend="cuda",
        arch=89,
        warp_size=32,
        multiprocessors=142,
        shared_per_block=99 * _KIB,
        shared_per_multiprocessor=100 * _KIB,
        registers_per_multiprocessor=65536,
        registers_per_thread=255,
        tensor_tflops=362,
        dram_gbps=864,
        l2_gbps=4500,
        matrix=("mma",),
    ),
    Target(
        name="sm_90a",
        device="NVIDIA H200 SXM",
        backend="cuda",
        arch=90,
        warp_size=32,
        multiprocessors=132,
        shared_per_block=227 * _KIB,
        shared_per_multiprocessor=228 * _KIB,
        registers_per_multiprocessor=65536,
        registers_per_thread=255,
        tensor_tflops=989,
        dram_gbps=4800,
        l2_gbps=6000,
        matrix=("mma", "wgmma"),
    ),
    Target(
        name="sm_120",
        device="NVIDIA GeForce RTX 5090",
        backend="cuda",
        arch=120,
        warp_size=32,
        multiprocessors=170,
        shared_per_block=99 * _KIB,
        shared_per_multiprocessor=100 * _KIB,
        registers_per_multiprocessor=65536,
        registers_per_thread=255,
        tensor_tflops=209.5,
        dram_gbps=1792,
        l2_gbps=7000,
        matrix=("mma",),
    ),
    Target(
        name="gfx942",
        device="AMD Instinct MI300X",
        backend="hip",
        arch="gfx942",
        warp_size=64,
        multiprocessors=304,
        shared_per_block=64 * _KIB,
        shared_per_multiprocessor=64 * _KIB,
        # 4 SIMDs of 512 KiB / 4; a lane addresses 256 vector and 256 accumulation registers.
        registers_per_multiprocessor=131072,
        registers_per_thread=512,
        tensor_tflops=1307,
        dram_gbps=5300,
        l2_gbps=17200,  # Infinity Cache: the L2s are private to the dies
        matrix=("mfma",),
    ),
    Target(
        name="generic",
        device="any GPU that Triton's CUDA backend serves, cautiously",
        backend="cuda",
        arch=80,  # the architecture for which the tests compile
        warp_size=32,
        multiprocessors=64,
        shared_per_block=48 * _KIB,  # the limit without opting in to more
        shared_per_multiprocessor=64 * _KIB,
        registers_per_multiprocessor=65536,
        registers_per_thread=255,
        tensor_tflops=100,
        dram_gbps=600,
        l2_gbps=2000,
        matrix=(),  # unknown, and not needed for Triton's kernels
    ),
)

TARGETS = {target.name: target for target in _ROWS}

_BY_CAPABILITY = {divmod(target.arch, 10): target for target in _ROWS if isinstance(target.arch, int) and target.matrix}


def get_target(name: str) -> Target:
    """Return the target called ``name``.

    Raises:
        SpecError: no target has this name; the message lists the names.
    """
    check_choice("target", name, tuple(TARGETS), "is not the name of a target")
    return TARGETS[name]


def target_for_capability(capability: tuple[int, int]) -> Target:
    """Return the target for a CUDA compute capability (major, minor).

    A capability without a row gets the row of an earlier one. Kernels of that row must use ``mma``
    alone, which every GPU since 8.0 has, and no more shared memory than this GPU is known to have.
    Among such rows the one with the most shared memory is taken, and the latest of several. GPUs
    before 8.0 get ``generic``.
    """
    if capability in _BY_CAPABILITY:
        return _BY_CAPABILITY[capability]
    shared = _SHARED.get(capability, _LEAST_SHARED) * _KIB
    portable = [
        (target.shared_per_block, since)
        for since, target in _BY_CAPABILITY.items()
        if target.matrix == ("mma",) and since <= capability and target.shared_per_block <= shared
    ]
    return _BY_CAPABILITY[max(portable)[1]] if portable else get_target("generic")
