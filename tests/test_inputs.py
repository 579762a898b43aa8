"""Arguments that do not fit: the message says what was got, the rule, what is legal; nothing is launched."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mtagen
from mtagen import BackendError, InputError, MtagenError, PlanError, Spec, SpecError
from mtagen.call import NO_LEARNED
from mtagen.ops import library
from mtagen.ops.attention import AttentionOp
from mtagen.planner.tables import Table

B, H, HKV, NQ, NK, D, DV, CQ, CK = 2, 4, 2, 5, 7, 16, 24, 3, 4
NEW = 2


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


class _Untouchable:
    """Stands in for an op's executor: whatever is launched fails the test."""

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"{name} was launched")


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> AttentionOp:
    """An op for fp32 that must not be launched."""
    built = mtagen.build((CQ, CK), D, value_head_dim=DV, target="cpu", dtype="fp32")
    monkeypatch.setitem(library._executors, built._key, _Untouchable())
    return built


def tensors(**changed: Any) -> dict[str, Any]:
    return {
        "q": torch.zeros(B, H, NQ, D),
        "k": torch.zeros(B, HKV, NK, D),
        "v": torch.zeros(B, HKV, NK, DV),
        "weight": torch.zeros(H, CQ, CK),
    } | changed


def cache(**changed: Any) -> dict[str, Any]:
    return {
        "q_tail": torch.zeros(B, H, CQ - 1 + NEW, D),
        "k_cache": torch.zeros(B, HKV, NK, D),
        "v_cache": torch.zeros(B, HKV, NK, DV),
        "weight": torch.zeros(H, CQ, CK),
        "cache_seqlens": torch.full((B,), NK, dtype=torch.int32),
    } | changed


def assert_explains(error: MtagenError, name: str, got: str, rule: str, legal: str) -> None:
    """The message in its parts, ``name: got ...; rule; legal: ...`` (the beginning of what was got)."""
    message = str(error)
    head, separator, tail = message.partition("; legal: ")
    assert separator, message
    assert head.startswith(f"{name}: got {got}"), message
    assert rule in head, message
    assert legal in tail, message


def last_stride_2(*shape: int) -> Tensor:
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


CALLS = {
    "q rank": (
        {"q": torch.zeros(H, NQ, D)},
        "q.shape",
        f"({H}, {NQ}, {D})",
        "4 dim",
        "(B, heads, N, head_dim)",
    ),
    "v rank": ({"v": torch.zeros(1, B, HKV, NK, DV)}, "v.shape", "(1, 2, 2, 7, 24)", "4 dim", "(B, heads,"),
    "no tensor": ({"k": [1.0]}, "k", "'list'", "must be a tensor", "torch.Tensor"),
    "batch": ({"k": torch.zeros(3, HKV, NK, D)}, "k.shape", "(3, 2, 7, 16)", "does not fit", "(2, 2, 7, 16)"),
    "kv heads": (
        {"v": torch.zeros(B, 4, NK, DV)},
        "v.shape",
        "(2, 4, 7, 24)",
        "does not fit",
        "(2, 2, 7, 24)",
    ),
    "Nk": ({"v": torch.zeros(B, HKV, 8, DV)}, "v.shape", "(2, 2, 8, 24)", "does not fit", "(2, 2, 7, 24)"),
    "q dim": ({"q": torch.zeros(B, H, NQ, 32)}, "q.shape", "(2, 4, 5, 32)", "does not fit", "(2, 4, 5, 16)"),
    "k dim": (
        {"k": torch.zeros(B, HKV, NK, 24)},
        "k.shape",
        "(2, 2, 7, 24)",
        "does not fit",
        "(2, 2, 7, 16)",
    ),
    "v dim": (
        {"v": torch.zeros(B, HKV, NK, 16)},
        "v.shape",
        "(2, 2, 7, 16)",
        "does not fit",
        "(2, 2, 7, 24)",
    ),
    "group": ({"k": torch.zeros(B, 3, NK, D)}, "heads", "(4, 3)", "must be a multiple", "H = group * Hkv"),
    "no kv heads": ({"k": torch.zeros(B, 0, NK, D)}, "heads", "(4, 0)", "must be a multiple", "H = group"),
    "built dtype": (
        {"q": torch.zeros(B, H, NQ, D).half()},
        "q.dtype",
        "torch.float16",
        "not built for",
        "float32",
    ),
    "mixed dtypes": (
        {"k": torch.zeros(B, HKV, NK, D).half()},
        "k.dtype",
        "torch.float16",
        "q.dtype",
        "float32",
    ),
    "k device": (
        {"k": torch.zeros(B, HKV, NK, D, device="meta")},
        "k.device",
        "device(type='meta')",
        "q's",
        "cpu",
    ),
    "weight device": (
        {"weight": torch.zeros(H, CQ, CK, device="meta")},
        "weight.device",
        "device(",
        "q's",
        "cpu",
    ),
    "weight shape": (
        {"weight": torch.zeros(H, CK, CQ)},
        "weight.shape",
        "(4, 4, 3)",
        "per query head",
        "(4, 3, 4)",
    ),
    "weight heads": (
        {"weight": torch.zeros(1, CQ, CK)},
        "weight.shape",
        "(1, 3, 4)",
        "per query",
        "(4, 1, 3, 4)",
    ),
    "weight rank": ({"weight": torch.zeros(CQ, CK)}, "weight.shape", "(3, 4)", "per query head", "(4, 3, 4)"),
    "weight dtype": (
        {"weight": torch.zeros(H, CQ, CK).half()},
        "weight.dtype",
        "torch.float16",
        "fp32",
        "float32",
    ),
    "q stride": (
        {"q": last_stride_2(B, H, NQ, D)},
        "q.stride()",
        "(640, 160, 32, 2)",
        "must be 1",
        "q.contiguous()",
    ),
    "v stride": ({"v": last_stride_2(B, HKV, NK, DV)}, "v.stride()", "(", "must be 1", "v.contiguous()"),
    "NaN scale": ({"scale": math.nan}, "scale", "nan", "finite", "head_dim ** -0.5"),
    "huge scale": ({"scale": 10**400}, "scale", "1000", "finite", "head_dim ** -0.5"),
    "sparse weight": (
        {"weight": torch.zeros(H, CQ, CK).to_sparse()},
        "weight.layout",
        "torch.sparse_coo",
        "dense",
        "strided",
    ),
    "inf scale": ({"scale": -math.inf}, "scale", "-inf", "finite", "head_dim ** -0.5"),
    "bool scale": ({"scale": True}, "scale", "True", "finite", "head_dim ** -0.5"),
}


