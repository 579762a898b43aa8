"""Sequences spread over processes against one process with the whole: outputs, and the gradients of everything."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import forward_calls
from pages import blocks
from ranks import Ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torchrun import torchrun

import mtagen
from mtagen import BackendError, InputError, SpecError, plan
from mtagen.call import NO_LEARNED
from mtagen.distributed import ContextParallel, context_parallel, exchange
from mtagen.distributed.places import Before, of_parts
from mtagen.distributed.sharding import ChunkCall, Rows, Sharding, fresh, regions
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Inputs, Sampler
from mtagen.measure.judge import documents_op, eager_op, judge
from mtagen.nn import MultiTokenAttention
from mtagen.nn.tensor_parallel import HeadParallel
from mtagen.ops.attention import assemble
from mtagen.spec import WEIGHTS, Spec

HEADS, WIDTH = 4, 16
SIZES = (2, 3)  # of groups
every_size = pytest.mark.parametrize("size", SIZES)
STAGES: dict[str, Any] = {"kernel": (4, 5), "mixed_heads": 2, "post_kernel": (3, 4), "post_mixed_heads": HEADS}
PIPELINES = [
    {"kernel": None} | {name: STAGES[name] for name, used in zip(STAGES, which, strict=True) if used}
    for which in itertools.product((False, True), repeat=len(STAGES))
]
EVERYTHING = PIPELINES[-1]
MASKS: dict[str, dict[str, Any]] = {
    "output": {"mask": "output"},
    "window": {"window": (9, -1)},
    "narrow window": {"window": (0, -1), "mask": "output"},
    "full": {"causal": False},
    "window to both sides": {"causal": False, "window": (7, 4)},
    "window to the right": {"causal": False, "window": (-1, 3), "mask": "output"},
    "window to the left": {"causal": False, "window": (5, -1), "key_padding": "right"},
    "padded on the left": {"key_padding": "left"},
    "logits by distance": {"logits": "(3 + h) * tanh(s / 2) - (i - j) / 16"},
    "logits in a window": {"logits": "s * log(abs(i - j) + 2)", "causal": False, "window": (7, 4)},
    "logits of heads": {"logits": "s / (h + 1)", "causal": False},
    "expressions at all places": {"scores": "s - (i - j) / 9", "convolved": "tanh(s)", "logits": "s + log(i - j + 2)"},
    "sink": {"sink": True, "window": (7, -1)},
    "parameters": {
        "scores": "s * factor[b]",
        "logits": "s - slopes[h] * (i - j) + table[h, min(9, i - j)]",
        "parameters": {"factor": "b", "slopes": "h", "table": "h,10"},
        "sink": True,
    },
    "constants": {
        "logits": "s * factor[b] - slopes[h] * (i - j)",
        "parameters": {"factor": "b", "slopes": "h"},
        "constants": ("factor",),
    },
}
# Conditions that are no windows. Each is taken with other stages than the next.
CONDITIONS: dict[str, dict[str, Any]] = {
    "prefix": {"causal": False, "visible": "(j <= i) | (j < prefix[b])", "parameters": {"prefix": "b"}},
    "chunks": {"visible": "i // 7 == j // 7"},
    "chunks seen whole": {"causal": False, "visible": "i // 7 == j // 7", "window": (9, -1)},
    "padding": {"causal": False, "visible": "j < lengths[b]", "parameters": {"lengths": "b"}},
    "later half": {"causal": False, "visible": "j >= i // 2"},
    "sinks and a window": {"visible": "(j < 3) | (i - j < 9)"},
    "one number": {"visible": "j >= i % 5 - number", "parameters": {"number": ""}, "window": (14, 3), "causal": False},
    "and parameters of scores": {
        "visible": "(i + j) % 3 != 1",
        "logits": "s - slopes[h] * (i - j)",
        "parameters": {"slopes": "h"},
        "sink": True,
    },
    "and a constant": {
        "causal": False,
        "visible": "(j <= i) | (j < prefix[b])",
        "logits": "s * factor[h] * slopes[h]",
        "parameters": {"prefix": "b", "factor": "h", "slopes": "h"},
        "constants": ("factor",),
    },
}
LENGTHS = ([37], [5, 20, 12], [1, 0, 3, 17, 2, 9, 0], [30, 1, 1, 5])  # of documents


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks((*SIZES, 4), tmp_path_factory.mktemp("ranks") / "store")
    yield processes
    processes.stop()


# ---- The op: on every rank the same whole tensors, which it shards, and the whole output and gradients again.


class Reassembled(torch.autograd.Function):
    """The whole output, whose gradient each rank takes its rows of."""

    @staticmethod
    def forward(ctx: Any, cp: ContextParallel, x: Tensor, dim: int, length: int) -> Tensor:
        ctx.cp, ctx.dim = cp, dim
        return cp.unshard(x, dim, length=length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.cp.shard(grad, ctx.dim), None, None


class Summed(torch.autograd.Function):
    """The tensor itself, whose gradients of all ranks are summed."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = grad.double()
        dist.all_reduce(total, group=ctx.group)
        return None, total.to(grad.dtype)


def over_ranks(cp: ContextParallel, dim: int, **options: Any) -> Callable[..., Tensor]:
    """The op of whole tensors, computed by all ranks."""

    def run(q: Tensor, k: Tensor, v: Tensor, parameters: Any = None, **weights: Tensor) -> Tensor:
        length, call = q.shape[dim], cp if dim == 2 else cp.varlen
        qkv = (cp.shard(Summed.apply(cp.group, x), dim) for x in (q, k, v))
        weights = {name: Summed.apply(cp.group, x) for name, x in weights.items()}
        if parameters:
            weights["parameters"] = {name: Summed.apply(cp.group, x) for name, x in parameters.items()}
        local = call(*qkv, **weights, length=length, **options)
        return Reassembled.apply(cp, local, dim, length)

    return run


def built(stages: dict[str, Any], dtype: str | None = "fp64") -> mtagen.AttentionOp:
    return mtagen.build(**stages, head_dim=WIDTH, value_head_dim=24, backend="torch", dtype=dtype)


