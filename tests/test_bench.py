"""``mtagen bench``: what is measured, that nothing wrong is timed, and what is kept of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import mtagen
from mtagen.accuracy import Comparison
from mtagen.bench import contenders, run
from mtagen.bench.authors import authors_attention
from mtagen.bench.contenders import (
    Attention,
    Auto,
    Built,
    Compiled,
    Contender,
    Eager,
    Flex,
    Liger,
    OneByOne,
    Padded,
    Sdpa,
    entrants,
    make_inputs,
)
from mtagen.bench.expressions import expressions, name_expression
from mtagen.bench.flex import SCORE_MODS
from mtagen.bench.names import BACKENDS, FLEX
from mtagen.bench.rates import Rates, measure_rates, roofline_ms, useful_flop
from mtagen.bench.suites import KERNELS, SUITES, suite
from mtagen.cli import app
from mtagen.errors import InputError, SpecError
from mtagen.measure import timing
from mtagen.measure.cases import DOCUMENTS, DROPOUT_P, PAPER, TRAINING_PASSES, Case, Sizes
from mtagen.measure.timing import time_call
from mtagen.planner.choice import PlannedPass, candidates
from mtagen.spec import Spec

CPU = torch.device("cpu")
RATES = Rates(tensor_tflops=0.1, dram_gbps=10.0)
SMALL = ("--kernel", "2,3", "--head-dim", "16", "--length", "40")


def case(
    pass_name: str = "forward", kernel: tuple[int, int] = (2, 3), n: int = 40, causal: bool = True, **sizes: int
) -> Case:
    spec = Spec(kernel, 16, causal=causal, dtype="fp32")
    return Case(spec, Sizes(**{"batch": 1, "heads": 2, "kv_heads": 2, "nq": n, "nk": n} | sizes), pass_name)


class Fake(Contender):
    """Returns v, errs by ``error`` where 1 is allowed, and does ``before`` in each call."""

    def __init__(self, name: str = "fake", error: float = 0.5, before: Callable[[], object] = lambda: None) -> None:
        super().__init__(name, CPU)
        self.error = error
        self.before = before
        self.prepared = 0

    def refusal(self, case: Case) -> str | None:
        return None

    def prepare(self, case: Case) -> Attention:
        self.prepared += 1

        def attend(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> Tensor:
            self.before()
            return v + 0 * (q + k + (0 if weight is None else weight.sum()))

        return attend

    def check(self, case: Case) -> Mapping[str, Comparison]:
        return {"out": Comparison(0.1, 0.1, 1.0), "dq": Comparison(self.error, 0.5, 1.0)}


def raising(error: BaseException) -> Callable[[], None]:
    def before() -> None:
        raise error

    return before


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "measure_rates", lambda device: RATES)


def measured(cases: list[Case], *competing: Contender) -> dict[str, Any]:
    return run.run(cases, competing, CPU, command="mtagen bench", budget_ms=1)


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, arguments)])


# Cases


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SUITES)
def test_suites_have_no_case_twice_and_problems_together(name: str, device: str) -> None:
    if device == "cpu" and name in ("memory", "overhead", "short", "single"):
        with pytest.raises(InputError, match="on a GPU only"):
            suite(name, device)
        return
    cases = suite(name, device)
    assert len(cases) == len(set(cases)) > 0
    problems = [problem for problem, _ in groupby(cases, lambda case: case.problem)]
    assert len(problems) == len(set(problems))
    half = {"bf16", "fp16"} if name == "layers" else {"bf16"}
    assert {case.spec.dtype for case in cases} == ({"fp32"} if device == "cpu" else half)


def test_quick_suite_on_a_cpu() -> None:
    """Small enough for two cores and two minutes."""
    cases = suite("quick", "cpu")
    assert {case.spec.head_dim for case in cases} == {64}
    assert len(cases) == 2 * len(TRAINING_PASSES) + 1
    assert {case.spec.head_dim for case in suite("quick", "cpu", head_dims=[16, 32])} == {16, 32}


def test_quick_suite() -> None:
    cases = suite("quick", "cuda")
    assert {case.spec.kernel for case in cases} == {PAPER}
    assert {(c.spec.head_dim, c.sizes.nk, c.pass_name) for c in cases if not c.decodes} == {
        (d, n, pass_name) for d in (64, 128) for n in (2048, 8192) for pass_name in TRAINING_PASSES
    }
    assert [(c.spec.head_dim, c.sizes.nq, c.sizes.nk) for c in cases if c.decodes] == [(64, 1, 32768), (128, 1, 32768)]


def test_full_suite() -> None:
    cases = suite("full", "cuda")
    grid = {(c.spec.head_dim, c.spec.causal, c.sizes.nk, c.spec.kernel, c.pass_name) for c in cases}
    lengths = [2**i for i in range(9, 17)]
    assert grid == {
        (d, causal, n, kernel, pass_name)
        for d in (64, 128)
        for causal in (True, False)
        for n in lengths
        for kernel in KERNELS
        for pass_name in TRAINING_PASSES
    }
    regular = [c for c in cases if c.sizes.batch == max(1, 8192 // c.sizes.nk)]
    assert len(regular) == len(grid)
    others = {(c.spec, c.sizes.batch, c.sizes.nk) for c in set(cases) - set(regular)}
    assert others == {(Spec(PAPER, 128), 4, 4096), (Spec(PAPER, 128), 4, 8192), (Spec(PAPER, 64), 8, 2048)}


def test_decode_suite() -> None:
    cases = suite("decode", "cuda", head_dims=[64])
    sizes = [(c.sizes.batch, c.sizes.nk, c.sizes.kv_heads, c.sizes.nq) for c in cases]
    plain = [(8, 4096), (8, 16384), (8, 32768), (1, 65536), (1, 131072), (1, 262144)]
    assert [(b, n) for b, n, kv_heads, new in sizes if (kv_heads, new) == (16, 1)] == plain
    assert {size for size in sizes if size[2:] != (16, 1)} == {(8, 32768, 4, 1), (8, 32768, 16, 4)}


def test_memory_suite() -> None:
    cases = suite("memory", "cuda")
    assert {case.pass_name for case in cases} == {"forward+backward"}
    assert {case.sizes.nk for case in cases} == {8192, 16384, 32768, 65536}
    assert [x.name for x in entrants("memory", CPU)] == ["mtagen torch", "eager"]


def test_single_suite() -> None:
    cases = suite("single", "cuda", lengths=[4096])
    assert {case.pass_name for case in cases} == set(TRAINING_PASSES)
    assert {(case.spec, case.sizes) for case in cases} == {
        (Spec(PAPER, d), Sizes(1, 1, 1, 4096, 4096)) for d in (64, 128)
    }


def test_short_suite() -> None:
    cases = suite("short", "cuda", head_dims=[64])
    assert {case.pass_name for case in cases} == set(TRAINING_PASSES)
    assert {case.sizes for case in cases} == {Sizes(1, 16, 16, n, n) for n in (256, 512, 1024, 2048)}
    stages = {(case.spec.kernel, case.spec.mixed_heads, case.spec.post_mixed_heads) for case in cases}
    assert stages == {(PAPER, None, None), (PAPER, 16, 16), (None, 16, 16), (PAPER, None, 2), (None, 16, None)}


def test_overhead_suite() -> None:
    cases = suite("overhead", "cuda", head_dims=[64])
    assert {(c.spec.kernel, c.sizes.batch, c.sizes.heads, c.sizes.nk) for c in cases} == {
        (kernel, 8, 16, n) for kernel in (PAPER, (1, 1)) for n in (512, 1024, 2048)
    }
    assert [x.name for x in entrants("overhead", CPU)] == ["mtagen torch"]


def test_layers_suite() -> None:
    cases = suite("layers", "cuda")
    training = {(c.spec, c.sizes, c.pass_name) for c in cases if not c.decodes}
    models = [(16, 64, 4, 2048), (10, 128, 4, 2048), (16, 96, 4, 2048), (16, 128, 4, 2048)]
    models += [(16, 64, 1, 8192), (16, 128, 1, 8192)]

    def layers(heads: int, d: int) -> list[Spec]:
        mixers = {"mixed_heads": heads, "post_mixed_heads": heads}
        return [
            Spec(None, d),
            Spec(None, d, **mixers),
            Spec(PAPER, d, post_kernel=PAPER, **mixers),
            Spec(PAPER, d, post_mixed_heads=2),
        ]

    expected = {
        (spec, Sizes(batch, heads, heads, n, n)) for heads, d, batch, n in models for spec in layers(heads, d)
    } | {(Spec(None, 128, mixed_heads=16, dtype="fp16"), Sizes(1, 16, 16, 2048, 2048))}
    assert training == {(*problem, name) for problem in expected for name in TRAINING_PASSES}
    assert {(c.spec, c.sizes) for c in cases if c.decodes} == {
        (spec, Sizes(8, 16, 16, 1, 32768)) for d in (64, 128) for spec in layers(16, d)
    }


def test_layers_of_other_head_dims_and_lengths() -> None:
    cases = suite("layers", "cuda", head_dims=[32], lengths=[64])
    assert {(c.spec.head_dim, c.sizes.heads) for c in cases} == {(32, 16)}
    assert {c.sizes.nk for c in cases if not c.decodes} == {64}


def test_data_suite() -> None:
    cases = suite("data", "cuda")
    paper, plain = Spec(PAPER, 128), Spec(None, 128)
    mixing = Spec(None, 128, mixed_heads=16, post_mixed_heads=16)
    everything = Spec(PAPER, 128, mixed_heads=16, post_kernel=PAPER, post_mixed_heads=16)
    pairs = Spec(PAPER, 128, post_mixed_heads=2)
    dropping = (paper, Spec(PAPER, 64), plain, mixing, everything, pairs)
    sequences = {(spec, 8192): [spec, replace(spec, dropout=True)] for spec in dropping}
    sequences |= {
        (spec, n): [spec, replace(spec, window=(1024, -1))]
        for spec, n in ((paper, 32768), (mixing, 16384), (everything, 16384))
    }
    expected = {(one, Sizes(1, 16, 16, n, n)) for (_, n), specs in sequences.items() for one in specs}
    packed = [replace(spec, packed=True) for spec in (paper, plain, mixing, everything, pairs)]
    expected |= {(spec, Sizes(16, 16, 16, 8192, 8192)) for spec in packed}
    assert {(c.spec, c.sizes, c.pass_name) for c in cases} == {
        (*problem, name) for problem in expected for name in TRAINING_PASSES
    }
    assert [x.name for x in entrants("data", CPU)] == ["mtagen torch", "mtagen torch one by one", "mtagen torch padded"]


def test_data_suite_has_the_base_of_each_window_and_of_dropout() -> None:
    for cases in (suite("data", "cuda"), suite("data", "cpu"), suite("data", "cpu", head_dims=[16], lengths=[1])):
        costly = [case for case in cases if case.base != case and not case.spec.packed]
        assert costly
        assert {case.base for case in costly} <= set(cases)


def test_scores_suite() -> None:
    cases = suite("scores", "cuda")
    assert len(cases) == 3 * 2 * 2 * (1 + len(expressions(16)))
    assert {case.base for case in cases} <= set(cases)
    assert {case.sizes for case in cases} == {Sizes(1, 16, 16, 8192, 8192)}
    named = {name_expression(case.spec, 16) for case in cases}
    assert named == {"", *expressions(16)}
    assert Case.from_dict(cases[-1].to_dict()) == cases[-1]


def test_names_of_expressions() -> None:
    assert name_expression(Spec(PAPER, 64), 16) == ""
    assert name_expression(Spec(PAPER, 64, logits="50.0 * tanh(s / 50)"), 16) == "softcap"
    assert name_expression(Spec(PAPER, 64, logits="20 * tanh(s / 20)", sink=True), 16) == "logits 20*tanh(s/20), sink"
    assert name_expression(Spec(None, 64, visible="j >= 3"), 16) == "visible j >= 3"


@pytest.mark.parametrize("name", SCORE_MODS)
def test_flex_attention_has_the_expression(name: str) -> None:
    spec = Spec(None, 16, dtype="fp32", **expressions(4).get(name, {}))
    flex = Flex(FLEX, CPU, compiled=False)
    one = Case(spec, Sizes(1, 4, 4, 40, 40), "forward")
    assert flex.enters(one)
    inputs = make_inputs(one, CPU)
    ours = mtagen.build(**spec.to_dict(), backend="torch", target="cpu")
    expected = ours(inputs.q, inputs.k, inputs.v, **inputs.options(inputs.named))
    torch.testing.assert_close(flex.prepare(one)(*flex.arguments(one, inputs)), expected)


def test_flex_attention_is_refused_where_it_has_no_such_option() -> None:
    flex = Flex(FLEX, CPU, compiled=False)
    sizes = Sizes(1, 4, 4, 40, 40)
    assert "no such option" in str(flex.refusal(Case(Spec(None, 16, sink=True), sizes, "forward")))
    assert not flex.enters(Case(Spec((2, 3), 16), sizes, "forward"))
    assert not flex.enters(Case(Spec(None, 16), sizes, "decode"))
    assert FLEX not in [contender.name for contender in entrants("full", torch.device("cuda"))]
    assert FLEX in [contender.name for contender in entrants("scores", torch.device("cuda"))]


def test_documents() -> None:
    packed = Case(Spec(PAPER, 128, packed=True), Sizes(16, 16, 4, 8192, 8192), "forward")
    assert tuple(packed.documents) == DOCUMENTS
    assert sum(packed.documents) == 32768
    assert packed.visible_scores == 16 * sum(n * (n + 1) // 2 for n in DOCUMENTS)
    assert packed.row_bytes == 4 * packed.cache_bytes == 32768 * 16 * 256 * 2
    few = replace(packed, sizes=Sizes(18, 1, 1, 64, 64))
    assert few.documents == [64, 48, 32, 24, 20, 16, 12, 10, 8, 6, 5, 4, 3, 2, 1, 1, 64, 48]
    assert packed.base.documents == []
    assert packed.base.spec == Spec(PAPER, 128)


def test_axes_replace_those_of_the_suite() -> None:
    cases = suite("full", "cpu", [(2, 3), (1, 1)], [16], [40])
    assert {(c.spec.kernel, c.spec.head_dim, c.sizes.nk) for c in cases} == {((2, 3), 16, 40), ((1, 1), 16, 40)}


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (5, 5), (3, 9), (9, 3), (1, 7)])
@pytest.mark.parametrize("causal", [True, False])
def test_visible_scores(nq: int, nk: int, causal: bool) -> None:
    seen = sum(not causal or j <= i + nk - nq for i in range(nq) for j in range(nk))
    assert case(causal=causal, nq=nq, nk=nk, batch=3, heads=4).visible_scores == 12 * seen


@pytest.mark.parametrize("window", [(0, -1), (2, -1), (-1, 1), (3, 2)])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (5, 5), (3, 9), (9, 3)])
def test_visible_scores_of_windows(nq: int, nk: int, window: tuple[int, int]) -> None:
    left, right = (n if n >= 0 else 100 for n in window)
    seen = sum(-left <= j - (i + nk - nq) <= right for i in range(nq) for j in range(nk))
    spec, sizes = Spec((2, 3), 16, causal=False, window=window), Sizes(1, 4, 2, nq, nk)
    assert Case(spec, sizes, "forward").visible_scores == 4 * seen


# Rates and timing


def test_rates_are_measured() -> None:
    assert all(0 < rate < math.inf for rate in measure_rates(CPU))


def test_roofline_is_the_larger_of_both_bounds() -> None:
    plan = mtagen.plan(mtagen.Spec((2, 3), 16, dtype="fp32"), "cpu")
    flop = plan.flops_per_score()
    step = case("forward+backward", batch=2)
    work = 2 * 2 * (40 * 41 // 2) * (flop["forward"] + flop["backward"])
    tensor = 2 * 2 * 40 * 16 * 4  # bytes of q, k, v, out and each gradient; forward touches 4 of them, backward 8
    assert roofline_ms(step, plan, Rates(1e-6, 1e9)) == pytest.approx(work / 1e6 * 1e3)
    assert roofline_ms(step, plan, Rates(1e9, 1e-6)) == pytest.approx(12 * tensor / 1e3 * 1e3)
    assert useful_flop(step) == 14 * 16 * 2 * 2 * (40 * 41 // 2)


def test_roofline_of_decode_is_its_bytes() -> None:
    plan = mtagen.plan(mtagen.Spec((2, 3), 16, dtype="fp32"), "cpu")
    step = case("decode", nq=1, nk=1000, heads=4)
    assert roofline_ms(step, plan, Rates(1e-9, 1e-6)) == pytest.approx((2 * 2 * 1000 + 2 * 4) * 16 * 4)


class Clock:
    """Each call takes the next of ``ms``, the last one from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ms: float) -> None:
        self.ms: Iterator[float] = iter((*ms, *[ms[-1]] * 1000))
        self.now = 0.0
        self.calls = 0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def __call__(self) -> None:
        self.calls += 1
        self.now += next(self.ms) / 1e3


