"""Plans of the passes of the lowering "strip"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ...errors import PlanError, explain
from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Kernel
from ..passes import Fields, PassPlan, check_learned, describe
from ..targets import Target, get_target
from ..tile.passes import TilePass
from .concatenation import concatenated, rows_of_table
from .contractions import ROLES, ContractionKernel, contractions
from .cost import streamed
from .cuda import cuda_sources, fastest
from .hidden import HiddenKeys, hidden_keys
from .kernels import SUMS, around_fused, strip_kernels
from .on_chip import why_not
from .on_chip_gradients import PLANES, on_chip_kernels
from .row_shared import MAX_HEADS
from .source import Form, StripSource
from .stages import Stages

# The most bytes of all planes of a strip together, and of one plane; 2**29 bytes are 2048 rows of 16 heads at N = 8192.
# Shorter strips need more launches, and their rows of context are more of their rows. Longer ones take more memory, and
# cuBLAS multiplies more hidden scores (benchmarks/notes/strips.md#longer-strips).
WORKSPACE_BYTES: Mapping[str, tuple[int, int]] = {
    "forward": (2**30, 2**29),
    "backward": (5 * 2**29, 2**29),
    "decode": (2**30, 2**30),
}
# The same for packed documents. A row is as long as the longest document, and the context of a strip fills a whole
# tile, which is a smaller part of a longer strip.
PACKED_WORKSPACE_BYTES: Mapping[str, tuple[int, int]] = {
    "forward": (2**31, 2**30),
    "backward": (2**31, 2**29),
    "decode": (2**31, 2**31),
}
# CUDA's time over Triton's for a pass: the largest ratios in benchmarks/notes/strips.md (mixing alone).
CUDA_OVER_TRITON: Mapping[str, float] = {"forward": 0.90, "backward": 0.74, "decode": 0.67}


@dataclass(frozen=True)
class StripPass(PassPlan):
    """One pass made of kernels that stream over planes of scores.

    Attributes:
        spec: the request.
        target: name of the target.
        pass_name: ``forward``, ``backward`` or ``decode``.
        backend: ``triton``: all kernels are Triton's; ``cuda``: kernels are CUDA's where CUDA has
            them, else Triton's.
        workspace_bytes: upper limit of the planes; None means that of the pass, as measured.
        forms: (role, form) of the kernels whose form is not the cheapest by the cost model.
    """

    spec: Spec
    target: str
    pass_name: str
    backend: str = "triton"
    workspace_bytes: int | None = None
    forms: tuple[tuple[str, Form], ...] = ()

    lowering = "strip"

    @cached_property
    def stages(self) -> Stages:
        """The stages that the kernels compute."""
        return Stages(self.spec)

    @property
    def sums_again(self) -> bool:  # type: ignore[override]
        """Whether each row's probabilities are normalised again."""
        return self.pass_name == "backward" and self.stages.normalizes_again and not self.fused

    @cached_property
    def fused(self) -> TilePass | None:
        """The fused kernels for small groups with values side by side, if they replace the kernels of
        strips.

        A fused backward pass reads the unmixed outputs of the fused forward pass.
        """
        fused = concatenated(self.pass_name, self.spec, self.target) if self.backend == "cuda" else None
        if not fused or (self.pass_name == "backward" and not replace(self, pass_name="forward").fused):
            return None
        # The two cost models differ, so the fused kernels must be faster than strips that only memory bounds.
        return fused if fused.cost < StripPass(self.spec, self.target, self.pass_name).cost else None

    @property
    def unmixed_columns(self) -> int:
        """Columns of the unmixed outputs that the pass reads, if it is a backward pass; 0 if it reads none."""
        return self.fused.spec.value_head_dim if self.pass_name == "backward" and self.fused else 0

    @cached_property
    def on_chip(self) -> bool:
        """Whether kernels that mix heads on the chip replace those that read planes of scores.

        They take whole bundles of 16 heads. If smaller groups mix, a call may have fewer heads, and 8 of
        16 heads take longer than in planes (``benchmarks/notes/strips.md``).
        """
        if self.backend != "cuda" or self.pass_name != "backward" or self.stages.closed_heads != MAX_HEADS:
            return False
        return not self.fused and not why_not(self.spec, get_target(self.target))

    @cached_property
    def _triton_kernels(self) -> tuple[Kernel, ...]:
        """The Triton kernels of the pass, some of which CUDA kernels may replace."""
        kernels = strip_kernels(self.pass_name, self.spec, self.target)
        return tuple(kernel for kernel in kernels if not self.on_chip or kernel.role in SUMS)

    @cached_property
    def cuda(self) -> Mapping[str, StripSource | TilePass]:
        """The CUDA kernels, by role."""
        if self.backend == "triton":
            return {}
        if self.fused:
            return {self.pass_name: self.fused}  # a forward pass never splits its keys: no kernel adds up splits
        products = {source.role: source for source in contractions(self.pass_name, self.spec, self.target)}
        if self.on_chip:
            sources: dict[str, StripSource] = {one.role: one for one in on_chip_kernels(self.spec, self.target)}
        else:
            sources = {source.role: source for source in cuda_sources(self.spec, self.target, self.pass_name)}
            sources |= {role: replace(sources[role], form=form) for role, form in self.forms}
        if self.pass_name != "decode":
            reads = _reads_hidden(self.spec, self.target)
            for role, source in sources.items():
                sources[role] = replace(source, cleared=hidden_keys(role, self.stages, reads))
        return sources | products

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        if self.fused:
            return (*self.fused.kernels, *around_fused(self.pass_name, self.spec, self.target))
        kernels = {kernel.role: kernel for kernel in self._triton_kernels}
        return tuple((kernels | {role: source.kernels[0] for role, source in self.cuda.items()}).values())

    def check(self) -> None:
        """Check that every role of the pass has a kernel that fits the target.

        Strips that replace a fused backward pass have CUDA kernels only. A plan that mixes CUDA and
        Triton kernels is slower than the lowering "lift", so it is refused. Products of packed
        documents and the sums at the end, which are always Triton's, are not counted.

        Raises:
            PlanError: there is no kernel, a tile does not fit, or some kernels are Triton's.
        """
        kernels = self.kernels  # raises if there is none, or if a tile does not fit
        if self.spec.is_liftable:
            dense = replace(self, spec=replace(self.spec, packed=False))
            roles = [kernel.role for kernel in (dense.kernels if self.spec.packed else kernels)]
            if missing := [role for role in roles if role not in dense.cuda and role not in SUMS]:
                rule = "the cuda backend lacks these kernels, which an unfused backward pass needs"
                raise PlanError(explain("kernels", missing, rule, "backend='triton'"))

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the planes of a strip."""
        if self.on_chip:
            return PLANES
        return self.stages.backward_planes if self.pass_name == "backward" else self.stages.forward_planes

    @property
    def planes_bytes(self) -> int:
        """Upper limit of the planes' bytes.

        One short strip of one sequence is allocated even if it needs more.
        """
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        all_planes, plane = (PACKED_WORKSPACE_BYTES if self.spec.packed else WORKSPACE_BYTES)[self.pass_name]
        return min(all_planes, len(self.planes) * plane)

    # ---- Cost. Triton's kernels and products of planes with rows are modelled as bound by memory alone.

    @property
    def cost(self) -> float:
        if self.fused:
            return self.fused.cost
        spec, target = self.spec, get_target(self.target)
        kernels = {kernel.role: streamed(kernel.role, spec.itemsize, target) for kernel in self._triton_kernels}
        kernels |= {role: source.cost for role, source in self.cuda.items()}
        scores = sum(kernels.values())
        if self.pass_name == "decode":  # the rows of one new token, and reading keys and values
            read = (spec.head_dim + spec.value_head_dim) * spec.itemsize / target.dram_bytes_per_cycle
            return (spec.context + 1) * scores + read
        roles = list(ROLES[self.pass_name])
        if self.pass_name == "backward" and not self.on_chip and not spec.packed:
            roles.append("grad_shares")
        products = (source for source in self.cuda.values() if isinstance(source, ContractionKernel))
        made = {*kernels, *(role for source in products for role in source.roles)}
        return scores + sum(streamed(role, spec.itemsize, target) for role in roles if role not in made)

    # ---- Decisions: a form for each CUDA kernel that has several.

    @cached_property
    def _sources_by_key(self) -> Mapping[str, StripSource]:
        """CUDA kernels by the key of their decision."""
        sources = (source for source in self.cuda.values() if isinstance(source, StripSource))
        return {source.key: source for source in sources if len(source.forms) > 1}

    def decisions(self) -> Mapping[str, Fields]:
        return {key: source.form.fields for key, source in self._sources_by_key.items()}

    def role(self, key: str) -> str:
        """Return the role of the kernel that a decision is about.

        Raises:
            PlanError: the decision is none of this pass.
        """
        self.check_key(key)
        return self._sources_by_key[key].role

    def _plans_by_form(self, key: str) -> Mapping[Form, StripPass]:
        """Return the plans that differ in a kernel's form only, by that form, the cheapest first."""
        role, others = self.role(key), dict(self.forms)
        others.pop(role, None)
        first, *rest = (source.form for source in self._sources_by_key[key].variants)
        all_forms = {first: others} | {form: others | {role: form} for form in rest}
        return {form: replace(self, forms=tuple(sorted(forms.items()))) for form, forms in all_forms.items()}

    def alternatives(self, key: str) -> Sequence[StripPass]:
        return [*self._plans_by_form(key).values()]

    def decided(self, key: str, fields: Fields) -> StripPass:
        plans = self._plans_by_form(key)
        for form, plan in plans.items():
            if form.fields == fields:
                return plan
        legal = [describe(form.fields) for form in plans]
        raise PlanError(explain(key, describe(fields), f"is no form of this kernel on {self.target}", legal))

    def decision_cost(self, key: str) -> float:
        self.check_key(key)
        return self._sources_by_key[key].cost

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        if self.fused:
            yield from rows_of_table(self.fused)
            for kernel in around_fused(self.pass_name, self.spec, self.target):
                yield self.pass_name, kernel.role, _triton_summary(kernel)
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
                yield self.pass_name, kernel.role, _triton_summary(kernel)


