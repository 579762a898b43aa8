"""Score expressions: the language, its values and derivatives, and the CPU op against the reference."""

from __future__ import annotations

import ctypes
import math
import subprocess
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from emulator import COMPILER, needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mtagen
from mtagen import SpecError
from mtagen.codegen import render
from mtagen.codegen.expressions import c_expression, triton_expression
from mtagen.evaluate import evaluate
from mtagen.expressions import alibi, softcap
from mtagen.expressions.given import canonical
from mtagen.expressions.language import HEAD, KEY, POSITION, SCORE, is_of_distance, names_in, read
from mtagen.expressions.parameters import read_parameters
from mtagen.planner.cuda.score import score_function
from mtagen.planner.geometry import score as stage
from mtagen.planner.geometry.mask import Mask

WRONG = [
    ("s + t", "t is not a name", "    ^"),
    ("foo(s)", "foo is not a function", "^^^^^^"),
    ("s.real", "Attribute is not", "^^^^^^"),
    ("__import__('os').system('true')", "Call is not", "^"),
    ("[s][0]", "Subscript is not", "^^^^^^"),
    ("(lambda: s)()", "Call is not", "^"),
    ("tanh(s, s)", "tanh has 2 arguments", "^^^^^^^^^^"),
    ("tanh(x=s)", "tanh is not", "^^^^^^^^^"),
    ("min(s)", "min has 1 arguments", "^^^^^^"),
    ("i < j", "a condition stands", "^^^^^"),
    ("s and i", "a condition stands", "^^^^^^^"),
    ("where(s, 1, 2)", "is no condition", "      ^"),
    ("s if i else j", "`if` and `else` are not in the language", "^"),
    ("s ^ 2", "`^` is not in the language", "^"),
    ("'s'", "Constant is not", "^^^"),
    ("True * s", "Constant is not", "^^^^"),
    ("s ** s", "has no such exponent", "^^^^^^"),
    ("9 ** 9 ** 9", "has no such exponent", "^"),
    ("s / 0", "divides by zero", "^^^^^"),
    ("log(0) * s", "zoo", "^^^^^^"),
    ("sqrt(-1) * s", "I is no number", "^^^^^^^^"),
    ("1e400 * s", "oo", "^^^^^"),
    ("exp(1000) * s", "exp(1000)", "^^^^^^^^^"),
    ("10 ** 16 ** 2 * s", "exponent", "^"),
    ("s // 2", "no derivative", None),
    ("floor(s) + s", "no derivative", None),
    ("s + (", "is no expression", None),
    ("", "is no expression", None),
    ("s" + " + s" * 400, "characters", None),
    ("-" * 999 + "s", "nested too deeply", None),
    ("tanh(" * 150 + "s" + ")" * 150, "nested too deeply", None),
]


@pytest.mark.parametrize(("text", "rule", "mark"), WRONG, ids=[text[:20] for text, *_ in WRONG])
def test_texts_that_are_refused(text: str, rule: str, mark: str | None) -> None:
    """The message marks the place in the text."""
    with pytest.raises(SpecError) as error:
        mtagen.Spec(None, 16, logits=text)
    message = str(error.value)
    assert message.startswith("logits: got ")
    assert rule in message
    if mark is not None:
        *_, line, marked = message.splitlines()
        assert line.strip() == text
        assert marked[2:].startswith(mark)


