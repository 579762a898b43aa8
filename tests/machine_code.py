"""What integers are in a kernel's machine code: registers of all threads of a warpgroup, without a GPU.

A compiler errs seldom, and then where registers are few: ptxas of CUDA 13.0 once gave a register away that was still
needed for the place at which a thread stores. Such integers follow from the thread's index by few instructions. They
are evaluated here by looking up the instructions that a register comes from, through branches, and through the stack
where it was spilled. What all threads have alike, uniform registers and the kernel's arguments, counts as 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

THREADS = 128
WORD = 0xFFFFFFFF
Values: TypeAlias = "tuple[int, ...]"  # of each thread
Place: TypeAlias = "tuple[str, int]"  # a register, or an offset on the stack

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?PT?\d*)\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", re.MULTILINE)
_REGISTER = re.compile(r"^[-~|!]*R(\d+)(\.reuse)?\|?$")
_STACK = re.compile(r"^\[R1(?:\+0x([0-9a-f]+))?\]$")
_WIDTHS = {"64": 2, "128": 4}  # registers of an operand, by a part of the opcode
_WRITES_NONE = re.compile(r"^(ST|RED|BAR|BRA|EXIT|SYNCS|WARP|MEMBAR|[IF]SETP|PLOP3|R2UR|U|DEPBAR|LDGSTS|BSSY|BSYNC)")


class UnknownError(Exception):
    """A register that does not follow from the thread's index alone, or by an instruction that is not known here."""


@dataclass(frozen=True)
class Instruction:
    """One of a kernel.

    Attributes:
        address: of its code.
        predicate: under which it runs; empty: always.
        opcode: with its modifiers.
        operands: as they are printed.
    """

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @cached_property
    def written(self) -> frozenset[Place]:
        """The registers and words of the stack that it writes."""
        if self.opcode.startswith("STL"):
            return frozenset(place for place, _ in self.spilled)
        if _WRITES_NONE.match(self.opcode):
            return frozenset()
        found = [m for operand in self.operands[:2] if (m := _REGISTER.match(operand))]
        if not found or not (_REGISTER.match(self.operands[0]) or self.operands[0].startswith("P")):
            return frozenset()
        first = int(found[0][1])
        return frozenset(("R", first + i) for i in range(self._width))

    @cached_property
    def spilled(self) -> tuple[tuple[Place, str], ...]:
        """Of a store to the stack, the words and what they get."""
        first, operand = stack_offset(self.operands[0]), self.operands[1]
        register = _REGISTER.match(operand)
        return tuple(
            (("stack", first + 4 * i), f"R{int(register[1]) + i}" if register else operand) for i in range(self._width)
        )

    @property
    def _width(self) -> int:
        if self.opcode.startswith("HGMMA"):
            return int(self.opcode.split("x")[1]) // 2
        if self.opcode.startswith(("HMMA", "LDSM.16.M88.4", "LDSM.16.MT88.4")):
            return 4
        return max((_WIDTHS.get(part, 1) for part in self.opcode.split(".")), default=1) + (".WIDE" in self.opcode)


def stack_offset(operand: str) -> int:
    """Of a word, as ``[R1+0x20]`` has it."""
    found = _STACK.match(operand)
    if not found:
        raise UnknownError(operand)
    return int(found[1] or "0", 16)


