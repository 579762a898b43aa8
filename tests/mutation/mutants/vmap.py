"""Batching rules of the registered ops."""

from __future__ import annotations

from ..mutant import Mutant

LIBRARY, TESTS = "mtagen/ops/library.py", ("tests/test_vmap.py",)

MUTANTS = (
    Mutant(
        "vmap-along-the-first-axis",
        LIBRARY,
        "x.select(dim, i)",
        "x[i]",
        "Samples that lie along another axis than the first are mixed up.",
        TESTS,
    ),
    Mutant(
        "vmap-without-the-rule-of-autograd",
        LIBRARY,
        """_library.impl(name, partial(_vmapped_by_autograd, op, function.returns), "Batched")""",
        "pass",
        "is_grads_batched=True fails, because PyTorch makes up no rule for lists of results.",
        TESTS,
    ),
    Mutant(
        "vmap-by-a-rule-that-pytorch-makes-up",
        LIBRARY,
        """torch.library.register_vmap(f"mtagen::{name}", partial(_vmapped, op, function.returns), lib=_library)""",
        "pass",
        "PyTorch calls the op with samples itself and warns that it is slow.",
        TESTS,
    ),
)
