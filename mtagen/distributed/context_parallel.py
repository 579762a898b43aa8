"""Attention over a sequence whose rows are spread over the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh

from ..documents import Documents
from ..errors import InputError, explain
from ..ops.attention import MultiTokenAttention, autocast
from ..ops.inputs import check_call, check_varlen, resolve_scale
from ..spec import WEIGHTS
from .exchange import Exchange
from .sharding import Call, Sharding


class ContextParallel:
    """An op whose sequences are spread over the ranks of a group.

    Each rank holds some rows of queries, keys and values, and makes the outputs of its rows.
    """

    def __init__(
        self, op: MultiTokenAttention, group_or_mesh: ProcessGroup | DeviceMesh, *, balanced: bool = True
    ) -> None:
        self.op, self.balanced = op, balanced
        self.group = _group(group_or_mesh)
        self.rank, self.ranks = get_rank(self.group), get_world_size(self.group)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows of a tensor that all ranks have."""
        return torch.cat([x.narrow(dim, rows.start, len(rows)) for rows in self._held(x.shape[dim])], dim)

    def unshard(self, x: Tensor, dim: int, *, length: int | None = None) -> Tensor:
        """The whole tensor, of which each rank has its rows."""
        sharding = self._sharding(x.shape[dim], length)
        everything = Exchange(sharding.held, self.ranks * [range(sharding.length)], self.group)
        with torch.no_grad():
            return everything.receive(everything.send(x.movedim(dim, 0))).movedim(0, dim)

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
        """The op's output for this rank's rows."""
        spec = self.op.plan.spec
        q, k, v = autocast(q, k, v)
        weights = check_call(spec, self.op.dtypes, q, k, v, (weight, head_weight, post_weight, post_head_weight))
        return self._attend(q, k, v, weights, resolve_scale(scale, spec.head_dim), length, None)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: list[Tensor | None],
        scale: float,
        length: int | None,
        documents: Documents | None,
    ) -> Tensor:
        dim = 2 if documents is None else 0
        if k.shape[dim] != q.shape[dim]:
            rule = "queries and keys of a sequence must be the same rows"
            raise InputError(explain("rows of k", k.shape[dim], rule, f"{q.shape[dim]}, as of q"))
        sharding = self._sharding(q.shape[dim], length)
        spec, held = self.op.plan.spec, sharding.held
        steps = []
        for chunks in zip(*held, strict=True):
            calls = [Call.of(chunk, sharding.length, spec) for chunk in chunks]
            queries = Exchange(held, [call.context for call in calls], self.group) if spec.context else None
            steps.append(_Step(calls[self.rank], queries, Exchange(held, [call.keys for call in calls], self.group)))
        plan = _Plan(tuple(steps), dim, scale, self.op._key, documents)
        out: Tensor = _Attention.apply(plan, q, k, v, *weights)  # type: ignore[no-untyped-call]
        return out

    def _held(self, length: int) -> list[range]:
        return Sharding(length, self.ranks, self.balanced).held[self.rank]

    def _sharding(self, rows: int, length: int | None) -> Sharding:
        """How the sequence is cut of which this rank has so many rows.

        Raises:
            InputError: this rank should have another number of rows.
        """
        sharding = Sharding(rows * self.ranks if length is None else length, self.ranks, self.balanced)
        expected = sum(map(len, sharding.held[self.rank]))
        if rows != expected or (length is None and len(sharding.chunks[0]) != len(sharding.chunks[-1])):
            rule = f"rank {self.rank} of {self.ranks} holds {expected} of {sharding.length}"
            raise InputError(explain("rows", rows, rule, "what shard() returns, and length=... of the whole sequence"))
        return sharding


@dataclass(frozen=True)
class _Step:
    """What makes the outputs of one of a rank's chunks; all ranks take their steps together.

    Attributes:
        call: this rank's call of the op.
        queries: brings the queries before each rank's chunk; None where there are none.
        keys: brings the keys and values that each rank's call takes.
    """

    call: Call
    queries: Exchange | None
    keys: Exchange


@dataclass(frozen=True)
class _Plan:
    """The steps of a call, and what they have in common.

    Attributes:
        steps: in the order in which they are taken.
        dim: the axis of rows of q, k, v and the output.
        scale: as of the op.
        key: the op's.
        documents: where packed documents are in the whole sequence.
    """

    steps: tuple[_Step, ...]
    dim: int
    scale: float
    key: str
    documents: Documents | None

    def options(self, call: Call) -> tuple[Any, ...]:
        """What the registered ops take after their tensors."""
        return self.scale, self.key

    def leading(self, x: Tensor) -> Tensor:
        """``x`` with its rows first."""
        return x.movedim(self.dim, 0)

    def back(self, x: Tensor) -> Tensor:
        """``x``, whose rows are first, with its axes as in q."""
        return x.movedim(0, self.dim)

    def own(self, x: Tensor, step: int) -> Tensor:
        """The rows of a step's chunk, of a tensor of this rank's rows."""
        start = sum(len(earlier.call.own) for earlier in self.steps[:step])
        return x.narrow(self.dim, start, len(self.steps[step].call.own))

    def widened(self, x: Tensor, call: Call) -> Tensor:
        """The rows of a chunk with zeros for the other rows of its call's queries."""
        others = len(call.context), call.padding
        return F.pad(x, (0, 0) * (x.ndim - 1 - self.dim) + others).contiguous()

    def queries(self, q: Tensor, context: Tensor | None, step: int) -> Tensor:
        """The queries of a step's call."""
        call, own = self.steps[step].call, self.own(q, step)
        if context is None and not call.padding:
            return own
        before = [] if context is None else [self.back(context)]
        padding = [own.new_zeros(*own.shape[: self.dim], call.padding, *own.shape[self.dim + 1 :])]
        return torch.cat([*before, own, *padding], self.dim)


