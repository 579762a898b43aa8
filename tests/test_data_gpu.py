"""Packed documents, dropout, windows and logits on a GPU, of every kind of pipeline: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import problems
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mtagen
from mtagen.check import failures
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import AttentionOp
from mtagen.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

CUDA = torch.device("cuda")
HEADS = 8
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None, "head_dim": 64},
    "convolution": {"kernel": (6, 11), "head_dim": 128},
    "mixing": {"kernel": None, "head_dim": 64, "mixed_heads": 8, "post_mixed_heads": 8},
    "pairs after": {"kernel": (6, 11), "head_dim": 64, "post_mixed_heads": 2},
    "convolutions": {"kernel": (6, 11), "head_dim": 64, "post_kernel": (3, 5)},
    "everything": {
        "kernel": (6, 11),
        "head_dim": 128,
        "mixed_heads": 8,
        "post_kernel": (6, 11),
        "post_mixed_heads": 8,
    },
}
DATA: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},
    "dropout": {"dropout": True},
    "packed, dropout": {"packed": True, "dropout": True},
    "packed, dropout, a window": {"packed": True, "dropout": True, "window": (70, 40), "causal": False},
    "logits": {"logits": problems.LOGITS},
    "packed, a window, logits": {"packed": True, "window": (70, 0), "logits": problems.DEFINED_WHERE_VISIBLE},
    "parameters, sinks": {**problems.READ, "sink": True},
    "packed, a window, parameters, sinks": {**problems.READ, "sink": True, "packed": True, "window": (70, 0)},
    "constants": {**problems.READ, "constants": ("gates", "slopes")},
    "packed, all constants": {**problems.READ, "constants": ("gates", "slopes", "table"), "packed": True},
    "parameters of heads, sinks": {**problems.OF_HEADS, "sink": True},
    "tables of distances": {**problems.BY_DISTANCE, "causal": False},
    "a mask in tables": {**problems.PREFIX, "dropout": True},
    "sinks and a window": problems.SINKS_AND_WINDOW,
    "packed, sinks and a window": {**problems.SINKS_AND_WINDOW, "packed": True},
    "a condition of numbers": {**problems.NUMBERED, "dropout": True},
    "packed, a condition of numbers, a window": {**problems.NUMBERED, "packed": True, "window": (90, 0)},
    "packed, a mask in tables, a window": {**problems.PREFIX, "packed": True, "window": (70, 90)},
    "three places": {"scores": "3 * tanh(s / 3) + 1", "convolved": "s + tanh(s)", "logits": problems.LOGITS},
}
backends = pytest.mark.parametrize("backend", ["auto", "triton"])  # auto: CUDA's kernels, beside Triton's in strips
every_pipeline = pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)


def built(stages: dict[str, Any], backend: str, **options: Any) -> AttentionOp:
    return mtagen.build(**{"dtype": "bf16", "backend": backend} | stages | options)


def documents(op: AttentionOp, lengths: list[int]) -> dict[str, Any]:
    """What ``varlen`` takes, of documents of these lengths."""
    spec, total = op.plan.spec, sum(lengths)
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = dict.fromkeys("qkv", (total, HEADS, spec.head_dim))
    tensors = {
        name: torch.randn(shape, device=CUDA, generator=generator).bfloat16().requires_grad_()
        for name, shape in shapes.items()
    }
    weights = {
        name: torch.randn(shape, device=CUDA, generator=generator).requires_grad_()
        for name, shape in spec.weights(HEADS).items()
    }
    cu_seq = torch.tensor([0, *lengths], device=CUDA).cumsum(0).to(torch.int32)
    return tensors | weights | {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq, "max_q": max(lengths), "max_k": max(lengths)}


def train(function: Any, given: dict[str, Any], **options: Any) -> list[Tensor]:
    """Out, the log-sum-exp and all gradients, through both."""
    out, lse = function(**given, **options, return_lse=True)
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
    loss = out.float().square().sum() + lse.sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


@backends
@every_pipeline
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_accuracy(stages: dict[str, Any], data: dict[str, Any], backend: str) -> None:
    op = built(stages, backend, **data)
    spec = replace(op.plan.spec, packed=data.get("packed", False), dropout=data.get("dropout", False))
    sizes = (Sizes(4, HEADS, HEADS // 2, 113, 203), Sizes(3, HEADS, HEADS, 515, 511))
    assert not failures(op, spec, CUDA, sizes)


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
@pytest.mark.parametrize("name", ["convolution", "everything"])
def test_accuracy_of_other_targets(name: str, target: str) -> None:
    """Triton's kernels for other GPUs run on this one."""
    op = built(PIPELINES[name], "triton", target=target, packed=True, dropout=True)
    spec = Spec(**op.plan.spec.to_dict() | {"packed": True, "dropout": True})
    assert not failures(op, spec, CUDA, (Sizes(3, HEADS, HEADS // 2, 113, 203),))


@backends
@every_pipeline
def test_nothing_leaks(stages: dict[str, Any], backend: str) -> None:
    """No bit of a document's results depends on another document, not even where that holds what is no number."""
    op = built(stages, backend, deterministic=True)
    given = documents(op, [130, 257, 1, 64])
    own = slice(130, 387)
    others = torch.ones(len(given["q"]), 1, 1, dtype=torch.bool, device=CUDA)
    others[own] = False
    dirty = given | {name: given[name].detach().masked_fill(others, torch.nan).requires_grad_() for name in "qkv"}
    clean = train(op.varlen, given)
    out, lse, dq, dk, dv, *_ = train(op.varlen, dirty)
    for ours, theirs in zip((clean[0], clean[1].T, *clean[2:5]), (out, lse.T, dq, dk, dv), strict=True):
        assert not ours[own].isnan().any()
        assert torch.equal(ours[own], theirs[own])


@backends
@every_pipeline
@pytest.mark.parametrize("dropout_p", [0, 0.1])
@pytest.mark.usefixtures("memory_starts_as_nan")
def test_rows_behind_the_last_document(stages: dict[str, Any], backend: str, dropout_p: float) -> None:
    """They get zeros, and change no bit, though they hold NaN: as padding to a fixed length may."""
    op = built(stages, backend, deterministic=True, dropout=dropout_p > 0)
    seed = mtagen.draw_seed(CUDA) if dropout_p else None
    options = {"dropout_p": dropout_p, "dropout_seed": seed}
    given = documents(op, [130, 257, 1, 64])
    total, terms = len(given["q"]), 130**2 + 257**2 + 64**2  # at most, of the gradient of a weight
    rest = {name: x.new_full((300, *x.shape[1:]), torch.nan) for name, x in given.items() if name in "qkv"}
    padded = given | {name: torch.cat([given[name].detach(), x]).requires_grad_() for name, x in rest.items()}

    def run(tensors: dict[str, Any]) -> list[Tensor]:
        """Out, the log-sum-exp as rows and all gradients, through the rows of documents."""
        out, lse = op.varlen(**tensors, **options, return_lse=True)
        leaves = [x for x in tensors.values() if isinstance(x, Tensor) and x.requires_grad]
        loss = out[:total].float().square().sum() + lse[:, :total].sum()
        return [out.detach(), lse.detach().T, *torch.autograd.grad(loss, leaves)]

    for n, (expected, made) in enumerate(zip(run(given), run(padded), strict=True)):
        if n < 5:
            assert torch.equal(made[:total], expected)
            assert (made[total:] == (-torch.inf if n == 1 else 0)).all()
        else:  # the gradient of a weight: terms of other tiles, which are zeros, may be summed in another order
            # Roundings of the partial sums of so many terms add up like a random walk.
            allowed = torch.finfo(torch.float32).eps * terms**0.5 * expected.abs().max()
            assert (made - expected).abs().max() <= allowed


@pytest.mark.parametrize("name", ["convolution", "everything"])
def test_a_graph_of_padded_documents(name: str) -> None:
    """One CUDA graph serves batches of documents of other lengths, padded to one number of rows."""
    op = built(PIPELINES[name], "auto", packed=True)
    given = documents(op, [100, 50, 106])
    tensors = {name: x.detach() for name, x in given.items() if isinstance(x, Tensor)}
    call = partial(op.varlen, **tensors, max_q=256, max_k=256)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for ends in ([0, 100, 150, 256], [0, 20, 190, 200], [0, 1, 1, 1]):
        starts = torch.tensor(ends, dtype=torch.int32, device=CUDA)
        for name in ("cu_seq_q", "cu_seq_k"):
            tensors[name].copy_(starts)
        graph.replay()
        assert torch.equal(out, call())
        assert not out[ends[-1] :].count_nonzero()


@every_pipeline
def test_bit_reproducible(stages: dict[str, Any]) -> None:
    op = built(stages, "auto", deterministic=True, dropout=True)
    given = documents(op, [300, 0, 77, 500, 3])
    seed = mtagen.draw_seed(CUDA)
    first = train(op.varlen, given, dropout_p=0.1, dropout_seed=seed)
    for _ in range(20):
        assert all(map(torch.equal, train(op.varlen, given, dropout_p=0.1, dropout_seed=seed), first))


@pytest.mark.parametrize("name", ["convolution", "everything"])
def test_cuda_graph_draws_anew(name: str) -> None:
    """Nothing waits for the GPU, documents may have other lengths in each replay, and other entries are dropped."""
    op = built(PIPELINES[name], "auto", dropout=True)
    given = documents(op, [200, 56, 100])
    seed = mtagen.draw_seed(CUDA)
    torch.cuda.manual_seed(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(op.varlen, given, dropout_p=0.2)  # kernels are built
    torch.cuda.current_stream().wait_stream(stream)
    graph, fixed = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = train(op.varlen, given, dropout_p=0.2)
    with torch.cuda.graph(fixed):
        seeded = train(op.varlen, given, dropout_p=0.2, dropout_seed=seed)
    graph.replay()
    first = [x.clone() for x in results]
    graph.replay()
    assert not torch.equal(results[0], first[0])
    for starts in ([0, 200, 256, 356], [0, 100, 170, 356]):
        given["cu_seq_q"].copy_(torch.tensor(starts, dtype=torch.int32))
        fixed.replay()
        for ours, expected in zip(seeded[:2], train(op.varlen, given, dropout_p=0.2, dropout_seed=seed), strict=False):
            assert torch.equal(ours, expected)


@backends
@pytest.mark.parametrize("name", ["convolution", "everything"])
def test_checkpoint(name: str, backend: str) -> None:
    """The forward pass that is computed again drops the same."""
    op = built(PIPELINES[name], backend, deterministic=True, dropout=True)

    def block(q: Tensor, **given: Any) -> Any:
        """PyTorch keeps the state of the generators of those devices on which tensors passed by position are."""
        return checkpoint(lambda q: op.varlen(q, **given, dropout_p=0.1), q, use_reentrant=False)

    given = documents(op, [100, 33, 64])
    torch.manual_seed(3)
    expected = train(lambda **x: op.varlen(**x, dropout_p=0.1), given)
    torch.manual_seed(3)
    for ours, first in zip(train(block, given), expected, strict=True):
        assert torch.equal(ours, first)


@backends
@pytest.mark.parametrize("name", ["convolution", "everything"])
def test_compile(name: str, backend: str) -> None:
    """Traced code takes lengths that change."""
    op = built(PIPELINES[name], backend, deterministic=True, dropout=True)
    torch._dynamo.reset()
    compiled = torch.compile(op.varlen, fullgraph=True, dynamic=True)
    options = {"dropout_p": 0.1, "dropout_seed": mtagen.draw_seed(CUDA)}
    for lengths in ([100, 33, 64], [50, 120, 7, 1]):
        given = documents(op, lengths)
        for ours, eager in zip(train(compiled, given, **options), train(op.varlen, given, **options), strict=True):
            assert torch.equal(ours, eager)


def test_a_thousand_documents() -> None:
    """Memory does not grow with their number times the longest one's length."""
    op = built(PIPELINES["everything"], "auto")
    given = documents(op, [4096, *[8] * 1000])
    train(op.varlen, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(op.varlen, given)
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30


@pytest.mark.parametrize("name", ["plain", "convolution"])
def test_a_graph_of_masks(name: str) -> None:
    """One CUDA graph serves batches with other prefixes."""
    op = built(PIPELINES[name], "auto", **problems.PREFIX)
    given = {name: x.detach() for name, x in documents(op, [512]).items() if isinstance(x, Tensor)}
    q, k, v = (given[name].view(2, 256, HEADS, -1).transpose(1, 2) for name in "qkv")
    weights = {name: given[name] for name in op.plan.spec.weights(HEADS)}
    prefix = torch.tensor([3, 200], device=CUDA)
    call = partial(op, q, k, v, **weights, parameters={"prefix": prefix})
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([3, 200], [0, 0], [256, 17]):
        prefix.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, call())
