"""The option ``visible``: masks by which each query sees a run of keys, or keys with gaps, on the CPU."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from masked import DIM, GAPS, HEADS, KV_HEADS, MASKS, Problem
from torch import Tensor

import mtagen
from mtagen import InputError, SpecError
from mtagen.codegen.expressions import triton_condition
from mtagen.evaluate import _Evaluation
from mtagen.expressions.language import KEY, POSITION
from mtagen.measure.judge import documents_op
from mtagen.nn import MultiTokenAttention
from mtagen.planner.geometry import score
from mtagen.planner.geometry.pairs import PairCondition
from mtagen.spec import Spec

SYMBOLS = {score.POSITION: POSITION, score.KEY: KEY}  # from those of kernels
EVERY = MASKS | GAPS
STAGES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "a convolution": {"kernel": (3, 5)},
    "all stages": {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 4},
    "of parameters": {"kernel": (2, 3), "logits": "s - slopes[h] * (i - j)", "sink": True},
}


def options_of(stages: str, mask: str) -> dict[str, Any]:
    options = STAGES[stages] | EVERY[mask]
    more = {"slopes": "h"} if stages == "of parameters" else {}
    return options | {"parameters": {**EVERY[mask].get("parameters", {}), **more}}


def pairs(rules: dict[str, Any], parameters: dict[str, Tensor], batch: int, nq: int, nk: int) -> Tensor:
    """Whether each query sees each key, (B, Nq, Nk), by Python's own arithmetic, one pair after another."""
    left, right = rules.get("window", (-1, -1))
    right = 0 if rules.get("causal", True) else right
    seen = torch.zeros(batch, nq, nk, dtype=torch.bool)
    code = rules["visible"].replace("~", "1 - ")
    lists = {name: _Clamped(x) for name, x in parameters.items()}
    for b, row, j in itertools.product(range(batch), range(nq), range(nk)):
        i = row + nk - nq
        in_window = (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
        seen[b, row, j] = in_window and eval(code, {"i": i, "j": j, "b": b, **lists})
    return seen


class _Clamped:
    """A tensor whose indices are cut to its extents, as those of queries before the first key are."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, index: Any) -> int:
        indices = index if isinstance(index, tuple) else (index,)
        places = (min(max(i, 0), n - 1) for i, n in zip(indices, self.x.shape, strict=True))
        return int(self.x[(*places,)])


def dense(seen: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None) -> Tensor:
    """Attention with at most a convolution, of scores that are zero where they are hidden."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    hidden = ~seen[:, None]
    scores = (q @ k.mT * DIM**-0.5).masked_fill(hidden, 0)
    if weight is not None:
        cq, ck = weight.shape[1:]
        left = (ck - 1) // 2
        scores = F.conv2d(F.pad(scores, (left, ck - 1 - left, cq - 1, 0)), weight.unsqueeze(1), groups=HEADS)
    p = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num()
    return p @ v


@pytest.mark.parametrize("mask", EVERY)
@pytest.mark.parametrize("kernel", [None, (3, 5)])
@pytest.mark.parametrize("sizes", [(30, 37), (1, 1), (9, 5)])
def test_reference_hides_what_the_condition_hides(
    mask: str, kernel: tuple[int, int] | None, sizes: tuple[int, int]
) -> None:
    problem = Problem(EVERY[mask] | {"kernel": kernel}, *sizes)
    seen = pairs(problem.rules, problem.parameters, 3, *sizes)
    q, k, v = (problem.tensors[name] for name in "qkv")
    expected = dense(seen, q, k, v, problem.tensors.get("weight"))
    torch.testing.assert_close(mtagen.reference(**problem.call, **problem.rules), expected)


@pytest.mark.parametrize("mask", GAPS)
@pytest.mark.parametrize("kernel", [None, (3, 5)])
def test_gradients_are_those_of_a_boolean_matrix(mask: str, kernel: tuple[int, int] | None) -> None:
    problem = Problem(GAPS[mask] | {"kernel": kernel})
    leaves = {name: x for name, x in problem.tensors.items() if x.requires_grad}
    seen = pairs(problem.rules, problem.parameters, 3, 30, 37)
    expected = dense(seen, *(leaves[name] for name in "qkv"), leaves.get("weight"))
    out = problem.op(**problem.call)
    torch.testing.assert_close(out, expected)
    both = (torch.autograd.grad(x.sin().sum(), [*leaves.values()]) for x in (out, expected))
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("mask", EVERY)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("sizes", [(30, 37), (1, 1), (9, 5)])
def test_equals_reference(stages: str, mask: str, sizes: tuple[int, int]) -> None:
    problem = Problem(options_of(stages, mask), *sizes)
    got = problem.op(**problem.call, return_lse=True)
    expected = mtagen.reference(**problem.call, **problem.rules, return_lse=True)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    ours, theirs = problem.gradients(*got), problem.gradients(*expected)
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("stages", STAGES)
def test_padding_is_a_shorter_sequence(stages: str) -> None:
    problem = Problem(options_of(stages, "padding"), 37, 37)
    out = problem.op(**problem.call)
    whole = {name: x for name, x in problem.call.items() if name not in "qkv" and name != "parameters"}
    rules = problem.rules | {"visible": None}
    parameters = {name: x for name, x in problem.parameters.items() if name != "lengths"} or None
    for b, length in enumerate(problem.parameters["lengths"].tolist()):
        q, k, v = (problem.tensors[name][b : b + 1, :, :length] for name in "qkv")
        alone = mtagen.reference(q, k, v, **whole, **rules, parameters=parameters)
        torch.testing.assert_close(out[b : b + 1, :, :length], alone)


@pytest.mark.parametrize("stages", [{"kernel": None}, {"kernel": (1, 5)}, {"kernel": None, "mixed_heads": 2}], ids=str)
def test_chunks_are_documents(stages: dict[str, Any]) -> None:
    """Without convolutions over queries: those of a chunk's first query take scores of the chunk before."""
    problem = Problem(stages | MASKS["chunks"], 37, 37, batch=1)
    out = problem.op(**problem.call)
    plain = mtagen.build(head_dim=DIM, target="cpu", dtype="fp64", **stages)
    packed = {name: problem.tensors[name][0].transpose(0, 1) for name in "qkv"}
    weights = {name: x for name, x in problem.call.items() if name not in "qkv" and name != "parameters"}
    cu_seq = torch.tensor([*range(0, 37, 8), 37], dtype=torch.int32)
    documents = plain.varlen(**packed, **weights, cu_seq_q=cu_seq, cu_seq_k=cu_seq, max_q=8, max_k=8)
    torch.testing.assert_close(out, documents.transpose(0, 1).unsqueeze(0))


@pytest.mark.parametrize("mask", [name for name in EVERY if name != "chosen blocks"])
@pytest.mark.parametrize("stages", ["plain", "all stages"])
def test_packed_documents(stages: str, mask: str) -> None:
    options = options_of(stages, mask)
    op = mtagen.build(head_dim=DIM, target="cpu", dtype="fp64", **options)
    spec, lengths = op.plan.spec, ([7, 0, 9, 4], [7, 3, 5, 0])
    generator = torch.Generator().manual_seed(0)
    sizes = {"H": HEADS, "Hkv": KV_HEADS, "documents": 4, "total_q": 20, "total_k": 15}
    shapes = {"q": (20, HEADS, DIM), "k": (15, KV_HEADS, DIM), "v": (15, KV_HEADS, DIM)} | spec.weights(HEADS)
    tensors = {name: torch.randn(x, dtype=torch.float64, generator=generator) for name, x in shapes.items()}
    parameters = {
        x.name: torch.randint(0, 9, x.extents(sizes), generator=generator, dtype=torch.int32)
        for x in spec.packed_learned_arguments
    }
    cu_seq_q, cu_seq_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in lengths)
    got = op.varlen(**tensors, parameters=parameters or None, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=9, max_k=7)
    rules = {name: options[name] for name in ("causal", "window", "visible") if name in options}

    def eager(*qkv: Tensor, document: int, **others: Any) -> Any:
        return mtagen.reference(*qkv, **others, **rules, return_lse=True)

    expected, _ = documents_op(eager, *lengths, dict(spec.parameters))(**tensors, parameters=parameters or None)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mask", EVERY)
