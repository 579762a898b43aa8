"""Printed text: how it reads, and that its value is the expression's under each language's division."""

import ast
import random
from types import SimpleNamespace

import pytest
import sympy
from sympy import Max, Min, ceiling, floor

from mtagen.codegen.printers import (
    Source,
    c_code,
    c_real_code,
    python_code,
    triton_code,
    triton_host_code,
    triton_real_code,
)
from mtagen.planner.geometry.loops import BLOCK_M, BLOCK_N, key_loop, row_loop
from mtagen.planner.geometry.mask import Mask

X, Y = sympy.symbols("x y", integer=True)
N, M = sympy.symbols("n m", integer=True, nonnegative=True)
B = sympy.Symbol("BLOCK", integer=True, positive=True)
CAUSAL = Mask(None, 0)

EXPRESSIONS = [
    sympy.Integer(-3),
    X - Y - 2,
    -X,
    -2 * X * Y,
    X * (X - Y),
    2 - 3 * (X - Y) ** 2,
    Min(X, Y, 7),
    Max(X - 1, -Y),
    floor(N / B),
    B * floor(N / B),
    -B * floor(N / B) - X,
    floor(N / 4) * floor(M / B) + X,
    floor((N + 5) / B),
    floor(N * M / (B + 1)),
    floor(floor(N / 3) / B),
    floor(N / 3 + M / 2),
    2 * ceiling(N / B) * B,
    X - ceiling((N + M) / 16),
    ceiling(2 * B * floor(N / B) / (B + 2)),
    *(position for width in (0, 10) for position in key_loop(CAUSAL, band=width)),
    *(position for width in (0, 10) for position in row_loop(CAUSAL, 64, BLOCK_N, width)),
]
SIGNED_QUOTIENTS = [floor(X / B), ceiling(X / B), -floor((X - Y) / 3), ceiling(-X * Y / B) + 1]


def c_divide(a, b):
    """Integer division as C and Triton do it: toward zero."""
    return abs(a) // b * (1 if a >= 0 else -1)


class _TruncatingDivision(ast.NodeTransformer):
    def visit_BinOp(self, node):
        self.generic_visit(node)
        if not isinstance(node.op, ast.FloorDiv):
            return node
        return ast.copy_location(ast.Call(ast.Name("c_divide", ast.Load()), [node.left, node.right], []), node)


def evaluate_as_triton(text, values):
    tree = ast.fix_missing_locations(_TruncatingDivision().visit(ast.parse(text, mode="eval")))
    tl = SimpleNamespace(
        minimum=lambda a, b: min(a, b),
        maximum=lambda a, b: max(a, b),
        cdiv=lambda a, b: c_divide(a + (b - 1), b),
    )
    return eval(compile(tree, text, "eval"), {"tl": tl, "c_divide": c_divide} | values)


class _Quotient(ast.NodeTransformer):
    """C's ``/`` of ints, as Python parses it."""

    def visit_Div(self, node):
        return ast.copy_location(ast.FloorDiv(), node)


def evaluate_as_c(text, values):
    """C's operators and ``min`` and ``max`` of two, in Python's syntax but for ``/``, which truncates."""
    tree = _TruncatingDivision().visit(_Quotient().visit(ast.parse(text, mode="eval")))
    functions = {"min": lambda a, b: min(a, b), "max": lambda a, b: max(a, b), "c_divide": c_divide}
    return eval(compile(ast.fix_missing_locations(tree), text, "eval"), functions | values)


def samples(expr, count=25):
    rng = random.Random(str(expr))
    for _ in range(count):
        yield {
            symbol: rng.randint(1, 9) if symbol.is_positive else rng.randint(0 if symbol.is_nonnegative else -40, 40)
            for symbol in sorted(expr.free_symbols, key=str)
        }


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=str)
def test_triton_text_has_the_value_of_the_expression(expr):
    text = triton_code(expr)
    for point in samples(expr):
        values = {symbol.name: value for symbol, value in point.items()}
        assert evaluate_as_triton(text, values) == expr.subs(point)


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=str)
def test_c_text_has_the_value_of_the_expression(expr):
    text = c_code(expr)
    assert "//" not in text  # a comment
    for point in samples(expr):
        values = {symbol.name: value for symbol, value in point.items()}
        assert evaluate_as_c(text, values) == expr.subs(point)


@pytest.mark.parametrize("printer", [python_code, triton_host_code])
@pytest.mark.parametrize("expr", EXPRESSIONS + SIGNED_QUOTIENTS, ids=str)
def test_python_text_has_the_value_of_the_expression(expr, printer):
    text = printer(expr)
    triton = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    for point in samples(expr):
        values = {symbol.name: value for symbol, value in point.items()}
        assert eval(text, {"triton": triton} | values) == expr.subs(point)


