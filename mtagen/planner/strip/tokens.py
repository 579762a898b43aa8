"""CUDA kernels of the lowering "strip" for mixings whose matrices depend on tokens.

A CTA owns a block of keys of the heads of a group, whose factors stay in registers, and some rows. Each of its warps
mixes a tile of 16 keys by mma, with the matrix of the row, and adds what the keys' factors say. Arguments are those of
Triton's kernels of the same roles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sympy import ceiling

from ...spec import Spec
from ..kernel import Argument, Kernel, numbers, reads, writes
from ..sizes import COUNT, KEYS
from .kernels import bundles
from .row_shared import BLOCK_KEYS, MAX_HEADS
from .source import StripSource
from .stages import TokenMixture

WARPS = 4  # each has 16 keys
GROUP_ROWS = 4  # rows of a slot of the ring; a warp sums the gradient of the matrix of one of them
MATRIX_BYTES = 2 * MAX_HEADS * MAX_HEADS
_MAX_RANK = 2  # of keys; the factors of more, and the sums of their gradients, would spill
_MAX_DEPTH, _MIN_DEPTH = 4, 2  # limits of the ring


class _Role(NamedTuple):
    """The properties of a role: rows of a CTA, and resident CTAs per multiprocessor."""

    rows: int
    ctas: int


_FORWARD, _BACKWARD = _Role(64, 5), _Role(128, 3)


@dataclass(frozen=True)
class TokenKernel(StripSource):
    """The kernel of a mixing whose matrices depend on tokens, or of its gradients.

    Attributes:
        spec: the request.
        target: name of the target.
        stage: the mixing.
        triton: the Triton kernel of the same role.
    """

    spec: Spec
    target: str
    stage: TokenMixture
    triton: Kernel

    template = "token_mix.cu.j2"

    @property
    def role(self) -> str:
        return self.triton.role

    @property
    def backward(self) -> bool:
        """Whether the kernel computes gradients."""
        return self.role.endswith("backward")

    @property
    def mixes(self) -> bool:
        """Whether the kernel computes mixtures."""
        return not self.backward or self.stage.final

    @property
    def fits(self) -> bool:
        return self.stage.heads == MAX_HEADS and self.stage.rank <= _MAX_RANK and not self.drops and self._depth > 1

    # ---- The division of the work

    @property
    def _traits(self) -> _Role:
        return _BACKWARD if self.backward else _FORWARD

    @property
    def ctas(self) -> int:
        """Number of resident CTAs per multiprocessor."""
        return self._traits.ctas

    @property
    def rows(self) -> int:
        """Number of rows of a CTA."""
        return self._traits.rows

    @property
    def warps(self) -> int:
        """Number of warps of a CTA."""
        return WARPS

    @property
    def group_rows(self) -> int:
        """Number of rows of a slot of the ring."""
        return GROUP_ROWS

    # ---- Shared memory

    @property
    def planes(self) -> int:
        """Number of planes that the kernel reads."""
        return 2 if self.backward else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a slot: its blocks of planes, and its matrices."""
        matrices = 1 + self.mixes if self.backward else 1
        return self.planes * BLOCK_KEYS * MAX_HEADS * 2 + matrices * MATRIX_BYTES

    @property
    def _depth(self) -> int:
        return min(_MAX_DEPTH, self.gpu.shared_of(self.ctas) // (GROUP_ROWS * self.row_bytes))

    @property
    def depth(self) -> int:
        """Number of slots of the ring."""
        return max(_MIN_DEPTH, self._depth)

    @cached_property
    def kernel(self) -> Kernel:
        arguments = tuple(self._argument(argument) for argument in self.triton.arguments)
        grid = (ceiling(KEYS / BLOCK_KEYS) * ceiling(COUNT / self.rows) * bundles(MAX_HEADS),)
        shared = self.depth * GROUP_ROWS * self.row_bytes
        registers = self.gpu.registers_of(WARPS * self.ctas)
        constants = (("BLOCK_N", BLOCK_KEYS), ("ROWS", self.rows))
        return Kernel(self.role, self.name, arguments, grid, 32 * WARPS, shared, registers, constants)

    def _argument(self, triton: Argument) -> Argument:
        """Return an argument of the Triton kernel in C. Results may overwrite inputs."""
        name = triton.name.removesuffix("_ptr")
        if name == triton.name:
            (number,) = numbers("int", name)
            return number
        if name in ("out", "dy"):
            (pointer,) = writes("Element" if self.backward or self.stage.final else "Score", name, restrict=False)
        elif name.endswith(("parts", "partial")):
            (pointer,) = writes("float", name)
        else:
            types = {"x": "Score", "matrices": "Score", "adjoints": "Element", "seqlens": "int"}
            (pointer,) = reads(types.get(name, "float"), name, restrict=name != "x")
        return pointer

    @property
    def first_row(self) -> str:
        """The row from which on rows see keys. Earlier rows of a mixing after the softmax are context."""
        return "skip" if self.stage.final else "0"

    @property
    def first_key(self) -> str:
        """The key of the sequence that is key 0 of planes."""
        return "sequence.key0" if self.decodes else "sequence.unseen"

    @property
    def legend(self) -> Iterator[str]:
        rank, width = self.stage.rank, self.stage.width
        yield f"A mixing {'after' if self.stage.final else 'before'} the softmax whose matrices depend on tokens."
        yield "Planes [slot, r, j] have slots of heads, rows r and keys j. For the heads of a group, with a matrix M of"
        yield "each row" + (f", and factors a_0 .. a_{width - 1} of each key:" if rank else ":")
        terms = "".join(f" + a_{rank + f} <a_{f}, x>" for f in range(rank)) + f" + a_{width - 1} x" * bool(rank)
        adjoint = "".join(f" + a_{f} <a_{rank + f}, dy>" for f in range(rank)) + f" + a_{width - 1} dy" * bool(rank)
        if self.mixes:
            yield f"out = {'' if self.stage.factor == 1 else f'{self.stage.factor} * '}(M x{terms}),"
        if self.backward:
            yield f"dx = M^T dy{adjoint}, which replaces dy, and the gradients of M and of the factors,"
        yield "where a product of vectors sums over heads."
        if self.stage.final:
            yield "Hidden results are zeros; so are those of rows before `skip`."
        if self.backward:
            yield "matrix_parts[block of keys, bundle, r] gets the block's part of the gradient of M. The sums over the"
            yield "CTA's rows of gradients of factors are added to key_partial[b, head, chunk of rows, key]."

    @property
    def summary(self) -> str:
        tile = f"{self.rows} rows and {BLOCK_KEYS} keys"
        return f"CUDA, {tile}, {WARPS} warps, rings of {self.depth} times {GROUP_ROWS} rows"
