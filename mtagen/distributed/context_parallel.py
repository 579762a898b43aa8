"""Attention over sequences whose rows are spread over the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh

from ..documents import Documents
from ..errors import BackendError, InputError, explain
from ..ops.attention import MultiTokenAttention, autocast
from ..ops.inputs import check_call, check_documents, check_packed, resolve_scale
from ..ops.library import run
from .exchange import Exchange
from .sharding import Call, Sharding


class ContextParallel:
    """An op on sequences that are spread over the ranks of a group: each makes the outputs of the rows that it holds.

    A rank holds one or two chunks of each sequence. For a chunk it calls the op with the chunk's queries, the
    ``spec.context`` queries before them that convolutions read, and all keys that these see, so that a row of scores
    is never cut. Results are those of one process with the whole sequence, for every pipeline and mask.

    Each call moves rows by two all-to-alls per chunk, which are begun at once, so that those of the second chunk are
    under way while the first is computed. The backward pass moves keys and values again, for between the passes a rank
    keeps its own rows only, and brings the gradients of keys, values and earlier queries back to the ranks that hold
    them, which add them up, in fp32 those of keys and values. With W ranks, N rows and causal attention, a rank
    receives N (1 - 1 / W) rows of keys and values in the forward pass, in the backward pass those and as many rows of
    gradients. Meanwhile it holds about N rows, and as many again while it puts them in order or has their gradients.
    With a window it receives what the window reaches.

    Gradients of queries, keys and values are complete. Gradients of weights are those of this rank's outputs: the sum
    over ranks is the whole gradient, as of any parameter that is used on a part of the tokens. Data parallelism over
    these ranks, or FSDP, takes the mean instead, which is right where the loss is a mean of the ranks' losses.

    There is no dropout: which entries a call drops follows from their places in the call. ``torch.compile`` leaves the
    calls as they are, and compiles what is around them.

    Args:
        op: what :func:`mtagen.build` returns.
        group_or_mesh: the ranks, in the order of the rows that they hold: a group, or a mesh of one dimension.
        balanced: whether sequences are cut into 2W chunks, of which rank r holds r and 2W-1-r, so that all ranks have
            the same work though later rows of causal attention see more keys; else into W chunks, of which it holds r,
            which takes half the traffic where all rows see all keys. Ops of one model share tensors if they agree.

    Attributes:
        op: the op.
        balanced: as given.
        group: the ranks.
        rank: this process's number among them.
        ranks: W.

    Raises:
        InputError: an argument does not fit.
    """

    def __init__(
        self, op: MultiTokenAttention, group_or_mesh: ProcessGroup | DeviceMesh, *, balanced: bool = True
    ) -> None:
        if not isinstance(op, MultiTokenAttention):
            raise InputError(explain("op", type(op).__name__, "must be a built op", "what mtagen.build returns"))
        if not isinstance(balanced, bool):
            raise InputError(explain("balanced", balanced, "must be a bool", (True, False)))
        self.op, self.balanced = op, balanced
        self.group = _group(group_or_mesh)
        self.rank, self.ranks = get_rank(self.group), get_world_size(self.group)

    def __repr__(self) -> str:
        return f"<{self.op!r} on rank {self.rank} of {self.ranks}, balanced={self.balanced}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Itself, as it never changes: copies of a model are in the same group."""
        return self

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
        held = Sharding(x.shape[dim], self.ranks, self.balanced).held[self.rank]
        return torch.cat([x.narrow(dim, rows.start, len(rows)) for rows in held], dim)

    def unshard(self, x: Tensor, dim: int, *, length: int | None = None) -> Tensor:
        """The whole tensor on every rank, e.g. of outputs. It has no gradient.

        Args:
            x: the rows that :meth:`shard` gives.
            dim: their axis.
            length: rows of the whole; default W times those of ``x``, which is right where all chunks are as long as
                each other.

        Raises:
            InputError: ``x`` has another number of rows than ``length`` makes this rank's.
        """
        sharding = self._sharding(x.shape[dim], length)
        everything = Exchange(sharding.held, self.ranks * [range(sharding.length)], self.group)
        with torch.no_grad():
            return everything.receive(everything.send(x.movedim(dim, 0))).movedim(0, dim)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        return self._attend(q, k, v, weights, scale, sharding, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
                among all rows, and N.
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
        documents = Documents(cu_seqlens, cu_seqlens, longest, longest)
        check_documents(documents, sharding.length, sharding.length, q.device)
        return self._attend(q, k, v, weights, scale, sharding, documents)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: list[Tensor | None],
        scale: float | None,
        sharding: Sharding,
        documents: Documents | None,
    ) -> Tensor:
        spec, held = self.op.plan.spec, sharding.held
        steps: list[_Step] = []
        longest = None if documents is None else documents.max_k
        for chunks in zip(*held, strict=True):  # one of each rank
            calls = [Call.of(chunk, sharding.length, spec, longest) for chunk in chunks]
            context = Exchange(held, [call.context for call in calls], self.group)
            keys = Exchange(held, [call.keys for call in calls], self.group)
            start = sum(len(step.call.own) for step in steps)
            steps.append(_Step(calls[self.rank], start, context, keys))
        options = resolve_scale(scale, spec.head_dim), self.op._key
        plan = _Plan(tuple(steps), 2 if documents is None else 0, spec.context > 0, options, documents)
        out: Tensor = _Attention.apply(plan, q, k, v, *weights)  # type: ignore[no-untyped-call]
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
        mine = sum(map(len, sharding.held[self.rank]))
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
        keys: brings the keys and values that each rank's call takes.
    """

    call: Call
    start: int
    context: Exchange
    keys: Exchange


@dataclass(frozen=True)
class _Plan:
    """The steps of a call, and what they have in common.

    Attributes:
        steps: in the order in which they are taken.
        dim: the axis of rows of q, k, v and the output.
        has_context: whether some chunk needs queries before its own.
        options: the scale and the op's key.
        documents: packed documents among all rows.
    """

    steps: tuple[_Step, ...]
    dim: int
    has_context: bool
    options: tuple[float, str]
    documents: Documents | None

    def of_call(self, call: Call) -> tuple[Any, ...]:
        """What the registered ops take after the tensors of a call."""
        if self.documents is None:
            return self.options
        cu_seq_q, cu_seq_k, max_q, max_k = self.documents
        parts = ((cu_seq_q, max_q, call.queries), (cu_seq_k, max_k, call.keys))
        (cu_seq_q, max_q), (cu_seq_k, max_k) = (
            (cu_seq.clamp(rows.start, rows.stop) - rows.start, min(longest, len(rows)))
            for cu_seq, longest, rows in parts
        )
        return *self.options, cu_seq_q, cu_seq_k, max_q, max_k

    def rows_first(self, x: Tensor) -> Tensor:
        """A view of ``x`` as an exchange takes it."""
        return x.movedim(self.dim, 0)

    def from_rows(self, x: Tensor) -> Tensor:
        """A view of what an exchange gives, with the axes of q."""
        return x.movedim(0, self.dim)

    def own(self, x: Tensor, step: _Step) -> Tensor:
        """The rows of a step's chunk, of those that this rank holds."""
        return x.narrow(self.dim, step.start, len(step.call.own))

    def queries(self, q: Tensor, context: Tensor | None, step: _Step) -> Tensor:
        """What a step's call takes: the queries before the chunk, the chunk's, and zeros."""
        own, padding = self.own(q, step), step.call.padding
        if padding:
            own = F.pad(own, self._pad(0, padding))
        return own if context is None else torch.cat([self.from_rows(context), own], self.dim)

    def outputs(self, x: Tensor, step: _Step) -> Tensor:
        """The outputs of a step's call, or their gradients: zeros but for the chunk's, as nothing reads the others."""
        return F.pad(self.own(x, step), self._pad(len(step.call.context), step.call.padding)).contiguous()

    def _pad(self, before: int, after: int) -> tuple[int, ...]:
        """What ``torch.nn.functional.pad`` takes to add rows."""
        axes_after = 1 if self.documents is None else 2
        return (*axes_after * (0, 0), before, after)