@pytest.mark.parametrize(("changed", "name", "got", "rule", "legal"), CALLS.values(), ids=CALLS)
def test_call(op: AttentionOp, changed: dict[str, Any], name: str, got: str, rule: str, legal: str) -> None:
    with pytest.raises(InputError) as caught:
        op(**tensors(**changed))
    assert_explains(caught.value, name, got, rule, legal)


def test_what_is_legal_is_launched(op: AttentionOp) -> None:
    """The guard of the tests here is no dummy."""
    with pytest.raises(pytest.fail.Exception, match="forward was launched"):
        op(**tensors())
    with pytest.raises(pytest.fail.Exception, match="decode was launched"):
        op.decode(**cache())


DECODES = {
    "no new rows": (
        {"q_tail": torch.zeros(B, H, CQ - 1, D)},
        "q_tail rows",
        "2",
        "must be 2 context queries (cq - 1 = 2)",
        "3..10",
    ),
    "many new rows": ({"q_tail": torch.zeros(B, H, CQ + 8, D)}, "q_tail rows", "11", "1..8 new", "3..10"),
    "q_tail rank": ({"q_tail": torch.zeros(H, CQ, D)}, "q_tail.shape", "(4, 3, 16)", "4 dim", "(B, heads, N"),
    "k_cache dim": (
        {"k_cache": torch.zeros(B, HKV, NK, 8)},
        "k_cache.shape",
        "(2, 2, 7, 8)",
        "fit",
        "(2, 2, 7, 16)",
    ),
    "v_cache length": (
        {"v_cache": torch.zeros(B, HKV, 6, DV)},
        "v_cache.shape",
        "(2, 2, 6, 24)",
        "fit",
        "(2, 2, 7, 24)",
    ),
    "v_cache dtype": (
        {"v_cache": torch.zeros(B, HKV, NK, DV).half()},
        "v_cache.dtype",
        "torch.float16",
        "q_tail.",
        "32",
    ),
    "weight shape": (
        {"weight": torch.zeros(H, CK, CQ)},
        "weight.shape",
        "(4, 4, 3)",
        "per query head",
        "(4, 3, 4)",
    ),
    "seqlens shape": (
        {"cache_seqlens": torch.zeros(1, dtype=torch.int32)},
        "cache_seqlens",
        "((1,)",
        "per batch",
        "(2,)",
    ),
    "seqlens dtype": (
        {"cache_seqlens": torch.zeros(B)},
        "cache_seqlens",
        "((2,), torch.float32",
        "per batch",
        "int32",
    ),
    "seqlens device": (
        {"cache_seqlens": torch.zeros(B, dtype=torch.int32, device="meta")},
        "cache_seqlens",
        "((2,), torch.int32, device(type='meta')",
        "on q_tail's device",
        "cpu",
    ),
    "seqlens list": (
        {"cache_seqlens": [NK, NK]},
        "cache_seqlens",
        "'list'",
        "must be a tensor",
        "torch.Tensor",
    ),
    "no splits": ({"num_splits": 0}, "num_splits", "0", "positive int", "1, 2, ... or None"),
    "too many splits": ({"num_splits": 2**16}, "num_splits", "65536", "positive int", "at most 65535"),
    "bool splits": ({"num_splits": True}, "num_splits", "True", "positive int", "1, 2, ... or None"),
    "NaN scale": ({"scale": math.nan}, "scale", "nan", "finite", "head_dim ** -0.5"),
}