def test_timing_is_of_the_warmed_up_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1000, 10, 30, 20, 40, 50)
    found = time_call(clock, CPU, budget_ms=105)
    assert clock.calls == 6
    assert found == pytest.approx((30, 18, 42, 5))


@pytest.mark.parametrize(("ms", "repeats"), [(1000, 3), (10, 4), (0.1, 100)])
def test_repetitions_follow_the_budget(monkeypatch: pytest.MonkeyPatch, ms: float, repeats: int) -> None:
    assert time_call(Clock(monkeypatch, ms), CPU, budget_ms=45) == pytest.approx((ms, ms, ms, repeats))


# Contenders


@pytest.mark.parametrize("name", ["mtagen torch", "eager", "torch.compile", "authors", "sdpa"])
def test_contenders_of_the_cpu_are_right(name: str) -> None:
    (contender,) = entrants("quick", CPU, [name])
    judged = contender.check(case())
    assert {"out", "dq", "dk", "dv"} <= judged.keys()
    assert ("dweight" in judged) == contender.convolves
    assert all(comparison.ok for comparison in judged.values())


def documents(**stages: Any) -> Case:
    spec = Spec(head_dim=16, dtype="fp32", packed=True, **{"kernel": (2, 3)} | stages)
    return Case(spec, Sizes(16, 4, 2, 64, 64), "forward")


