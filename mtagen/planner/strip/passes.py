"""The passes of the lowering "strip"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import PlanError, explain
from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Kernel
from ..passes import Fields, PassPlan, describe
from ..targets import Target, get_target
from ..tile.forward import TileForward
from .concatenation import concatenated, rows_of_table
from .cost import streamed
from .cuda import cuda_sources
from .kernels import mixed_outputs, strip_kernels
from .rows import MAX_HEADS
from .source import Form, StripSource
from .stages import Stages

WORKSPACE_BYTES = 2**30  # what the planes of a strip may take
# What one of them takes at most; 2**28 are 1024 rows of 16 heads at N = 8192. Of a strip of more rows, more is hidden
# and yet multiplied; fewer rows need more launches. The forward pass has fewer planes than the backward.
PLANE_BYTES: Mapping[str, int] = {"forward": 2**29, "backward": 2**28, "decode": WORKSPACE_BYTES}
# Strips of packed documents take more memory by this factor: a row is as long as the longest document, and the context
# of a strip fills a whole tile, which is less of a long strip than of a short one.
PACKED_FACTOR = 2
# CUDA's time over Triton's of whole passes, the largest figures of benchmarks/notes/strips.md: mixing alone.
CUDA_OVER_TRITON: Mapping[str, float] = {"forward": 0.90, "backward": 0.74, "decode": 0.67}
ENOUGH_ROWS = 512  # of several sequences, before a strip takes more of them
# Rows of a strip, at most, where a window limits keys on both sides. Each row has as many hidden keys in its planes as
# there are other rows. With half as many rows, launches of short windows are expected to take longer than kernels.
WINDOW_ROWS = 1024
KEY_MULTIPLE = 128  # of the keys of a strip: cuBLAS is slow where they are odd in number


@dataclass(frozen=True)
class StripPass(PassPlan):
    """One pass made of kernels that stream over planes of scores.

    Attributes:
        spec: the request.
        target: name of the target.
        pass_name: ``forward``, ``backward`` or ``decode``.
        backend: ``triton``: all kernels are Triton's; ``cuda``: CUDA's where it has them, beside Triton's.
        workspace_bytes: what the planes may take where documents are not packed.
        forms: (role, form) of the kernels whose form is not the first by the cost model.
    """

    spec: Spec
    target: str
    pass_name: str
    backend: str = "triton"
    workspace_bytes: int = WORKSPACE_BYTES
    forms: tuple[tuple[str, Form], ...] = ()

    lowering = "strip"

    @cached_property
    def stages(self) -> Stages:
        """What the kernels are made for."""
        return Stages(self.spec)

    @property
    def sums_again(self) -> bool:  # type: ignore[override]
        """Whether each row's probabilities are summed anew."""
        return self.pass_name == "backward" and self.stages.normalizes_again

    @cached_property
    def fused(self) -> TileForward | None:
        """The fused kernel that takes the values of small groups side by side, instead of kernels of strips."""
        if (self.pass_name, self.backend) != ("forward", "cuda"):
            return None
        fused = concatenated(self.spec, self.target)
        # Two models are compared, so the fused kernel has to be faster than strips are by what memory alone takes.
        return fused if fused and fused.cost < StripPass(self.spec, self.target, self.pass_name).cost else None

    @cached_property
    def _of_triton(self) -> tuple[Kernel, ...]:
        """What Triton's kernels would be, which can do all of it."""
        return strip_kernels(self.pass_name, self.spec, self.target)

    @cached_property
    def cuda(self) -> Mapping[str, StripSource | TileForward]:
        """The kernels that CUDA makes, by role."""
        if self.backend == "triton":
            return {}
        if self.fused:
            return {"forward": self.fused}
        sources = {source.role: source for source in cuda_sources(self.spec, self.target, self._of_triton)}
        return sources | {role: replace(sources[role], form=form) for role, form in self.forms}

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        if self.fused:
            return (*self.fused.kernels, mixed_outputs(self.spec, self.target))
        made = {kernel.role: kernel for kernel in self._of_triton}
        return tuple((made | {role: source.kernels[0] for role, source in self.cuda.items()}).values())

    @property
    def planes(self) -> tuple[str, ...]:
        """The planes of a strip."""
        return self.stages.backward_planes if self.pass_name == "backward" else self.stages.forward_planes

    @property
    def planes_bytes(self) -> int:
        """What the planes take at most, or those of one short strip of one sequence if that is more."""
        dense = min(self.workspace_bytes, len(self.planes) * PLANE_BYTES[self.pass_name])
        return PACKED_FACTOR * dense if self.spec.packed else dense

    # ---- What it costs: of Triton's kernels and cuBLAS's products what memory alone takes.

    @property
    def cost(self) -> float:
        if self.fused:
            return self.fused.cost
        spec, target = self.spec, get_target(self.target)
        kernels = {kernel.role: streamed(kernel.role, spec.itemsize, target) for kernel in self._of_triton}
        kernels |= {role: source.cost for role, source in self.cuda.items()}
        scores = sum(kernels.values())
        if self.pass_name == "decode":  # the rows of one new token; keys and values are read besides
            read = (spec.head_dim + spec.value_head_dim) * spec.itemsize / target.dram_bytes_per_cycle
            return (spec.context + 1) * scores + read
        if spec.packed:  # products are kernels, too
            return scores
        products = 1 if self.pass_name == "forward" else 3 + ("grad_shares" not in kernels)
        return scores + products * streamed("values", spec.itemsize, target)

    # ---- Decisions: the forms of CUDA's kernels, one by one. A kernel of one form is none.

    @cached_property
    def _deciding(self) -> Mapping[str, StripSource]:
        """Kernels by the key of their decision."""
        sources = (source for source in self.cuda.values() if isinstance(source, StripSource))
        return {source.key: source for source in sources if len(source.forms) > 1}

    def decisions(self) -> Mapping[str, Fields]:
        return {key: source.form.fields for key, source in self._deciding.items()}

    def role(self, key: str) -> str:
        """The kernel that a decision is about.

        Raises:
            PlanError: it is none of this pass.
        """
        self.check_key(key)
        return self._deciding[key].role

    def _formed(self, key: str) -> Mapping[Form, StripPass]:
        """The plans that differ in a kernel's form only, the cheapest first."""
        role, others = self.role(key), dict(self.forms)
        others.pop(role, None)
        first, *rest = (source.form for source in self._deciding[key].variants)
        made = {first: others} | {form: others | {role: form} for form in rest}
        return {form: replace(self, forms=tuple(sorted(forms.items()))) for form, forms in made.items()}

    def alternatives(self, key: str) -> Sequence[StripPass]:
        return [*self._formed(key).values()]

    def decided(self, key: str, fields: Fields) -> StripPass:
        made = self._formed(key)
        for form, one in made.items():
            if form.fields == fields:
                return one
        legal = [describe(form.fields) for form in made]
        raise PlanError(explain(key, describe(fields), f"is no form of this kernel on {self.target}", legal))

    def decision_cost(self, key: str) -> float:
        self.check_key(key)
        return self._deciding[key].cost

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        if self.fused:
            yield from rows_of_table(self.fused)
            yield self.pass_name, "mixed_outputs", _of_triton(self.kernels[-1])
            return
        if self.spec.dropout:
            roles = " and ".join(kernel.role for kernel in self.kernels if kernel.role in self.stages.dropping)
            fuses = replace(self, spec=replace(self.spec, dropout=False)).fused
            why = "; takes mixed shares, so that values do not lie side by side in a fused kernel" if fuses else ""
            yield self.pass_name, "dropout", f"in {roles}{why}"
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
        """The plan of a pass with the cheapest form of each kernel; others follow from it by ``alternatives``.

        Raises:
            PlanError: there is none; the message says why.
        """
        if spec.dtype not in target.dtypes:
            raise PlanError(explain("dtype", spec.dtype, f"{target.name} has no kernels for it", target.dtypes))
        if spec.convolves_only and (pass_name != "backward" or not spec.kernel):
            rule = "strips stand in for a fused backward pass of a convolution only"
            raise PlanError(explain("pass", pass_name, rule, "backend='triton'"))
        made = StripPass(spec, target.name, pass_name, self.backend)
        _ = made.kernels  # raises where there is none, or a tile does not fit
        if spec.convolves_only:
            _check_stands_in(made)
        return [made]

    def from_fields(self, pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> StripPass:
        """The plan with these decisions.

        Raises:
            PlanError: one is not legal here.
        """
        made = StripPass(spec, target, pass_name, self.backend)
        for key, form in decisions.items():
            made = made.decided(key, form)
        return made

    def flop_per_score(self, pass_name: str, spec: Spec) -> int:
        """Flop per (row, key) pair of a training pass, 2 per multiply-add.

        Each stage counts as it is defined, a tap or a head of a group as one multiply-add. A backward pass does the
        stages again, and twice more for the two gradients of each.
        """
        d, dv = spec.head_dim, spec.value_head_dim
        stages = sum(cq * ck for cq, ck in spec.kernels.values()) + sum(spec.mixed.values())
        return {"forward": 2 * (d + dv + stages), "backward": 2 * (3 * d + 2 * dv + 3 * stages)}[pass_name]


def _check_stands_in(made: StripPass) -> None:
    """Check that strips may stand in for a fused backward pass that does not fit.

    Those some of whose kernels are Triton's take longer than its own lowering of a convolution, as all do where there
    is none. The sums of packed documents do not count, which are always Triton's.

    Raises:
        PlanError: they may not.
    """
    dense = replace(made, spec=replace(made.spec, packed=False))
    if missing := [kernel.role for kernel in dense.kernels if kernel.role not in dense.cuda]:
        rule = "strips stand in for a fused backward pass only where these kernels, too, are CUDA's"
        raise PlanError(explain("kernels", missing, rule, "backend='triton'"))


def cuda_over_triton(pass_name: str, spec: Spec) -> tuple[float, str]:
    """Expected time of the passes in which CUDA has kernels over Triton's alone, and where the figure comes from.

    Where CUDA has products only, it is that of the same work.
    """
    convolves = bool(spec.kernels) and not Mask.of(spec).zeroes_terms
    if not (convolves or Stages(spec).heads <= MAX_HEADS):
        return 1.0, "by planned work"
    return CUDA_OVER_TRITON[pass_name], "or less, as measured for other stages"


LOWERINGS: Mapping[str, StripLowering] = {backend: StripLowering(backend) for backend in ("triton", "cuda")}
