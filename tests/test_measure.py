"""What check, tune and bench share: cases as values, their rows, and the inputs that are drawn for them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mtagen import tuning
from mtagen.errors import SpecError
from mtagen.measure.cases import ROW_KEYS, SCALES, Case, Sizes
from mtagen.measure.inputs import Inputs, Sampler
from mtagen.measure.judge import eager_op, judge
from mtagen.spec import Spec

CPU = torch.device("cpu")
SPEC = Spec((3, 4), 16, 24, dtype="fp16")
SIZES = Sizes(batch=2, heads=4, kv_heads=2, nq=5, nk=7)


@pytest.mark.parametrize(
    ("spec", "special"),
    [
        (Spec((6, 11), 64), {}),
        (Spec((6, 11), 64, causal=False, dtype="fp32"), {}),
        (Spec((6, 11), 64, 128, key_padding="left"), {"value_head_dim": 128, "key_padding": "left"}),
        (Spec(None, 64), {}),
        (Spec(None, 64, mixed_heads=16, post_mixed_heads=2), {"mixed_heads": 16, "post_mixed_heads": 2}),
        (Spec((6, 11), 64, post_kernel=(2, 3)), {"post_kernel": [2, 3]}),
    ],
)
def test_rows_tell_the_case_and_no_more(spec: Spec, special: dict[str, object]) -> None:
    case = Case(spec, SIZES, "backward")
    row = json.loads(json.dumps(case.to_dict()))
    assert {name: row[name] for name in row if name not in ROW_KEYS} == special
    assert row.keys() >= set(ROW_KEYS)
    assert Case.from_dict(row | {"ms": 1.0, "contender": "mtagen cuda"}) == case


def test_a_row_of_an_illegal_operator_is_refused() -> None:
    row = Case(SPEC, SIZES, "forward").to_dict()
    with pytest.raises(SpecError, match="head_dim"):
        Case.from_dict(row | {"head_dim": 17})


def test_bytes_are_those_of_the_tensors() -> None:
    inputs = Sampler.for_checks(SPEC, SIZES, CPU).inputs()
    case = Case(SPEC, SIZES, "forward")
    out, _ = eager_op(SPEC, return_lse=True)(*inputs.arguments)
    assert case.row_bytes == inputs.q.nbytes + out.nbytes
    assert case.cache_bytes == inputs.k.nbytes + inputs.v.nbytes
    assert case.score_bytes == (inputs.q @ inputs.k.repeat_interleave(2, 1).mT).nbytes


def test_tuning_is_for_long_and_short_sequences_and_all_ways_to_decode() -> None:
    """The tables that ship with the package were measured at these sizes."""
    long, short = Sizes(1, 16, 16, 8192, 8192), Sizes(8, 16, 16, 1024, 1024)
    steps = Sizes(8, 16, 16, 1, 32768), Sizes(8, 16, 4, 1, 32768), Sizes(8, 16, 16, 4, 32768)
    assert {"forward": (long,), "backward": (long,), "decode": steps} == tuning.CANDIDATE_SIZES
    assert {"forward": (long, short), "backward": (long, short), "decode": steps} == tuning.BACKEND_SIZES


def test_long_caches_are_decoded_alone() -> None:
    assert [SCALES["cuda"].decode(n).batch for n in (32768, 32769)] == [8, 1]


def shapes(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in inputs.named.items()}


@pytest.mark.parametrize("make", [Sampler.for_checks, Sampler.for_timing])
def test_inputs_fit_the_op(make: type[Sampler]) -> None:
    sampler = make(SPEC, SIZES, CPU)
    inputs = sampler.inputs()
    rest = {"k": (2, 2, 7, 16), "v": (2, 2, 7, 24), "weight": (4, 3, 4)}
    assert shapes(inputs) == {"q": (2, 4, 5, 16), **rest}
    assert list(inputs.named) == ["q", "k", "v", *SPEC.weights(4)]
    assert shapes(sampler.inputs(decode=True)) == {"q": (2, 4, 2 + 5, 16), **rest}
    assert tuple(sampler.outputs().shape) == (2, 4, 5, 24)
    assert [x.dtype for x in inputs.arguments] == [torch.float16] * 3 + [torch.float32]


@pytest.mark.parametrize("make", [Sampler.for_checks, Sampler.for_timing])
def test_inputs_fit_a_pipeline(make: type[Sampler]) -> None:
    spec = replace(SPEC, kernel=None, mixed_heads=2, post_kernel=(5, 2), post_mixed_heads=4)
    sampler = make(spec, SIZES, CPU)
    inputs = sampler.inputs()
    rest = {"head_weight": (2, 2, 2), "post_weight": (4, 5, 2), "post_head_weight": (1, 4, 4)}
    assert shapes(inputs) == {"q": (2, 4, 5, 16), "k": (2, 2, 7, 16), "v": (2, 2, 7, 24), **rest}
    assert inputs.weights.keys() == rest.keys()
    assert tuple(sampler.queries(3, decode=True).shape) == (2, 4, 3 + 4, 16)


def test_layouts() -> None:
    checked, timed = (make(SPEC, SIZES, CPU).inputs() for make in (Sampler.for_checks, Sampler.for_timing))
    assert checked.q.transpose(1, 2).is_contiguous()
    assert not checked.q.is_contiguous()
    assert timed.q.is_contiguous()


def test_equal_samplers_draw_equal_tensors() -> None:
    first, second = (Sampler.for_checks(SPEC, SIZES, CPU) for _ in range(2))
    for _ in range(2):
        one, other = first.inputs().arguments, second.inputs().arguments
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    narrow, wide = (Sampler.for_checks(replace(SPEC, dtype=name), SIZES, CPU).inputs() for name in ("fp16", "fp32"))
    assert torch.equal(narrow.q, wide.q.half())  # the accuracy of dtypes is compared on the same numbers


def test_weights_keep_the_size_of_what_they_mix() -> None:
    weight = Sampler.for_timing(Spec((8, 16), 16), Sizes(1, 64, 64, 1, 1), CPU).inputs().weights["weight"]
    assert weight.square().sum((1, 2)).mean().item() == pytest.approx(1, rel=0.05)


def test_matrices_keep_the_size_of_what_they_mix() -> None:
    """What counts is a row, that of one head of the result."""
    spec = Spec(None, 16, mixed_heads=8, post_mixed_heads=64)
    weights = Sampler.for_timing(spec, Sizes(1, 64, 64, 1, 1), CPU).inputs().weights
    for weight in weights.values():
        assert weight.square().sum(2).mean().item() == pytest.approx(1, rel=0.1)


def test_weights_are_given_by_name() -> None:
    spec = Spec(None, 16, dtype="fp32", mixed_heads=2, post_kernel=(2, 3))
    sampler = Sampler.for_checks(spec, Sizes(1, 4, 2, 9, 11), CPU)
    eager, inputs, grad_out = eager_op(spec, return_lse=True), sampler.inputs(), sampler.outputs()
    found = judge(eager, eager, inputs, grad_out)
    assert [*found] == ["out", "lse", "dq", "dk", "dv", "dhead_weight", "dpost_weight"]
    assert all(comparison.ok for comparison in found.values())

    def spoiled(q: Tensor, k: Tensor, v: Tensor, head_weight: Tensor, post_weight: Tensor) -> tuple[Tensor, Tensor]:
        head_weight = head_weight + 0.1 * (head_weight - head_weight.detach())
        results: tuple[Tensor, Tensor] = eager(q, k, v, head_weight=head_weight, post_weight=post_weight)
        return results

    found = judge(spoiled, eager, inputs, grad_out)
    assert [name for name, comparison in found.items() if not comparison.ok] == ["dhead_weight"]


def test_attention_without_weights_is_judged() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    sampler = Sampler.for_checks(Spec((1, 1), 16, dtype="fp32"), Sizes(1, 2, 2, 5, 7), CPU)
    inputs = replace(sampler.inputs(), weights={})
    assert judge(attend, attend, inputs).keys() == {"out"}
    found = judge(lambda q, k, v: attend(q, k, 1.1 * v), attend, inputs, sampler.outputs())
    assert found.keys() == {"out", "dq", "dk", "dv"}
    assert not any(comparison.ok for comparison in found.values())