STAGES = [{}, {"kernel": None}, {"mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2}]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", ["mtagen torch", "mtagen torch one by one", "mtagen torch padded"])
def test_contenders_of_packed_documents_are_right(name: str, stages: dict[str, Any]) -> None:
    packed = documents(**stages)
    judged = entrants("data", CPU, [name])[0].check(packed)
    assert {"out", "dq", "dk", "dv", *(f"d{weight}" for weight in packed.spec.weight_names)} <= judged.keys()
    assert all(comparison.ok for comparison in judged.values()), judged


@pytest.mark.parametrize("stages", STAGES)
def test_forms_of_packed_documents_are_timed_on_the_same_rows(stages: dict[str, Any]) -> None:
    """All give the same documents from the same inputs, in a form of their own."""
    packed = documents(**stages)
    inputs = make_inputs(packed, CPU)
    assert inputs.q.shape == (sum(packed.documents), 4, 16)
    assert inputs.k.shape == (sum(packed.documents), 2, 16)
    whole, one_by_one, padded = entrants("data", CPU)
    assert isinstance(one_by_one, OneByOne)
    assert isinstance(padded, Padded)
    out = whole.prepare(packed)(*whole.arguments(packed, inputs))
    outs = one_by_one.prepare(packed)(*one_by_one.arguments(packed, inputs))
    assert [x.shape[2] for x in outs] == packed.documents
    torch.testing.assert_close(one_by_one.join(packed, outs), out)
    batch = padded.prepare(packed)(*padded.arguments(packed, inputs))
    assert batch.shape == (16, 4, 64, 16)
    torch.testing.assert_close(padded.join(packed, batch), out)


def test_documents_in_a_wrong_form_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (padded,) = entrants("data", CPU, ["mtagen torch padded"])
    original = padded.arguments

    def shifted(case: Case, inputs: Any) -> list[Tensor]:
        q, k, v, *weights = original(case, inputs)
        return [q, k.roll(1, 2), v, *weights]

    monkeypatch.setattr(padded, "arguments", shifted)
    assert not all(comparison.ok for comparison in padded.check(documents()).values())


def test_windows_are_checked_where_they_hide_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Sizes] = []
    monkeypatch.setattr(contenders, "check_op", lambda op, spec, device, sizes: checked.extend(sizes) or [])
    spec = Spec((2, 3), 16, dtype="fp32", window=(1024, -1))
    entrants("data", CPU, ["mtagen torch"])[0].check(Case(spec, Sizes(1, 2, 2, 8192, 8192), "forward"))
    (sizes,) = checked
    assert sizes.nk > 1024 + contenders._CHECKED_LENGTH - 1


