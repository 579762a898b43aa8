"""The passes of the lowering "strip"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import PlanError, explain
from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Kernel
from ..passes import Fields, SettledPass, check_window
from ..targets import Target
from ..tile.forward import TileForward
from .concatenation import concatenated, rows_of_table
from .cuda import cuda_sources
from .kernels import mixed_outputs, strip_kernels
from .rows import MAX_HEADS
from .source import StripSource
from .stages import Stages

WORKSPACE_BYTES = 2**30  # what the planes of a strip may take
# What one of them takes at most; 2**28 are 1024 rows of 16 heads at N = 8192. Of a strip of more rows, more is hidden
# and yet multiplied; fewer rows need more launches. The forward pass has fewer planes than the backward.
PLANE_BYTES: Mapping[str, int] = {"forward": 2**29, "backward": 2**28, "decode": WORKSPACE_BYTES}
# CUDA's time over Triton's of whole passes, the largest figures of benchmarks/NOTES.md, "CUDA in strips": mixing alone.
CUDA_OVER_TRITON: Mapping[str, float] = {"forward": 0.90, "backward": 0.74, "decode": 0.67}
ENOUGH_ROWS = 512  # of several sequences, before a strip takes more of them
KEY_MULTIPLE = 128  # of the keys of a strip: cuBLAS is slow where they are odd in number


@dataclass(frozen=True)
class StripPass(SettledPass):
    """One pass made of kernels that stream over planes of scores.

    Attributes:
        spec: the request.
        target: name of the target.
        pass_name: ``forward``, ``backward`` or ``decode``.
        backend: ``triton``: all kernels are Triton's; ``cuda``: CUDA's where it has them, beside Triton's.
        workspace_bytes: what the planes may take.
    """

    spec: Spec
    target: str
    pass_name: str
    backend: str = "triton"
    workspace_bytes: int = WORKSPACE_BYTES

    lowering = "strip"

    @cached_property
    def stages(self) -> Stages:
        """What the kernels are made for."""
        return Stages(self.spec)

    @cached_property
    def fused(self) -> TileForward | None:
        """The fused kernel that takes the values of small groups side by side, instead of kernels of strips."""
        if (self.pass_name, self.backend) != ("forward", "cuda"):
            return None
        return concatenated(self.spec, self.target)

    @cached_property
    def _of_triton(self) -> tuple[Kernel, ...]:
        """What Triton's kernels would be, which can do all of it; or the one that mixes what the fused kernel makes."""
        if self.fused:
            return (mixed_outputs(self.spec, self.target),)
        return strip_kernels(self.pass_name, self.spec, self.target)

    @cached_property
    def cuda(self) -> Mapping[str, StripSource | TileForward]:
        """The kernels that CUDA makes, by role."""
        if self.backend == "triton":
            return {}
        if self.fused:
            return {"forward": self.fused}
        sources = cuda_sources(self.spec, self.target, self._of_triton)
        return {source.role: source for source in sources}

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        if self.fused:
            return (*self.fused.kernels, *self._of_triton)
        made = {kernel.role: kernel for kernel in self._of_triton}
        return tuple((made | {role: source.kernels[0] for role, source in self.cuda.items()}).values())

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes of a strip."""
        return self.stages.backward_planes if self.pass_name == "backward" else self.stages.forward_planes

    @property
    def planes_bytes(self) -> int:
        """What the planes take at most, or those of one short strip of one sequence if that is more."""
        return min(self.workspace_bytes, len(self.planes) * PLANE_BYTES[self.pass_name])

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        if self.fused:
            yield from rows_of_table(self.fused)
            yield self.pass_name, "mixed_outputs", _of_triton(*self._of_triton)
            return
        yield self.pass_name, "planes", ", ".join(self.planes)
        yield self.pass_name, "workspace", f"at most about {self.planes_bytes // 2**20} MiB, sums besides"
        for kernel in self.kernels:
            source = self.cuda.get(kernel.role)
            if isinstance(source, StripSource):
                yield self.pass_name, kernel.role, source.summary
            else:
                yield self.pass_name, kernel.role, _of_triton(kernel)


def _of_triton(kernel: Kernel) -> str:
    """One of Triton's kernels in the plan's table."""
    constants = ", ".join(f"{name} {value}" for name, value in kernel.constants)
    return f"{constants}, {kernel.threads // 32} warps"


@dataclass(frozen=True)
class StripLowering:
    """What a backend offers.

    Attributes:
        backend: ``triton`` or ``cuda``.
    """

    backend: str

    def candidates(self, pass_name: str, spec: Spec, target: Target) -> Sequence[StripPass]:
        """The one plan there is.

        Raises:
            PlanError: there is none; the message says why.
        """
        check_window(spec, self.backend)
        if spec.dtype not in target.dtypes:
            raise PlanError(explain("dtype", spec.dtype, f"{target.name} has no kernels for it", target.dtypes))
        made = StripPass(spec, target.name, pass_name, self.backend)
        _ = made.kernels  # raises where there is none, or a tile does not fit
        return [made]

    def from_fields(self, pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> StripPass:
        """The plan with these decisions."""
        return StripPass(spec, target, pass_name, self.backend)

    def flop_per_score(self, pass_name: str, spec: Spec) -> int:
        """Flop per (row, key) pair of a training pass, 2 per multiply-add.

        Each stage counts as it is defined, a tap or a head of a group as one multiply-add. A backward pass does the
        stages again, and twice more for the two gradients of each.
        """
        d, dv = spec.head_dim, spec.value_head_dim
        stages = sum(cq * ck for cq, ck in spec.kernels.values()) + sum(spec.mixed.values())
        return {"forward": 2 * (d + dv + stages), "backward": 2 * (3 * d + 2 * dv + 3 * stages)}[pass_name]


def cuda_over_triton(pass_name: str, spec: Spec) -> tuple[float, str]:
    """Expected time of the passes in which CUDA has kernels over Triton's alone, and where the figure comes from.

    Where CUDA has products only, it is that of the same work.
    """
    convolves = bool(spec.kernels) and not Mask.of(spec).zeroes_terms
    if not (convolves or Stages(spec).heads <= MAX_HEADS):
        return 1.0, "by planned work"
    return CUDA_OVER_TRITON[pass_name], "or less, as measured for other stages"


LOWERINGS: Mapping[str, StripLowering] = {backend: StripLowering(backend) for backend in ("triton", "cuda")}
