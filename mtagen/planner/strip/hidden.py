"""The hidden keys of planes that kernels read.

A kernel that writes a plane clears these keys, and leaves other hidden keys as they are.

A plane has room for each key of a strip, but many rows see only some of them. CUDA's kernels of rows mask the keys that
they read. Its convolutions and products read tiles, in which hidden keys must be zeros, and leave out tiles that no row
sees. cuBLAS reads all keys. So do some of Triton's kernels; others mask, but all count as if they read all keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_

from .stages import Stages


@dataclass(frozen=True)
class HiddenKeys:
    """Hidden keys of a plane that kernels read.

    Attributes:
        tile: rows, and keys, of tiles that kernels read if some row of a tile sees one of its keys, or if a row behind
            the strip's last one would see it: a power of two; 0 if kernels read no hidden keys.
        rows_around, keys_around: rows and keys on each side of such a tile that they also read.
        all: whether kernels read all keys.
    """

    tile: int = 0
    rows_around: int = 0
    keys_around: int = 0
    all: bool = False

    @property
    def exist(self) -> bool:
        """Whether kernels read any."""
        return self.all or self.tile > 0

    @property
    def zeros(self) -> tuple[str, ...]:
        """The results that are zeros, for comments of a kernel that clears these keys."""
        return ("hidden results" if self.all else "hidden results that other kernels read",) if self.exist else ()

    def of_rows(self, r: str, rows: str, position: str, keys: str) -> str:
        """Return source for the keys that kernels read of ``rows`` rows from row ``r`` on, among the first ``keys``.

        ``position`` is that of row 0.
        """
        if self.all:
            return f"VisibleKeys{{0, {keys}}}"
        around = f"{self.rows_around}, {self.keys_around}"
        return f"VisibleKeys::read<{self.tile}, {around}>({r}, {rows}, {position}, {keys})"

    def __or__(self, other: HiddenKeys) -> HiddenKeys:
        """Return the hidden keys that this or another kernel reads."""
        return HiddenKeys(
            max(self.tile, other.tile),
            max(self.rows_around, other.rows_around),
            max(self.keys_around, other.keys_around),
            self.all or other.all,
        )


NONE, ALL = HiddenKeys(), HiddenKeys(all=True)


def readers(role: str, stages: Stages) -> tuple[tuple[str, ...], ...]:
    """Return, for each plane that the kernel of ``role`` writes, the roles of the kernels of training that read it.

    Planes are in the order in which the kernel's template clears them, shares or gradients of scores first. Readers are
    those of both passes. Products of planes with rows have roles of their own, whether one kernel makes several or
    cuBLAS makes each.
    """
    convolution, post_convolution = stages.convolution, stages.post_convolution
    shares, gradients = ("outputs", "grad_values"), ("grad_queries", "grad_keys")
    of_scores = (*gradients, *(("scores_backward",) if stages.has_scores_backward else ()))
    of_convolved = convolution.gradient_roles if convolution else of_scores
    probabilities = ("probabilities",) if stages.post_is_separate else ()
    # A mixing by tokens replaces visible gradients only, so its readers read hidden ones of the softmax.
    of_mixed = ("mix_backward", *of_convolved) if stages.token_mix else of_convolved
    rows = ("mix", "mix_backward") if stages.token_mix else ("softmax", *probabilities, "softmax_backward")
    unmixed = ("post_mix", "post_mix_backward") if stages.separate_post_mix else shares
    of_unmixed = post_convolution.gradient_roles if post_convolution else ("softmax_backward",)
    written: Mapping[str, tuple[tuple[str, ...], ...]] = {
        "scores": (convolution.roles if convolution else rows,),
        "convolution": (rows,),
        **dict.fromkeys(("softmax", "probabilities"), (post_convolution.roles if post_convolution else unmixed,)),
        "post_convolution": (unmixed,),
        "post_mix": (shares,),
        "grad_shares": (("post_mix_backward",) if stages.separate_post_mix else of_unmixed,),
        "post_mix_backward": (shares, of_unmixed),
        "post_convolution_adjoint": (("softmax_backward",),),
        "softmax_backward": (of_mixed, shares),
        "convolution_adjoint": (of_scores,),
        "grad_scores": (gradients, shares),
    }
    return written.get(role, ())


def hidden_keys(role: str, stages: Stages, reads: Mapping[str, HiddenKeys]) -> tuple[HiddenKeys, ...]:
    """Return the hidden keys that are read of each plane which the kernel of ``role`` writes.

    ``reads`` has what kernels read; kernels that it lacks read all keys.
    """
    planes = readers(role, stages)
    return tuple(reduce(or_, (reads.get(reader, ALL) for reader in plane)) for plane in planes)
