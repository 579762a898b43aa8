"""Context parallelism: attention over sequences whose rows are distributed over the ranks of a
group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d, get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import resolve_scale
from ..call import INPUTS, Call, Length, schema_of
from ..errors import BackendError, InputError, explain
from ..expressions.language import is_of_distance, names_in
from ..expressions.parameters import read_parameters
from ..ops import flops, library
from ..ops.attention import AttentionOp, autocast
from ..ops.checks import check_boundaries, check_call, check_constants, check_packed, check_slots
from ..ops.executor import gradients_like
from ..spec import BATCH, Spec
from .exchange import Exchange, Part, Transfer, begin, combined, sum_dtype, total
from .places import Before, of_parts
from .sharding import ChunkCall, Rows, Sharding, fresh, regions


class ContextParallel:
    """An op on sequences that are distributed over the ranks of a group: each rank computes the
    outputs of its rows.

    A rank holds one or two chunks of each sequence; two adjacent chunks count as one. For a chunk
    it calls the op with the chunk's queries, the ``spec.context`` queries before them that
    convolutions read, and all keys that these queries see, so that a row of scores is never cut.
    The results equal those of one process with the whole sequence, for every pipeline and mask.

    The rows for a chunk's call travel in one group of sends and receives. The transfers of both
    chunks begin at once, so that the second chunk's rows are under way during the first chunk's
    call. Between the passes a rank keeps only its own rows, so the backward pass sends keys and
    values again. Then it sends the gradients of keys, values and earlier queries back to the ranks
    that hold these rows, which add them up; gradients of keys and values are summed in fp32. With W
    ranks, N rows and causal attention, a rank receives at most N (1 - 1 / W) rows of keys and
    values in the forward pass; in the backward pass it receives these rows and at most as many rows
    of gradients. Meanwhile it holds about N rows, and twice as many rows of gradients. With a
    window it receives only rows within the window.

    Gradients of queries, keys and values are complete. Gradients of weights, of the sink and of the
    parameters of expressions come from this rank's outputs: the sum over ranks is the whole
    gradient, as for any parameter that is used on a part of the tokens. Data parallelism over these
    ranks, or FSDP, takes the mean instead, which is right where the loss is a mean of the ranks'
    losses.

    If the op has ``visible``, another op is built for the calls. Its condition adds to positions and keys what
    is before them in the sequence. Calls fetch all keys of the window, whatever the condition hides.

    There is no dropout, because a dropped entry is chosen by its position in a call. To
    ``torch.compile`` and selective checkpointing a call is one op,
    ``mtagen::context_parallel_forward``, and its backward pass another.

    Args:
        op: a result of :func:`mtagen.build`.
        group_or_mesh: the ranks, in the order of their rows: a group, or a mesh of one dimension.
        balanced: if true, a sequence has 2W chunks, and rank r holds chunks r and 2W-1-r, so that
            all ranks have the same work although later rows of causal attention see more keys. If
            false, a sequence has W chunks, and rank r holds chunk r, which takes a quarter less
            traffic where all rows see all keys. Ops of one model can share tensors if they have the
            same value.

    Attributes:
        op: the op.
        balanced: the argument.
        group: the ranks.
        rank: this process's number among them.
        ranks: W.

    Raises:
        InputError: an argument does not fit; or the op has a mixing that depends on tokens; or ``visible`` reads a
            parameter by position or key; or an expression reads positions otherwise than as i - j, or all keys are
            visible: a rank's call does not know where its rows stand in the sequence.
    """

    def __init__(self, op: AttentionOp, group_or_mesh: ProcessGroup | DeviceMesh, *, balanced: bool = True) -> None:
        if not isinstance(op, AttentionOp):
            raise InputError(explain("op", type(op).__name__, "must be a built op", "what mtagen.build returns"))
        if not isinstance(balanced, bool):
            raise InputError(explain("balanced", balanced, "must be a bool", (True, False)))
        if op.plan.spec.ranks:
            rule = "mixings that depend on tokens are not supported where ranks share a sequence"
            raise InputError(explain("op", op, rule, "an op without dynamic_ranks and post_dynamic_ranks"))
        _check_expressions(op.plan.spec)
        self.op, self.balanced = op, balanced
        self._key = of_parts(op)._key
        self.group = _group(group_or_mesh)
        self.rank, self.ranks = get_rank(self.group), get_world_size(self.group)

    def __repr__(self) -> str:
        return f"<{self.op!r} on rank {self.rank} of {self.ranks}, balanced={self.balanced}>"

    def __copy__(self) -> ContextParallel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return itself, as it never changes: copies of a model are in the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to pickle: a group of processes exists in these processes only.

        Raises:
            BackendError: always.
        """
        rule = "cannot be pickled, because its process group exists in this process only"
        raise BackendError(explain("ContextParallel", self, rule, "model.state_dict(), and a new model to load it"))

    def length(self, rows: int, length: int | None = None) -> int:
        """Return N, the rows of the whole sequence, from the number of rows on this rank.

        Args:
            rows: number of rows that :meth:`shard` returns on this rank.
            length: N; default W times ``rows``, which is right if all chunks have the same length.

        Raises:
            InputError: this rank holds another number of N rows, or N must be given.
        """
        return self._sharding(rows, length).length

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of a tensor that all ranks have: tokens, positions or labels, for
        example.

        Args:
            x: a tensor, equal on all ranks. Nothing is communicated.
            dim: the axis of a sequence's rows, of any length. Chunks differ by at most one row, the
                first chunks being longer; some are empty if there are more chunks than rows.

        Returns:
            A differentiable copy of the rows.
        """
        held = Sharding(x.shape[dim], self.ranks, self.balanced).held_by(self.rank)
        return torch.cat([x.narrow(dim, rows.start, rows.count) for rows in held], dim)

    def unshard(self, x: Tensor, dim: int, *, length: int | None = None) -> Tensor:
        """Return the whole tensor on every rank, without gradient. It breaks a graph of
        ``torch.compile``.

        Args:
            x: this rank's rows, e.g. outputs, as :meth:`shard` distributes them.
            dim: the axis of the rows.
            length: rows of the whole tensor; default W times the rows of ``x``, which is right if
                all chunks have the same length.

        Raises:
            InputError: with ``length`` rows in all, this rank holds another number of rows than
                ``x`` has.
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
        sink: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        scale: float | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Return the op's outputs for this rank's rows; the outputs are differentiable like the
        op's.

        Args:
            q: ``(B, H, N_local, D)``, this rank's rows of the queries.
            k: ``(B, Hkv, N_local, D)``, the same rows of the keys.
            v: ``(B, Hkv, N_local, DV)``, the same rows of the values.
            weight, head_weight, post_weight, post_head_weight, sink, parameters, scale: arguments
                of the op, equal on all ranks.
            length: N, rows of the whole sequence; default W times N_local, which is right if all
                chunks have the same length.

        Returns:
            ``(B, H, N_local, DV)`` in q's dtype.

        Raises:
            InputError: an argument does not fit; nothing was communicated.
            BackendError: the tensors are on a device that the op was not built for.
        """
        spec = self.op.plan.spec
        q, k, v = autocast(q, k, v)
        weights = check_call(spec, self.op.dtypes, q, k, v, (weight, head_weight, post_weight, post_head_weight))
        weights += check_slots(spec, q, k, sink, parameters)
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
        sink: Tensor | None = None,
        parameters: Mapping[str, Tensor] | None = None,
        scale: float | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Return the op's outputs for this rank's rows of packed documents; a chunk may end within
        a document.

        Args:
            q: ``(N_local, H, D)``, this rank's rows of the queries of all documents.
            k: ``(N_local, Hkv, D)``, the same rows of the keys.
            v: ``(N_local, Hkv, DV)``, the same rows of the values.
            weight, head_weight, post_weight, post_head_weight, sink, parameters, scale: arguments
                of the op, equal on all ranks.
            cu_seqlens: ``(documents + 1,)`` int32 on q's device, equal on all ranks: the first row
                of each document among all rows, and the end of the last document; outputs of rows
                after that end are zeros.
            max_seqlen: rows of the longest document, or more; default N. It limits how far keys are
                fetched.
            length: N, rows of all documents; default as in a call.

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
        weights += check_slots(spec, q, k, sink, parameters, len(cu_seqlens) - 1)
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
        scale, ranks = resolve_scale(scale, self.op.plan.spec.head_dim), (self.group.group_name, self.rank, self.ranks)
        plan = _Plan(scale, self._key, *ranks, self.balanced, sharding.length, *documents)
        out: Tensor = library.run("context_parallel_forward", q, k, v, *weights, *plan)[0]
        return out

    def _sharding_of(self, q: Tensor, k: Tensor, dim: int, length: int | None) -> Sharding:
        """Return the sharding of the sequence of these queries and keys.

        Raises:
            InputError: queries and keys are not the same rows, or not this rank's rows.
        """
        if q.shape[dim] != k.shape[dim]:
            rule = "a rank's queries and keys must be the same rows of a sequence"
            raise InputError(explain("rows of k", k.shape[dim], rule, f"{q.shape[dim]}, the rows of q"))
        return self._sharding(q.shape[dim], length)

    def _sharding(self, rows: int, length: int | None) -> Sharding:
        """Return the sharding of a sequence of which this rank has ``rows`` rows.

        Raises:
            InputError: this rank should have another number of rows, or the length must be given.
        """
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
            raise InputError(
                explain("length", length, "must be the number of rows of the whole sequence", "0, 1, 2, ..., or None")
            )
        sharding = Sharding(rows * self.ranks if length is None else length, self.ranks, self.balanced)
        if length is None and not sharding.is_even:
            rule = f"{rows} rows on rank {self.rank} of {self.ranks} cannot be cut into equal chunks"
            raise InputError(explain("length", length, rule, "the number of rows of the whole sequence"))
        mine = sum(chunk.count for chunk in sharding.held_by(self.rank))
        if rows != mine:
            rule = f"rank {self.rank} of {self.ranks} holds {mine} of {length} rows"
            raise InputError(explain("rows", rows, rule, f"{mine}, the rows that shard() returns"))
        return sharding


@dataclass(frozen=True)
class _Step:
    """The call and the transfers for one of a rank's chunks. All ranks take their steps together.

    Attributes:
        call: this rank's call of the op.
        start: first row of the chunk within this rank's rows.
        context: exchange of the queries before each rank's chunk.
        region: the rows of the tensor that holds the keys or values of this rank's call, maybe with
            other calls' rows.
        keys: exchange of the keys and values that earlier steps have not fetched.
        gradients: exchange that returns the gradients of the keys and values of each rank's call.
    """

    call: ChunkCall
    start: int
    context: Exchange
    region: Rows
    keys: Exchange
    gradients: Exchange

    def of_region(self, x: Tensor, rows: Rows) -> Tensor:
        """Return some rows of the region's tensor."""
        return x.narrow(0, rows.start - self.region.start, rows.count)


