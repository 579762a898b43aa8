"""Which backend serves which pass: measured, scaled from a neighbour, by planned work, or because the other cannot."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mtagen import Plan, PlanError, Spec, SpecError, plan
from mtagen.planner import choice
from mtagen.planner.choice import COST_MODEL, GENERATED, ONLY_ONE, candidates, lowerings
from mtagen.planner.lift import passes as lift
from mtagen.planner.passes import PASSES, rounds_alike
from mtagen.planner.tables import Shape, Table
from mtagen.planner.targets import get_target


def measured(ratios: Mapping[str, Mapping[Shape, float]]) -> tuple[Table]:
    return (Table("measured", cuda_over_triton=ratios),)


def backend_of(made: Plan) -> dict[str, str]:
    return {one.plan.pass_name: one.backend for one in made.passes}


def flop(backend: str, pass_name: str, spec: Spec) -> int:
    fusing, *_ = lowerings(backend, spec).values()
    return fusing.flop_per_score(pass_name, spec)


def cuda_over_triton(pass_name: str, spec: Spec, tables: Sequence[Table]) -> tuple[float, str]:
    cuda, triton = (candidates(backend, pass_name, spec, get_target("sm_90a"))[0] for backend in GENERATED)
    return choice.cuda_over_triton(cuda, triton, tables)


def test_measured_shapes_decide() -> None:
    """CUDA, where it is faster or nearly as fast."""
    shape = Shape(6, 11, 64, "causal")
    tables = measured({"forward": {shape: 1.25}, "backward": {shape: 1.25}, "decode": {shape: 1.1}})
    made = plan(Spec((6, 11), 64), "sm_90a", tables=tables)
    assert backend_of(made) == {"forward": "triton", "backward": "triton", "decode": "cuda"}
    assert made.backend == "cuda+triton"
    assert "backward: cuda takes 1.25 of its time, measured" in made.reason
    assert "decode: 1.10 of triton's time, measured" in made.reason
    assert (set(made.tile), set(made.lift)) == ({"decode"}, {"forward", "backward"})
    assert (made.served_by("cuda"), made.served_by("triton")) == (("decode",), ("forward", "backward"))
    again = Plan.from_json(made.to_json())
    assert (again, hash(again), again.reason) == (made, hash(made), made.reason)


@pytest.mark.parametrize(
    ("backward", "backend", "reasons"),
    [
        # Triton's passes are 14 and 40 times d flop for a score: 0.4 * 14 + 1.2 * 40 = 53.6
        (
            1.2,
            "cuda",
            (
                "0.40 of triton's time, measured",
                "1.20 of triton's time, measured; triton would round scores otherwise than the forward pass",
            ),
        ),
        (  # 0.4 * 14 + 1.25 * 40 = 55.6
            1.25,
            "triton",
            (
                "cuda takes 0.40 of its time, measured; cuda would round scores otherwise than the backward pass",
                "cuda takes 1.25 of its time, measured",
            ),
        ),
    ],
)
def test_forward_and_backward_round_scores_alike(backward: float, backend: str, reasons: tuple[str, str]) -> None:
    """Of the pairs that do, the one that takes less time in all."""
    shape = Shape(6, 11, 64, "causal")
    made = plan(Spec((6, 11), 64), "sm_90a", tables=measured({"forward": {shape: 0.4}, "backward": {shape: backward}}))
    assert {one: backend_of(made)[one] for one in ("forward", "backward")} == dict.fromkeys(PASSES[:2], backend)
    assert tuple(one.reason for one in made.passes[:2]) == reasons


@pytest.mark.parametrize("stages", [{}, {"mixed_heads": 16, "post_kernel": (6, 11)}], ids=["convolution", "mixing"])
@pytest.mark.parametrize(("packed", "passes"), [(False, ("decode",)), (True, ("forward",))])
def test_auto_chooses_backends_of_calls_on_pages(stages: dict[str, Any], packed: bool, passes: tuple[str, ...]) -> None:
    """They have no backward pass."""
    made = plan(Spec((6, 11), 64, page_size=64, packed=packed, **stages), "sm_90a", "auto")
    assert tuple(backend_of(made)) == passes


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("backend", ["auto", "cuda", "triton"])
def test_every_plan_rounds_scores_alike(target: str, backend: str) -> None:
    kernels, dims = (None, (1, 1), (2, 3), (6, 11), (16, 17)), ((64, 64), (64, 128), (144, 144), (256, 256), (72, 72))
    stages = ({}, {"post_mixed_heads": 2}, {"mixed_heads": 16, "post_kernel": (6, 11)})
    count = 0
    for kernel, (d, dv), others in itertools.product(kernels, dims, stages):
        try:
            made = plan(Spec(kernel, d, dv, **others), target, backend)
        except PlanError:
            continue
        assert rounds_alike(made["forward"], made["backward"]), (kernel, d, dv, others)
        count += 1
    assert count > 10


def test_other_shapes_are_scaled_from_the_nearest() -> None:
    tables = measured(
        {
            "forward": {Shape(6, 11, 128, "causal"): 0.5, Shape(1, 1, 128, "causal"): 2.0},
            "decode": {Shape(6, 11, 64, "causal"): 0.75},
        }
    )

    def work(kernel: tuple[int, int], d: int) -> float:
        spec = Spec(kernel, d)
        return flop("cuda", "forward", spec) / flop("triton", "forward", spec)

    ratio, source = cuda_over_triton("forward", Spec((7, 7), 96), tables)
    assert source == "scaled from (6, 11), head dim 128, causal"
    assert ratio == pytest.approx(0.5 * work((7, 7), 96) / work((6, 11), 128))
    ratio, source = cuda_over_triton("forward", Spec((1, 2), 64), tables)
    assert source == "scaled from (1, 1), head dim 128, causal"
    assert ratio == pytest.approx(2.0 * work((1, 2), 64) / work((1, 1), 128))
    assert cuda_over_triton("decode", Spec((3, 3), 128), tables)[0] == 0.75  # its time is that of reading the cache


def test_shapes_are_as_far_apart_as_their_factors() -> None:
    """Twice the head dim is nearer than a sixth of the kernel, though their numbers differ by more."""
    wide, thin = Shape(6, 11, 64, "causal"), Shape(1, 11, 128, "causal")
    tables = measured({"forward": {wide: 0.5, thin: 2.0}})
    assert cuda_over_triton("forward", Spec((6, 11), 128), tables)[1] == f"scaled from {wide}"


def test_the_first_table_tells_the_ratio_of_the_nearest_shape() -> None:
    """What was tuned here goes before what is shipped, for other shapes, too."""
    shape = Shape(6, 11, 64, "causal")
    first, second = (measured({"decode": {shape: ratio}})[0] for ratio in (0.75, 1.5))
    for tables, expected in (((first, second), 0.75), ((second, first), 1.5)):
        assert cuda_over_triton("decode", Spec((6, 11), 128), tables)[0] == expected


def test_other_stages_tell_nothing_of_a_convolution() -> None:
    """They are made in strips: a shape with them is not the nearest to one without."""
    mixed, far = Shape(6, 11, 128, "causal", "mix2"), Shape(3, 3, 64, "causal")
    tables = measured({"forward": {mixed: 3.0, far: 0.5}})
    assert cuda_over_triton("forward", Spec((6, 11), 128, 64), tables)[1] == f"scaled from {far}"
    assert cuda_over_triton("forward", Spec((6, 11), 96), tables)[1] == f"scaled from {far}"


def test_ratios_of_other_value_head_dims_are_scaled_by_them() -> None:
    shape, spec = Shape(6, 11, 64, "causal", value_head_dim=128), Spec((6, 11), 64)

    def work(dv: int) -> float:
        wide = Spec((6, 11), 64, dv)
        return flop("cuda", "forward", wide) / flop("triton", "forward", wide)

    ratio, source = cuda_over_triton("forward", spec, measured({"forward": {shape: 0.5}}))
    assert source == "scaled from (6, 11), head dim 64 (values 128), causal"
    assert work(64) != pytest.approx(work(128))
    assert ratio == pytest.approx(0.5 * work(64) / work(128))


def test_the_nearest_shape_has_the_same_mask_if_any_has() -> None:
    full, far = Shape(6, 11, 64, "full"), Shape(1, 1, 256, "causal")
    tables = measured({"forward": {full: 3.0, far: 0.5}})
    assert cuda_over_triton("forward", Spec((6, 11), 64), tables)[1] == f"scaled from {far}"
    assert (
        cuda_over_triton("forward", Spec((6, 11), 80), measured({"forward": {full: 3.0}}))[1] == f"scaled from {full}"
    )


def test_planned_work_decides_where_nothing_is_measured() -> None:
    for kernel, d in (((6, 11), 128), ((1, 1), 64), ((2, 2), 32)):
        spec = Spec(kernel, d)
        ratio, source = cuda_over_triton("backward", spec, ())
        assert source == "by planned work"
        cheaper = min(("cuda", "triton"), key=lambda backend: flop(backend, "backward", spec))
        assert (ratio <= 1) == (cheaper == "cuda")


def test_flop_per_score() -> None:
    """(6, 11): six terms; a convolution of 16 x 8 scores in at most nine mma's, which are 32 flop a score."""
    d, spec = 128, Spec((6, 11), 128)
    assert (flop("triton", "forward", spec), flop("triton", "backward", spec)) == (14 * d, 40 * d)
    mma = (flop("cuda", "forward", spec) - 4 * d) / 32
    assert mma <= 9
    assert flop("cuda", "backward", spec) == 10 * d + 3 * 32 * mma
    assert plan(spec, "sm_90a", "triton").flops_per_score() == {
        "forward": 14 * d,
        "backward": 40 * d,
        "plain attention forward": 4 * d,
    }


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
    for one in plan(spec, target).passes[:2]:
        assert one.backend == "triton", one.plan.pass_name
        assert one.reason.startswith(f"not cuda: {cause}; ")
    with pytest.raises(PlanError, match=re.escape(cause)):
        plan(spec, target, "cuda")


