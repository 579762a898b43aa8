"""The contents of one Python module of the lowering "strip"."""

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
from .stages import PROBABILITY_SCALE, SCORE_SCALE, Convolution, Stages


@dataclass(frozen=True)
class StripModule:
    """The kernels and host functions of some passes of one plan.

    Attributes:
        passes: one or more passes of one spec and target.
    """

    passes: tuple[StripPass, ...]

    @classmethod
    def of(cls, passes: Iterable[StripPass]) -> StripModule:
        """Make the module of some passes."""
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
        """The stages that the kernels compute."""
        return Stages(self.spec)

    @cached_property
    def mask(self) -> Mask:
        """The mask."""
        return Mask.of(self.spec)

    def has(self, pass_name: str) -> bool:
        """Return whether the module computes a pass."""
        return any(plan.pass_name == pass_name for plan in self.passes)

    @property
    def fuses(self) -> bool:
        """Whether a fused kernel computes the forward pass, instead of strips."""
        return self.has("forward") and self["forward"].fused is not None

    @property
    def trains(self) -> bool:
        """Whether the module computes a pass of training by strips."""
        return self.has("backward") or (self.has("forward") and not self.fuses)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Role prefixes of the kernels that training and decode share."""
        forward = self.has("forward") and not self.fuses
        return (*([""] if forward else ()), *(["decode_"] if self.has("decode") else ()))

    @cached_property
    def cuda(self) -> Mapping[str, StripSource | TileForward]:
        """The CUDA kernels, by role."""
        return {role: source for plan in self.passes for role, source in plan.cuda.items()}

    @cached_property
    def _kernels(self) -> Mapping[str, Kernel]:
        return {kernel.role: kernel for plan in self.passes for kernel in plan.kernels}

    def kernel(self, role: str) -> Kernel:
        """Return the kernel of a role, which is the same in all passes that have it."""
        return self._kernels[role]

    def in_triton(self, role: str) -> bool:
        """Return whether the module has a Triton kernel of a role."""
        return role in self._kernels and role not in self.cuda

    def __getitem__(self, pass_name: str) -> StripPass:
        """Return the plan of a pass."""
        return next(plan for plan in self.passes if plan.pass_name == pass_name)

    @property
    def max_rows(self) -> int | None:
        """Upper limit of a strip's rows, context included, with a window on both sides; None
        otherwise.

        Longer strips would spend more of their area on hidden scores.
        """
        return WINDOW_ROWS if self.mask.hides_later and self.mask.hides_earlier else None

    @property
    def reach(self) -> int:
        """Number of keys past the last visible key whose scores a convolution needs."""
        return self.spec.cq - 1 if self.mask.zeroes_terms else 0

    def reach_of(self, stage: Convolution) -> int:
        """Return the number of rows after its own that may count a score in a convolution."""
        return stage.cq - 1 if self.mask.zeroes_terms else 0

    @property
    def sequence(self) -> str:
        """The template that says where rows and keys of training lie."""
        return "strip_packed.j2" if self.spec.packed else "strip_batch.j2"

    @property
    def host(self) -> str:
        """The template that says what host functions of training do with these rows."""
        return "strip_packed_host.j2" if self.spec.packed else "strip_batch_host.j2"

    @property
    def limits(self) -> Mapping[str, int | None]:
        """The fields of ``Limits`` (``templates/host/strips.py``).

        Packed documents are rows of one sequence there, whose context is whole tiles of places.
        """
        packed = self.spec.packed
        return {
            "context": self.context_places if packed else self.spec.context,
            "enough_rows": ENOUGH_ROWS,
            "min_rows": self.min_rows,
            "max_rows": self.max_rows,
            "row_multiple": TILE if packed else CONVOLUTION_ROWS,
            "left": self.mask.left,
            "right": self.mask.right,
            "key_multiple": KEY_MULTIPLE,
            "begin_multiple": self.begin_multiple,
            "pitch_multiple": self.pitch_multiple,
            "itemsize": self.plane_itemsize,
        }

    @property
    def cached_keys(self) -> str:
        """The argument of a decode step's kernels for the number of keys of the cache."""
        return "n_k" if self.mask.hides_earlier else "keys"

    @property
    def first_drawn_key(self) -> str:
        """The key of the sequence, for dropout's draws, that is key 0 of the planes; empty if they begin alike."""
        return "" if not self.mask.hides_earlier else "unseen" if self.spec.packed else "key0"

    @property
    def block_d(self) -> int:
        """Head dim, padded as on chip."""
        return block_dim(self.spec.head_dim)

    @property
    def block_dv(self) -> int:
        """Value head dim, padded as on chip."""
        return block_dim(self.spec.value_head_dim)

    @property
    def plane_itemsize(self) -> int:
        """Bytes of an element of a plane."""
        return self.spec.itemsize

    @property
    def pitch_multiple(self) -> int:
        """Divisor of the pitch of planes, whose rows hold whole tiles of keys."""
        return max(128, row_keys(self.stages.heads), row_keys(self.stages.post_heads))

    @property
    def split(self) -> int:
        """Default number of keys of a split in decode."""
        return SPLIT

    @property
    def begin_multiple(self) -> int:
        """Divisor of the first key of a strip, or of a document in it, with a window."""
        return begin_multiple(self.spec)

    @property
    def min_rows(self) -> int:
        """Lower limit of a strip's rows: whole tiles, of which at most half are context."""
        if self.spec.packed:
            return self.context_places + TILE
        return -(-2 * max(self.spec.context, 1) // CONVOLUTION_ROWS) * CONVOLUTION_ROWS

    @property
    def tile(self) -> int:
        """Places of a tile. Documents and strips of packed documents begin at multiples of it."""
        return TILE

    @property
    def record(self) -> tuple[str, ...]:
        """Fields of the record of each tile of places, which kernels read."""
        return RECORD

    @property
    def context_places(self) -> int:
        """Places of a strip of packed documents before those of its outputs."""
        return context_places(self.spec.context)

    @property
    def part(self) -> int:
        """Places of packed documents per partial sum of the gradient of a convolution's weight."""
        return PART

    @property
    def by_descriptor(self) -> bool:
        """Whether tensor descriptors load and store tiles."""
        return by_descriptor(self.spec, self.target)

    @property
    def programs(self) -> int:
        """Number of partial sums of a gradient of matrices, per bundle."""
        return PROGRAMS

    @property
    def gradient_chunk(self) -> int:
        """Keys per partial sum of the gradient of a convolution's weight."""
        sources = (source for source in self.cuda.values() if isinstance(source, PlaneKernel))
        return min((source.tile_keys for source in sources if source.part == "gradient"), default=GRADIENT_CHUNK)

    @property
    def score_scale(self) -> float:
        """Factor of scores in planes."""
        return SCORE_SCALE

    @property
    def probability_scale(self) -> float:
        """Factor of probabilities in planes."""
        return PROBABILITY_SCALE

    @property
    def legend(self) -> Iterator[str]:
        """Lines of the source's comment that explain its numbers."""
        if self.spec.packed:
            yield from self._legend_of_documents
            return
        yield f"Mask {self.mask.name}; query i sits at position i + off."
        yield "A strip has queries first .. first + count. The first `skip` rows are context. The first `valid`"
        yield "rows have scores without whole context. There are keys 0 .. keys, and `pitch` elements from row to row."
        if self.mask.hides_earlier:
            yield "The keys of a strip are those that its rows see; j, and with it `off`, counts from the first key."

    @property
    def _legend_of_documents(self) -> Iterator[str]:
        yield f"Mask {self.mask.name}. The rows of a document have consecutive places from a multiple of {TILE} on;"
        yield f"a tile of {TILE} places is in one document. A strip is `count` places from `place0` on. Outputs of the"
        yield "first `skip` places belong to another strip, and the first `valid` places have no scores. Row r of the"
        yield "strip is query first + r of its tile's document, at position first + r + off; the document's rows are"
        yield "top <= r < bottom. key0 is the first key that these rows see. j counts from key0, and there are `keys`"
        yield "keys, or none if the tile has no rows. `pitch` elements lead from row to row."