def _calls(spec: Spec, sharding: Sharding, rank: int, longest: int | None) -> list[ChunkCall]:
    """Return a rank's calls of the op, one for each of its chunks."""
    return [ChunkCall.of(chunk, sharding.length, spec, longest) for chunk in sharding.held_by(rank)]


@lru_cache(maxsize=256)
def _steps(spec: Spec, sharding: Sharding, rank: int, longest: int | None) -> tuple[_Step, ...]:
    """Return a rank's steps, in order. The layers of a model, and their two passes, share them."""
    held, steps, start = sharding.held, [], 0
    by_rank = [_calls(spec, sharding, each, longest) for each in range(sharding.ranks)]
    by_step = zip(
        regions(by_rank[rank]), zip(*by_rank, strict=True), zip(*map(fresh, by_rank), strict=True), strict=True
    )
    for region, calls, new in by_step:
        context = Exchange(held, [call.context for call in calls], rank)
        gradients = Exchange(held, [call.keys for call in calls], rank)
        steps.append(_Step(calls[rank], start, context, region, Exchange(held, new, rank, region), gradients))
        start += calls[rank].chunk.count
    return tuple(steps)


class _Lanes:
    """Streams of a GPU on which the calls of a forward pass run concurrently; a context manager.

    The second call has priority where both are ready: its chunk has later rows, whose CTAs take
    longer, and CTAs of the first call fill the multiprocessors that the second call's last CTAs
    leave idle. This helps with short sequences; with 131,072 rows on two H100s, both calls took 0.8
    % longer than one after the other.

    The side stream begins after all earlier work of the current stream, and each waits for the
    other at the end: memory belongs to the stream for which it was allocated, and must live until
    the other stream has used it.

    Args:
        device: the device; on the CPU calls follow each other.
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
        """Return a context in which one of at most two calls runs on its stream."""
        return torch.cuda.stream(self._streams[number]) if self._streams else nullcontext()

    def join(self) -> None:
        """Make the current stream wait for all calls."""
        if self._streams:
            self._streams[0].wait_stream(self._streams[1])


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _Plan(NamedTuple):
    """The registered ops' arguments after the tensors, and derived values.

    Schemas hold the group's name, like the schemas of PyTorch's own functional collectives. They
    also hold the rank, because shapes depend on it: without it the graphs of all ranks would be
    equal, and one rank could get another rank's code from the cache of ``torch.compile``. Without
    packed documents, ``cu_seqlens`` is None or left out.
    """

    scale: float
    key: str
    group: str
    rank: int
    ranks: int
    balanced: bool
    length: Length
    cu_seqlens: Tensor | None = None
    max_seqlen: Length = 0

    @property
    def spec(self) -> Spec:
        """The op's spec."""
        return library.executor_of(self.key).spec

    @property
    def process_group(self) -> ProcessGroup:
        """The group of ranks."""
        group: ProcessGroup = distributed_c10d._resolve_process_group(self.group)  # type: ignore[arg-type,attr-defined]
        return group

    @property
    def calls(self) -> list[ChunkCall]:
        """This rank's calls; ``length`` may be a symbol."""
        return _calls(*self._sizes)

    @property
    def steps(self) -> tuple[_Step, ...]:
        """This rank's steps."""
        return _steps(*self._sizes)

    @property
    def _sizes(self) -> tuple[Spec, Sharding, int, int | None]:
        sharding = Sharding(self.length, self.ranks, self.balanced)
        return self.spec, sharding, self.rank, None if self.cu_seqlens is None else self.max_seqlen

    @property
    def dim(self) -> int:
        """The axis of rows of q, k, v and the output."""
        return 2 if self.cu_seqlens is None else 0

    def of_call(self, call: ChunkCall, inputs: Sequence[Any]) -> Call:
        """Return the op's call for a chunk, given q, k and v of that call, and the weights."""
        arguments = *inputs, self.scale, self.key
        if self.cu_seqlens is None:
            made, boundaries = Call(*arguments), None
        else:
            rows = call.queries, call.keys
            cu_seqs = (self.cu_seqlens.clamp(each.start, each.stop) - each.start for each in rows)
            made = Call(*arguments, *cu_seqs, *(min(self.max_seqlen, each.count) for each in rows))
            boundaries = self.cu_seqlens
        if self.spec.visible is None:
            return made
        return made._replace(**Before.of(call, made.q, boundaries).parameters(self.spec))

    def rows_first(self, x: Tensor) -> Tensor:
        """Return a view of ``x`` with rows as the first axis, as exchanges need it."""
        return x.movedim(self.dim, 0)

    def from_rows(self, x: Tensor) -> Tensor:
        """Return a view of an exchange's tensor with the axes of q."""
        return x.movedim(0, self.dim)

    def chunk(self, x: Tensor, step: _Step) -> Tensor:
        """Return the rows of a step's chunk from this rank's rows."""
        return x.narrow(self.dim, step.start, step.call.chunk.count)

    def chunks(self, x: Tensor) -> list[Tensor]:
        """Return the rows of each chunk from this rank's rows, with rows as the first axis."""
        return [self.rows_first(self.chunk(x, step)) for step in self.steps]

    def new_rows(self, x: Tensor, count: int) -> Tensor:
        """Return a contiguous tensor for ``count`` rows like those of ``x``, with rows as the first
        axis.
        """
        return x.new_empty(count, *self.rows_first(x).shape[1:])

    def contiguous_rows(self, x: Tensor) -> Tensor:
        """Return ``x`` contiguous with rows as the first axis, as exchanges send it; a copy where
        necessary.
        """
        if self.rows_first(x).is_contiguous():
            return self.rows_first(x)
        copied = self.new_rows(x, x.shape[self.dim])
        _copy(self.from_rows(copied), x)
        return copied

    def region_tensors(self, x: Tensor) -> list[Tensor]:
        """Return a tensor for each step's region, with this rank's rows of ``x`` (keys or values)
        filled in.
        """
        by_region = {step.region: self.new_rows(x, step.region.count) for step in self.steps}
        for step in self.steps:
            _copy(self.from_rows(step.of_region(by_region[step.region], step.call.chunk)), self.chunk(x, step))
        return [by_region[step.region] for step in self.steps]

    def send(self, tensors: Sequence[Tensor]) -> list[Transfer]:
        """Return the transfers of the other ranks' keys or values into the steps' region tensors."""
        both = list(zip(self.steps, tensors, strict=True))
        chunks = [step.of_region(x, step.call.chunk) for step, x in both]
        return [step.keys.send(chunks, x) for step, x in both]

    def call_keys(self, region: Tensor, step: _Step) -> Tensor:
        """Return the keys or values of a step's call from the tensor of its region."""
        return self.from_rows(step.of_region(region, step.call.keys))

    def local_gradients(self, grads: Sequence[Tensor]) -> list[Part]:
        """Return the gradients from this rank's calls of the keys or values that this rank holds."""
        return combined([part for step, x in zip(self.steps, grads, strict=True) for part in step.gradients.local(x)])

    def gradients(self, x: Tensor, parts: list[Part], transfers: Sequence[Transfer]) -> Tensor:
        """Return the gradients of ``x``, keys or values: the sums of ``parts``, then of the parts
        from ``transfers``.
        """
        for step, transfer in zip(self.steps, transfers, strict=True):
            parts += step.gradients.returned(transfer)
        sums = self.new_rows(x, x.shape[self.dim])
        for number, step in enumerate(self.steps):
            total(parts, number, sums.narrow(0, step.start, step.call.chunk.count))
        return self.from_rows(sums)

    def extended(self, x: Tensor, step: _Step, before: Tensor | None = None) -> Tensor:
        """Return the rows of a step's call: context, chunk and padding, of queries, outputs or
        their gradients.

        Args:
            x: this rank's rows.
            step: the step.
            before: the rows before the chunk, with rows as the first axis; default zeros. Rows
                after the chunk are zeros.
        """
        call, chunk = step.call, self.chunk(x, step)
        if call.queries.count == call.chunk.count:
            return chunk
        result = x.new_empty(*x.shape[: self.dim], call.queries.count, *x.shape[self.dim + 1 :])
        context, rows, padding = self._split_queries(result, call)
        if before is None:
            context.zero_()
        else:
            _copy(context, self.from_rows(before))
        _copy(rows, chunk)
        padding.zero_()
        return result

    def fill_chunks(self, results: Sequence[Tensor], x: Tensor) -> Tensor:
        """Fill ``x`` with the chunks' rows of each call's result, and return it."""
        for step, each in zip(self.steps, results, strict=True):
            _copy(self.chunk(x, step), self._split_queries(each, step.call)[1])
        return x

    def _split_queries(self, x: Tensor, call: ChunkCall) -> tuple[Tensor, ...]:
        """Split the rows of a call into those before its chunk, the chunk, and those after it."""
        return x.split_with_sizes([call.context.count, call.chunk.count, call.padding], self.dim)

    def meta_calls(self, inputs: Sequence[Any]) -> list[Call]:
        """Return the op's calls for this rank's chunks, with meta tensors for q, k and v."""
        dim, calls = self.dim, []
        for call in self.calls:
            counts = {"queries": call.queries.count, "keys": call.keys.count, "values": call.keys.count}
            sizes = zip(inputs, [counts[argument.role] for argument in BATCH], strict=False)
            qkv = (x.new_empty(*x.shape[:dim], size, *x.shape[dim + 1 :], device="meta") for x, size in sizes)
            calls.append(self.of_call(call, (*qkv, *inputs[3:])))
        return calls


