"""The cases of each suite. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..errors import InputError, explain
from ..measure.cases import CACHE_LENGTH, DOCUMENTS, LENGTH, PAPER, SCALES, TRAINING_PASSES, Case, Scale, Sizes
from ..spec import DType, Spec
from .expressions import expressions

KERNELS = ((1, 1), (3, 3), (2, 9), PAPER, (7, 7), (11, 11))
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 64, 256)
PATIENCE = 1.0  # seconds of a call, beyond which larger cases are left out
MAX_MATERIALISED = 8192  # keys, beyond which whole scores are kept only on request
SUITES = ("quick", "full", "decode", "memory", "overhead", "layers", "data", "single", "short", "scores", "serving")

# Head dim, rows and batch of what the suite "full" has besides; the last is as the paper's 300M model trains.
_LARGER_BATCHES = {"cuda": ((128, 4096, 4), (128, 8192, 4), (64, 2048, 8)), "cpu": ()}
# Heads and head dims of the paper's models of 550M and 830M parameters; those of 300M and 1B have 16 of 64 and of 128.
_OTHER_MODELS = ((10, 128), (16, 96))
# Of the sequences, in the suite "decode" of the caches; the suite "quick" has caches besides.
_LENGTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "quick": (2048, 8192),
        "full": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        "decode": (4096, 16384, 32768, 65536, 131072, 262144),
        "memory": (8192, 16384, 32768, 65536),
        "overhead": (512, 1024, 2048),
        "layers": (2048, 8192),
        "data": (8192, 32768),
        "single": (1024, 2048, 4096, 8192),
        "short": (256, 512, 1024, 2048),
        "scores": (LENGTH,),
        "serving": (CACHE_LENGTH,),
    },
    "cpu": {
        "quick": (256, 512),
        "full": (256, 512, 1024, 2048),
        "decode": (4096, 16384),
        "layers": (256, 512),
        "data": (256, 512),
        "scores": (512,),
        "serving": (4096,),
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
    """Return the cases of a suite. Equal sizes follow each other, as all kernels share one
    measurement of SDPA.

    Args:
        name: one of ``SUITES``.
        device: ``cuda`` or ``cpu``, which decides on lengths, batch, heads and dtype.
        kernels: filter extents; default: the suite's.
        head_dims: head dims; default: the suite's.
        lengths: lengths of sequences and, for decode, of caches; default: the suite's.

    Raises:
        InputError: no such suite, it is not for this device, or a length is not positive.
        SpecError: a kernel or head dim is not legal.
    """
    if name not in SUITES:
        raise InputError(explain("suite", name, "is not the name of a suite", SUITES))
    if name not in _LENGTHS[device]:
        legal = f"a GPU, or on the CPU {list(_LENGTHS[device])}"
        raise InputError(explain("suite", name, "can be measured on a GPU only", legal))
    for length in lengths:
        if length < 1:
            raise InputError(explain("length", length, "must be positive", ">= 1"))
    caches = lengths or (_QUICK_CACHES[device],)
    others = () if head_dims else _OTHER_MODELS
    own = (
        HEAD_DIMS[:1] if (name, device) == ("quick", "cpu") else HEAD_DIMS
    )  # which two cores measure in a minute or two
    scale, head_dims, lengths = SCALES[device], head_dims or own, lengths or _LENGTHS[device][name]
    paper = kernels or (PAPER,)
    if name == "quick":
        found = [
            *_training(scale, head_dims, lengths, paper),
            *_decode(scale, head_dims, caches, paper, every_step=False),
        ]
    elif name == "full":
        found = [*_full(scale, head_dims, lengths, kernels or KERNELS, _LARGER_BATCHES[device])]
    elif name == "decode":
        found = [*_decode(scale, head_dims, lengths, paper, every_step=True)]
    elif name == "memory":
        steps = _training(scale, head_dims, lengths, paper)
        found = [case for case in steps if case.pass_name == "forward+backward"]
    elif name == "layers":
        found = [*_layers(scale, head_dims, lengths, others)]
    elif name == "data":
        found = [*_data(scale, head_dims, lengths)]
    elif name == "short":  # one sequence, whose kernels may take less time than the CPU does for a call
        found = [*_short(scale, head_dims, lengths, paper)]
    elif name == "scores":
        found = [*_scores(scale, head_dims, lengths, kernels or (PAPER, None))]
    elif name == "serving":
        found = [*_serving(scale, head_dims, lengths, kernels or (PAPER, None))]
    elif name == "single":  # one head of one sequence, whose keys CUDA's forward pass splits
        found = [*_training(replace(scale, heads=1), head_dims, lengths, paper, batch=1)]
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
    """Yield the training cases."""
    for head_dim, n in product(head_dims, lengths):
        specs = [Spec(kernel, head_dim, causal=causal, dtype=scale.dtype) for kernel in kernels]
        yield from _passes(specs, scale.training(n, batch))


def _full(
    scale: Scale,
    head_dims: Sequence[int],
    lengths: Sequence[int],
    kernels: Sequence[tuple[int, int] | None],
    larger_batches: Sequence[tuple[int, int, int]],
) -> Iterator[Case]:
    for head_dim, causal in product(head_dims, (True, False)):
        yield from _training(scale, [head_dim], lengths, kernels, causal=causal)
    for head_dim, n, batch in larger_batches:
        if PAPER in kernels and head_dim in head_dims and n in lengths:
            yield from _training(scale, [head_dim], [n], [PAPER], batch=batch)


def _layers(
    scale: Scale, head_dims: Sequence[int], lengths: Sequence[int], others: Sequence[tuple[int, int]]
) -> Iterator[Case]:
    """The layers of the paper's models, decode of them, and one sequence whose heads are mixed before the softmax only.

    That sequence is in fp16 where the models are in bf16. It and the models ``others``, pairs of heads and head dim,
    have the first length only.
    """
    heads, first = scale.heads, lengths[0]
    for head_dim, n in product(head_dims, lengths):
        yield from _passes(_layer_specs(heads, head_dim, scale.dtype), scale.training(n))
    for of_model, head_dim in others:
        sizes = scale.training(first)._replace(heads=of_model, kv_heads=of_model)
        yield from _passes(_layer_specs(of_model, head_dim, scale.dtype), sizes)
    for head_dim in head_dims:
        for spec in _layer_specs(heads, head_dim, scale.dtype):
            yield Case(spec, scale.decode(CACHE_LENGTH), "decode")
    dtype: DType = "fp16" if scale.dtype == "bf16" else scale.dtype
    yield from _passes([Spec(None, max(head_dims), dtype=dtype, mixed_heads=heads)], scale.training(first, batch=1))


def _layer_specs(heads: int, head_dim: int, dtype: DType) -> Iterator[Spec]:
    """Return the specs of the layers of the paper's models.

    The first two are one model's layers: all mix all heads before and after the softmax, and some
    also convolve; layers that do not convolve equal the baseline "talking heads". The third is the
    best small model's, which convolves before the softmax and mixes pairs of heads after it. The
    last is plain attention, the other baseline.
    """
    yield Spec(PAPER, head_dim, dtype=dtype, mixed_heads=heads, post_kernel=PAPER, post_mixed_heads=heads)
    yield Spec(None, head_dim, dtype=dtype, mixed_heads=heads, post_mixed_heads=heads)
    yield Spec(PAPER, head_dim, dtype=dtype, post_mixed_heads=2)
    yield Spec(None, head_dim, dtype=dtype)


def _short(
    scale: Scale, head_dims: Sequence[int], lengths: Sequence[int], kernels: Sequence[tuple[int, int] | None]
) -> Iterator[Case]:
    """Yield one sequence: of convolutions, of each layer of the paper's models except plain attention, and of heads
    that mix before the softmax alone.
    """
    for head_dim, n in product(head_dims, lengths):
        *layers, plain = _layer_specs(scale.heads, head_dim, scale.dtype)
        pipelines = [*layers, replace(plain, mixed_heads=scale.heads)]
        convolutions = [Spec(kernel, head_dim, dtype=scale.dtype) for kernel in kernels]
        yield from _passes([*convolutions, *pipelines], scale.training(n, batch=1))


def _data(scale: Scale, head_dims: Sequence[int], lengths: Sequence[int]) -> Iterator[Case]:
    """Yield cases for training data: dropout and windows, each next to the case without, and packed
    documents.

    One sequence of the first length is dropped of, as long as the longest document; that of a window has the last
    length, or half of it where heads are mixed, and 1/32 of the last length is seen. Only the paper's kernel has all
    head dims, and is there on all targets; all else has the largest.
    """
    first, last, d = lengths[0], lengths[-1], max(head_dims)
    everything, mixing, pairs, plain = _layer_specs(scale.heads, d, scale.dtype)
    paper = Spec(PAPER, d, dtype=scale.dtype)
    dropping = [*(replace(paper, head_dim=d, value_head_dim=d) for d in head_dims), plain, mixing, everything, pairs]
    for spec in dropping:
        yield from _passes([spec, replace(spec, dropout=True)], scale.training(first, batch=1))
    for spec, n in ((paper, last), *((spec, max(1, last // 2)) for spec in (mixing, everything))):
        yield from _passes([spec, replace(spec, window=(last // 32, -1))], scale.training(n, batch=1))
    documents = Sizes(len(DOCUMENTS), scale.heads, scale.heads, first, first)
    yield from _passes([replace(spec, packed=True) for spec in (paper, plain, mixing, everything, pairs)], documents)


def _scores(
    scale: Scale, head_dims: Sequence[int], lengths: Sequence[int], kernels: Sequence[tuple[int, int] | None]
) -> Iterator[Case]:
    """Yield one sequence without an expression, and with each."""
    for head_dim, n, kernel in product(head_dims, lengths, kernels):
        plain = Spec(kernel, head_dim, dtype=scale.dtype)
        specs = [plain, *(replace(plain, **options) for options in expressions(scale.heads).values())]
        yield from _passes(specs, scale.training(n, batch=1))


def _passes(specs: Iterable[Spec], sizes: Sizes) -> Iterator[Case]:
    """Yield the training passes of each operator."""
    return (Case(spec, sizes, name) for spec in specs for name in TRAINING_PASSES)


def _serving(
    scale: Scale, head_dims: Sequence[int], lengths: Sequence[int], kernels: Sequence[tuple[int, int] | None]
) -> Iterator[Case]:
    """Yield decode steps and chunks of a prompt, from one piece and from pages; and a step of ragged lengths.

    Chunks have 1/16 of the length.
    """
    for head_dim, n, kernel in product(head_dims, lengths, kernels):
        spec = Spec(kernel, head_dim, dtype=scale.dtype)
        chunk = scale.training(n, batch=1)._replace(nq=max(1, n // 16))
        for sizes, pass_name in ((scale.decode(n), "decode"), (chunk, "forward")):
            yield from (Case(replace(spec, page_size=size), sizes, pass_name) for size in (None, *PAGE_SIZES))
        ragged = replace(spec, packed=True, page_size=64)
        yield Case(ragged, scale.decode(n, kv_heads=scale.heads // 4)._replace(batch=8 * scale.decode_batch), "decode")


def _decode(
    scale: Scale,
    head_dims: Sequence[int],
    lengths: Sequence[int],
    kernels: Sequence[tuple[int, int] | None],
    *,
    every_step: bool,
) -> Iterator[Case]:
    """Yield decode steps of one new token; at one length, on request, all kinds of decode steps."""
    for head_dim, n, kernel in product(head_dims, lengths, kernels):
        spec = Spec(kernel, head_dim, dtype=scale.dtype)
        every = every_step and n == CACHE_LENGTH
        sizes: Sequence[Sizes] = scale.decode_steps(n) if every else [scale.decode(n)]
        yield from (Case(spec, one, "decode") for one in sizes)
