"""The references that the fused forward pass subtracts from exponents of a row."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import Spec
from ..cuda.score import score_function


class References(NamedTuple):
    """How far a row's reference may be from the row's running maximum, in units of log2.

    Attributes:
        below: how far the reference may be below the sum of a thread's probabilities in a tile. If
            it is further below, the tile is convolved again, and the row gets a new reference.
        above: how far a new reference is above the maximum.
    """

    below: int
    above: int

    @property
    def growth(self) -> int:
        """By how much a row's maximum may grow until the row should get a new reference.

        It leaves room for scores that grow, and for a thread's sum of probabilities.
        """
        return (self.below + self.above) * 5 // 6

    @property
    def most_tiles(self) -> int:
        """After how many tiles at most a row should get a new reference where logits grow along the keys.

        Kernels add the growth of a tile to the shifts of exponents, instead of computing them again. In
        units of log2 they are below 2^8 unless scores are larger, so that each addition errs by 2^-17
        at most, and 32 additions by 2^-12.
        """
        return 32

    @property
    def rescalings(self) -> int:
        """How many equal factors bring earlier sums to a new reference.

        The whole factor is 2^-(below + above) or less. The smallest normal number is 2^-126, and the
        GPU makes smaller powers of two 0. Earlier keys count even if the new maximum is 2^20 times as
        large as theirs, because there may be many.
        """
        return 1 if self.below + self.above + 20 <= 126 else 2

    @property
    def reason(self) -> str:
        """Why probabilities of this size fit, for the kernel's comment."""
        if self.below > 15:
            return "P is bf16, which has the range of fp32."
        return "So P also fits fp16, whose largest number is 65504."

    @classmethod
    def of(cls, spec: Spec) -> References:
        """Return the distances for a request.

        A bias of places, such as ALiBi, may grow along the keys by more than 2^14 in every tile. A
        larger distance then saves most of the second convolutions. Probabilities in bf16 have the
        range of fp32, so they can be from 2^-100 to 2^80: with a new reference, probabilities down to
        2^-26 of the largest are not 0, and sums of products with values up to 2^39 are finite. The
        largest fp16 is 65504.
        """
        if spec.dtype == "bf16" and score_function(spec).reads_places:
            return cls(80, 100)
        return cls(14, 0)
