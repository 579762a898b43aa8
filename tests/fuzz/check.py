"""Check one call: results keep the accuracy rule, and hidden numbers change no bit of visible results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtagen import reference
from mtagen.accuracy import Comparison
from mtagen.dropout import Dropout
from mtagen.evaluate import Bounds
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Inputs, Sampler
from mtagen.measure.judge import documents_op, judge, results
from mtagen.spec import RULES, SINK

from .case import Case

LARGE = 300.0  # factor of hidden numbers; docs/limits.md promises products of q and k up to 1.6e7
NEARBY = 16  # calls nearby that a failing call is compared with
NUMBERS, MOST_DRAWS = 64, 16  # that the smallest tensor of a call must have over all draws; draws at most
PADS = {"sliced": (8, 8), "unaligned": (1, 2)}  # elements that a row's memory has before and behind the tensor's


@dataclass(frozen=True)
class Problem:
    """The tensors of a case on a device.

    Masks of rows and of keys count through all sequences, as packed documents do.
    """

    case: Case
    device: torch.device

    def failures(self, op: Any) -> list[str]:
        """Return what is wrong with the results of ``op``, a line each.

        The rule compares largest errors. Over few numbers these are a matter of luck, so calls with a small tensor,
        such as the weight of one tap, are judged by the largest errors over several draws of the data. Sinks, which
        always are small, are judged by calls nearby alone: each draw takes as long as the call.
        """
        weights = (x for name, x in self.tensors[0].weights.items() if name != SINK.name)
        given = (self.tensors[0].q, self.tensors[0].k, *weights)
        fewest = min((x.numel() for x in given if x.numel()), default=NUMBERS)
        draws = min(MOST_DRAWS, -(-NUMBERS // fewest))
        problems = [Problem(replace(self.case, data=self.case.data + i), self.device) for i in range(draws)]
        judged = {problem: problem.judged(op) for problem in problems}
        found = []
        for name in judged[problems[0]]:
            worst = Comparison(*(max(getattr(x[name], of.name) for x in judged.values()) for of in fields(Comparison)))
            farthest = max(judged, key=lambda problem: judged[problem][name].error)
            if not worst.ok and worst.error > (allowed := max(worst.allowed, farthest.allowed_nearby.get(name, 0.0))):
                found.append(f"{name}: {worst.error:.3g} > {allowed:.3g}")
        return found + (self.leaks(op) if self.case.hidden else [])

    @cached_property
    def allowed_nearby(self) -> dict[str, float]:
        """The largest error that the rule allows for calls nearby, by the name of the result.

        Eager PyTorch may be lucky: where a row sees two keys, or dropout keeps one, its roundings may cancel, and ours
        need not. Calls whose tensors are larger or smaller by at most 1/64 are the same problem with other roundings.
        """
        (inputs, grad_out), generator = self.tensors, torch.Generator().manual_seed(self.case.data)

        def nearby(x: Tensor) -> Tensor:
            return (x * (1 + (torch.rand((), generator=generator).item() - 0.5) / 32)).to(x.dtype)

        allowed: dict[str, float] = {}
        for _ in range(NEARBY):
            weights, parameters = (
                {name: nearby(x) for name, x in given.items()} for given in (inputs.weights, inputs.parameters)
            )
            q, k, v = map(nearby, (inputs.q, inputs.k, inputs.v))
            moved = replace(inputs, q=q, k=k, v=v, weights=weights, parameters=parameters)
            for name, comparison in self.compared(self.eager, moved, grad_out).items():
                if comparison.allowed < torch.inf:
                    allowed[name] = max(comparison.allowed, allowed.get(name, 0.0))
        return allowed

    def judged(self, op: Any) -> dict[str, Comparison]:
        """Return how the results of ``op`` compare with eager PyTorch's, by name."""
        return self.compared(partial(self.ours, op), *self.tensors)

    def compared(self, function: Callable[..., Any], inputs: Inputs, grad_out: Tensor) -> dict[str, Comparison]:
        """Return how the results of a function of ``inputs`` compare with eager PyTorch's, by name."""
        case = self.case
        scale = 1.0 if case.scale is None else max(1.0, abs(case.scale) * case.head_dim**0.5)
        size = scale * case.size / (1 - case.dropout_p)
        return judge(function, self.eager, inputs, None if self.decodes else grad_out, size=size)

    @property
    def decodes(self) -> bool:
        """Whether the call is a decode step."""
        return self.case.call == "decode"

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed documents."""
        return self.case.call == "varlen"

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the tensors; packed documents are one sequence."""
        case, (queries, keys) = self.case, zip(*self.case.lengths, strict=True)
        n_q = sum(queries) + case.spare[0] if self.packed else queries[0]
        n_k = sum(keys) if self.packed else max(keys)
        return Sizes(1 if self.packed else len(queries), case.heads, case.kv_heads, n_q, n_k + case.spare[1])

    @cached_property
    def tensors(self) -> tuple[Inputs, Tensor]:
        """The arguments, and the gradient of the output with one more column for that of the log-sum-exp."""
        case, generator = self.case, torch.Generator().manual_seed(self.case.data)
        sampler = Sampler(case.spec, self.sizes, self.device, generator, rows_outside_heads=True)
        inputs, grad_out = sampler.inputs(decode=self.decodes), sampler.outputs()
        if case.return_lse:
            grad_out = torch.cat([grad_out, grad_out[..., :1]], -1)
        given = [inputs.q * case.size, inputs.k, inputs.v, grad_out]
        if self.packed:
            given = [x[0].transpose(0, 1) for x in given]
        q, k, v, grad_out = map(laid_out, given, case.layouts)
        dtype = q.dtype if case.cast_weights else torch.float32
        weights, parameters = (
            {name: x.to(dtype) for name, x in given.items()} for given in (inputs.weights, inputs.parameters)
        )
        return replace(inputs, q=q, k=k, v=v, weights=weights, parameters=parameters), grad_out

    @cached_property
    def seed(self) -> Tensor:
        """The seed of dropout."""
        return torch.tensor([self.case.data - 2**30, 2**62 + self.case.data], device=self.device)

    def ours(self, op: Any, q: Tensor, k: Tensor, v: Tensor, **weights: Any) -> Any:
        """Call the op; return out, or out and the log-sum-exp."""
        case, (n_q, n_k) = self.case, zip(*self.case.lengths, strict=True)
        options: dict[str, Any] = {"scale": case.scale, "return_lse": case.return_lse, **weights}
        if case.dropout_p:
            options |= {"dropout_p": case.dropout_p, "dropout_seed": self.seed}
        if self.packed:
            for axis, lengths, more in zip("qk", (n_q, n_k), case.spare, strict=True):
                options[f"cu_seq_{axis}"] = self.lengths([*accumulate((0, *lengths))])
                options[f"max_{axis}"] = max(lengths) + more % 2  # the maximum may be larger than any document
            return self.joined(op.varlen(q, k, v, **options))
        if not self.decodes:
            return self.joined(op(q, k, v, **options))
        tail, capacity = q.shape[2], k.shape[2]
        used = torch.tensor(n_k, device=self.device)[:, None]
        before = torch.arange(tail, device=self.device) < tail - used
        unused = torch.arange(capacity, device=self.device) >= used
        given = zip((q, k, v), (before, unused, unused), case.layouts, strict=False)
        q, k, v = (laid_out(x.masked_fill(hides[:, None, :, None], torch.nan), layout) for x, hides, layout in given)
        lengths = [n + case.spare[0] * (n == capacity) for n in n_k]  # a larger length counts as the capacity
        if {*lengths} != {capacity}:
            options["cache_seqlens"] = self.lengths(lengths)
        return op.decode(q, k, v, **options, num_splits=case.splits)

    def lengths(self, values: Sequence[int]) -> Tensor:
        """Make a tensor of lengths, which may be a column of a table."""
        lengths = torch.tensor(values, dtype=torch.int32, device=self.device)
        return torch.stack([lengths, lengths + 1], 1)[:, 0] if self.case.strided_lengths else lengths

    def eager(self, q: Tensor, k: Tensor, v: Tensor, **weights: Any) -> Any:
        """Return the same results in plain PyTorch."""
        case, (n_q, n_k) = self.case, map(list, zip(*self.case.lengths, strict=True))
        if self.packed:

            def alone(*tensors: Tensor, document: int, **weights: Any) -> Any:
                return self.sequences(document, *tensors, **weights)

            total_q, total_k = sum(n_q), sum(n_k)
            of_documents = documents_op(alone, n_q, n_k, dict(case.parameters))
            out, lse = of_documents(q[:total_q], k[:total_k], v[:total_k], **weights)
            spare = case.spare[0]
            return self.joined((F.pad(out, (0, 0, 0, 0, 0, spare)), F.pad(lse, (0, spare), value=-torch.inf)))
        if not self.decodes:
            return self.joined(self.sequences(0, q, k, v, **weights))
        entries = []
        for i, (new, n) in enumerate(case.lengths):
            before = max(0, q.shape[2] - n)  # rows before the sequence's first
            one = (x[i : i + 1] for x in (q[:, :, before:], k[:, :, :n], v[:, :, :n]))
            out, lse = self.sequences(i, *one, **weights)
            unseeing = weights["sink"].to(lse.dtype)[:, None] if case.sink else lse.new_full((1, 1), -torch.inf)
            lse = torch.cat([unseeing.expand(1, lse.shape[1], before), lse], -1)
            out = F.pad(out, (0, 0, before, 0))
            entries.append((out[:, :, -new:], lse[:, :, -new:]))
        out, lse = map(torch.cat, zip(*entries, strict=True))
        return (out, lse) if case.return_lse else out

    def sequences(self, first: int, q: Tensor, k: Tensor, v: Tensor, **weights: Any) -> Any:
        """Return out and the log-sum-exp of sequences by the specification; ``first`` numbers the first of them."""
        case = self.case
        options = {name: getattr(case, name) for name in (*RULES, "scale")}
        if case.dropout_p:
            heads = range(first * case.heads, (first + len(q)) * case.heads)
            kept = Dropout(self.seed, case.dropout_p).keep(heads, range(q.shape[2]), range(k.shape[2]))
            options |= {"dropout_p": case.dropout_p, "dropout_mask": kept.unflatten(0, q.shape[:2])}
        return reference(q, k, v, **weights, **options, return_lse=True)

    def joined(self, result: Any) -> Any:
        """Append the log-sum-exp to out as a column, so that gradients come through both; 0 stands for -inf there."""
        if not self.case.return_lse:
            return result[0] if isinstance(result, tuple) else result
        out, lse = result
        column = (lse.T if self.packed else lse).unsqueeze(-1)
        return torch.cat([out, column.masked_fill(column == -torch.inf, 0).to(out.dtype)], -1), lse

    def leaks(self, op: Any) -> list[str]:
        """Return the results of which hidden numbers change a bit that they must not change, a line each.

        Hidden are the rows from ``case.cut`` on, or those before, and the keys that no other row depends on. Their
        numbers are replaced, and the results of the other rows and keys are compared.
        """
        case, (inputs, grad_out) = self.case, self.tensors
        sees, number = self.sight()
        rows = (torch.arange(len(sees)) < case.cut * len(sees)) == case.earlier
        takes, affected = self.spread(sees, number), self.spread(rows[:, None], number)[:, 0]
        keys = ~takes[~affected].any(0)
        visible, grads = {"out": ~affected, "lse": ~affected}, (None, None)

        def spoilt(x: Tensor, hidden: Tensor, argument: int, garbage: str = "large") -> Tensor:
            value = x * LARGE if garbage == "large" else torch.full_like(x, float(garbage))
            return laid_out(torch.where(self.as_rows(hidden), value, x), case.layouts[argument])

        if case.hidden == "large" and not self.decodes:  # gradients of rows with infinities or NaN may be anything
            later = self.spread(affected.flip(0)[:, None], number.flip(0)).flip(0)[:, 0]
            visible |= {"dq": ~later} | dict.fromkeys(("dk", "dv"), ~keys & ~takes[affected].any(0))
            grads = grad_out, spoilt(grad_out, rows, 3)
        q, v = spoilt(inputs.q, rows, 0), spoilt(inputs.v, keys, 2)
        others = replace(inputs, q=q, k=spoilt(inputs.k, keys, 1, case.hidden), v=v)
        clean, made = (results(partial(self.ours, op), *given) for given in zip((inputs, others), grads, strict=True))
        names = [name for name, where in visible.items() if name in clean and self.differ(name, where, clean, made)]
        return [f"hidden {case.hidden}: {name} changes" for name in names]

    def differ(self, name: str, where: Tensor, clean: dict[str, Tensor], made: dict[str, Tensor]) -> bool:
        """Return whether a result differs in some of these rows or keys."""
        if self.decodes:  # results have the new tokens only
            where = where.view(self.sizes.batch, -1)[:, -self.sizes.nq :].flatten()
        shown = self.as_rows(where)
        if name == "lse":
            shown = shown[:, 0, 0] if self.packed else shown[..., 0]
        return not torch.equal(clean[name].where(shown, 0), made[name].where(shown, 0))

    def as_rows(self, rows: Tensor) -> Tensor:
        """Give a mask of rows, or of keys, the shape of q or k."""
        return (rows[:, None, None] if self.packed else rows.view(self.sizes.batch, 1, -1, 1)).to(self.device)

    def sight(self) -> tuple[Tensor, Tensor]:
        """Return which rows see which keys, and the number of each row's sequence."""
        case, blocks = self.case, []
        left, right = (-1 if limit is None else limit for limit in (case.spec.left, case.spec.right))
        bounds, entry = Bounds(case.spec, {}), torch.zeros((), dtype=torch.int64)
        sequences = [(n_q, n_k, n_k) for n_q, n_k in case.lengths]
        if self.packed:
            sequences.append((*case.spare, 0))
        elif self.decodes:
            sequences = [(n_q + case.spec.context, self.sizes.nk, n_k) for n_q, n_k in case.lengths]
        for n_q, n_k, used in sequences:
            at, j = torch.arange(used - n_q, used)[:, None], torch.arange(n_k)
            sees = (j < used) & ((at >= 0) | (not self.decodes))  # decode leaves out rows before the sequence
            hidden = bounds.hidden(at, j, entry)
            sees &= True if hidden is None else ~hidden
            blocks.append(sees & ((left < 0) | (j >= at - left)) & ((right < 0) | (j <= at + right)))
        number = torch.arange(len(blocks)).repeat_interleave(torch.tensor([len(x) for x in blocks]))
        return torch.block_diag(*blocks).bool(), number

    def spread(self, of_rows: Tensor, number: Tensor) -> Tensor:
        """Return what holds for a row, or for an earlier row of its sequence that convolutions join it with."""
        made = of_rows.clone()
        for n in range(1, min(self.case.spec.context, len(number) - 1) + 1):
            made[n:] |= of_rows[:-n] & (number[n:] == number[:-n])[:, None]
        return made


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return a tensor in this layout of memory; an ``expanded`` one has the numbers of the first head in all heads."""
    if layout == "heads last":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "expanded":
        return x[:, :1].contiguous().expand_as(x)
    if layout in PADS:
        before, _ = PADS[layout]
        return F.pad(x, PADS[layout], value=torch.nan)[..., before : before + x.shape[-1]]
    return x.contiguous()
