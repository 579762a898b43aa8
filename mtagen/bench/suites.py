"""What is measured: the cases of each suite. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ..errors import InputError, explain
from ..measure.cases import CACHE_LENGTH, PAPER, SCALES, TRAINING_PASSES, Case, Scale, Sizes
from ..spec import Spec

KERNELS = ((1, 1), (3, 3), (2, 9), PAPER, (7, 7), (11, 11))
HEAD_DIMS = (64, 128)
PATIENCE = 1.0  # seconds of a call, beyond which larger cases are left out
MAX_MATERIALISED = 8192  # keys, beyond which whole scores are kept only on request
SUITES = ("quick", "full", "decode", "memory", "overhead", "layers")

_LARGE_BATCH_LENGTHS = (4096, 8192)  # measured at a batch of 4 besides
# Of the sequences, in the suite "decode" of the caches; the suite "quick" has caches besides.
_LENGTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "quick": (2048, 8192),
        "full": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        "decode": (4096, 16384, 32768, 65536, 131072, 262144),
        "memory": (8192, 16384, 32768, 65536),
        "overhead": (512, 1024, 2048),
        "layers": (2048, 8192),
    },
    "cpu": {
        "quick": (256, 512),
        "full": (256, 512, 1024, 2048),
        "decode": (4096, 16384),
        "layers": (256, 512),
    },
}
_QUICK_CACHES = {"cuda": CACHE_LENGTH, "cpu": 4096}


def suite(
    name: str,
    device: str,
    kernels: Sequence[tuple[int, int] | None] = (),
    head_dims: Sequence[int] = (),
    lengths: Sequence[int] = (),
) -> list[Case]:
    """The cases of a suite, those of equal sizes together: the time of SDPA, which all kernels share, is taken nearby.

    Args:
        name: one of ``SUITES``.
        device: ``cuda`` or ``cpu``, which decides on lengths, batch, heads and dtype.
        kernels: instead of the suite's own.
        head_dims: instead of the suite's own.
        lengths: of sequences and, for decode, of caches, instead of the suite's own.

    Raises:
        InputError: no such suite, it is not for this device, or a length is not positive.
        SpecError: a kernel or head dim is not legal.
    """
    if name not in SUITES:
        raise InputError(explain("suite", name, "is not known", SUITES))
    if name not in _LENGTHS[device]:
        legal = f"a GPU, or on the CPU {list(_LENGTHS[device])}"
        raise InputError(explain("suite", name, "measures what only a GPU has", legal))
    for length in lengths:
        if length < 1:
            raise InputError(explain("length", length, "must be positive", ">= 1"))
    caches = lengths or (_QUICK_CACHES[device],)
    scale, head_dims, lengths = SCALES[device], head_dims or HEAD_DIMS, lengths or _LENGTHS[device][name]
    paper = kernels or (PAPER,)
    if name == "quick":
        found = [
            *_training(scale, head_dims, lengths, paper),
            *_decode(scale, head_dims, caches, paper, every_step=False),
        ]
    elif name == "full":
        found = [*_full(scale, head_dims, lengths, kernels or KERNELS)]
    elif name == "decode":
        found = [*_decode(scale, head_dims, lengths, paper, every_step=True)]
    elif name == "memory":
        steps = _training(scale, head_dims, lengths, paper)
        found = [case for case in steps if case.pass_name == "forward+backward"]
    elif name == "layers":
        found = [*_layers(scale, head_dims, lengths)]
    else:  # overhead
        calls = _training(scale, head_dims, lengths, kernels or (PAPER, (1, 1)), batch=8)
        found = [case for case in calls if case.pass_name == "forward"]
    return list(dict.fromkeys(found))


def _training(
    scale: Scale,
    head_dims: Sequence[int],
    lengths: Sequence[int],
    kernels: Sequence[tuple[int, int] | None],
    *,
    causal: bool = True,
    batch: int | None = None,
) -> Iterator[Case]:
    """The passes of training."""
    for head_dim, n, kernel in product(head_dims, lengths, kernels):
        spec = Spec(kernel, head_dim, causal=causal, dtype=scale.dtype)
        for name in TRAINING_PASSES:
            yield Case(spec, scale.training(n, batch), name)


def _full(
    scale: Scale, head_dims: Sequence[int], lengths: Sequence[int], kernels: Sequence[tuple[int, int] | None]
) -> Iterator[Case]:
    for head_dim, causal in product(head_dims, (True, False)):
        yield from _training(scale, [head_dim], lengths, kernels, causal=causal)
    if 128 in head_dims and PAPER in kernels:
        yield from _training(scale, [128], [n for n in _LARGE_BATCH_LENGTHS if n in lengths], [PAPER], batch=4)


def _layers(scale: Scale, head_dims: Sequence[int], lengths: Sequence[int]) -> Iterator[Case]:
    """The layers of the paper's models, and decode of them: heads mixed in every layer, with convolutions in some.

    The last is its best small model's: a convolution before the softmax, and pairs of heads mixed after it.
    """
    every = scale.heads
    layers = (
        {"kernel": None, "mixed_heads": every, "post_mixed_heads": every},
        {"kernel": PAPER, "mixed_heads": every, "post_kernel": PAPER, "post_mixed_heads": every},
        {"kernel": PAPER, "post_mixed_heads": 2},
    )
    for head_dim, n, stages in product(head_dims, lengths, layers):
        spec = Spec(head_dim=head_dim, dtype=scale.dtype, **stages)  # type: ignore[arg-type]
        yield from (Case(spec, scale.training(n), name) for name in TRAINING_PASSES)
        if n == max(lengths):
            yield Case(spec, scale.decode(CACHE_LENGTH), "decode")


def _decode(
    scale: Scale,
    head_dims: Sequence[int],
    lengths: Sequence[int],
    kernels: Sequence[tuple[int, int] | None],
    *,
    every_step: bool,
) -> Iterator[Case]:
    """Steps of one new token; at one length, if asked, all ways in which decode is called."""
    for head_dim, n, kernel in product(head_dims, lengths, kernels):
        spec = Spec(kernel, head_dim, dtype=scale.dtype)
        every = every_step and n == CACHE_LENGTH
        sizes: Sequence[Sizes] = scale.decode_steps(n) if every else [scale.decode(n)]
        yield from (Case(spec, one, "decode") for one in sizes)
