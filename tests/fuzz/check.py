"""What is wrong with a call: results break the accuracy rule, or hidden numbers change a bit of visible results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtagen import reference
from mtagen.dropout import Dropout
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Inputs, Sampler
from mtagen.measure.judge import documents_op, judge, results

from .case import Case

LARGE = 300.0  # what hidden numbers are multiplied by: docs/limits.md promises products of q and k up to 1.6e7
PADS = {"sliced": (8, 8), "unaligned": (1, 2)}  # elements of a row before and behind those of a tensor


@dataclass(frozen=True)
class Problem:
    """The call of a case on a device.

    Attributes:
        case: the case.
        device: where tensors are.
    """

    case: Case
    device: torch.device

    def failures(self, op: Any) -> list[str]:
        """What is wrong, a line each."""
        grad_out = None if self.decodes else self.tensors[1]
        judged = judge(partial(self.ours, op), self.eager, self.tensors[0], grad_out)
        found = [f"{name}: {x.error:.3g} > {x.allowed:.3g}" for name, x in judged.items() if not x.ok]
        return found + (self.leaks(op) if self.case.hidden else [])

    @property
    def decodes(self) -> bool:
        """Whether the call is a decode step."""
        return self.case.call == "decode"

    @property
    def batch(self) -> int:
        """Entries of a batch."""
        return 1 if self.case.call == "varlen" else len(self.case.lengths)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of tensors; packed documents are one sequence."""
        case, (n_q, n_k) = self.case, zip(*self.case.lengths, strict=True)
        of_batch = {"batch": (n_q[0], n_k[0]), "varlen": (sum(n_q), sum(n_k)), "decode": (n_q[0], max(n_k))}
        n_q, n_k = of_batch[case.call]
        n_q += 0 if self.decodes else case.spare[0]
        return Sizes(self.batch, case.heads, case.kv_heads, n_q, n_k + case.spare[1])

    @cached_property
    def tensors(self) -> tuple[Inputs, Tensor]:
        """The arguments of a call and the gradient of the output, with a column for that of the log-sum-exp."""
        case, generator = self.case, torch.Generator().manual_seed(self.case.data)
        sampler = Sampler(case.spec, self.sizes, self.device, generator, rows_outside_heads=True)
        inputs, grad_out = sampler.inputs(decode=self.decodes), sampler.outputs()
        if case.return_lse:
            grad_out = torch.cat([grad_out, grad_out[..., :1]], -1)
        given = [inputs.q * case.size, inputs.k, inputs.v, grad_out]
        if case.call == "varlen":
            given = [x[0].transpose(0, 1) for x in given]
        q, k, v, grad_out = map(laid_out, given, case.layouts)
        dtype = q.dtype if case.cast_weights else torch.float32
        return Inputs(q, k, v, {name: x.to(dtype) for name, x in inputs.weights.items()}), grad_out

    @cached_property
    def seed(self) -> Tensor:
        """What decides which entries are dropped."""
        return torch.tensor([self.case.data - 2**30, 2**62 + self.case.data], device=self.device)

    def ours(self, op: Any, q: Tensor, k: Tensor, v: Tensor, **weights: Tensor) -> Any:
        """Results of the op: out, or out and the log-sum-exp."""
        case, n_q, n_k = self.case, *zip(*self.case.lengths, strict=True)
        options: dict[str, Any] = {"scale": case.scale, "return_lse": case.return_lse, **weights}
        if case.dropout_p:
            options |= {"dropout_p": case.dropout_p, "dropout_seed": self.seed}
        if case.call == "batch":
            return self.joined(op(q, k, v, **options))
        if case.call == "varlen":
            spare_q, spare_k = (n % 2 for n in case.spare)  # the longest document may be said to be longer
            sizes = {"max_q": max(n_q) + spare_q, "max_k": max(n_k) + spare_k}
            options |= {"cu_seq_q": self.lengths((0, *n_q)).cumsum(0), "cu_seq_k": self.lengths((0, *n_k)).cumsum(0)}
            options |= {name: self.stored(options[name]) for name in ("cu_seq_q", "cu_seq_k")}
            return self.joined(op.varlen(q, k, v, **options, **sizes))
        tail, capacity = q.shape[2], k.shape[2]
        used = self.lengths(n_k)[:, None]
        before = torch.arange(tail, device=self.device) < tail - used
        unused = torch.arange(capacity, device=self.device) >= used
        given = zip((q, k, v), (before, unused, unused), case.layouts, strict=False)
        q, k, v = (laid_out(x.masked_fill(hides[:, None, :, None], torch.nan), layout) for x, hides, layout in given)
        lengths = [n + case.spare[0] * (n == capacity) for n in n_k]  # larger ones count as the capacity
        if set(lengths) != {capacity}:
            options["cache_seqlens"] = self.stored(self.lengths(lengths))
        return op.decode(q, k, v, **options, num_splits=case.splits)

    def lengths(self, values: Any) -> Tensor:
        """Lengths on the device."""
        return torch.tensor(values, device=self.device)

    def stored(self, lengths: Tensor) -> Tensor:
        """Lengths as ops take them."""
        lengths = lengths.to(torch.int32)
        return torch.stack([lengths, lengths + 1], 1)[:, 0] if self.case.strided_lengths else lengths

    def eager(self, q: Tensor, k: Tensor, v: Tensor, **weights: Tensor) -> Any:
        """The same results in plain PyTorch."""
        case, n_q, n_k = self.case, *map(list, zip(*self.case.lengths, strict=True))
        if case.call == "batch":
            return self.joined(self.sequence(range(len(q)), q, k, v, **weights))
        if case.call == "varlen":

            def document(*tensors: Tensor, document: int, **weights: Tensor) -> Any:
                return self.sequence(range(document, document + 1), *tensors, **weights)

            made = documents_op(document, n_q, n_k)(q[: sum(n_q)], k[: sum(n_k)], v[: sum(n_k)], **weights)
            out, lse = (
                F.pad(made[0], (0, 0, 0, 0, 0, case.spare[0])),
                F.pad(made[1], (0, case.spare[0]), value=-torch.inf),
            )
            return self.joined((out, lse))
        entries = []
        for i, (new, n) in enumerate(case.lengths):
            rows = min(q.shape[2], n)  # others would be before the sequence
            one = self.sequence(
                range(i, i + 1),
                q[i : i + 1, :, q.shape[2] - rows :],
                k[i : i + 1, :, :n],
                v[i : i + 1, :, :n],
                **weights,
            )
            out, lse = (x[:, :, max(0, rows - new) :] for x in one)
            missing = max(0, new - rows)
            entries.append((F.pad(out, (0, 0, missing, 0)), F.pad(lse, (missing, 0), value=-torch.inf)))
        out, lse = map(torch.cat, zip(*entries, strict=True))
        return (out, lse) if case.return_lse else out

    def sequence(self, numbers: range, q: Tensor, k: Tensor, v: Tensor, **weights: Tensor) -> Any:
        """out and the log-sum-exp of sequences with these numbers by the specification."""
        case = self.case
        options = {name: getattr(case, name) for name in ("causal", "window", "key_padding", "mask", "scale")}
        if case.dropout_p:
            heads = range(numbers.start * case.heads, numbers.stop * case.heads)
            kept = Dropout(self.seed, case.dropout_p).keep(heads, range(q.shape[2]), range(k.shape[2]))
            options |= {"dropout_p": case.dropout_p, "dropout_mask": kept.unflatten(0, (len(numbers), case.heads))}
        return reference(q, k, v, **weights, **options, return_lse=True)

    def joined(self, result: Any) -> Any:
        """Out with the log-sum-exp, if it is asked for, as one more column, 0 where a row sees no key; and as it is."""
        if isinstance(result, Tensor):
            return result
        out, lse = result
        if not self.case.return_lse:
            return out
        column = lse.T if self.case.call == "varlen" else lse
        return torch.cat([out, column.masked_fill(column == -torch.inf, 0).to(out.dtype).unsqueeze(-1)], -1), lse

    def leaks(self, op: Any) -> list[str]:
        """Visible results of which hidden rows and keys change a bit.

        Rows and keys count through all sequences. Hidden are some rows, and the keys that no row takes which takes none
        of these.
        """
        case, (inputs, grad_out) = self.case, self.tensors
        sees, number = self.sight()
        rows = torch.arange(len(sees)) < case.cut * len(sees)
        rows = rows if case.earlier else ~rows
        takes = self.spread(sees, number)
        affected = self.spread(rows[:, None], number)[:, 0]
        keys = ~takes[~affected].any(0)
        with_gradients = case.hidden == "large" and not self.decodes
        visible = {"out": ~affected, "lse": ~affected}
        if with_gradients:
            visible["dq"] = ~self.spread(affected.flip(0)[:, None], number.flip(0)).flip(0)[:, 0]
            visible["dk"] = visible["dv"] = ~keys & ~takes[affected].any(0)

        def spoilt(x: Tensor, hidden: Tensor, layout: str, garbage: str = "large") -> Tensor:
            value = x * LARGE if garbage == "large" else torch.full_like(x, float(garbage))
            return laid_out(torch.where(self.as_rows(hidden).to(x.device), value, x), layout)

        layouts = dict(zip(("q", "k", "v", "grad_out"), case.layouts, strict=True))
        q, v = spoilt(inputs.q, rows, layouts["q"]), spoilt(inputs.v, keys, layouts["v"])
        other = replace(inputs, q=q, k=spoilt(inputs.k, keys, layouts["k"], case.hidden), v=v)
        grads: tuple[Any, Any] = (None, None)
        if with_gradients:
            grads = grad_out, spoilt(grad_out, rows, layouts["grad_out"])
        clean, made = (results(partial(self.ours, op), *given) for given in zip((inputs, other), grads, strict=True))
        return [
            f"hidden {case.hidden}: {name}"
            for name, where in visible.items()
            if name in clean and self.differ(name, where, clean[name], made[name])
        ]

    def differ(self, name: str, where: Tensor, a: Tensor, b: Tensor) -> bool:
        """Whether results differ in some of these rows."""
        if self.decodes:  # results have the new tokens only
            where = where.view(self.batch, -1)[:, -self.sizes.nq :].flatten()
        shown = self.as_rows(where).to(a.device)
        if name == "lse":
            shown = where.to(a.device) if self.case.call == "varlen" else shown[..., 0]
        return not torch.equal(a.where(shown, 0), b.where(shown, 0))

    def as_rows(self, rows: Tensor) -> Tensor:
        """What is so of rows, or of keys, in the shape of q or k."""
        return rows[:, None, None] if self.case.call == "varlen" else rows.view(self.batch, 1, -1, 1)

    def sight(self) -> tuple[Tensor, Tensor]:
        """Which rows of all sequences see which keys; and the number of the sequence of each row."""
        case, spec = self.case, self.case.spec
        sequences = [(n_q, n_k, n_k) for n_q, n_k in case.lengths]
        if case.call == "varlen":
            sequences.append((*case.spare, 0))
        elif self.decodes:
            sequences = [(n_q + spec.context, self.sizes.nk, n_k) for n_q, n_k in case.lengths]
        blocks = []
        for n_q, n_k, used in sequences:
            at, j = torch.arange(used - n_q, used)[:, None], torch.arange(n_k)
            seen = (j < used) & (at >= 0) if self.decodes else (j < used).expand(n_q, -1)
            right = 0 if case.causal else case.window[1]
            blocks.append(
                seen & ((case.window[0] < 0) | (j >= at - case.window[0])) & ((right < 0) | (j <= at + right))
            )
        number = torch.arange(len(blocks)).repeat_interleave(torch.tensor([len(x) for x in blocks]))
        return torch.block_diag(*blocks).bool(), number

    def spread(self, of_rows: Tensor, number: Tensor) -> Tensor:
        """What is so of a row or of one of the rows before it, in its sequence, that convolutions join it with."""
        made = of_rows.clone()
        for n in range(1, min(self.case.spec.context, len(number) - 1) + 1):
            made[n:] |= of_rows[:-n] & (number[n:] == number[:-n])[:, None]
        return made


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A tensor that lies in memory as said; ``expanded`` ones have the numbers of the first head in all."""
    if layout == "heads last":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "expanded":
        return x[:, :1].contiguous().expand_as(x)
    if layout in PADS:
        before, _ = PADS[layout]
        return F.pad(x, PADS[layout], value=torch.nan)[..., before : before + x.shape[-1]]
    return x.contiguous()
