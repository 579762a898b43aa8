"""The cases of the fuzzer, as values: one random call of one random op."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from mtagen.spec import EXPRESSIONS, KEY_PADDINGS, MASKS, MAX_NEW_TOKENS, Spec

BACKENDS = ("cpu", "interpreter", "emulator", "gpu")
SHARED = {"emulator": 40}  # so many consecutive cases share an op, because compiling its kernels takes longest
DTYPES = {
    "cpu": ("fp32", "fp32", "fp64", "bf16", "fp16"),
    "interpreter": ("fp32", "fp32", "fp16"),  # Triton's interpreter computes bf16 wrongly
    "emulator": ("bf16", "fp16"),
    "gpu": ("bf16", "bf16", "fp16", "fp32"),
}
MAKERS = {  # the target that the op is planned for, or the argument ``backend`` of mtagen.build on a GPU
    "cpu": ("torch",),
    "interpreter": ("generic", "sm_80", "sm_90a"),
    "emulator": ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_90a", "sm_120"),
    "gpu": ("triton", "cuda", "auto"),
}
# Windows that users write; the first two are ``causal`` in other words.
WINDOWS = ((-1, 0), (7, 0), (3, -1), (0, 0), (-1, 4), (5, 3))
# Logits without kinks, where roundings choose between two slopes.
LOGITS = (
    "3 * tanh(s / 3)",
    "s - 0.125 * (h + 1) * (i - j)",
    "s * log(abs(i) + 2) / 4",
    "where((i - j) % 3 == 1, s / 2, s) + min(4, i - j) / 8",
    "s / (1 + exp(-s)) - sqrt(abs(i - j)) / 4 + s / (h + 1)",
)
# Functions that read parameters of heads and tables, and their parameters.
READING = (
    ("s - slopes[h] * (i - j) / 8", (("slopes", "h"),)),
    ("s + table[h, max(0, min(8, i - j))]", (("table", "h,9"),)),
    ("s * (1 + t / 8) + slopes[h] / (1 + abs(i - j))", (("slopes", "h"), ("t", ""))),
)
SCORES = ("3 * tanh(s / 3) + 1", "s + tanh(s) / 2", "s - (i - j) / 16")  # and functions before the mixture
VISIBLE = (  # masks that are no windows
    "i // 8 == j // 8",
    "j // 8 <= i // 8",
    "j >= i // 2",
    "(j < 25 - i) & (j >= 12 - i)",
    "(j <= i) | (j < 11)",
    "j < 3 * (i // 4) + 2",
    "(j < 4) | (i - j < 9)",
    "(i - j) % 3 != 1",
    "((j + i // 8) % 2 == 0) & (i - j < 20)",
)
LENGTHS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 33, 40)
LONG_LENGTHS = (63, 65, 90, 128, 133, 150)
FEWEST_ROWS = 8  # in training; eager PyTorch may be exact by luck in fewer, and then the rule allows little
LAYOUTS = ("contiguous", "contiguous", "heads last", "sliced", "unaligned", "expanded")
GARBAGE = ("", "large", "inf", "nan")  # numbers that replace hidden keys; "" replaces nothing


@dataclass(frozen=True)
class Case:
    """One call. It prints as a line of JSON that leaves out fields with their default values.

    Attributes:
        backend: one of ``BACKENDS``.
        maker: one of ``MAKERS``.
        kernel, post_kernel, mixed_heads, post_mixed_heads, head_dim, value_head_dim, causal, window, key_padding, mask,
            scores, convolved, logits, visible, parameters, sink, dtype: arguments of :func:`mtagen.build`.
        small: whether tiles and workspaces are small, so that short sequences have many.
        call: ``batch``, ``varlen`` or ``decode``.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        lengths: queries and keys of each sequence; for decode, its new tokens and its keys in use. All sequences of a
            batch have the same lengths, and all of a decode step the same number of new tokens.
        spare: for varlen, queries and keys behind the last document. For decode, the number by which a cache length
            exceeds the capacity where the cache is full, and keys behind the longest sequence.
        layouts: how q, k, v and the gradient of the output lie in memory, each one of ``LAYOUTS``.
        strided_lengths: whether a tensor of lengths is a column of a table.
        cast_weights: whether weights have the dtype of q instead of fp32.
        scale: factor of q k^T.
        size: factor of the queries, which are normal numbers otherwise.
        dropout_p: probability of dropout.
        return_lse: whether the call also returns the log-sum-exp, and gradients come through it.
        splits: the argument ``num_splits`` of decode.
        hidden: one of ``GARBAGE``.
        cut: the first hidden row as a fraction of all rows; the rows behind it are hidden, too.
        earlier: whether the other rows are hidden instead.
        data: seed of all numbers.
    """

    backend: str
    maker: str
    kernel: tuple[int, int] | None = None
    post_kernel: tuple[int, int] | None = None
    mixed_heads: int | None = None
    post_mixed_heads: int | None = None
    head_dim: int = 16
    value_head_dim: int = 16
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    key_padding: str = "both"
    mask: str = "source"
    scores: str | None = None
    convolved: str | None = None
    logits: str | None = None
    visible: str | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    sink: bool = False
    dtype: str = "fp32"
    small: bool = False
    call: str = "batch"
    heads: int = 1
    kv_heads: int = 1
    lengths: tuple[tuple[int, int], ...] = ((1, 1),)
    spare: tuple[int, int] = (0, 0)
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4
    strided_lengths: bool = False
    cast_weights: bool = False
    scale: float | None = None
    size: float = 1.0
    dropout_p: float = 0.0
    return_lse: bool = False
    splits: int | None = None
    hidden: str = ""
    cut: float = 0.5
    earlier: bool = False
    data: int = 0

    def __str__(self) -> str:
        plain = asdict(Case(self.backend, self.maker))
        shown = {name: x for name, x in asdict(self).items() if x != plain[name] or name in ("backend", "maker")}
        return json.dumps(shown)

    @classmethod
    def parse(cls, line: str) -> Case:
        """Inverse of ``str``."""
        return cls(**{name: _tuples(value) for name, value in json.loads(line).items()})

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of :func:`mtagen.build` that describe the operator."""
        return {name: getattr(self, name) for name in Spec.__dataclass_fields__ if hasattr(self, name)}

    @property
    def spec(self) -> Spec:
        """The operator."""
        return Spec(**self.options)