@pytest.mark.parametrize(
    ("given_value", "rule"),
    [
        (3, "is no text and no function"),
        (lambda s, x: s + x, "are not names"),
        (lambda s: s if s > 0 else 0, "truth value"),
        (lambda s: math.tanh(s), "cannot be called with symbols"),
        (lambda s: [s + 1], "[s + 1] is no number of an expression"),
        (lambda s: sympy.tanh(s), "cannot be called with symbols"),
        (lambda s: s.tanh(), "numbers of expressions have no tanh"),
        (lambda s, h: s + torch.ones(4)[h], "tensors are arguments, which parameters= declares"),
        (lambda s, i: s + (1 if 0 <= i < 5 else 2), "join conditions by & | ~"),
        (lambda s: s + math.inf, "inf is no number of an expression"),
        (max, "does not name its arguments"),
    ],
)
def test_functions_that_are_refused(given_value: Any, rule: str) -> None:
    with pytest.raises(SpecError, match="logits: got"):
        mtagen.Spec(None, 16, logits=given_value)
    with pytest.raises(SpecError) as error:
        canonical("logits", given_value)
    assert rule in str(error.value)


def test_equal_expressions_are_one_spec() -> None:
    texts = ["50 * tanh(s / 50)", "50*tanh(s/50.0)", "tanh(0.02 * s) * 50", "100 * tanh(s / 50) / 2"]
    assert len({mtagen.Spec(None, 16, logits=text) for text in texts}) == 1
    capped = mtagen.Spec(None, 16, logits=lambda s: 50 * tanh(s / 50))  # noqa: F821, named by the language
    assert capped == mtagen.Spec(None, 16, logits=texts[0])
    assert mtagen.Spec(None, 16, logits="s + 0 * i") == mtagen.Spec(None, 16)
    assert mtagen.Spec(None, 16, logits="where(i < j, s, 1)") == mtagen.Spec(None, 16, logits="where(j > i, s, 1)")
    spec = mtagen.Spec(None, 16, logits=texts[0])
    assert mtagen.Spec.from_dict(spec.to_dict()) == spec
    assert mtagen.Spec(None, 16, logits=softcap(50)) == spec


@pytest.mark.parametrize("text", [alibi(16), "s + 2 * exp(h + 1) * (i - j)", "-s * exp(-(h + 1) * log(2)) * 3"])
def test_canonical_texts_stay(text: str) -> None:
    """Python groups a product's factors otherwise than sympy writes them."""
    for spec in (mtagen.Spec(None, 16, logits=text), mtagen.Spec((2, 2), 16, scores=text, logits=text)):
        assert mtagen.Spec.from_dict(spec.to_dict()) == spec


def test_functions_take_builtins_as_those_of_the_language() -> None:
    assert canonical("logits", lambda s, i, j: s + min(64, i - j) * 0.1) == "s + min(64, i - j)/10"
    assert canonical("logits", lambda s: abs(s)) == canonical("logits", "abs(s)")
    assert canonical("logits", lambda s: "tanh(s)") == "tanh(s)"


@pytest.mark.parametrize("number", [np.int64(3), np.float32(0.5), np.float64(0.1), Fraction(1, 4)], ids=repr)
def test_functions_may_have_numbers_of_any_type(number: Any) -> None:
    assert canonical("logits", lambda s: s * number + number) == canonical("logits", f"s * {number} + {number}")


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["s * log(i + 1) / 6", "s - exp(-h)", "s + tanh(j) + sqrt(i + j)"])
def test_functions_of_integers_have_the_dtype_of_scores(text: str, default: torch.dtype) -> None:
    place = {HEAD: 1, POSITION: 7, KEY: 3}
    values = {symbol: torch.tensor([x]) for symbol, x in place.items()} | {
        SCORE: torch.tensor([0.3], dtype=torch.float64)
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = evaluate(read("text", text), values).item()
    finally:
        torch.set_default_dtype(before)
    assert found == pytest.approx(float(read("text", text).subs(place | {SCORE: 0.3})), rel=1e-14)


@pytest.mark.parametrize(
    "text", ["where(j < 2, s, -1e30)", "min(s, 1e20)", "where(i < 1e30, s, 2)", "s + 0 / (1e30 - i)"]
)
def test_constants_of_more_than_64_bits(text: str) -> None:
    q = torch.randn(1, 2, 5, 16, dtype=torch.float64, requires_grad=True)
    op = mtagen.build(None, 16, logits=text, target="cpu", dtype="fp64")
    s = (q @ q.mT / 4).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    expected = (s.masked_fill(torch.arange(5) >= 2, -math.inf) if "j <" in text else s).softmax(-1) @ q
    torch.testing.assert_close(op(q, q, q), expected)
    (gradient,) = torch.autograd.grad(op(q, q, q).sum(), q)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), q)[0])


