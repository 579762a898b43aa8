"""Tuning without a GPU: what is proposed, how winners and correlations come about, what is kept and followed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner

import mtagen
from mtagen import BackendError, Plan, PlanError, Spec, plan, tuning
from mtagen.cli import app
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.planner.choice import COST_MODEL
from mtagen.planner.lift.decode import DECODE_ROLES
from mtagen.planner.lift.passes import LiftPass
from mtagen.planner.passes import PASSES, describe
from mtagen.planner.tables import SHIPPED, TUNED, Shape, Table, shipped
from mtagen.runtime import tuned
from mtagen.runtime.load import Passes
from mtagen.tuning import Candidate, Timed, Tuning, candidates_of, rank_correlation

SPEC, TARGET = Spec((6, 11), 64), "sm_90a"
LAYER = Spec((6, 11), 64, mixed_heads=16, post_kernel=(6, 11), post_mixed_heads=16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that says it has an H200, and an empty cache."""
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_candidates_differ_from_the_plan_in_one_decision(backend: str) -> None:
    base = plan(SPEC, TARGET, backend)
    by_key: dict[str, list[Candidate]] = {}
    for one in candidates_of(base, 3):
        by_key.setdefault(one.key, []).append(one)
    assert by_key.keys() == {key for name in PASSES for key in base[name].decisions()}
    for key, group in by_key.items():
        assert (
            len({describe(one.fields) for one in group}) == len(group) <= 4
        )  # three alternatives, and what is planned
        assert group[0].plan == base
        for one in group:
            assert key in base[one.pass_name].decisions()
            others = [name for name in PASSES if name != one.pass_name]
            assert [one.plan[name] for name in others] == [base[name] for name in others]
            planned, decided = (made[one.pass_name].decisions() for made in (base, one.plan))
            assert {**decided, key: planned[key]} == planned
            assert one.cost > 0


def test_the_lowering_of_mixed_heads_is_not_tuned() -> None:
    """It would be timed alone, and win."""
    base = plan(Spec(None, 64, mixed_heads=16), TARGET, "cuda")
    assert base["forward"].lowering == "heads"
    assert {one.key for one in candidates_of(base, 3)} == {*base["backward"].decisions(), *base["decode"].decisions()}


def test_candidates_of_strips() -> None:
    """A kernel that forward and backward share is timed once, in the forward pass, and varied in both."""
    base = plan(LAYER, TARGET, "cuda")
    by_key: dict[str, list[Candidate]] = {}
    for one in candidates_of(base, 3):
        by_key.setdefault(one.key, []).append(one)
    assert by_key.keys() == {key for name in PASSES for key in base[name].decisions()}
    for key, group in by_key.items():
        having = [name for name in PASSES if key in base[name].decisions()]
        assert {one.pass_name for one in group} == {having[0]}
        assert group[0].plan == base
        assert len({describe(one.fields) for one in group}) == len(group) > 1
        for one in group:
            for name in PASSES:
                planned, decided = base[name].decisions(), one.plan[name].decisions()
                assert decided == (planned | {key: one.fields} if name in having else planned)
    assert sum(
        one.pass_name == "forward" and "backward" in one.plan.strip for group in by_key.values() for one in group
    )