class MachineCode:
    """A kernel's instructions.

    Args:
        assembly: as :class:`mtagen.runtime.offline.Usage` has it.
    """

    def __init__(self, assembly: str) -> None:
        self.instructions = [
            Instruction(int(address, 16), predicate, opcode, tuple(re.split(r",\s*(?![^\[]*\])", operands)))
            for address, predicate, opcode, operands in _LINE.findall(assembly)
        ]
        self._known: dict[tuple[int, Place], Values] = {}
        places = {one.address: i for i, one in enumerate(self.instructions)}
        self._before: list[list[int]] = [[] for _ in self.instructions]
        for i, one in enumerate(self.instructions):
            target = one.operands[-1]
            if one.opcode.startswith("BRA") and target.startswith("0x") and int(target, 16) in places:
                self._before[places[int(target, 16)]].append(i)
            goes_on = one.predicate or len(one.operands) > 1 or not one.opcode.startswith(("BRA", "EXIT", "RET"))
            if goes_on and i + 1 < len(self.instructions):
                self._before[i + 1].append(i)

    def stores(self, displacement: int) -> Iterator[Values]:
        """The addresses of each unconditional store of a word at a register and a displacement in shared memory.

        Raises:
            UnknownError: a register does not follow from the thread's index.
        """
        for i, one in enumerate(self.instructions):
            found = re.match(r"^\[(R\d+)\+0x([0-9a-f]+)\]$", one.operands[0])
            if one.opcode == "STS" and found and int(found[2], 16) == displacement:
                yield tuple(value + displacement & WORD for value in self._value(i, found[1]))

    def _value(self, i: int, operand: str) -> Values:
        """Of an operand of instruction ``i``."""
        name = operand.lstrip("-~").removesuffix(".reuse")
        if register := _REGISTER.match(name):
            values = self._at(i, ("R", int(register[1])))
        elif re.match(r"^(RZ|U?RZ|UR\d+|c\[)", name):
            values = (0,) * THREADS
        elif name.startswith("0x"):
            values = (int(name, 16),) * THREADS
        else:
            raise UnknownError(f"{operand} of {self.instructions[i]}")
        if operand.startswith("-"):
            return tuple(-value & WORD for value in values)
        return tuple(~value & WORD for value in values) if operand.startswith("~") else values

    def _at(self, i: int, place: Place) -> Values:
        """What is at a place before instruction ``i``, whichever way led there."""
        seen: set[int] = set()
        todo, found = list(self._before[i]), set()
        while todo:
            j = todo.pop()
            if j in seen:
                continue
            seen.add(j)
            if place in self.instructions[j].written:
                found.add(self._result(j, place))
            else:
                todo += self._before[j]
        if len(found) != 1:
            raise UnknownError(f"{place} has {len(found)} values before {self.instructions[i]}")
        return found.pop()

    def _result(self, j: int, place: Place) -> Values:
        """What instruction ``j`` leaves at a place."""
        if (j, place) not in self._known:
            self._known[j, place] = self._computed(j, place)
        return self._known[j, place]

    def _computed(self, j: int, place: Place) -> Values:
        one = self.instructions[j]
        if one.predicate:
            raise UnknownError(f"{one} runs under a predicate")
        if one.opcode.startswith("STL"):
            return self._value(j, dict(one.spilled)[place])
        if one.opcode.startswith("LDL"):
            first = _REGISTER.match(one.operands[0])
            assert first
            return self._at(j, ("stack", stack_offset(one.operands[1]) + 4 * (place[1] - int(first[1]))))
        if one.opcode == "S2R":
            return tuple(range(THREADS)) if one.operands[1] == "SR_TID.X" else (0,) * THREADS
        operands = [operand for operand in one.operands[1:] if not operand.lstrip("!").startswith(("P", "UP"))]
        if one.opcode == "LOP3.LUT":
            compute: Callable[..., int] = _logic(int(operands.pop(), 16))
        elif one.opcode in _ARITHMETIC:
            compute = _ARITHMETIC[one.opcode]
        else:
            raise UnknownError(str(one))
        return tuple(compute(*x) & WORD for x in zip(*(self._value(j, x) for x in operands), strict=True))


def _signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 & 1 else x


def _logic(table: int) -> Callable[[int, int, int], int]:
    """LOP3: the table's bit 4 a + 2 b + c for each bit of three words."""

    def compute(a: int, b: int, c: int) -> int:
        found = 0
        for row in range(8):
            if table >> row & 1:
                found |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return found

    return compute


def _multiply_add(x: int, y: int, z: int) -> int:
    return x * y + z


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "MOV": lambda x: x,
    "IADD3": lambda x, y, z: x + y + z,
    "VIADD": lambda x, y: x + y,
    **{f"IMAD{kind}": _multiply_add for kind in ("", ".U32", ".MOV", ".MOV.U32", ".SHL", ".SHL.U32", ".IADD")},
    "SHF.L.U32": lambda low, n, high: low << (n & 31),
    "SHF.R.U32.HI": lambda low, n, high: high >> (n & 31),
    "SHF.R.S32.HI": lambda low, n, high: _signed(high) >> (n & 31),
    "LEA": lambda x, y, n: (x << n) + y,
    "LEA.HI": lambda x, y, high, n: ((high << 32 | x) << n >> 32) + y,
    "LEA.HI.SX32": lambda x, y, n: (_signed(x) >> 32 - n) + y,
}
