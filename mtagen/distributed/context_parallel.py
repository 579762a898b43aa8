"""Attention over sequences whose rows are spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d, get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import resolve_scale
from ..errors import BackendError, InputError, explain
from ..ops import flops, library
from ..ops.attention import AttentionOp, autocast
from ..ops.inputs import check_boundaries, check_call, check_packed
from ..spec import WEIGHTS, Spec
from .exchange import Exchange, Part, Transfer, begin, combined, sum_dtype, total
from .sharding import Call, Rows, Sharding, fresh, regions


class ContextParallel:
    """An op on sequences that are spread over the ranks of a group: each makes the outputs of the rows that it holds.

    A rank holds one or two chunks of each sequence; two that lie side by side count as one. For a chunk it calls the op
    with the chunk's queries, the ``spec.context`` queries before them that convolutions read, and all keys that these
    see, so that a row of scores is never cut. Results are those of one process with the whole sequence, for every
    pipeline and mask.

    What a chunk's call takes moves in one group of sends and receives. Both chunks' begin at once, so that those of the
    second are under way while the first is computed. The backward pass moves keys and values again, for between the
    passes a rank keeps its own rows only, and then brings the gradients of keys, values and earlier queries back to the
    ranks that hold them, which add them up, in fp32 those of keys and values. With W ranks, N rows and causal
    attention, a rank receives N (1 - 1 / W) rows of keys and values at most in the forward pass, in the backward pass
    those and at most as many rows of gradients. Meanwhile it holds about N rows, and twice as many gradients of them.
    With a window it receives what the window reaches.

    Gradients of queries, keys and values are complete. Gradients of weights are those of this rank's outputs: the sum
    over ranks is the whole gradient, as of any parameter that is used on a part of the tokens. Data parallelism over
    these ranks, or FSDP, takes the mean instead, which is right where the loss is a mean of the ranks' losses.

    There is no dropout: which entries a call drops follows from their places in the call. To ``torch.compile`` and
    selective checkpointing a call is one op, ``mtagen::context_parallel_forward``, and its backward pass another.

    Args:
        op: what :func:`mtagen.build` returns.
        group_or_mesh: the ranks, in the order of the rows that they hold: a group, or a mesh of one dimension.
        balanced: whether sequences are cut into 2W chunks, of which rank r holds r and 2W-1-r, so that all ranks have
            the same work though later rows of causal attention see more keys; else into W chunks, of which it holds r,
            which takes a quarter less traffic where all rows see all keys. Ops of one model share tensors if they
            agree.

    Attributes:
        op: the op.
        balanced: as given.
        group: the ranks.
        rank: this process's number among them.
        ranks: W.

    Raises:
        InputError: an argument does not fit.
    """

    def __init__(self, op: AttentionOp, group_or_mesh: ProcessGroup | DeviceMesh, *, balanced: bool = True) -> None:
        if not isinstance(op, AttentionOp):
            raise InputError(explain("op", type(op).__name__, "must be a built op", "what mtagen.build returns"))
        if not isinstance(balanced, bool):
            raise InputError(explain("balanced", balanced, "must be a bool", (True, False)))
        self.op, self.balanced = op, balanced
        self.group = _group(group_or_mesh)
        self.rank, self.ranks = get_rank(self.group), get_world_size(self.group)

    def __repr__(self) -> str:
        return f"<{self.op!r} on rank {self.rank} of {self.ranks}, balanced={self.balanced}>"

    def __copy__(self) -> ContextParallel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Itself, as it never changes: copies of a model are in the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        """A group of processes exists in these processes only.

        Raises:
            BackendError: always.
        """
        rule = "its group of ranks is of this process, so that it cannot be pickled"
        raise BackendError(explain("ContextParallel", self, rule, "model.state_dict(), and a new model to load it"))

    def length(self, rows: int, length: int | None = None) -> int:
        """N, rows of the whole sequence of which this rank holds so many.

        Args:
            rows: those that :meth:`shard` gives this rank.
            length: N; default W times ``rows``, which is right where all chunks are as long as each other.

        Raises:
            InputError: this rank holds another number of N rows, or N must be told.
        """
        return self._sharding(rows, length).length

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """The rows that this rank holds of tokens, positions, labels or whatever all ranks have.

        Args:
            x: the same on all ranks. Nothing is communicated.
            dim: the axis of a sequence's rows, of any length: chunks differ by one row at most, the first ones being
                longer, and are empty where there are more chunks than rows.

        Returns:
            A copy of the rows, differentiable.
        """
        held = Sharding(x.shape[dim], self.ranks, self.balanced).held_by(self.rank)
        return torch.cat([x.narrow(dim, rows.start, rows.count) for rows in held], dim)

    def unshard(self, x: Tensor, dim: int, *, length: int | None = None) -> Tensor:
        """The whole tensor on every rank, e.g. of outputs. It has no gradient, and breaks a graph of ``torch.compile``.

        Args:
            x: the rows that :meth:`shard` gives.
            dim: their axis.
            length: rows of the whole; default W times those of ``x``, which is right where all chunks are as long as
                each other.

        Raises:
            InputError: ``x`` has another number of rows than ``length`` makes this rank's.
        """
        sharding = self._sharding(x.shape[dim], length)
        everything = Exchange(sharding.held, self.ranks * [Rows(0, sharding.length)], self.rank)
        with torch.no_grad():
            rows = x.movedim(dim, 0)
            chunks = rows.split_with_sizes([chunk.count for chunk in sharding.held_by(self.rank)])
            whole = rows.new_empty(sharding.length, *rows.shape[1:])
            transfer = everything.send(chunks, whole)
            begin([transfer], self.group, x.device)
            everything.copy_own(chunks, whole)
            transfer.wait()
            return whole.movedim(0, dim)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        head_weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        post_head_weight: Tensor | None = None,
        scale: float | None = None,
        length: int | None = None,
    ) -> Tensor:
        """The op's outputs of the rows that this rank holds; differentiable as the op is.

        Args:
            q: ``(B, H, N_local, D)``, this rank's rows of the queries.
            k: ``(B, Hkv, N_local, D)``, the same rows of the keys.
            v: ``(B, Hkv, N_local, DV)``, the same rows of the values.
            weight, head_weight, post_weight, post_head_weight, scale: as of a call of the op, the same on all ranks.
            length: N, rows of the whole sequence; default W times N_local, which is right where all chunks are as long
                as each other.

        Returns:
            ``(B, H, N_local, DV)`` in q's dtype.

        Raises:
            InputError: an argument does not fit; nothing was communicated.
            BackendError: the tensors are on a device that the op was not built for.
        """
        spec = self.op.plan.spec
        q, k, v = autocast(q, k, v)
        weights = check_call(spec, self.op.dtypes, q, k, v, (weight, head_weight, post_weight, post_head_weight))
        sharding = self._sharding_of(q, k, 2, length)
        return self._attend(q, k, v, weights, scale, sharding)

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None = None,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        head_weight: Tensor | None = None,
        post_weight: Tensor | None = None,
        post_head_weight: Tensor | None = None,
        scale: float | None = None,
        length: int | None = None,
    ) -> Tensor:
        """The same of packed documents, each of which is a sequence of its own; chunks end anywhere in documents.

        Args:
            q: ``(N_local, H, D)``, this rank's rows of the queries of all documents.
            k: ``(N_local, Hkv, D)``, the same rows of the keys.
            v: ``(N_local, Hkv, DV)``, the same rows of the values.
            weight, head_weight, post_weight, post_head_weight, scale: as of a call of the op, the same on all ranks.
            cu_seqlens: ``(documents + 1,)`` int32 on q's device, the same on all ranks: where each document begins
                among all rows, and where the last one ends; rows behind it get zeros.
            max_seqlen: rows of the longest document, or more; default N. Keys come from no farther away.
            length: N, rows of all documents; default as of a call.

        Returns:
            ``(N_local, H, DV)`` in q's dtype.

        Raises:
            InputError: an argument does not fit; nothing was communicated.
            BackendError: the tensors are on a device that the op was not built for.
            PlanError: no backend has kernels of this op for packed documents.
        """
        spec = self.op.plan.spec
        q, k, v = autocast(q, k, v)
        weights = check_packed(spec, self.op.dtypes, q, k, v, (weight, head_weight, post_weight, post_head_weight))
        sharding = self._sharding_of(q, k, 0, length)
        longest = sharding.length if max_seqlen is None else max_seqlen
        check_boundaries(("cu_seqlens", cu_seqlens), ("max_seqlen", longest), sharding.length, q.device)
        return self._attend(q, k, v, weights, scale, sharding, cu_seqlens, longest)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: list[Tensor | None],
        scale: float | None,
        sharding: Sharding,
        *documents: Any,
    ) -> Tensor:
        scale, ours = resolve_scale(scale, self.op.plan.spec.head_dim), (self.group.group_name, self.rank, self.ranks)
        plan = _Plan(scale, self.op._key, *ours, self.balanced, sharding.length, *documents)
        out: Tensor = library.run("context_parallel_forward", q, k, v, *weights, *plan)[0]
        return out

    def _sharding_of(self, q: Tensor, k: Tensor, dim: int, length: int | None) -> Sharding:
        """How the sequence of these queries and keys is cut.

        Raises:
            InputError: they are not the same rows, or not those of this rank.
        """
        if q.shape[dim] != k.shape[dim]:
            rule = "queries and keys must be the same rows of a sequence"
            raise InputError(explain("rows of k", k.shape[dim], rule, f"{q.shape[dim]}, as of q"))
        return self._sharding(q.shape[dim], length)

    def _sharding(self, rows: int, length: int | None) -> Sharding:
        """How the sequence is cut of which this rank has so many rows.

        Raises:
            InputError: it should have another number of rows, or the length must be told.
        """
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
            raise InputError(
                explain("length", length, "must be the rows of the whole sequence", "0, 1, 2, ..., or None")
            )
        sharding = Sharding(rows * self.ranks if length is None else length, self.ranks, self.balanced)
        if length is None and not sharding.is_even:
            rule = f"{rows} rows on rank {self.rank} of {self.ranks} are no chunks of one length"
            raise InputError(explain("length", length, rule, "rows of the whole sequence"))
        mine = sum(chunk.count for chunk in sharding.held_by(self.rank))
        if rows != mine:
            rule = f"rank {self.rank} of {self.ranks} holds {mine} of {length} rows"
            raise InputError(explain("rows", rows, rule, "those that shard() gives"))
        return sharding


@dataclass(frozen=True)
class _Step:
    """What makes the outputs of one of a rank's chunks. All ranks take their steps together.

    Attributes:
        call: this rank's call of the op.
        start: where the chunk begins in the rows that this rank holds.
        context: brings the queries before each rank's chunk.
        region: the rows of the tensor in which this rank has the call's keys and values, maybe with other calls'.
        keys: brings to such tensors the keys and values that earlier steps have not brought.
        gradients: brings back those of the keys and values that each rank's call takes.
    """

    call: Call
    start: int
    context: Exchange
    region: Rows
    keys: Exchange
    gradients: Exchange

    def of_region(self, x: Tensor, rows: Rows) -> Tensor:
        """Some rows of the tensor of the region."""
        return x.narrow(0, rows.start - self.region.start, rows.count)


def _calls(spec: Spec, sharding: Sharding, rank: int, longest: int | None) -> list[Call]:
    """A rank's calls of the op, one for each of its chunks."""
    return [Call.of(chunk, sharding.length, spec, longest) for chunk in sharding.held_by(rank)]


