"""Which plans are chosen."""

from __future__ import annotations

from ..mutant import Mutant

MUTANTS = (
    Mutant(
        "plans-forward-by-eight-warps-missing",
        "mtagen/planner/tile/forward.py",
        "for warps in (8, 4) for keys in (64, 48, 32)",
        "for warps in (4,) for keys in (64, 48, 32)",
        "A candidate that is first choice of many plans by mma is not tried.",
        ("tests/test_golden_plans.py",),
    ),
    Mutant(
        "plans-backward-of-smallest-blocks-first",
        "mtagen/planner/tile/backward.py",
        "((8, 64, 128), (8, 32, 128), (8, 32, 64), (4, 32, 64))",
        "((8, 64, 128), (8, 32, 128), (4, 32, 64))",
        "A candidate of the backward pass that is first choice where there is little shared memory is not tried.",
        ("tests/test_golden_plans.py",),
    ),
    Mutant(
        "plans-cuda-however-slow",
        "mtagen/planner/choice.py",
        'ratio <= (1.0 if plans["cuda"].lowering == "strip" else CUDA_UP_TO)',
        "ratio <= CUDA_UP_TO",
        "Strips, whose calls take no less of the CPU's time than Triton's, are chosen where they are slower.",
        ("tests/test_golden_plans.py", "tests/test_choice.py"),
    ),
    Mutant(
        "plans-ratios-of-the-last-table",
        "mtagen/planner/choice.py",
        "{**{shape: ratio for shape, ratio in shapes.items() if not shape.stages}, **measured}",
        "{**measured, **{shape: ratio for shape, ratio in shapes.items() if not shape.stages}}",
        "What was tuned here does not count for shapes beside it.",
        ("tests/test_choice.py::test_the_first_table_tells_the_ratio_of_the_nearest_shape",),
    ),
    Mutant(
        "plans-ratios-of-other-stages",
        "mtagen/planner/choice.py",
        "for shape, ratio in shapes.items() if not shape.stages}",
        "for shape, ratio in shapes.items()}",
        "Backends of a convolution alone are chosen by how fast strips are.",
        ("tests/test_choice.py::test_other_stages_tell_nothing_of_a_convolution",),
    ),
    Mutant(
        "plans-ratios-of-equal-head-dims",
        "mtagen/planner/choice.py",
        "nearest.value_head_dim or d",
        "d",
        "A ratio that was measured with wider values is taken for one of equal head dims.",
        ("tests/test_choice.py::test_ratios_of_other_value_head_dims_are_scaled_by_them",),
    ),
    Mutant(
        "plans-nearest-by-differences",
        "mtagen/planner/choice.py",
        "abs(math.log2(a / b))",
        "abs(a - b)",
        "Head dims, whose numbers are large, decide alone which shape is the nearest.",
        ("tests/test_choice.py::test_shapes_are_as_far_apart_as_their_factors",),
    ),
    Mutant(
        "plans-shipped-before-tuned",
        "mtagen/tuning.py",
        "followed = (*tables, shipped(target))",
        "followed = (shipped(target), *tables)",
        "Backends are compared, and accuracy is checked, with other candidates than those that won.",
        ("tests/test_tuning.py::test_what_was_just_tuned_goes_before_what_is_shipped",),
    ),
    Mutant(
        "plans-costs-of-the-whole-pass",
        "mtagen/tuning.py",
        "Timed(key, fields, candidate.cost, _time(candidate))",
        "Timed(key, fields, candidate.pass_plan.cost, _time(candidate))",
        "The cost model is judged by sums over decisions that are not varied.",
        ("tests/test_tuning.py::test_costs_are_those_of_the_decision",),
    ),
)
