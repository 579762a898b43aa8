"""What one module of the lowering "strip" holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...spec import Spec
from ..geometry.mask import Mask
from ..kernel import Kernel
from ..lift.tiling import block_dim
from ..names import suffix
from ..tile.forward import TileForward
from .documents import PART, RECORD, TILE, begin_multiple, context_places
from .kernels import CONVOLUTION_ROWS, GRADIENT_CHUNK, PROGRAMS, SPLIT, by_descriptor, row_keys
from .passes import ENOUGH_ROWS, KEY_MULTIPLE, WINDOW_ROWS, StripPass
from .planes import PlaneKernel
from .source import StripSource
from .stages import SCORE_SCALE, SHARE_SCALE, Stages


@dataclass(frozen=True)
class StripModule:
    """The kernels and host functions of some passes of one plan.

    Attributes:
        passes: one or more, of one spec and target.
    """

    passes: tuple[StripPass, ...]

    @classmethod
    def of(cls, passes: Iterable[StripPass]) -> StripModule:
        """The module of these passes."""
        return cls(tuple(passes))

    @property
    def spec(self) -> Spec:
        """The request."""
        return self.passes[0].spec

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.passes[0].target

    @property
    def name(self) -> str:
        """Name of the module."""
        return f"mta_strip_{suffix(self.spec, self.target)}"

    @cached_property
    def stages(self) -> Stages:
        """What the kernels are made for."""
        return Stages(self.spec)

    @cached_property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask.of(self.spec)

    def has(self, pass_name: str) -> bool:
        """Whether it computes a pass."""
        return any(one.pass_name == pass_name for one in self.passes)

    @property
    def fuses(self) -> bool:
        """Whether a fused kernel makes the forward pass, so that it has no strips."""
        return self.has("forward") and self["forward"].fused is not None

    @property
    def trains(self) -> bool:
        """Whether it computes passes of training by strips."""
        return self.has("backward") or (self.has("forward") and not self.fuses)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What roles of kernels begin with that passes of training and decode both have."""
        forward = self.has("forward") and not self.fuses
        return (*([""] if forward else ()), *(["decode_"] if self.has("decode") else ()))

    @cached_property
    def cuda(self) -> Mapping[str, StripSource | TileForward]:
        """The kernels that CUDA makes, by role."""
        return {role: source for one in self.passes for role, source in one.cuda.items()}

    @cached_property
    def _kernels(self) -> Mapping[str, Kernel]:
        return {kernel.role: kernel for one in self.passes for kernel in one.kernels}

    def kernel(self, role: str) -> Kernel:
        """A kernel; passes that share one agree on it."""
        return self._kernels[role]

    def __getitem__(self, pass_name: str) -> StripPass:
        """How it computes a pass."""
        return next(one for one in self.passes if one.pass_name == pass_name)

    @property
    def enough_rows(self) -> int:
        """Rows of outputs that a strip has of each sequence before it takes more sequences."""
        return ENOUGH_ROWS

    @property
    def most_rows(self) -> int | None:
        """Rows of a strip at most, context included, where a window bounds what they see. Of more, more is hidden."""
        return WINDOW_ROWS if self.mask.hides_later and self.mask.hides_earlier else None

    @property
    def reach(self) -> int:
        """Keys past the last that a query sees whose scores a convolution needs."""
        return self.spec.cq - 1 if self.mask.zeroes_terms else 0

    @property
    def block_d(self) -> int:
        """Head dim on chip."""
        return block_dim(self.spec.head_dim)

    @property
    def block_dv(self) -> int:
        """Value head dim on chip."""
        return block_dim(self.spec.value_head_dim)

    @property
    def plane_itemsize(self) -> int:
        """Bytes of an element of a plane."""
        return self.spec.itemsize

    @property
    def pitch_multiple(self) -> int:
        """Rows of planes hold whole tiles of keys."""
        return max(128, row_keys(self.stages.heads), row_keys(self.stages.post_heads))

    @property
    def split(self) -> int:
        """Keys of a split in decode, where none are asked for."""
        return SPLIT

    @property
    def row_multiple(self) -> int:
        """Rows of a strip, its context among them, are a multiple of this, but for the last one's."""
        return CONVOLUTION_ROWS

    @property
    def key_multiple(self) -> int:
        """Keys of a strip are a multiple of this, or all there are."""
        return KEY_MULTIPLE

    @property
    def begin_multiple(self) -> int:
        """In a window, the first key of a strip, or of a document in it, is a multiple of this."""
        return begin_multiple(self.spec)

    @property
    def fewest_rows(self) -> int:
        """The fewest rows of a strip: whole tiles, of which at most half are context."""
        if self.spec.packed:
            return self.context_places + TILE
        return -(-2 * max(self.spec.context, 1) // CONVOLUTION_ROWS) * CONVOLUTION_ROWS

    @property
    def tile(self) -> int:
        """Places of a tile: a document's begin with one, and so do strips of packed documents."""
        return TILE

    @property
    def record(self) -> tuple[str, ...]:
        """What kernels are told of each tile of places."""
        return RECORD

    @property
    def context_places(self) -> int:
        """Places of a strip before those of its outputs, of packed documents."""
        return context_places(self.spec.context)

    @property
    def part(self) -> int:
        """Places of a partial sum of the gradient of a convolution's weight, of packed documents."""
        return PART

    @property
    def by_descriptor(self) -> bool:
        """Whether tensor descriptors load and store tiles."""
        return by_descriptor(self.spec, self.target)

    @property
    def programs(self) -> int:
        """Partial sums of a gradient of matrices, of each bundle."""
        return PROGRAMS

    @property
    def gradient_chunk(self) -> int:
        """Keys of a partial sum of the gradient of a convolution's weight."""
        sources = (one for one in self.cuda.values() if isinstance(one, PlaneKernel) and one.part == "gradient")
        return min((one.tile_keys for one in sources), default=GRADIENT_CHUNK)

    @property
    def score_scale(self) -> float:
        """What planes hold of a scaled score."""
        return SCORE_SCALE

    @property
    def share_scale(self) -> float:
        """What planes hold of a probability."""
        return SHARE_SCALE

    @property
    def legend(self) -> Iterator[str]:
        """What the numbers of the source mean."""
        if self.spec.packed:
            yield from self._legend_of_documents
            return
        yield f"Mask {self.mask.name}; query i sits at position i + off."
        yield "In a strip: rows first .. first + count of queries, of which the first `skip` are context and the first"
        yield "`valid` have scores that lack context of their own; keys 0 .. keys; `pitch` elements from row to row."
        if self.mask.hides_earlier:
            yield "Its keys are those that its rows see; j, and with it `off`, counts from the first of them."

    @property
    def _legend_of_documents(self) -> Iterator[str]:
        yield f"Mask {self.mask.name}. The rows of a document have places, one after the other, from a multiple of"
        yield f"{TILE} on: a tile of {TILE} places belongs to one document. A strip is `count` places from `place0` on,"
        yield "of whose outputs those of the first `skip` are another strip's, and the first `valid` have no scores."
        yield "Of a tile's document, row r of the strip is query first + r, at position first + r + off, and"
        yield "top <= r < bottom are its rows. key0 is the first of the keys that these see; j counts from it, and"
        yield "there are `keys` of them, or none if the tile has no rows. It is `pitch` elements from row to row."
