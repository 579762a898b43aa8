"""Every pipeline of stages on the torch backend against the specification: strips, every gradient, decoding."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call_of, step_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mtagen
from mtagen import reference
from mtagen.call import NO_LEARNED
from mtagen.check import failures
from mtagen.cpu import pipeline
from mtagen.measure.cases import Case, Sizes
from mtagen.ops.attention import AttentionOp
from mtagen.planner.names import suffix
from mtagen.spec import WEIGHTS, Spec

pytestmark = pytest.mark.usefixtures("one_thread")

F64 = torch.float64
HEADS, KV_HEADS, DIM, VALUE_DIM, SCALE = 4, 2, 16, 24, 0.3
BEFORE: dict[str, dict[str, Any]] = {
    "none": {"kernel": None},
    "convolution": {"kernel": (3, 4)},
    "mixing": {"kernel": None, "mixed_heads": 2},
    "both": {"kernel": (3, 4), "mixed_heads": 2},
}
AFTER: dict[str, dict[str, Any]] = {
    "none": {},
    "convolution": {"post_kernel": (2, 5)},
    "mixing": {"post_mixed_heads": 4},
    "both": {"post_kernel": (2, 5), "post_mixed_heads": 4},
}
PIPELINES = {
    f"{before} before, {after} after": BEFORE[before] | AFTER[after]
    for before, after in itertools.product(BEFORE, AFTER)
}
EVERYTHING = PIPELINES["both before, both after"]
WINDOWS = [(0, -1), (3, -1), (-1, 2), (5, 4), (40, 0)]
WIDE = {"kernel": (6, 11), "mixed_heads": 4, "post_kernel": (5, 8), "post_mixed_heads": 2}  # halos of 9 and 17

every_pipeline = pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)


def convolves(stages: dict[str, Any]) -> bool:
    return bool(stages["kernel"] or stages.get("post_kernel"))


# Masks and paddings are rules of convolutions: there is one of each without.
VARIANTS = {
    f"{name}-{'causal' if causal else 'full'}-{padding}-{mask}": (
        stages | {"causal": causal, "key_padding": padding, "mask": mask}
    )
    for name, stages in PIPELINES.items()
    for causal, mask, padding in itertools.product((True, False), ("source", "output"), ("both", "left", "right"))
    if (convolves(stages) and (causal or mask == "source")) or (mask, padding) == ("source", "both")
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of twice the context or, without any, of two rows."""
    monkeypatch.setattr(pipeline, "STRIP_SCORES", 2 * HEADS * 20)


def make_spec(options: dict[str, Any], **others: Any) -> Spec:
    return Spec(**{"head_dim": DIM, "value_head_dim": VALUE_DIM, "dtype": "fp64"} | options | others)


def make_inputs(
    spec: Spec, nq: int, nk: int, batch: int = 1, heads: int = HEADS, kv_heads: int = KV_HEADS
) -> list[Tensor]:
    """q, k, v, and the weights in their order."""
    torch.manual_seed(100 * nq + nk)
    shapes = (batch, heads, nq, DIM), (batch, kv_heads, nk, DIM), (batch, kv_heads, nk, spec.value_head_dim)
    weights = (torch.randn(shape, dtype=F64) / shape[-1] for shape in spec.weights(heads).values())
    return [*(torch.randn(shape, dtype=F64) for shape in shapes), *weights]