def _forward(*arguments: Any) -> list[Tensor]:
    """Return this rank's outputs, and for the backward pass the queries before each chunk and the
    other results of each call.

    Queries before a chunk have rows as their first axis. Every rank takes part in every exchange,
    even with nothing to compute.
    """
    (q, k, v, *weights), plan = arguments[:INPUTS], _Plan(*arguments[INPUTS:])
    steps, queries, keys, values = plan.steps, plan.chunks(q), plan.region_tensors(k), plan.region_tensors(v)
    contexts = [x.new_empty(step.call.context.count, *x.shape[1:]) for step, x in zip(steps, queries, strict=True)]
    of_context = [step.context.send(queries, x) for step, x in zip(steps, contexts, strict=True)]
    transfers = list(zip(of_context, plan.send(keys), plan.send(values), strict=True))
    for of_step in transfers:
        begin(of_step, plan.process_group, q.device)
    for step, context in zip(steps, contexts, strict=True):
        step.context.copy_own(queries, context)
    transfers[0][0].wait()  # for both calls: the second call may read rows that came for the first
    with _Lanes(q.device) as lanes:
        results, used = [], []
        for number, (step, context) in enumerate(zip(steps, contexts, strict=True)):
            with lanes.lane(number):
                transfers[number][0].wait()
                taken = plan.extended(q, step, context), *(plan.call_keys(x[number], step) for x in (keys, values))
                results.append(library.run("forward", *plan.of_call(step.call, (*taken, *weights))))
            used.append(taken)
        lanes.join()
        return [
            plan.fill_chunks([out for out, *_ in results], q.new_empty(*q.shape[:-1], v.shape[-1])),
            *(contexts if plan.spec.context else ()),
            *(x.clone() for _, *saved in results for x in saved),
        ]