class _Attention(torch.autograd.Function):
    """All steps of a call, forward and backward.

    Every rank takes part in every transfer, whatever it computes itself, so that none waits in vain.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor | None) -> Tensor:
        pairs = plan.leading(torch.cat([k, v], -1))
        transfers = [
            (step.queries and step.queries.send(plan.leading(q)), step.keys.send(pairs)) for step in plan.steps
        ]
        outs, lses, contexts = [], [], []
        for number, (step, (queries, keys)) in enumerate(zip(plan.steps, transfers, strict=True)):
            context = step.queries and step.queries.receive(queries)
            k_all, v_all = plan.back(step.keys.receive(keys)).split([k.shape[-1], v.shape[-1]], -1)
            q_all = plan.queries(q, context, number)
            call = step.call
            out, lse = torch.ops.mtagen.forward.default(q_all, k_all, v_all, *weights, *plan.options(call))
            outs.append(out.narrow(plan.dim, len(call.context), len(call.own)))
            lses.append(lse)
            contexts.append(context)
        out = torch.cat(outs, plan.dim)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, *contexts, *lses, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        steps = len(plan.steps)
        q, k, v, out, *others = ctx.saved_tensors
        contexts, lses, weights = others[:steps], others[steps : 2 * steps], others[2 * steps :]
        widths = [k.shape[-1], v.shape[-1]]
        pairs = plan.leading(torch.cat([k, v], -1))
        transfers = [step.keys.send(pairs) for step in plan.steps]
        grads_of_own, returned = [], []
        dweights = [None if weight is None else torch.zeros_like(weight, dtype=_sum_dtype(weight)) for weight in weights]
        for number, (step, transfer) in enumerate(zip(plan.steps, transfers, strict=True)):
            call = step.call
            k_all, v_all = plan.back(step.keys.receive(transfer)).split(widths, -1)
            q_all = plan.queries(q, contexts[number], number)
            grad, result = (plan.widened(plan.own(x, number), call) for x in (grad_out, out))
            dq, dk, dv, *dw = torch.ops.mtagen.backward.default(
                grad, torch.zeros_like(lses[number]), q_all, k_all, v_all, *weights, result, lses[number], *plan.options(call)
            )
            before, own, _ = dq.split([len(call.context), len(call.own), call.padding], plan.dim)
            grads_of_own.append(own)
            returned.append(
                (
                    step.queries and step.queries.send_back(plan.leading(before)),
                    step.keys.send_back(plan.leading(torch.cat([dk, dv], -1))),
                )
            )
            found = iter(dw)
            for total in dweights:
                if total is not None:
                    total += next(found)
        dq = torch.cat(grads_of_own, plan.dim)
        dpairs = torch.zeros_like(pairs, dtype=_sum_dtype(pairs))
        for step, (queries, keys) in zip(plan.steps, returned, strict=True):
            if step.queries is not None:
                step.queries.add(queries, plan.leading(dq))
            step.keys.add(keys, dpairs)
        dk, dv = plan.back(dpairs.to(k.dtype)).split(widths, -1)
        return None, dq, dk, dv, *(None if x is None else x.to(w.dtype) for x, w in zip(dweights, weights, strict=True))


def _sum_dtype(x: Tensor) -> torch.dtype:
    """What sums of gradients are taken in."""
    return torch.promote_types(x.dtype, torch.float32)


def _group(group_or_mesh: ProcessGroup | DeviceMesh) -> ProcessGroup:
    """The group of a mesh.

    Raises:
        InputError: it is neither a group nor a mesh of one dimension.
    """
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names
            rule = "sequences are cut along one dimension of a mesh"
            raise InputError(explain("group_or_mesh", names or group_or_mesh.ndim, rule, "a mesh of it: mesh['cp']"))
        return group_or_mesh.get_group()
    if not isinstance(group_or_mesh, ProcessGroup):
        got = type(group_or_mesh).__name__
        rule = "must say which ranks share a sequence"
        raise InputError(explain("group_or_mesh", got, rule, "a ProcessGroup, or a DeviceMesh of one dimension"))
    return group_or_mesh