def random(spec: Spec, batch: int, kv_heads: int, length: int, device: str = "cpu") -> tuple[Inputs, Tensor]:
    """Inputs and the gradient of the output."""
    sampler = Sampler.for_checks(spec, Sizes(batch, HEADS, kv_heads, length, length), torch.device(device))
    return sampler.inputs(), sampler.outputs()


def results(function: Callable[..., Tensor], inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the inputs by their names."""
    leaves = {name: x.detach().requires_grad_(inputs.has_gradient(x)) for name, x in inputs.named.items()}
    q, k, v, *_ = leaves.values()
    out = function(q, k, v, **inputs.options(leaves))
    out.backward(grad_out)
    return {"out": out.detach(), **{name: x.grad for name, x in leaves.items()}}


def compare_op(
    group: ProcessGroup, stages: dict[str, Any], balanced: bool, batch: int, kv_heads: int, length: int
) -> None:
    op = built(stages)
    inputs, grad_out = random(op.plan.spec, batch, kv_heads, length)
    cp = ContextParallel(op, group, balanced=balanced)
    torch.testing.assert_close(
        results(over_ranks(cp, 2), inputs, grad_out), results(eager_op(op.plan.spec), inputs, grad_out)
    )


@every_size
@pytest.mark.parametrize("number", range(len(PIPELINES)), ids=["-".join(stages) for stages in PIPELINES])
def test_pipelines(ranks: Ranks, size: int, number: int) -> None:
    balanced, batch, kv_heads = (number + size) % 2 == 0, 1 + number % 3, (4, 2, 1)[number % 3]
    length = (37, 48, 41)[(number + size) % 3]
    ranks.run(size, compare_op, PIPELINES[number], balanced, batch, kv_heads, length)


@every_size
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(ranks: Ranks, size: int, balanced: bool, name: str) -> None:
    ranks.run(size, compare_op, EVERYTHING | MASKS[name], balanced, 2, 2, 43)


@every_size
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions(ranks: Ranks, size: int, name: str) -> None:
    number = [*CONDITIONS].index(name)
    for stages, balanced in ((EVERYTHING, number % 2 == 0), (PIPELINES[size + 1], number % 2 == 1)):
        ranks.run(size, compare_op, stages | CONDITIONS[name], balanced, 2, 2, 43)


def refused_expressions(group: ProcessGroup) -> None:
    """A rank knows the distance of a query and a key only, and only where a mask aligns its rows."""
    of_keys = {"logits": "s + bias[b, h, j]", "parameters": {"bias": "b,h,j"}}
    for stages in ({"logits": "s * log(i + 1)"}, {"logits": "s - (i - j) / 8", "causal": False}, of_keys):
        with pytest.raises(InputError, match=r"logits: got .* reads positions"):
            ContextParallel(built({"kernel": None} | stages), group)
    with pytest.raises(InputError, match=r"scores: got .* reads positions"):
        ContextParallel(built({"kernel": (2, 2), "scores": "s / (j + 1)"}), group)
    for name, visible, axes in (("ends", "j < ends[b, i]", "b,i"), ("table", "j < table[min(3, i // 8)]", "4")):
        op = built({"kernel": None, "visible": visible, "parameters": {name: axes}})
        with pytest.raises(InputError, match=rf"parameters\['{name}'\].* visible reads it by position or key"):
            ContextParallel(op, group)
    many = {f"x{n}": "b" for n in range(7)}
    op = built({"kernel": None, "visible": f"i - j < {' + '.join(f'{name}[b]' for name in many)}", "parameters": many})
    with pytest.raises(InputError, match="ranks add the parameters positions_before, keys_before"):
        ContextParallel(op, group)
    op = assemble(plan(Spec(None, WIDTH, visible="i // 8 == j // 8"), "cpu"))
    with pytest.raises(InputError, match="made from a plan by hand"):
        ContextParallel(op, group)
    with pytest.raises(InputError, match="mixings that depend on tokens"):
        ContextParallel(built({"kernel": None, "mixed_heads": 2, "dynamic_ranks": (1, 1)}), group)


def test_expressions_that_are_refused(ranks: Ranks) -> None:
    ranks.run(2, refused_expressions)


@every_size
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 11])
def test_short_sequences(ranks: Ranks, size: int, balanced: bool, length: int) -> None:
    """Chunks are shorter than what convolutions read before them, or empty, and some ranks hold nothing."""
    ranks.run(size, compare_op, EVERYTHING, balanced, 1, 2, length)
    ranks.run(size, compare_op, EVERYTHING | {"window": (3, -1)}, balanced, 1, 2, length)


def judge_op(group: ProcessGroup, dtype: str, stages: dict[str, Any]) -> list[str]:
    op = built(stages, dtype)
    inputs, grad_out = random(op.plan.spec, 1, 2, 300)
    judged = judge(over_ranks(ContextParallel(op, group), 2), eager_op(op.plan.spec), inputs, grad_out)
    return [f"{name}: {x.error:.3g} > {x.allowed:.3g}" for name, x in judged.items() if not x.ok]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stages", [{"kernel": (6, 11)}, EVERYTHING], ids=["convolution", "everything"])
def test_accuracy(ranks: Ranks, dtype: str, stages: dict[str, Any]) -> None:
    assert ranks.run(2, judge_op, dtype, stages) == [[], []]


def mine(cp: ContextParallel, inputs: Inputs, grad_out: Tensor, packed: bool = False) -> tuple[Inputs, Tensor]:
    """This rank's rows of inputs and of the gradient of the output."""
    q, k, v, grad = (cp.shard(x, 2) for x in (inputs.q, inputs.k, inputs.v, grad_out))
    if packed:
        q, k, v, grad = (x[0].transpose(0, 1) for x in (q, k, v, grad))
    return replace(inputs, q=q, k=k, v=v), grad


def checkpoint_op(group: ProcessGroup, reentrant: bool) -> None:
    op = built({"kernel": (4, 5)}, "fp32")
    inputs, grad_out = random(op.plan.spec, 1, 2, 36)
    call = over_ranks(ContextParallel(op, group), 2)
    recomputed = partial(checkpoint, lambda *x: call(*x[:3], weight=x[3]), use_reentrant=reentrant)
    got = results(lambda *x, weight: recomputed(*x, weight), inputs, grad_out)
    torch.testing.assert_close(got, results(call, inputs, grad_out))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(ranks: Ranks, reentrant: bool) -> None:
    ranks.run(2, checkpoint_op, reentrant)


def select_op(group: ProcessGroup) -> list[int]:
    cp = ContextParallel(built({"kernel": (4, 5)}), group)
    inputs, grad_out = mine(cp, *random(cp.op.plan.spec, 1, 2, 36))
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.mtagen.context_parallel_forward.default])
    calls = []
    for options in ({}, {"context_fn": saved}):
        with pytest.MonkeyPatch.context() as patch:
            calls.append(forward_calls(patch))
            recomputed = partial(checkpoint, cp, use_reentrant=False, **options)
            torch.testing.assert_close(results(recomputed, inputs, grad_out), results(cp, inputs, grad_out))
    return list(map(len, calls))