def _backward(grad_out: Tensor, *arguments: Any) -> list[Tensor]:
    """Return the gradients of this rank's rows, to which all ranks' outputs contribute, and those
    of weights.

    Calls follow each other: concurrent calls were 3 to 6 % slower on two H200s. Gradients travel
    after all calls. If the first chunk's gradients travelled during the second call, a rank with a
    smaller first chunk would wait, in a kernel that takes multiprocessors from the computation. No
    transfer would end sooner, because the rank that sends most sends all of it after its second
    chunk.
    """
    (q, k, v, *weights), (out, *saved), plan = arguments[:INPUTS], arguments[INPUTS], _Plan(*arguments[INPUTS + 1 :])
    given = [weight for weight in weights if weight is not None]
    steps, keys, values = plan.steps, plan.region_tensors(k), plan.region_tensors(v)
    own = len(steps) if plan.spec.context else 0
    contexts, of_calls = saved[:own] or [None] * len(steps), saved[own:]
    each = len(of_calls) // len(steps)  # a call has log-sum-exps, and maybe unmixed outputs
    lses, *unmixed = (of_calls[i::each] for i in range(each))
    transfers = list(zip(plan.send(keys), plan.send(values), strict=True))
    for number in range(len(steps)):  # no variable refers to a transfer, which would keep its tensors alive
        begin(transfers[number], plan.process_group, q.device)
    rows = [  # while keys and values travel
        (plan.extended(grad_out, step).contiguous(), plan.extended(q, step, context))
        for step, context in zip(steps, contexts, strict=True)
    ]
    outs = unmixed[0] if unmixed else [plan.extended(out, step).contiguous() for step in steps]
    dqs, dks, dvs, dws = [], [], [], []
    for step, lse in zip(steps, lses, strict=True):
        transfers.pop(0)[0].wait()
        grads, queries = rows.pop(0)
        dq, dk, dv, *dw = library.backward(
            plan.of_call(step.call, (queries, *(plan.call_keys(x.pop(0), step) for x in (keys, values)), *weights)),
            grads,
            torch.zeros_like(lse),
            outs.pop(0),
            lse,
        )
        dqs.append(dq)
        dks.append(plan.contiguous_rows(dk))
        del dk  # it may be as long as the whole sequence
        dvs.append(plan.contiguous_rows(dv))
        del dv
        dws.append(dw[: len(given)])  # and not of what a call adds to places
    befores = [plan.rows_first(dq)[: step.call.context.count] for dq, step in zip(dqs, steps, strict=True)]
    queries_back = [step.context.send_back(before) for step, before in zip(steps, befores, strict=True)]
    keys_back, values_back = (
        [step.gradients.send_back(x) for step, x in zip(steps, each, strict=True)] for each in (dks, dvs)
    )
    begin([*queries_back, *keys_back, *values_back], plan.process_group, q.device)

    # While gradients travel, this rank adds up the gradients of its own rows.
    dq = plan.fill_chunks(dqs, q.new_empty(q.shape))
    of_queries = [part for step, x in zip(steps, befores, strict=True) for part in step.context.local(x)]
    of_keys, of_values = map(plan.local_gradients, (dks, dvs))
    dweights = [torch.stack(parts).sum(0, dtype=sum_dtype(parts[0])) for parts in zip(*dws, strict=True)]

    for step, back in zip(steps, queries_back, strict=True):
        of_queries += step.context.returned(back)
    chunks = plan.chunks(dq)
    for part in of_queries:
        chunks[part.chunk][part.rows] += part.x
    dk, dv = plan.gradients(k, of_keys, keys_back), plan.gradients(v, of_values, values_back)
    return [dq, dk, dv, *(dw.to(w.dtype) for dw, w in zip(dweights, given, strict=True))]


