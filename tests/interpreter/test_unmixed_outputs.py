"""PyTorch's transforms of ops whose forward pass also returns unmixed outputs, for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import forward_calls, save_forward
from emulator import load_emulated
from ranks import Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtagen import Spec, plan
from mtagen.call import NO_LEARNED
from mtagen.distributed import ContextParallel
from mtagen.ops.attention import AttentionOp, assemble

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

HEADS, N, D = 4, 20, 16
Call = Callable[..., Tensor]


def build(folder: Path) -> AttentionOp:
    """The op, whose CUDA kernels are compiled into a folder."""
    made = plan(Spec((3, 4), D, dtype="fp16", post_mixed_heads=2), "sm_90a")
    assert made.unmixed_columns == 2 * D
    load_emulated(made, folder)
    return assemble(made, torch_on_cpu=False)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def op(folder: Path) -> AttentionOp:
    return build(folder)


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def tensors(keys: int = N) -> list[Tensor]:
    """Rows, the weight of the convolution and the matrices of pairs."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, HEADS, n, D, generator=generator).half() for n in (N, keys, keys)]
    weights = [torch.randn(shape, generator=generator) for shape in ((HEADS, 3, 4), (2, 2, 2))]
    return [x.requires_grad_() for x in (*rows, *weights)]


def trained(call: Call, keys: int = N) -> list[Tensor]:
    """Outputs and gradients."""
    given = tensors(keys)
    out = call(*given)
    return [out, *torch.autograd.grad(out, given, torch.ones_like(out))]


def call_of(op: AttentionOp | ContextParallel) -> Call:
    return lambda q, k, v, weight, matrices: op(q, k, v, weight, post_head_weight=matrices)


def test_opcheck(op: AttentionOp) -> None:
    q, k, v, weight, matrices = tensors()
    arguments = q, k, v, weight, None, None, matrices, *NO_LEARNED
    torch.library.opcheck(torch.ops.mtagen.forward.default, (*arguments, 0.25, op._key))
    out, lse, unmixed = torch.ops.mtagen.forward(*arguments, 0.25, op._key)
    assert unmixed.shape == (2, HEADS, N, 2 * D)
    assert not unmixed.requires_grad
    results = unmixed, lse.detach()
    given = torch.randn_like(out), torch.zeros_like(lse), *(x if x is None else x.detach() for x in arguments)
    torch.library.opcheck(torch.ops.mtagen.backward.default, (*given, *results, 0.25, op._key))


def test_compiled(op: AttentionOp) -> None:
    call = call_of(op)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, trained(compiled), trained(call)))


def test_selective_checkpoint_saves_them(op: AttentionOp, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(op)
    expected, calls = trained(call), forward_calls(monkeypatch)
    again = trained(lambda *given: checkpoint(call, *given, use_reentrant=False, context_fn=save_forward))
    assert all(map(torch.equal, again, expected))
    assert len(calls) == 1


def test_samples(op: AttentionOp) -> None:
    """By vmap, and by a backward pass of several gradients at once."""
    call, given = call_of(op), [torch.stack([x.detach(), x.detach() / 2]) for x in tensors()]
    each = torch.stack([call(*(x[i] for x in given)) for i in range(2)])
    assert torch.equal(torch.func.vmap(call)(*given), each)
    leaves = tensors()
    out = call(*leaves)
    grads = torch.stack([torch.ones_like(out), torch.full_like(out, 2)])
    batched = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    for i, grad in enumerate(grads):
        alone = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        assert all(torch.equal(a[i], b) for a, b in zip(batched, alone, strict=True))


def test_no_keys(op: AttentionOp) -> None:
    assert not any(x.any() for x in trained(call_of(op), keys=0))


def test_through_the_log_sum_exp_alone(op: AttentionOp) -> None:
    """The outputs have no gradient."""
    given = tensors()
    _, lse = op(*given[:4], post_head_weight=given[4], return_lse=True)
    *_, dv, dweight, dmatrices = torch.autograd.grad(lse, given, torch.ones_like(lse))
    assert not dv.any()
    assert dweight.any()
    assert not dmatrices.any()


@pytest.mark.usefixtures("one_process")
def test_context_parallel(op: AttentionOp) -> None:
    group = torch.distributed.group.WORLD
    ours, expected = (trained(call_of(one)) for one in (ContextParallel(op, group), op))
    assert all(map(torch.equal, ours, expected))


def trained_together(group: torch.distributed.ProcessGroup, folder: Path, compiles: bool) -> list[Tensor]:
    """Outputs and gradients of the whole tensors, of which each rank has two chunks."""
    cp, (*rows, weight, matrices) = ContextParallel(build(folder), group), tensors()
    given = [*(cp.shard(x.detach(), 2).requires_grad_() for x in rows), weight, matrices]

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, matrices: Tensor) -> Tensor:
        return cp(q, k, v, weight, post_head_weight=matrices, length=N)

    out = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiles else call)(*given)
    *of_rows, dweight, dmatrices = torch.autograd.grad(out, given, torch.ones_like(out))
    for x in (dweight, dmatrices):
        torch.distributed.all_reduce(x, group=group)
    return [*(cp.unshard(x, 2, length=N) for x in (out.detach(), *of_rows)), dweight, dmatrices]


@pytest.mark.parametrize("compiles", [False, True])
def test_context_parallel_of_two_ranks(op: AttentionOp, folder: Path, tmp_path: Path, compiles: bool) -> None:
    """Each of a rank's calls keeps its own."""
    ranks = Ranks((2,), tmp_path / "store")
    expected = trained(call_of(op))
    for ours in ranks.run(2, trained_together, folder, compiles):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2**-9 * b.abs().max().item())
    ranks.stop()