def test_the_time_of_a_kernel_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches of a call count, and no other kernel's; the module is left as it was."""
    clock = [0.0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def kernel(ms: float) -> Callable[..., None]:
        def launch(grid: tuple[int, ...]) -> None:
            clock[0] += ms * grid[0]

        return launch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    softmax, other = kernel(1.0), kernel(100.0)
    module = SimpleNamespace(LOADED={"softmax": {}, "other": {0: {"other": other}}})

    def call() -> None:
        module.LOADED["softmax"].setdefault(0, {"softmax": softmax})
        for rows in (2, 3):
            module.LOADED["other"][0]["other"]((1,))
            module.LOADED["softmax"][0]["softmax"]((rows,))

    assert tuning._kernel_ms(module, "softmax", call) == 5.0
    assert module.LOADED["softmax"] == {0: {"softmax": softmax}}


def test_without_shortcuts_passes_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function stands in for a kernel of a module."""
    monkeypatch.setenv("MTAGEN_SHORTCUTS", "0")
    monkeypatch.setattr(tuning, "load", lambda planned, sources: planned)
    monkeypatch.setattr(tuning, "_pass_ms", lambda planned, name, spec, sizes: (planned, name))
    for base in (plan(SPEC, TARGET, "triton"), plan(LAYER, TARGET, "cuda")):
        one = next(iter(candidates_of(base, 1)))
        assert tuning._time(one) == (one.plan, one.pass_name)


def test_every_tile_of_training_has_its_kernel() -> None:
    """What is timed of a Triton candidate is the kernel that its tile is of."""
    base = plan(SPEC, TARGET, "triton")
    for made in (base["forward"], base["backward"]):
        assert isinstance(made, LiftPass)
        for key in made.decisions():
            role = made.role(key)
            (kernel,) = (one for one in made.kernels if one.name == tuning._kernel_name(made, role))
            tile = made.tile(role)
            assert (kernel.threads, dict(kernel.constants)["BLOCK_M"]) == (32 * tile.num_warps, tile.block_m)
    assert {made.role(key) for made in (base["decode"],) for key in made.decisions()} == set(DECODE_ROLES)


def test_rank_correlation() -> None:
    def timings(key: str, *pairs: tuple[float, float]) -> list[Timed]:
        return [Timed(key, {"i": i}, cost, ms) for i, (cost, ms) in enumerate(pairs)]

    found = rank_correlation(
        [
            *timings("right", (1.0, 0.1), (2.0, 0.3), (3.0, 0.9)),
            *timings("reversed", (3.0, 0.1), (2.0, 0.3), (1.0, 0.9)),
            *timings("equal times", (1.0, 0.100), (2.0, 0.1005), (3.0, 0.2)),  # the first two are no different
            *timings("no order", (1.0, 0.1), (1.0, 0.2), (1.0, 0.3)),
            *timings("two only", (1.0, 0.1), (2.0, 0.2)),
        ]
    )
    assert found == pytest.approx({"right": 1.0, "reversed": -1.0, "equal times": math.sqrt(3) / 2, "no order": 0.0})
    assert math.isnan(tuning.mean_rank_correlation(timings("two only", (1.0, 0.1), (2.0, 0.2))))
    assert tuning.mean_rank_correlation(timings("right", (1, 1), (2, 2), (3, 3))) == pytest.approx(1)


@pytest.mark.usefixtures("gpu")
def test_the_fastest_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest by the cost model is the fastest here; what fails to run is reported and does not win."""

    def run(one: Candidate) -> float:
        if one.key.startswith("lift dk_lifted"):
            raise RuntimeError("no room")
        return 1 / one.cost

    compiled: list[tuple[Plan, str]] = []
    monkeypatch.setattr(tuning, "_time", run)
    monkeypatch.setattr(tuning, "precompile", lambda jobs, processes: compiled.extend(jobs))
    ms = {("cuda", 8192): 2.0, ("triton", 8192): 4.0, ("cuda", 1024): 1.0, ("triton", 1024): 8.0}
    ms |= {("cuda", 32768): 5.0, ("triton", 32768): 10.0}
    monkeypatch.setattr(tuning, "_call", lambda passes, name, spec, sizes: (passes, sizes.nk))
    monkeypatch.setattr(tuning, "_ms", ms.__getitem__)
    monkeypatch.setattr(tuning, "load", lambda made, sources: made.backend)
    steps: list[tuple[int, int]] = []
    found = tuning.tune([SPEC], TARGET, limit=4, progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] == len(steps) - 1
    assert {failed.key.split()[1] for failed in found.failed} == {"dk_lifted"}
    assert {failed.error for failed in found.failed} == {"RuntimeError: no room"}
    assert {name for _, name in compiled} == {"forward", "backward", "decode"}
    fastest = {timed.key: timed.ms for timed in sorted(found.timings, key=lambda timed: -timed.ms)}
    chosen = found.table.decisions
    assert set(chosen) == set(fastest)
    ties = 1 + tuning._ALIKE_MS  # what was planned stays where nothing beats it by more
    assert all(timed.ms <= fastest[timed.key] * ties for timed in found.timings if timed.fields == chosen[timed.key])
    assert found.table.cuda_over_triton == {
        name: {Shape(6, 11, 64, "causal"): 0.25 if name != "decode" else 0.5}
        for name in ("forward", "backward", "decode")
    }
    made = plan(SPEC, TARGET, "triton", tables=(found.table,))
    sources = {made[one.plan.pass_name].role(key): source for one in made.passes for key, source in one.sources}
    assert sources == {**dict.fromkeys(sources, TUNED), "dk_lifted": COST_MODEL}
    assert tuning.report(found)[0][0] == next(iter(plan(SPEC, TARGET, "cuda")["forward"].decisions()))
    assert json.loads(json.dumps(tuning.to_dict(found)))["device"] == "NVIDIA H200"


@pytest.mark.usefixtures("gpu")
def test_what_is_tuned_of_strips_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all passes that have the kernel; the slowest by the cost model is the fastest here, too."""
    monkeypatch.setattr(tuning, "_time", lambda one: 1 / one.cost)
    monkeypatch.setattr(tuning, "precompile", lambda jobs, processes: None)
    found = tuning.tune([LAYER], TARGET, backends=["cuda"], limit=20)
    assert not found.failed
    made, planned = plan(LAYER, TARGET, tables=(found.table,)), plan(LAYER, TARGET, tables=())
    assert Plan.from_json(made.to_json()) == made
    for name in ("forward", "backward"):
        decisions = made[name].decisions()
        assert decisions == {key: found.table.decisions[key] for key in decisions}
        for key, first in planned[name].decisions().items():
            costs = [one.decision_cost(key) for one in planned[name].alternatives(key)]
            apart = costs[-1] > costs[0] * (1 + tuning._ALIKE_MS)  # or what was planned stays
            assert made[name].decision_cost(key) == (costs[-1] if apart else costs[0])
            assert (decisions[key] != first) == apart


def test_what_is_planned_stays_unless_beaten() -> None:
    planned, other = Timed("key", {"keys": 64}, 2.0, 1.0), Timed("key", {"keys": 128}, 1.0, 0.995)
    assert tuning._winner([planned, other]) == planned
    assert tuning._winner([planned, other._replace(ms=0.98)]).fields == other.fields


@pytest.mark.usefixtures("gpu")
def test_passes_that_one_backend_lacks_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has no backward for so wide values and this mask, and so no forward that rounds as it does."""
    spec = Spec((6, 11), 64, 256, mask="output")
    monkeypatch.setattr(tuning, "_time", lambda one: 1.0)
    monkeypatch.setattr(tuning, "precompile", lambda jobs, processes: None)
    monkeypatch.setattr(tuning, "_pass_ms", lambda *args: 1.0)
    monkeypatch.setattr(tuning, "load", lambda made, sources: None)
    found = tuning.tune([spec], TARGET, backends=("triton", "cuda"), limit=2)
    assert {key.split()[1] for key in found.table.decisions if key.startswith("tile")} == {"decode"}
    assert set(found.table.cuda_over_triton) == {"decode"}


@pytest.mark.usefixtures("gpu")
def test_what_is_found_is_kept() -> None:
    table = Table(TUNED, {"a": {"rows": 16}, "b": {"keys": 64}}, {"forward": {Shape(6, 11, 64, "causal"): 0.5}})
    assert tuned.remembered(SPEC, TARGET) is None
    tuned.remember(SPEC, TARGET, table)
    assert tuned.remembered(SPEC, TARGET) == table
    tuned.remember(SPEC, TARGET, Table(TUNED, {"b": {"keys": 128}}))  # of one backend, say
    assert tuned.remembered(SPEC, TARGET) == replace(table, decisions={"a": {"rows": 16}, "b": {"keys": 128}})


@pytest.mark.usefixtures("gpu")
def test_what_is_found_is_not_for_another_spec() -> None:
    """A spec that differs in one field, whichever it is, has no table."""
    others = {
        "kernel": (6, 9),
        "head_dim": 32,
        "value_head_dim": 32,
        "causal": False,
        "key_padding": "left",
        "mask": "output",
        "dtype": "fp16",
        "mixed_heads": 4,
        "post_kernel": (2, 3),
        "post_mixed_heads": 2,
        "dynamic_ranks": (1, 1),
        "post_dynamic_ranks": (1, 1),
        "window": (8, 0),
        "scores": "tanh(s)",
        "convolved": "2 * tanh(s)",
        "logits": "3 * tanh(s)",
        "visible": "j < 9",
        "parameters": (("table", "h,3"),),
        "constants": ("table",),
        "sink": True,
        "packed": True,
        "dropout": True,
        "page_size": 16,
    }
    assert set(others) == {field.name for field in fields(Spec)}
    reading = {"logits": "s + table[h, 1]", "parameters": (("table", "h,2"),)}
    needed: dict[str, dict[str, Any]] = {
        "parameters": reading,
        "constants": reading,
        "dynamic_ranks": {"mixed_heads": 4},
        "post_dynamic_ranks": {"post_mixed_heads": 2},
    }
    for name, value in others.items():
        spec = replace(SPEC, **needed.get(name, {}))
        tuned.remember(spec, TARGET, Table(TUNED))
        assert tuned.remembered(spec, TARGET) == Table(TUNED)
        assert tuned.remembered(replace(spec, **{name: value}), TARGET) is None, name


@pytest.mark.usefixtures("gpu")
def test_what_is_found_is_not_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.remember(SPEC, TARGET, Table(TUNED))
    assert tuned.remembered(SPEC, "sm_80") is None
    others = [(package, "__version__", "9.9") for package in (torch, triton)]
    others.append((torch.cuda, "get_device_name", lambda: "NVIDIA H100"))
    others.append((tuned, "toolchain", lambda: SimpleNamespace(nvrtc="9.9")))
    for owner, name, value in others:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(owner, name, value)
            assert tuned.remembered(SPEC, TARGET) is None
    assert tuned.remembered(SPEC, TARGET) == Table(TUNED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tuned.remembered(SPEC, TARGET) is None


@pytest.mark.usefixtures("gpu")
def test_plans_that_are_wrong_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Iterable[str] = ["out: 1 > 0.1"]
    monkeypatch.setattr(tuning, "assemble", lambda made: None)
    monkeypatch.setattr(tuning, "failures", lambda op, spec, device: wrong)
    with pytest.raises(
        BackendError, match="mta_cq6_ck11_d64_bf16_causal_sm90a, cuda, is not accurate with the fastest candidates: out"
    ):
        tuning.keep([SPEC], TARGET, Table(TUNED))
    assert tuned.remembered(SPEC, TARGET) is None
    wrong = []
    tuning.keep([SPEC], TARGET, Table(TUNED))
    assert tuned.remembered(SPEC, TARGET) == Table(TUNED)


def test_build_follows_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(TUNED, cuda_over_triton={"forward": {Shape(6, 11, 64, "causal"): 3.0}})
    monkeypatch.setattr("mtagen.op.remembered", lambda spec, target: table)
    monkeypatch.setattr("mtagen.op.assemble", lambda planned, *_, **__: planned)
    made = mtagen.build((6, 11), 64, target=TARGET)
    assert "forward: cuda takes 3.00 of its time, tuned here" in made.reason


def test_build_tunes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Table] = []
    table = Table(TUNED, cuda_over_triton={"forward": {Shape(6, 11, 64, "causal"): 3.0}})
    monkeypatch.setattr("mtagen.op.remembered", lambda spec, target: kept[0] if kept else None)
    monkeypatch.setattr("mtagen.op.assemble", lambda planned, *_, **__: planned)
    monkeypatch.setattr(tuning, "tune", lambda specs, target: Tuning((), (), table))
    monkeypatch.setattr(tuning, "keep", lambda specs, target, table: kept.append(table))
    for _ in range(2):
        made = mtagen.build((6, 11), 64, target=TARGET, tune=True)
        assert "tuned here" in made.reason
    assert kept == [table]


def test_tuning_needs_a_gpu() -> None:
    with pytest.raises(BackendError, match="device: got 'cpu'; tuning times kernels on a GPU"):
        mtagen.build((2, 3), 16, tune=True)
    for options in (["--kernel", "2,3"], ["--kernel", "none", "--post-kernel", "2,3", "--post-mixed-heads", "2"]):
        result = CliRunner().invoke(app, ["tune", "--head-dim", "16", *options])
        assert result.exit_code == 2
        assert "tuning times kernels on a GPU" in result.stderr


def test_torch_has_nothing_to_tune() -> None:
    with pytest.raises(BackendError, match="tune: got True; the torch backend has no kernels to tune"):
        mtagen.build((2, 3), 16, backend="torch", tune=True)


@pytest.mark.usefixtures("gpu")
def test_what_cannot_be_tuned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "available_backends", lambda: ("triton",))
    with pytest.raises(BackendError, match="backend: got 'cuda'; its packages are not installed"):
        tuning.tune([SPEC], TARGET, backends=["cuda"])
    monkeypatch.setattr(tuning, "available_backends", lambda: ("cuda",))
    with pytest.raises(PlanError, match="fp32"):
        tuning.tune([replace(SPEC, dtype="fp32")], TARGET)


