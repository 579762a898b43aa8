"""How many parts split decoding makes of the keys."""

from __future__ import annotations

from dataclasses import dataclass

_MIN_TILES = 4  # a split shorter than this spends its time on starting
_MAX_WAVES = 4


@dataclass(frozen=True)
class SplitRule:
    """What the number of splits is chosen with at run time.

    Attributes:
        slots: CTAs the target holds at once.
        min_keys: keys of a split, at least.
        max_waves: rounds of ``slots`` CTAs, at most, that splitting may make.
    """

    slots: int
    min_keys: int
    max_waves: int = _MAX_WAVES

    def splits(self, owners: int, keys: int) -> int:
        """Splits that fill 1, 2, ... waves of the slots: the fewest that keep nearly as many busy as any of them."""
        waves = range(1, self.max_waves + 1)
        splits = [max(1, min(wave * self.slots // owners, keys // self.min_keys)) for wave in waves]
        busy = [owners * count / (-(-owners * count // self.slots) * self.slots) for count in splits]
        return next(count for count, share in zip(splits, busy, strict=True) if share >= 0.9 * max(busy))


def split_rule(resident: int, block_n: int, multiprocessors: int) -> SplitRule:
    """The rule for a kernel of which a multiprocessor holds ``resident`` CTAs."""
    return SplitRule(resident * multiprocessors, _MIN_TILES * block_n)