def _fake_forward(*arguments: Any) -> list[Tensor]:
    (q, *others), plan = arguments[:INPUTS], _Plan(*arguments[INPUTS:])
    boundaries = plan.cu_seqlens, plan.cu_seqlens
    contexts, saved = [], []
    for call in plan.calls:
        if plan.spec.context:
            contexts.append(q.new_empty(call.context.count, *plan.rows_first(q).shape[1:]))
        queries = q.new_empty(*q.shape[: plan.dim], call.queries.count, *q.shape[plan.dim + 1 :])
        saved += library.fake_forward(queries, *others, plan.scale, plan.key, *boundaries)[1:]
    return [library.fake_forward(q, *others, plan.scale, plan.key, *boundaries)[0], *contexts, *saved]


def _fake_backward(grad_out: Tensor, *arguments: Any) -> list[Tensor]:
    """Return empty gradients; those of keys and values are contiguous with rows as the first axis."""
    plan = _Plan(*arguments[INPUTS + 1 :])
    given = [x for x in arguments[:INPUTS] if x is not None]
    have_gradients = plan.spec.have_gradients[: len(given)]  # and not what a call adds to places, which comes last
    dq, dk, dv, *dws = gradients_like(given, have_gradients)
    return [dq, *(plan.from_rows(plan.new_rows(x, x.shape[plan.dim])) for x in (dk, dv)), *dws]


