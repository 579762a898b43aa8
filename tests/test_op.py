"""The built op as a torch op, on the CPU: results, autograd, torch.compile, opcheck, autocast, decode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import mtagen
from mtagen import BackendError, SpecError, reference
from mtagen.call import NO_LEARNED
from mtagen.ops import bypass, library
from mtagen.ops.attention import AttentionOp
from mtagen.ops.executor import Executor
from mtagen.runtime.load import Passes

KERNEL, D, DV = (3, 4), 16, 24
BATCH, HEADS, KV_HEADS = 2, 4, 2


def build(**options: Any) -> AttentionOp:
    return mtagen.build(**{"kernel": KERNEL, "head_dim": D, "target": "cpu"} | options)


@pytest.fixture(scope="module")
def op() -> AttentionOp:
    return build(value_head_dim=DV)


def leaves(
    nq: int = 9,
    nk: int = 9,
    kernel: tuple[int, int] = KERNEL,
    value_dim: int = DV,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
) -> list[Tensor]:
    """q, k, v and weight, all of them wanting gradients."""
    torch.manual_seed(nq + 100 * nk)
    shapes = (BATCH, heads[0], nq, D), (BATCH, heads[1], nk, D), (BATCH, heads[1], nk, value_dim)
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return [x.requires_grad_() for x in (*made, torch.randn(heads[0], *kernel, dtype=dtype) / 3)]


def train(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of a scalar made of it."""
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)]


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# Results.


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"key_padding": "left"}, {"mask": "output", "key_padding": "right"}],
    ids=str,
)
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (9, 9), (5, 14), (14, 5)])
def test_equals_reference(nq: int, nk: int, options: dict[str, Any], backend: str) -> None:
    op = build(value_head_dim=DV, dtype="fp64", backend=backend, **options)
    tensors = leaves(nq, nk, dtype=torch.float64)
    expected = train(lambda *x: reference(*x, **options), tensors)
    torch.testing.assert_close(train(op, tensors), expected)


def test_value_head_dim_is_by_default_the_head_dim() -> None:
    *qkv, weight = leaves(value_dim=D)
    assert build()(*qkv, weight).shape == (BATCH, HEADS, 9, D)


def test_scale(op: AttentionOp) -> None:
    tensors = leaves()
    assert torch.equal(op(*tensors), op(*tensors, scale=D**-0.5))
    torch.testing.assert_close(op(*tensors, scale=2), reference(*tensors, scale=2.0), rtol=1e-4, atol=1e-5)


def test_weight_as_in_the_authors_checkpoints(op: AttentionOp) -> None:
    q, k, v, weight = leaves()
    out, *grads = train(op, [q, k, v, weight])
    conv2d_weight = weight.detach().unsqueeze(1).requires_grad_()
    same, *same_grads, dweight = train(op, [q, k, v, conv2d_weight])
    assert_equal([same, *same_grads, dweight.squeeze(1)], [out, *grads])
    assert dweight.shape == (HEADS, 1, *KERNEL)


@pytest.mark.parametrize("of_out", [0.0, 1.0, None], ids=["zero", "some", "undefined"])
def test_log_sum_exp_and_its_gradient(op: AttentionOp, of_out: float | None) -> None:
    """Whatever the gradient of out: the backward op takes both."""
    tensors = leaves(7, 11, dtype=torch.float64)

    def results(function: Callable[..., Any]) -> list[Tensor]:
        out, lse = function(*tensors, return_lse=True)
        loss = (lse * torch.linspace(-1, 1, 7)).sum()
        loss = loss if of_out is None else loss + of_out * out.square().sum()
        grads = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
        return [out.detach(), lse.detach(), *grads]

    torch.testing.assert_close(results(op), results(reference))


