"""Triton's kernels that no spec changes: they compile for GPUs, with and without what calls may leave out."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mtagen.ops import row_kernels
from mtagen.runtime.document_kernel import schedule_documents

COPIES = {"D": 128, "BLOCK": 1024}
KERNELS: dict[str, dict[str, Any]] = {
    "store_tokens": {**COPIES, "DV": 64, "SIZE": 64, "SLOTS": 8},
    "load_earlier": {**COPIES, "SLOTS": 8, "CONTEXT": 5, "BEFORE_START": -1},
    "divide_requests": {"BLOCK": 1024},
    "load_last_rows": COPIES,
    "merge_results": {**COPIES, "CONTEXT": 5, "HEADS": 16},
}
INTEGERS = ("row_ptr", "place_ptr", "ring_place_ptr", "replaced_row_ptr", "cu_seq_q_ptr", "cu_seq_k_ptr", "lengths_ptr")
CASES = [(name, {}) for name in KERNELS]
CASES += [("store_tokens", {"SIZE": 0, "SLOTS": 0}), ("merge_results", {"new": 1, "n_requests": 1, "heads": 1})]


targets = pytest.mark.parametrize(
    "target", [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)], ids=["sm_80", "sm_90"]
)


@pytest.mark.parametrize(("name", "constants"), CASES)
@targets
def test_compiles(name: str, constants: dict[str, Any], target: GPUTarget) -> None:
    kernel, constants = getattr(row_kernels, name), KERNELS[name] | constants

    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if not argument.endswith("_ptr"):
            return "i64" if argument.endswith("_page") else "i32"
        if argument in INTEGERS or (name, argument) == ("divide_requests", "steps_ptr"):
            return "*i32"
        return "*fp32" if "lse" in argument else "*bf16"

    signature = {argument: type_of(argument) for argument in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=target)
    assert compiled.asm["cubin"]


@targets
def test_schedules_compile(target: GPUTarget) -> None:
    types = {name: "*i32" if name.endswith("_ptr") else "i32" for name in schedule_documents.arg_names}
    assert triton.compile(ASTSource(schedule_documents, types), target=target).asm["cubin"]