def _forward_flop(*arguments: Any) -> int:
    """Count the FLOP of the rank's calls, with the rows around its chunks."""
    return sum(map(flops.forward_flop, _Plan(*arguments[INPUTS:]).meta_calls(arguments[:INPUTS])))


def _backward_flop(grad_out: Tensor, *arguments: Any) -> int:
    """Count the FLOP of the rank's calls, with the rows around its chunks."""
    return sum(map(flops.backward_flop, _Plan(*arguments[INPUTS + 1 :]).meta_calls(arguments[:INPUTS])))


class _Differentiable(library.Recorded):
    """The forward pass, which saves tensors for the backward pass."""

    returns = list

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], arguments: Sequence[Any], *given: Tensor) -> tuple[Tensor, ...]:
        """Run the op and save its results; all but the first, the outputs, are for the backward
        pass only.
        """
        plan = _Plan(*arguments[INPUTS:])
        check_constants(plan.spec, arguments[:INPUTS])
        results = run(*arguments)
        ctx.plan, ctx.given = plan._replace(cu_seqlens=None), len(given)
        ctx.save_for_backward(*arguments[:INPUTS], plan.cu_seqlens, *results)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, (cu_seqlens, *results) = saved[:INPUTS], saved[INPUTS:]
        plan = ctx.plan._replace(cu_seqlens=cu_seqlens)
        grads = library.run("context_parallel_backward", grad_out, *inputs, results, *plan)
        return None, None, *grads, *(None,) * (ctx.given - len(grads))


