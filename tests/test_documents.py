"""Packed documents on the CPU: each is a sequence of its own; what the op takes, and what it refuses."""

from __future__ import annotations

import ast
from functools import partial
from typing import Any

import pytest
import torch
from checkpoints import forward_calls, save_forward
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mtagen
from mtagen import InputError
from mtagen.check import failures
from mtagen.codegen.templates import functions
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import AttentionOp
from mtagen.planner.lift.kernels import DOCUMENT_TILE

LENGTHS = ((9, 9), (0, 4), (17, 20), (1, 1), (3, 0), (6, 2), (2, 5))  # queries and keys of documents
PIPELINES: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "convolution": {"kernel": (3, 5)},
    "everything": {"kernel": (3, 4), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2},
    "a window": {"kernel": (3, 4), "post_mixed_heads": 2, "window": (5, 2), "causal": False},
}
every_pipeline = pytest.mark.parametrize("stages", PIPELINES.values(), ids=PIPELINES)


def built(**options: Any) -> AttentionOp:
    return mtagen.build(**{"kernel": (3, 5), "head_dim": 16, "backend": "torch"} | options)


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def arguments(op: AttentionOp, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> dict[str, Any]:
    """What ``varlen`` takes."""
    nq, nk = zip(*lengths, strict=True)
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (sum(nq), 4, 16), "k": (sum(nk), 2, 16), "v": (sum(nk), 2, 16), **op.plan.spec.weights(4)}
    leaves = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    return leaves | {"cu_seq_q": starts(nq), "cu_seq_k": starts(nk), "max_q": max(nq), "max_k": max(nk)}


def train(function: Any, given: dict[str, Any]) -> list[Tensor]:
    """Out and all gradients."""
    out = function(**given)
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@every_pipeline
def test_equals_reference(stages: dict[str, Any]) -> None:
    op = built(**stages, dtype="fp32")
    spec = mtagen.Spec(**op.plan.spec.to_dict() | {"packed": True})
    assert not failures(op, spec, torch.device("cpu"), (Sizes(3, 4, 2, 67, 71), Sizes(2, 4, 4, 20, 5)))


@every_pipeline
def test_each_is_the_call_of_its_own(stages: dict[str, Any]) -> None:
    op = built(**stages)
    given = arguments(op)
    out, lse = op.varlen(**given, return_lse=True)
    weights = {name: given[name] for name in op.plan.spec.weight_names}
    for queries, keys in (
        (slice(*given["cu_seq_q"][b : b + 2]), slice(*given["cu_seq_k"][b : b + 2])) for b in range(len(LENGTHS))
    ):
        tensors = (given[name][rows].transpose(0, 1)[None] for name, rows in (("q", queries), ("k", keys), ("v", keys)))
        one, one_lse = op(*tensors, **weights, return_lse=True)
        assert torch.equal(out[queries], one[0].transpose(0, 1))
        assert torch.equal(lse[:, queries], one_lse[0])


@every_pipeline
def test_nothing_leaks(stages: dict[str, Any]) -> None:
    """No bit of a document's results depends on another document, not even where that holds what is no number."""
    op = built(**stages)
    given = arguments(op)
    clean = train(op.varlen, given)
    queries, keys = (slice(*given[name][2:4]) for name in ("cu_seq_q", "cu_seq_k"))
    dirty = dict(given)
    for name, own in (("q", queries), ("k", keys), ("v", keys)):
        others = torch.ones(len(given[name]), dtype=torch.bool)
        others[own] = False
        dirty[name] = given[name].detach().masked_fill(others[:, None, None], torch.nan).requires_grad_()
    for mine, theirs, own in zip(clean, train(op.varlen, dirty), (queries, queries, keys, keys), strict=False):
        assert torch.equal(mine[own], theirs[own])
        assert not mine[own].isnan().any()


def test_no_document_and_no_query() -> None:
    op = built()
    for lengths in (((0, 0),), ((0, 3), (0, 2)), ((3, 0),)):
        given = arguments(op, lengths)
        for grad in train(op.varlen, given):
            assert not grad.any()
    given = arguments(op, ((0, 0),)) | {"cu_seq_q": starts(()), "cu_seq_k": starts(())}
    assert op.varlen(**given).shape == (0, 4, 16)


def test_compile_with_lengths_that_change() -> None:
    op = built(dropout=True)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda **x: op.varlen(**x), fullgraph=True, dynamic=True, backend=counter)
    for lengths in (LENGTHS, LENGTHS[2:], ((30, 31), (5, 4), (7, 8))):
        given = arguments(op, lengths)
        for ours, expected in zip(train(compiled, given), train(op.varlen, given), strict=True):
            torch.testing.assert_close(ours, expected)
    assert counter.frame_count == 1


def test_checkpoint() -> None:
    op = built(dropout=True)
    given = arguments(op)

    def recomputed(**given: Any) -> Tensor:
        out: Tensor = checkpoint(op.varlen, **given, dropout_p=0.2, use_reentrant=False)
        return out

    torch.manual_seed(0)
    expected = train(lambda **x: op.varlen(**x, dropout_p=0.2), given)
    torch.manual_seed(0)
    assert all(map(torch.equal, train(recomputed, given), expected))


