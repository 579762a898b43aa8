"""Expressions at three places, the tensors that they read, and sinks: the op of PyTorch ops against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mtagen
from mtagen import InputError, SpecError
from mtagen.call import INPUTS
from mtagen.evaluate import evaluate
from mtagen.expressions import clipped, forget, t5, temperature
from mtagen.expressions.language import HEAD, KEY, POSITION, SCORE, Load, read
from mtagen.expressions.parameters import Parameter, read_parameters
from mtagen.expressions.ranges import range_of
from mtagen.measure.judge import documents_op
from mtagen.nn import MultiTokenAttention
from mtagen.spec import Spec

HEADS, KV_HEADS, DIM = 4, 2, 16
EXPRESSIONS: dict[str, dict[str, Any]] = {
    "slopes": {"logits": "s - slopes[h] * (i - j)", "parameters": {"slopes": "h"}},
    "table": {"logits": clipped(8), "parameters": {"table": "h,9"}},
    "T5": {"logits": t5(8, 20), "parameters": {"table": "h,8"}},
    "gates": {"logits": forget(), "parameters": {"gates": "b,h,i"}},
    "temperature": {"logits": temperature(), "parameters": {"factors": "h"}},
    "one number": {"logits": "s * t * log(i + 2)", "parameters": {"t": ""}},
    "two axes of a table": {"logits": "s + t[h, 1, min(3, abs(i - j))]", "parameters": {"t": "h,2,4"}},
    "of entries": {"logits": "s * t[b] + u[b, h]", "parameters": {"t": "b", "u": "b,h"}},
    "pairs": {"logits": "s + pair[b, h, i, j]", "parameters": {"pair": "b,h,i,j"}},
    "a table of all heads": {"logits": "s + t[min(6, abs(i - j))]", "parameters": {"t": "7"}},
    "keys of all heads and entries": {"logits": "s * t[j] + u[2]", "parameters": {"t": "j", "u": "3"}},
    "sink": {"sink": True},
    "before the convolution": {"scores": "3 * tanh(s / 3) + 1"},
    "before the mixture": {"convolved": "tanh(s) - t[h] * (i - j)", "parameters": {"t": "h"}},
    "all": {
        "scores": "tanh(s) + table[h, max(0, min(8, i - j + 2))]",
        "convolved": "s * t",
        "logits": "s - slopes[h] * (i - j)",
        "parameters": {"table": "h,9", "t": "", "slopes": "h"},
        "sink": True,
    },
}
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "a convolution": {"kernel": (3, 5)},
    "all stages": {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 4},
    "in a window": {"kernel": (3, 5), "window": (5, 1), "causal": False},
    "masked by outputs": {"kernel": (4, 3), "mask": "output"},
}


class Problem:
    """An op, and fp64 arguments of a call."""

    def __init__(self, options: dict[str, Any], batch: int = 2, nq: int = 30, nk: int = 37) -> None:
        generator = torch.Generator().manual_seed(0)
        self.op = mtagen.build(head_dim=DIM, target="cpu", dtype="fp64", **options)
        spec = self.op.plan.spec
        sizes = {"B": batch, "H": HEADS, "Hkv": KV_HEADS, "Nq": nq, "Nk": nk, "D": DIM, "DV": DIM}
        self.tensors = {
            x.name: torch.randn(x.extents(sizes), dtype=torch.float64, generator=generator).requires_grad_()
            for x in spec.arguments
        }
        names = [name for name, _ in spec.parameters]
        self.parameters = {name: self.tensors[name] for name in names} or None
        self.call = {name: x for name, x in self.tensors.items() if name not in names} | {"parameters": self.parameters}
        rules = ("causal", "window", "mask", "scores", "convolved", "logits")
        self.rules = {name: options[name] for name in rules if name in options}

    def reference(self, **call: Any) -> tuple[Tensor, Tensor]:
        return mtagen.reference(**call, **self.rules, return_lse=True)

    def gradients(self, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Of a function of the output and of log-sum-exps that are finite."""
        loss = out.square().sum() + torch.where(lse == -math.inf, 0.0, lse.masked_fill(lse == -math.inf, 0)).sum()
        return [*torch.autograd.grad(loss, [*self.tensors.values()], materialize_grads=True)]


