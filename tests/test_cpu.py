"""The torch backend against the specification: every variant, many tiles, every gradient, decoding."""

from __future__ import annotations

import problems
import pytest
import torch
from calls import call_of, step_of

from mtagen import build, reference
from mtagen.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR, compare
from mtagen.cpu import attention as cpu
from mtagen.cpu import pipeline
from mtagen.measure.cases import Sizes
from mtagen.spec import Spec

F64 = torch.float64
NAMES = ("out", "lse", "dq", "dk", "dv", "dweight")
KERNELS = [(1, 1), (1, 4), (2, 1), (3, 3), (6, 11), (5, 2), (16, 17)]
VARIANTS = [
    (causal, key_padding, mask)
    for causal, mask in ((True, "source"), (True, "output"), (False, "source"), (False, "output"))
    for key_padding in ("both", "left", "right")
]
DIM, VALUE_DIM, SCALE = 16, 24, 0.3


def make_spec(kernel, causal=True, key_padding="both", mask="source", dtype="fp64"):
    return Spec(kernel, DIM, VALUE_DIM, causal=causal, key_padding=key_padding, mask=mask, dtype=dtype)


def options(spec):
    return {"causal": spec.causal, "key_padding": spec.key_padding, "mask": spec.mask, "scale": SCALE}


def make_inputs(spec, nq, nk, batch=2, heads=4, kv_heads=2, dtype=F64):
    torch.manual_seed(nq * 100 + nk)
    q = torch.randn(batch, heads, nq, DIM, dtype=dtype)
    k = torch.randn(batch, kv_heads, nk, DIM, dtype=dtype)
    v = torch.randn(batch, kv_heads, nk, VALUE_DIM, dtype=dtype)
    return q, k, v, torch.randn(heads, *spec.kernel, dtype=dtype)


def make_grads(q, v):
    return torch.randn(*q.shape[:3], v.shape[3], dtype=q.dtype), torch.randn(q.shape[:3], dtype=q.dtype)


def run_reference(spec, args, grad_out, grad_lse):
    args = [x.detach().requires_grad_() for x in args]
    out, lse = reference(*args, **options(spec), return_lse=True)
    seen = lse > -torch.inf
    loss = (out * grad_out).sum() + (lse[seen] * grad_lse[seen]).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, args)


def run_tiled(spec, args, grad_out, grad_lse, **tiling):
    *qkv, weight = args
    call = call_of(spec, *qkv, [weight], SCALE)
    out, lse = cpu.forward(spec, call, **tiling)
    return out, lse, *cpu.backward(spec, call, grad_out, grad_lse, out, lse, **tiling)


