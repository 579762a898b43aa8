"""The CUDA kernels of the lowering "strip" that own rows: mixtures of heads by mma instructions, and the softmax.

A CTA owns a row of the heads that mix with each other, up to 16 of them, and passes over its keys once or twice; each
of its warps takes a block of keys at a time. Arguments and grids are those of Triton's kernels of the same roles, save
in a decode step: it has few rows, of which only those are made that are needed, and several CTAs share a row that needs
no sums over its keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sympy import ceiling

from ...spec import Spec
from ..geometry.affine import Size
from ..kernel import Argument, Kernel, numbers, reads, writes
from .kernels import PROGRAMS
from .sizes import KEYS
from .source import StripSource
from .stages import SCORE_SCALE, SHARE_SCALE

MAX_HEADS = 16  # rows of an mma
_BLOCK_BYTES = 64 * MAX_HEADS * 2  # of a warp: 64 keys, as in rows.cuh
_MAX_DEPTH = 8
WALK = 2048  # keys of a CTA that mixes a row of a decode step


class _Form(NamedTuple):
    """What depends on the role: the template, warps of a CTA and CTAs of a multiprocessor."""

    template: str
    warps: int
    ctas: int


_FORMS: Mapping[str, _Form] = {
    "softmax": _Form("row_softmax.cu.j2", 8, 2),
    "probabilities": _Form("row_softmax.cu.j2", 8, 3),
    "post_mix": _Form("row_mix.cu.j2", 8, 3),
    "post_mix_backward": _Form("row_mix.cu.j2", 8, 2),
    "softmax_backward": _Form("row_softmax_backward.cu.j2", 8, 1),
    "decode_softmax": _Form("row_softmax.cu.j2", 16, 1),  # there are few rows
    "decode_post_mix": _Form("row_mix.cu.j2", 8, 3),
}
ROLES = tuple(_FORMS)


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
        return _FORMS[self.role].template

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return _FORMS[self.role].warps

    @property
    def ctas(self) -> int:
        """CTAs of a multiprocessor."""
        return _FORMS[self.role].ctas

    @property
    def heads(self) -> int:
        """Heads of a row."""
        return dict(self.triton.constants)["HEADS"]

    @property
    def fits(self) -> bool:
        return self.heads <= MAX_HEADS and self.depth > 0

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
    def grid(self) -> tuple[Size, ...]:
        """CTAs along rows, and bundles of heads."""
        if not self.decodes:
            return self.triton.grid
        rows, bundles = self.triton.grid
        return (rows - self.first_row) * (ceiling(KEYS / WALK) if self.walks else 1), bundles

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
    def depth(self) -> int:
        """Blocks of each plane that a warp copies to shared memory ahead of its work."""
        free = self.shared_of(self.ctas) - self.sums_bytes
        return min(_MAX_DEPTH, free // (self.planes * _BLOCK_BYTES * self.warps))

    @property
    def kernel(self) -> Kernel:
        form = _FORMS[self.role]
        arguments = tuple(self._argument(argument) for argument in self.triton.arguments)
        return Kernel(
            self.role,
            self.name,
            arguments,
            self.grid,
            32 * form.warps,
            self.sums_bytes + self.depth * self.planes * _BLOCK_BYTES * form.warps,
            65536 // (32 * form.warps * form.ctas),
        )

    def _argument(self, triton: Argument) -> Argument:
        """An argument of Triton's kernel in C. Results may take the place of what they are made of."""
        name = triton.name.removesuffix("_ptr")
        if name == triton.name:
            (number,) = numbers("int", name)
            return number
        written = {"out": self.result, "dx": "Element", "shares": "Element", "dy": "Element"}
        if name in written:
            (made,) = writes(written[name], name, restrict=False)
        elif name.endswith("partial") or (name == "lse" and self.role.endswith("softmax")):
            (made,) = writes("float", name)
        else:
            types = {"x": "Score", "g": "Element", "seqlens": "int"}
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