class _Attention(torch.autograd.Function):
    """All steps of a call. Every rank takes part in every exchange, even where it has nothing to compute."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor | None) -> Tensor:
        """This rank's outputs; for the backward pass its rows are kept, and the log-sum-exps."""
        widths, pairs = [k.shape[-1], v.shape[-1]], plan.rows_first(torch.cat([k, v], -1))
        of_context = [step.context.send(plan.rows_first(q)) if plan.has_context else None for step in plan.steps]
        of_keys = [step.keys.send(pairs) for step in plan.steps]
        outs, lses, contexts = [], [], []
        for step, context in zip(plan.steps, of_context, strict=True):
            contexts.append(None if context is None else step.context.receive(context))
            queries = plan.queries(q, contexts[-1], step)
            pair = plan.from_rows(step.keys.receive(of_keys.pop(0))).split_with_sizes(widths, -1)
            out, lse = run("forward", queries, *pair, *weights, *plan.of_call(step.call))
            outs.append(out.narrow(plan.dim, len(step.call.context), len(step.call.own)))
            lses.append(lse)
        out = torch.cat(outs, plan.dim)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, *contexts, *lses, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of this rank's rows, to which all ranks' outputs contribute, and those of weights.

        Raises:
            BackendError: a graph of the gradients is asked for.
        """
        if torch.is_grad_enabled():
            rule = "mtagen ops are differentiable once"
            raise BackendError(explain("create_graph", True, rule, "False, or mtagen.reference on one process"))
        plan: _Plan = ctx.plan
        q, k, v, out, *others = ctx.saved_tensors
        count = len(plan.steps)
        contexts, lses, weights = others[:count], others[count : 2 * count], others[2 * count :]
        widths, pairs = [k.shape[-1], v.shape[-1]], plan.rows_first(torch.cat([k, v], -1))
        of_keys = [step.keys.send(pairs) for step in plan.steps]
        dq_parts, dw_parts, returns = [], [], []
        for step, context, lse in zip(plan.steps, contexts, lses, strict=True):
            call, queries = step.call, plan.queries(q, context, step)
            pair = plan.from_rows(step.keys.receive(of_keys.pop(0))).split_with_sizes(widths, -1)
            grads, outs = plan.outputs(grad_out, step), plan.outputs(out, step)
            dq, dk, dv, *dw = run(
                "backward", grads, torch.zeros_like(lse), queries, *pair, *weights, outs, lse, *plan.of_call(call)
            )
            del pair  # which may be as long as the whole sequence, as the gradients of it are
            dpair = torch.cat([dk, dv], -1)
            del dk, dv
            before, own, _ = dq.split_with_sizes([len(call.context), len(call.own), call.padding], plan.dim)
            dq_parts.append(own)
            dw_parts.append(dw)
            back = step.context.send_back(plan.rows_first(before)) if plan.has_context else None
            returns.append((back, step.keys.send_back(plan.rows_first(dpair))))
            del dpair
        dq, dpairs = torch.cat(dq_parts, plan.dim), torch.zeros_like(pairs, dtype=_sum_dtype(pairs))
        for step, (back, keys_back) in zip(plan.steps, returns, strict=True):
            if back is not None:
                step.context.add(back, plan.rows_first(dq))
            step.keys.add(keys_back, dpairs)
        dk, dv = plan.from_rows(dpairs.to(pairs.dtype)).split_with_sizes(widths, -1)
        dweights = (torch.stack(parts).sum(0, dtype=_sum_dtype(parts[0])) for parts in zip(*dw_parts, strict=True))
        return None, dq, dk, dv, *(None if w is None else next(dweights).to(w.dtype) for w in weights)


def _sum_dtype(x: Tensor) -> torch.dtype:
    """What sums of gradients are taken in."""
    return torch.promote_types(x.dtype, torch.float32)


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
