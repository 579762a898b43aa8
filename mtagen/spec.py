"""What the user asked for: a frozen, validated value. Knows nothing of torch, planning or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import SpecError, check_choice, explain

MAX_KERNEL = 64  # per axis; the lifted kernels have their own, tighter limit on min(cq, ck)
HEAD_DIMS = range(16, 257, 8)
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}  # name -> bytes per element
KEY_PADDINGS = ("both", "left", "right")
MASKS = ("source", "output")
MAX_NEW_TOKENS = 8  # queries of one decode step


@dataclass(frozen=True)
class Spec:
    """One conv-attention operator: softmax(conv2d(mask0(scale * q k^T), W) masked) v.

    Args:
        kernel: ``(cq, ck)``, extent of the convolution over queries and over keys.
        head_dim: size D of a query or key vector, 16..256 in multiples of 8.
        value_head_dim: size DV of a value vector; ``None`` means ``head_dim``.
        causal: query i (aligned to the end of the keys) sees keys ``j <= i + Nk - Nq`` only.
        key_padding: where the key axis is padded: ``both`` (pL = (ck-1)//2), ``left`` (pL = ck-1), ``right`` (pL = 0).
        mask: which scores the causal rule zeroes before the convolution: ``source`` (terms with j' > i' + off, as in
            the MTA authors' code) or ``output`` (terms with j' > i + off, as in the paper's formula).
        dtype: element type of q, k, v and out: ``bf16``, ``fp16``, ``fp32`` (and ``fp64`` for the torch backend).

    Raises:
        SpecError: a field is out of range.
    """

    kernel: tuple[int, int]
    head_dim: int
    value_head_dim: int = None  # type: ignore[assignment]  # filled in from head_dim
    causal: bool = True
    key_padding: str = "both"
    mask: str = "source"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        kernel = self.kernel
        if not (isinstance(kernel, (tuple, list)) and len(kernel) == 2 and all(_is_int(c) for c in kernel)):
            raise SpecError(explain("kernel", kernel, "must be a pair of ints (cq, ck)", f"1..{MAX_KERNEL} each"))
        object.__setattr__(self, "kernel", (int(kernel[0]), int(kernel[1])))
        if not all(1 <= c <= MAX_KERNEL for c in self.kernel):
            raise SpecError(explain("kernel", kernel, "cq and ck are out of range", f"1..{MAX_KERNEL} each"))
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for name in ("head_dim", "value_head_dim"):
            value = getattr(self, name)
            if not _is_int(value) or value not in HEAD_DIMS:
                raise SpecError(explain(name, value, "is not supported", "multiples of 8 from 16 to 256"))
        if not isinstance(self.causal, bool):
            raise SpecError(explain("causal", self.causal, "must be a bool", (True, False)))
        for name, legal in (("key_padding", KEY_PADDINGS), ("mask", MASKS), ("dtype", tuple(DTYPES))):
            check_choice(name, getattr(self, name), legal)

    @property
    def cq(self) -> int:
        """Kernel extent over queries; row W[cq-1] multiplies the current query."""
        return self.kernel[0]

    @property
    def ck(self) -> int:
        """Kernel extent over keys; column W[:, pad_left] multiplies the current key."""
        return self.kernel[1]

    @property
    def pad_left(self) -> int:
        """pL: keys to the left of j that enter C[i, j]."""
        return {"both": (self.ck - 1) // 2, "left": self.ck - 1, "right": 0}[self.key_padding]

    @property
    def pad_right(self) -> int:
        """pR = ck - 1 - pL: keys to the right of j that enter C[i, j]."""
        return self.ck - 1 - self.pad_left

    @property
    def masks_by_output(self) -> bool:
        """Whether a score counts for some rows of outputs and not for others: with one row both masks agree."""
        return self.causal and self.mask == "output" and self.cq > 1

    @property
    def itemsize(self) -> int:
        """Bytes per element of q, k, v and out."""
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; ``Spec.from_dict`` inverts it."""
        return asdict(self) | {"kernel": list(self.kernel)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Spec:
        """Inverse of :meth:`to_dict`."""
        return cls(**{**fields, "kernel": tuple(fields["kernel"])})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