@lru_cache(maxsize=64)
def _reads_hidden(spec: Spec, target: str) -> Mapping[str, HiddenKeys]:
    """Return the hidden keys of planes that CUDA kernels of training read, by the role of a kernel or of a product.

    Both passes launch some of the same kernels, of one source each. So a kernel clears keys for readers of either pass.
    """
    reads: dict[str, HiddenKeys] = {}
    for pass_name in ("forward", "backward"):
        reads |= {source.role: source.reads_hidden for source in fastest(spec, target, pass_name).values()}
        for kernel in contractions(pass_name, spec, target):
            reads |= {product.role: product.reads_hidden for product in kernel.products}
    return reads


def _triton_summary(kernel: Kernel) -> str:
    """Return a Triton kernel's line in the plan's table."""
    constants = (f"{name} {value}" for name, value in kernel.constants)
    return ", ".join([*constants, f"{kernel.threads // 32} warps"])


@dataclass(frozen=True)
class StripLowering:
    """The lowering "strip" for a backend.

    Attributes:
        backend: ``triton`` or ``cuda``.
    """

    backend: str

    def candidates(self, pass_name: str, spec: Spec, target: Target) -> Sequence[StripPass]:
        """Return the plan of a pass with the cheapest form of each kernel. ``alternatives`` returns
        other plans.

        Raises:
            PlanError: the pass has no plan; the message says why.
        """
        of_pass = target.name, pass_name, self.backend
        if spec.dtype not in target.dtypes:
            raise PlanError(explain("dtype", spec.dtype, f"{target.name} has no kernels for this dtype", target.dtypes))
        if spec.visible is not None and self.backend != "triton":
            rule = f"{self.backend} has no kernels for it"
            raise PlanError(explain("visible", spec.visible, rule, "backend='triton', or backend='torch'"))
        if spec.is_liftable and (pass_name != "backward" or not spec.kernel):
            rule = "the strip lowering replaces only the fused backward pass of a convolution"
            raise PlanError(explain("pass", pass_name, rule, "backend='triton'"))
        if spec.packed and spec.page_size and StripPass(replace(spec, page_size=None), *of_pass).fused:
            rule = "a fused kernel of values side by side reads the keys of packed documents from no pages"
            raise PlanError(explain("page_size", spec.page_size, rule, "None"))
        if spec.dynamic_ranks and spec.convolved:
            rule = "no kernel applies it before a mixing that depends on tokens"
            raise PlanError(explain("convolved", spec.convolved, rule, "None, or backend='torch'"))
        pairs = ("pairs",) * (self.backend == "triton")
        check_learned(spec, "strip", ("scores", "convolved", "visible", *pairs, "parameters", "sink"))
        plan = StripPass(spec, *of_pass)
        plan.check()
        return [plan]

    def from_fields(self, pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> StripPass:
        """Return the plan with these decisions.

        Raises:
            PlanError: a decision is not legal here.
        """
        plan = StripPass(spec, target, pass_name, self.backend)
        for key, form in decisions.items():
            plan = plan.decided(key, form)
        return plan

    def flop_per_score(self, pass_name: str, spec: Spec) -> int:
        """Return the flop per (row, key) pair of a training pass, 2 per multiply-add.

        In a stage, each tap or head of a group counts as one multiply-add. A backward pass computes
        each stage again, and two gradients of it.
        """
        d, dv = spec.head_dim, spec.value_head_dim
        stages = sum(cq * ck for cq, ck in spec.kernels.values()) + sum(spec.mixed.values())
        stages += sum(2 * rank + 1 for rank in spec.ranks.values())
        return {"forward": 2 * (d + dv + stages), "backward": 2 * (3 * d + 2 * dv + 3 * stages)}[pass_name]


def cuda_over_triton(pass_name: str, spec: Spec) -> tuple[float, str]:
    """Return the expected time of a pass with CUDA kernels over Triton's, and the source of the
    figure.

    If CUDA has kernels for products only, the ratio is 1.
    """
    convolves = bool(spec.kernels) and not Mask.of(spec).zeroes_terms
    takes_rows = Stages(spec).heads <= MAX_HEADS and spec.convolved is None
    if not (convolves or takes_rows):
        return 1.0, "by planned work"
    return CUDA_OVER_TRITON[pass_name], "or less, as measured for other stages"


LOWERINGS: Mapping[str, StripLowering] = {backend: StripLowering(backend) for backend in ("triton", "cuda")}