@pytest.mark.parametrize(("changed", "name", "got", "rule", "legal"), DECODES.values(), ids=DECODES)
def test_decode(op: AttentionOp, changed: dict[str, Any], name: str, got: str, rule: str, legal: str) -> None:
    with pytest.raises(InputError) as caught:
        op.decode(**cache(**changed))
    assert_explains(caught.value, name, got, rule, legal)


# Pipelines: the weights, and what of them fits.

GROUP, POST_CQ, POST_CK, POST_GROUP = 2, 2, 5, 4
CONTEXT = CQ - 1 + POST_CQ - 1
STAGES: dict[str, Any] = {
    "kernel": (CQ, CK),
    "mixed_heads": GROUP,
    "post_kernel": (POST_CQ, POST_CK),
    "post_mixed_heads": POST_GROUP,
}


def build_untouchable(monkeypatch: pytest.MonkeyPatch, **stages: Any) -> AttentionOp:
    """An op of some stages, for fp32, that must not be launched."""
    options = {"head_dim": D, "value_head_dim": DV, "target": "cpu", "dtype": "fp32"}
    built = mtagen.build(**{"kernel": None} | stages | options)
    monkeypatch.setitem(library._executors, built._key, _Untouchable())
    return built


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> AttentionOp:
    """An op of all stages that must not be launched."""
    return build_untouchable(monkeypatch, **STAGES)