def make_grads(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of out and of lse."""
    return torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.randn(q.shape[:3], dtype=q.dtype)


def call_reference(spec: Spec, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """Out and lse by the specification."""
    named = dict(zip(spec.weight_names, weights, strict=True))
    options = {"causal": spec.causal, "window": spec.window, "key_padding": spec.key_padding, "mask": spec.mask}
    return reference(q, k, v, **named, **options, scale=SCALE, return_lse=True)


def run_reference(spec: Spec, args: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor) -> list[Tensor]:
    """Out, lse, and the gradients of all arguments."""
    leaves = [x.detach().requires_grad_() for x in args]
    out, lse = call_reference(spec, *leaves)
    seen = lse > -torch.inf
    loss = (out * grad_out).sum() + (lse[seen] * grad_lse[seen]).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def run_pipeline(spec: Spec, args: Sequence[Tensor], grad_out: Tensor, grad_lse: Tensor) -> list[Tensor]:
    q, k, v, *weights = args
    call = call_of(spec, q, k, v, weights, SCALE)
    return [*pipeline.forward(spec, call), *pipeline.backward(spec, call, grad_out, grad_lse)]


def assert_same(spec: Spec, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    names = ("out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in spec.weight_names))
    for name, a, b in zip(names, got, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    assert len(got) == len(expected)


def assert_equals_reference(spec: Spec, args: Sequence[Tensor]) -> None:
    grads = make_grads(args[0], args[2])
    assert_same(spec, run_pipeline(spec, args, *grads), run_reference(spec, args, *grads))


# Forward and backward.


@every_variant
@pytest.mark.usefixtures("small_strips")
def test_equals_reference(options: dict[str, Any]) -> None:
    spec = make_spec(options)
    for nq, nk in ((17, 17), (9, 20), (20, 9)):
        assert_equals_reference(spec, make_inputs(spec, nq, nk))


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 7), (7, 1), (2, 2), (5, 4), (8, 9), (10, 11)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_shorter_than_a_halo(causal: bool, lengths: tuple[int, int], mask: str) -> None:
    spec = make_spec(WIDE, causal=causal, mask=mask)
    assert_equals_reference(spec, make_inputs(spec, *lengths))


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("stages", [EVERYTHING, {"kernel": (3, 4)}, {"kernel": None}], ids=str)
@pytest.mark.usefixtures("small_strips")
def test_windows(stages: dict[str, Any], window: tuple[int, int], causal: bool, mask: str) -> None:
    spec = make_spec(stages, window=window, causal=causal, mask=mask)
    for nq, nk in ((1, 1), (17, 17), (9, 30), (30, 9)):
        assert_equals_reference(spec, make_inputs(spec, nq, nk))


def test_strips_read_the_keys_of_their_windows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that time and memory grow with the number of rows times the window."""
    monkeypatch.setattr(pipeline, "STRIP_SCORES", HEADS * 300)
    spec = make_spec(EVERYTHING, window=(8, -1))
    q, k, *_ = make_inputs(spec, 400, 400)
    strips = [strip for _, strip in pipeline._strips(spec, q, k)]
    assert all(strip.end - strip.first + 8 >= strip.keys.stop - strip.keys.start for strip in strips)
    assert max((strip.end - strip.first) * (strip.keys.stop - strip.keys.start) for strip in strips) < 500
    assert len(strips) < 50


@pytest.mark.parametrize(("batch", "kv_heads"), [(2, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("mixed", [1, 2, 4])
@pytest.mark.usefixtures("small_strips")
def test_grouped_keys_and_groups_of_heads(mixed: int, batch: int, kv_heads: int) -> None:
    """Groups that are mixed hold a part of a group that shares keys, or some of these."""
    spec = make_spec({"kernel": (2, 3), "mixed_heads": mixed, "post_kernel": (1, 3), "post_mixed_heads": 4 // mixed})
    assert_equals_reference(spec, make_inputs(spec, 13, 15, batch, kv_heads=kv_heads))


@pytest.mark.parametrize("mixed", [3, 5, 15])
def test_groups_that_are_no_power_of_two(mixed: int) -> None:
    spec = make_spec({"kernel": None, "mixed_heads": mixed, "post_mixed_heads": 15 // mixed})
    assert_equals_reference(spec, make_inputs(spec, 7, 9, heads=15, kv_heads=5))


@pytest.mark.parametrize("strip_scores", [1, HEADS * 33 * 5, HEADS * 33 * 16, 2**22])
def test_strips_of_any_size(strip_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twice the context, of a size that divides no length, of half the rows, of all."""
    monkeypatch.setattr(pipeline, "STRIP_SCORES", strip_scores)
    for mask in ("source", "output"):
        spec = make_spec(EVERYTHING, mask=mask)
        assert_equals_reference(spec, make_inputs(spec, 32, 33))


@pytest.mark.usefixtures("small_strips")
def test_strips_before_the_first_key() -> None:
    """When causal, most queries see no key: whole strips of them, and a strip with some that see one."""
    spec = make_spec(EVERYTHING)
    args = make_inputs(spec, 30, 4)
    out, lse = pipeline.forward(spec, call_of(spec, *args[:3], args[3:], SCALE))
    assert not out[:, :, :26].any()
    assert (lse[:, :, :26] == -torch.inf).all()
    assert_equals_reference(spec, args)


@pytest.mark.parametrize(("nq", "nk"), [(0, 4), (4, 0), (0, 0)])
@every_pipeline
def test_no_scores(stages: dict[str, Any], nq: int, nk: int) -> None:
    spec = make_spec(stages)
    args = make_inputs(spec, nq, nk)
    out, lse, *grads = run_pipeline(spec, args, *make_grads(args[0], args[2]))
    assert torch.equal(out, torch.zeros(1, HEADS, nq, VALUE_DIM, dtype=F64))
    assert torch.equal(lse, torch.full((1, HEADS, nq), -torch.inf, dtype=F64))
    for grad, x in zip(grads, args, strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.usefixtures("small_strips")
def test_views_of_a_packed_projection() -> None:
    spec = make_spec(EVERYTHING, value_head_dim=DIM)
    torch.manual_seed(0)
    packed = torch.randn(2, 20, 3, HEADS, DIM, dtype=F64)
    args = [*packed.permute(2, 0, 3, 1, 4).unbind(0), *make_inputs(spec, 1, 1)[3:]]
    assert not any(x.is_contiguous() for x in args[:3])
    grad_out = torch.randn(2, 20, HEADS, DIM, dtype=F64).transpose(1, 2)
    grad_lse = torch.ones((), dtype=F64).expand(2, HEADS, 20)
    assert_same(spec, run_pipeline(spec, args, grad_out, grad_lse), run_reference(spec, args, grad_out, grad_lse))


class Largest(TorchDispatchMode):
    """Notes how many entries the largest tensor has that is made."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(made) if isinstance(x, Tensor))
        self.entries = max(self.entries, *sizes, 0)
        return made


@pytest.mark.parametrize("mask", ["source", "output"])
@every_pipeline
def test_no_tensor_grows_with_the_square_of_the_length(
    stages: dict[str, Any], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strip of 8 rows has some rows before it and around a convolution, and keys around it."""
    n = 320
    monkeypatch.setattr(pipeline, "STRIP_SCORES", 8 * HEADS * n)
    spec = make_spec(stages, mask=mask)
    args = make_inputs(spec, n, n)
    with Largest() as largest:
        run_pipeline(spec, args, *make_grads(args[0], args[2]))
    assert 0 < largest.entries <= HEADS * n * max(VALUE_DIM, 8 + spec.context + 4) < HEADS * n * n / 13


class Convolved(TorchDispatchMode):
    """Notes the shapes of planes that are convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            self.shapes |= {x.shape for x in args[:2] if isinstance(x, Tensor) and len(x) == 1}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", ["source", "output"])
def test_few_shapes_are_convolved(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps what it made for each shape."""
    spec = make_spec({"kernel": (2, 3), "post_kernel": (2, 3)}, mask=mask)
    for strips, lengths in ((4, (600,)), (2**22, range(40, 100))):  # strips of a sequence, or documents
        monkeypatch.setattr(pipeline, "STRIP_SCORES", strips * HEADS * lengths[0])
        with Convolved() as convolved:
            for n in lengths:
                args = make_inputs(spec, n, n)
                run_pipeline(spec, args, *make_grads(args[0], args[2]))
        assert 0 < len({shape[2:] for shape in convolved.shapes}) <= 8 * 8 * 2


MEMORY = """
import sys, torch
from mtagen.call import NO_LEARNED, Call
from mtagen.cpu import pipeline
from mtagen.spec import Spec

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024

torch.set_num_threads(1)
pipeline.STRIP_SCORES = 2**17
spec = Spec((2, 3), 16, post_kernel=(2, 3), dtype="fp32")
def run(n):
    q = torch.randn(1, 1, n, 16)
    call = Call(q, q, q, torch.randn(1, 2, 3), None, torch.randn(1, 2, 3), None, *NO_LEARNED, 0.25, "")
    out, lse = pipeline.forward(spec, call)
    pipeline.backward(spec, call, out, lse)
run(512)
before = resident()
run(4096)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_memory_does_not_grow_with_the_strips() -> None:
    """128 strips of 0.5 MiB a plane: with a shape of its own for each number of keys oneDNN kept 127 MiB more."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 70


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("window", [{"causal": True}, {"causal": False, "window": (5, 2)}], ids=str)
@every_pipeline
def test_hidden_keys_and_values_are_not_read(stages: dict[str, Any], window: dict[str, Any], mask: str) -> None:
    """Where they hold infinity or NaN no bit of rows before changes, nor of what only these rows read."""
    spec, n, first = make_spec(stages | window, mask=mask), 24, 15
    args = make_inputs(spec, n, n)
    rows = first if spec.right == 0 else first - 2  # those that see no key from `first` on
    grads = make_grads(args[0], args[2])
    grads = tuple(x.index_fill(2, torch.arange(rows, n), 0) for x in grads)
    clean = run_pipeline(spec, args, *grads)
    for bad in (torch.inf, torch.nan):
        spoilt = [x.clone() for x in args]
        for x in spoilt[1:3]:
            x[:, :, first:] = bad
        out, lse, dq, *_ = run_pipeline(spec, spoilt, *grads)
        for ours, expected, end in zip((out, lse, dq), clean, (rows, rows, rows - spec.context), strict=False):
            assert torch.equal(ours[:, :, :end], expected[:, :, :end])


# Decode.


def decode_case(
    spec: Spec, lengths: Sequence[int], n_new: int, capacity: int
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Arguments of decode, NaN wherever nothing may be read, and what the specification makes of them."""
    torch.manual_seed(0)
    batch, tail = len(lengths), n_new + spec.context
    weights = make_inputs(spec, 1, 1)[3:]
    shapes = (HEADS, tail, DIM), (KV_HEADS, capacity, DIM), (KV_HEADS, capacity, VALUE_DIM)
    q_tail, k_cache, v_cache = (torch.full((batch, *shape), torch.nan, dtype=F64) for shape in shapes)
    out = torch.zeros(batch, HEADS, n_new, VALUE_DIM, dtype=F64)
    lse = torch.full((batch, HEADS, n_new), -torch.inf, dtype=F64)
    for b, n in enumerate(lengths):
        q, k, v = (
            torch.randn(1, *shape, dtype=F64) for shape in ((HEADS, n, DIM), *((KV_HEADS, n, x[2]) for x in shapes[1:]))
        )
        rows, new = min(n, tail), min(n, n_new)
        q_tail[b, :, tail - rows :] = q[0, :, n - rows :]
        k_cache[b, :, :n], v_cache[b, :, :n] = k[0], v[0]
        full_out, full_lse = call_reference(spec, q, k, v, *weights)
        out[b, :, n_new - new :] = full_out[0, :, n - new :]
        lse[b, :, n_new - new :] = full_lse[0, :, n - new :]
    return [q_tail, k_cache, v_cache, *weights], (out, lse)


@every_variant
def test_decode_equals_reference(options: dict[str, Any]) -> None:
    """Nothing; fewer keys than the context; more than all queries of a step."""
    spec = make_spec(options)
    lengths = [0, 1, 3, 5, 19]
    for n_new in (1, 4):
        (q, k, v, *weights), expected = decode_case(spec, lengths, n_new, capacity=21)
        assert_same(
            spec, pipeline.decode(spec, step_of(spec, q, k, v, weights, SCALE, torch.tensor(lengths))), expected
        )


@pytest.mark.parametrize("n_new", range(1, 9))
def test_decode_of_new_tokens(n_new: int) -> None:
    for options in (WIDE, EVERYTHING):
        spec = make_spec(options)
        lengths = [n_new - 1, n_new, 9, 26, 0]
        (q, k, v, *weights), expected = decode_case(spec, lengths, n_new, capacity=27)
        assert_same(
            spec, pipeline.decode(spec, step_of(spec, q, k, v, weights, SCALE, torch.tensor(lengths))), expected
        )


@every_pipeline
def test_decode_of_a_full_cache(stages: dict[str, Any]) -> None:
    """Lengths that are not given, or are beyond the cache's, are the cache's."""
    spec = make_spec(stages)
    (q, k, v, *weights), expected = decode_case(spec, [15, 15], 2, capacity=15)
    for lengths in (None, torch.tensor([15, 99])):
        assert_same(spec, pipeline.decode(spec, step_of(spec, q, k, v, weights, SCALE, lengths)), expected)


@pytest.mark.parametrize("batch", [0, 2])
def test_decode_of_nothing(batch: int) -> None:
    spec = make_spec(EVERYTHING)
    (q, k, v, *weights), _ = decode_case(spec, [9, 9], 2, capacity=9)
    out, lse = pipeline.decode(spec, step_of(spec, q[:batch], k[:batch, :, :0], v[:batch, :, :0], weights, SCALE))
    assert torch.equal(out, torch.zeros(batch, HEADS, 2, VALUE_DIM, dtype=F64))
    assert torch.equal(lse, torch.full((batch, HEADS, 2), -torch.inf, dtype=F64))


# Ops of pipelines.


def build(stages: dict[str, Any], **options: Any) -> AttentionOp:
    return mtagen.build(**{"head_dim": DIM, "value_head_dim": VALUE_DIM, "target": "cpu"} | stages | options)


def named(spec: Spec, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(spec.weight_names, weights, strict=True))


def leaves(spec: Spec, nq: int = 9, nk: int = 11, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.to(dtype).requires_grad_() for x in make_inputs(spec, nq, nk)]


def train(op: Any, spec: Spec, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Out, lse, and the gradients of a scalar made of both."""
    q, k, v, *weights = tensors
    out, lse = op(q, k, v, **named(spec, weights), return_lse=True)
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).square().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@every_pipeline
def test_op_equals_reference(stages: dict[str, Any], backend: str) -> None:
    op = build(stages, dtype="fp64", backend=backend)
    assert op.plan.backend == "torch"
    spec = op.plan.spec
    for nq, nk in ((9, 11), (11, 9), (1, 1)):
        tensors = leaves(spec, nq, nk, F64)
        assert_same(spec, train(op, spec, tensors), train(reference, spec, tensors))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@every_pipeline
def test_accuracy_rule(stages: dict[str, Any], dtype: str) -> None:
    """Results, all gradients and decode."""
    op = build(stages, dtype=dtype)
    sizes = Sizes(2, HEADS, KV_HEADS, 21, 37), Sizes(1, HEADS, 1, 12, 5)
    assert not failures(op, op.plan.spec, torch.device("cpu"), sizes)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accuracy_rule_of_many_strips(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "STRIP_SCORES", 2**14)
    op = build({"kernel": (6, 11), "mixed_heads": 4, "post_kernel": (6, 11), "post_mixed_heads": 4}, dtype=dtype)
    assert not failures(op, op.plan.spec, torch.device("cpu"), [Sizes(1, 4, 2, 113, 203)])


@pytest.mark.parametrize("mixed", [1, 4])
def test_gradients_of_matrices_sum_many_products(mixed: int) -> None:
    """More of them than fp32 could sum one by one."""
    op = build({"kernel": None, "mixed_heads": mixed, "post_mixed_heads": mixed}, dtype="fp32")
    assert not failures(op, op.plan.spec, torch.device("cpu"), [Sizes(1, 4, 2, 511, 515)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    """One op serves every dtype; weights may stay in fp32, and have gradients in their own dtype."""
    op = build(EVERYTHING)
    *qkv, weight, head_weight, post_weight, post_head_weight = leaves(op.plan.spec, dtype=dtype)
    weight, post_head_weight = (x.detach().float().requires_grad_() for x in (weight, post_head_weight))
    weights = [weight, head_weight, post_weight, post_head_weight]
    out, lse, *grads = train(op, op.plan.spec, [*qkv, *weights])
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    assert [x.dtype for x in grads] == [*3 * [dtype], torch.float32, dtype, dtype, torch.float32]


def test_without_stages_it_is_plain_attention() -> None:
    op = build(PIPELINES["none before, none after"], dtype="fp64")
    q, k, v = leaves(op.plan.spec, 9, 9, F64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(op(q, k, v), expected, rtol=0, atol=1e-12)


def test_axes_of_weights_that_may_miss_or_be_there() -> None:
    """Kernels as a convolution of torch has them; the one matrix of all heads alone."""
    op = build(EVERYTHING | {"mixed_heads": HEADS})
    tensors = leaves(op.plan.spec)
    out, lse, *grads = train(op, op.plan.spec, tensors)
    *qkv, weight, head_weight, post_weight, post_head_weight = tensors
    other = [weight.unsqueeze(1), head_weight[0], post_weight.unsqueeze(1), post_head_weight[0]]
    others = [x.detach().requires_grad_() for x in other]
    same, same_lse, *same_grads = train(op, op.plan.spec, [*qkv, *others])
    assert torch.equal(same, out)
    assert torch.equal(same_lse, lse)
    assert [x.shape for x in same_grads[3:]] == [x.shape for x in other]
    assert all(torch.equal(a.view_as(b), b) for a, b in zip(same_grads, grads, strict=True))
    q, k, v = (x.detach() for x in qkv)
    decoded = (op.decode(q, k, v, **named(op.plan.spec, weights)) for weights in (tensors[3:], others))
    assert torch.equal(*decoded)


def test_weights_that_are_parts_of_other_tensors() -> None:
    op = build(EVERYTHING, dtype="fp64")
    *qkv, weight, head_weight, post_weight, post_head_weight = (x.detach() for x in leaves(op.plan.spec, dtype=F64))
    expected = op(*qkv, weight, head_weight=head_weight, post_weight=post_weight, post_head_weight=post_head_weight)
    strided = (torch.stack([x, x], -1)[..., 0] for x in (weight, head_weight, post_weight, post_head_weight))
    assert torch.equal(op(*qkv, **named(op.plan.spec, [*strided])), expected)


@pytest.mark.parametrize("wanted", [(0,), (2, 3), (4,), (5,), (6,), (1, 6)])
def test_gradients_of_some_inputs(wanted: tuple[int, ...]) -> None:
    op = build(EVERYTHING)
    tensors = leaves(op.plan.spec)
    _, _, *expected = train(op, op.plan.spec, tensors)
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    out, lse = op(*some[:3], **named(op.plan.spec, some[3:]), return_lse=True)
    (out.square().sum() + lse.square().sum()).backward()
    for i, x in enumerate(some):
        assert torch.equal(x.grad, expected[i]) if i in wanted else x.grad is None


def test_gradients_are_reproducible() -> None:
    op = build(EVERYTHING)
    tensors = leaves(op.plan.spec, 70, 90)
    first = train(op, op.plan.spec, tensors)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(train(op, op.plan.spec, tensors), first, strict=True))


DECODED = [{}, {"causal": False}, {"mask": "output"}, {"key_padding": "left"}, {"window": (6, -1)}]


@pytest.mark.parametrize("options", DECODED, ids=str)
@pytest.mark.parametrize("n_new", [1, 3, 8])
def test_decode_is_the_last_rows_of_the_op(n_new: int, options: dict[str, Any]) -> None:
    op = build(EVERYTHING, **options)
    q, k, v, *weights = (x.detach() for x in leaves(op.plan.spec, 21, 21))
    given = named(op.plan.spec, weights)
    out, lse = op(q, k, v, **given, return_lse=True)
    decoded = op.decode(q[:, :, -(op.plan.spec.context + n_new) :], k, v, **given, return_lse=True)
    torch.testing.assert_close(decoded, (out[:, :, -n_new:], lse[:, :, -n_new:]), rtol=1e-4, atol=1e-5)


def test_compile_fullgraph() -> None:
    torch._dynamo.reset()
    op = build(EVERYTHING)
    spec = op.plan.spec
    compiled = torch.compile(lambda *qkv, **others: op(*qkv, **others), fullgraph=True, backend="aot_eager")
    tensors = leaves(spec)
    assert all(torch.equal(a, b) for a, b in zip(train(compiled, spec, tensors), train(op, spec, tensors), strict=True))


@pytest.mark.parametrize("name", ["none before, none after", "mixing before, none after", "both before, both after"])
def test_opcheck(name: str) -> None:
    """No weight, one, and all four."""
    op = build(PIPELINES[name])
    q, k, v, *given = leaves(op.plan.spec)
    weights = [named(op.plan.spec, given).get(name) for name in WEIGHTS]
    torch.library.opcheck(torch.ops.mtagen.forward.default, (q, k, v, *weights, *NO_LEARNED, SCALE, op._key))
    q, k, v, *weights = (x if x is None else x.detach() for x in (q, k, v, *weights))
    out, lse = op(q, k, v, **dict(zip(WEIGHTS, weights, strict=True)), scale=SCALE, return_lse=True)
    arguments = (out, torch.ones_like(lse), q, k, v, *weights, *NO_LEARNED, out, lse, SCALE, op._key)
    torch.library.opcheck(torch.ops.mtagen.backward.default, arguments)
    lengths = torch.tensor([7], dtype=torch.int32)
    torch.library.opcheck(torch.ops.mtagen.decode.default, (q, k, v, *weights, *NO_LEARNED, lengths, SCALE, 0, op._key))


# Plans.


@every_pipeline
def test_auto_has_a_plan(stages: dict[str, Any]) -> None:
    made = mtagen.plan(make_spec(stages, dtype="bf16"), "cpu")
    assert made.backend == "torch"
    assert mtagen.Plan.from_json(made.to_json()) == made


def test_the_table_of_a_plan_shows_the_stages_and_the_halo_of_all() -> None:
    text = " ".join(str(mtagen.plan(make_spec(WIDE, key_padding="left"), "cpu")).split())
    for piece in (
        "convolution before the softmax 6 x 11, 10 keys left, 0 right",
        "mixture before the softmax groups of 4 heads",
        "convolution after the softmax 5 x 8, 7 keys left, 0 right",
        "mixture after the softmax groups of 2 heads",
        "forward halo rows 9 + 0, keys 17 + 0",
        "backward halo rows 9 + 9, keys 17 + 17",
    ):
        assert piece in text


# The request.


def test_the_weights_of_a_spec() -> None:
    spec = make_spec(EVERYTHING)
    shapes = {"weight": (8, 3, 4), "head_weight": (4, 2, 2), "post_weight": (8, 2, 5), "post_head_weight": (2, 4, 4)}
    assert spec.weights(8) == shapes
    assert spec.weight_names == tuple(spec.weights(8)) == WEIGHTS
    assert (spec.context, make_spec(WIDE).context) == (3, 9)
    assert make_spec(PIPELINES["none before, none after"]).weights(8) == {}


def test_round_trip_of_a_spec() -> None:
    for options in VARIANTS.values():
        spec = make_spec(options)
        assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("pass_name", ["forward", "decode"])
def test_round_trip_of_a_case(pass_name: str) -> None:
    for options in VARIANTS.values():
        case = Case(make_spec(options, dtype="bf16"), Sizes(2, 4, 2, 5, 7), pass_name)
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_a_spec_from_before_there_were_other_stages() -> None:
    """Rows of results and plans that were written then lack their fields."""
    spec = Spec((6, 11), 64)
    fields = {
        name: value
        for name, value in spec.to_dict().items()
        if name not in ("mixed_heads", "post_kernel", "post_mixed_heads")
    }
    assert Spec.from_dict(fields) == spec


def test_names_tell_pipelines_apart() -> None:
    others = [{"mixed_heads": 2}, {"mixed_heads": 24}, {"post_mixed_heads": 24}, {"post_kernel": (4, 3)}]
    specs = [make_spec(options) for options in (*VARIANTS.values(), *({"kernel": None} | one for one in others))]
    assert len({suffix(spec, "sm_90a") for spec in specs}) == len({*specs}) == len(VARIANTS) + 3
    assert suffix(make_spec(EVERYTHING, dtype="bf16"), "sm_90a") == (
        "cq3_ck4_d16_dv24_bf16_causal_mix2_post_cq2_ck5_postmix4_sm90a"
    )