def assert_same(got, expected):
    assert len(got) == len(expected)
    for name, a, b in zip(NAMES, got, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture(autouse=True)
def _heads_in_threes(monkeypatch):
    """Eight heads in groups of three: a group spans two batch entries, and the last one is not full."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize(("causal", "key_padding", "mask"), VARIANTS)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_equals_reference(kernel, causal, key_padding, mask):
    spec = make_spec(kernel, causal, key_padding, mask)
    for nq, nk in ((21, 21), (9, 26), (26, 9)):
        args = make_inputs(spec, nq, nk)
        grads = make_grads(args[0], args[2])
        assert_same(run_tiled(spec, args, *grads, tile=8), run_reference(spec, args, *grads))


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("kernel", [(1, 1), (6, 11), (5, 2)], ids=str)
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 7), (7, 1), (2, 2), (3, 4), (16, 16), (17, 15), (33, 31)])
@pytest.mark.parametrize("tile", [1, 5, 16, 256])
def test_lengths_and_tiles(tile, nq, nk, kernel, mask):
    spec = make_spec(kernel, mask=mask)
    args = make_inputs(spec, nq, nk, batch=1, heads=2, kv_heads=1)
    grads = make_grads(args[0], args[2])
    assert_same(run_tiled(spec, args, *grads, tile=tile), run_reference(spec, args, *grads))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_default_tiles_and_grouped_heads(kv_heads):
    spec = make_spec((6, 11))
    args = make_inputs(spec, 300, 530, batch=1, kv_heads=kv_heads)
    grads = make_grads(args[0], args[2])
    assert_same(run_tiled(spec, args, *grads), run_reference(spec, args, *grads))


def test_views_of_a_packed_projection():
    spec = Spec((3, 3), DIM, causal=True, dtype="fp64")
    torch.manual_seed(0)
    packed = torch.randn(2, 20, 3, 4, DIM, dtype=F64)
    args = [*packed.permute(2, 0, 3, 1, 4).unbind(0), torch.randn(4, 3, 3, dtype=F64)]
    assert not any(x.is_contiguous() for x in args[:3])
    grad_out = torch.randn(2, 20, 4, DIM, dtype=F64).transpose(1, 2)
    grad_lse = torch.ones((), dtype=F64).expand(2, 4, 20)
    assert_same(run_tiled(spec, args, grad_out, grad_lse, tile=8), run_reference(spec, args, grad_out, grad_lse))


@pytest.mark.parametrize(("nq", "nk"), [(0, 4), (4, 0), (0, 0)])
def test_no_scores(nq, nk):
    spec = make_spec((2, 3))
    args = make_inputs(spec, nq, nk)
    out, lse, *grads = run_tiled(spec, args, *make_grads(args[0], args[2]))
    assert out.shape == (2, 4, nq, VALUE_DIM)
    assert not out.any()
    assert torch.equal(lse, torch.full((2, 4, nq), -torch.inf, dtype=F64))
    for grad, x in zip(grads, args, strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("kernel", [(3, 3), (6, 11), (5, 2)], ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_accuracy_rule(name, kernel, mask):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    spec = make_spec(kernel, mask=mask, dtype=name)
    *qkv, weight = make_inputs(spec, 113, 203, dtype=dtype)
    args = [*qkv, weight.float()]
    grads = make_grads(args[0], args[2])
    exact = run_reference(spec, [x.double() for x in args], *(x.double() for x in grads))
    eager = run_reference(spec, args, *grads)
    got = run_tiled(spec, args, *grads, tile=32)
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, dtype, dtype, torch.float32]
    for field, x, yardstick, truth in zip(NAMES, got, eager, exact, strict=True):
        factor = GRADIENT_FACTOR if field.startswith("d") else OUTPUT_FACTOR
        assert compare(x, yardstick, truth, factor=factor).ok, field


def decode_case(spec, lengths, n_new, capacity):
    """Arguments of decode, NaN wherever nothing may be read, and what the specification makes of them."""
    torch.manual_seed(0)
    tail = n_new + spec.cq - 1
    q_tail = torch.full((len(lengths), 4, tail, DIM), torch.nan, dtype=F64)
    k_cache = torch.full((len(lengths), 2, capacity, DIM), torch.nan, dtype=F64)
    v_cache = torch.full((len(lengths), 2, capacity, VALUE_DIM), torch.nan, dtype=F64)
    weight = torch.randn(4, *spec.kernel, dtype=F64)
    out = torch.zeros(len(lengths), 4, n_new, VALUE_DIM, dtype=F64)
    lse = torch.full((len(lengths), 4, n_new), -torch.inf, dtype=F64)
    for b, n in enumerate(lengths):
        q, k = torch.randn(1, 4, n, DIM, dtype=F64), torch.randn(1, 2, n, DIM, dtype=F64)
        v = torch.randn(1, 2, n, VALUE_DIM, dtype=F64)
        rows, new = min(n, tail), min(n, n_new)
        q_tail[b, :, tail - rows :] = q[0, :, n - rows :]
        k_cache[b, :, :n], v_cache[b, :, :n] = k[0], v[0]
        full_out, full_lse = reference(q, k, v, weight, **options(spec), return_lse=True)
        out[b, :, n_new - new :] = full_out[0, :, n - new :]
        lse[b, :, n_new - new :] = full_lse[0, :, n - new :]
    return (q_tail, k_cache, v_cache, [weight]), (out, lse)


@pytest.mark.parametrize(("causal", "key_padding", "mask"), VARIANTS)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_decode_equals_reference(kernel, causal, key_padding, mask):
    spec = make_spec(kernel, causal, key_padding, mask)
    lengths = [0, 1, 3, 12, 40]
    for n_new in (1, 2, 5, 8):
        args, expected = decode_case(spec, lengths, n_new, capacity=43)
        assert_same(pipeline.decode(spec, step_of(spec, *args, SCALE, torch.tensor(lengths))), expected)


def test_decode_of_a_full_cache():
    spec = make_spec((6, 11))
    args, expected = decode_case(spec, [30, 30], 3, capacity=30)
    assert_same(pipeline.decode(spec, step_of(spec, *args, SCALE)), expected)


def test_decode_dtypes():
    spec = make_spec((2, 3), dtype="bf16")
    (*tensors, weights), _ = decode_case(spec, [30], 3, capacity=30)
    out, lse = pipeline.decode(spec, step_of(spec, *(x.bfloat16() for x in tensors), weights, SCALE))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("window", [(-1, -1), (9, -1)], ids=str)
@pytest.mark.parametrize("stages", [{"kernel": (3, 4)}, {"kernel": None, "mixed_heads": 2, "post_kernel": (2, 3)}])
def test_logits(stages, window):
    """Both implementations apply them to each score, with its position, key and head."""
    op = build(head_dim=DIM, window=window, backend="torch", logits=problems.LOGITS, **stages)
    for sizes in (Sizes(2, 4, 2, 9, 9), Sizes(1, 4, 2, 33, 300), Sizes(1, 4, 2, 20, 7)):
        problem = problems.random(op.plan.spec, sizes)
        assert not problems.failures_through_lse(op, op.plan.spec, problem)
    assert not problems.decode_failures(op, op.plan.spec, problem, lengths=(5,))