def test_selective_checkpoint_saves_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved by name is not computed again, and drops the same."""
    op = built(dropout=True)
    given = arguments(op)

    def recomputed(q: Tensor, **given: Any) -> Tensor:
        out: Tensor = checkpoint(
            lambda q: op.varlen(2 * q, **given, dropout_p=0.2),
            q,
            use_reentrant=False,
            context_fn=save_forward,
        )
        return out

    torch.manual_seed(0)
    expected = train(lambda q, **x: op.varlen(2 * q, **x, dropout_p=0.2), given)
    calls = forward_calls(monkeypatch)
    torch.manual_seed(0)
    assert all(map(torch.equal, train(recomputed, given), expected))
    assert len(calls) == 1


class Layer(torch.nn.Module):
    """Attention with a projection, as FSDP wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 192)
        self.weight = torch.nn.Parameter(torch.randn(4, 3, 5))
        self.op = built(dropout=True)

    def forward(self, x: Tensor, cu_seq: Tensor, longest: int) -> Tensor:
        q, k, v = self.project(x).view(-1, 3, 4, 16).unbind(1)
        starts = {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq, "max_q": longest, "max_k": longest}
        out: Tensor = self.op.varlen(q, k, v, self.weight, **starts, dropout_p=0.1)
        return out


def test_mixed_precision_of_fsdp() -> None:
    """Parameters of fp32 come in bf16, slices of a projection in place; gradients are of fp32."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = Layer()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        out = layer(torch.randn(20, 64), starts((7, 0, 13)), 13)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
    finally:
        torch.distributed.destroy_process_group()


def test_autocast() -> None:
    op = built()
    given = arguments(op)
    with torch.autocast("cpu", torch.bfloat16):
        out = op.varlen(**given)
    assert out.dtype == torch.bfloat16
    half = {name: given[name].bfloat16() for name in "qkv"}
    assert torch.equal(out, op.varlen(**given | half))


def test_flop() -> None:
    op = built()
    given = arguments(op)
    with FlopCounterMode(display=False) as counter:
        op.varlen(**given).sum().backward()
    scores = sum(4 * nq * nk for nq, nk in LENGTHS)
    forward, backward = 2 * scores * (32 + 15), 2 * scores * (5 * 16 + 2 * 15)
    assert counter.get_total_flops() == forward + backward


def test_strides() -> None:
    op = built()
    given = arguments(op)
    strided = {name: given[name].detach().transpose(0, 1).contiguous().transpose(0, 1) for name in "qkv"}
    assert torch.equal(op.varlen(**given | strided), op.varlen(**given))


# Schedules of tiles, which kernels take.


def host_functions(file: str) -> dict[str, Any]:
    """What a Python file of the host's templates defines."""
    names: dict[str, Any] = {"torch": torch}
    exec(functions(f"host/{file}"), names)
    return names