def test_selective_checkpoint_saves_the_op(ranks: Ranks) -> None:
    """A call has two chunks, and is done once more for comparison; what is saved by name is not computed again."""
    assert ranks.run(2, select_op) == [[6, 4], [6, 4]]


def compile_op(group: ProcessGroup, packed: bool, stages: dict[str, Any] = EVERYTHING) -> int:
    """How many graphs several lengths take."""
    cp = ContextParallel(built(stages), group)
    call, counter = cp.varlen if packed else cp, CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *qkv, **others: call(*qkv, **others), fullgraph=True, backend=counter)
    for length in range(45, 55):
        inputs, grad_out = mine(cp, *random(cp.op.plan.spec, 1, 2, length), packed)
        options: dict[str, Any] = {"length": length}
        if packed:
            options |= {"cu_seqlens": torch.tensor([0, 5, 20, length], dtype=torch.int32), "max_seqlen": length - 20}
        expected = results(partial(call, **options), inputs, grad_out)
        torch.testing.assert_close(results(partial(compiled, **options), inputs, grad_out), expected)
    return counter.frame_count


@pytest.mark.parametrize("packed", [False, True])
def test_compile(ranks: Ranks, packed: bool) -> None:
    """One graph is of the first length; of others the number of this rank's rows may stay the same, or not."""
    assert set(ranks.run(2, compile_op, packed)) <= {2, 3}


@pytest.mark.parametrize("name", ["prefix", "and a constant"])
def test_compile_conditions(ranks: Ranks, name: str) -> None:
    """Calls add what is before their places to the parameters."""
    assert set(ranks.run(2, compile_op, False, {"kernel": (2, 3)} | CONDITIONS[name])) <= {1, 2, 3}


@pytest.mark.parametrize("rank", [0, 1])
def test_shapes_follow_from_arguments(rank: int) -> None:
    """And from no process group, because graphs with the same arguments share what was compiled for one of them."""
    op = built(EVERYTHING)
    q, v = (torch.empty(1, HEADS, 12, width, dtype=torch.float64, device="meta") for width in (WIDTH, 24))
    weights = op.plan.spec.weights(HEADS)
    given = (torch.empty(weights[name], device="meta") for name in WEIGHTS)
    out, *kept = torch.ops.mtagen.context_parallel_forward(
        q, q, v, *given, *NO_LEARNED, 0.25, op._key, "none", rank, 2, True, 24
    )
    context = op.plan.spec.context
    chunks = [[(0, 6), (context, 6)], [(context, 12), (0, 0)]][rank]  # the last rank's lie side by side
    assert out.shape == v.shape
    assert [len(x) for x in kept[:2]] == [before for before, _ in chunks]
    assert [x.shape[2] for x in kept[2:]] == [before + rows for before, rows in chunks]


def opcheck(group: ProcessGroup, packed: bool) -> None:
    cp = ContextParallel(built(EVERYTHING), group)
    inputs, grad_out = mine(cp, *random(cp.op.plan.spec, 1, 2, 37), packed)
    tensors = [inputs.q, inputs.k, inputs.v, *(inputs.weights[name] for name in WEIGHTS), *NO_LEARNED]
    plan = [0.25, cp.op._key, group.group_name, cp.rank, cp.ranks, True, 37]
    if packed:
        plan += [torch.tensor([0, 5, 20, 37], dtype=torch.int32), 17]
    leaves = [None if x is None else x.clone().requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.mtagen.context_parallel_forward.default, (*leaves, *plan))
    kept = torch.ops.mtagen.context_parallel_forward(*tensors, *plan)
    torch.library.opcheck(torch.ops.mtagen.context_parallel_backward.default, (grad_out, *tensors, kept, *plan))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(ranks: Ranks, packed: bool) -> None:
    ranks.run(2, opcheck, packed)


def cast_op(group: ProcessGroup) -> None:
    cp = ContextParallel(built({"kernel": (4, 5)}, None), group)
    q, v, weight = torch.randn(1, HEADS, 8, WIDTH), torch.randn(1, HEADS, 8, 24), torch.randn(HEADS, 4, 5)
    inputs, grad_out = Inputs(q, q, v, {"weight": weight}), torch.randn(1, HEADS, 8, 24).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = results(cp, inputs, grad_out)
    expected = results(cp, replace(inputs, q=q.bfloat16(), k=q.bfloat16(), v=v.bfloat16()), grad_out)
    assert all(torch.equal(got[name], x) for name, x in expected.items())
    assert got["out"].dtype == torch.bfloat16
    assert {got[name].dtype for name in inputs.named} == {torch.float32}


def test_autocast(ranks: Ranks) -> None:
    ranks.run(2, cast_op)