def draw(backend: str, seed: int, index: int) -> Case:
    """Draw a case, which depends on nothing but the arguments."""
    shared = SHARED.get(backend, 1)
    of_op, of_call = Random(f"{backend} {seed} {index // shared} op"), Random(f"{backend} {seed} {index} call")
    of_scores = Random(f"{backend} {seed} {index // shared} logits")
    return _with_call(_with_scores(_op(backend, of_op), of_scores), of_call)


def _with_scores(case: Case, random: Random) -> Case:
    """Draw what becomes of the scores of an op, and which of them are visible."""
    texts = {"logits": _maybe(random, 0.3, random.choice(LOGITS))}
    texts |= {place: _maybe(random, 0.1, random.choice(SCORES)) for place in ("scores", "convolved")}
    if random.random() < 0.3:
        text, parameters = random.choice(READING)
        case = replace(case, parameters=parameters, **{random.choice(EXPRESSIONS): text})
        texts = {place: text for place, text in texts.items() if getattr(case, place) is None}
    if random.random() < 0.2:
        case = replace(case, visible=random.choice(VISIBLE), mask="source")
    return replace(case, **texts, sink=random.random() < 0.2)


def _op(backend: str, random: Random) -> Case:
    """Draw an op and the kind of its calls, as each kind has kernels of its own."""
    dims = (16, 24, 32, 40, 64, 80, 96, 128, 144, 256) if backend in ("emulator", "gpu") else (16, 16, 24, 32, 64)
    head_dim = random.choice(dims)
    # Stages other than a convolution before the softmax need another lowering, so many ops have none of them.
    chances = (0.8, 0.0) if random.random() < 0.4 else (0.5, 0.5)
    case = Case(
        backend=backend,
        maker=random.choice(MAKERS[backend]),
        kernel=_maybe(random, chances[0], _kernel(random)),
        post_kernel=_maybe(random, chances[1], _kernel(random)),
        mixed_heads=_maybe(random, chances[1], random.choice((1, 2, 2, 3, 4))),
        post_mixed_heads=_maybe(random, chances[1], random.choice((1, 2, 2, 3, 4))),
        head_dim=head_dim,
        value_head_dim=random.choice((head_dim, head_dim, random.choice(dims))),
        causal=random.random() < 0.5,
        window=random.choice(
            (*2 * ((-1, -1),), random.choice(WINDOWS), (random.randint(-1, 40), random.randint(-1, 40)))
        ),
        key_padding=random.choice(KEY_PADDINGS),
        mask=random.choice(MASKS),
        dtype=random.choice(DTYPES[backend]),
        small=random.random() < 0.5,
        call=random.choice(("batch", "batch", "varlen", "decode")),
        dropout_p=random.choice((0.0, 0.0, 0.0, 0.0, 0.1, 0.9)),
    )
    # Beside other stages than that convolution, Triton's kernels work, whose interpreter computes bf16 wrongly.
    interpreted = backend == "emulator" and not case.spec.convolves_only
    return replace(case, dtype="fp16") if interpreted else case