@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [
        (torch.float64, torch.float64),
        *((t, torch.float32) for t in (torch.float32, torch.float16, torch.bfloat16)),
    ],
)
def test_dtypes(op: AttentionOp, dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    """One op of the torch backend serves every dtype; the weight may stay in fp32."""
    *qkv, weight = leaves(dtype=dtype)
    weight = weight.detach().float().requires_grad_()
    out, lse = op(*qkv, weight, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
    grads = torch.autograd.grad(out.sum(), [*qkv, weight])
    assert [grad.dtype for grad in grads] == [dtype, dtype, dtype, torch.float32]


def test_views_of_a_packed_projection() -> None:
    op = build()
    torch.manual_seed(0)
    packed = torch.randn(BATCH, 10, 3, HEADS, D, requires_grad=True)
    weight = torch.randn(HEADS, *KERNEL)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    assert not q.is_contiguous()
    out = op(q, k, v, weight)
    (grad,) = torch.autograd.grad(out.sum(), packed)  # from a gradient of stride 0
    copies = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = op(*copies, weight)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(expected, copies, torch.ones_like(expected))
    assert torch.equal(grad, torch.stack(grads).permute(1, 3, 0, 2, 4))


# Autograd.


@pytest.mark.parametrize(
    ("kernel", "options", "nq", "nk"),
    [
        ((3, 4), {}, 4, 6),
        ((3, 2), {"key_padding": "left"}, 5, 5),
        ((2, 3), {"mask": "output"}, 5, 5),
        ((2, 3), {"causal": False, "key_padding": "right"}, 6, 3),
        ((1, 1), {}, 6, 4),
    ],
)
def test_gradcheck(kernel: tuple[int, int], options: dict[str, Any], nq: int, nk: int) -> None:
    op = build(kernel=kernel, dtype="fp64", **options)
    tensors = leaves(nq, nk, kernel, value_dim=D, dtype=torch.float64, heads=(2, 1))

    def both(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = op(*x, return_lse=True)
        return out, lse[lse > -torch.inf]

    # fast_mode: one random projection of the Jacobian, instead of all its entries one by one
    assert torch.autograd.gradcheck(both, tensors, fast_mode=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_gradients_of_some_inputs(op: AttentionOp, wanted: tuple[int, ...]) -> None:
    tensors = leaves()
    _, *expected = train(op, tensors)
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    op(*some).square().sum().backward()
    for i, x in enumerate(some):
        assert torch.equal(x.grad, expected[i]) if i in wanted else x.grad is None


def test_no_gradient_wanted(op: AttentionOp) -> None:
    tensors = leaves()
    with torch.no_grad():
        assert op(*tensors).grad_fn is None
    assert not op(*(x.detach() for x in tensors)).requires_grad


def test_forward_mode_is_refused(op: AttentionOp) -> None:
    q, *others = (x.detach() for x in leaves())
    with pytest.raises(BackendError, match=r"forward-mode differentiation: got 'a tangent'; .*legal: mtagen.reference"):
        torch.func.jvp(lambda q: op(q, *others), (q,), (q,))
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(op(q, *others)).tangent is None
        with torch.no_grad(), pytest.raises(BackendError, match="forward-mode"):
            op(forward_ad.make_dual(q, q), *others)


def test_gradients_of_torch_func_are_refused(op: AttentionOp) -> None:
    q, *others = (x.detach() for x in leaves())
    with pytest.raises(BackendError, match=r"transform: got 'torch.func'; .*legal: torch.autograd.grad, or mtagen.ref"):
        torch.func.grad(lambda q: op(q, *others).sum())(q)


def test_meta_tensors_give_shapes(op: AttentionOp) -> None:
    tensors = [x.detach().to("meta") for x in leaves()]
    assert op(*tensors).shape == op(*(x.detach() for x in leaves())).shape


def test_deterministic_is_a_bool() -> None:
    with pytest.raises(SpecError, match="deterministic: got 'no'; must be a bool, or None"):
        mtagen.build(KERNEL, D, deterministic="no")


def test_gradients_on_the_cpu_are_reproducible() -> None:
    """Many heads, done by many threads, add to the gradients of one head of keys."""
    op = mtagen.build((1, 1), 64, target="cpu")
    tensors = torch.randn(1, 8, 300, 64), torch.randn(1, 1, 300, 64), torch.randn(1, 1, 300, 64), torch.randn(8, 1, 1)
    leaves = [x.requires_grad_() for x in tensors]
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        first, *others = (torch.autograd.grad(op(*leaves).square().sum(), leaves) for _ in range(4))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_double_backward_is_refused(op: AttentionOp) -> None:
    tensors = leaves()
    (dq,) = torch.autograd.grad(op(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(BackendError, match=r"double backward: got .*differentiable once; legal: mtagen.reference"):
        dq.sum().backward()


def test_backward_of_decode_is_refused(op: AttentionOp) -> None:
    q, k, v, weight = leaves()
    out = op.decode(q[:, :, -KERNEL[0] :], k, v, weight)
    with pytest.raises(BackendError, match=r"decode: got 'a backward pass'; .*; legal: the op itself"):
        out.sum().backward()


# Torch ops.


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(op: AttentionOp, dynamic: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")  # traces forward and backward, needs no C++ compiler
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: op(*x), fullgraph=True, dynamic=dynamic, backend=counter)
    for nq, nk in ((9, 11), (12, 17), (33, 21), (20, 20)) if dynamic else ((9, 11),):
        tensors = leaves(nq, nk)
        assert_equal(train(compiled, tensors), train(op, tensors))
    assert counter.frame_count == 1


def test_compile_as_the_first_call() -> None:
    op = build(value_head_dim=DV)
    torch._dynamo.reset()
    tensors = leaves()
    torch.testing.assert_close(torch.compile(op, fullgraph=True, backend="eager")(*tensors), op(*tensors))


def test_compile_with_a_scale_that_changes(op: AttentionOp) -> None:
    torch._dynamo.reset()
    tensors = leaves()
    compiled = torch.compile(lambda scale: op(*tensors, scale=scale), fullgraph=True, backend="eager")
    for scale in (0.1, 0.2, 0.3):
        torch.testing.assert_close(compiled(scale), op(*tensors, scale=scale))
    by_shape = torch.compile(
        lambda q, *rest: op(q, *rest, scale=q.shape[-1] ** -0.5), fullgraph=True, dynamic=True, backend="eager"
    )
    torch.testing.assert_close(by_shape(*tensors), op(*tensors))


def test_named_gpu_target_never_runs_on_the_cpu() -> None:
    op = mtagen.build((2, 3), 16, target="sm_90a", dtype="fp32")
    with pytest.raises(BackendError, match="the kernels of this op run on GPUs only"):
        op(*(torch.zeros(1, 1, 4, 16) for _ in "qkv"), torch.zeros(1, 2, 3))


def test_decode_without_heads(op: AttentionOp) -> None:
    q, k, v, weight = leaves()
    out = op.decode(q[:, :0], k, v, weight[:0])
    assert out.numel() == 0


def test_compile_with_every_argument(op: AttentionOp) -> None:
    torch._dynamo.reset()

    def everything(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        out, lse = op(q, k, v, weight.unsqueeze(1), scale=0.5, return_lse=True)
        return (
            out,
            lse,
            *op.decode(q, k, v, weight, cache_seqlens=lengths, scale=0.5, num_splits=2, return_lse=True),
        )

    tensors = [x.detach() for x in leaves(KERNEL[0] + 1, 12)]
    lengths = torch.tensor([12, 7], dtype=torch.int32)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    assert_equal([*compiled(*tensors, lengths)], [*everything(*tensors, lengths)])


def test_compile_checks_arguments(op: AttentionOp) -> None:
    torch._dynamo.reset()
    q, k, v, weight = leaves()
    with pytest.raises(Exception, match="does not fit the spec"):
        torch.compile(lambda *x: op(*x), fullgraph=True, backend="eager")(q, k, v[..., :-8], weight)


@pytest.mark.parametrize(
    ("nq", "nk", "dtype"),
    [(4, 9, torch.bfloat16), (6, 5, torch.float32), (0, 3, torch.float32), (3, 0, torch.float64)],
)
def test_opcheck(op: AttentionOp, nq: int, nk: int, dtype: torch.dtype) -> None:
    tensors = leaves(nq, nk, dtype=dtype)
    torch.library.opcheck(torch.ops.mtagen.forward.default, (*tensors, None, None, None, *NO_LEARNED, 0.25, op._key))
    q, k, v, weight = (x.detach() for x in tensors)
    out, lse = op(q, k, v, weight, scale=0.25, return_lse=True)
    torch.library.opcheck(
        torch.ops.mtagen.backward.default,
        (out, torch.ones_like(lse), q, k, v, weight, None, None, None, *NO_LEARNED, out, lse, 0.25, op._key),
    )


@pytest.mark.parametrize("lengths", [None, [9, 4]])
def test_opcheck_of_decode(op: AttentionOp, lengths: list[int] | None) -> None:
    q, k, v, weight = (x.detach() for x in leaves(KERNEL[0] + 1, 9))
    seqlens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    given = (q, k, v, weight, None, None, None, *NO_LEARNED, seqlens, 0.25, 0, op._key)
    torch.library.opcheck(torch.ops.mtagen.decode.default, given)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(op: AttentionOp, backward_inside: bool) -> None:
    """q, k and v are cast, the weight is not; inside the op nothing is."""
    *qkv, weight = leaves()
    half = [x.detach().bfloat16().requires_grad_() for x in qkv]
    expected, *grads = train(op, [*half, weight])
    with torch.autocast("cpu", torch.bfloat16):
        out = op(*qkv, weight)
        decoded = op.decode(qkv[0], *qkv[1:], weight)
        if backward_inside:
            got = torch.autograd.grad(out.float().square().sum(), [*qkv, weight])
    if not backward_inside:
        got = torch.autograd.grad(out.float().square().sum(), [*qkv, weight])
    assert out.dtype == torch.bfloat16
    assert_equal([out, *got], [expected, *(grad.float() for grad in grads)])
    assert torch.equal(decoded, op.decode(half[0], *half[1:], weight))


def test_autocast_of_compiled_calls(op: AttentionOp) -> None:
    compiled = torch.compile(lambda *x: op(*x), fullgraph=True, backend="aot_eager")
    tensors = leaves()
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert_equal(train(compiled, tensors), train(op, tensors))


def test_autocast_leaves_fp64_alone(op: AttentionOp) -> None:
    tensors = leaves(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = op(*tensors)
    assert torch.equal(out, op(*tensors))


# Flop.

SCORES = BATCH * HEADS * 5 * 7  # of all heads, though two share their keys; none is left out as masked
FORWARD, BACKWARD = SCORES * 2 * (16 + 24 + 12), SCORES * 2 * (3 * 16 + 2 * 24 + 2 * 12)


def test_flop_of_hand_computed_sizes(op: AttentionOp) -> None:
    """Products with D = 16 and DV = 24, and a convolution of 3 x 4 taps; the masked half is counted as PyTorch does."""
    assert (FORWARD, BACKWARD) == (29120, 67200)
    tensors = leaves(5, 7)
    with FlopCounterMode(display=False) as counter:
        out = op(*tensors)
        assert counter.get_total_flops() == FORWARD
        out.square().sum().backward()
    forward, backward = torch.ops.mtagen.forward, torch.ops.mtagen.backward
    assert counter.get_flop_counts()["Global"] == {forward: FORWARD, backward: BACKWARD}


def test_flop_of_all_stages() -> None:
    """Beside the products, 12 taps, 2 heads of a group, 10 taps and 4 heads; each is done twice in a backward pass."""
    op = build(value_head_dim=DV, mixed_heads=2, post_kernel=(2, 5), post_mixed_heads=4)
    q, k, v, weight = leaves(5, 7)
    others = {
        "head_weight": torch.randn(2, 2, 2),
        "post_weight": torch.randn(HEADS, 2, 5),
        "post_head_weight": torch.randn(1, 4, 4),
    }
    with FlopCounterMode(display=False) as counter:
        op(q, k, v, weight, **others).sum().backward()
        # Queries: 5, of which a convolution leaves 3, and another 2.
        op.decode(q.detach(), k, v, weight.detach(), **others)
    assert counter.get_flop_counts()["Global"] == {
        torch.ops.mtagen.forward: SCORES * 2 * (16 + 24 + 28),
        torch.ops.mtagen.backward: SCORES * 2 * (3 * 16 + 2 * 24 + 2 * 28),
        torch.ops.mtagen.decode: 2 * 2 * 4 * 7 * (5 * 16 + 3 * (12 + 2) + 2 * (10 + 4 + 24)),
    }


@pytest.mark.parametrize("mixed", [1, 2, 4])
def test_flop_of_mixtures_alone(mixed: int) -> None:
    """A matrix for each head is one by one; it has no context."""
    op = build(kernel=None, mixed_heads=mixed)
    q, k, v, _ = leaves(5, 7, value_dim=D)
    weight = torch.randn(HEADS // mixed, mixed, mixed)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        op(q, k, v, head_weight=weight)
        op.decode(q, k, v, head_weight=weight)
    flop = SCORES * 2 * (16 + 16 + mixed)
    assert counter.get_flop_counts()["Global"] == {torch.ops.mtagen.forward: flop, torch.ops.mtagen.decode: flop}


def test_flop_of_plain_attention() -> None:
    op = build(kernel=None, value_head_dim=DV)
    q, k, v, _ = leaves(5, 7)
    with FlopCounterMode(display=False) as counter:
        op(q, k, v).sum().backward()
    assert counter.get_total_flops() == SCORES * 2 * (16 + 24 + 3 * 16 + 2 * 24)


def test_flop_without_the_convolution_is_that_of_attention(op: AttentionOp) -> None:
    q, k, v, _ = leaves(5, 7)
    group = q.shape[1] // k.shape[1]  # torch 2.11 counts no shared keys
    shapes = [tuple(x.shape) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    assert sdpa_flop_count(*shapes) == FORWARD - SCORES * 2 * 12
    grad_out = (*shapes[0][:3], DV)
    assert sdpa_backward_flop_count(grad_out, *shapes) == BACKWARD - SCORES * 2 * 2 * 12


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"backend": "torch"}, {"mask": "output"}], ids=str)
def test_flop_depends_on_shapes_alone(options: dict[str, Any]) -> None:
    op = build(value_head_dim=DV, **options)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        op(*leaves(5, 7))
        op(*leaves(5, 7), return_lse=True)
        assert counter.get_total_flops() == 2 * FORWARD


def test_flop_of_gradients_of_some_inputs(op: AttentionOp) -> None:
    """The op makes all gradients, whichever are asked for."""
    q, k, v, weight = leaves(5, 7)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(op(q, k, v, weight).sum(), q)
    assert counter.get_total_flops() == FORWARD + BACKWARD


@pytest.mark.parametrize("lengths", [None, [7, 2]])
def test_flop_of_decode(op: AttentionOp, lengths: list[int] | None) -> None:
    """Three new queries, and two before them that the convolution reads; a cache of seven keys."""
    q, k, v, weight = (x.detach() for x in leaves(5, 7))
    seqlens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        op.decode(q, k, v, weight, cache_seqlens=seqlens)
    assert counter.get_flop_counts()["Global"] == {torch.ops.mtagen.decode: 2 * 2 * 4 * 7 * (5 * 16 + 3 * (24 + 12))}


# Identity.


WHO_WATCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "a function mode": lambda: torch.device("cpu"),  # which PyTorch leaves for the call of backward
    "a profiler": torch.profiler.profile,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that go through the dispatcher."""
    names: list[str] = []

    def noting(name: str, registered: Any) -> Any:
        return lambda *arguments: names.append(name) or registered(*arguments)

    ops = {name: one._replace(registered=noting(name, one.registered)) for name, one in library._OPS.items()}
    monkeypatch.setattr(library, "_OPS", ops)
    return names


@pytest.mark.parametrize("inference", [False, True])
def test_ordinary_calls_need_no_dispatcher(op: AttentionOp, dispatched: list[str], inference: bool) -> None:
    q, k, v, weight = leaves(5, 7)
    with torch.inference_mode(inference):
        out = op(q, k, v, weight)
    if not inference:
        out.sum().backward()
    assert dispatched == []


def test_without_shortcuts_all_calls_are_dispatched(
    op: AttentionOp, dispatched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTAGEN_SHORTCUTS", "0")
    bypass.is_on.cache_clear()
    try:
        op(*leaves(5, 7)).sum().backward()
    finally:
        bypass.is_on.cache_clear()
    assert dispatched == ["forward", "backward"]


@pytest.mark.parametrize("watch", WHO_WATCHES.values(), ids=WHO_WATCHES)
def test_who_watches_sees_the_ops(op: AttentionOp, dispatched: list[str], watch: Any) -> None:
    q, k, v, weight = leaves(5, 7)
    with watch():
        op(q, k, v, weight).sum().backward()
    assert dispatched == (["forward"] if watch is WHO_WATCHES["a function mode"] else ["forward", "backward"])


def test_tensors_that_are_not_ordinary(op: AttentionOp, dispatched: list[str]) -> None:
    """Numbers that are kept with the other sign are not what lies in memory, and a subclass has a say."""

    class Watching(Tensor):
        pass

    q, k, v, weight = (x.detach() for x in leaves(5, 7))
    expected = op(q, k, v, weight)
    assert torch.equal(op(torch._neg_view(-q), k, v, weight), expected)
    assert torch.equal(op(q, k.as_subclass(Watching), v, weight), expected)
    assert dispatched == ["forward"] * 2


def test_same_arguments_same_key() -> None:
    assert build()._key == build()._key
    changes = ({"causal": False}, {"kernel": (4, 3)}, {"dtype": "bf16"}, {"backend": "torch"}, {"deterministic": True})
    assert len({build()._key, *(build(**change)._key for change in changes)}) == 6


def test_a_key_that_was_not_built() -> None:
    *tensors, weight = leaves()
    with pytest.raises(BackendError, match=r"key: got 'stranger'; no op of this key .*; legal: call mtagen\.build"):
        torch.ops.mtagen.forward(*tensors, weight, None, None, None, *NO_LEARNED, 0.25, "stranger")


@pytest.mark.parametrize(
    ("built", "global_mode", "expected"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_deterministic_gradients(
    built: bool | None, global_mode: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for when built, or by torch's switch as it stands when the backward pass runs."""
    asked = []

    def backward(*tensors: Any, deterministic: bool) -> tuple[Tensor, ...]:
        asked.append(deterministic)
        return tuple(torch.zeros_like(x) for x in tensors[2:6])

    def forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    op = build(deterministic=built)
    passes = Passes(forward, backward, forward)
    library.register(op._key, Executor(op.plan.spec, passes, True, False, deterministic=built))
    tensors = leaves(value_dim=D)
    out = op(*tensors)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: global_mode)
    out.sum().backward()
    assert asked == [expected]


def test_repr_names_the_plan() -> None:
    assert repr(build()) == "<mtagen op mta_cq3_ck4_d16_fp32_causal_cpu, backend torch>"


# Decode.


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"mask": "output"}, {"key_padding": "left"}], ids=str)
@pytest.mark.parametrize("n_new", [1, 3, 8])
def test_decode_is_the_last_rows_of_the_op(n_new: int, options: dict[str, Any]) -> None:
    op = build(value_head_dim=DV, **options)
    q, k, v, weight = (x.detach() for x in leaves(21, 21))
    out, lse = op(q, k, v, weight, return_lse=True)
    tail = q[:, :, -(KERNEL[0] - 1 + n_new) :]
    decoded = op.decode(tail, k, v, weight, return_lse=True)
    torch.testing.assert_close(decoded, (out[:, :, -n_new:], lse[:, :, -n_new:]), rtol=1e-4, atol=1e-5)


def test_decode_step_by_step(op: AttentionOp) -> None:
    """Generation: the cache is larger than what is in use, and each sequence has a length of its own."""
    q, k, v, weight = (x.detach() for x in leaves(21, 21))
    out = op(q, k, v, weight)
    context = KERNEL[0] - 1
    padded = torch.nn.functional.pad(q, (0, 0, context, 0), value=torch.nan)  # no queries before the first
    for step in range(21):
        lengths = torch.tensor([step + 1, max(step, 1)], dtype=torch.int32)
        tails = [padded[b, :, n - 1 : n + context] for b, n in enumerate(lengths.tolist())]
        decoded = op.decode(torch.stack(tails), k, v, weight, cache_seqlens=lengths)
        expected = [out[b, :, n - 1 : n] for b, n in enumerate(lengths.tolist())]
        torch.testing.assert_close(decoded, torch.stack(expected), rtol=1e-4, atol=1e-5)
