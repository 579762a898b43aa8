"""CUDA kernels of the lowering "strip" for rows: mixings of heads by mma instructions, and the
softmax.

A CTA owns a row of up to 16 heads that mix with each other, and loops over the row's keys once or
twice; each of its warps takes a block of keys at a time. Arguments and grids are those of Triton's
kernels of the same roles. Grids of a decode step differ: only rows that are needed are computed,
and several CTAs divide a row into sections of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sympy import Min, ceiling

from ...spec import Spec
from ..geometry.affine import Size
from ..geometry.score import ScoreStage
from ..kernel import Argument, Kernel, numbers, reads, writes
from ..sizes import COUNT, KEYS
from .cost import DRAIN, LONGEST_ROW, MEAN_ROW, START, Work
from .hidden import NONE, HiddenKeys
from .kernels import PROGRAMS, SECTION, bundles
from .row_formula import RowFormula
from .row_shared import BLOCK_KEYS, MAX_HEADS, RowShared
from .source import Form, StripSource

_MIN_WARPS, _MAX_WARPS = 8, 24  # limits of resident warps per multiprocessor
_LEAST_HELD = 0.6  # least fraction of the registers that the compiler asks for, with which it spills little
# With more warps or CTAs per multiprocessor, more loads are in flight; with fewer, more of a row stays on chip.
_FORMS = tuple(
    Form(warps, ctas) for ctas in (3, 2, 1) for warps in (16, 12, 8, 4) if _MIN_WARPS <= warps * ctas <= _MAX_WARPS
)

_DECODE_FORMS = (Form(8, 3),)


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
    "decode_statistics": _Role("row_softmax.cu.j2", 80, _DECODE_FORMS),
    "decode_softmax": _Role("row_softmax.cu.j2", 80, _DECODE_FORMS),
    "decode_post_mix": _Role("row_mix.cu.j2", 76, _DECODE_FORMS),
}
ROLES = tuple(_ROLES)


@dataclass(frozen=True)
class RowKernel(StripSource):
    """The kernel of a mixing or a softmax of rows.

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

    @cached_property
    def formula(self) -> RowFormula:
        """The formula that the kernel computes."""
        return RowFormula(self.role, self.stages)

    @cached_property
    def shared(self) -> RowShared:
        """The shared memory of a CTA."""
        return RowShared(self.formula, self.warps, self.gpu.shared_of(self.ctas))

    @property
    def heads(self) -> int:
        """Number of heads of a row."""
        return dict(self.triton.constants)["HEADS"]

    @property
    def fits(self) -> bool:
        if "post_mix" in self.role and self.stages.token_post_mix:
            return False  # all tokens of the kernel's mixings share their matrices
        sums = self.role == "softmax_backward" and ScoreStage.of(self.spec).sums  # gradients of parameters
        return self.heads <= MAX_HEADS and self.shared.depth > 0 and not sums

    @property
    def reads_hidden(self) -> HiddenKeys:
        return NONE

    @property
    def forms(self) -> Sequence[Form]:
        needed = _LEAST_HELD * _ROLES[self.role].registers
        return [form for form in _ROLES[self.role].forms if self.gpu.registers_of(form.warps * form.ctas) >= needed]

    @property
    def depends(self) -> str:
        stages = (
            ("mix", self.stages.mix),
            ("shares", self.formula.backward and self.formula.stores_probabilities),
            ("post_mix", self.formula.mixes_results),
        )
        names = (name for name, applies in stages if applies and self.formula.reads_scores)
        return "_".join((f"heads{self.heads}", *names))

    @property
    def cost(self) -> float:
        formula, sweeps, results = self.formula, self.formula.sweeps, self.formula.results
        on_chip = min(1.0, BLOCK_KEYS * self.shared.depth * self.warps / LONGEST_ROW)
        waits = sweeps - 1
        if self.shared.depth == 1:  # a warp has no room for the next block while it works on a block
            waits += sweeps * MEAN_ROW // (BLOCK_KEYS * self.warps)
        read_again = (sweeps - 1) * (1 - on_chip) ** 2  # fraction of all rows that is no longer in shared memory
        matrices = (self.stages.mix is not None) + formula.mixes_results if formula.reads_scores else 1
        work = Work(
            traffic=2 * (formula.planes * (1 + read_again) + results),
            moved=(formula.planes * sweeps + results) * MAX_HEADS / self.heads,
            head_products=matrices if formula.backward else 0,
            warps=self.warps,
            ctas=self.ctas,
            registers=_ROLES[self.role].registers,
            scores=self.heads * MEAN_ROW,
            gap=waits * DRAIN + (0 if formula.backward else START),
            even=True,
        )
        return work.cycles(self.gpu)

    @property
    def first_row(self) -> int:
        """First row of a decode step that is needed."""
        return self.stages.first_valid if self.formula.reads_scores else self.spec.context

    @property
    def cta_keys(self) -> int:
        """Number of keys of a CTA in a decode step, where several CTAs divide a row."""
        return SECTION

    @property
    def bundle_ctas(self) -> Size:
        """Number of CTAs of a bundle of heads, which are neighbours in the grid."""
        if self.formula.backward:
            return Min(PROGRAMS, COUNT)
        return (COUNT - self.first_row) * ceiling(KEYS / SECTION) if self.decodes else COUNT

    @property
    def kernel(self) -> Kernel:
        arguments = tuple(self._argument(argument) for argument in self.triton.arguments)
        return Kernel(
            self.role,
            self.name,
            arguments,
            (self.bundle_ctas * bundles(self.heads),),
            32 * self.warps,
            self.shared.size,
            self.gpu.registers_of(self.warps * self.ctas),
        )

    def _argument(self, triton: Argument) -> Argument:
        """Return an argument of the Triton kernel in C. Results may overwrite inputs."""
        name = triton.name.removesuffix("_ptr")
        if name == triton.name:
            (number,) = numbers("float" if triton.type == "float" else "int", name)
            return number
        written = {"out": self.formula.result, "dx": "Element", "shares": "Element", "dy": "Element"}
        if name in written:
            (pointer,) = writes(written[name], name, restrict=False)
        elif name.endswith("partial") or name == "minus_dot" or name == self._statistics:
            (pointer,) = writes("float", name)
        else:
            types = {"x": "Score", "g": "Element", "seed": "long long"} | dict.fromkeys(self.sequence.names, "int")
            (pointer,) = reads(types.get(name, "float"), name, restrict=name not in "xg")
        return pointer

    @property
    def _statistics(self) -> str:
        """Name of the tensor of statistics of rows that the kernel writes; empty if it writes none."""
        return "sums" if self.formula.only_sums else "lse" if self.role.endswith("softmax") else ""

    @property
    def begins_at_the_end(self) -> bool:
        """Whether the kernel works through planes from their end, where the kernel before it ended.

        It finds in L2 what that kernel read last. The next kernel, which works from the beginning, finds
        what this one wrote last.
        """
        return self.formula.merges_sums

    @property
    def adds_sink(self) -> bool:
        """Whether the kernel adds sinks to sums of probabilities."""
        return any(argument.name == "sink" for argument in self.kernel.arguments)

    @property
    def places_of_tokens(self) -> str:
        """Where the sequence has its numbers in parameters: the last members of ``Parameters``."""
        if self.sequence.struct != "Packed":
            return "place.b, tokens, tokens, 0"
        return "sequence.number, sequence.unseen + sequence.keys, tokens, sequence.key0 - sequence.unseen"

    @property
    def row_of_results(self) -> str:
        """The number of row r among the log-sum-exps of its head, and how many of them there are: in a decode step
        those of new tokens only.
        """
        return "r - skip, count - skip" if self.decodes else "sequence.query(r), n_q"

    @property
    def moved(self) -> str:
        """What the function of scores adds to positions and keys, which count from key 0 of planes."""
        unseen = "key0" if self.sequence.struct == "Step" else "unseen"
        return f" + sequence.{unseen}" if self.stages.places_keys else ""

    @property
    def moved_key(self) -> str:
        """The offset of keys in the function of scores. In a decode step keys count from the CTA's section."""
        return self.moved + self.moved_plane

    @property
    def moved_plane(self) -> str:
        """The offset of planes that puts the CTA's first key at 0."""
        return " + place.begin" if self.decodes else ""

    @property
    def legend(self) -> Iterator[str]:
        yield from self.formula.legend
        if self.decodes:
            yield f"Rows before row {self.first_row} are not computed. Query r sits at position r + off. A sequence has"
            yield "its own length, and its last row is at its end."
        else:
            yield "Query first + r sits at position first + r + off."
            names = {argument.name for argument in self.kernel.arguments}
            if "skip" in names:
                yield "Rows before `skip` are context: rows below read them, and another strip has their outputs."
            if "valid" in names:
                yield "Rows before `valid` are context of scores alone: they see no key, and have no probabilities."

    @property
    def summary(self) -> str:
        return f"CUDA, {self.warps} warps, {self.heads} heads of a row"