def _with_call(case: Case, random: Random) -> Case:
    """Draw a call of the op of ``case``."""
    multiple = math.lcm(case.mixed_heads or 1, case.post_mixed_heads or 1)
    # Probabilities recomputed from a log-sum-exp lose digits as scores grow. Eager PyTorch loses fewer, and its
    # other roundings cover the difference in 16 bits only.
    wide = case.dtype in ("fp32", "fp64")
    heads = multiple * random.choice([n for n in (1, 2, 3, 4) if n * multiple <= max(4, multiple)])
    return replace(
        case,
        heads=heads,
        kv_heads=random.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        lengths=_lengths(case, random),
        spare=(random.choice((0, 0, 0, 1, 9)), random.choice((0, 0, 1, 5, 20))) if case.call != "batch" else (0, 0),
        layouts=tuple(random.choice(LAYOUTS) for _ in range(4)),
        strided_lengths=random.random() < 0.3,
        cast_weights=random.random() < 0.3,
        scale=random.choice((None, None, None, None, 0.0, -0.1, *((0.1,) if wide else (1.0, -0.3)))),
        size=1.0 if wide else random.choice((1.0, 1.0, 1.0, 4.0)),
        dropout_p=_dropout_p(case),
        return_lse=random.random() < 0.5,
        splits=random.choice((None, None, 1, 2, 5)),
        hidden=random.choice(GARBAGE),
        cut=random.random(),
        earlier=random.random() < 0.5,
        data=random.randrange(2**31),
    )


def _dropout_p(case: Case) -> float:
    """Return the probability of dropout: 0.5 instead of others if rows of 16 bits see one key.

    Their gradients cancel exactly, but not if out is rounded, from which every backend computes ``grad_out . out``
    (docs/limits.md, "One dominating score"). With 0.5 out is twice a value, which needs no rounding.
    """
    left, right = case.window[0], 0 if case.causal else case.window[1]
    if case.call == "decode" or not case.dropout_p:
        return 0.0
    return 0.5 if (left, right) == (0, 0) and case.dtype in ("bf16", "fp16") else case.dropout_p


def _lengths(case: Case, random: Random) -> tuple[tuple[int, int], ...]:
    """Draw the field ``lengths``."""

    def length() -> int:
        return random.choice(LONG_LENGTHS if random.random() < 0.04 else LENGTHS)

    def pair() -> tuple[int, int]:
        n_q = length()
        return n_q, random.choice((n_q, n_q + random.randint(1, 20), length()))

    batch = random.choice((1, 1, 2, 3))
    if case.call == "decode":
        new_tokens = random.randint(1, MAX_NEW_TOKENS)
        return tuple((new_tokens, length()) for _ in range(batch))
    lengths = batch * (pair(),)
    if case.call == "varlen":
        lengths = tuple(pair() for _ in range(random.choice((1, 2, 3, 5))))
    rows = sum(n_q for n_q, _ in lengths)
    return lengths * -(-FEWEST_ROWS // rows) if 0 < rows < FEWEST_ROWS else lengths


def _kernel(random: Random) -> tuple[int, int]:
    return random.choice(((1, 1), (2, 2), (3, 3), (6, 11), (random.randint(1, 6), random.randint(1, 11))))


def _maybe(random: Random, chance: float, value: Any) -> Any:
    return value if random.random() < chance else None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