def test_dropout_is_timed_with_a_seed_of_each_call() -> None:
    dropping = Case(Spec((2, 3), 16, dtype="fp32", dropout=True), Sizes(1, 2, 2, 64, 64), "forward")
    inputs = make_inputs(dropping, CPU)
    (ours,) = entrants("data", CPU, ["mtagen torch"])
    attend = ours.prepare(dropping)
    first, second = (attend(*ours.arguments(dropping, inputs)) for _ in range(2))
    assert not torch.equal(first, second)
    op = mtagen.build((2, 3), 16, backend="torch", target="cpu", dtype="fp32", dropout=True)
    torch.manual_seed(0)
    first = attend(*inputs.arguments)
    torch.manual_seed(0)
    torch.testing.assert_close(first, op(*inputs.arguments, dropout_p=DROPOUT_P))


@pytest.mark.parametrize("special", [{"window": (8, -1)}, {"packed": True}, {"dropout": True}])
def test_peers_enter_on_whole_sequences_only(special: dict[str, Any]) -> None:
    base = Case(Spec(None, 16, dtype="fp32", mixed_heads=2), Sizes(1, 2, 2, 40, 40), "forward")
    peers = [x for x in entrants("full", CPU) if not x.name.startswith("mtagen")]
    assert len(peers) == 5
    for peer in peers:
        assert peer.enters(base)
        assert not peer.enters(replace(base, spec=replace(base.spec, **special)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "stages",
    [
        {"kernel": (6, 11), "mixed_heads": 4, "post_kernel": (2, 4), "post_mixed_heads": 4},
        {"kernel": (6, 11), "post_mixed_heads": 2},
        {"kernel": (2, 3), "mixed_heads": 2, "post_mixed_heads": 4, "key_padding": "left"},
        {"kernel": None, "mixed_heads": 4, "post_kernel": (3, 5), "key_padding": "right"},
        {"kernel": (3, 3), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 2, "causal": False},
    ],
)
def test_authors_are_right(stages: dict[str, Any], dtype: str) -> None:
    layer = Case(Spec(head_dim=16, dtype=dtype, **stages), Sizes(1, 4, 2, 300, 300), "forward")
    judged = entrants("layers", CPU, ["authors"])[0].check(layer)
    assert judged.keys() == {"out", "dq", "dk", "dv", *(f"d{name}" for name in layer.spec.weight_names)}
    assert all(comparison.ok for comparison in judged.values()), judged


def test_authors_are_right_when_compiled() -> None:
    spec = Spec((2, 3), 16, dtype="fp32", mixed_heads=2, post_kernel=(2, 3), post_mixed_heads=2)
    layer = Case(spec, Sizes(1, 2, 2, 300, 300), "forward")
    judged = entrants("layers", CPU, ["authors compiled"])[0].check(layer)
    assert all(comparison.ok for comparison in judged.values()), judged


def test_queries_of_the_authors_are_the_last_ones() -> None:
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 9, 16), torch.randn(1, 1, 9, 16)
    weight = torch.randn(2, 2, 3)
    out = authors_attention(Spec((2, 3), 16, dtype="fp32"))(q, k, v, weight)
    torch.testing.assert_close(out, mtagen.reference(q, k, v, weight))


