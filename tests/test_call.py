"""The description of an op's tensors, and the records and schemas that agree with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import call_of
from torch import Tensor

from mtagen.call import INPUTS, Call, Step, fields_of, schema_of
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.ops import library
from mtagen.spec import FACTORS, PARAMETER_SLOTS, WEIGHTS, Spec

STAGES: dict[str, Any] = {"kernel": (2, 3), "mixed_heads": 2, "post_kernel": (3, 1), "post_mixed_heads": 4}
PARAMETERS = dict.fromkeys(PARAMETER_SLOTS, "h")
READS = {"logits": " + ".join(["s", *(f"{name}[h]" for name in PARAMETER_SLOTS)]), "parameters": PARAMETERS}
OTHERS: dict[str, Any] = {**READS, "sink": True, "packed": True, "dropout": True, "page_size": 64}
EVERYTHING = Spec(**STAGES, head_dim=16, value_head_dim=24, dtype="fp32", **OTHERS)
RANKS: dict[str, Any] = {"dynamic_ranks": (1, 2), "post_dynamic_ranks": (2, 1)}
# Documents and pages have no mixings that depend on tokens.
IN_BATCHES = replace(EVERYTHING, packed=False, page_size=None, **RANKS)


def tensors_of(record: type[tuple[Any, ...]]) -> list[str]:
    return [name for name, kind in fields_of(record).items() if kind.startswith("Tensor")]


def test_records_have_the_tensors_of_a_spec() -> None:
    """An argument that is added to one of them is missing in the other."""
    for record, arguments in ((Call, "arguments"), (Step, "decode_arguments")):
        taken = [[argument.name for argument in getattr(spec, arguments)] for spec in (EVERYTHING, IN_BATCHES)]
        assert {*taken[0], *taken[1]} == {*tensors_of(record)}
        assert all(names == [name for name in tensors_of(record) if name in names] for names in taken)


def test_differentiable_arguments_come_first() -> None:
    """Autograd and the registered ops cut the arguments there."""
    assert [argument.differentiable for argument in IN_BATCHES.arguments] == [True] * INPUTS + [False]
    assert Call._fields[:INPUTS] == ("q", "k", "v", *WEIGHTS, *FACTORS, "sink", *PARAMETER_SLOTS)
    assert {name for name, kind in fields_of(Call).items() if kind == "Tensor"} == {"q", "k", "v"}


ABSENT = dict(zip(STAGES, ({name} for name in WEIGHTS), strict=True)) | {
    "packed": {"cu_seq_q", "cu_seq_k"},
    "dropout": {"dropout_seed"},
    "sink": {"sink"},
    "page_size": {"block_table"},
}


@pytest.mark.parametrize("missing", ABSENT)
def test_a_spec_takes_what_its_stages_need(missing: str) -> None:
    spec = replace(EVERYTHING, **{missing: None if missing in (*STAGES, "page_size") else False})
    absent = {argument.name for argument in EVERYTHING.arguments} - {argument.name for argument in spec.arguments}
    assert absent == ABSENT[missing]


def test_shapes() -> None:
    shapes = {argument.name: argument.shape for argument in replace(EVERYTHING, packed=False).arguments}
    assert shapes["q"] == ("B", "H", "Nq", 16)
    assert shapes["v"] == ("B", "Hkv", "Nk", 24)
    assert shapes["weight"] == ("H", 2, 3)
    assert shapes["post_head_weight"] == ("H/4", 4, 4)
    shapes = {argument.name: argument.shape for argument in EVERYTHING.arguments}
    assert shapes["k"] == ("total_k", "Hkv", 16)
    assert shapes["cu_seq_q"] == ("documents + 1",)
    shapes = {argument.name: argument.shape for argument in IN_BATCHES.arguments}
    assert (shapes["query_factors"], shapes["post_key_factors"]) == (("B", "H", "Nq", 3), ("B", "H", "Nk", 3))


def test_samples_have_the_described_shapes() -> None:
    spec = replace(IN_BATCHES, dropout=False)
    sizes = {"B": 2, "H": 8, "Hkv": 4, "Nq": 5, "Nk": 7}
    inputs = Sampler.for_checks(spec, Sizes(*sizes.values()), torch.device("cpu")).inputs()
    described = {argument.name: argument.extents(sizes) for argument in spec.arguments}
    assert {name: tuple(x.shape) for name, x in inputs.named.items()} == described


def test_schemas() -> None:
    """They may change only with the graphs that hold calls of the ops."""
    weights = ", ".join(f"Tensor? {name}" for name in (*WEIGHTS, *FACTORS, "sink", *PARAMETER_SLOTS))
    inputs = f"Tensor q, Tensor k, Tensor v, {weights}"
    options = (
        "float scale, str key, Tensor? cu_seq_q=None, Tensor? cu_seq_k=None, SymInt max_q=0, SymInt max_k=0, "
        "Tensor? dropout_seed=None, float dropout_p=0., Tensor? block_table=None"
    )
    gradients, results = "Tensor grad_out, Tensor grad_lse", "Tensor out, Tensor lse"
    cache, others = (
        "Tensor k_cache, Tensor v_cache",
        "Tensor? cache_seqlens, float scale, int num_splits, str key, Tensor? block_table=None, SymInt max_k=0",
    )
    expected = {
        "forward": f"({inputs}, {options}) -> Tensor[]",
        "backward": f"({gradients}, {inputs}, {results}, {options}) -> Tensor[]",
        "decode": f"(Tensor q_tail, {cache}, {weights}, {others}) -> (Tensor, Tensor)",
    }
    for name, schema in expected.items():
        assert str(library._OPS[name].registered._schema) == f"mtagen::{name}{schema}"
    assert "float dropout_p=0.0" in schema_of(Call)


def test_splitting_and_joining() -> None:
    """The backward pass gets what autograd has saved."""
    q, seed = torch.zeros(1, 4, 3, 16), torch.zeros(2, dtype=torch.int64)
    call = call_of(Spec(None, 16), q, q, q, [], 0.5)._replace(dropout_seed=seed, dropout_p=0.25, max_q=7)
    tensors, others = call.split()
    assert all(x is None or isinstance(x, Tensor) for x in tensors)
    assert others == (0.5, "", 7, 0, 0.25)
    joined = Call.joined(tensors, others)
    assert all(x is y or x == y for x, y in zip(joined, call, strict=True))
    assert call.documents is None
    assert call.dropout == (seed, 0.25)
