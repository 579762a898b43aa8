"""What is measured: the cases of each suite, as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..errors import InputError, explain
from ..spec import Spec

TRAINING = ("forward", "backward", "forward+backward")
PAPER = (6, 11)  # the kernel of the paper
KERNELS = ((1, 1), (3, 3), (2, 9), PAPER, (7, 7), (11, 11))
HEAD_DIMS = (64, 128)
PATIENCE = 1.0  # seconds of a call, beyond which larger cases are left out
MAX_MATERIALISED = 8192  # keys, beyond which whole scores are kept only on request
SUITES = ("quick", "full", "decode", "memory", "overhead")


@dataclass(frozen=True)
class Case:
    """One pass of one operator at one size.

    Attributes:
        kernel: ``(cq, ck)``.
        head_dim: of queries, keys and values.
        causal: whether later keys are hidden.
        dtype: of q, k and v, as in :class:`mtagen.Spec`.
        batch: sequences.
        heads: of queries.
        kv_heads: of keys and values.
        nq: rows; for decode the new tokens.
        nk: keys; for decode the length of the cache.
        pass_name: one of ``TRAINING``, or ``decode``.
    """

    kernel: tuple[int, int]
    head_dim: int
    causal: bool
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    nq: int
    nk: int
    pass_name: str

    @property
    def spec(self) -> Spec:
        """What an op for this case is built for."""
        return Spec(self.kernel, self.head_dim, causal=self.causal, dtype=self.dtype)

    @property
    def decodes(self) -> bool:
        """Whether the pass is decode."""
        return self.pass_name == "decode"

    @property
    def problem(self) -> Case:
        """What passes at the same sizes have in common."""
        return self if self.decodes else replace(self, pass_name="forward")

    @property
    def seen_scores(self) -> int:
        """(row, key) pairs over all heads and sequences whose key the row sees."""
        if not self.causal:
            return self.batch * self.heads * self.nq * self.nk
        rows = min(self.nq, self.nk)  # earlier rows see no key
        return self.batch * self.heads * (rows * (self.nk - rows) + rows * (rows + 1) // 2)

    @property
    def score_bytes(self) -> int:
        """Size of one materialised tensor of scores."""
        return self.batch * self.heads * self.nq * self.nk * self.spec.itemsize

    @property
    def row_bytes(self) -> int:
        """Size of q, of out, or of a gradient of either."""
        return self.batch * self.heads * self.nq * self.head_dim * self.spec.itemsize

    @property
    def cache_bytes(self) -> int:
        """Size of k and v together, or of both gradients."""
        return 2 * self.batch * self.kv_heads * self.nk * self.head_dim * self.spec.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The fields of a result's row that tell which case it is of."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "pass_name"}
        return fields | {"kernel": list(self.kernel), "pass": self.pass_name}


@dataclass(frozen=True)
class Scale:
    """The sizes that suit a kind of device.

    Attributes:
        dtype: of q, k and v.
        heads: of queries, and of keys where they are not grouped.
        tokens: sequences are batched up to so many tokens.
        quick, full, decode, memory, overhead: lengths of the suite of that name.
        quick_decode: length of the cache in the suite ``quick``.
        decode_batch: sequences of a decode step while their caches have at most 32768 tokens each, else 1.
    """

    dtype: str
    heads: int
    tokens: int
    quick: tuple[int, ...]
    full: tuple[int, ...]
    decode: tuple[int, ...]
    memory: tuple[int, ...]
    overhead: tuple[int, ...]
    quick_decode: int
    decode_batch: int


SCALES = {
    "cuda": Scale(
        dtype="bf16",
        heads=16,
        tokens=8192,
        quick=(2048, 8192),
        full=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        decode=(4096, 16384, 32768, 65536, 131072, 262144),
        memory=(8192, 16384, 32768, 65536),
        overhead=(512, 1024, 2048),
        quick_decode=32768,
        decode_batch=8,
    ),
    "cpu": Scale(
        dtype="fp32",
        heads=8,
        tokens=1,
        quick=(256, 512),
        full=(256, 512, 1024, 2048),
        decode=(4096, 16384),
        memory=(),
        overhead=(),
        quick_decode=4096,
        decode_batch=1,
    ),
}


def suite(
    name: str,
    device: str,
    kernels: Sequence[tuple[int, int]] = (),
    head_dims: Sequence[int] = (),
    lengths: Sequence[int] = (),
) -> list[Case]:
    """The cases of a suite, those of equal sizes together: the time of SDPA, which all kernels share, is taken nearby.

    Args:
        name: one of ``SUITES``.
        device: ``cuda`` or ``cpu``, whose :class:`Scale` gives lengths, batch, heads and dtype.
        kernels: instead of the suite's own.
        head_dims: instead of the suite's own.
        lengths: of sequences and, for decode, of caches, instead of the suite's own.

    Raises:
        InputError: no such suite, it is not for this device, or a length is not positive.
        SpecError: a kernel or head dim is not legal.
    """
    if name not in SUITES:
        raise InputError(explain("suite", name, "is not known", SUITES))
    scale = SCALES[device]
    if name in ("memory", "overhead") and device == "cpu":
        legal = [other for other in SUITES if other not in ("memory", "overhead")]
        raise InputError(explain("suite", name, "measures what only a GPU has", f"a GPU, or on the CPU {legal}"))
    for length in lengths:
        if length < 1:
            raise InputError(explain("length", length, "must be positive", ">= 1"))
    cases = list(dict.fromkeys(_cases(name, scale, kernels, head_dims or HEAD_DIMS, lengths)))
    for case in cases:
        _ = case.spec  # which checks kernel and head dim
    return cases


def _cases(
    name: str,
    scale: Scale,
    kernels: Sequence[tuple[int, int]],
    head_dims: Sequence[int],
    lengths: Sequence[int],
) -> Iterator[Case]:
    def training(kernel: tuple[int, int], head_dim: int, n: int, causal: bool = True, batch: int = 0) -> Case:
        batch = batch or max(1, scale.tokens // n)
        return Case(kernel, head_dim, causal, scale.dtype, batch, scale.heads, scale.heads, n, n, "forward")

    def decode(kernel: tuple[int, int], head_dim: int, n: int, new: int = 1, kv_heads: int = scale.heads) -> Case:
        batch = scale.decode_batch if n <= 32768 else 1
        return Case(kernel, head_dim, True, scale.dtype, batch, scale.heads, kv_heads, new, n, "decode")

    def passes(case: Case) -> Iterator[Case]:
        return (replace(case, pass_name=name) for name in TRAINING)

    paper = kernels or (PAPER,)
    if name == "quick":
        for d, n, kernel in product(head_dims, lengths or scale.quick, paper):
            yield from passes(training(kernel, d, n))
        for d, n, kernel in product(head_dims, lengths or (scale.quick_decode,), paper):
            yield decode(kernel, d, n)
    elif name == "full":
        for d, causal, n, kernel in product(head_dims, (True, False), lengths or scale.full, kernels or KERNELS):
            yield from passes(training(kernel, d, n, causal))
        for n in (4096, 8192):
            if 128 in head_dims and n in (lengths or scale.full) and PAPER in paper:
                yield from passes(training(PAPER, 128, n, batch=4))
    elif name == "decode":
        for d, n, kernel in product(head_dims, lengths or scale.decode, paper):
            yield decode(kernel, d, n)
            if n == 32768:
                yield decode(kernel, d, n, kv_heads=scale.heads // 4)
                yield decode(kernel, d, n, new=4)
    elif name == "memory":
        for d, n, kernel in product(head_dims, lengths or scale.memory, paper):
            yield replace(training(kernel, d, n), pass_name="forward+backward")
    else:  # overhead
        for d, n, kernel in product(head_dims, lengths or scale.overhead, kernels or (PAPER, (1, 1))):
            yield training(kernel, d, n, batch=8)