@pytest.mark.parametrize("name", ["authors", "authors compiled"])
def test_authors_keep_scores_in_half_precision_and_exponentiate_in_single(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    seen = []
    for function, owner in (("conv2d", torch.nn.functional), ("linear", torch.nn.functional), ("softmax", Tensor)):
        original = getattr(owner, function)

        def spy(x: Tensor, *rest: Any, function: str = function, original: Any = original, **named: Any) -> Any:
            seen.append((function, x.dtype))
            return original(x, *rest, **named)

        monkeypatch.setattr(owner, function, spy)
    spec = Spec((2, 3), 16, mixed_heads=2, post_kernel=(2, 3), post_mixed_heads=2)
    layer = Case(spec, Sizes(1, 2, 2, 8, 8), "forward")
    out = entrants("layers", CPU, [name])[0].prepare(layer)(*make_inputs(layer, CPU).arguments)
    half, single = torch.bfloat16, torch.float32
    assert seen == [("conv2d", half), ("linear", half), ("softmax", single), ("conv2d", half), ("linear", half)]
    assert out.dtype == half


def test_authors_are_refused_where_they_cannot() -> None:
    spec = Spec((2, 3), 16, dtype="fp32", post_mixed_heads=2)
    layer, square = Case(spec, Sizes(1, 2, 2, 40, 40), "forward"), Sizes(1, 2, 2, 41, 41)
    by_output = replace(spec, mask="output")
    for name in ("authors", "authors compiled"):
        (contender,) = entrants("layers", CPU, [name], max_materialised=40)
        assert contender.refusal(layer) is None
        assert "is not supported by the authors' code; legal: ('source',)" in (
            contender.refusal(replace(layer, spec=by_output)) or ""
        )
        assert contender.refusal(replace(layer, spec=replace(by_output, causal=False))) is None
        assert "N > 40" in (contender.refusal(replace(layer, sizes=square)) or "")
        assert "no decode" in (contender.refusal(Case(spec, Sizes(1, 2, 2, 1, 40), "decode")) or "")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_authors_enter_pipelines_only(device: str) -> None:
    theirs = [x for x in entrants("layers", torch.device(device)) if x.name.startswith("authors")]
    assert [x.name for x in theirs] == ["authors", "authors compiled"]
    for one in theirs:
        assert not any(one.enters(case) for case in suite("full", device))
        layers = suite("layers", device)
        assert {case.spec.kernel for case in layers if not one.enters(case)} == {None}
        assert {len(case.spec.mixed) for case in layers if one.enters(case)} == {1, 2}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mixed", "small"),
    [(16, 16, 16, (16, 16)), (16, 16, 2, (4, 4)), (16, 4, 2, (8, 2)), (16, 4, 16, (16, 4)), (8, 8, None, (2, 2))],
)
def test_peers_are_checked_with_one_group_of_heads_where_there_is_one(
    heads: int, kv_heads: int, mixed: int | None, small: tuple[int, int]
) -> None:
    spec = Spec((2, 3), 16, dtype="fp32", post_mixed_heads=mixed)
    sizes = Eager("eager", CPU, 8192)._small(Case(spec, Sizes(1, heads, kv_heads, 300, 300), "forward")).sizes
    assert (sizes.heads, sizes.kv_heads) == small


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_sdpa_decodes_right(kv_heads: int) -> None:
    judged = Sdpa("sdpa", CPU).check(case("decode", nq=4, nk=40, kv_heads=kv_heads))
    assert judged["out"].ok


def test_a_peer_that_differs_from_its_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Sdpa("sdpa", CPU)
    monkeypatch.setattr(peer, "prepare", lambda _: Sdpa("sdpa", CPU).prepare(case(causal=False)))
    assert not all(comparison.ok for comparison in peer.check(case()).values())


@pytest.mark.parametrize("kernel", [(6, 11), (1, 1), (3, 4)])
def test_formula_of_liger_keeps_sizes_and_hides_later_keys(kernel: tuple[int, int]) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    weight = torch.randn(2, *kernel)
    attend = Liger("liger", CPU, 8192).formula(case(kernel=kernel))
    out = attend(q, k, v, weight)
    v[:, :, 10:] = 0
    torch.testing.assert_close(attend(q, k, v, weight)[:, :, :10], out[:, :, :10])


