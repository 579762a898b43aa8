"""The ``torch`` backend of pipelines: strips of whole rows of scores, of all heads, in PyTorch ops.

A strip computes some rows of outputs of one batch entry. It needs those rows of queries and the
``context`` rows before them, whose scores and probabilities it computes again. A strip's planes of
scores have at most ``STRIP_SCORES`` entries, unless the fewest rows that pay have more, so that
memory is O(N). The backward pass recomputes a strip and applies the adjoints of the stages in
reverse order. Everything is computed in fp32, or in fp64 for fp64 inputs. Arguments are not checked
here, because the registered ops check them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad

from ..call import Call, Step
from ..dropout import Dropout
from ..evaluate import Bounds
from ..spec import FACTORS, Spec
from . import mixing
from .mixing import TokenTerm
from .scores import Functions, Place, named_learned

STRIP_SCORES = 2**22  # entries of a plane of scores: 16 MiB in fp32
_TERMS = 2**12  # terms of a partial sum in a matrix's gradient: in fp32, longer sums lose digits
_PIECE = 2**12  # keys that one call convolves


def forward(spec: Spec, call: Call, first_entry: int = 0) -> tuple[Tensor, Tensor]:
    """Compute the pipeline's outputs and the log-sum-exp of the rows that its softmax takes.

    Args:
        spec: the operator; dtype and head dims are taken from the tensors instead.
        call: a batch. Query i sits at position i + Nk - Nq.
        first_entry: number of the first batch entry in the dropout mask.

    Returns:
        ``out [B, H, Nq, DV]`` in ``q.dtype`` and ``lse [B, H, Nq]`` in fp32 (fp64 for fp64 inputs).
    """
    q, k, v = call.q, call.k, call.v
    stages = _Stages.of(spec, q, call)
    out, lse = stages.results_without_keys(q, q.shape[2], v)
    for b, strip in _strips(spec, q, k):
        rows = slice(strip.begin, strip.end)
        factors = _dropout_factors(call.dropout, first_entry + b, q.shape[1], strip, stages.dtype)
        terms = stages.terms(b, slice(strip.first, strip.end), strip.keys)
        results = stages.forward(*_operands(strip, q[b], k[b], v[b]), strip.place, terms, strip.context, factors)
        out[b, :, rows], lse[b, :, rows] = results
    return out, lse


def backward(spec: Spec, call: Call, grad_out: Tensor, grad_lse: Tensor, first_entry: int = 0) -> tuple[Tensor, ...]:
    """Compute the gradients of :func:`forward`.

    Args:
        grad_out: ``[B, H, Nq, DV]``, the gradient of out.
        grad_lse: ``[B, H, Nq]``, the gradient of lse; the other arguments are those of
            :func:`forward`.

    Returns:
        The gradients of q, k, v, each weight, the sink and the parameters, in their shapes and dtypes.
    """
    q, k, v, weights = call.q, call.k, call.v, call.weights
    stages = _Stages.of(spec, q, call)
    unseeing = torch.ones(len(q), q.shape[2], device=q.device)  # rows that see no key
    dtype = stages.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    for b, strip in _strips(spec, q, k):
        rows = slice(strip.begin, strip.end)
        unseeing[b, rows] = 0
        douts = F.pad(grad_out[b, :, rows].to(dtype), (0, 0, strip.context, 0))
        dlses = F.pad(grad_lse[b, :, rows].to(dtype), (strip.context, 0))
        queries, keys, values = _operands(strip, q[b], k[b], v[b])
        factors = _dropout_factors(call.dropout, first_entry + b, q.shape[1], strip, stages.dtype)
        terms = stages.terms(b, slice(strip.first, strip.end), strip.keys)
        dqueries, dkeys, dvalues = stages.backward(queries, keys, values, strip.place, terms, douts, dlses, factors)
        dq[b, :, strip.first : strip.end] += dqueries
        dk[b, :, strip.keys] += dkeys
        dv[b, :, strip.keys] += dvalues
    dweights = (stages.gradients[name] for name in spec.weights(q.shape[1]))
    if "sink" in stages.functions.gradients:  # the log-sum-exp of such a row is the sink
        stages.functions.gradients["sink"] += (grad_lse * unseeing[:, None]).sum((0, 2))
    grads = (dx.to(x.dtype) for dx, x in zip((dq, dk, dv, *dweights), (q, k, v, *weights), strict=True))
    return *grads, *stages.functions.results()


def decode(spec: Spec, step: Step) -> tuple[Tensor, Tensor]:
    """Compute the last n_new rows of the pipeline over cached keys, as one strip.

    Args:
        spec: the operator, as for :func:`forward`.
        step: the last row of ``q_tail`` is at the last position of its sequence. Rows at negative
            positions are ignored, whatever they hold, and so are keys that are not in use.
            ``cache_seqlens`` counts the new keys, too; numbers above N mean all N.

    Returns:
        ``out [B, H, n_new, DV]`` in ``q_tail.dtype`` and ``lse [B, H, n_new]`` in fp32 (fp64 for fp64 inputs). New rows
        at negative positions get 0 and -inf.
    """
    q_tail, k_cache, v_cache, cache_seqlens = step.q_tail, step.k_cache, step.v_cache, step.cache_seqlens
    tail, capacity = q_tail.shape[2], k_cache.shape[2]
    n_new = tail - spec.context
    stages = _Stages.of(spec, q_tail, step)
    out, lse = stages.results_without_keys(q_tail, n_new, v_cache)
    if not out.numel():
        return out, lse
    all_heads = torch.arange(q_tail.shape[1], device=q_tail.device)
    lengths = [capacity] * len(out) if cache_seqlens is None else cache_seqlens.clamp(0, capacity).tolist()
    for b, length in enumerate(lengths):
        rows = min(tail, length)  # rows at positions from 0 on
        if new := min(n_new, rows):
            first = length - rows
            keys = _keys(spec, first, length - 1, length)
            place = Place(torch.full_like(all_heads, b), all_heads, first, keys.start)
            terms = stages.terms(b, slice(tail - rows, tail), keys)
            out[b, :, -new:], lse[b, :, -new:] = stages.forward(
                q_tail[b, :, tail - rows :], k_cache[b, :, keys], v_cache[b, :, keys], place, terms, rows - new
            )
    return out, lse


_Terms: TypeAlias = dict[str, list[TokenTerm]]  # by the weight of the mixing


class _Strip(NamedTuple):
    """Rows ``[begin, end)`` of outputs, computed from rows ``[first, end)`` of queries and some
    keys.

    ``place`` is that of the scores of these rows and keys.
    """

    first: int
    begin: int
    end: int
    keys: slice
    place: Place

    @property
    def context(self) -> int:
        """Number of rows of queries before the rows of outputs."""
        return self.begin - self.first


def _strips(spec: Spec, q: Tensor, k: Tensor) -> Iterator[tuple[int, _Strip]]:
    """Yield the strips of each batch entry, without strips that see no key."""
    (batch, heads, nq, _), nk = q.shape, k.shape[2]
    if not (heads and nk):
        return
    size = max(1, _rows(spec, STRIP_SCORES // heads, nk), 2 * spec.context)  # at most a third of a strip is context
    all_heads = torch.arange(heads, device=q.device)
    for b in range(batch):
        for begin in range(0, nq, size):
            end = min(begin + size, nq)
            first = max(0, begin - spec.context)
            keys = _keys(spec, first + nk - nq, end - 1 + nk - nq, nk)
            if keys.start < keys.stop:
                place = Place(torch.full_like(all_heads, b), all_heads, first + nk - nq, keys.start)
                yield b, _Strip(first, begin, end, keys, place)


def _rows(spec: Spec, scores: int, nk: int) -> int:
    """Return the number of rows whose plane has ``scores`` scores, over the keys that any of them
    sees.
    """
    if spec.left is None or spec.right is None:
        return scores // nk
    window = spec.left + spec.right
    return max(scores // nk, (math.isqrt(window * window + 4 * scores) - window) // 2)


def _keys(spec: Spec, first: int, last: int, nk: int) -> slice:
    """Return the keys that any of the rows at positions ``first`` to ``last`` sees."""
    begin = 0 if spec.left is None else max(0, first - spec.left)
    return slice(begin, nk if spec.right is None else min(nk, max(0, last + spec.right + 1)))


def _operands(strip: _Strip, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[:, strip.first : strip.end], k[:, strip.keys], v[:, strip.keys]


def _dropout_factors(
    dropout: Dropout | None, entry: int, heads: int, strip: _Strip, dtype: torch.dtype
) -> Tensor | None:
    """Return dropout's factors ``[H, rows, keys]`` of a strip's probabilities: 0, or 1 / (1 - p)."""
    if dropout is None:
        return None
    slots, rows = range(entry * heads, (entry + 1) * heads), range(strip.first, strip.end)
    return dropout.keep(slots, rows, range(strip.keys.start, strip.keys.stop)).to(dtype) / (1 - dropout.p)


class _Scores(NamedTuple):
    """Scores in the order of the pipeline: of q and k, as the convolution takes them, convolved, as the mixing
    takes them, mixed, and as the softmax takes them.
    """

    scores: Tensor
    taken: Tensor
    convolved: Tensor
    passed_on: Tensor
    mixed: Tensor
    logits: Tensor


class _Stages:
    """The stages of a pipeline, applied strip by strip; it accumulates the gradients of the
    weights.

    Planes of scores or probabilities are ``[H, rows, keys]``.
    """

    def __init__(
        self,
        spec: Spec,
        weights: dict[str, Tensor],
        functions: Functions,
        bounds: Bounds,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        self.spec, self.weights, self.functions, self.scale, self.dtype = spec, weights, functions, scale, dtype
        self.bounds = bounds
        self.gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    @classmethod
    def of(cls, spec: Spec, q: Tensor, call: Call | Step) -> _Stages:
        """Make the stages of a spec from a call's weights, which are cast to the dtype of computation."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        named = zip(spec.weights(q.shape[1]), call.weights, strict=True)
        functions = Functions(spec, call.learned, dtype)
        bounds = Bounds(spec, named_learned(spec, call.learned))
        return cls(spec, {name: w.to(dtype) for name, w in named}, functions, bounds, call.scale, dtype)

    def results_without_keys(self, q: Tensor, rows: int, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of rows that see no key."""
        out = q.new_zeros(*q.shape[:2], rows, v.shape[3])
        lse = q.new_full(out.shape[:3], -torch.inf, dtype=self.dtype)
        if self.functions.sink is not None:
            lse.copy_(self.functions.sink[:, None])
        return out, lse

    def terms(self, entry: int, rows: slice, keys: slice) -> _Terms:
        """Return what some queries and keys of a batch entry add to each mixing, by its weight."""
        terms: _Terms = {name: [] for name in self.spec.mixed}
        for name, x in self.functions.factors.items():
            option, of_keys = FACTORS[name]
            at = entry, slice(None), keys if of_keys else rows
            weight = "post_head_weight" if option.startswith("post") else "head_weight"
            terms[weight].append(TokenTerm(x[at], self.functions.gradients[name][at], bool(of_keys)))
        return terms

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, place: Place, terms: _Terms, context: int, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out ``[H, R, DV]`` and lse ``[H, R]`` of the rows of q after the first
        ``context``.

        ``place`` is that of all scores of q and k, and ``terms`` are those of its queries and keys; ``factors`` are
        dropout's.
        """
        forbidden = self._forbidden(q, k, place)
        logits = self._logits(q, k, place, terms, forbidden).logits
        p, lse = self._softmax(logits, place)
        probabilities = _dropped(self._mix_after(self._post(p, forbidden), terms, forbidden), factors)
        out = _product(probabilities[:, context:], v.to(self.dtype), forbidden[context:])
        return out, lse[:, context:, 0]

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        place: Place,
        terms: _Terms,
        dout: Tensor,
        dlse: Tensor,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, given those of out and lse for all rows of q."""
        forbidden = self._forbidden(q, k, place)
        scores, taken, convolved, passed_on, mixed, logits = self._logits(q, k, place, terms, forbidden)
        p, lse = self._softmax(logits, place)
        unmixed = self._post(p, forbidden)
        douts = _by_kv_head(dout, v)
        dv = _by_kv_head(_dropped(self._mix_after(unmixed, terms, forbidden), factors), v).mT @ douts
        dpost = _dropped((douts @ v.to(self.dtype).mT).view_as(p).masked_fill(forbidden, 0), factors)
        dunmixed = self._mix_backward("post_head_weight", unmixed, dpost, terms)
        dp = self._convolve_backward("post_weight", p, dunmixed, forbidden)
        minus_dots = dlse.unsqueeze(-1) - (p * dp).sum(-1, keepdim=True)
        self.functions.sink_backward(lse, minus_dots, place)
        dmixed = self.functions.backward("logits", p * (dp + minus_dots), mixed, place)
        dpassed_on = self._mix_backward("head_weight", passed_on.masked_fill(forbidden, 0), dmixed, terms)
        dconvolved = self.functions.backward("convolved", dpassed_on, convolved, place)
        dtaken = self._convolve_backward("weight", taken, dconvolved, forbidden)
        dscores = self.functions.backward("scores", dtaken, scores, place).mul(self.scale)
        dq = _product(dscores, k.to(self.dtype), self._unused(forbidden))
        return dq, _by_kv_head(dscores, k).mT @ _by_kv_head(q.to(self.dtype), k), dv

    def _unused(self, forbidden: Tensor) -> Tensor:
        """Return the scores that enter no visible convolved score."""
        if self.spec.mask == "source" or "weight" not in self.weights:
            return forbidden
        reach = self.weights["weight"].shape[1] - 1  # a score enters this many later rows, at the keys that they see
        return F.pad(forbidden, (0, 0, 0, reach), value=True).unfold(0, reach + 1, 1).all(-1)

    def _forbidden(self, q: Tensor, k: Tensor, place: Place) -> Tensor:
        forbidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        if self.spec.right is not None:
            forbidden |= torch.ones_like(forbidden).triu(place.corner + self.spec.right + 1)
        if self.spec.left is not None:
            forbidden |= torch.ones_like(forbidden).tril(place.corner - self.spec.left - 1)
        rows, keys = (torch.arange(n, device=q.device) for n in forbidden.shape)
        entry = place.entries[0]  # of all planes of a strip
        hidden = self.bounds.hidden(rows[:, None] + place.position, keys + place.key, entry)
        return forbidden if hidden is None else forbidden | hidden

    def _logits(self, q: Tensor, k: Tensor, place: Place, terms: _Terms, forbidden: Tensor) -> _Scores:
        scores = self.scale * (_by_kv_head(q.to(self.dtype), k) @ k.to(self.dtype).mT)
        scores = scores.view(*q.shape[:2], -1)
        taken = self.functions.value("scores", scores, place)
        convolved = self._convolve("weight", taken, forbidden)
        passed_on = self.functions.value("convolved", convolved, place)
        mixed = self._mix("head_weight", passed_on, terms)
        logits = self.functions.value("logits", mixed, place).masked_fill(forbidden, -torch.inf)
        return _Scores(scores, taken, convolved, passed_on, mixed, logits)

    def _softmax(self, logits: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        """Return the softmax of rows and their log-sum-exps; probabilities of a row that sees no key are 0."""
        lse, sink = logits.logsumexp(-1, keepdim=True), self.functions.sink_of(place)
        if sink is None:
            return logits.softmax(-1).masked_fill(logits == -torch.inf, 0), lse
        lse = torch.logaddexp(lse, sink.expand_as(lse))
        return (logits - lse).exp(), lse

    def _post(self, p: Tensor, forbidden: Tensor) -> Tensor:
        """Apply the convolution after the softmax."""
        return self._convolve("post_weight", p, forbidden).masked_fill(forbidden, 0)

    def _mix_after(self, x: Tensor, terms: _Terms, forbidden: Tensor) -> Tensor:
        """Mix probabilities. Hidden probabilities stay 0, whatever the factors of their keys are."""
        mixed = self._mix("post_head_weight", x, terms)
        return mixed.masked_fill(forbidden, 0) if terms.get("post_head_weight") else mixed

    def _mix(self, name: str, x: Tensor, terms: _Terms) -> Tensor:
        if name not in self.weights:
            return x
        weight = self.weights[name]
        mixed = (weight @ x.reshape(*weight.shape[:2], -1)).view_as(x)
        for term in terms[name]:
            mixed += mixing.forward(torch.unflatten(x, 0, weight.shape[:2]), term).flatten(0, 1)
        return mixed

    def _mix_backward(self, name: str, x: Tensor, dy: Tensor, terms: _Terms) -> Tensor:
        """Return the gradient of a mixing's input ``x``; add those of its matrices and of factors to
        ``gradients``.
        """
        if name not in self.weights:
            return dy
        weight = self.weights[name]
        x, gradient = (y.reshape(*weight.shape[:2], -1) for y in (x, dy))
        parts = zip(torch.split(gradient, _TERMS, -1), torch.split(x, _TERMS, -1), strict=True)
        self.gradients[name] += torch.stack([dy_part @ x_part.mT for dy_part, x_part in parts]).sum(0)
        dx = (weight.mT @ gradient).view_as(dy)
        for term in terms[name]:
            x_of_group, dy_of_group = (y.view(*weight.shape[:2], *dy.shape[1:]) for y in (x, gradient))
            dx += mixing.backward(x_of_group, dy_of_group, term).flatten(0, 1)
        return dx

    def _convolve(self, name: str, x: Tensor, forbidden: Tensor) -> Tensor:
        if name not in self.weights:
            return x
        padded = self._padded(name, x, forbidden)
        results = torch.zeros_like(x)
        for term in self._terms(self.weights[name], forbidden):
            pieces = (F.conv2d(term.of(padded, keys), term.kernel, groups=len(x))[0] for keys in _pieces(x))
            results += term.masked(torch.cat([*pieces], -1)[:, : x.shape[1], : x.shape[2]])
        return results

    def _convolve_backward(self, name: str, x: Tensor, dy: Tensor, forbidden: Tensor) -> Tensor:
        """Return the gradient of a convolution's input ``x``; add that of its filters to
        ``gradients``.
        """
        if name not in self.weights:
            return dy
        _, cq, ck = self.weights[name].shape
        (_, rows, nk), left = x.shape, self.spec.padding(ck)[0]
        padded = self._padded(name, x, forbidden)
        dpadded = torch.zeros_like(padded)
        for term in self._terms(self.weights[name], forbidden):
            gradients = _rounded(term.masked(dy)).unsqueeze(0)
            for keys in _pieces(x):
                part, gradient = term.of(padded, keys), gradients[..., keys]
                dkernel: Tensor = grad.conv2d_weight(  # type: ignore[no-untyped-call]
                    part, term.kernel.shape, gradient, groups=len(x)
                )
                self.gradients[name][:, :, term.columns] += dkernel.squeeze(1)
                dpart: Tensor = grad.conv2d_input(  # type: ignore[no-untyped-call]
                    part.shape, term.kernel, gradient, groups=len(x)
                )
                term.of(dpadded, keys).add_(dpart)
        dx = dpadded[0, :, cq - 1 : cq - 1 + rows, left : left + nk]
        return dx.masked_fill(forbidden, 0) if self.spec.mask == "source" else dx

    def _padded(self, name: str, x: Tensor, forbidden: Tensor) -> Tensor:
        _, cq, ck = self.weights[name].shape
        visible = x.masked_fill(forbidden, 0) if self.spec.mask == "source" else x
        return F.pad(_rounded(visible), (*self.spec.padding(ck), cq - 1, 0)).unsqueeze(0)

    def _terms(self, weight: Tensor, forbidden: Tensor) -> Iterator[_Term]:
        """Yield all columns of a filter at once, or one by one if the mask depends on the result's
        row.
        """
        ck, nk = weight.shape[2], forbidden.shape[1]
        if self.spec.mask == "source":
            yield _Term(slice(0, ck), weight.unsqueeze(1), None)
            return
        hidden = F.pad(forbidden, self.spec.padding(ck))
        for c in range(ck):
            yield _Term(slice(c, c + 1), weight[:, None, :, c : c + 1], hidden[:, c : c + nk])


class _Term(NamedTuple):
    """Columns of a filter, and which of their results count as zero."""

    columns: slice
    kernel: Tensor
    hidden: Tensor | None

    def of(self, padded: Tensor, keys: slice) -> Tensor:
        """Return the columns of padded planes that the results of some keys read."""
        return padded[..., keys.start + self.columns.start : keys.stop + self.columns.stop - 1]

    def masked(self, results: Tensor) -> Tensor:
        """Return ``results`` with zeros where they do not count."""
        return results if self.hidden is None else results.masked_fill(self.hidden, 0)


def _pieces(x: Tensor) -> list[slice]:
    """Cut the keys of planes, as padded by :func:`_rounded`, into pieces that are convolved one by
    one.

    On CPUs oneDNN caches a primitive for each shape of a convolution, which takes about as much
    memory as the result.
    """
    width = _round(x.shape[2])
    return [slice(begin, min(begin + _PIECE, width)) for begin in range(0, width, _PIECE)]


def _rounded(x: Tensor) -> Tensor:
    """Pad planes with zeros to rounded numbers of rows and keys, so that convolutions have few
    shapes.
    """
    rows, keys = x.shape[1:]
    return F.pad(x, (0, _round(keys) - keys, 0, _round(rows) - rows))


def _round(n: int) -> int:
    """Round up to four binary digits, and from 4096 on to a multiple of 256."""
    multiple = 1 << min(max(n.bit_length() - 4, 0), 8)
    return -(-n // multiple) * multiple


def _product(plane: Tensor, values: Tensor, unused: Tensor) -> Tensor:
    """Multiply ``plane [H, rows, keys]`` by ``values [Hkv, keys, dim]``. No ``unused`` value
    reaches a row.

    The plane is 0 at unused values, but 0 times infinity or NaN is NaN, so keys with such values
    are added one by one.
    """
    infinite = ~values.isfinite().all(-1).all(0)
    if not infinite.any():
        return (_by_kv_head(plane, values) @ values).view(*plane.shape[:2], -1)
    result = _product(plane, values.masked_fill(infinite[:, None], 0), unused)
    group = len(plane) // len(values)
    for j in infinite.nonzero().flatten().tolist():
        term = plane[:, :, j, None] * values[:, None, j].repeat_interleave(group, 0)
        result += term.masked_fill(unused[:, j, None], 0)
    return result


def _dropped(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors


def _by_kv_head(x: Tensor, kv: Tensor) -> Tensor:
    """Return the rows of the heads that share keys, one head after another: ``[Hkv, H/Hkv * R,
    ...]``.
    """
    return x.reshape(len(kv), -1, x.shape[2])