def where(*_: object) -> None:
    """Functions that expressions name like this get that of the language."""


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s, i, j: where((i - j) % 4 == 0, s, s - 2), "where((i - j) % 4 == 0, s, s - 2)"),
        (lambda s, i, j: where(i != j, s, s - 5), "where(i != j, s, s - 5)"),
        (lambda s, i, j: where(~(i // 16 == j // 16) | (j < 3), s, 1), "where(~(i // 16 == j // 16) | (3 > j), s, 1)"),
        (
            lambda s, i: 2 / (1 + s) - 3 * -(s**2) + 7 // (i + 1) - 9 % (i + 2),
            "2 / (1 + s) - 3 * -s**2 + 7 // (i + 1) - 9 % (i + 2)",
        ),
        (lambda s, i, t: where(i == 3, s + t[0], s + t[1]), "where(i == 3, s + t[0], s + t[1])"),
    ],
)
def test_operators_of_functions_are_those_of_texts(function: Any, text: str) -> None:
    """Equality, too, which is no comparison of how numbers are written."""
    parameters = read_parameters({"t": "2"})
    assert canonical("logits", function, parameters) == canonical("logits", text, parameters)


@pytest.mark.parametrize(
    ("text", "names", "of_distance"),
    [
        ("tanh(s)", "s", True),
        ("s - 0.1 * (h + 1) * (i - j)", "shij", True),
        ("where(j <= i, s, -s)", "sij", True),
        ("s + (i - j) // 3", "sij", True),
        ("s * log(i + 1)", "si", False),
        ("s + i * j", "sij", False),
        ("s + (i % 4)", "si", False),
    ],
)
def test_what_an_expression_reads(text: str, names: str, of_distance: bool) -> None:
    assert names_in(text) == set(names)
    assert is_of_distance(text) == of_distance


def value_of(text: str, scores: Tensor, positions: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
    return evaluate(read("logits", text), {SCORE: scores, POSITION: positions, KEY: keys, HEAD: heads})


def test_named_expressions() -> None:
    scores, places = torch.linspace(-90, 90, 7, dtype=torch.float64), torch.zeros(7, dtype=torch.int64)
    capped = value_of(softcap(30.0), scores, places, places, places)
    torch.testing.assert_close(capped, 30 * torch.tanh(scores / 30))
    heads = torch.arange(7)
    biased = value_of(alibi(8), scores, places + 5, places + 2, heads)
    torch.testing.assert_close(biased, scores - 3 * 2.0 ** -(heads + 1.0).double())
    for wrong in (0, -1.0, math.inf, math.nan, True, "50"):
        with pytest.raises(SpecError, match="cap: got"):
            softcap(wrong)
    for wrong in (0, True, 2.0):
        with pytest.raises(SpecError, match="heads: got"):
            alibi(wrong)


INTEGERS = st.deferred(
    lambda: st.one_of(
        st.integers(-9, 9).map(str),
        st.sampled_from(["i", "j", "h"]),
        st.tuples(INTEGERS, st.sampled_from(["+", "-", "*"]), INTEGERS).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        st.tuples(INTEGERS, st.sampled_from(["//", "%"]), st.integers(1, 9)).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        st.tuples(st.sampled_from(["min", "max"]), INTEGERS, INTEGERS).map(lambda x: f"{x[0]}({x[1]}, {x[2]})"),
    )
)
CONDITIONS = st.tuples(INTEGERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), INTEGERS).map(
    lambda x: f"({x[0]} {x[1]} {x[2]})"
)
NUMBERS = st.deferred(
    lambda: st.one_of(
        st.just("s"),
        st.just("s"),
        st.sampled_from(["0.5", "2", "0.125", "3"]),
        INTEGERS.map(lambda x: f"{x} / 8"),
        st.tuples(NUMBERS, st.sampled_from(["+", "-", "*"]), NUMBERS).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        st.tuples(NUMBERS, NUMBERS, NUMBERS).map(lambda x: f"(-{x[0]} * {x[1]} * {x[2]})"),
        NUMBERS.map(lambda x: f"tanh({x})"),
        NUMBERS.map(lambda x: f"exp(-abs({x}))"),
        NUMBERS.map(lambda x: f"log(1 + ({x}) ** 2)"),
        NUMBERS.map(lambda x: f"sqrt(2 + ({x}) ** 2)"),
        st.tuples(st.sampled_from(["min", "max"]), NUMBERS, NUMBERS).map(lambda x: f"{x[0]}({x[1]}, {x[2]})"),
        st.tuples(CONDITIONS, NUMBERS, NUMBERS).map(lambda x: f"where({x[0]}, {x[1]}, {x[2]})"),
    )
)


def in_python(text: str, **places: float) -> float:
    """The value of a text by Python's own evaluation."""
    names = {name: getattr(math, name) for name in ("tanh", "exp", "log", "sqrt", "floor")}
    names |= {"min": min, "max": max, "abs": abs, "where": lambda condition, x, y: x if condition else y}
    return float(eval(text, {"__builtins__": {}}, names | places))


def shaped(*values: float) -> dict[Any, Tensor]:
    score, *places = values
    integers = zip((POSITION, KEY, HEAD), map(torch.tensor, places), strict=True)
    return {SCORE: torch.tensor(score, dtype=torch.float64), **dict(integers)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(NUMBERS, st.floats(-4, 4), st.integers(0, 20), st.integers(0, 20), st.integers(0, 7))
def test_random_expressions(text: str, s: float, i: int, j: int, h: int) -> None:
    """A text survives writing; its value is Python's; its derivative is that of differences."""
    if len(text) > 150:
        return
    try:
        expected = in_python(text, s=s, i=i, j=j, h=h)
    except OverflowError:
        return
    expr = read("text", text)
    settled = canonical("text", text) or "s"
    assert canonical("text", settled) == (None if settled == "s" else settled)
    assert evaluate(read("text", settled), shaped(s, i, j, h)).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    values = shaped(s, i, j, h)
    assert evaluate(expr, values).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    step = 1e-6
    left, right = (in_python(text, s=s + d, i=i, j=j, h=h) for d in (-step, step))
    slope = evaluate(sympy.diff(expr, SCORE), values).item()
    sides = (expected - left) / step, (right - expected) / step
    if abs(sides[0] - sides[1]) < 1e-3 * (1 + abs(slope)):  # no kink here
        assert slope == pytest.approx((right - left) / (2 * step), rel=1e-3, abs=1e-3)


PIPELINES = {
    "plain": {"kernel": None},
    "convolution": {"kernel": (3, 4)},
    "all keys": {"kernel": (3, 4), "causal": False},
    "window": {"kernel": (3, 4), "window": (5, -1)},
    "every stage": {"kernel": (2, 3), "mixed_heads": 2, "post_kernel": (2, 2), "post_mixed_heads": 4},
    "mixing in a window": {"kernel": None, "mixed_heads": 4, "causal": False, "window": (7, 2)},
    "output": {"kernel": (3, 4), "causal": False, "mask": "output", "window": (4, 3)},
}
LOGITS = {
    "softcap": softcap(3),
    "alibi": alibi(4),
    "places": "s * log(i + 2) / 2 + min(3, i - j) * s / 8",
    "where": "where((i - j) // 3 == 1, s, -abs(s))",
    "sigmoid": "1 / (1 + exp(-s))",
    "quotients": "s / (h + 1) + 2 / (1 + abs(i - j)) ** 2",
}


def inputs(spec: mtagen.Spec, heads: int = 4) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    q = torch.randn(2, heads, 13, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 17, 16, dtype=torch.float64)
    weights = {name: torch.randn(shape, dtype=torch.float64) / 3 for name, shape in spec.weights(heads).items()}
    return [q, k, v], weights


def rules(spec: mtagen.Spec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("causal", "window", "mask", "logits")}


@pytest.mark.parametrize("text", LOGITS.values(), ids=LOGITS.keys())
@pytest.mark.parametrize("options", PIPELINES.values(), ids=PIPELINES.keys())
def test_cpu_op(options: dict[str, Any], text: str) -> None:
    """Outputs, log-sum-exps, gradients and decode steps are those of the reference."""
    op = mtagen.build(head_dim=16, logits=text, dtype="fp64", backend="torch", **options)
    spec = op.plan.spec
    tensors, weights = inputs(spec)
    douts, dlses = torch.randn(2, 4, 13, 16, dtype=torch.float64), torch.randn(2, 4, 13, dtype=torch.float64)
    results = []
    for call in (op, lambda *x, **others: mtagen.reference(*x, **others, **rules(spec))):
        given_tensors = [x.clone().requires_grad_() for x in (*tensors, *weights.values())]
        named = dict(zip(weights, given_tensors[3:], strict=True))
        out, lse = call(*given_tensors[:3], **named, return_lse=True)
        loss = (out * douts).sum() + (torch.where(lse.isfinite(), lse, 0) * dlses).sum()
        results.append((out, lse, *torch.autograd.grad(loss, given_tensors)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    if spec.right == 0:
        last = op.decode(tensors[0][:, :, -spec.context - 2 :], *tensors[1:], **weights)
        torch.testing.assert_close(last, results[1][0][:, :, -2:], rtol=1e-9, atol=1e-9)


def test_documents_count_their_own_positions() -> None:
    op = mtagen.build((2, 3), head_dim=16, logits=LOGITS["places"], dtype="fp64", backend="torch")
    (q, k, v), weights = inputs(op.plan.spec)
    k, v = k[:, :, :13], v[:, :, :13]
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 13, 26], dtype=torch.int32)
    out = op.varlen(*packed, **weights, cu_seq_q=ends, cu_seq_k=ends, max_q=13, max_k=13)
    torch.testing.assert_close(out.view(2, 13, 4, 16).transpose(1, 2), op(q, k, v, **weights))


@pytest.mark.parametrize("options", [{"kernel": (3, 4)}, {"kernel": None, "mixed_heads": 2}])
def test_hidden_slopes_reach_nothing(options: dict[str, Any]) -> None:
    """Where a key is hidden the expression may be infinite or NaN: log of a negative distance."""
    op = mtagen.build(head_dim=16, logits="s * log(i - j + 1) + sqrt(i - j)", dtype="fp64", backend="torch", **options)
    tensors, weights = inputs(op.plan.spec)
    results = []
    for call in (op, lambda *x, **others: mtagen.reference(*x, **others, **rules(op.plan.spec))):
        given_tensors = [x.clone().requires_grad_() for x in (*tensors, *weights.values())]
        out = call(*given_tensors[:3], **dict(zip(weights, given_tensors[3:], strict=True)))
        results.append((out, *torch.autograd.grad(out.square().sum(), given_tensors)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


SCORE_MODS = {
    "softcap": (softcap(2), lambda s, b, h, i, j: 2 * torch.tanh(s / 2)),
    "alibi": (alibi(4), lambda s, b, h, i, j: s - torch.exp2(-2.0 * (h + 1)) * (i - j)),
    "relative": ("s + (i - j)", lambda s, b, h, i, j: s + (i - j)),
    "clipped": ("s + min(4, i - j) / 8", lambda s, b, h, i, j: s + torch.clamp(i - j, max=4) / 8),
    "parity": ("where(i % 2 == j % 2, s, s / 2)", lambda s, b, h, i, j: torch.where(i % 2 == j % 2, s, s / 2)),
    "temperature": ("s * log(i + 2)", lambda s, b, h, i, j: s * torch.log(i + 2.0)),
}


@pytest.mark.parametrize(("text", "modification"), SCORE_MODS.values(), ids=SCORE_MODS.keys())
def test_flex_attention_agrees(text: str, modification: Any) -> None:
    """PyTorch's FlexAttention has the same outputs with the same function. On CPUs it has no gradients."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 16, 16)
    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    op = mtagen.build(None, head_dim=16, logits=text, backend="torch")
    expected = flex_attention(q, k, v, score_mod=modification, block_mask=mask)
    torch.testing.assert_close(op(q, k, v), expected, rtol=1e-4, atol=1e-5)


PRINTED = [
    *LOGITS.values(),
    "50 * tanh(s / 50)",
    "min(max(s, -2), 3) - sqrt(1 + s ** 2) / 3",
    "s ** 3 / 8 - (i - j) ** 2 / 100 + (i - j + h) // 3",
    "where((i % 4 == j % 4) | ~(s < 1) & (h != 2), exp(-abs(s)), log(2 + s ** 2)) * exp(1)",
    "s - 0.7 * (i - j) + 3 * i * j / 1000",
    "s / (1 + exp(-s)) ** 2 / sqrt(2 + abs(s)) ** 3",
    "max(i - j, 3) * s + min(j // 2, h, i)",
]


def points() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(200) * 2, *(torch.randint(0, n, (200,)) for n in (100_000, 100_000, 8))


def expected_of(expr: Any) -> Tensor:
    scores, *places = points()
    values = {SCORE: scores.double(), **dict(zip((POSITION, KEY, HEAD), places, strict=True))}
    return evaluate(expr, values).expand(200)


def both(text: str) -> list[Any]:
    expr = read("text", text)
    return [expr, sympy.diff(expr, SCORE)]


@pytest.mark.parametrize("text", PRINTED)
def test_printed_triton(text: str) -> None:
    """The text, with PyTorch's functions in the place of Triton's. Like Triton, it divides toward zero."""

    class Int(Tensor):
        def __floordiv__(self, other: Any) -> Any:
            return torch.div(self, other, rounding_mode="trunc")

        def __mod__(self, other: Any) -> Any:
            return torch.fmod(self, other)

    def extremum(function: Any) -> Any:
        return lambda x, y, propagate_nan=None: function(*torch.broadcast_tensors(*map(torch.as_tensor, (x, y))))

    tl = SimpleNamespace(
        exp=torch.exp,
        log=torch.log,
        sqrt=torch.sqrt,
        where=torch.where,
        minimum=extremum(torch.minimum),
        maximum=extremum(torch.maximum),
        PropagateNan=SimpleNamespace(ALL=None),
        int64=torch.int64,
        float32=torch.float32,
    )
    scores, *places = points()
    names = dict(zip("sijh", (scores, *(x.int().as_subclass(Int) for x in places)), strict=True))
    for expr in both(text):
        value = eval(triton_expression(expr), {"tl": tl, "_tanh": torch.tanh} | names)
        got = torch.as_tensor(value).as_subclass(Tensor).double().expand(200)
        torch.testing.assert_close(got, expected_of(expr), rtol=3e-5, atol=3e-5)


@needs_compiler
def test_printed_c(tmp_path: Path) -> None:
    """The text, compiled with the functions of kernels."""
    header = (Path(mtagen.__file__).parent / "templates/cuda/expressions.cuh").read_text(encoding="utf-8")
    functions = "".join(line for line in header.splitlines(keepends=True) if not line.startswith("#"))
    exprs = [expr for text in PRINTED for expr in both(text)]
    source = [
        "#include <cmath>",
        "#define DEVICE static inline",
        "constexpr float LOG2_E = 1.4426950408889634f;",
        "static float exp2_fast(float x) { return exp2f(x); }",
        "static float __fdividef(float a, float b) { return a / b; }",
        functions,
        *(
            f'extern "C" void f{n}(const float* score, const int* position, const int* key, const int* head, '
            "float* out) {\n  for (int n = 0; n < 200; ++n) {\n"
            "    const float s = score[n]; const int i = position[n], j = key[n], h = head[n];\n"
            f"    out[n] = {c_expression(expr)};\n  }}\n}}"
            for n, expr in enumerate(exprs)
        ),
    ]
    library = tmp_path / "printed.so"
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input="\n".join(source), text=True, check=True)
    compiled = ctypes.CDLL(str(library))
    scores, *places = points()
    arguments = [scores, *(x.int() for x in places)]
    for n, expr in enumerate(exprs):
        out = torch.empty(200)
        compiled[f"f{n}"](*(ctypes.c_void_p(x.data_ptr()) for x in (*arguments, out)))
        torch.testing.assert_close(out.double(), expected_of(expr), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("text", PRINTED)
def test_parts_of_the_head(text: str) -> None:
    """Functions that name parts are the expression and its derivative, in a kernel that holds four times the score."""
    scores, *places = points()
    symbols = (stage.SCORE, stage.POSITION, stage.KEY, stage.HEAD)
    expr = read("text", text).xreplace(dict(zip((SCORE, POSITION, KEY, HEAD), symbols, strict=True)))
    function = stage.ScoreStage(Mask.of(mtagen.Spec(None, 16)), expr).function_of_any_unit
    values = dict(zip(symbols[1:], places, strict=True))
    values |= {stage.SCORE: 4 * scores.double(), stage.DISTANCE: (places[0] - places[1]).double()}
    for symbol, number in (
        (stage.GRADIENT, 3.0),
        (stage.EXPONENT, 0.25 / math.log(2)),
    ):
        values[symbol] = torch.tensor(number, dtype=torch.float64)
    for symbol, part in function.parts:
        assert part.free_symbols <= {stage.HEAD, stage.EXPONENT}
        values[symbol] = evaluate(part, values)
    value = evaluate(function.modify * function.exponent, values) * math.log(2)
    torch.testing.assert_close(value.expand(200), expected_of(read("text", text)), rtol=1e-9, atol=1e-9)
    split = evaluate(function.rest * function.exponent + sympy.Add(*function.added), values) * math.log(2)
    torch.testing.assert_close(split.expand(200), value.expand(200), rtol=1e-9, atol=1e-9)
    gradient = evaluate(function.modify_backward, values).expand(200)
    expected = 3 * expected_of(sympy.diff(read("text", text), SCORE))
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def test_no_part_stays_in_a_function() -> None:
    """What is left of ALiBi is a product and a difference, and of a soft-cap two products and a tanh."""
    score, first = stage.SCORE, sympy.Symbol("part0", real=True)
    function = score_function(mtagen.Spec(None, 16, logits=alibi(8)))
    assert (function.modify, function.exponent) == (score - first * stage.DISTANCE, stage.EXPONENT)
    function = score_function(mtagen.Spec(None, 16, logits=softcap(50)))
    assert (function.modify, function.exponent) == (50 / sympy.log(2) * stage.FastTanh(first * score), 1)
    assert function.parts == ((first, stage.EXPONENT * sympy.log(2) / 50),)


def test_what_places_add() -> None:
    """It is split by what it depends on. Only what is costly or read from memory is shared."""
    log2e, places = 1 / sympy.log(2), {stage.POSITION, stage.KEY, stage.DISTANCE}
    names = {"gates": "b,h,j", "table": "h,9", "pairs": "h,i,j"}
    logits = "50 * tanh(s / 50) + (i - j) / 4 + gates[b, h, i] - gates[b, h, j] + table[h, max(0, min(8, i - j))]"
    function = score_function(mtagen.Spec(None, 16, logits=f"{logits} + pairs[h, i, j]", parameters=names))
    assert function.shares_keys
    assert function.shares_distances
    assert not function.growth
    of_key, of_position, of_distance = function.added
    assert of_key.free_symbols & places == {stage.KEY}
    assert of_position.free_symbols & places == {stage.POSITION}
    assert of_distance.has(stage.DISTANCE)
    assert {str(entry.args[0]) for entry in function.rest.atoms(stage.Entry)} == {"pairs_view"}
    for text, growth in (("s - (i - j) / 4", log2e / 4), ("s / 2 + 3 * j - i**2", 3 * log2e), ("s + i - j", 0)):
        function = score_function(mtagen.Spec(None, 16, logits=text))
        assert (function.shares_keys, function.shares_distances, function.growth) == (False, False, growth)
    function = score_function(mtagen.Spec(None, 16, logits="s + bias[j]", parameters={"bias": "j"}))
    assert (function.shares_keys, function.shares_distances) == (True, False)
    assert not score_function(mtagen.Spec(None, 16, logits="s * (1 + j)")).growth


@pytest.mark.parametrize(
    ("logits", "distance"),
    [
        ("s + table[h, max(0, min(8, i - j))]", 8),
        ("s + 2 * table[h, 0] * table[h, min(8, abs(i - j))] + min(20, i - j) / 4", 20),
        ("s + table[h, where(i - j < 30, max(0, min(8, i - j)), 3)]", 30),
        ("s + table[h, where(i - j >= 30, 3, max(0, min(8, i - j)))]", 30),
        ("s + table[h, max(0, min(8, i - j))] + (i - j) / 4", None),
        ("s + table[h, max(0, min(8, i - j))] * log(1 + abs(i - j))", None),
        ("s + table[h, max(0, min(8, 60 - i + j))]", 60),
        ("s + table[h, min(8, j)]", None),
    ],
)
def test_distance_from_which_on_all_add_the_same(logits: str, distance: int | None) -> None:
    assert score_function(mtagen.Spec(None, 16, logits=logits, parameters={"table": "h,9"})).same_from == distance


def test_tanh_is_fast_in_bf16_only() -> None:
    """The GPU's instruction errs by 2^-11, which is less than the rounding of bf16, and more than that of fp16."""
    for dtype, fast in (("bf16", True), ("fp16", False)):
        function = score_function(mtagen.Spec(None, 16, logits=softcap(50), dtype=dtype))
        for expr in (function.modify, function.modify_backward):
            assert expr.has(stage.FastTanh) == fast
            assert expr.has(sympy.tanh) != fast


@pytest.mark.parametrize("stages", [{"kernel": (3, 4)}, {"kernel": None, "mixed_heads": 4}], ids=str)
@pytest.mark.parametrize(("backend", "exponential"), [("cuda", "exp_of("), ("triton", "tl.exp(")])
def test_kernels_compute_parts_once(backend: str, exponential: str, stages: dict[str, Any]) -> None:
    """A file names the slope's exponential in one place, which is not the function of a score."""
    made = mtagen.plan(mtagen.Spec(head_dim=64, logits=alibi(8), **stages), "sm_90a", backend)
    found = 0
    for file, text in render(made).files.items():
        if (exponential in text) and (file.endswith(".py") == (backend == "triton")):
            line = next(line for line in text.splitlines() if exponential in line and "DEVICE" not in line)
            assert text.count(line) == 1
            assert line.lstrip().startswith("part0(" if backend == "cuda" else "return (head, ")
            found += 1
    assert found