@pytest.mark.parametrize("stages", STAGES)
def test_decode(stages: str, mask: str) -> None:
    """A step is the last rows of a call."""
    problem = Problem(options_of(stages, mask), 37, 37, batch=2)
    lengths, context = [37, 20], problem.spec.context
    tail = torch.stack([problem.tensors["q"][b, :, n - 3 - context : n] for b, n in enumerate(lengths)])
    step = {name: x for name, x in problem.call.items() if name not in "qkv"}
    got = problem.op.decode(
        tail, problem.tensors["k"], problem.tensors["v"], **step, cache_seqlens=torch.tensor(lengths, dtype=torch.int32)
    )
    for b, n in enumerate(lengths):
        q, k, v = (problem.tensors[name][b : b + 1, :, :n] for name in "qkv")
        parameters = {
            name: x[b : b + 1] if dict(problem.spec.parameters)[name].startswith("b") else x
            for name, x in problem.parameters.items()
        }
        parameters |= {name: parameters[name][:, :n] for name in ("first", "ids") if name in parameters}
        parameters |= {name: x[:, : -(-n // 8), : -(-n // 8)] for name, x in parameters.items() if name == "blocks"}
        others = {name: x for name, x in step.items() if name != "parameters"}
        whole = mtagen.reference(q, k, v, **others, **problem.rules, parameters=parameters or None)
        torch.testing.assert_close(got[b : b + 1], whole[:, :, -3:])


@pytest.mark.parametrize("mask", ["prefix", "chunks"])
@pytest.mark.parametrize("stages", ["plain", "a convolution", "all stages"])
def test_hidden_keys_change_no_bit(stages: str, mask: str) -> None:
    problem = Problem(options_of(stages, mask), 37, 37)
    if mask == "prefix":
        problem.parameters["prefix"].fill_(5)
    rows, later = (8, slice(8, None)) if mask == "prefix" else (16, slice(16, None))
    before = problem.op(**problem.call)[:, :, :rows]
    for name in "kv":
        with torch.no_grad():
            problem.tensors[name][:, :, later] = math.nan
    assert torch.equal(problem.op(**problem.call)[:, :, :rows], before)


@pytest.mark.parametrize("mask", ["every other key", "sinks and a window"])
@pytest.mark.parametrize("stages", ["plain", "a convolution", "all stages"])
def test_keys_in_gaps_change_no_bit(stages: str, mask: str) -> None:
    """Keys that no query sees, NaN among them; and keys between two runs, for queries to which they are hidden."""
    problem = Problem(options_of(stages, mask), 37, 37)
    hidden, rows = (slice(1, None, 2), slice(None)) if mask == "every other key" else (slice(6, 12), slice(28, None))
    before = problem.op(**problem.call)[:, :, rows]
    for name in "kv":
        with torch.no_grad():
            problem.tensors[name][:, :, hidden] = math.nan
    assert torch.equal(problem.op(**problem.call)[:, :, rows], before)


WIDTH = 6  # of an image whose pixels are the tokens
# Masks of FlexAttention's documentation and attention-gym, and the same in the language of conditions.
FLEX: dict[str, tuple[dict[str, Any], Any]] = {
    "causal": ({}, lambda b, h, i, j: i >= j),
    "a sliding window": ({"visible": "i - j <= 7"}, lambda b, h, i, j: (i >= j) & (i - j <= 7)),
    "a prefix": (
        {"causal": False, "visible": "(j < 9) | (i >= j)"},
        lambda b, h, i, j: (j < 9) | (i >= j),
    ),
    "causal documents": (
        {"visible": "ids[b, i] == ids[b, j]", "parameters": {"ids": "b,i"}},
        lambda b, h, i, j: (i >= j) & (i // 11 == j // 11),
    ),
    "a dilated window": (
        {"visible": "(i - j <= 14) & ((i - j) % 2 == 0)"},
        lambda b, h, i, j: (i >= j) & (i - j <= 14) & ((i - j) % 2 == 0),
    ),
    "neighbours in an image": (
        {"causal": False, "visible": "(abs(i // 6 - j // 6) <= 2) & (abs(i % 6 - j % 6) <= 1)"},
        lambda b, h, i, j: (abs(i // WIDTH - j // WIDTH) <= 2) & (abs(i % WIDTH - j % WIDTH) <= 1),
    ),
    "sinks and a window": (
        {"visible": "(j < 4) | (i - j < 8)"},
        lambda b, h, i, j: (i >= j) & ((j < 4) | (i - j < 8)),
    ),
}


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_has_the_same_masks(name: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    options, mask_mod = FLEX[name]
    q, k, v = torch.randn(3, 2, HEADS, 36, DIM, generator=torch.Generator().manual_seed(0))
    parameters = {"ids": (torch.arange(36, dtype=torch.int32) // 11).expand(2, -1)} if "parameters" in options else None
    op = mtagen.build(kernel=None, head_dim=DIM, target="cpu", dtype="fp32", **options)
    block_mask = flex.create_block_mask(mask_mod, None, None, 36, 36, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        expected = flex.flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(op(q, k, v, parameters=parameters), expected)


SAME = [
    ({"visible": "j <= i", "causal": False}, {}),
    ({"visible": "i - j < 100"}, {"window": (99, -1)}),
    ({"visible": "abs(i - j) <= 5", "causal": False}, {"causal": False, "window": (5, 5)}),
    ({"visible": "(i - j) // 4 == 0", "causal": False}, {"window": (3, 0)}),
    ({"visible": "~(j > i + 2) & (2 * j >= 2 * i - 9)", "causal": False}, {"causal": False, "window": (4, 2)}),
    ({"visible": "i // 64 == j // 64"}, {"visible": "j >= 64 * (i // 64)", "window": (63, -1)}),
    ({"visible": "i // 64 == j // 64"}, {"visible": lambda i, j: i // 64 == j // 64}),
    ({"visible": "j < i"}, {"visible": "j + 1 <= i", "causal": False}),
    ({"visible": "(j <= i) & (j < 7)", "causal": False}, {"visible": "7 > j"}),
    ({"visible": "(j < 4) | (i - j < 9)"}, {"visible": lambda i, j: (j <= 3) | (j > i - 9)}),
    ({"visible": "(j % 2 == 0) & (i - j < 9)"}, {"visible": "j % 2 == 0", "window": (8, -1)}),
    ({"visible": "~((j % 2 == 0) | (j < i))"}, {"visible": "(j % 2 != 0) & (j >= i)"}),
    ({"visible": "2 * j / 3 != i / 3"}, {"visible": "2 * j != i"}),
]


@pytest.mark.parametrize(("options", "others"), SAME)
def test_equal_masks_are_one_spec(options: dict[str, Any], others: dict[str, Any]) -> None:
    spec = Spec(None, 16, **options)
    assert spec == Spec(None, 16, **others)
    assert Spec.from_dict(spec.to_dict()) == spec


TERMS = st.sampled_from(
    ["i", "i + 3", "i - 7", "6 * (i // 6)", "5 * (i // 5) + 4", "i // 2", "9", "max(i, 11)", "min(i, 4)"]
)


@st.composite
def conditions(draw: st.DrawFn, depth: int = 3) -> str:
    """Conditions, of which many make gaps."""
    kind = draw(st.sampled_from(["comparison", "quotient", "remainder", *(["and", "or", "not"] if depth else [])]))
    if kind in ("and", "or"):
        return f"({draw(conditions(depth - 1))}) {'&' if kind == 'and' else '|'} ({draw(conditions(depth - 1))})"
    if kind == "not":
        return f"~({draw(conditions(depth - 1))})"
    if kind == "remainder":
        remainder = draw(st.sampled_from(["j % 3", "(i - j) % 4", "(2 * j - i) % 5"]))
        return f"{remainder} {draw(st.sampled_from(['==', '!=']))} 1"
    compared = draw(st.sampled_from(["<", "<=", ">", ">=", "=="]))
    key = draw(st.sampled_from(["j // 6", "(j + 2) // 3", "2 * j - 1"])) if kind == "quotient" else "j"
    return f"{key} {compared} {draw(TERMS)}"


@settings(max_examples=100, deadline=None)
@given(conditions(), st.booleans(), st.sampled_from([(-1, -1), (5, -1), (-1, 3), (4, 2)]))
def test_canonical_masks_hide_the_same(text: str, causal: bool, window: tuple[int, int]) -> None:
    try:
        spec = Spec(None, 16, visible=text, causal=causal, window=window)
    except SpecError as error:
        assume(not any(rule in str(error) for rule in ("no query sees a key", "causal or window hides all later keys")))
        raise
    assert Spec.from_dict(spec.to_dict()) == spec
    rules = {"visible": text, "causal": causal, "window": window}
    canonical = {"visible": spec.visible or "True", "causal": spec.causal, "window": spec.window}
    nq, nk = 17, 14
    canonical_text = str(canonical["visible"]).replace("floor(", "math.floor(")
    canonical["visible"] = canonical_text
    assert torch.equal(pairs(rules, {}, 1, nq, nk), _pairs_of_text(canonical, nq, nk))


def _pairs_of_text(rules: dict[str, Any], nq: int, nk: int) -> Tensor:
    """As ``pairs``, for a canonical text, whose quotients are exact."""
    from fractions import Fraction

    seen = torch.zeros(1, nq, nk, dtype=torch.bool)
    left, right = rules["window"]
    right = 0 if rules["causal"] else right
    code = compile(rules["visible"], "visible", "eval")
    for row, j in itertools.product(range(nq), range(nk)):
        i = Fraction(row + nk - nq)
        in_window = (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
        seen[0, row, j] = in_window and bool(eval(code, {"math": math, "i": i, "j": Fraction(j)}))
    return seen


class Truncating(Tensor):
    """Integers that are divided toward zero, as kernels divide them."""

    def __floordiv__(self, other: Any) -> Any:
        return torch.div(self, other, rounding_mode="trunc")

    def __mod__(self, other: Any) -> Any:
        return torch.fmod(self, other)


@settings(max_examples=60, deadline=None)
@given(conditions())
@example("(abs(i // 8 - j // 8) < 3) & (abs(i % 8 - j % 8) < 3) & (2 * j - i != 7)")
@example("(j % 3 != i % 2) | (i - 3 * ((i - j) // 3) == 7) | (max(j // 5, 3) * 5 + min(i, 9) == 2 * j)")
def test_printed_conditions(text: str) -> None:
    """Kernels compute in 32 bits, near the largest places, too, what int64 gives."""
    try:
        condition = PairCondition.of(Spec(None, 16, visible=text, causal=False))
    except SpecError:
        assume(False)
    assume(condition.is_checked)
    functions = {name: extremum_of(name) for name in ("minimum", "maximum")}
    tl = SimpleNamespace(where=torch.where, int64=torch.int64, **functions)
    near, far = torch.arange(-9, 30), 2**30 - 1 - torch.arange(20)
    for rows, keys in ((near, near[9:]), (far, near[9:]), (far, far)):
        places = {"position": rows[:, None], "key": keys}
        exact = _Evaluation({POSITION: places["position"], KEY: keys}, {}).of(condition.expr.xreplace(SYMBOLS))
        named = {name: x.to(torch.int32).as_subclass(Truncating) for name, x in places.items()}
        printed = eval(triton_condition(condition.expr), {"tl": tl, **named})
        assert torch.equal(torch.as_tensor(printed).as_subclass(Tensor).expand_as(exact), exact), text


def extremum_of(name: str) -> Any:
    return lambda a, b: getattr(torch, name)(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"visible": "j < i * i / 2.5e-9 + exp(i)"}, "compares real numbers"),
        ({"visible": "(j == i) | (floor(log(j + 1)) == 2)"}, "compares real numbers"),
        ({"visible": "j**3 % 5 == 1"}, "larger ones than 64 bits hold"),
        (
            {"visible": "t[i // 4, j] > 0", "parameters": {"t": "i//8,j"}},
            "the axis i//8 of a parameter has its own index",
        ),
        ({"visible": "t[i // 8] > 0", "parameters": {"t": "h//8"}}, "is no axis"),
        ({"logits": "s * t[i // 8]", "parameters": {"t": "i//8"}}, "counts blocks of tokens"),
        ({"visible": "s < 4"}, "the same for all scores and heads"),
        ({"visible": "j < h"}, "the same for all scores and heads"),
        ({"visible": "j < t[h]", "parameters": {"t": "h"}}, "the same for all scores and heads"),
        ({"visible": "j"}, "is no condition"),
        ({"visible": "j < t[i // 4]", "parameters": {"t": "9"}}, "the axis has 9 entries"),
        ({"visible": "j > j"}, "no query sees a key"),
        ({"visible": "(j <= i) | (j < 10)"}, "causal or window hides all later keys that it would show"),
        ({"visible": "i // 8 >= j // 8", "causal": True}, "causal or window hides all later keys"),
        ({"visible": "j <= i + 9", "causal": False, "window": (-1, 3)}, "causal or window hides all later keys"),
        ({"visible": lambda i, j: j}, "is no condition"),
        ({"visible": 3}, "is no text and no function"),
        ({"visible": "j < 4", "parameters": {"t": "b"}}, "are read by no expression"),
        ({"visible": "(j <= i) | (j < t[b])", "parameters": {"t": "b"}}, "changes nothing, because causal"),
        ({"visible": "j < t[b]", "logits": "s * t[b]", "parameters": {"t": "b"}}, "a parameter for each"),
        ({"visible": "i // 4 == j // 4", "mask": "output", "kernel": (2, 3)}, 'mask="source"'),
    ],
)
def test_masks_that_are_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(SpecError) as error:
        Spec(**{"kernel": None, "head_dim": 16} | options)
    assert rule in str(error.value)


def test_calls_that_are_refused() -> None:
    problem = Problem({"kernel": None, **MASKS["prefix"]})
    prefix = problem.parameters["prefix"]
    wrong = [
        ({"parameters": None}, "each call needs it", "prefix is not declared by parameters"),
        ({"parameters": {"prefix": prefix.double()}}, *["must be integers, because visible reads it"] * 2),
        ({"parameters": {"prefix": prefix[:2]}}, *["prefix.*shape"] * 2),
    ]
    for options, rule, rule_of_reference in wrong:
        with pytest.raises(InputError, match=rule):
            problem.op(**problem.call | options)
        with pytest.raises((InputError, SpecError), match=rule_of_reference):
            mtagen.reference(**problem.call | options, **problem.rules)


def test_maps_that_are_refused() -> None:
    op = mtagen.build(kernel=None, head_dim=16, visible="t[b, i // 8, j // 8] > 0", parameters={"t": "b,i//8,j//8"})
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16).expand(1, 1, 8 * 50_000, 16)
    blocks = torch.zeros((), dtype=torch.int32).expand(1, 50_000, 50_000)
    with pytest.raises(InputError, match=re.escape("less than 2**31 for a batch entry")):
        op(q, k, k, parameters={"t": blocks})
    with pytest.raises(InputError, match=r"must be integers.*torch\.int32"):
        op(q, q, q, parameters={"t": torch.zeros(1, 1, 1, dtype=torch.int64)})
    cu_seq = torch.tensor([0, 1], dtype=torch.int32)
    ends = {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq, "max_q": 1, "max_k": 1}
    with pytest.raises(SpecError, match="packed documents begin anywhere"):
        op.varlen(q[0], q[0], q[0], parameters={"t": torch.zeros(1, 1, 1, dtype=torch.int32)}, **ends)


def test_layers() -> None:
    """A layer has masks without parameters, which its cache follows."""
    layer = MultiTokenAttention(64, 4, visible="i // 8 == j // 8", kernel=(2, 3))
    x = torch.randn(2, 20, 64)
    whole = layer(x)
    with torch.no_grad():
        changed = layer(torch.cat([torch.randn(2, 16, 64), x[:, 16:]], 1))
    torch.testing.assert_close(whole[:, 16:], changed[:, 16:])
    with pytest.raises(SpecError, match="a layer holds no integers"):
        MultiTokenAttention(64, 4, **MASKS["prefix"])


def test_layers_with_sinks_and_a_window() -> None:
    """Generation with a cache equals a call on the whole sequence."""
    layer = MultiTokenAttention(64, 4, visible="(j < 2) | (i - j < 6)", kernel=(2, 3)).eval()
    x = torch.randn(2, 20, 64)
    with torch.no_grad():
        whole = layer(x)
        cache = layer.new_cache(2, 20)
        torch.testing.assert_close(torch.cat([layer(part, cache=cache) for part in x.split([12, 1, 7], 1)], 1), whole)
        between = layer(torch.cat([x[:, :4], torch.randn(2, 5, 64), x[:, 9:]], 1))
    torch.testing.assert_close(between[:, 15:], whole[:, 15:])  # neither these rows nor their filters see those keys