@lru_cache(maxsize=256)
def _steps(spec: Spec, sharding: Sharding, rank: int, longest: int | None) -> tuple[_Step, ...]:
    """What a rank does, in this order. The layers of a model, and their two passes, do the same."""
    held, steps, start = sharding.held, [], 0
    by_rank = [_calls(spec, sharding, each, longest) for each in range(sharding.ranks)]
    by_step = zip(
        regions(by_rank[rank]), zip(*by_rank, strict=True), zip(*map(fresh, by_rank), strict=True), strict=True
    )
    for region, calls, new in by_step:
        context = Exchange(held, [call.context for call in calls], rank)
        gradients = Exchange(held, [call.keys for call in calls], rank)
        steps.append(_Step(calls[rank], start, context, region, Exchange(held, new, rank, region), gradients))
        start += calls[rank].own.count
    return tuple(steps)


class _Lanes:
    """Streams of a GPU for the calls of a forward pass, which run beside each other; a context manager.

    The second call comes first where both are ready: its chunk has later rows, whose CTAs take longer, and those of the
    other fill the multiprocessors that the last of them leave idle. That counts where sequences are short: of 131,072
    rows on two H100s, both calls took 0.8 % longer than one after the other.

    The side stream begins after all that the current stream was given before, and each waits for the other at the end:
    memory belongs to the stream that it was allocated for, and what the other one reads or writes must live until then.

    Args:
        device: where; on the CPU calls follow each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.current_stream(device), _side_stream(device)]
            self._streams[1].wait_stream(self._streams[0])

    def __enter__(self) -> _Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.join()
        if self._streams:
            self._streams[1].wait_stream(self._streams[0])

    def lane(self, number: int) -> AbstractContextManager[Any]:
        """The stream of one call; of at most two."""
        return torch.cuda.stream(self._streams[number]) if self._streams else nullcontext()

    def join(self) -> None:
        """The current stream waits for all calls."""
        if self._streams:
            self._streams[0].wait_stream(self._streams[1])


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _Plan(NamedTuple):
    """What the registered ops take after the tensors, and what follows from it.

    Schemas hold the group's name, as those of PyTorch's own functional collectives do. They hold the rank, too, because
    shapes depend on it: without it the graphs of all ranks would be equal, and one rank get from the cache of
    ``torch.compile`` what was compiled for another. Where no documents are packed, ``cu_seqlens`` is None or left out.
    """

    scale: float
    key: str
    group_name: str
    rank: int
    ranks: int
    balanced: bool
    length: int
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0

    @property
    def spec(self) -> Spec:
        """The op's."""
        return library.executor_of(self.key).spec

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        group: ProcessGroup = distributed_c10d._resolve_process_group(self.group_name)  # type: ignore[arg-type,attr-defined]
        return group

    @property
    def calls(self) -> list[Call]:
        """This rank's, where ``length`` may be a symbol."""
        return _calls(*self._sizes)

    @property
    def steps(self) -> tuple[_Step, ...]:
        """This rank's."""
        return _steps(*self._sizes)

    @property
    def _sizes(self) -> tuple[Spec, Sharding, int, int | None]:
        sharding = Sharding(self.length, self.ranks, self.balanced)
        return self.spec, sharding, self.rank, None if self.cu_seqlens is None else self.max_seqlen

    @property
    def dim(self) -> int:
        """The axis of rows of q, k, v and the output."""
        return 2 if self.cu_seqlens is None else 0

    def of_call(self, call: Call) -> tuple[Any, ...]:
        """What ``mtagen::forward`` and ``mtagen::backward`` take after the tensors of a call."""
        if self.cu_seqlens is None:
            return self.scale, self.key
        rows = call.queries, call.keys
        places = (self.cu_seqlens.clamp(each.start, each.stop) - each.start for each in rows)
        return self.scale, self.key, *places, *(min(self.max_seqlen, each.count) for each in rows)

    def rows_first(self, x: Tensor) -> Tensor:
        """A view of ``x`` as an exchange takes it."""
        return x.movedim(self.dim, 0)

    def from_rows(self, x: Tensor) -> Tensor:
        """A view of what an exchange gives, with the axes of q."""
        return x.movedim(0, self.dim)

    def own(self, x: Tensor, step: _Step) -> Tensor:
        """The rows of a step's chunk, of those that this rank holds."""
        return x.narrow(self.dim, step.start, step.call.own.count)

    def chunks(self, x: Tensor) -> list[Tensor]:
        """The rows of each chunk, of those that this rank holds, rows first."""
        return [self.rows_first(self.own(x, step)) for step in self.steps]

    def new_rows(self, x: Tensor, count: int) -> Tensor:
        """A tensor for so many rows like those of ``x``, rows first and side by side."""
        return x.new_empty(count, *self.rows_first(x).shape[1:])

    def side_by_side(self, x: Tensor) -> Tensor:
        """``x``, rows first and side by side, as an exchange sends them; a copy where they are not."""
        if self.rows_first(x).is_contiguous():
            return self.rows_first(x)
        made = self.new_rows(x, x.shape[self.dim])
        _copy(self.from_rows(made), x)
        return made

    def placed(self, x: Tensor) -> list[Tensor]:
        """The tensor of each step's region, with the rows of this rank's chunks, of keys or values, in their places."""
        made = {step.region: self.new_rows(x, step.region.count) for step in self.steps}
        for step in self.steps:
            _copy(self.from_rows(step.of_region(made[step.region], step.call.own)), self.own(x, step))
        return [made[step.region] for step in self.steps]

    def send(self, placed: Sequence[Tensor]) -> list[Transfer]:
        """What brings the other ranks' keys or values to the tensors of the steps' regions."""
        both = list(zip(self.steps, placed, strict=True))
        chunks = [step.of_region(x, step.call.own) for step, x in both]
        return [step.keys.send(chunks, x) for step, x in both]

    def seen(self, placed: Tensor, step: _Step) -> Tensor:
        """The keys or values that a step's call takes, of the tensor of its region."""
        return self.from_rows(step.of_region(placed, step.call.keys))

    def own_gradients(self, grads: Sequence[Tensor]) -> list[Part]:
        """What this rank's calls made of the gradients of the keys or values that it holds."""
        return combined([part for step, x in zip(self.steps, grads, strict=True) for part in step.gradients.own(x)])

    def gradients(self, x: Tensor, parts: list[Part], transfers: Sequence[Transfer]) -> Tensor:
        """Those of ``x``, keys or values, from parts and then what comes back."""
        for step, transfer in zip(self.steps, transfers, strict=True):
            parts += step.gradients.returned(transfer)
        made = self.new_rows(x, x.shape[self.dim])
        for number, step in enumerate(self.steps):
            total(parts, number, made.narrow(0, step.start, step.call.own.count))
        return self.from_rows(made)

    def extended(self, x: Tensor, step: _Step, before: Tensor | None = None) -> Tensor:
        """What a step's call takes of queries, outputs or their gradients.

        Args:
            x: the rows that this rank holds.
            step: whose rows are taken.
            before: the rows before the chunk, rows first; default zeros. Rows after it are zeros.
        """
        call, own = step.call, self.own(x, step)
        if call.queries.count == call.own.count:
            return own
        made = x.new_empty(*x.shape[: self.dim], call.queries.count, *x.shape[self.dim + 1 :])
        context, rows, padding = self._of_queries(made, call)
        if before is None:
            context.zero_()
        else:
            _copy(context, self.from_rows(before))
        _copy(rows, own)
        padding.zero_()
        return made

    def of_chunks(self, made: Sequence[Tensor], x: Tensor) -> Tensor:
        """``x``, filled with the chunks' rows of what each call made."""
        for step, each in zip(self.steps, made, strict=True):
            _copy(self.own(x, step), self._of_queries(each, step.call)[1])
        return x

    def _of_queries(self, x: Tensor, call: Call) -> tuple[Tensor, ...]:
        """The rows of a call before its chunk, the chunk's, and those after it."""
        return x.split_with_sizes([call.context.count, call.own.count, call.padding], self.dim)

    def like_call(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        """What a call takes, without numbers."""
        dim, sizes = self.dim, (call.queries.count, call.keys.count, call.keys.count)
        given = zip((q, k, v), sizes, strict=True)
        return [x.new_empty(*x.shape[:dim], size, *x.shape[dim + 1 :], device="meta") for x, size in given]


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """This rank's outputs, and for the backward pass the queries before each chunk, rows first, and log-sum-exps.

    Every rank takes part in every exchange, even where it has nothing to compute.
    """
    weights, plan = rest[: len(WEIGHTS)], _Plan(*rest[len(WEIGHTS) :])
    steps, queries, keys, values = plan.steps, plan.chunks(q), plan.placed(k), plan.placed(v)
    contexts = [x.new_empty(step.call.context.count, *x.shape[1:]) for step, x in zip(steps, queries, strict=True)]
    of_context = [step.context.send(queries, x) for step, x in zip(steps, contexts, strict=True)]
    transfers = list(zip(of_context, plan.send(keys), plan.send(values), strict=True))
    for of_step in transfers:
        begin(of_step, plan.group, q.device)
    for step, context in zip(steps, contexts, strict=True):
        step.context.copy_own(queries, context)
    transfers[0][0].wait()  # for both calls: the second one may read what came for the first
    with _Lanes(q.device) as lanes:
        results, used = [], []
        for number, (step, context) in enumerate(zip(steps, contexts, strict=True)):
            with lanes.lane(number):
                transfers[number][0].wait()
                taken = plan.extended(q, step, context), *(plan.seen(x[number], step) for x in (keys, values))
                results.append(library.run("forward", *taken, *weights, *plan.of_call(step.call)))
            used.append(taken)
        lanes.join()
        return [
            plan.of_chunks([out for out, _ in results], q.new_empty(*q.shape[:-1], v.shape[-1])),
            *(contexts if plan.spec.context else ()),
            *(lse.clone() for _, lse in results),
        ]


def _backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """Gradients of this rank's rows, to which all ranks' outputs contribute, and those of weights.

    Calls follow each other: beside each other they were 3 to 6 % slower on two H200s. Gradients travel
    when all are computed. While a second chunk is computed, those of the first would make a rank wait whose first chunk
    is the smaller one, by a kernel that takes multiprocessors from what computes; and no transfer would end sooner,
    because the rank that sends most sends all of it after its second chunk.
    """
    weights, (out, *kept), plan = rest[: len(WEIGHTS)], rest[len(WEIGHTS)], _Plan(*rest[len(WEIGHTS) + 1 :])
    steps, keys, values = plan.steps, plan.placed(k), plan.placed(v)
    lses, contexts = kept[-len(steps) :], kept[: -len(steps)] or [None] * len(steps)
    transfers = list(zip(plan.send(keys), plan.send(values), strict=True))
    for number in range(len(steps)):  # without a name for a transfer, which would keep its tensors
        begin(transfers[number], plan.group, q.device)
    rows = [  # while keys and values travel
        (*(plan.extended(x, step).contiguous() for x in (grad_out, out)), plan.extended(q, step, context))
        for step, context in zip(steps, contexts, strict=True)
    ]
    dqs, dks, dvs, dws = [], [], [], []
    for step, lse in zip(steps, lses, strict=True):
        transfers.pop(0)[0].wait()
        grads, outs, queries = rows.pop(0)
        dq, dk, dv, *dw = library.run(
            "backward",
            grads,
            torch.zeros_like(lse),
            queries,
            plan.seen(keys.pop(0), step),
            plan.seen(values.pop(0), step),
            *weights,
            outs,
            lse,
            *plan.of_call(step.call),
        )
        dqs.append(dq)
        dks.append(plan.side_by_side(dk))
        del dk  # which may be as long as the whole sequence
        dvs.append(plan.side_by_side(dv))
        del dv
        dws.append(dw)
    befores = [plan.rows_first(dq)[: step.call.context.count] for dq, step in zip(dqs, steps, strict=True)]
    queries_back = [step.context.send_back(before) for step, before in zip(steps, befores, strict=True)]
    keys_back, values_back = (
        [step.gradients.send_back(x) for step, x in zip(steps, each, strict=True)] for each in (dks, dvs)
    )
    begin([*queries_back, *keys_back, *values_back], plan.group, q.device)

    # While gradients travel, this rank adds up what is its own.
    dq = plan.of_chunks(dqs, q.new_empty(q.shape))
    of_queries = [part for step, x in zip(steps, befores, strict=True) for part in step.context.own(x)]
    of_keys, of_values = map(plan.own_gradients, (dks, dvs))
    dweights = [torch.stack(parts).sum(0, dtype=sum_dtype(parts[0])) for parts in zip(*dws, strict=True)]

    for step, back in zip(steps, queries_back, strict=True):
        of_queries += step.context.returned(back)
    chunks = plan.chunks(dq)
    for part in of_queries:
        chunks[part.chunk][part.rows] += part.x
    dk, dv = plan.gradients(k, of_keys, keys_back), plan.gradients(v, of_values, values_back)
    given = (weight for weight in weights if weight is not None)
    return [dq, dk, dv, *(dw.to(w.dtype) for dw, w in zip(dweights, given, strict=True))]


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    plan = _Plan(*rest[len(WEIGHTS) :])
    (out, lse), others = library.fake_forward(q, k, v), plan.rows_first(q).shape[1:]
    contexts = [q.new_empty(call.context.count, *others) for call in plan.calls if plan.spec.context]
    return [out, *contexts, *(lse.new_empty(*lse.shape[:-1], call.queries.count) for call in plan.calls)]


def _fake_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """Gradients of keys and values have their rows side by side."""
    dq, _, _, *dws = library.fake_backward(grad_out, grad_out, q, k, v, *rest)
    plan = _Plan(*rest[len(WEIGHTS) + 1 :])
    return [dq, *(plan.from_rows(plan.new_rows(x, x.shape[plan.dim])) for x in (k, v)), *dws]


def _forward_flop(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    """Of the rank's calls, with the rows around its chunks."""
    weights, plan = rest[: len(WEIGHTS)], _Plan(*rest[len(WEIGHTS) :])
    return sum(
        flops.attention_forward_flop(*plan.like_call(call, q, k, v), *weights, *plan.of_call(call))
        for call in plan.calls
    )


def _backward_flop(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    """Of the rank's calls, with the rows around its chunks."""
    weights, plan = rest[: len(WEIGHTS)], _Plan(*rest[len(WEIGHTS) + 1 :])
    rows = grad_out, grad_out  # of which nothing is counted
    return sum(
        flops.attention_backward_flop(*rows, *plan.like_call(call, q, k, v), *weights, *rows, *plan.of_call(call))
        for call in plan.calls
    )


class _Differentiable(library.Recorded):
    """The forward pass, with what the backward pass needs kept."""

    returns = list

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
        """All but the outputs is for the backward pass alone."""
        results, plan = run(*arguments), _Plan(*arguments[library.INPUTS :])
        ctx.plan, ctx.arguments = plan._replace(cu_seqlens=None), len(arguments)
        ctx.save_for_backward(*arguments[: library.INPUTS], plan.cu_seqlens, *results)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, (cu_seqlens, *results) = saved[: library.INPUTS], saved[library.INPUTS :]
        plan = ctx.plan._replace(cu_seqlens=cu_seqlens)
        grads = iter(library.run("context_parallel_backward", grad_out, *inputs, results, *plan))
        others = (None,) * (ctx.arguments - library.INPUTS)
        return None, *(None if x is None else next(grads) for x in inputs), *others


def _copy(target: Tensor, x: Tensor) -> None:
    """Copy rows into a part of a tensor: on a GPU in words of 16 bytes where they are made of them, twice as fast."""
    if x.is_cuda and x.dtype == target.dtype and _has_words(x) and _has_words(target):
        target, x = target.view(torch.complex128), x.view(torch.complex128)
    target.copy_(x)


def _has_words(x: Tensor) -> bool:
    """Whether rows are of whole words of 16 bytes. Their lengths always are."""
    *strides, last = x.stride()
    bytes_apart = [number * x.element_size() for number in (x.storage_offset(), *strides)]
    return last == 1 and not any(number % 16 for number in (x.data_ptr(), *bytes_apart))


_PLAN = (
    "float scale, str key, str group, int rank, int ranks, bool balanced, SymInt length, Tensor? cu_seqlens=None, "
    "SymInt max_seqlen=0"
)
library.register_op(
    f"context_parallel_forward(Tensor q, Tensor k, Tensor v, {library.WEIGHTS_SCHEMA}, {_PLAN}) -> Tensor[]",
    _forward,
    _fake_forward,
    _Differentiable,
    _forward_flop,
)
library.register_op(
    f"context_parallel_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, {library.WEIGHTS_SCHEMA}, "
    f"Tensor[] results, {_PLAN}) -> Tensor[]",
    _backward,
    _fake_backward,
    library.DifferentiatedOnce,
    _backward_flop,
)


def _group(group_or_mesh: ProcessGroup | DeviceMesh) -> ProcessGroup:
    """The ranks.

    Raises:
        InputError: it is neither a group nor a mesh of one dimension.
    """
    if isinstance(group_or_mesh, ProcessGroup):
        return group_or_mesh
    rule = "must be the ranks that share a sequence"
    legal = "a ProcessGroup, or a DeviceMesh of one dimension: mesh['cp']"
    if not isinstance(group_or_mesh, DeviceMesh):
        raise InputError(explain("group_or_mesh", type(group_or_mesh).__name__, rule, legal))
    if group_or_mesh.ndim != 1:
        raise InputError(explain("group_or_mesh", group_or_mesh, rule, legal))
    return group_or_mesh.get_group()