def test_long_scores_are_refused() -> None:
    for kind in (Eager, Compiled):
        assert "N > 40 are materialised only on request" in (kind("x", CPU, 40).refusal(case(n=41)) or "")
        assert kind("x", CPU, 40).refusal(case(n=40)) is None
        assert "no decode" in (kind("x", CPU, 40).refusal(case("decode", nq=1, nk=8)) or "")


def test_large_scores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Eager("eager", CPU, 8192)
    scores = 2 * 1024 * 1024 * 4
    monkeypatch.setattr(eager, "_free_bytes", lambda: 10 * scores - 2**23)
    assert eager.refusal(case(n=1024)) == "may need 0.1 GiB for scores, 0.0 GiB over what is free"
    monkeypatch.setattr(eager, "_free_bytes", lambda: 10 * scores)
    assert eager.refusal(case(n=1024)) is None


def test_liger_is_refused_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    liger = Liger("liger", CPU, 8192)
    monkeypatch.setattr(contenders, "find_spec", lambda _: None)
    assert "pip install liger-kernel" in (liger.refusal(case()) or "")
    monkeypatch.setattr(contenders, "find_spec", lambda _: object())
    assert liger.refusal(case()) is None
    assert "causal only" in (liger.refusal(case(causal=False)) or "")
    assert "limit is N = 1024" in (liger.refusal(case(n=1025)) or "")


def test_a_plan_that_does_not_fit_is_a_refusal() -> None:
    built = Built("mtagen triton", CPU, backend="triton", target="sm_90a")
    assert "min(cq, ck) is 20" in (built.refusal(case(kernel=(20, 20))) or "")


@pytest.mark.parametrize(
    ("forward", "backward", "beside", "enters"),
    [
        ("cuda", "cuda", BACKENDS, False),
        ("triton", "triton", BACKENDS, False),
        ("cuda", "triton", BACKENDS, True),
        ("cuda", "cuda", ["mtagen auto", "eager"], True),
        ("cuda", "cuda", ["mtagen auto", "mtagen cuda"], False),
    ],
)
def test_auto_enters_where_it_equals_no_other(
    monkeypatch: pytest.MonkeyPatch, forward: str, backward: str, beside: Sequence[str], enters: bool
) -> None:
    served = {"forward": forward, "backward": backward, "decode": "triton"}
    spec, target = Spec((2, 3), 64), mtagen.TARGETS["sm_90a"]
    passes = [PlannedPass(candidates(backend, name, spec, target)[0], "a test", ()) for name, backend in served.items()]
    built = SimpleNamespace(plan=SimpleNamespace(passes=passes))
    monkeypatch.setattr(contenders, "build", lambda **_: built)
    auto = Auto("mtagen auto", CPU, beside)
    assert auto.enters(case()) is enters
    assert auto.enters(case("decode")) is ("mtagen triton" not in beside)


def test_auto_enters_where_it_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "build", lambda **_: raising(RuntimeError("odd"))())
    assert Auto("mtagen auto", CPU).enters(case())


# Runs


def test_rows_follow_the_contract() -> None:
    cases = [case(name) for name in TRAINING_PASSES] + [case("decode", nq=1)]
    made = measured(cases, *entrants("quick", CPU, ["mtagen torch", "eager", "sdpa"]))
    assert json.loads(json.dumps(made)) == made
    assert made.keys() == {"command", "environment", "commit", "rates", "interrupted", "results"}
    assert made["rates"] == {"tensor_tflops": 0.1, "dram_gbps": 10.0}
    assert not {"cache_dir", "platform"} & made["environment"].keys()
    assert not made["interrupted"]
    identity = {"kernel", "head_dim", "causal", "dtype", "batch", "heads", "kv_heads", "nq", "nk", "pass", "contender"}
    figures = {"ms", "low_ms", "high_ms", "repeats", "error", "allowed", "checked"}
    for row in made["results"]:
        expected = set(identity)
        if row["contender"] == "eager" and row["pass"] == "decode":
            expected |= {"skipped"}
        else:
            expected |= figures | {"gbps" if row["pass"] == "decode" else "tflops"}
            expected |= {"peak_MiB"} if "forward" in row["pass"] else set()
            expected |= {"roofline_ms", "fraction"} if row["contender"] == "mtagen torch" else set()
            assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]
            assert row["error"] <= row["allowed"]
        assert row.keys() == expected
    assert [(row["contender"], row["pass"]) for row in made["results"]] == [
        *((name, pass_name) for name in ("mtagen torch", "eager", "sdpa") for pass_name in TRAINING_PASSES),
        *((name, "decode") for name in ("mtagen torch", "eager", "sdpa")),
    ]


@pytest.mark.usefixtures("one_thread")
def test_data_suite_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_CHECKED_LENGTH", 40)
    cases = suite("data", "cpu", head_dims=[16], lengths=[16, 64])
    made = measured(cases, *entrants("data", CPU))
    packed = [one for one in cases if one.spec.packed]
    assert len(packed) == 15
    assert len(made["results"]) == len(cases) + 2 * len(packed)
    assert all(row["error"] <= row["allowed"] and row["ms"] > 0 for row in made["results"])
    assert {Case.from_dict(row) for row in made["results"]} == set(cases)