@pytest.mark.parametrize(
    ("expr", "triton", "python", "c"),
    [
        (B * floor(N / B), "n // BLOCK * BLOCK", "n // BLOCK * BLOCK", "n / BLOCK * BLOCK"),
        (ceiling(N / B), "tl.cdiv(n, BLOCK)", "-(-n // BLOCK)", "(n + BLOCK - 1) / BLOCK"),
        (
            Max(0, X - B + 1),
            "tl.maximum(0, x + 1 - BLOCK)",
            "max(0, x + 1 - BLOCK)",
            "max(0, x + 1 - BLOCK)",
        ),
        (Min(X, Y, 3), "tl.minimum(3, tl.minimum(x, y))", "min(3, x, y)", "min(3, min(x, y))"),
        (floor((N + 1) / (2 * B)), *3 * ["(n + 1) // (2 * BLOCK)"]),
        (-(X**2), *3 * ["-(x * x)"]),
        (5, *3 * ["5"]),
    ],
)
def test_text_reads_as_written_by_hand(expr, triton, python, c):
    assert triton_code(expr) == triton
    assert python_code(expr) == python
    assert c_code(expr) == c.replace("//", "/")


def test_ceilings_in_host_code_of_triton_modules():
    assert triton_host_code(X * ceiling((N + 3) / B)) == "triton.cdiv(n + 3, BLOCK) * x"


def test_source_is_printed_as_it_is():
    """It may be a sum, so it stands in parentheses wherever something is done with it."""
    row, limit = Source("warp * 16 + lane"), Source("n_k - 1")
    for printer in (c_code, python_code, triton_code):
        assert printer(row + 1) == "(warp * 16 + lane) + 1"
        assert printer(3 * row) == "3 * (warp * 16 + lane)"
        assert printer(X - limit) == "x - (n_k - 1)"
        assert printer(row) == "warp * 16 + lane"
        assert printer(1 + Source("lane")) == "lane + 1"
    assert row == Source("warp * 16 + lane") != limit
    values = {"warp": 3, "lane": 5, "n_k": 40, "x": 7}
    assert eval(python_code(X - 2 * row - limit), values) == 7 - 2 * 53 - 39


def test_loops_of_the_paper_setting():
    keys, rows = key_loop(CAUSAL, band=10), row_loop(CAUSAL, band=10)
    assert triton_code(keys.interior_end) == "tl.maximum(0, tl.minimum(n_k, i0 + off - 9)) // BLOCK_N * BLOCK_N"
    assert triton_code(keys.end) == "tl.maximum(0, tl.minimum(n_k, i0 + off + BLOCK_M))"
    assert triton_code(rows.begin) == "tl.maximum(0, j0 - off) // BLOCK_M * BLOCK_M"
    assert triton_code(rows.interior_begin) == (
        "tl.minimum(n_q, tl.cdiv(tl.maximum(0, j0 + BLOCK_N + 9 - off), BLOCK_M) * BLOCK_M)"
    )
    assert triton_code(BLOCK_M) == "BLOCK_M"


@pytest.mark.parametrize(
    "expr",
    [
        X / 2,
        X / B,
        2.0 * X,
        sympy.Rational(1, 2),
        sympy.pi,
        X**Y,
        sympy.Symbol("real"),
        sympy.Symbol("not a name", integer=True),
        floor(X / Y),
        floor(sympy.sqrt(N)),
        sympy.oo,
        sympy.Mod(X, 3),
        X < Y,
    ],
    ids=str,
)
@pytest.mark.parametrize("printer", [triton_code, triton_host_code, python_code, c_code])
def test_what_is_not_exact_is_refused(printer, expr):
    with pytest.raises(ValueError, match="legal: integers, real symbols"):
        printer(expr)


@pytest.mark.parametrize("printer", [triton_code, c_code])
@pytest.mark.parametrize("expr", SIGNED_QUOTIENTS, ids=str)
def test_numerators_that_may_be_negative_are_refused_where_division_truncates(expr, printer):
    with pytest.raises(ValueError, match="may have a negative numerator"):
        printer(expr)


S, F = sympy.symbols("s f", real=True)
REAL = [  # an expression, and how it reads in C and in Triton
    (S, "s", "s"),
    (X * (Y - 2) + S / 8, "0.125f * s + x * (y - 2)", "0.125 * s + x * (y - 2)"),
    (S / 10**20 - sympy.Rational(10), "1e-20f * s - 10.f", "1e-20 * s - 10.0"),
    (S * F / X, "1.f / x * f * s", "1.0 / x * f * s"),
    (
        50 / F * sympy.tanh(F * S / 50),
        "50.f / f * tanhf(0.02f * f * s)",
        "50.0 / f * (2.0 * tl.sigmoid(0.04 * f * s) - 1.0)",
    ),
    (
        S * (1 - sympy.tanh(S) ** 2),
        "(1.f - tanhf(s) * tanhf(s)) * s",
        "(1.0 - (2.0 * tl.sigmoid(2.0 * s) - 1.0) * (2.0 * tl.sigmoid(2.0 * s) - 1.0)) * s",
    ),
]


@pytest.mark.parametrize(("expr", "c", "triton"), REAL, ids=str)
def test_real_expressions(expr, c, triton):
    assert (c_real_code(expr), triton_real_code(expr)) == (c, triton)


@pytest.mark.parametrize("expr", [sympy.sqrt(S), sympy.sin(S), S**X], ids=str)
def test_real_expressions_that_cannot_be_printed(expr):
    for code in (c_real_code, triton_real_code):
        with pytest.raises(ValueError, match="expr"):
            code(expr)
