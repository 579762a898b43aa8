"""The GPUs that kernels are planned for: one row per target.

Sizes are those a kernel may use, rates the vendor's peaks for dense work; L2 rates are estimates, to rank
plans with. Sources: the CUDA C++ Programming Guide (technical specifications per compute capability) and
NVIDIA's data sheets of the A100, L40S and H200; AMD's CDNA 3 white paper and the MI300X data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import check_choice

SHARED_BYTES_PER_CYCLE = 128  # of an NVIDIA multiprocessor
_KIB = 1024
RESERVED_SHARED = _KIB  # bytes that the system takes of every CTA's share
_CLOCK_GHZ = 1.7  # about an H200's under load, on which the cost models' cycles were measured


@dataclass(frozen=True)
class Target:
    """What a plan needs to know of a GPU.

    Attributes:
        name: the target's name in plans, kernel names and cache paths.
        device: the product whose rates these are.
        backend: Triton's backend, ``cuda`` or ``hip``.
        arch: Triton's architecture: 80, 89, 90 or a gfx name.
        warp_size: threads that run in lockstep.
        multiprocessors: SMs, or compute units on AMD.
        shared_per_block: bytes of shared memory one block may take.
        shared_per_multiprocessor: bytes of shared memory its resident blocks share.
        registers_per_multiprocessor: 32-bit registers its resident threads share.
        registers_per_thread: the most one thread may hold before it spills.
        tensor_tflops: dense bf16 matrix rate with fp32 accumulation, TFLOP/s.
        dram_gbps: memory bandwidth, GB/s.
        l2_gbps: estimated bandwidth of the last-level cache all multiprocessors share, GB/s.
        wgmma: has warpgroup matrix products that read shared memory.
        dtypes: element types its kernels may have.
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
    wgmma: bool = False
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    @property
    def tensor_flop_per_cycle(self) -> float:
        """Dense bf16 flop per cycle of one multiprocessor."""
        return self._per_cycle(1e3 * self.tensor_tflops)

    @property
    def mma_flop_per_cycle(self) -> float:
        """The same of ``mma.sync``, which does not reach the rate of ``wgmma``: 0.62 of it, measured on an H200."""
        return self.tensor_flop_per_cycle * (0.62 if self.wgmma else 1)

    @property
    def l2_bytes_per_cycle(self) -> float:
        """One multiprocessor's share of the last-level cache's bandwidth."""
        return self._per_cycle(self.l2_gbps)

    @property
    def dram_bytes_per_cycle(self) -> float:
        """One multiprocessor's share of the memory bandwidth."""
        return self._per_cycle(self.dram_gbps)

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
        wgmma=True,
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
    ),
    Target(
        name="generic",
        device="any NVIDIA GPU since compute capability 8.0, cautiously",
        backend="cuda",
        arch=80,  # PTX for 8.0 runs on every later GPU
        warp_size=32,
        multiprocessors=64,
        shared_per_block=48 * _KIB,  # what a block gets without opting in to more
        shared_per_multiprocessor=64 * _KIB,
        registers_per_multiprocessor=65536,
        registers_per_thread=255,
        tensor_tflops=100,
        dram_gbps=600,
        l2_gbps=2000,
    ),
)

TARGETS = {target.name: target for target in _ROWS}

_BY_CAPABILITY = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a"}


def get_target(name: str) -> Target:
    """The target called ``name``.

    Raises:
        SpecError: there is none; the message lists the names.
    """
    check_choice("target", name, tuple(TARGETS), "is not known")
    return TARGETS[name]


def target_for_capability(capability: tuple[int, int]) -> Target:
    """The target for a CUDA compute capability (major, minor): its own row, else ``generic``."""
    return get_target(_BY_CAPABILITY.get(capability, "generic"))