def test_what_triton_cannot_do_falls_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PlanError("no tile fits")

    monkeypatch.setattr(lift, "candidates", refuse)
    made = plan(Spec((6, 11), 64), "sm_90a")
    assert (made.backend, made.reason) == ("cuda", "not triton: no tile fits")
    with pytest.raises(PlanError, match="no tile fits"):
        plan(Spec((6, 11), 64, dtype="fp32"), "sm_90a")


@pytest.mark.parametrize("spec", [Spec((6, 11), 256), Spec((3, 3), 192, 128), Spec((6, 11), 256, packed=True)], ids=str)
def test_strips_stand_in_for_a_backward_pass_that_does_not_fit(spec: Spec) -> None:
    made = plan(spec, "sm_90a")
    assert backend_of(made) == dict.fromkeys(backend_of(made), "cuda")
    assert (made["forward"].lowering, made["backward"].lowering) == ("tile", "strip")
    ratio = made["backward"].cost / plan(spec, "sm_90a", "triton")["backward"].cost
    assert f"backward: {ratio:.2f} of triton's time, by the cost models" in made.reason
    assert Plan.from_json(made.to_json()) == made
    alone = plan(spec, "sm_90a", "cuda")
    assert [one.plan for one in alone.passes] == [one.plan for one in made.passes]
    with pytest.raises(PlanError, match="needs Triton's kernels too, and Triton is not installed"):
        plan(spec, "sm_90a", available=("cuda",))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec((1, 1), 256), "cuda takes 1.72 of its time, by the cost models"),
        (Spec((6, 11), 64, 256), "cuda takes 1.26 of its time, by the cost models"),  # the table is not of such values
        (Spec((6, 11), 256, mask="output"), "not cuda: head_dim: got 256"),  # convolutions in strips would be Triton's
        (Spec(None, 256), "not cuda: head_dim: got 256"),
    ],
    ids=str,
)
def test_strips_do_not_stand_in_where_triton_is_faster(spec: Spec, reason: str) -> None:
    made = plan(spec, "sm_90a")
    assert made["backward"].lowering == "lift"
    assert f"backward: {reason}" in made.reason


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
        assert set(made.lift) == set(PASSES if backend == "triton" else ())
        assert set(made.tile) == set(PASSES if backend == "cuda" else ())
    with pytest.raises(SpecError, match="backend: got 'cudnn'"):
        plan(Spec((6, 11), 64), "sm_90a", "cudnn")
    with pytest.raises(PlanError, match="backend: got 'cuda'; compiles for GPUs only"):
        plan(Spec((6, 11), 64), "cpu", "cuda")