def test_files_are_checked_before_tuning() -> None:
    for option in ("--json", "--table"):
        result = CliRunner().invoke(app, ["tune", "--kernel", "2,3", "--head-dim", "16", option, "nowhere/x.json"])
        assert (result.exit_code, "file: got 'nowhere/x.json'; its folder does not exist" in result.stderr) == (2, True)


def test_a_backend_without_candidates_is_refused() -> None:
    result = CliRunner().invoke(app, ["tune", "--kernel", "2,3", "--head-dim", "16", "--backend", "torch"])
    assert (result.exit_code, "backend: got 'torch'; has no kernels to tune" in result.stderr) == (2, True)


@pytest.mark.usefixtures("gpu")
def test_export_adds_to_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    tuning.export(Table(TUNED, {"a": {"rows": 16}}), path)
    tuning.export(Table(TUNED, {"b": {"rows": 32}}), path)
    content = json.loads(path.read_text())
    assert content["device"] == "NVIDIA H200"
    assert Table.from_dict(content, TUNED) == Table(TUNED, {"a": {"rows": 16}, "b": {"rows": 32}})


@pytest.mark.usefixtures("gpu")
def test_export_replaces_what_is_tuned_again(tmp_path: Path) -> None:
    """A decision by its key, a ratio by its shape; the rest of the file stays."""
    path, one, other = tmp_path / "table.json", Shape(6, 11, 64, "causal"), Shape(3, 3, 64, "causal")
    old = Table(
        TUNED, {"a": {"rows": 16}, "b": {"rows": 16}}, {"forward": {one: 0.5, other: 0.5}, "decode": {one: 2.0}}
    )
    new = Table(TUNED, {"b": {"rows": 32}}, {"forward": {one: 0.75}, "backward": {one: 0.25}})
    tuning.export(old, path)
    tuning.export(new, path)
    assert Table.from_dict(json.loads(path.read_text()), TUNED) == Table(
        TUNED,
        {"a": {"rows": 16}, "b": {"rows": 32}},
        {"forward": {one: 0.75, other: 0.5}, "decode": {one: 2.0}, "backward": {one: 0.25}},
    )


