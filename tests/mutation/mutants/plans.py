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
        'if ratio <= (1.0 if made["cuda"].lowering == "strip" else CUDA_UP_TO):',
        "if ratio <= CUDA_UP_TO:",
        "Strips, whose calls take no less of the CPU's time than Triton's, are chosen where they are slower.",
        ("tests/test_golden_plans.py", "tests/test_choice.py"),
    ),
)
