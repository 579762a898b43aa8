"""CUDA kernels of the lowering "strip" for rows: mixtures of heads by mma instructions, and the
softmax.

A CTA owns a row of up to 16 heads that mix with each other, and loops over the row's keys once or
twice; each of its warps takes a block of keys at a time. Arguments and grids are those of Triton's
kernels of the same roles. Grids of a decode step differ: only rows that are needed are computed,
and several CTAs divide a row that needs no sums over keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sympy import Min, ceiling

from ...spec import Spec
from ..geometry.affine import Size
from ..kernel import Argument, Kernel, numbers, reads, writes
from ..sizes import COUNT, KEYS
from .cost import DRAIN, LONGEST_ROW, MEAN_ROW, START, Work
from .kernels import PROGRAMS, bundles
from .source import Form, StripSource
from .stages import PROBABILITY_SCALE, SCORE_SCALE

MAX_HEADS = 16  # rows of an mma
_BLOCK_KEYS = 64  # keys of a warp's block, as in rows.cuh
_BLOCK_BYTES = _BLOCK_KEYS * MAX_HEADS * 2
_MAX_DEPTH = 8
WALK = 2048  # keys of a CTA that mixes a part of a row of a decode step


_MIN_WARPS, _MAX_WARPS = 8, 24  # limits of resident warps per multiprocessor
_LEAST_HELD = 0.6  # least fraction of the registers that the compiler asks for, with which it spills little
# With more warps or CTAs per multiprocessor, more loads are in flight; with fewer, more of a row stays on chip.
_FORMS = tuple(
    Form(warps, ctas) for ctas in (3, 2, 1) for warps in (16, 12, 8, 4) if _MIN_WARPS <= warps * ctas <= _MAX_WARPS
)


class _Role(NamedTuple):
    """The properties of a role: the template, registers that the compiler asks for, and forms."""

    template: str
    registers: int
    forms: Sequence[Form] = _FORMS


_ROLES: Mapping[str, _Role] = {
    "softmax": _Role("row_softmax.cu.j2", 124),
    "probabilities": _Role("row_softmax.cu.j2", 80),
    "post_mix": _Role("row_mix.cu.j2", 76),
    "post_mix_backward": _Role("row_mix.cu.j2", 128),
    "softmax_backward": _Role("row_softmax_backward.cu.j2", 200),
    "decode_softmax": _Role("row_softmax.cu.j2", 124, (Form(16, 1),)),  # there are few rows
    "decode_post_mix": _Role("row_mix.cu.j2", 76, (Form(8, 3),)),
}
ROLES = tuple(_ROLES)


@dataclass(frozen=True)
class RowKernel(StripSource):
    """The kernel of a mixture or a softmax of rows.

    Attributes:
        spec: the request.
        target: name of the target.
        triton: the Triton kernel of the same role.
    """

    spec: Spec
    target: str
    triton: Kernel

    @property
    def role(self) -> str:
        return self.triton.role

    @property
    def template(self) -> str:  # type: ignore[override]
        """The kernel's template."""
        return _ROLES[self.role].template

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        return self.form.warps

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor."""
        return self.form.ctas

    @property
    def heads(self) -> int:
        """Number of heads of a row."""
        return dict(self.triton.constants)["HEADS"]

    @property
    def fits(self) -> bool:
        return self.heads <= MAX_HEADS and self.depth > 0

    @property
    def forms(self) -> Sequence[Form]:
        needed = _LEAST_HELD * _ROLES[self.role].registers
        return [form for form in _ROLES[self.role].forms if self.gpu.registers_of(form.warps * form.ctas) >= needed]

    @property
    def depends(self) -> str:
        stages = (
            ("mix", self.stages.mix),
            ("shares", self.backward and self.stores_probabilities),
            ("post_mix", self.mixes_results),
        )
        names = (name for name, applies in stages if applies and self.reads_scores)
        return "_".join((f"heads{self.heads}", *names))

    @property
    def cost(self) -> float:
        sweeps = 2 if self.reads_scores and not self.knows_lse else 1  # loops over the keys of a row
        results = 2 if self.backward and (self.stores_probabilities or not self.reads_scores) else 1
        on_chip = min(1.0, _BLOCK_KEYS * self.depth * self.warps / LONGEST_ROW)
        waits = sweeps - 1
        if self.depth == 1:  # a warp has no room for the next block while it works on a block
            waits += sweeps * MEAN_ROW // (_BLOCK_KEYS * self.warps)
        read_again = (sweeps - 1) * (1 - on_chip) ** 2  # fraction of all rows that is no longer in shared memory
        matrices = (self.stages.mix is not None) + self.mixes_results if self.reads_scores else 1
        work = Work(
            traffic=2 * (self.planes * (1 + read_again) + results),
            moved=(self.planes * sweeps + results) * MAX_HEADS / self.heads,
            head_products=matrices if self.backward else 0,
            warps=self.warps,
            ctas=self.ctas,
            registers=_ROLES[self.role].registers,
            scores=self.heads * MEAN_ROW,
            gap=waits * DRAIN + (0 if self.backward else START),
            even=True,
        )
        return work.cycles(self.gpu)

    @property
    def programs(self) -> int:
        """Number of CTAs that divide the rows of a bundle in the backward pass, each with its own
        partial sums.
        """
        return PROGRAMS

    @property
    def score_scale(self) -> float:
        """Factor of scores in planes."""
        return SCORE_SCALE

    @property
    def probability_scale(self) -> float:
        """Factor of probabilities in planes."""
        return PROBABILITY_SCALE

    @property
    def log2_probability_scale(self) -> float:
        """Base-2 logarithm of the factor of probabilities in planes."""
        return math.log2(PROBABILITY_SCALE)

    @property
    def first_row(self) -> int:
        """First row of a decode step that is needed."""
        return self.stages.first_valid if self.reads_scores else self.spec.context

    @property
    def divides_rows(self) -> bool:
        """Whether several CTAs divide the keys of a row."""
        return self.decodes and not self.reads_scores

    @property
    def cta_keys(self) -> int:
        """Number of keys of a CTA if several CTAs divide a row."""
        return WALK

    @property
    def bundle_ctas(self) -> Size:
        """Number of CTAs of a bundle of heads, which are neighbours in the grid."""
        if self.backward:
            return Min(PROGRAMS, COUNT)
        rows = COUNT - self.first_row if self.decodes else COUNT
        return rows * ceiling(KEYS / WALK) if self.divides_rows else rows

    # ---- Properties of the role

    @property
    def reads_scores(self) -> bool:
        """Whether the kernel computes a softmax, or its gradient, from scores."""
        return "post_mix" not in self.role

    @property
    def knows_lse(self) -> bool:
        """Whether the log-sum-exps are an input."""
        return self.role == "probabilities"

    @property
    def backward(self) -> bool:
        """Whether the kernel computes gradients."""
        return self.role.endswith("backward")

    @property
    def mixes_results(self) -> bool:
        """Whether the kernel also mixes the heads after the softmax."""
        return self.stages.fused_post_mix and self.reads_scores

    @property
    def scales_results(self) -> bool:
        """Whether results are scaled, because fp16 holds them in planes or as operands."""
        return self.stages.post_is_separate or self.mixes_results

    @property
    def stores_probabilities(self) -> bool:
        """Whether a backward kernel stores the probabilities that multiply the values."""
        return not self.stages.post_is_separate

    @property
    def matrices(self) -> bool:
        """Whether the kernel computes gradients of mixing matrices."""
        return self.stages.mix is not None or self.mixes_results

    @property
    def result(self) -> str:
        """Element type of ``out``."""
        return "Score" if self.stages.post_is_separate and self.reads_scores else "Element"

    # ---- Shared memory

    @property
    def sums_bytes(self) -> int:
        """Bytes for sums over warps: of gradients of matrices, or over a row."""
        sums = MAX_HEADS * MAX_HEADS if self.backward and (self.matrices or not self.reads_scores) else 2 * MAX_HEADS
        return 4 * sums * self.warps

    @property
    def block_bytes(self) -> int:
        """Bytes of a warp's block."""
        return _BLOCK_BYTES

    @property
    def planes(self) -> int:
        """Number of planes that the kernel reads."""
        return 2 if self.backward else 1

    @property
    def mask_bytes(self) -> int:
        """Bytes of a block's dropout mask, a word per lane, if a second loop over the row needs it
        again.
        """
        return 4 * 32 if self.drops and self.backward and self.reads_scores else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a block of each plane, and its dropout mask."""
        return self.planes * _BLOCK_BYTES + self.mask_bytes

    @property
    def depth(self) -> int:
        """Number of blocks of each plane that a warp copies to shared memory ahead of its work."""
        free = self.gpu.shared_of(self.ctas) - self.sums_bytes
        return min(_MAX_DEPTH, free // (self.slot_bytes * self.warps))

    @property
    def kernel(self) -> Kernel:
        arguments = tuple(self._argument(argument) for argument in self.triton.arguments)
        return Kernel(
            self.role,
            self.name,
            arguments,
            (self.bundle_ctas * bundles(self.heads),),
            32 * self.warps,
            self.sums_bytes + self.depth * self.slot_bytes * self.warps,
            self.gpu.registers_of(self.warps * self.ctas),
        )

    def _argument(self, triton: Argument) -> Argument:
        """Return an argument of the Triton kernel in C. Results may overwrite inputs."""
        name = triton.name.removesuffix("_ptr")
        if name == triton.name:
            (number,) = numbers("float" if triton.type == "float" else "int", name)
            return number
        written = {"out": self.result, "dx": "Element", "shares": "Element", "dy": "Element"}
        if name in written:
            (pointer,) = writes(written[name], name, restrict=False)
        elif name.endswith("partial") or (name == "lse" and self.role.endswith("softmax")):
            (pointer,) = writes("float", name)
        else:
            types = {"x": "Score", "g": "Element", "seqlens": "int", "documents": "int", "seed": "long long"}
            (pointer,) = reads(types.get(name, "float"), name, restrict=name not in "xg")
        return pointer

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment: the formula of the kernel."""
        mixed = "M x" if self.stages.mix else "x"
        probabilities = f"N softmax({mixed})" if self.mixes_results else f"softmax({mixed})"
        yield "Rows of planes [slot, r, j] of a strip, a slot for each head. In each row of heads that mix:"
        match self.role:
            case "softmax" | "decode_softmax":
                yield f"out = {probabilities}, over keys; and lse of rows from `skip` on."
            case "probabilities":
                yield f"out = exp({mixed} - lse)."
            case "post_mix":
                yield "out = N x; zeros in rows before `skip`."
            case "decode_post_mix":
                yield "out = N x."
            case "post_mix_backward":
                yield "out = N x, dy becomes N^T dy, both zeros in rows before `skip`; and the gradient of N."
            case _:
                yield f"dx, the gradient of x, from g, that of {probabilities}; and gradients of matrices."
        if self.drops:
            gradient = ", and first to their gradient" if self.backward else ""
            yield f"Dropout applies last to probabilities{gradient}; those that it keeps are multiplied by keep_scale."
        if self.backward and (self.matrices or not self.reads_scores):
            yield "Each CTA has its own partial sums of a matrix's gradient."
        scales = [f"scores times {SCORE_SCALE}"] * self.reads_scores + [f"probabilities times {PROBABILITY_SCALE}"]
        yield f"Planes of fp16 hold {', and '.join(scales)}."
        if self.decodes:
            yield f"Rows before row {self.first_row} are not computed. Query r sits at position r + off. A sequence has"
            yield "its own length, and its last row is at its end."
        else:
            yield "Query first + r sits at position first + r + off; rows before `valid` count as unseen."

    @property
    def summary(self) -> str:
        return f"CUDA, {self.warps} warps, {self.heads} heads of a row"
