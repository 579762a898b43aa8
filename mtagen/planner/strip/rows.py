"""The CUDA kernels of the lowering "strip" that own rows: mixtures of heads by mma instructions, and the softmax.

A CTA owns a row of the heads that mix with each other, up to 16 of them, and passes over its keys once or twice; each
of its warps takes a block of keys at a time. Arguments are those of Triton's kernels of the same roles, and so are
grids, save in a decode step: it has few rows, of which only those are made that are needed, and several CTAs share a
row that needs no sums over its keys.
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
from ..targets import get_target
from .cost import DRAIN, LONGEST_ROW, MEAN_ROW, START, Work
from .kernels import PROGRAMS, bundles
from .sizes import COUNT, KEYS
from .source import Form, StripSource
from .stages import SCORE_SCALE, SHARE_SCALE

MAX_HEADS = 16  # rows of an mma
_BLOCK_KEYS = 64  # of a warp, as in rows.cuh
_BLOCK_BYTES = _BLOCK_KEYS * MAX_HEADS * 2
_MAX_DEPTH = 8
WALK = 2048  # keys of a CTA that mixes a row of a decode step


_MIN_WARPS, _MAX_WARPS = 8, 24  # of a multiprocessor
_LEAST_HELD = 0.6  # of the registers that the compiler asks for: it keeps few values on the stack then
# With more warps or CTAs of a multiprocessor, more loads are under way; with fewer, more of a row stays on chip.
_FORMS = tuple(
    Form(warps, ctas) for ctas in (3, 2, 1) for warps in (16, 12, 8, 4) if _MIN_WARPS <= warps * ctas <= _MAX_WARPS
)


class _Role(NamedTuple):
    """What depends on the role: the template, registers that the compiler asks for, and forms."""

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
    """A mixture or a softmax of rows.

    Attributes:
        spec: the request.
        target: name of the target.
        triton: Triton's kernel of the same role.
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
        """Warps of a CTA."""
        return self.form.warps

    @property
    def ctas(self) -> int:
        """CTAs of a multiprocessor."""
        return self.form.ctas

    @property
    def heads(self) -> int:
        """Heads of a row."""
        return dict(self.triton.constants)["HEADS"]

    @property
    def fits(self) -> bool:
        return self.heads <= MAX_HEADS and self.depth > 0

    @property
    def forms(self) -> Sequence[Form]:
        needed = _LEAST_HELD * _ROLES[self.role].registers
        return [form for form in _ROLES[self.role].forms if self.registers_of(form.warps * form.ctas) >= needed]

    @property
    def depends(self) -> str:
        stages = (
            ("mix", self.stages.mix),
            ("shares", self.backward and self.stores_shares),
            ("post_mix", self.mixes_results),
        )
        kept = (name for name, there in stages if there and self.reads_scores)
        return "_".join((f"heads{self.heads}", *kept))

    @property
    def cost(self) -> float:
        passes = 2 if self.reads_scores and not self.again else 1
        results = 2 if self.backward and (self.stores_shares or not self.reads_scores) else 1
        kept = min(1.0, _BLOCK_KEYS * self.depth * self.warps / LONGEST_ROW)
        waits = passes - 1
        if self.depth == 1:  # a warp has no room for the next block while it works on one
            waits += passes * MEAN_ROW // (_BLOCK_KEYS * self.warps)
        again = (passes - 1) * (1 - kept) ** 2  # of all rows, what a second pass does not find in shared memory
        matrices = (self.stages.mix is not None) + self.mixes_results if self.reads_scores else 1
        work = Work(
            traffic=2 * (self.planes * (1 + again) + results),
            moved=(self.planes * passes + results) * MAX_HEADS / self.heads,
            head_products=matrices if self.backward else 0,
            warps=self.warps,
            ctas=self.ctas,
            registers=_ROLES[self.role].registers,
            scores=self.heads * MEAN_ROW,
            gap=waits * DRAIN + (0 if self.backward else START),
            even=True,
        )
        return work.cycles(get_target(self.target))

    @property
    def programs(self) -> int:
        """CTAs that share the rows in the backward pass, each with sums of its own."""
        return PROGRAMS

    @property
    def score_scale(self) -> float:
        """What planes hold of a score."""
        return SCORE_SCALE

    @property
    def share_scale(self) -> float:
        """What planes hold of a probability."""
        return SHARE_SCALE

    @property
    def log2_share_scale(self) -> float:
        """Its logarithm to base 2."""
        return math.log2(SHARE_SCALE)

    @property
    def first_row(self) -> int:
        """The first row of a decode step that is needed."""
        return self.stages.first_valid if self.reads_scores else self.spec.context

    @property
    def walks(self) -> bool:
        """Whether several CTAs share a row."""
        return self.decodes and not self.reads_scores

    @property
    def walk(self) -> int:
        """Keys of a CTA then."""
        return WALK

    @property
    def bundle_ctas(self) -> Size:
        """CTAs of a bundle of heads, which are neighbours in the grid."""
        if self.backward:
            return Min(PROGRAMS, COUNT)
        rows = COUNT - self.first_row if self.decodes else COUNT
        return rows * ceiling(KEYS / WALK) if self.walks else rows

    # ---- What the role asks for

    @property
    def reads_scores(self) -> bool:
        """Whether it takes the softmax."""
        return "post_mix" not in self.role

    @property
    def again(self) -> bool:
        """Whether the logarithms of sums are known."""
        return self.role == "probabilities"

    @property
    def backward(self) -> bool:
        """Whether it makes gradients."""
        return self.role.endswith("backward")

    @property
    def mixes_results(self) -> bool:
        """Whether the heads are mixed after the softmax, too."""
        return self.stages.fused_post_mix and self.reads_scores

    @property
    def scales_results(self) -> bool:
        """Whether results are scaled: fp16 holds them, in planes or as operands."""
        return self.stages.post_is_separate or self.mixes_results

    @property
    def stores_shares(self) -> bool:
        """Whether a backward kernel makes what multiplies the values."""
        return not self.stages.post_is_separate

    @property
    def matrices(self) -> bool:
        """Whether it makes gradients of matrices."""
        return self.stages.mix is not None or self.mixes_results

    @property
    def result(self) -> str:
        """Type of the elements of ``out``."""
        return "Score" if self.stages.post_is_separate and self.reads_scores else "Element"

    # ---- Shared memory

    @property
    def sums_bytes(self) -> int:
        """For sums over warps: of gradients of matrices, or over a row."""
        sums = MAX_HEADS * MAX_HEADS if self.backward and (self.matrices or not self.reads_scores) else 2 * MAX_HEADS
        return 4 * sums * self.warps

    @property
    def block_bytes(self) -> int:
        """What a warp works on at a time."""
        return _BLOCK_BYTES

    @property
    def planes(self) -> int:
        """Planes that it reads."""
        return 2 if self.backward else 1

    @property
    def kept_bytes(self) -> int:
        """For what dropout keeps of a block, a word a lane, if a second pass over the row wants to know it again."""
        return 4 * 32 if self.drops and self.backward and self.reads_scores else 0

    @property
    def slot_bytes(self) -> int:
        """A block of each plane, and what belongs to it."""
        return self.planes * _BLOCK_BYTES + self.kept_bytes

    @property
    def depth(self) -> int:
        """Blocks of each plane that a warp copies to shared memory ahead of its work."""
        free = self.shared_of(self.ctas) - self.sums_bytes
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
            self.registers_of(self.warps * self.ctas),
        )

    def _argument(self, triton: Argument) -> Argument:
        """An argument of Triton's kernel in C. Results may take the place of what they are made of."""
        name = triton.name.removesuffix("_ptr")
        if name == triton.name:
            (number,) = numbers("float" if triton.type == "float" else "int", name)
            return number
        written = {"out": self.result, "dx": "Element", "shares": "Element", "dy": "Element"}
        if name in written:
            (made,) = writes(written[name], name, restrict=False)
        elif name.endswith("partial") or (name == "lse" and self.role.endswith("softmax")):
            (made,) = writes("float", name)
        else:
            types = {"x": "Score", "g": "Element", "seqlens": "int", "documents": "int", "seed": "long long"}
            (made,) = reads(types.get(name, "float"), name, restrict=name not in "xg")
        return made

    @property
    def legend(self) -> Iterator[str]:
        """What the kernel computes."""
        mixed = "M x" if self.stages.mix else "x"
        shares = f"N softmax({mixed})" if self.mixes_results else f"softmax({mixed})"
        yield "Rows of planes [slot, r, j] of a strip, a slot for each head. In each row of heads that mix:"
        match self.role:
            case "softmax" | "decode_softmax":
                yield f"out = {shares}, over keys; and lse of rows from `skip` on."
            case "probabilities":
                yield f"out = exp({mixed} - lse)."
            case "post_mix":
                yield "out = N x; zeros in rows before `skip`."
            case "decode_post_mix":
                yield "out = N x."
            case "post_mix_backward":
                yield "out = N x, dy becomes N^T dy, both zeros in rows before `skip`; and the gradient of N."
            case _:
                yield f"dx, the gradient of x, from g, that of {shares}; and gradients of matrices."
        if self.drops:
            gradient = ", and first to their gradient" if self.backward else ""
            yield f"Shares are dropped last{gradient}: those that are kept are multiplied by keep_scale."
        if self.backward and (self.matrices or not self.reads_scores):
            yield "Each CTA has sums of its own of a matrix's gradient."
        scales = [f"scores times {SCORE_SCALE}"] * self.reads_scores + [f"probabilities times {SHARE_SCALE}"]
        yield f"Planes of fp16 hold {', and '.join(scales)}."
        if self.decodes:
            yield f"Rows before row {self.first_row} are not made. Query r sits at position r + off; each sequence has"
            yield "a length of its own, and its last row is at its end."
        else:
            yield "Query first + r sits at position first + r + off; rows before `valid` count as unseen."

    @property
    def summary(self) -> str:
        return f"CUDA, {self.warps} warps, {self.heads} heads of a row"
