"""Multi-token attention in plain PyTorch, with all scores in memory and autograd's gradients.

It defines the op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import check_batch, check_dense, check_learned, resolve_scale, shaped_weight
from .dropout import check_dropout_p
from .dtypes import TORCH_DTYPES
from .errors import InputError, explain
from .evaluate import Bounds, evaluate
from .expressions.functions import functions_of
from .expressions.language import ENTRY, HEAD, KEY, POSITION, SCORE
from .expressions.places import axes_in
from .spec import EXPRESSIONS, FACTORS, HEAD_DIMS, Expression, KeyPadding, Mask, Spec


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None = None,
    *,
    head_weight: Tensor | None = None,
    post_weight: Tensor | None = None,
    post_head_weight: Tensor | None = None,
    query_factors: Tensor | None = None,
    key_factors: Tensor | None = None,
    post_query_factors: Tensor | None = None,
    post_key_factors: Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    key_padding: KeyPadding = "both",
    mask: Mask = "source",
    scores: Expression | None = None,
    convolved: Expression | None = None,
    logits: Expression | None = None,
    visible: Expression | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute dropout(mix(conv(softmax(f3(mix(f2(conv(f1(scale * q k^T))))))))) v with O(Nq * Nk) memory.

    Multi-Token Attention (Golovneva et al., 2025). A convolution reads the current query and the
    cq-1 queries before it, and ck keys around the current key; a mixing sums over the heads of a
    group. Each of the four stages is left out if its weight is not given. Queries are aligned to
    the end of the keys. Entries are zeroed before a convolution by one of two rules: where their
    own query must not see their key (``mask="source"``, the authors' code), or where the query of
    the convolution's result must not see it (``mask="output"``, the formula printed in the paper).

    It refuses what :func:`mtagen.build` and built ops refuse, with the same errors. Head dims and
    strides, which kernels limit, are not limited here.

    Args:
        q: queries ``[B, H, Nq, D]`` in fp16, bf16, fp32 or fp64; everything is computed in this
            dtype.
        k: keys ``[B, Hkv, Nk, D]`` with H a multiple of Hkv.
        v: values ``[B, Hkv, Nk, DV]``.
        weight: filters ``[H, cq, ck]`` or ``[H, 1, cq, ck]`` of the convolution before the softmax,
            in fp32 or ``q.dtype``. Like the other weights it is cast to ``q.dtype``.
        head_weight: matrices ``[H/m, m, m]`` that mix the heads before the softmax, indexed [group, out head, in head];
            a group is m consecutive heads. May be ``[m, m]`` if m = H.
        post_weight: filters of the convolution after the softmax, like ``weight``; its extents may
            differ.
        post_head_weight: matrices that mix the heads after the softmax, like ``head_weight``; its m
            may differ.
        query_factors: ``[B, H, Nq, 2 R + 1]``, R = 1..4: what each query adds to ``head_weight``. With ``a =
            query_factors[b, :, i]``, entry [out head g, in head h] gets the sum over r < R of ``a[g, R + r] *
            a[h, r]`` if both heads are of one group, and ``a[g, 2 R]`` if g = h. In fp32 or ``q.dtype``.
        key_factors: ``[B, H, Nk, 2 R + 1]``: the same of each key; its R may differ.
        post_query_factors, post_key_factors: the same for ``post_head_weight``.
        causal: query i sees keys ``j <= i + Nk - Nq`` only.
        window: ``(left, right)``: query i sees keys ``i + Nk - Nq - left <= j <= i + Nk - Nq + right`` only, as
            FlashAttention defines it; -1 is no limit.
        key_padding: where both convolutions lie on the key axis: ``both``: centred on key j, which
            meets tap (ck-1)//2; ``left``: they end at key j; ``right``: they begin at key j.
        mask: ``source`` or ``output``, for both convolutions; without effect where every query sees
            every key.
        scores, convolved, logits: f1, f2 and f3, expressions in s, the score before the first
            convolution, before the first mixing and before the softmax: texts such as ``50 *
            tanh(s / 50)`` or functions, see :mod:`mtagen.expressions`. They are computed in fp32,
            or in fp64 for fp64 inputs.
        visible: which keys a query sees within causality and window, a condition such as ``(j <= i)
            | (j < prefix[b])``; parameters that it reads are integers.
        parameters: the tensors that the expressions read, by name. Their axes follow from how the
            expressions index them: ``b``, ``h``, ``i`` and ``j`` count batch entries, heads and
            tokens, other indices entries of a table.
        sink: ``[H]``, one more logit of each row's softmax, which has no value; default none.
        scale: factor of q k^T; ``None`` means ``D ** -0.5``.
        dropout_p: factors of v that dropout keeps are divided by 1 - dropout_p. More than 0 needs
            ``dropout_mask``.
        dropout_mask: ``[B, H, Nq, Nk]`` bool, True for the factors of v that are kept
            (:func:`mtagen.dropout_mask`); default all.
        return_lse: also return the log-sum-exp of each row of the masked scores that the softmax
            takes.

    Returns:
        ``out [B, H, Nq, DV]``, or ``(out, lse [B, H, Nq])``, in ``q.dtype``. A query that sees no
        key has attention probabilities of 0 and a log-sum-exp of -inf.

    Raises:
        SpecError: ``causal``, ``window``, ``key_padding``, ``mask`` or an expression is not legal; a kernel or a group
            is too large.
        InputError: a tensor does not fit the others, or the scale or the dropout is not legal.
    """
    given = {"weight": weight, "head_weight": head_weight, "post_weight": post_weight}
    given |= {"post_head_weight": post_head_weight}
    factors = dict(zip(FACTORS, (query_factors, key_factors, post_query_factors, post_key_factors), strict=True))
    learned = {**(parameters or {})}
    expressions = {"scores": scores, "convolved": convolved, "logits": logits}
    rules = {"causal": causal, "window": window, "visible": visible, "key_padding": key_padding, "mask": mask}
    spec = _check(q, k, v, given, factors, learned, sink, **expressions, **rules)
    _check_dropout(dropout_p, dropout_mask, (*q.shape[:3], k.shape[2]), q.device)
    scale = resolve_scale(scale, q.shape[-1])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * scale
    nq, nk = s.shape[-2:]
    keys, positions = torch.arange(nk, device=q.device), torch.arange(nk - nq, nk, device=q.device).unsqueeze(1)
    after = keys - positions
    forbidden = torch.zeros_like(after, dtype=torch.bool)
    forbidden |= after < -spec.left if spec.left is not None else False
    forbidden |= after > spec.right if spec.right is not None else False
    entries, heads = (torch.arange(n, device=q.device) for n in q.shape[:2])
    hidden_by_bounds = Bounds(spec, learned).hidden(positions, keys, entries[:, None, None])
    if hidden_by_bounds is not None:
        forbidden = (forbidden | hidden_by_bounds).unsqueeze(-3)  # of all heads
    functions = functions_of(spec.expressions, spec.parameters) if spec.expressions else {}

    def applied(name: str, x: Tensor, hidden: Tensor) -> Tensor:
        """Apply a function to the scores that are not hidden: a slope of 0 times NaN would be NaN."""
        if name not in functions or not x.numel():
            return x
        seen = ~hidden.expand(x.shape[0], 1, nq, nk).squeeze(1)
        entry, row, column = seen.nonzero(as_tuple=True)
        taken = x.transpose(0, 1)[:, seen]
        values = {SCORE: taken.to(torch.promote_types(x.dtype, torch.float32)), POSITION: positions[row, 0]}
        values |= {KEY: keys[column], HEAD: heads[:, None], ENTRY: entries[entry]}
        value = evaluate(functions[name].expr, values, learned).to(x.dtype).expand_as(taken)
        return x.transpose(0, 1).masked_scatter(seen, value).transpose(0, 1)

    s = _convolve(
        applied("scores", s, forbidden if mask == "source" else _unused(forbidden, weight)),
        weight,
        forbidden,
        key_padding,
        mask,
    )
    s = _mix(applied("convolved", s, forbidden), head_weight, query_factors, key_factors)
    s = s.masked_fill(forbidden, -torch.inf)
    s = applied("logits", s, forbidden)
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., :nk].masked_fill(forbidden, 0)  # the fill clears the NaN of rows that see no key
    if post_weight is not None:
        p = _convolve(p, post_weight, forbidden, key_padding, mask).masked_fill(forbidden, 0)
    p = _mix(p, post_head_weight, post_query_factors, post_key_factors)
    if dropout_mask is not None:
        p = p * dropout_mask / (1 - dropout_p)
    out = p @ v
    return (out, s.logsumexp(-1)) if return_lse else out