def test_text_shows_the_choice_of_each_pass() -> None:
    shape = Shape(6, 11, 64, "causal")
    tables = measured({"forward": {shape: 1.25}, "backward": {shape: 1.25}, "decode": {shape: 0.4}})
    text = str(plan(Spec((6, 11), 64), "sm_90a", tables=tables))
    assert re.search(r"decode backend +cuda: 0.40 of triton's time, measured", text)
    assert re.search(r"backward backend +triton: cuda takes 1.25 of its time, measured", text)
    assert re.search(r"scores tile +\d+ x \d+, \d warps", text)  # of Triton's backward pass
    made = plan(Spec((6, 11), 64), "sm_90a", "cuda")
    for name in PASSES:
        for _, fact, value in made.tile[name].rows_of_table():
            assert re.search(rf"{re.escape(fact)} +{re.escape(value)}", str(made))


def test_text_says_where_a_decision_comes_from() -> None:
    """Decode has one candidate in CUDA; elsewhere the cost model chooses."""
    made = plan(Spec((6, 11), 64), "sm_90a", "cuda", tables=())
    sources = {one.plan.pass_name: dict(one.sources).values() for one in made.passes}
    assert {name: {*found} for name, found in sources.items()} == {
        "forward": {COST_MODEL},
        "backward": {COST_MODEL},
        "decode": {ONLY_ONE},
    }


