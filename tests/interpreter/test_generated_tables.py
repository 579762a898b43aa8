"""Kernels that compute the tables of a mask, against PyTorch's operations: every number is equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from masked import GAPS, MASKS, Problem, call_of
from torch import Tensor

import mtagen
from mtagen.call import Step
from mtagen.codegen import mask_tables as rendering
from mtagen.codegen import render
from mtagen.ops import mask_tables
from mtagen.runtime.load import load_tables
from mtagen.runtime.loader import load_module
from mtagen.spec import Spec

# Bounds that read numbers of tokens and of blocks of tokens, that 32 bits cannot hold, and gaps of parameters.
MORE: dict[str, dict[str, Any]] = {
    "ends of blocks": {"causal": False, "visible": "j <= ends[b, i // 8] - 3", "parameters": {"ends": "b,i//8"}},
    "three bounds": {
        "visible": "(j >= where(i < 20, i // 3 * 2 - 7, min(i - 4, first[b, i]))) & (j < 4 * lengths[b])",
        "parameters": {"first": "b,i", "lengths": "b"},
        "window": (30, 0),
    },
    "large numbers": {
        "causal": False,
        "visible": "j <= (lengths[b] * 100000001 - i * 90000001) // 100000007",
        "parameters": {"lengths": "b"},
    },
    "two gaps": {"visible": "((j < 3) | (j >= 5)) & ((j < 20) | (i - j < 6))"},
    "sinks of a number": {"visible": "(j < sinks[b]) | (i - j < 5)", "parameters": {"sinks": "b"}},
}
EVERY = MASKS | GAPS | MORE
SIZES = [(9, 5), (150, 290)]  # more queries than keys, and more than one block of rows


def functions_of(spec: Spec, tmp_path: Path) -> dict[str, Any]:
    name, text = rendering.render(spec)
    module = load_module(tmp_path / f"{name}.py", text.encode())
    passes = ("forward", "backward", "decode")
    return {name: getattr(module, f"{name}_tables") for name in passes if hasattr(module, f"{name}_tables")}


def assert_equal(made: list[Tensor], expected: list[Tensor]) -> None:
    assert len(made) == len(expected)
    for own, other in zip(made, expected, strict=True):
        assert own.dtype == other.dtype
        assert own.is_contiguous()
        assert torch.equal(own, other)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mask", EVERY)
def test_batch(mask: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    problem = Problem(EVERY[mask] | {"kernel": None}, *sizes)
    call, generated = call_of(problem), functions_of(problem.spec, tmp_path)
    for pass_name in ("forward", "backward"):
        made = mask_tables.of_call(problem.spec, call, pass_name, generated)
        assert_equal(made, mask_tables.of_call(problem.spec, call, pass_name))


def reads_tokens(options: dict[str, Any]) -> bool:
    return any({"i", "j"} & {*axes.replace("//", ",").split(",")} for axes in options.get("parameters", {}).values())


DOCUMENTS = {"few": ([7, 0, 9, 4], [7, 3, 12, 4]), "many": ([1, 0, 130] * 5, [2, 5, 140] * 5)}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", [name for name, options in EVERY.items() if not reads_tokens(options)])
def test_packed_documents(mask: str, documents: str, tmp_path: Path) -> None:
    """Some are empty, and rows and keys after the last document belong to none."""
    options, (lengths_q, lengths_k) = EVERY[mask], DOCUMENTS[documents]
    cu_seq_q, cu_seq_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths_q, lengths_k))
    total_q, total_k = int(cu_seq_q[-1]) + 10, int(cu_seq_k[-1]) + 14
    problem = Problem(options | {"kernel": None}, 30, 37, batch=len(lengths_q))
    packed = {name: torch.zeros(total_q if name == "q" else total_k, 4, 16) for name in "qkv"}
    call = call_of(problem, **packed, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=130, max_k=140)
    generated = functions_of(replace(problem.spec, packed=True), tmp_path)
    for pass_name in ("forward", "backward"):
        made = mask_tables.of_call(problem.spec, call, pass_name, generated)
        assert_equal(made, mask_tables.of_call(problem.spec, call, pass_name))


@pytest.mark.parametrize("mask", EVERY)
def test_steps(mask: str, tmp_path: Path) -> None:
    """Lengths may be shorter than the rows of the step, and longer than the cache."""
    problem = Problem(EVERY[mask] | {"kernel": (3, 5)}, 37, 37, batch=2)
    slots = {f"parameter{number}": x for number, x in enumerate(problem.parameters.values())}
    fields = dict.fromkeys(Step._fields) | slots | {"scale": 1.0, "num_splits": 0, "key": ""}
    fields |= {"k_cache": problem.tensors["k"], "v_cache": problem.tensors["v"]}
    fields |= {"q_tail": problem.tensors["q"][:, :, -5:]}
    generated = functions_of(problem.spec, tmp_path)
    for lengths in (None, [37, 4], [0, 50]):
        seqlens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        step = Step(**fields | {"cache_seqlens": seqlens})
        assert_equal(mask_tables.of_step(problem.spec, step, generated), mask_tables.of_step(problem.spec, step))


class Launches(NamedTuple):
    """Names of the kernels that a call launches for its tables."""

    forward: list[str]
    backward: list[str]
    decode: list[str]


ONE, TWO = ["mask_rows"], ["mask_rows_and_extremes", "mask_keys"]
STAGES: dict[str, tuple[dict[str, Any], Launches]] = {
    "plain": ({"kernel": None}, Launches(ONE, TWO, ["mask_step"])),
    "mixed": ({"kernel": None, "mixed_heads": 2}, Launches(ONE, ONE, ["mask_step"])),
}


@pytest.mark.parametrize("stages", STAGES)
def test_calls_launch_few_kernels(stages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built op computes its tables by them, and not by PyTorch's operations."""
    options, expected = STAGES[stages]
    op = mtagen.build(head_dim=16, backend="triton", dtype="fp32", **options, **MASKS["prefix"])
    sources = render(op.plan)
    module = load_tables(op.plan, sources)
    monkeypatch.setattr(mask_tables, "_limits", None)
    q, k, v = (torch.randn(2, 2, 5, 16, requires_grad=True) for _ in range(3))
    others = {name: torch.ones(shape) for name, shape in op.plan.spec.weights(2).items()}
    others["parameters"] = {"prefix": torch.tensor([3, 4])}
    launches, launch = [], module.Call.launch

    def launched(call: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
        launches.append(kernel.fn.__name__)
        launch(call, kernel, *arguments, **options)

    monkeypatch.setattr(module.Call, "launch", launched)
    out = op(q, k, v, **others)
    assert launches == expected.forward
    out.sum().backward()
    assert launches == [*expected.forward, *expected.backward]
    launches.clear()
    with torch.no_grad():
        op.decode(q[:, :, -1:], k, v, **others)
    assert launches == expected.decode