def _copy(target: Tensor, x: Tensor) -> None:
    """Copy rows into a part of a tensor: on a GPU in words of 16 bytes if possible, which is twice
    as fast.
    """
    if x.is_cuda and x.dtype == target.dtype and _has_words(x) and _has_words(target):
        target, x = target.view(torch.complex128), x.view(torch.complex128)
    target.copy_(x)


def _has_words(x: Tensor) -> bool:
    """Return whether all rows start at multiples of 16 bytes.

    Their lengths always are multiples of 16 bytes.
    """
    *strides, last = x.stride()
    bytes_apart = [number * x.element_size() for number in (x.storage_offset(), *strides)]
    return last == 1 and not any(number % 16 for number in (x.data_ptr(), *bytes_apart))


_INPUTS, _PLAN = schema_of(Call)[:INPUTS], schema_of(_Plan)
library.register_op(
    "context_parallel_forward",
    [*_INPUTS, *_PLAN],
    "Tensor[]",
    _forward,
    _fake_forward,
    _Differentiable,
    _forward_flop,
)
library.register_op(
    "context_parallel_backward",
    ["Tensor grad_out", *_INPUTS, "Tensor[] results", *_PLAN],
    "Tensor[]",
    _backward,
    _fake_backward,
    library.DifferentiatedOnce,
    _backward_flop,
)


def _check_expressions(spec: Spec) -> None:
    """Check that an op's expressions are the same in calls on a part of a sequence.

    Raises:
        InputError: they are not.
    """
    parameters = read_parameters(spec.parameters)
    is_aligned = spec.left is not None or spec.right is not None
    for name, text in spec.expressions:
        reads_positions = bool(names_in(text, parameters) & {"i", "j"})
        if reads_positions and not (is_aligned and is_of_distance(text, parameters)):
            rule = "reads positions, which ranks count from the first key that they have"
            legal = "an expression that reads i and j as i - j only, of an op that is causal or has a window"
            raise InputError(explain(name, text, rule, legal))


def _group(group_or_mesh: ProcessGroup | DeviceMesh) -> ProcessGroup:
    """Return the group of ranks.

    Raises:
        InputError: the argument is neither a group nor a mesh of one dimension.
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