def test_masks_in_tables() -> None:
    """CUDA's fused kernels convolve under them; Triton's need strips for that; other stages have Triton's only."""
    mask = {"causal": False, "visible": "(j <= i) | (j < prefix[b])", "parameters": {"prefix": "b"}}
    made = {backend: plan(Spec((6, 11), 64, **mask), "sm_90a", backend) for backend in ("cuda", "triton", "auto")}
    lowerings = {backend: {one[name].lowering for name in PASSES} for backend, one in made.items()}
    assert lowerings == {"cuda": {"tile"}, "triton": {"strip"}, "auto": {"tile"}}
    with pytest.raises(PlanError, match="visible"):
        plan(Spec((6, 11), 64, mixed_heads=2, **mask), "sm_90a", "cuda")


@pytest.mark.parametrize("stages", [{}, {"kernel": (3, 4)}, {"mixed_heads": 2}], ids=str)
def test_tables_of_tokens_have_no_kernels(stages: Mapping[str, object]) -> None:
    """Kernels would sum the gradients of one number a token."""
    spec = Spec(**{"kernel": None, **stages}, head_dim=64, logits="s + t[h, 1, j]", parameters={"t": "h,3,j"})
    for backend in ("cuda", "triton"):
        with pytest.raises(PlanError, match="whose gradients kernels do not sum"):
            plan(spec, "sm_90a", backend)
        constant = replace(spec, logits="s + t[b, h, 1, j]", parameters=(("t", "b,h,3,j"),), constants=("t",))
        with pytest.raises(PlanError, match="kernels read none of packed documents"):
            plan(replace(constant, packed=True), "sm_90a", backend)
    assert plan(spec, "cpu", "torch")["backward"].lowering == "tiled ops"