@pytest.mark.parametrize("order", ["later", "earlier", "longest"])
def test_schedule_of_tiles(order: str) -> None:
    lengths = (40, 0, 7, 16, 90, 1, 0)
    schedule = host_functions("documents.py")["_schedule"]
    count = host_functions("documents.py")["_most_tiles"](sum(lengths), len(lengths), 16)
    tiles = schedule(starts(lengths), 16, count, order).tolist()
    taken = [tuple(tile) for tile in tiles if tile[0] >= 0]
    assert sorted(taken) == [(b, n) for b, length in enumerate(lengths) for n in range(-(-length // 16))]
    assert len(tiles) == count == sum(lengths) // 16 + len(lengths)
    assert all(tile[0] < 0 for tile in tiles[len(taken) :])
    blocks = [-(-length // 16) for length in lengths]
    work = {
        "later": [n for _, n in taken],
        "earlier": [blocks[b] - n for b, n in taken],
        "longest": [blocks[b] for b, _ in taken],
    }[order]
    assert work == sorted(work, reverse=True)
    if order != "later":
        for b in range(len(lengths)):
            own = [n for document, n in taken if document == b]
            assert own == sorted(own)


@pytest.mark.parametrize("carried", [0, 5])
def test_sizes_of_documents(carried: int) -> None:
    """Rows and keys behind the last document are documents, and documents have tiles for rows that are carried."""
    queries, keys = (40, 0, 7), (3, 4, 0)
    q, k = torch.empty(50, 2, 16), torch.empty(9, 1, 16)
    sizes = host_functions("documents.py")["_sizes"](
        q, k, starts(queries), starts(keys), 16, carried, "longest", "longest"
    )
    cu_seq_q, cu_seq_k, row_tiles, key_tiles, *numbers = sizes
    assert cu_seq_q.diff().tolist() == [*queries, 0, 3]
    assert cu_seq_k.diff().tolist() == [*keys, 2, 0]
    assert numbers == [len(row_tiles), len(key_tiles), 50, 9]
    for tiles, lengths in ((row_tiles, [length + carried for length in (*queries, 0, 3)]), (key_tiles, [*keys, 2, 0])):
        expected = [[b, n] for b, length in enumerate(lengths) for n in range(-(-length // 16))]
        assert sorted(tile for tile in tiles.tolist() if tile[0] >= 0) == expected


@pytest.mark.parametrize("limit", [2**10, 2**20, 2**30])
def test_workspace_of_gradients(limit: int) -> None:
    """It holds as many heads and rows as fit the limit, at least one head of keys and the shortest chunk."""
    workspace = host_functions("workspace.py")["_workspace"]
    shape = {"itemsize": 2, "vector_bytes": 6 * 64 * 6, "multiple": 128}
    heads, strip, pitch = workspace(1000, 1001, 1001, 8, 4, **shape, limit=limit)
    assert pitch == 1008
    assert strip % 128 == 0
    assert 1 <= heads <= 8
    needed = heads * 4 * (strip * pitch * 2 + 1001 * 6 * 64 * 6)
    assert needed <= limit or heads == 1
    assert (heads, strip) == {2**10: (1, 128), 2**20: (1, 128), 2**30: (8, 1024)}[limit]


def test_kernels_of_batches_and_documents_call_the_same_functions() -> None:
    """Only a block's arguments differ, and tiles of the schedule have the size that the planner counts with."""
    parameters = []
    for name in ("batch", "packed"):
        defined = [node for node in ast.parse(functions(f"triton/{name}.py")).body if isinstance(node, ast.FunctionDef)]
        parameters.append({node.name: len(node.args.args) for node in defined})
    batch, packed = parameters
    assert packed.keys() - batch.keys() == {"_first_place"}
    assert {name for name in batch if batch[name] != packed[name]} == {"_block"}
    assert f"_TILE: tl.constexpr = tl.constexpr({DOCUMENT_TILE})" in functions("triton/packed.py")


# Bad input.


def refused(match: str, **wrong: Any) -> None:
    op = built()
    with pytest.raises(InputError, match=match):
        op.varlen(**arguments(op) | wrong)


def test_tensors_of_wrong_shapes() -> None:
    refused(r"q\.shape: got \(1, 38, 4, 16\).*3 dimensions.*\(total, heads, head_dim\)", q=torch.zeros(1, 38, 4, 16))
    refused(r"heads", q=torch.zeros(38, 3, 16))
    refused(r"v\.shape", v=torch.zeros(40, 2, 16))


def test_starts_of_wrong_kinds() -> None:
    good = starts(tuple(nq for nq, _ in LENGTHS))
    refused("cu_seq_q: got 'float'.*must be a tensor", cu_seq_q=1.0)
    for wrong in (good.long(), good[None], good[:0], good.to("meta")):
        refused(r"cu_seq_q.*torch\.int32, cpu", cu_seq_q=wrong)
    refused(r"documents: got \(6, 7\).*same length", cu_seq_q=torch.cat([good[:1], good[2:]]))


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ((0, 9, 8, 38), "must not decrease"),
        ((1, 9, 38), "must begin with 0"),
        ((0, 9, 39), "must not exceed the number of rows, 38"),
    ],
)
def test_starts_of_wrong_values(values: tuple[int, ...], rule: str) -> None:
    refused(f"cu_seq_q: got .*{rule}", cu_seq_q=torch.tensor(values, dtype=torch.int32))


@every_pipeline
@pytest.mark.parametrize("dropout_p", [0, 0.4])
def test_rows_behind_the_last_document(stages: dict[str, Any], dropout_p: float) -> None:
    """They get zeros, and change nothing, though they hold NaN: as padding to a fixed length may."""
    op = built(**stages, dropout=dropout_p > 0)
    seed = torch.tensor([3, 4]) if dropout_p else None
    options = {"dropout_p": dropout_p, "dropout_seed": seed}
    given = arguments(op)
    padded = dict(given)
    for name, rows in (("q", 5), ("k", 7), ("v", 7)):
        rest = torch.full((rows, *given[name].shape[1:]), torch.nan)
        padded[name] = torch.cat([given[name].detach(), rest]).requires_grad_()
    _, lse = op.varlen(**padded, **options, return_lse=True)
    assert (lse[:, len(given["q"]) :] == -torch.inf).all()
    for ours, expected in zip(
        train(partial(op.varlen, **options), padded), train(partial(op.varlen, **options), given), strict=True
    ):
        assert torch.equal(ours[: len(expected)], expected)
        assert not ours[len(expected) :].count_nonzero()


@pytest.mark.parametrize("longest", [-1, 1.5, True, None])
def test_longest_of_wrong_kinds(longest: Any) -> None:
    refused("max_q.*length of the longest document", max_q=longest)
    refused("max_k.*length of the longest document", max_k=longest)


def test_documents_longer_than_the_longest() -> None:
    for name, axis in (("max_q", 0), ("max_k", 1)):
        longest = max(lengths[axis] for lengths in LENGTHS)
        refused(rf"{name}: got {longest - 1}; must be the length.*{longest} or more", **{name: longest - 1})
