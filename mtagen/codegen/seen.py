"""The bounds of what rows and keys see, as source of Triton kernels of the lowering "strip".

Each bound is clipped to one that the kernel has anyway. Where the mask sets no bound, that one is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..planner.geometry.affine import Size
from ..planner.geometry.mask import Mask
from .pieces import visible
from .printers import Source, triton_code


class ChunkLoop(NamedTuple):
    """The loop of a program over the tiles of its chunk of keys that some row sees, as text.

    Attributes:
        assignments: lines before it.
        segments: (begin, end, whether pairs are checked).
    """

    assignments: list[str]
    segments: list[tuple[str, str, bool]]

    @property
    def has_edges(self) -> bool:
        """Whether pairs of some tiles are checked."""
        return any(checked for *_, checked in self.segments)


@dataclass(frozen=True)
class Seen:
    """Bounds as text.

    Attributes:
        mask: what queries see.
    """

    mask: Mask

    def begin(self, position: str, least: str = "0", multiple: object = "") -> str:
        """Return the first key from ``least`` on that the query at a position sees, rounded down to a
        multiple.
        """
        first = self.mask.first_key(Source(position))
        rounded = f" // {multiple} * {multiple}" if multiple and first is not None else ""
        return _clipped("maximum", least, first) + rounded

    def end(self, position: str, most: str, more: int = 0) -> str:
        """Return the end of the keys before ``most`` that the query at a position sees, or
        ``more`` positions later.
        """
        last = self.mask.last_key(Source(position))
        return _clipped("minimum", most, None if last is None else last + 1 + more)

    def first_row(self, key: str, before: str, least: str, more: int = 0) -> str:
        """Return the first row from ``least`` on that sees a key, less ``more``.

        The position of a row is ``before`` more than its number.
        """
        first = self.mask.first_position(Source(key))
        return _clipped("maximum", least, None if first is None else first - Source(before) - more)

    def end_of_rows(self, key: str, before: str, most: str) -> str:
        """Return the end of the rows before ``most`` that see a key."""
        last = self.mask.last_position(Source(key))
        return _clipped("minimum", most, None if last is None else last - Source(before) + 1)

    def no_key(self, position: str) -> list[str]:
        """Return the condition that all keys are after those that a query sees, if that may be."""
        last = self.mask.last_key(Source(position))
        return [] if last is None else [f"{triton_code(last)} < 0"]

    def by_some(self, position: str, key: str, reach: str) -> str:
        """Return the condition that a query from a position to ``reach`` positions later sees a key."""
        return visible(self.mask, position, key, f"{position} + {reach}")

    def start_of_row(self, position: str) -> str:
        """Return the first key of a row that sees the keys before ``end``: 0 if it sees none."""
        return f"tl.where(end > 0, {self.begin(position)}, 0)" if self.mask.hides_earlier else "0"

    @property
    def _hides_first_keys(self) -> bool:
        """Whether a row's first key may come after the first key of its plane."""
        return self.mask.hides_earlier or self.mask.is_tabulated

    @property
    def hidden_blocks(self) -> list[tuple[str, str]]:
        """The begin and end of the blocks of keys that a row does not see, after ``end`` and before
        ``start``.
        """
        later = [("tl.cdiv(end, BLOCK_N) * BLOCK_N", "keys")]
        return later + [("0", "start // BLOCK_N * BLOCK_N")] * self._hides_first_keys

    def between(self, key: str, start: str, end: str) -> str:
        """Return the condition that a key is seen by a row that sees the keys start <= key < end."""
        between = f"({key} >= {start}) & ({key} < {end})" if self._hides_first_keys else f"{key} < {end}"
        return f"{between} & _meets(pairs, {key})" if self.mask.condition else between

    # ---- A chunk of keys, from chunk_begin to chunk_end, of which some row sees begin .. end.

    def chunk_loop(self) -> ChunkLoop:
        """Return the loop over the tiles that some row sees.

        With a left limit, or tables, all are checked: tiles of which no pair is hidden would take a third loop.
        """
        if self.mask.hides_earlier or self.mask.is_tabulated:
            return self.checked_loop()
        if not self.mask.hides_later:
            return self.unchecked_loop()
        seen_by_all = f"seen_by_all = {self.end('first + r0 + off', 'end')}"
        whole_end = "whole_end = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N"
        return ChunkLoop([seen_by_all, whole_end], [("begin", "whole_end", False), ("whole_end", "end", True)])

    def checked_loop(self) -> ChunkLoop:
        """Return the loop over these tiles if all pairs are checked."""
        return ChunkLoop([], [("begin", "end", True)])

    def unchecked_loop(self) -> ChunkLoop:
        """Return the loop over these tiles if no pair is checked."""
        return ChunkLoop([], [("begin", "end", False)])

    @property
    def hidden_tiles(self) -> list[tuple[str, str]]:
        """The begin and end of the chunk's other tiles, after those tiles and before them."""
        later = [("tl.maximum(tl.cdiv(end, BLOCK_N) * BLOCK_N, begin)", "chunk_end")]
        earlier = [("chunk_begin", "tl.minimum(begin, chunk_end)")]
        return later * self.mask.hides_later + earlier * self.mask.hides_earlier


def _clipped(extremum: str, limit: str, bound: Size | None) -> str:
    """Return the extremum of a bound, if there is one, and a limit."""
    return limit if bound is None else f"tl.{extremum}({triton_code(bound)}, {limit})"