def _unused(forbidden: Tensor, weight: Tensor | None) -> Tensor:
    """Return the scores that enter no visible score of a convolution with ``mask="output"``."""
    if not forbidden.shape[-2]:
        return forbidden
    reach = 0 if weight is None else weight.shape[-2] - 1  # a score enters this many later rows, at keys that they see
    return F.pad(forbidden, (0, 0, 0, reach), value=True).unfold(-2, reach + 1, 1).all(-1)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Mapping[str, Tensor | None],
    factors: Mapping[str, Tensor | None],
    learned: Mapping[str, Tensor],
    sink: Tensor | None,
    **rules: Any,
) -> Spec:
    """Check the tensors and the options, as a built op of the same stages does, and return its spec.

    Raises:
        SpecError: an option or a size is not legal.
        InputError: a tensor does not fit.
    """
    tensors = (("q", q), ("k", k), ("v", v))
    given = {name: weight for name, weight in weights.items() if weight is not None}
    of_tokens = {name: x for name, x in factors.items() if x is not None}
    check_dense((*tensors, *given.items(), *of_tokens.items(), *learned.items()))
    for name, weight in given.items():
        if weight.ndim < 2:
            rule, legal = "must have at least two dimensions", "filters (H, cq, ck), or matrices (H/m, m, m)"
            raise InputError(explain(f"{name}.shape", tuple(weight.shape), rule, legal))
    groups = {name: x.shape[-1] for name, x in given.items() if name.endswith("head_weight")}
    kernels = {name: (x.shape[-2], x.shape[-1]) for name, x in given.items() if name not in groups}
    query, key, post_query, post_key = (_rank(name, factors[name]) for name in FACTORS)
    spec = Spec(
        kernel=kernels.get("weight"),
        head_dim=HEAD_DIMS[0],  # any legal head dim, because the reference does not limit q's
        mixed_heads=groups.get("head_weight"),
        post_kernel=kernels.get("post_weight"),
        post_mixed_heads=groups.get("post_head_weight"),
        dynamic_ranks=(query, key) if query or key else None,
        post_dynamic_ranks=(post_query, post_key) if post_query or post_key else None,
        sink=sink is not None,
        parameters=_axes(learned, {name: rules[name] for name in (*EXPRESSIONS, "visible")}),
        **rules,
    )
    if q.dtype not in TORCH_DTYPES.values():
        raise InputError(explain("q.dtype", q.dtype, "is not supported", (*TORCH_DTYPES.values(),)))
    check_batch(tensors, (q.shape[-1], v.shape[-1]))
    heads = q.shape[1]
    for name, weight in given.items():
        m = groups.get(name)
        shaped_weight(tensors[0], name, weight, m, (heads // m, m, m) if m else (heads, *kernels[name]))
    if spec.sink or learned or of_tokens:  # torch.compile cannot trace the first use of a cached property
        sizes = {"B": q.shape[0], "H": heads, "Nq": q.shape[2], "Nk": k.shape[2]}
        check_learned(spec.learned_arguments, sizes, q, sink, learned, of_tokens)
    return spec


def _rank(name: str, factors: Tensor | None) -> int:
    """Return the rank R of factors, whose last axis has 2 R + 1 entries; 0 without factors.

    Raises:
        InputError: there is no such R.
    """
    if factors is None:
        return 0
    entries = factors.shape[-1] if factors.ndim else 0
    if entries % 2 == 0 or entries < 3:
        rule = "the last axis must hold two factors of each rank and a gate"
        raise InputError(explain(f"{name}.shape", tuple(factors.shape), rule, "2 R + 1 entries of R = 1, 2, ..."))
    return entries // 2


def _axes(parameters: Mapping[str, Tensor], expressions: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the axes of parameters, from how expressions index them."""
    return tuple(axes_in(expressions, {name: x.shape for name, x in parameters.items()}).items())


def _check_dropout(p: float, mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    """Check the dropout probability and mask.

    Raises:
        InputError: p is no probability, the mask is missing although p is not 0, or the mask does
            not fit.
    """
    check_dropout_p(p)
    if mask is None:
        if p != 0:
            rule = "needs a dropout_mask, because the reference draws no random numbers"
            raise InputError(explain("dropout_p", p, rule, "0, or with dropout_mask=mtagen.dropout_mask(...)"))
        return
    check_dense((("dropout_mask", mask),))
    got = (tuple(mask.shape), mask.dtype, mask.device)
    if got != (shape, torch.bool, device):
        rule = "must be one bool for each probability, on q's device"
        raise InputError(explain("dropout_mask", got, rule, f"shape {shape}, torch.bool, {device}"))


def _mix(x: Tensor, weight: Tensor | None, query_factors: Tensor | None, key_factors: Tensor | None) -> Tensor:
    """Mix the heads of each group by the group's matrix, and by those of queries and keys."""
    if weight is None:
        return x
    weight = weight.to(x.dtype).reshape(-1, *weight.shape[-2:])
    grouped = torch.unflatten(x, 1, weight.shape[:2])
    mixed = torch.einsum("goi,bgirc->bgorc", weight, grouped)
    for factors, token in ((query_factors, "r"), (key_factors, "c")):
        if factors is not None:
            rank = factors.shape[-1] // 2
            of_group = torch.unflatten(factors.to(x.dtype), 1, weight.shape[:2])
            inner, outer, gate = torch.split(of_group, [rank, rank, 1], -1)
            summed = torch.einsum(f"bgi{token}f,bgirc->bgfrc", inner, grouped)
            mixed = mixed + torch.einsum(f"bgo{token}f,bgfrc->bgorc", outer, summed)
            mixed = mixed + torch.einsum(f"bgo{token}f,bgorc->bgorc", gate, grouped)
    return mixed.flatten(1, 2)


def _convolve(x: Tensor, weight: Tensor | None, forbidden: Tensor, key_padding: str, mask: str) -> Tensor:
    """Convolve each head with its own filter."""
    if weight is None or x.numel() == 0:
        return x
    (heads, nk), (cq, ck) = x.shape[1::2], weight.shape[-2:]
    weight = weight.to(x.dtype).reshape(heads, 1, cq, ck)
    left = {"both": (ck - 1) // 2, "left": ck - 1, "right": 0}[key_padding]
    pad = (left, ck - 1 - left, cq - 1, 0)
    if mask == "source":
        return _correlate(F.pad(x.masked_fill(forbidden, 0), pad), weight)
    # The mask depends on the output row: it may be applied after the sum over rows, but not after that over columns.
    padded, hidden, convolved = F.pad(x, pad), F.pad(forbidden, pad[:2]), torch.zeros_like(x)
    for c in range(ck):
        rows = _correlate(padded[..., c : c + nk], weight[..., c : c + 1])
        convolved = convolved + rows.masked_fill(hidden[..., c : c + nk], 0)
    return convolved


def _correlate(x: Tensor, weight: Tensor) -> Tensor:
    # On CPUs with AVX512-FP16, oneDNN never finishes compiling a convolution in fp16 by 16 columns or more.
    hangs = x.device.type == "cpu" and x.dtype == torch.float16 and weight.shape[-1] > 15
    dtype = torch.float32 if hangs else x.dtype
    return F.conv2d(x.to(dtype), weight.to(dtype), groups=len(weight)).to(x.dtype)