@pytest.mark.usefixtures("gpu")
def test_what_is_exported_can_be_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan follows the file as the package's own, though it was measured here."""
    key, fields = next(iter(plan(SPEC, TARGET, "cuda")["forward"].decisions().items()))
    rival = next(
        made for made in plan(SPEC, TARGET, "cuda")["forward"].alternatives(key) if made.decisions()[key] != fields
    )
    (tmp_path / "tables").mkdir()
    tuning.export(Table(TUNED, {key: rival.decisions()[key]}), tmp_path / "tables" / f"{TARGET}.json")
    monkeypatch.setattr("mtagen.planner.tables.files", lambda package: tmp_path)
    shipped.cache_clear()
    try:
        forward = plan(SPEC, TARGET, "cuda").passes[0]
        assert forward.plan == rival
        assert dict(forward.sources) == {key: SHIPPED}
    finally:
        shipped.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_costs_are_those_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of its pass, which has others: a rank correlation would be that of sums."""
    costs: dict[tuple[str, str], float] = {}

    def run(one: Candidate) -> float:
        costs[one.key, describe(one.fields)] = one.plan[one.pass_name].decision_cost(one.key)
        return 1.0

    monkeypatch.setattr(tuning, "_time", run)
    monkeypatch.setattr(tuning, "precompile", lambda jobs, processes: None)
    monkeypatch.setattr(tuning, "_compare", lambda plans: {})
    found = tuning.tune([SPEC], TARGET, backends=("triton",), limit=3)
    assert {(timed.key, describe(timed.fields)): timed.cost for timed in found.timings} == costs
    backward = plan(SPEC, TARGET, "triton")["backward"]
    assert all(backward.decision_cost(key) < backward.cost for key in backward.decisions())


def test_what_was_just_tuned_goes_before_what_is_shipped() -> None:
    """Backends are compared, and plans are checked, with the winners."""
    key, fields = next(iter(plan(SPEC, TARGET, "cuda")["forward"].decisions().items()))
    assert shipped(TARGET).decisions[key] == fields
    rival = next(
        made for made in plan(SPEC, TARGET, "cuda")["forward"].alternatives(key) if made.decisions()[key] != fields
    )
    (made,) = tuning._plans(SPEC, TARGET, ("cuda",), (Table(TUNED, {key: rival.decisions()[key]}),))
    assert made["forward"] == rival


@pytest.mark.parametrize("columns", [0, 128])
def test_a_backward_pass_is_timed_with_what_it_reads(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Outputs, or unmixed outputs of two heads side by side."""
    spec, sizes = Spec((6, 11), 64, post_mixed_heads=2), Sizes(1, 2, 2, 5, 7)
    read: list[tuple[Any, ...]] = []
    sampler = Sampler.for_timing(spec, sizes, torch.device("cpu"))
    monkeypatch.setattr(tuning.Sampler, "for_timing", lambda *_: sampler)
    passes = Passes(backward=lambda *given, **_: read.append(given), unmixed_columns=columns)
    tuning._call(passes, "backward", spec, sizes)()
    grad_out, *_, out, lse, _ = read[0]
    assert (grad_out.shape, lse.shape) == ((1, 2, 5, 64), (1, 2, 5))
    assert out.shape == (1, 2, 5, columns or 64)