def weights() -> dict[str, Any]:
    return {
        "weight": torch.zeros(H, CQ, CK),
        "head_weight": torch.zeros(H // GROUP, GROUP, GROUP),
        "post_weight": torch.zeros(H, POST_CQ, POST_CK),
        "post_head_weight": torch.zeros(H // POST_GROUP, POST_GROUP, POST_GROUP),
    }


PIPELINE_CALLS = {
    "kernels with an axis of channels, one matrix": (
        {
            "weight": torch.zeros(H, 1, CQ, CK),
            "post_weight": torch.zeros(H, 1, POST_CQ, POST_CK),
            "post_head_weight": torch.zeros(POST_GROUP, POST_GROUP),
        },
        None,
    ),
    "no weight": (
        {"weight": None},
        ("weight", "None", "built with kernel=(3, 4)", "shape (4, 3, 4), such as op.identity_weights(4)['weight']"),
    ),
    "no head weight": (
        {"head_weight": None},
        ("head_weight", "None", "mixed_heads=2", "shape (2, 2, 2), such as op.id"),
    ),
    "no post weight": (
        {"post_weight": None},
        ("post_weight", "None", "post_kernel=(2, 5)", "shape (4, 2, 5), such as op.id"),
    ),
    "no post head weight": (
        {"post_head_weight": None},
        ("post_head_weight", "None", "so each call needs its weight", "(1, 4, 4)"),
    ),
    "head weight list": ({"head_weight": [1.0]}, ("head_weight", "'list'", "must be a tensor", "torch.Tensor")),
    "head weight groups": (
        {"head_weight": torch.zeros(1, GROUP, GROUP)},
        ("head_weight.shape", "(1, 2, 2)", "one (m, m) matrix per group of 2 heads", "(2, 2, 2)"),
    ),
    "head weight of all heads": (
        {"head_weight": torch.zeros(1, H, H)},
        ("head_weight.shape", "(1, 4, 4)", "per group of 2 heads", "(2, 2, 2)"),
    ),
    "one matrix of some groups": (
        {"head_weight": torch.zeros(GROUP, GROUP)},
        ("head_weight.shape", "(2, 2)", "per group of 2 heads", "(2, 2, 2)"),
    ),
    "head weight with an axis of channels": (
        {"head_weight": torch.zeros(H // GROUP, 1, GROUP, GROUP)},
        ("head_weight.shape", "(2, 1, 2, 2)", "per group of 2 heads", "(2, 2, 2)"),
    ),
    "post head weight of groups of 2": (
        {"post_head_weight": torch.zeros(2, 2, 2)},
        ("post_head_weight.shape", "(2, 2, 2)", "per group of 4 heads", "(1, 4, 4) or (4, 4)"),
    ),
    "post weight as before the softmax": (
        {"post_weight": torch.zeros(H, CQ, CK)},
        ("post_weight.shape", "(4, 3, 4)", "one (cq, ck) filter per query head", "(4, 2, 5) or (4, 1, 2, 5)"),
    ),
    "post weight without heads": (
        {"post_weight": torch.zeros(POST_CQ, POST_CK)},
        ("post_weight.shape", "(2, 5)", "per query head", "(4, 2, 5)"),
    ),
    "head weight dtype": (
        {"head_weight": torch.zeros(2, 2, 2).bfloat16()},
        ("head_weight.dtype", "torch.bfloat16", "must be fp32 or the dtype of q", "float32"),
    ),
    "post weight dtype": (
        {"post_weight": torch.zeros(H, POST_CQ, POST_CK, dtype=torch.int32)},
        ("post_weight.dtype", "torch.int32", "must be fp32 or the dtype of q", "float32"),
    ),
    "post head weight device": (
        {"post_head_weight": torch.zeros(1, 4, 4, device="meta")},
        ("post_head_weight.device", "device(type='meta')", "must be on {q}'s device", "cpu"),
    ),
    "head weight device": (
        {"head_weight": torch.zeros(2, 2, 2, device="meta")},
        ("head_weight.device", "device(type='meta')", "must be on {q}'s device", "cpu"),
    ),
    "sparse post weight": (
        {"post_weight": torch.zeros(H, POST_CQ, POST_CK).to_sparse()},
        ("post_weight.layout", "torch.sparse_coo", "dense", "strided"),
    ),
}


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize(("changed", "parts"), PIPELINE_CALLS.values(), ids=PIPELINE_CALLS)
def test_weights_of_a_pipeline(
    pipeline: AttentionOp, changed: dict[str, Any], parts: tuple[str, ...] | None, decodes: bool
) -> None:
    """In a call and in a decode step alike; without parts of a message the call is legal."""
    given = cache(q_tail=torch.zeros(B, H, CONTEXT + NEW, D)) if decodes else tensors()
    call = pipeline.decode if decodes else pipeline
    if parts is None:
        with pytest.raises(pytest.fail.Exception, match="was launched"):
            call(**given | weights() | changed)
        return
    with pytest.raises(InputError) as caught:
        call(**given | weights() | changed)
    assert_explains(caught.value, *(part.format(q="q_tail" if decodes else "q") for part in parts))


@pytest.mark.parametrize("name", ["weight", "head_weight", "post_weight", "post_head_weight"])
def test_a_weight_that_the_op_does_not_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = dict(zip(weights(), STAGES, strict=True))[name]
    op = build_untouchable(monkeypatch, **STAGES | {stage: None})
    has = {other: weight for other, weight in weights().items() if other != name}
    given = {other: x for other, x in tensors().items() if other != "weight"}
    with pytest.raises(pytest.fail.Exception, match="was launched"):
        op(**given | has)
    with pytest.raises(InputError) as caught:
        op(**given | weights())
    shape = tuple(weights()[name].shape)
    built_by = dict(zip(weights(), STAGES, strict=True))[name]
    parts = f"{name}.shape", f"{shape}", "was built without such a stage", f"None, or mtagen.build(..., {built_by}=...)"
    assert_explains(caught.value, *parts)
    with pytest.raises(InputError) as caught:
        build_untouchable(monkeypatch)(**given | {name: weights()[name]})
    assert_explains(caught.value, *parts)


@pytest.mark.parametrize(("stage", "name"), [("mixed_heads", "head_weight"), ("post_mixed_heads", "post_head_weight")])
@pytest.mark.parametrize("group", [3, 8])
def test_groups_that_do_not_divide_the_heads(
    stage: str, name: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = build_untouchable(monkeypatch, **{stage: group})
    given = {other: x for other, x in tensors().items() if other != "weight"}
    with pytest.raises(InputError) as caught:
        op(**given, **{name: torch.zeros(1, group, group)})
    rule = f"the op mixes groups of {group} heads ({name})"
    assert_explains(caught.value, "heads", str(H), rule, f"multiples of {group}")


@pytest.mark.parametrize(
    ("stages", "rule"),
    [
        (STAGES, "must be 3 context queries (cq - 1 + post cq - 1 = 3), then 1..8 new queries"),
        ({"kernel": (CQ, CK), "mixed_heads": 2}, "must be 2 context queries (cq - 1 = 2), then 1..8 new queries"),
        ({"post_kernel": (POST_CQ, POST_CK)}, "must be 1 context queries (post cq - 1 = 1), then 1..8 new queries"),
        ({"mixed_heads": 2}, "must be 1..8 new queries"),
    ],
    ids=str,
)
def test_rows_of_a_decode_step(stages: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few earlier queries, and too many new ones."""
    op = build_untouchable(monkeypatch, **stages)
    context = op.plan.spec.context
    given = {name: x for name, x in weights().items() if name in op.plan.spec.weight_names}
    given |= {name: x for name, x in cache().items() if name != "weight"}
    for rows in (context, context + 9):
        with pytest.raises(InputError) as caught:
            op.decode(**given | {"q_tail": torch.zeros(B, H, rows, D)})
        assert_explains(caught.value, "q_tail rows", str(rows), rule, f"{context + 1}..{context + 8}")
    for rows in (context + 1, context + 8):
        with pytest.raises(pytest.fail.Exception, match="decode was launched"):
            op.decode(**given | {"q_tail": torch.zeros(B, H, rows, D)})


BUILDS = {
    "head dim 12": ({"head_dim": 12}, "head_dim", "12", "not supported", "multiples of 8 from 16 to 256"),
    "head dim 8": ({"head_dim": 8}, "head_dim", "8", "not supported", "multiples of 8 from 16 to 256"),
    "head dim 264": ({"head_dim": 264}, "head_dim", "264", "not supported", "multiples of 8 from 16 to 256"),
    "head dim 64.0": (
        {"head_dim": 64.0},
        "head_dim",
        "64.0",
        "not supported",
        "multiples of 8 from 16 to 256",
    ),
    "value head dim": ({"value_head_dim": 100}, "value_head_dim", "100", "not supported", "multiples of 8"),
    "kernel 0": ({"kernel": (0, 3)}, "kernel", "(0, 3)", "out of range", "1..64 each"),
    "kernel 65": ({"kernel": (3, 65)}, "kernel", "(3, 65)", "out of range", "1..64 each"),
    "kernel of three": ({"kernel": (3, 3, 3)}, "kernel", "(3, 3, 3)", "pair of ints", "1..64 each"),
    "kernel int": ({"kernel": 3}, "kernel", "3", "pair of ints", "1..64 each"),
    "kernel bools": ({"kernel": (True, True)}, "kernel", "(True, True)", "pair of ints", "1..64 each"),
    "kernel floats": ({"kernel": (3.0, 3)}, "kernel", "(3.0, 3)", "pair of ints", "1..64 each"),
    "no mixed heads": ({"mixed_heads": 0}, "mixed_heads", "0", "number of heads", "1..64, or None"),
    "65 mixed heads": ({"mixed_heads": 65}, "mixed_heads", "65", "number of heads", "1..64, or None"),
    "mixed heads bool": ({"mixed_heads": True}, "mixed_heads", "True", "number of heads", "1..64, or None"),
    "post mixed heads float": ({"post_mixed_heads": 2.0}, "post_mixed_heads", "2.0", "number of heads", "1..64, or"),
    "post kernel 0": ({"post_kernel": (3, 0)}, "post_kernel", "(3, 0)", "out of range", "1..64 each"),
    "post kernel int": ({"post_kernel": 3}, "post_kernel", "3", "pair of ints", "1..64 each, or None"),
    "causal": ({"causal": 1}, "causal", "1", "must be a bool", "(True, False)"),
    "key padding": (
        {"key_padding": "centre"},
        "key_padding",
        "'centre'",
        "not supported",
        "('both', 'left', 'right')",
    ),
    "mask": ({"mask": "none"}, "mask", "'none'", "not supported", "('source', 'output')"),
    "window of one": ({"window": (3,)}, "window", "(3,)", "pair of ints (left, right)", "-1 for all"),
    "window int": ({"window": 3}, "window", "3", "pair of ints (left, right)", "-1 for all"),
    "window -2": ({"window": (-2, 0)}, "window", "(-2, 0)", "pair of ints (left, right)", "-1 for all"),
    "window 2**30": ({"window": (2**30, 0)}, "window", "(1073741824, 0)", "pair of ints", "2**30-1"),
    "window bools": ({"window": (True, False)}, "window", "(True, False)", "pair of ints", "-1 for all"),
    "dtype": (
        {"dtype": "fp8"},
        "dtype",
        "'fp8'",
        "not supported",
        "bf16, fp16, fp32, fp64, or what torch calls them, such as",
    ),
    "torch dtype": ({"dtype": torch.int8}, "dtype", "torch.int8", "not supported", "torch.bfloat16"),
    "backend": (
        {"backend": "cudnn"},
        "backend",
        "'cudnn'",
        "is not the name of a backend",
        "('auto', 'cuda', 'triton', 'torch')",
    ),
    "target": (
        {"target": "sm_42"},
        "target",
        "'sm_42'",
        "is not the name of a target",
        "'sm_80', 'sm_86', 'sm_89', 'sm_90a'",
    ),
}


@pytest.mark.parametrize(("changed", "name", "got", "rule", "legal"), BUILDS.values(), ids=BUILDS)
def test_build(changed: dict[str, Any], name: str, got: str, rule: str, legal: str) -> None:
    with pytest.raises(SpecError) as caught:
        mtagen.build(**{"kernel": (3, 3), "head_dim": 64, "target": "cpu"} | changed)
    assert_explains(caught.value, name, got, rule, legal)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_integers_of_any_type(integer: Callable[[int], Any]) -> None:
    given = {"mixed_heads": integer(2), "value_head_dim": integer(24), "window": [integer(5), integer(0)]}
    spec = Spec((integer(2), integer(3)), integer(16), post_kernel=[integer(4), integer(1)], **given)
    assert spec == Spec((2, 3), 16, mixed_heads=2, value_head_dim=24, window=(5, 0), post_kernel=(4, 1))
    assert {type(x) for x in (*spec.kernel, *spec.post_kernel, spec.head_dim, spec.mixed_heads)} == {int}


def test_target_that_names_a_backend() -> None:
    with pytest.raises(SpecError) as caught:
        mtagen.build((3, 3), 64, target="cuda")
    assert_explains(
        caught.value, "target", "'cuda'", "is not the name of a target; pass backend='cuda'", "'cpu', 'sm_80'"
    )


def with_exchanged_axes(name: str) -> dict[str, Tensor]:
    """Tensors (B, N, H, D) for a call, or (H, total, D) for packed documents."""
    packed = name == "varlen"
    shapes = {"q": (H, 9, D) if packed else (B, 9, H, D), "k": (H, 9, D) if packed else (B, 9, HKV, D)}
    return {"q": torch.zeros(shapes["q"]), "k": torch.zeros(shapes["k"]), "v": torch.zeros(shapes["k"])}


@pytest.mark.parametrize("name", ["call", "varlen"])
@pytest.mark.parametrize(
    ("stages", "weight"),
    [
        ({"kernel": (CQ, CK)}, {"weight": torch.zeros(H, CQ, CK)}),
        ({"kernel": (CQ, CK)}, {"weight": torch.zeros(H, 1, CQ, CK)}),
        ({"kernel": None, "mixed_heads": 2}, {"head_weight": torch.zeros(2, 2, 2)}),
        ({"kernel": None, "post_mixed_heads": H}, {"post_head_weight": torch.zeros(H, H)}),
    ],
)
def test_heads_and_rows_exchanged(name: str, stages: dict[str, Any], weight: dict[str, Tensor]) -> None:
    """The message blames the layout, not the weight, and what it says to pass is taken."""
    op = mtagen.build(head_dim=D, target="cpu", dtype="fp32", **stages)
    given = with_exchanged_axes(name)
    documents: dict[str, Any] = {}
    if name == "varlen":
        cu_seq = torch.tensor([0, 9], dtype=torch.int32)
        documents = {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq, "max_q": 9, "max_k": 9}
    call = op.varlen if name == "varlen" else op
    with pytest.raises(InputError) as caught:
        call(**given, **weight, **documents)
    axes = (0, 1) if name == "varlen" else (1, 2)
    layout = "(total, H, D)" if name == "varlen" else "(B, H, N, D)"
    rule = f"the layout is {layout}: this tensor has 9 heads, and {next(iter(weight))} has 4"
    assert_explains(caught.value, "q.shape", f"{tuple(given['q'].shape)}", rule, f"q.transpose{axes}")
    assert call(**{key: x.transpose(*axes) for key, x in given.items()}, **weight, **documents).shape[-1] == D


def test_rows_that_are_no_multiple_of_keys_rows_as_heads() -> None:
    op = mtagen.build(None, D, target="cpu", dtype="fp32")
    k = torch.zeros(B, 7, HKV, D)
    with pytest.raises(InputError) as caught:
        op(torch.zeros(B, 9, H, D), k, k)
    assert_explains(
        caught.value, "heads", "(9, 7)", "must be a multiple", "q.transpose(1, 2) and the same of the others"
    )


def test_shapes_of_packed_documents_are_the_callers() -> None:
    op = mtagen.build(None, D, target="cpu", dtype="fp32")
    cu_seq = torch.tensor([0, 9], dtype=torch.int32)
    documents = {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq, "max_q": 9, "max_k": 9}
    with pytest.raises(InputError) as caught:
        op.varlen(torch.zeros(9, H, D), torch.zeros(9, HKV, D), torch.zeros(9, HKV, DV), **documents)
    assert_explains(caught.value, "v.shape", f"(9, {HKV}, {DV})", "does not fit", f"(9, {HKV}, {D})")


ARRAY, MATRIX = np.zeros(3), torch.zeros(2, 2)
# Values that no argument takes, then those that others take: strings, bools, ints, floats, None, arrays and tensors.
STRANGE = (object(), ARRAY, np.zeros((50, 50)), MATRIX, torch.tensor(True), b"both", {}, 1.5, math.nan, ("both",))
NOT_TEXT = (*STRANGE, True, 1)
NOT_A_BOOL = (*STRANGE, 0, 1, "yes", np.True_)
NOT_A_SIZE = (*STRANGE, True, 64.0, "64", (64,), -64, np.int64(-64), torch.tensor(64))
NO_KERNEL = (
    *STRANGE,
    "ab",
    "6,11",
    "none",
    6,
    (6,),
    (6, "11"),
    (6, None),
    (True, 11),
    (6, 11.0),
    (ARRAY, ARRAY),
    MATRIX,
)
NO_GROUP = (*NOT_A_SIZE, 0, 65, (2, 2))
NO_EXPRESSION = (3, b"s", ["s"], "", "s +", lambda x: x)
WRONG_VALUES = {
    "kernel": NO_KERNEL,
    "mixed_heads": NO_GROUP,
    "post_kernel": NO_KERNEL,
    "post_mixed_heads": NO_GROUP,
    "dynamic_ranks": (*NO_KERNEL, (2, 2)),
    "post_dynamic_ranks": (*NO_KERNEL, (2, 2)),
    "head_dim": (*NOT_A_SIZE, None),
    "value_head_dim": NOT_A_SIZE,
    "window": (*NO_KERNEL, None, (-2, 0)),
    "causal": (*NOT_A_BOOL, None),
    "key_padding": (*NOT_TEXT, None, "", "Both"),
    "mask": (*NOT_TEXT, None, "none"),
    "dtype": (*NOT_TEXT, "", "float", torch.int8, np.float32, float),
    "scores": NO_EXPRESSION,
    "convolved": NO_EXPRESSION,
    "logits": NO_EXPRESSION,
    "visible": NO_EXPRESSION,
    "parameters": (3, "slopes", [3], {"slopes": "h"}, {3: "h"}, {"s": "h"}, {"for": ""}, {"tanh": "h"}),
    "constants": (*STRANGE, None, True, 3, "slopes", ["slopes"], (3,), [ARRAY], {"slopes"}),
    "sink": (*NOT_A_BOOL, None),
    "backend": (*NOT_TEXT, None, "", "gpu"),
    "target": (*NOT_TEXT, "", "h100", (9, 0), mtagen.TARGETS["sm_90a"]),
    "deterministic": NOT_A_BOOL,
    "packed": (*NOT_A_BOOL, None),
    "dropout": (*NOT_A_BOOL, None),
    "page_size": (0, -16, 24, 1.5, "16", [16]),
    "tune": (*NOT_A_BOOL, None),
}


@pytest.mark.parametrize("argument", WRONG_VALUES)
def test_build_refuses_values_of_wrong_types(argument: str) -> None:
    assert set(WRONG_VALUES) == set(inspect.signature(mtagen.build).parameters)
    for value in WRONG_VALUES[argument]:
        assert_refused(argument, value, lambda **wrong: mtagen.build(**{"kernel": (3, 3), "head_dim": 64} | wrong))


SPEC = Spec((6, 11), 64)
WRONG_VALUES_OF_PLAN = {
    "spec": (*NOT_TEXT, None, "text", (6, 11), SPEC.to_dict()),
    "target": (*NOT_TEXT, None, "", "h100", (9, 0)),
    "backend": (*NOT_TEXT, None, "", "gpu"),
    "available": (*STRANGE, None, True, 1, "cuda", "triton", ("auto",), ["cuda", None], (ARRAY,), np.array(["cuda"])),
    "tables": (*STRANGE, True, 1, "text", Table("measured"), (None,), ["measured"], [MATRIX]),
}


@pytest.mark.parametrize("argument", WRONG_VALUES_OF_PLAN)
def test_plan_refuses_values_of_wrong_types(argument: str) -> None:
    assert set(WRONG_VALUES_OF_PLAN) == set(inspect.signature(mtagen.plan).parameters)
    for value in WRONG_VALUES_OF_PLAN[argument]:
        assert_refused(argument, value, lambda **wrong: mtagen.plan(**{"spec": SPEC} | wrong))


def assert_refused(argument: str, value: object, call: Callable[..., object]) -> None:
    """In one line, short enough to be read whatever the value."""
    try:
        call(**{argument: value})
    except SpecError as error:
        message = str(error)
    else:
        pytest.fail(f"{argument}={value!r} is taken")
    assert re.match(rf"{argument}: got .+; .+; legal: .+", message), message
    assert "\n" not in message
    assert len(message) < 600


PLANS = {
    "min(cq, ck) of 17": (
        {"kernel": (18, 17)},
        "kernel",
        "(18, 17)",
        "17, 1 over the limit",
        "min(cq, ck) <= 16",
    ),
    "fp64": (
        {"dtype": "fp64"},
        "dtype",
        "'fp64'",
        "sm_90a has no kernels for this dtype",
        "('bf16', 'fp16', 'fp32')",
    ),
    "triton on the CPU": (
        {"target": "cpu"},
        "backend",
        "'triton'",
        "compiles for GPUs only",
        "backend='torch'",
    ),
}


@pytest.mark.parametrize(("changed", "name", "got", "rule", "legal"), PLANS.values(), ids=PLANS)
def test_no_plan(changed: dict[str, Any], name: str, got: str, rule: str, legal: str) -> None:
    with pytest.raises(PlanError) as caught:
        mtagen.build(
            **{"kernel": (3, 3), "head_dim": 64, "target": "sm_90a", "backend": "triton", "dtype": "bf16"} | changed
        )
    assert_explains(caught.value, name, got, rule, legal)


def test_a_kernel_too_large_for_triton_is_not_for_torch() -> None:
    op = mtagen.build((18, 17), 16, backend="torch", target="cpu")
    out = op(*(torch.ones(1, 1, 3, 16) for _ in range(3)), torch.ones(1, 18, 17))
    torch.testing.assert_close(out, torch.ones(1, 1, 3, 16))


def test_an_infeasible_plan_names_the_limit_and_the_excess() -> None:
    small = replace(mtagen.TARGETS["generic"], name="small", shared_per_block=2048, registers_per_thread=24)
    with pytest.raises(PlanError, match="forward: no tile fits small") as caught:
        mtagen.plan(Spec((6, 11), 64), small)
    message = str(caught.value)
    need, over, limit = (int(x) for x in _numbers(message, r"(\d+) bytes of shared memory, (\d+) over (\d+)"))
    assert (limit, need - limit) == (2048, over)
    need, over, limit = (int(x) for x in _numbers(message, r"(\d+) registers per thread, (\d+) over (\d+)"))
    assert (limit, need - limit) == (24, over)
    assert "legal: a smaller head_dim, a smaller kernel" in message


def _numbers(message: str, pattern: str) -> tuple[str, ...]:
    found = re.search(pattern, message)
    assert found, message
    return found.groups()


def test_kernels_for_gpus_refuse_cpu_tensors() -> None:
    op = mtagen.build((CQ, CK), D, backend="triton", target="sm_90a", dtype="fp32")
    q, k, v = torch.zeros(B, H, NQ, D), *(torch.zeros(B, HKV, NK, D) for _ in range(2))
    weight = torch.zeros(H, CQ, CK)
    for call in (
        lambda: op(q, k, v, weight),
        lambda: op.decode(q, k, v, weight),
        lambda: torch.ops.mtagen.backward(
            q, q[..., 0], q, k, v, weight, None, None, None, *NO_LEARNED, q, q[..., 0], 1.0, op._key
        ),
    ):
        with pytest.raises(BackendError) as caught:
            call()
        assert_explains(caught.value, "device", "'cpu'", "run on GPUs", "backend='auto'")


def test_interpreter_refuses_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError) as caught:
        mtagen.build((CQ, CK), D, backend="triton", dtype="bf16")
    assert_explains(caught.value, "dtype", "'bf16'", "interpreter computes bf16 wrongly", "fp32 or fp16, or a GPU")


# Lengths that are legal, and have to be right at the edge.


def run(nq: int, nk: int, *, batch: int = B, causal: bool = True) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out, lse, and the gradients of q, k, v and weight."""
    op = mtagen.build((CQ, CK), D, value_head_dim=DV, causal=causal, target="cpu")
    torch.manual_seed(0)
    leaves = [
        torch.randn(shape, requires_grad=True)
        for shape in ((batch, H, nq, D), (batch, HKV, nk, D), (batch, HKV, nk, DV), (H, CQ, CK))
    ]
    out, lse = op(*leaves, return_lse=True)
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
    return out, lse, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("causal", [True, False])
def test_no_queries(causal: bool) -> None:
    out, lse, grads = run(0, NK, causal=causal)
    assert (out.shape, lse.shape) == ((B, H, 0, DV), (B, H, 0))
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("causal", [True, False])
def test_no_keys(causal: bool) -> None:
    out, lse, grads = run(NQ, 0, causal=causal)
    assert torch.equal(out, torch.zeros(B, H, NQ, DV))
    assert torch.equal(lse, torch.full((B, H, NQ), -torch.inf))
    assert not any(grad.any() for grad in grads)


def test_no_batch() -> None:
    out, lse, grads = run(NQ, NK, batch=0)
    assert (out.shape, lse.shape) == ((0, H, NQ, DV), (0, H, NQ))
    assert grads[3].shape == (H, CQ, CK)
    assert not grads[3].any()


def test_more_queries_than_keys() -> None:
    """The first Nq - Nk queries stand before the first key: they see none."""
    nq, nk = 9, 4
    out, lse, grads = run(nq, nk)
    blind = nq - nk
    assert not out[:, :, :blind].any()
    assert (lse[:, :, :blind] == -torch.inf).all()
    assert out[:, :, blind:].all()
    assert lse[:, :, blind:].isfinite().all()
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


def test_decode_clamps_lengths() -> None:
    """A length beyond the cache counts as the cache's; one below the new rows leaves some that see no key."""
    op = mtagen.build((CQ, CK), D, value_head_dim=DV, target="cpu")
    torch.manual_seed(0)
    args = {name: torch.randn_like(x) if x.is_floating_point() else x for name, x in cache().items()}
    full = op.decode(**args)
    lengths = torch.tensor([NK + 3, 0], dtype=torch.int32)
    out, lse = op.decode(**args | {"cache_seqlens": lengths}, return_lse=True)
    assert torch.equal(out[0], full[0])
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
