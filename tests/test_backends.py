"""Which backend serves which pass: measured, scaled from a neighbour, by planned work, or because the other cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from mtagen import Plan, PlanError, Spec, SpecError, plan
from mtagen.planner import backends
from mtagen.planner.backends import PASSES, cuda_over_triton, flops_per_score
from mtagen.planner.tables import Shape, Table


def measured(ratios: Mapping[str, Mapping[Shape, float]]) -> tuple[Table]:
    return (Table("measured", cuda_over_triton=ratios),)


def backend_of(made: Plan) -> dict[str, str]:
    return {choice.pass_name: choice.backend for choice in made.choices}


def test_measured_shapes_decide() -> None:
    """CUDA, where it is faster or nearly as fast."""
    shape = Shape(6, 11, 64, True)
    tables = measured({"forward": {shape: 0.4}, "backward": {shape: 1.25}, "decode": {shape: 1.1}})
    made = plan(Spec((6, 11), 64), "sm_90a", tables=tables)
    assert backend_of(made) == {"forward": "cuda", "backward": "triton", "decode": "cuda"}
    assert made.backend == "cuda+triton"
    assert "forward: 0.40 of triton's time, measured" in made.reason
    assert "backward: cuda takes 1.25 of its time, measured" in made.reason
    assert (set(made.fused), bool(made.tiles)) == ({"forward", "decode"}, True)
    again = Plan.from_json(made.to_json())
    assert (again, hash(again), again.reason) == (made, hash(made), made.reason)


def test_other_shapes_are_scaled_from_the_nearest() -> None:
    tables = measured(
        {
            "forward": {Shape(6, 11, 128, True): 0.5, Shape(1, 1, 128, True): 2.0},
            "decode": {Shape(6, 11, 64, True): 0.75},
        }
    )

    def work(kernel: tuple[int, int], d: int) -> float:
        spec = Spec(kernel, d)
        return flops_per_score("cuda", spec)["forward"] / flops_per_score("triton", spec)["forward"]

    ratio, source = cuda_over_triton("forward", Spec((7, 7), 96), tables)
    assert source == "scaled from (6, 11), head dim 128, causal"
    assert ratio == pytest.approx(0.5 * work((7, 7), 96) / work((6, 11), 128))
    ratio, source = cuda_over_triton("forward", Spec((1, 2), 64), tables)
    assert source == "scaled from (1, 1), head dim 128, causal"
    assert ratio == pytest.approx(2.0 * work((1, 2), 64) / work((1, 1), 128))
    assert cuda_over_triton("decode", Spec((3, 3), 128), tables)[0] == 0.75  # its time is that of reading the cache


def test_planned_work_decides_where_nothing_is_measured() -> None:
    for kernel, d in (((6, 11), 128), ((1, 1), 64), ((2, 2), 32)):
        spec = Spec(kernel, d)
        ratio, source = cuda_over_triton("backward", spec, ())
        assert source == "by planned work"
        cheaper = min(("cuda", "triton"), key=lambda backend: flops_per_score(backend, spec)["backward"])
        assert (ratio <= 1) == (cheaper == "cuda")


def test_flop_per_score() -> None:
    """(6, 11): six terms; a convolution of 16 x 8 scores in at most nine mma's, which are 32 flop a score."""
    d, spec = 128, Spec((6, 11), 128)
    assert flops_per_score("triton", spec) == {"forward": 14 * d, "backward": 40 * d}
    mma = (flops_per_score("cuda", spec)["forward"] - 4 * d) / 32
    assert mma <= 9
    assert flops_per_score("cuda", spec)["backward"] == 10 * d + 3 * 32 * mma


@pytest.mark.parametrize(
    ("spec", "target", "cause"),
    [
        (Spec((6, 11), 64, dtype="fp32"), "sm_90a", "dtype: got 'fp32'"),
        (Spec((3, 18), 64), "sm_90a", "kernel: got (3, 18)"),
        (Spec((6, 11), 24), "sm_90a", "head_dim: got 24"),
        (Spec((6, 11), 64), "gfx942", "target: got 'gfx942'"),
        (Spec((6, 11), 64), "generic", "target: got 'generic'"),
    ],
)
def test_what_cuda_cannot_do_falls_to_triton_and_the_plan_says_why(spec: Spec, target: str, cause: str) -> None:
    for pass_name, backend, reason in plan(spec, target).choices[:2]:
        assert backend == "triton", pass_name
        assert reason.startswith(f"not cuda: {cause}; ")
    with pytest.raises(PlanError, match=re.escape(cause)):
        plan(spec, target, "cuda")


def test_what_triton_cannot_do_falls_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PlanError("no tile fits")

    monkeypatch.setattr(backends, "triton_tiles", refuse)
    made = plan(Spec((6, 11), 64), "sm_90a")
    assert (made.backend, made.reason) == ("cuda", "not triton: no tile fits")
    with pytest.raises(PlanError, match="no tile fits"):
        plan(Spec((6, 11), 64, dtype="fp32"), "sm_90a")


def test_only_what_is_available_is_chosen() -> None:
    made = plan(Spec((6, 11), 64), "sm_90a", available=("triton",))
    assert made.backend == "triton"
    assert "pip install 'mtagen[cuda]'" in made.reason
    made = plan(Spec((6, 11), 64), "sm_90a", available=("cuda",))
    assert made.backend == "cuda"
    with pytest.raises(PlanError, match="dtype: got 'fp32'"):
        plan(Spec((6, 11), 64, dtype="fp32"), "sm_90a", available=("cuda",))


def test_an_explicit_backend_serves_every_pass() -> None:
    for backend in ("cuda", "triton", "torch"):
        made = plan(Spec((6, 11), 64), "sm_90a", backend)
        assert backend_of(made) == dict.fromkeys(PASSES, backend)
        assert (made.backend, made.reason) == (backend, "asked for")
        assert bool(made.tiles) == (backend == "triton")
        assert bool(made.fused) == (backend == "cuda")
    with pytest.raises(SpecError, match="backend: got 'cudnn'"):
        plan(Spec((6, 11), 64), "sm_90a", "cudnn")
    with pytest.raises(PlanError, match="backend: got 'cuda'; compiles for GPUs only"):
        plan(Spec((6, 11), 64), "cpu", "cuda")


def test_text_shows_the_choice_of_each_pass() -> None:
    tables = measured({"forward": {Shape(6, 11, 64, True): 0.4}, "backward": {Shape(6, 11, 64, True): 1.25}})
    text = str(plan(Spec((6, 11), 64), "sm_90a", tables=tables))
    assert re.search(r"forward backend +cuda: 0.40 of triton's time, measured", text)
    assert re.search(r"backward backend +triton: cuda takes 1.25 of its time, measured", text)
    assert re.search(r"scores +\d+ x \d+, \d warps", text)  # a tile of Triton's backward pass
    for fused in plan(Spec((6, 11), 64), "sm_90a", "cuda").fused.values():
        for _, name, value in fused.rows_of_table():
            assert re.search(rf"{re.escape(name)} +{re.escape(value)}", str(plan(Spec((6, 11), 64), "sm_90a", "cuda")))