def count_flop(group: ProcessGroup, packed: bool) -> int:
    cp = ContextParallel(built({"kernel": None}), group, balanced=False)
    inputs, grad_out = mine(cp, *random(cp.op.plan.spec, 1, 2, 24), packed)
    documents = {"cu_seqlens": torch.tensor([0, 10, 24], dtype=torch.int32)} if packed else {}
    with FlopCounterMode(display=False) as counted:
        results(partial(cp.varlen, **documents) if packed else cp, inputs, grad_out)
    return counted.get_total_flops()


@pytest.mark.parametrize("packed", [False, True])
def test_flop(ranks: Ranks, packed: bool) -> None:
    """Seven products of a forward and a backward pass, with the keys up to a rank's last row."""
    pairs = [10 * 10 + 2 * 2, 12 * 14] if packed else [12 * 12, 12 * 24]
    assert ranks.run(2, count_flop, packed) == [2 * HEADS * (4 * WIDTH + 3 * 24) * each for each in pairs]


def freeze_some(group: ProcessGroup) -> None:
    op = built({"kernel": (4, 5)})
    inputs, grad_out = random(op.plan.spec, 1, 2, 36)
    cp = ContextParallel(op, group)
    expected = results(over_ranks(cp, 2), inputs, grad_out)
    for name in inputs.named:
        leaves = {other: x.detach().requires_grad_(other == name) for other, x in inputs.named.items()}
        whole = {other: cp.shard(x, 2) if other in "qkv" else x for other, x in leaves.items()}
        cp(**whole).backward(cp.shard(grad_out, 2))
        gradient = leaves[name].grad
        dist.all_reduce(gradient, group=group)
        torch.testing.assert_close(gradient, expected[name])


def test_some_inputs_have_no_gradient(ranks: Ranks) -> None:
    ranks.run(2, freeze_some)


def received(
    group: ProcessGroup, stages: dict[str, Any], length: int, balanced: bool, longest: int | None = None
) -> list[int]:
    """Rows of queries and of keys that come from other ranks, by steps; of documents of ``longest`` rows, if given."""
    cp, rows = ContextParallel(built(stages), group, balanced=balanced), []

    def counting(transfers: Sequence[exchange.Transfer], *where: Any) -> None:
        queries, keys, values = (sum(len(x) for _, x in transfer.received) for transfer in transfers)
        assert keys == values
        rows.extend([queries, keys])
        exchange.begin(transfers, *where)

    inputs, _ = random(cp.op.plan.spec, 1, 2, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "begin", counting)
        qkv = [cp.shard(x, 2) for x in (inputs.q, inputs.k, inputs.v)]
        if longest is None:
            cp(*qkv, **inputs.weights)
        else:
            cu_seqlens = torch.arange(0, length + 1, longest, dtype=torch.int32)
            packed = (x[0].transpose(0, 1) for x in qkv)
            cp.varlen(*packed, **inputs.weights, cu_seqlens=cu_seqlens, max_seqlen=longest)
    return rows


def gradients_received(group: ProcessGroup, stages: dict[str, Any], length: int, balanced: bool) -> int:
    """Rows of gradients of keys that come from other ranks."""
    cp, rows = ContextParallel(built(stages), group, balanced=balanced), []

    def counting(transfers: Sequence[exchange.Transfer], *where: Any) -> None:
        rows.append([sum(len(x) for _, x in transfer.received) for transfer in transfers])
        exchange.begin(transfers, *where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "begin", counting)
        results(cp, *mine(cp, *random(cp.op.plan.spec, 1, 2, length)))
    _, keys, values = torch.tensor(rows[-1]).view(3, -1).sum(1)  # gradients travel last
    assert keys == values
    return int(keys)


def padded_documents(group: ProcessGroup, stages: dict[str, Any], balanced: bool) -> None:
    """The op and its gradients, over ranks, where the last document ends before the rows do."""
    op, cu_seqlens = built(stages), torch.tensor([0, 9, 9, 20, 27], dtype=torch.int32)
    cp = ContextParallel(op, group, balanced=balanced)
    inputs, grad_out = random(op.plan.spec, 1, 2, 48)
    q, k, v, grad = (x[0].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v, grad_out))
    packed = Inputs(q, k, v, inputs.weights)
    whole = partial(op.varlen, cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=11, max_k=11)
    ours = results(over_ranks(cp, 0, cu_seqlens=cu_seqlens, max_seqlen=11), packed, grad)
    for name, expected in results(whole, packed, grad).items():
        torch.testing.assert_close(ours[name], expected)
        assert name not in ("out", "q", "k", "v") or not ours[name][27:].count_nonzero()


@pytest.mark.parametrize("balanced", [False, True])
def test_rows_behind_the_last_document(ranks: Ranks, balanced: bool) -> None:
    ranks.run(2, padded_documents, {"kernel": (3, 4)}, balanced)


@every_size
def test_traffic_of_gradients(ranks: Ranks, size: int) -> None:
    """As docs/distributed.md has it."""
    length, half = 24 * size, 12  # rows, and those of a chunk
    *others, last = ranks.run(size, gradients_received, {"kernel": (2, 3)}, length, True)
    assert last == length * (size - 1) // size
    assert others == [length - 3 * half] * (size - 1)
    assert ranks.run(size, gradients_received, {"kernel": None}, length, False) == [
        (size - 1 - rank) * 2 * half for rank in range(size)
    ]