def options_of(expression: str, pipeline: str) -> dict[str, Any]:
    return PIPELINES[pipeline] | EXPRESSIONS[expression]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("sizes", [(30, 37), (1, 1), (9, 5)])
def test_equals_reference(expression: str, pipeline: str, sizes: tuple[int, int]) -> None:
    if expression == "pairs" and sizes[0] > sizes[1]:
        pytest.skip("a parameter of pairs has no entries for queries before the first key")
    problem = Problem(options_of(expression, pipeline), nq=sizes[0], nk=sizes[1])
    got, expected = problem.op(**problem.call, return_lse=True), problem.reference(**problem.call)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    gradients = zip(problem.tensors, problem.gradients(*got), problem.gradients(*expected), strict=True)
    for name, ours, theirs in gradients:
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "expression", [name for name in EXPRESSIONS if name not in ("pairs", "keys of all heads and entries")]
)
def test_packed_documents(expression: str) -> None:
    """Each document reads its own tokens and its own entry; rows and tokens behind the last may hold anything."""
    options = options_of(expression, "all stages")
    op = mtagen.build(head_dim=DIM, target="cpu", dtype="fp64", **options)
    spec, lengths = op.plan.spec, ([7, 0, 9, 4], [7, 3, 5, 0])
    generator = torch.Generator().manual_seed(0)
    sizes = {"H": HEADS, "Hkv": KV_HEADS, "D": DIM, "DV": DIM, "documents": 4}
    sizes |= {"total_q": sum(lengths[0]), "total_k": sum(lengths[1])}
    shapes = {x.name: x.extents(sizes) for x in spec.packed_learned_arguments}
    shapes |= {"q": (sizes["total_q"], HEADS, DIM), "k": (sizes["total_k"], KV_HEADS, DIM)}
    shapes |= {"v": shapes["k"]} | spec.weights(HEADS)
    tensors = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }
    parameters = {name: tensors[name] for name, _ in spec.parameters}
    call = {name: x for name, x in tensors.items() if name not in parameters} | {"parameters": parameters or None}
    cu_seq_q, cu_seq_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in lengths)
    got = op.varlen(**call, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=9, max_k=7, return_lse=True)
    rules = {name: options[name] for name in ("scores", "convolved", "logits") if name in options}

    def eager(*qkv: Tensor, document: int, **others: Any) -> Any:
        return mtagen.reference(*qkv, **others, **rules, return_lse=True)

    expected = documents_op(eager, *lengths, dict(spec.parameters))(**call)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    grads = [
        torch.autograd.grad(
            out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum(), [*tensors.values()], materialize_grads=True
        )
        for out, lse in (got, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_decode_reads_what_is_in_use(expression: str) -> None:
    """Entries of tokens that are not in use may hold anything."""
    problem = Problem(options_of(expression, "all stages"), nq=8, nk=12)
    with torch.no_grad():
        call = dict(problem.call)
        context, lengths = problem.op.plan.spec.context, torch.tensor([12, 7], dtype=torch.int32)
        q = call.pop("q")[:, :, -context - 2 :]
        k, v = call.pop("k"), call.pop("v")
        axes = dict(problem.op.plan.spec.parameters)
        stale = {
            name: x.index_fill(x.ndim - 1, torch.arange(7, 12), math.nan) if axes[name].endswith(("i", "j")) else x
            for name, x in (problem.parameters or {}).items()
        }
        call["parameters"] = stale or None
        options = _entry(call, axes) | {"cache_seqlens": lengths[1:], "return_lse": True}
        out, lse = problem.op.decode(q[1:], k[1:], v[1:], **options)
        whole = _entry(dict(problem.call), axes, 7)
        for name in ("q", "k", "v"):
            whole.pop(name, None)
        expected = problem.reference(q=q[1:], k=k[1:, :, :7], v=v[1:, :, :7], **whole)
    torch.testing.assert_close((out, lse), tuple(x[:, :, -2:] for x in expected), rtol=1e-9, atol=1e-9)


def _entry(call: dict[str, Any], axes: dict[str, str], tokens: int | None = None) -> dict[str, Any]:
    """The arguments for batch entry 1 alone, with its first tokens."""
    parameters = {}
    for name, x in (call.get("parameters") or {}).items():
        letters = axes[name].split(",")
        x = x[1:2] if "b" in letters else x
        for axis, letter in enumerate(letters):
            x = x.narrow(axis, 0, tokens) if letter in ("i", "j") and tokens else x
        parameters[name] = x
    return call | {"parameters": parameters or None}


CONSTANT = {
    "logits": "s * c[h] + t[b, h, j] + d[b, h, i, j]",
    "parameters": {"c": "h", "t": "b,h,j", "d": "b,h,i,j"},
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_constants(pipeline: str) -> None:
    """Other gradients keep their bits."""
    learned, op = (
        mtagen.build(head_dim=DIM, target="cpu", dtype="fp64", **PIPELINES[pipeline], **CONSTANT, constants=constants)
        for constants in ((), ("d", "c", "c"))
    )
    assert op.plan.spec.constants == ("c", "d")
    call = Problem(PIPELINES[pipeline] | CONSTANT).call
    of_constants = {name: x.detach() if name != "t" else x for name, x in call["parameters"].items()}
    leaves = [x for x in call.values() if isinstance(x, Tensor)] + [call["parameters"]["t"]]
    grads = [
        torch.autograd.grad(one(**call | {"parameters": given}).square().sum(), leaves)
        for one, given in ((learned, call["parameters"]), (op, of_constants))
    ]
    assert all(map(torch.equal, *grads))


def test_constants_of_registered_ops() -> None:
    """Gradients of constants have no entries, in traces and in calls; those of other tensors keep their places."""
    problem = Problem({"kernel": (3, 5), "constants": ("c", "d"), **CONSTANT}, nq=5, nk=6)
    q, k, v, weight, *given = (x.detach() for x in problem.tensors.values())
    op, none = problem.op, [None]
    call = [q, k, v, weight, *none * 8, *given, *none * 5]
    assert len(call) == INPUTS
    results = torch.ops.mtagen.forward(*call, 0.25, op._key)
    arguments = (*(torch.ones_like(x) for x in results), *call, *results, 0.25, op._key)
    torch.library.opcheck(torch.ops.mtagen.backward.default, arguments)
    shapes = [x.shape for x in torch.ops.mtagen.backward(*arguments)]
    assert shapes == [x.shape if name not in ("c", "d") else (0,) for name, x in problem.tensors.items()]


def test_constants_that_are_refused() -> None:
    for constants in ("c", ("x",), 3, None):
        with pytest.raises(SpecError, match="must be a tuple or list of names of parameters; legal: names among"):
            Spec(None, DIM, **CONSTANT, constants=constants)
    with pytest.raises(SpecError, match="because there are no parameters"):
        Spec(None, DIM, constants=("c",))
    problem = Problem({"kernel": None, "constants": ("c",), **CONSTANT})
    with pytest.raises(InputError, match=r"parameters\['c'\].requires_grad: .* built with this name in constants"):
        problem.op(**problem.call)
    with torch.no_grad():
        problem.op(**problem.call)
    k, v, parameters = (problem.call[name] for name in ("k", "v", "parameters"))
    problem.op.decode(problem.call["q"][:, :, -1:], k, v, parameters=parameters)  # it has no gradients at all


def test_parameters_of_masks_are_no_constants() -> None:
    """They never have gradients."""
    options = {"visible": "j < n[b]", "parameters": {"n": "b"}}
    assert Spec(None, DIM, constants=("n",), **options) == Spec(None, DIM, **options)


def test_a_row_that_sees_nothing_has_the_sink() -> None:
    problem = Problem({"kernel": None, "sink": True}, nq=5, nk=2)
    out, lse = problem.op(**problem.call, return_lse=True)
    assert not out[:, :, :3].any()
    torch.testing.assert_close(lse[:, :, :3], problem.tensors["sink"][None, :, None].expand(2, HEADS, 3))


def test_gates_are_a_bias_of_keys() -> None:
    """A term of the row changes nothing but the log-sum-exp."""
    problem = Problem({"kernel": None, **EXPRESSIONS["gates"]}, nq=37)
    gates = problem.tensors["gates"]
    out = problem.op(**problem.call)
    options = {"logits": "s - gates[b, h, j]", "parameters": {"gates": "b,h,j"}}
    moved = mtagen.build(None, DIM, target="cpu", dtype="fp64", **options)
    call = problem.call | {"parameters": {"gates": gates}}
    torch.testing.assert_close(out, moved(**call))


def test_named_expressions_and_transformers() -> None:
    """T5's entries are those of the model that its authors published, as transformers has it."""
    module = pytest.importorskip("transformers.models.t5.modeling_t5")
    n = 700
    relative = torch.arange(n) - torch.arange(n)[:, None]
    bucket = module.T5Attention._relative_position_bucket(
        relative, bidirectional=False, num_buckets=32, max_distance=128
    )
    table = read_parameters({"table": "h,32"})
    (load,) = read("logits", t5(), table).atoms(Load)
    places = {POSITION: torch.arange(n)[:, None], KEY: torch.arange(n), SCORE: torch.zeros(())}
    mine = evaluate(load.indices[1], places | {HEAD: torch.tensor(0)}).long().expand(n, n)
    assert torch.equal(mine.tril(), bucket.tril())
    for wrong in (lambda: t5(31), lambda: t5(32, 16), lambda: clipped(0), lambda: t5(True)):
        with pytest.raises(SpecError, match="got"):
            wrong()


P = {"slopes": "h", "table": "h,9", "gates": "b,h,i", "t": ""}


@pytest.mark.parametrize(
    ("text", "rule", "mark"),
    [
        ("s + table[h, i % 10]", "the index may be from 0 to 9", "             ^^^^^^"),
        ("s + table[h, i - j]", "the index may be from 0 to inf", "             ^^^^^"),
        ("s + table[h, 9]", "the index may be from 9 to 9", "             ^"),
        ("s + table[h]", "table has 2 axes and 1 indices", "    ^^^^^^^^"),
        ("s + slopes[j]", "the axis h of a parameter has its own index", "           ^"),
        ("s + slopes", "slopes has 1 axes and 0 indices", "    ^^^^^^"),
        ("s + other[h]", "other is not declared by parameters={'other': its axes}", "    ^^^^^^^^"),
        ("s + table[h, s]", "is no index", "             ^"),
        ("s + table[h, t]", "is no index", "             ^"),
        ("s + table[h, floor(t)]", "an index reads a parameter", "             ^^^^^^^^"),
        ("s + gates[b, h, i - 1]", "the axis i of a parameter has its own index", "                ^^^^^"),
        ("b * s", "b is not a name of the language", "^"),
        ("s + t[0]", "t has 0 axes and 1 indices", "    ^^^^"),
    ],
)
def test_texts_that_are_refused(text: str, rule: str, mark: str) -> None:
    with pytest.raises(SpecError) as error:
        Spec(None, 16, logits=text, parameters=tuple(P.items()))
    *_, line, marked = str(error.value).splitlines()
    assert rule in str(error.value)
    assert line.strip() == text
    assert marked[2:].rstrip() == mark


@pytest.mark.parametrize(
    ("parameters", "rule"),
    [
        ({"t": "x"}, "is no axis"),
        ({"t": "h,b"}, "in another order"),
        ({"t": "h,h"}, "twice"),
        ({"t": "0"}, "is no axis"),
        ({"t": "4097"}, "is no axis"),
        ({"t": 3}, "must name axes"),
        ({"s": "h"}, "is no name"),
        ({"tanh": "h"}, "is no name"),
        ({"_t": "h"}, "is no name"),
        ({"lambda": "h"}, "is no name"),
        ((("t", "h"), ("t", "h")), "has a name twice"),
        ("slopes", "must map names"),
        ({"t": "h", "u": "h"}, "are read by no expression"),
    ],
)
def test_parameters_that_are_refused(parameters: Any, rule: str) -> None:
    with pytest.raises(SpecError, match=rule):
        Spec(None, 16, logits="s + t[h]", parameters=parameters)


def test_more_parameters_than_ops_have_arguments() -> None:
    parameters = {f"t{n}": "h" for n in range(9)}
    with pytest.raises(SpecError, match="are too many; legal: at most 8"):
        Spec(None, 16, logits=" + ".join(["s", *(f"{name}[h]" for name in parameters)]), parameters=parameters)


def test_calls_that_are_refused() -> None:
    problem = Problem({"kernel": None, "sink": True, **EXPRESSIONS["table"]})
    good, table = problem.call, problem.tensors["table"]
    wrong = {
        "is read, and missing": ({"parameters": None}, "each call needs it"),
        "no sink": ({"sink": None}, "each call needs it"),
        "another name": ({"parameters": {"table": table, "other": table}}, "was built without it"),
        "another shape": ({"parameters": {"table": table[:, :3]}}, "table.*shape"),
        "another dtype": ({"parameters": {"table": table.half()}}, "fp32 or the dtype of q"),
        "no mapping": ({"parameters": table}, "must be a mapping"),
        "no tensor": ({"parameters": {"table": 3}}, "must be a tensor"),
        "another device": ({"sink": problem.tensors["sink"].to("meta")}, "on q's device"),
    }
    for options, rule in wrong.values():
        with pytest.raises(InputError, match=rule):
            problem.op(**good | options)
    plain = Problem({"kernel": None})
    with pytest.raises(InputError, match="was built without it"):
        plain.op(**plain.call | {"sink": torch.zeros(HEADS)})
    pairs = Problem(options_of("pairs", "plain"))
    with pytest.raises(SpecError, match="packed documents"):
        pairs.op.plan.spec.packed_learned_arguments  # noqa: B018
    with pytest.raises(InputError, match="queries before the first key"):
        Problem(options_of("pairs", "plain"), nq=5, nk=3).op(**Problem(options_of("pairs", "plain"), nq=5, nk=3).call)


def test_expressions_move_to_the_place_that_computes_the_same() -> None:
    parameters = {"parameters": (("t", ""),)}
    moved = Spec(None, 16, scores="2 * s", convolved="tanh(s)", logits="s * t", **parameters)
    assert moved == Spec(None, 16, logits="t * tanh(2 * s)", **parameters)
    assert Spec((2, 3), 16, convolved="tanh(s)") == Spec((2, 3), 16, logits="tanh(s)")
    kept = Spec((2, 3), 16, mixed_heads=2, scores="s + 1", convolved="tanh(s)", logits="s / 2")
    assert (kept.scores, kept.convolved, kept.logits) == ("s + 1", "tanh(s)", "s/2")
    assert Spec.from_dict(moved.to_dict()) == moved


def test_factors_of_heads_move_behind_the_convolution() -> None:
    """A convolution is linear, but only a factor that all its scores have can be taken out of it."""
    of_heads = {"parameters": (("t", "h"),)}
    assert Spec((2, 3), 16, scores="s / t[h]", logits="tanh(s)", **of_heads) == Spec(
        (2, 3), 16, logits="tanh(s / t[h])", **of_heads
    )
    for scores in ("s * log(i + 2)", "s * exp(-j)", "2 * s + 1", "s * tanh(s)"):
        assert Spec((2, 3), 16, scores=scores).scores


def test_functions_name_parameters_as_arguments() -> None:
    text = Spec(None, 16, logits="s + table[h, min(8, i - j)] * t", parameters=(("table", "h,9"), ("t", "")))
    function = lambda s, i, j, h, table, t: s + table[h, min(8, i - j)] * t  # noqa: E731
    assert Spec(None, 16, logits=function, parameters={"table": "h,9", "t": ""}) == text


INTEGERS = st.recursive(
    st.sampled_from(["i", "j", "h", "i - j", "3", "-2"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda x: f"min({x[0]}, {x[1]})"),
        st.tuples(inner, inner).map(lambda x: f"max({x[0]}, {x[1]})"),
        st.tuples(inner, inner).map(lambda x: f"({x[0]} + {x[1]})"),
        st.tuples(inner, inner).map(lambda x: f"({x[0]} - {x[1]})"),
        st.tuples(inner, st.integers(2, 5)).map(lambda x: f"({x[0]} // {x[1]})"),
        st.tuples(inner, inner, inner).map(lambda x: f"where({x[0]} < {x[1]}, {x[2]}, {x[1]})"),
        inner.map(lambda x: f"floor(4 * log(max(1, {x})))"),
        inner.map(lambda x: f"abs({x})"),
        st.tuples(inner, inner).map(lambda x: f"{x[0]} * {x[1]}"),
    ),
    max_leaves=6,
)


@given(text=INTEGERS, left=st.one_of(st.none(), st.integers(0, 9)), right=st.one_of(st.none(), st.integers(0, 9)))
@settings(max_examples=150, deadline=None)
def test_ranges_hold(text: str, left: int | None, right: int | None) -> None:
    """All values of an index, over visible pairs, lie in the range that mtagen computes."""
    index = read("index", text)
    low, high = range_of(index, (-math.inf if right is None else -right, math.inf if left is None else left))
    positions, keys, heads = torch.meshgrid(torch.arange(12), torch.arange(12), torch.arange(3), indexing="ij")
    distance = positions - keys
    seen = (distance <= (99 if left is None else left)) & (distance >= -(99 if right is None else right))
    values = {
        POSITION: positions[seen],
        KEY: keys[seen],
        HEAD: heads[seen],
        SCORE: torch.zeros((), dtype=torch.float64),
    }
    value = evaluate(index, values)
    assert value.min() >= low
    assert value.max() <= high


def test_a_layer_holds_parameters_and_sinks() -> None:
    layer = MultiTokenAttention(32, 2, kernel=(2, 3), logits=t5(8, 20), parameters={"table": "h,8"}, sink=True)
    assert {"sink", "score_parameters.table"} <= {name for name, _ in layer.named_parameters()}
    assert not layer.sink.any()
    layer(torch.randn(1, 9, 32)).square().sum().backward()
    assert layer.sink.grad.any()
    assert layer.score_parameters["table"].grad.shape == (2, 8)
    other = MultiTokenAttention(32, 2, kernel=(2, 3), logits=t5(8, 20), parameters={"table": "h,8"}, sink=True)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        cache, x = layer.new_cache(1, 9), torch.randn(1, 9, 32)
        steps = torch.cat([layer(x[:, n : n + 1], cache=cache) for n in range(9)], 1)
        torch.testing.assert_close(steps, layer(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(SpecError, match="does not hold"):
        MultiTokenAttention(32, 2, kernel=None, logits=forget(), parameters={"gates": "b,h,j"})


def test_parameters_describe_themselves() -> None:
    assert read_parameters({"t": "h, 3"}) == (Parameter("t", ("h", 3)),)
    assert read_parameters((("t", ["h", 3]),))[0].text == "h,3"