@pytest.mark.usefixtures("one_thread")
def test_serving_suite_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are checked against whole caches before they are timed."""
    monkeypatch.setattr(contenders, "_CHECKED_LENGTH", 40)
    cases = suite("serving", "cpu", kernels=[(3, 4)], head_dims=[16], lengths=[160])
    made = measured(cases, *entrants("serving", CPU, ["mtagen torch", "mtagen torch paged"]))
    assert [row["contender"] for row in made["results"] if "page_size" in row] == ["mtagen torch paged"] * 7
    assert len(made["results"]) == len(cases) == 9
    assert all(row["error"] <= row["allowed"] and row["ms"] > 0 for row in made["results"])


@pytest.mark.usefixtures("one_thread")
def test_pages_in_a_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_CHECKED_LENGTH", 40)
    (paged,) = entrants("serving", CPU, ["mtagen torch paged"])
    original = paged.arguments
    monkeypatch.setattr(
        paged, "arguments", lambda *given: [x.roll(1, 0) if x.ndim == 4 else x for x in original(*given)]
    )
    case = next(
        one for one in suite("serving", "cpu", kernels=[(3, 4)], head_dims=[16], lengths=[160]) if one.spec.page_size
    )
    with pytest.raises(AssertionError, match="not close"):
        paged.check(case)


@pytest.mark.usefixtures("one_thread")
def test_scores_suite_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_CHECKED_LENGTH", 40)
    cases = suite("scores", "cpu", head_dims=[16], lengths=[32])
    made = measured(cases, *entrants("scores", CPU, ["mtagen torch", "eager", "sdpa"]))
    assert len(made["results"]) == 2 * len(cases) + 6  # plain attention has no expression
    assert all(row["error"] <= row["allowed"] and row["ms"] > 0 for row in made["results"])
    assert {Case.from_dict(row) for row in made["results"]} == set(cases)


def test_a_wrong_contender_is_not_timed() -> None:
    wrong = Fake("wrong", error=2.0)
    made = measured([case()], wrong, Fake("right"))
    assert wrong.prepared == 0
    assert [row.get("skipped") for row in made["results"]] == ["wrong: dq errs by 2, allowed 1", None]
    assert run.faults(made) == ["wrong: wrong: dq errs by 2, allowed 1"]


def test_a_contender_with_nothing_to_lose_is_judged() -> None:
    exact = Fake()
    exact.check = lambda _: {"out": Comparison(0.0, 0.0, 0.0)}  # type: ignore[method-assign]
    assert measured([case()], exact)["results"][0]["checked"] == "out"


def test_errors_cost_rows_and_not_the_run() -> None:
    broken, large = (
        Fake("broken", before=raising(ValueError("odd"))),
        Fake("large", before=raising(torch.OutOfMemoryError("72 GiB"))),
    )
    made = measured([case()], broken, large, Fake("sound"))
    assert [row.get("skipped") for row in made["results"]] == [
        "failed: ValueError: odd",
        "out of memory: 72 GiB",
        None,
    ]
    assert run.faults(made) == ["broken: failed: ValueError: odd"]


def test_patience() -> None:
    """Who was slow is not timed with more scores; other kernels and contenders are, and smaller cases."""
    cases = [case(n=8), case(n=16), case(n=16, kernel=(3, 3)), case(n=4)]

    def rows(patience: float) -> list[dict[str, Any]]:
        made: dict[str, Any] = run.run(cases, [Fake("slow")], CPU, command="", budget_ms=1, patience=patience)
        return list(made["results"])

    first, second, other, shorter = rows(0.0)
    assert "ms" in first
    assert "ms" in other
    assert "ms" in shorter
    assert second["skipped"].endswith("at N = 8: more only with more --patience than 0.0 s")
    assert all("ms" in row for row in rows(60.0))


def test_kernels_share_the_time_of_plain_attention() -> None:
    plain, convolving = Fake("plain"), Fake("convolving")
    plain.convolves = False
    made = measured([case(), case(kernel=(1, 1))], plain, convolving)
    assert (plain.prepared, convolving.prepared) == (1, 2)
    first, _, second, _ = made["results"]
    assert (first["kernel"], second["kernel"]) == ([2, 3], [1, 1])
    assert first | {"kernel": None} == second | {"kernel": None}


def test_bursts_begin_on_an_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device, events = torch.device("cuda"), []
    monkeypatch.setattr(torch.cuda, "synchronize", events.append)
    bursts = timing.issuing_us(lambda: events.append("call"), device, burst=2, seconds=0.01)
    assert bursts
    assert events == [device, "call", "call"] * len(bursts) + [device]


def test_issuing_is_timed_in_rounds_over_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[Callable[[], object]] = []

    def issuing_us(call: Callable[[], object], device: torch.device) -> list[float]:
        issued.append(call)
        return [900.0 if len(issued) <= 20 else 50.0]  # the host is busy at first

    monkeypatch.setattr(run, "issuing_us", issuing_us)
    monkeypatch.setattr(run, "graph_ms", lambda call, device: 0.5)
    plain, passing = Fake("plain"), Fake("passing")
    plain.convolves = passing.lasts = False
    made = run.run(
        [case(n=8), case(n=16), case(n=16, kernel=(3, 3))], [Fake(), plain, passing], CPU, command="", launches=True
    )
    assert len(issued) == 10 * 3 * 3  # ten rounds over the three contenders' three cases
    figures = {(row["contender"], row["cpu_us"], row["graph_ms"]) for row in made["results"]}
    assert figures == {("fake", 50.0, 0.5), ("plain", 50.0, 0.5), ("passing", 900.0, 0.5), ("passing", 50.0, 0.5)}


def test_a_call_that_breaks_when_issued_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "issuing_us", lambda call, device: raising(torch.OutOfMemoryError("72 GiB"))())
    monkeypatch.setattr(run, "graph_ms", lambda call, device: 0.5)
    made = run.run([case()], [Fake()], CPU, command="", budget_ms=1, launches=True)
    (row,) = made["results"]
    assert row["skipped"] == "out of memory: 72 GiB"


def test_builds_beforehand_report_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = Fake("unknown to the processes that build")
    unknown.warm_key = lambda case: case.spec  # type: ignore[method-assign]
    competing = [*entrants("quick", CPU, ["mtagen torch", "eager"]), unknown]
    with run._progress() as progress:
        run._fill_caches([case(n=n) for n in (40, 41)], competing, CPU, 1, progress)
    assert [task.total for task in progress.tasks] == [2]  # one build for both lengths, and nothing to build for eager
    assert progress.finished
    text = " ".join(capsys.readouterr().err.split())
    assert text.count("is not built") == 1
    assert "unknown to the processes that build 2 x 3, d = 16, N = 40 is not built: contender: got" in text


def test_a_contender_enters_only_where_it_says() -> None:
    fake = Fake()
    fake.enters = lambda case: case.sizes.nk > 40  # type: ignore[method-assign]
    assert [row["nk"] for row in measured([case(), case(n=41)], fake)["results"]] == [41]


def test_checks_are_shared_by_lengths() -> None:
    fake, seen = Fake(), []
    judge = fake.check
    fake.check = lambda case: seen.append(case) or judge(case)  # type: ignore[method-assign,func-returns-value]
    cases = [case(n=40), case(n=50), case(n=40, batch=2), case(n=40, causal=False), case("decode", nq=1)]
    measured([*cases, case(n=40, heads=4, kv_heads=4)], fake)
    found = [(c.spec.causal, c.decodes, c.sizes.heads) for c in seen]
    assert found == [(True, False, 2), (False, False, 2), (True, True, 2), (True, False, 4)]


# Command line


def test_command_writes_a_run_and_compares_it(tmp_path: Path) -> None:
    path, before = tmp_path / "run.json", tmp_path / "before.json"
    result = bench(*SMALL, "--contender", "mtagen torch", "--contender", "sdpa", "--json", path)
    assert result.exit_code == 0, result.output
    made = json.loads(path.read_text())
    assert made["command"] == (
        "mtagen bench --suite=quick --kernel=2,3 --head-dim=16 --length=40 "
        "'--contender=mtagen torch' --contender=sdpa --max-materialised=8192 --patience=1 --device=cpu"
    )
    assert {row["contender"] for row in made["results"]} == {"mtagen torch", "sdpa"}
    for factor, status in ((1e-6, 1), (1e6, 0)):
        rows = [row | {"ms": row["ms"] * factor} for row in made["results"]]
        before.write_text(json.dumps(made | {"results": rows}))
        assert bench(*SMALL, "--contender", "mtagen torch", "--against", before).exit_code == status


def test_command_fails_on_a_wrong_contender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contenders, "entrants", lambda *_: [Fake("liar", error=2.0)])
    result = bench(*SMALL, "--json", tmp_path / "run.json")
    assert result.exit_code == 1
    assert "liar: wrong: dq errs by 2" in result.stderr
    assert json.loads((tmp_path / "run.json").read_text())["results"]


def test_interrupted_run_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    second = Fake("second", before=raising(KeyboardInterrupt()))
    monkeypatch.setattr(contenders, "entrants", lambda *_: [Fake("first"), second])
    assert bench(*SMALL, "--json", tmp_path / "run.json").exit_code == 130
    made = json.loads((tmp_path / "run.json").read_text())
    assert made["interrupted"]
    assert [(row["contender"], row["pass"]) for row in made["results"]] == [("first", name) for name in TRAINING_PASSES]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "slow"], "suite: got 'slow'"),
        (["--suite", "overhead"], "suite: got 'overhead'; can be measured on a GPU only"),
        (
            ["--contender", "mtagen cuda"],
            "contender: got 'mtagen cuda'; is no contender on cpu; legal: ('mtagen torch', ",
        ),
        (["--kernel", "6"], "kernel: got '6'"),
        (["--kernel", "0,3"], "kernel: got (0, 3)"),
        (["--head-dim", "17"], "head_dim: got 17"),
        (["--length", "0"], "length: got 0"),
        (["--device", "tpu"], "device: got 'tpu'"),
        (["--json", "nowhere/run.json"], "file: got 'nowhere/run.json'"),
        (["--against", __file__], "run: got "),
    ],
)
def test_bad_arguments_are_explained_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run", raising(AssertionError("work was done")))
    result = bench(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mtagen: {message}")
    assert result.stdout == ""


def test_bad_axes_are_errors_of_the_library() -> None:
    with pytest.raises(SpecError, match="head_dim"):
        suite("quick", "cpu", head_dims=[17])


@pytest.mark.gpu
def test_gpu_measures_launches_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ["bench", "--suite", "overhead", "--kernel", "2,3", "--head-dim", "64", "--length", "256"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["results"]
    assert {"mtagen cuda", "mtagen triton"} <= {row["contender"] for row in rows}
    for row in rows:
        assert min(row["ms"], row["cpu_us"], row["graph_ms"], row["peak_MiB"] + 1, row["fraction"]) > 0


@pytest.mark.gpu
def test_gpu_contenders_are_right() -> None:
    device = torch.device("cuda", 0)
    training = Case(Spec((2, 3), 64), Sizes(2, 4, 4, 300, 300), "forward")
    decode = Case(Spec((2, 3), 64), Sizes(2, 4, 2, 1, 300), "decode")
    packed = Case(Spec((2, 3), 64, packed=True), Sizes(3, 4, 4, 300, 300), "forward")
    scores = [Spec(None, 64, **expressions(4)[name]) for name in ("softcap", "bias of keys")]
    special = [
        packed,
        *(replace(training, spec=spec) for spec in scores),
        *(replace(training, spec=Spec((2, 3), 64, **x)) for x in ({"window": (64, -1)}, {"dropout": True})),
    ]
    competing = {
        contender.name: contender for name in ("full", "data", "scores") for contender in entrants(name, device)
    }
    assert {"mtagen cuda one by one", "mtagen cuda padded", "sdpa cudnn"} <= competing.keys()
    for contender in competing.values():
        for one in (training, decode, *special):
            if contender.enters(one) and contender.refusal(one) is None:
                judged = contender.check(one)
                assert all(comparison.ok for comparison in judged.values()), (contender.name, judged)