@every_size
def test_traffic(ranks: Ranks, size: int) -> None:
    """As docs/distributed.md has it."""
    length, half = 24 * size, 12  # rows, and those of a chunk
    for rank, (_, keys, _, others) in enumerate(ranks.run(size, received, EVERYTHING, length, True)):
        assert keys + others == length * (size - 1) // size - rank * half
    for _, keys, _, others in ranks.run(size, received, {"kernel": None, "causal": False}, length, True):
        assert (keys, others) == (length * (size - 1) // size, 0)
    assert ranks.run(size, received, {"kernel": None}, length, False) == [[0, rank * 2 * half] for rank in range(size)]
    window = EVERYTHING | {"window": (2, -1)}
    context = Spec(**window, head_dim=WIDTH).context
    assert context == 5
    first, *_, last = ranks.run(size, received, window, length, True)
    assert first == [0, 0, context, context + 2]
    assert last == [context, context + 2, 0, 0]  # its chunks lie side by side
    assert ranks.run(size, received, EVERYTHING, length, True, 3) == ranks.run(size, received, window, length, True)


def differentiate_twice(group: ProcessGroup) -> None:
    cp = ContextParallel(built({"kernel": None}), group)
    q, v = torch.randn(1, 1, 4, WIDTH).double().requires_grad_(), torch.randn(1, 1, 4, 24).double()
    (gradient,) = torch.autograd.grad(cp(q, q, v).sum(), q, create_graph=True)
    with pytest.raises(BackendError, match="differentiable once"):
        gradient.sum().backward()


def test_differentiable_once(ranks: Ranks) -> None:
    ranks.run(2, differentiate_twice)


# ---- Packed documents


def compare_documents(
    group: ProcessGroup, stages: dict[str, Any], balanced: bool, kv_heads: int, lengths: list[int]
) -> None:
    op = built(stages)
    one, grad_out = random(op.plan.spec, 1, kv_heads, sum(lengths))
    of_documents, _ = random(op.plan.spec, len(lengths), kv_heads, 1)
    tokens = {name: getattr(one, name)[0].transpose(0, 1) for name in "qkv"}
    inputs = replace(one, **tokens, parameters=of_documents.parameters)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    cp = ContextParallel(op, group, balanced=balanced)
    run = over_ranks(cp, 0, cu_seqlens=cu_seqlens, max_seqlen=max(lengths))
    eager = eager_op(op.plan.spec, return_lse=True)
    alone = documents_op(lambda *x, document, **weights: eager(*x, **weights), lengths, lengths, inputs.axes)
    grad_out = grad_out[0].transpose(0, 1)
    expected = results(lambda *x, **weights: alone(*x, **weights)[0], inputs, grad_out)
    torch.testing.assert_close(results(run, inputs, grad_out), expected)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_of_documents(ranks: Ranks, lengths: list[int], name: str) -> None:
    number = len(lengths) + [*CONDITIONS].index(name)
    stages = EVERYTHING if number % 2 else PIPELINES[number]
    ranks.run(SIZES[number // 2 % 2], compare_documents, stages | CONDITIONS[name], number % 3 == 0, 2, lengths)


@every_size
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", ["causal", *MASKS])
def test_documents(ranks: Ranks, size: int, lengths: list[int], name: str) -> None:
    balanced, kv_heads = len(lengths) % 2 == size % 2, size % 2 + 1
    ranks.run(size, compare_documents, EVERYTHING | MASKS.get(name, {}), balanced, kv_heads, lengths)


# ---- The layer

LAYER = EVERYTHING | {"head_dim": WIDTH, "n_kv_heads": 2, "group_norm": True, "gate": "scalar", "dtype": torch.float64}
LEARNED = {"logits": "s + table[h, min(5, i - j)]", "parameters": {"table": "h,6"}, "sink": True}


def layers(group: ProcessGroup) -> tuple[MultiTokenAttention, MultiTokenAttention]:
    """A layer with all tokens, and one with the same parameters whose tokens are spread over ranks."""
    torch.manual_seed(0)
    whole = MultiTokenAttention(48, HEADS, **LAYER, **LEARNED)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    mesh = DeviceMesh.from_group(group, "cpu")
    spread = MultiTokenAttention(48, HEADS, **LAYER, **LEARNED, context_parallel=mesh)
    spread.load_state_dict(whole.state_dict())
    return whole, spread


def gradients(layer: torch.nn.Module) -> list[Tensor]:
    return [x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in layer.parameters()]


def compare_layer(group: ProcessGroup, length: int, packed: bool) -> None:
    whole, spread = layers(group)
    cp = spread.context_parallel
    x, grad = torch.randn(2, 1 if packed else 2, length, 48, dtype=torch.float64)
    documents = {"cu_seqlens": torch.tensor([0, 5, 5, 20, length], dtype=torch.int32)} if packed else {}
    leaf, mine = x.clone().requires_grad_(), cp.shard(x, 1).requires_grad_()
    expected, local = whole(leaf, **documents), spread(mine, **documents, length=length)
    expected.backward(grad)
    local.backward(cp.shard(grad, 1))
    torch.testing.assert_close(local, cp.shard(expected, 1))
    torch.testing.assert_close(mine.grad, cp.shard(leaf.grad, 1))
    for ours in gradients(spread):
        dist.all_reduce(ours, group=group)
    torch.testing.assert_close(gradients(spread), gradients(whole))


@every_size
@pytest.mark.parametrize(("length", "packed"), [(36, False), (31, False), (36, True), (31, True)])
def test_layer(ranks: Ranks, size: int, length: int, packed: bool) -> None:
    """Parameters' gradients on each rank are those of its tokens, whose sum is the gradient."""
    ranks.run(size, compare_layer, length, packed)


def compare_data_parallel(group: ProcessGroup, fsdp: dict[str, Any] | None, compiled: bool) -> None:
    """The loss is a mean over tokens, of which ranks have equally many."""
    whole, spread = layers(group)
    cp = spread.context_parallel
    x = torch.randn(2, 36, 48, dtype=torch.float64)
    parallel: Any = DistributedDataParallel(spread, process_group=group) if fsdp is None else spread
    if fsdp is not None:
        fully_shard(spread, mesh=DeviceMesh.from_group(group, "cpu"), **fsdp)
    if compiled:
        spread.compile(fullgraph=True, backend="aot_eager")
    whole(x).square().mean().backward()
    parallel(cp.shard(x, 1)).square().mean().backward()
    torch.testing.assert_close(gradients(spread), gradients(whole))


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


@every_size
@pytest.mark.parametrize(("fsdp", "compiled"), [(None, False), ({}, False), ({}, True), (OFFLOADED, False)])
def test_data_parallel(ranks: Ranks, size: int, fsdp: dict[str, Any] | None, compiled: bool) -> None:
    """DDP and FSDP over the ranks that share sequences take the mean of their gradients, as of other data."""
    ranks.run(size, compare_data_parallel, fsdp, compiled)


def sharded_layer(group: ProcessGroup | None) -> tuple[MultiTokenAttention, torch.optim.Optimizer]:
    """A layer with all kinds of parameters, sharded unless the process is alone, some of whose ranks hold nothing."""
    layer = MultiTokenAttention(
        48, 4, **EVERYTHING | {"post_mixed_heads": 2}, head_dim=16, gate="scalar", group_norm=True
    )
    if group is not None:
        fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    return layer, torch.optim.AdamW(layer.parameters(), lr=1e-2)


def whole_state(layer: MultiTokenAttention, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The whole parameters, the state of the optimizer, and the layer's output."""
    moments = {f"{name} {key}": x for name, y in layer.named_parameters() for key, x in optimizer.state[y].items()}
    found = {**dict(layer.named_parameters()), **moments}
    x = torch.randn(1, 20, 48, generator=torch.Generator().manual_seed(3))
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    return {name: x.detach().clone() for name, x in (whole | {"output": layer(x)}).items()}


def save_shards(group: ProcessGroup, folder: str) -> dict[str, Tensor]:
    """The state of a layer after a step, as it is saved."""
    torch.manual_seed(1)
    layer, optimizer = sharded_layer(group)
    layer(torch.randn(1, 20, 48)).square().mean().backward()
    optimizer.step()
    weights, moments = get_state_dict(layer, optimizer)
    dcp.save({"layer": weights, "optimizer": moments}, checkpoint_id=folder, process_group=group)
    return whole_state(layer, optimizer)


def load_shards(group: ProcessGroup | None, folder: str) -> dict[str, Tensor]:
    """The state of another layer, as it is loaded."""
    torch.manual_seed(2)
    layer, optimizer = sharded_layer(group)
    weights, moments = get_state_dict(layer, optimizer)
    state = {"layer": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_state_dict(layer, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return whole_state(layer, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_for_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks.run(2, save_shards, str(tmp_path))[0]
    assert len(expected) == 11 * 4 + 1  # each parameter with three tensors of the optimizer, and the output
    for found in (load_shards(None, str(tmp_path)), *ranks.run(3, load_shards, str(tmp_path))):
        assert found.keys() == expected.keys()
        assert [name for name, x in expected.items() if not torch.equal(x, found[name])] == []


def copy_layer(group: ProcessGroup) -> None:
    _, spread = layers(group)
    copied, x = copy.deepcopy(spread), torch.randn(1, 12, 48, dtype=torch.float64)
    cp = spread.context_parallel
    torch.testing.assert_close(copied(cp.shard(x, 1)), spread(cp.shard(x, 1)))


def test_layers_are_copied(ranks: Ranks) -> None:
    ranks.run(2, copy_layer)


# ---- Shards


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("size", range(1, 5))
@pytest.mark.parametrize("length", [0, 1, 5, 8, 23, 64])
def test_every_row_is_held_once(length: int, size: int, balanced: bool) -> None:
    sharding = Sharding(length, size, balanced)
    chunks = [sharding.chunk(number) for number in range(sharding.chunks)]
    lengths = [chunk.count for chunk in chunks]
    assert [row for chunk in chunks for row in chunk] == list(range(length))
    assert sorted(row for held in sharding.held for chunk in held for row in chunk) == list(range(length))
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) == (not sharding.is_even)
    assert sharding.held_by(size - 1)[1:] == [Rows(length, length)] * balanced  # one call serves the last rank


@pytest.mark.parametrize("stages", [{"kernel": None}, {"kernel": (4, 3)}, {"kernel": (4, 3), "post_kernel": (3, 2)}])
@pytest.mark.parametrize("mask", MASKS)
def test_calls_take_what_their_rows_see(stages: dict[str, Any], mask: str) -> None:
    """The queries that outputs depend on and all keys that these see; no other rows come from other ranks."""
    spec, length = Spec(**stages, **MASKS[mask], head_dim=WIDTH), 29
    sharding = Sharding(length, 3, balanced=True)
    for chunk in map(sharding.chunk, range(sharding.chunks)):
        call = ChunkCall.of(chunk, length, spec)
        queries = {row - before for row in chunk for before in range(spec.context + 1) if row >= before}
        seen = {
            key
            for key, row in itertools.product(range(length), queries)
            if (spec.left is None or key >= row - spec.left) and (spec.right is None or key <= row + spec.right)
        }
        assert {*call.context, *call.chunk} == queries
        assert set(call.keys) == seen
        assert call.queries.stop == call.keys.stop or (spec.left, spec.right) == (None, None)


@pytest.mark.parametrize("lengths", [None, *LENGTHS], ids=str)
@pytest.mark.parametrize("mask", ["prefix", "chunks", "one number"])
def test_parts_count_from_the_begin_of_a_sequence(mask: str, lengths: list[int] | None) -> None:
    """Queries and keys of each sequence, after what a call adds to the places that it counts itself."""
    op = of_parts(built({"kernel": (4, 3)} | CONDITIONS[mask]))
    assert {name for name, _ in op.plan.spec.parameters} >= {"positions_before", "keys_before"}
    boundaries = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ends = [0, 37] if boundaries is None else boundaries.tolist()
    sharding, longest = Sharding(ends[-1], 3, balanced=True), None if lengths is None else max(lengths)
    for chunk in map(sharding.chunk, range(sharding.chunks)):
        call = ChunkCall.of(chunk, ends[-1], op.plan.spec, longest)
        before = Before.of(call, torch.zeros(1, 2, call.queries.count, WIDTH), boundaries)
        for number, (begin, end) in enumerate(itertools.pairwise(ends)):
            queries, keys = ([row - begin for row in rows if begin <= row < end] for rows in (call.queries, call.keys))
            aligned = range(len(keys) - len(queries), len(keys))
            assert [place + int(before.positions[number]) for place in aligned] == queries
            assert not keys or int(before.keys[number]) == keys[0]


@pytest.mark.parametrize("length", [0, 1, 3, 29])
@pytest.mark.parametrize("mask", MASKS)
def test_keys_are_brought_once(mask: str, length: int) -> None:
    """To one tensor for calls whose keys overlap, which holds no rows but theirs."""
    spec, sharding = Spec((4, 3), **MASKS[mask], head_dim=WIDTH), Sharding(length, 3, balanced=True)
    for chunks in sharding.held:
        calls = [ChunkCall.of(chunk, length, spec) for chunk in chunks]
        new, tensors = fresh(calls), regions(calls)
        taken = [set(call.keys) for call in calls]
        assert [set(rows) for rows in new] == [taken[0], taken[1] - taken[0]]
        assert all(keys <= set(region) for keys, region in zip(taken, tensors, strict=True))
        assert set().union(*map(set, tensors)) == taken[0] | taken[1]
        assert tensors[0] == tensors[1] or not set(tensors[0]) & set(tensors[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_a_chunk_are_summed(dtype: torch.dtype) -> None:
    """Rows to which none, one or several contribute; in fp32 where they are bf16, rounded once."""
    places = [(0, 0, 4), (0, 2, 9), (1, 0, 5), (0, 3, 8), (0, 3, 4), (0, 12, 13)]
    parts = [exchange.Part(chunk, slice(a, b), torch.randn(b - a, 64).to(dtype)) for chunk, a, b in places]
    result = torch.full((14, 64), torch.nan, dtype=dtype)
    exchange.total(parts, 0, result)
    expected = torch.zeros(14, 64, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    for part in parts:
        if part.chunk == 0:
            expected[part.rows] += part.x
    assert torch.equal(result, expected.to(dtype))
    for first in range(1, len(parts)):  # that are combined while the others are on their way
        own = exchange.combined(parts[:first])
        rows = [(part.chunk, row) for part in own for row in range(part.rows.start, part.rows.stop)]
        assert len(rows) == len(set(rows))
        exchange.total([*own, *parts[first:]], 0, result.fill_(torch.nan))
        assert torch.equal(result, expected.to(dtype))


def shard_and_back(group: ProcessGroup, length: int, balanced: bool) -> list[int]:
    cp = ContextParallel(built({"kernel": (3, 3)}), group, balanced=balanced)
    x = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0))
    local = cp.shard(x, 1)
    assert torch.equal(cp.unshard(local, 1, length=length), x)
    assert cp.length(local.shape[1], length) == length
    return cp.shard(torch.arange(length), 0).tolist()


def test_balanced_shards(ranks: Ranks) -> None:
    assert ranks.run(2, shard_and_back, 8, True) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert ranks.run(2, shard_and_back, 6, True) == [[0, 1, 5], [2, 3, 4]]
    assert ranks.run(3, shard_and_back, 4, True) == [[0], [1], [2, 3]]


def test_shards_of_one_chunk(ranks: Ranks) -> None:
    assert ranks.run(2, shard_and_back, 5, False) == [[0, 1, 2], [3, 4]]
    assert ranks.run(3, shard_and_back, 2, False) == [[0], [1], []]


# ---- Errors, before anything is sent


def refused(group: ProcessGroup) -> dict[str, str]:
    """Messages of what must not be asked for."""
    op = built({"kernel": (3, 3)})
    cp, mesh = ContextParallel(op, group), DeviceMesh.from_group(group, "cpu")
    q, v = (torch.randn(1, HEADS, 6, width, dtype=torch.float64) for width in (WIDTH, 24))
    weight = torch.randn(HEADS, 3, 3)
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, q, v)]
    layer = MultiTokenAttention(48, HEADS, head_dim=WIDTH, context_parallel=mesh)
    square = DeviceMesh("cpu", torch.tensor([[1, 2]]), _init_backend=False)
    calls: dict[str, Callable[[], object]] = {
        "op": lambda: ContextParallel(mtagen.reference, group),
        "group": lambda: ContextParallel(op, [0, 1]),
        "mesh": lambda: ContextParallel(op, square),
        "balanced": lambda: ContextParallel(op, group, balanced=1),
        "uneven": lambda: cp(q[:, :, 1:], q[:, :, 1:], v[:, :, 1:], weight),
        "length": lambda: cp(q, q, v, weight, length=14),
        "length of a kind": lambda: cp(q, q, v, weight, length=12.0),
        "keys": lambda: cp(q, q[:, :, 1:], v[:, :, 1:], weight),
        "weight": lambda: cp(q, q, v),
        "scale": lambda: cp(q, q, v, weight, scale=torch.inf),
        "unshard": lambda: cp.unshard(q, 2, length=14),
        "documents": lambda: cp.varlen(*packed, weight, cu_seqlens=cu_seqlens + 1),
        "batches as documents": lambda: cp.varlen(q, q, v, weight, cu_seqlens=cu_seqlens),
        "layer's dropout": lambda: MultiTokenAttention(48, HEADS, head_dim=WIDTH, dropout=0.1, context_parallel=group),
        "cache": lambda: layer.new_cache(1, 8),
        "layer's length": lambda: MultiTokenAttention(48, HEADS, head_dim=WIDTH)(torch.randn(1, 4, 48), length=8),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (InputError, SpecError) as error:
            messages[name] = str(error)
    assert messages.keys() == calls.keys()
    return messages


def test_errors(ranks: Ranks) -> None:
    first, second = ranks.run(2, refused)
    assert first["uneven"] == (
        "length: got None; 5 rows on rank 0 of 2 cannot be cut into equal chunks; "
        "legal: the number of rows of the whole sequence"
    )
    assert second["length"] == "rows: got 6; rank 1 of 2 holds 7 of 14 rows; legal: 7, the rows that shard() returns"
    begins = {name: name for name in ("op", "balanced", "weight", "scale", "cache")}
    begins |= {"group": "group_or_mesh", "mesh": "group_or_mesh", "uneven": "length", "length": "rows"}
    begins |= {"length of a kind": "length", "keys": "rows of k", "unshard": "rows", "documents": "cu_seqlens"}
    begins |= {"batches as documents": "q.shape", "layer's dropout": "dropout", "layer's length": "length"}
    for name, message in first.items():
        assert message.startswith(f"{begins[name]}: got ")
        assert message.count("; ") >= 2


# ---- The page


@pytest.mark.parametrize(("number", "check"), [(0, "assert error < 1e-5"), (1, "assert y.isfinite().all()")])
def test_page_by_torchrun(tmp_path: Path, number: int, check: str) -> None:
    programs = [
        block.text for block in blocks("docs/distributed.md", "python") if "destroy_process_group" in block.text
    ]
    program = tmp_path / "program.py"
    program.write_text(f"{programs[number]}\n{check}\n", encoding="utf-8")
    made = torchrun(2, program)
    assert made.returncode == 0, made.stderr


# ---- Heads spread over ranks

BY_HEADS = LAYER | {"post_mixed_heads": 2}


def compare_heads(group: ProcessGroup, options: dict[str, Any], sequence: bool) -> None:
    torch.manual_seed(0)
    whole = MultiTokenAttention(48, HEADS, **BY_HEADS | options)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    mesh, layout = DeviceMesh.from_group(group, "cpu"), Shard(1) if sequence else Replicate()
    style = HeadParallel(input_layouts=layout, output_layouts=layout)
    spread = parallelize_module(copy.deepcopy(whole), mesh, style)
    x, grad = torch.randn(2, 2, 24, 48, dtype=torch.float64)

    def mine(x: Tensor) -> Tensor:
        return x.chunk(group.size(), 1)[group.rank()] if sequence else x

    leaf, local = x.clone().requires_grad_(), mine(x).clone().requires_grad_()
    expected, out = whole(leaf), spread(local)
    expected.backward(grad)
    out.backward(mine(grad))
    torch.testing.assert_close(out, mine(expected))
    torch.testing.assert_close(local.grad, mine(leaf.grad))
    torch.testing.assert_close(gradients(spread), gradients(whole))
    parts = {name: x.placements for name, x in spread.named_parameters()}
    assert parts["mta_kernel"] == (Shard(0),)
    assert parts["subln.weight"] == (Replicate(),)
    assert [x.grad.placements for x in spread.parameters()] == [*parts.values()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": HEADS, "gate": "channel", "mixed_heads": None},
        {"post_mixed_heads": 1},
        LEARNED,
        {"scores": "s * scale + bias[h, min(3, i - j)]", "parameters": {"scale": "", "bias": "h,4"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence", [False, True])
def test_heads(ranks: Ranks, options: dict[str, Any], sequence: bool) -> None:
    ranks.run(2, compare_heads, options, sequence)


OF_HEADS: dict[str, Any] = {"post_mixed_heads": None, "logits": "s / (h + 1)"}
IN_A_TABLE: dict[str, Any] = {"post_mixed_heads": None, "logits": "s + table[min(h, 3)]", "parameters": {"table": "4"}}


def refused_heads(group: ProcessGroup) -> list[str]:
    mesh, messages = DeviceMesh.from_group(group, "cpu"), []
    for options in ({}, {"post_mixed_heads": None, "dropout": 0.1}, {"n_kv_heads": 1}, OF_HEADS, IN_A_TABLE):
        with pytest.raises(SpecError) as raised:
            parallelize_module(MultiTokenAttention(48, HEADS, **LAYER | options), mesh, HeadParallel())
        messages.append(str(raised.value))
    with pytest.raises(SpecError, match="must be the layer"):
        parallelize_module(torch.nn.Linear(3, 3), mesh, HeadParallel())
    return messages


def test_heads_that_are_not_spread(ranks: Ranks) -> None:
    mixed, dropout, keys, heads, in_a_table = ranks.run(2, refused_heads)[0]
    assert mixed == (
        "post_mixed_heads: got 4; a rank has 2 heads, and cannot mix them with others; legal: a divisor of 2, or "
        "context_parallel=..., which spreads tokens and mixes all heads"
    )
    assert "dropout is not supported" in dropout
    assert "n_kv_heads: got 1" in keys
    assert "logits: got 's/(h + 1)'; reads h" in heads
    assert "logits: got 's + table[min(3, h)]'; reads h" in in_a_table


def generate_by_heads(group: ProcessGroup) -> None:
    torch.manual_seed(0)
    whole, x = MultiTokenAttention(48, HEADS, **BY_HEADS), torch.randn(2, 12, 48, dtype=torch.float64)
    spread = parallelize_module(copy.deepcopy(whole), DeviceMesh.from_group(group, "cpu"), HeadParallel())
    with torch.no_grad():
        cache = spread.new_cache(2, 12)
        parts = [spread(part, cache=cache) for part in x.split([9, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole(x))
    assert cache.keys.shape[1] == 1


def test_generation_by_heads(ranks: Ranks) -> None:
    ranks.run(2, generate_by_heads)


def compare_all_at_once(group: ProcessGroup, tokens: bool) -> None:
    """A model on a mesh of two dimensions: heads over one; batches, or tokens, and FSDP over the other."""
    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("other", "heads"))
    whole, x = MultiTokenAttention(48, HEADS, **BY_HEADS), torch.randn(2, 16, 48, dtype=torch.float64)
    spread = MultiTokenAttention(48, HEADS, **BY_HEADS, context_parallel=mesh["other"] if tokens else None)
    spread.load_state_dict(whole.state_dict())
    model = parallelize_module(torch.nn.ModuleDict({"attention": spread}), mesh["heads"], {"att*": HeadParallel()})
    fully_shard(model["attention"], mesh=mesh["other"])
    mine = spread.context_parallel.shard(x, 1) if tokens else x[mesh["other"].get_local_rank()].unsqueeze(0)
    whole(x).square().mean().backward()
    spread(mine).square().mean().backward()
    torch.testing.assert_close(gradients(spread), gradients(whole))


@pytest.mark.parametrize("tokens", [False, True])
def test_everything_composes(ranks: Ranks, tokens: bool) -> None:
    ranks.run(4, compare_all_at_once, tokens)
