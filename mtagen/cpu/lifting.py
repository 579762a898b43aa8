"""Linear maps that fold a convolution of scores into the operands of the scores, and their
adjoints.

Away from the mask's edge the convolved scores are Ct[i, j] = left[i] . right[j]. One operand holds
shifted rows, the other holds rows summed with the filter's weights, along the filter's shorter
axis. Next to the edge, on the diagonals 0 <= delta = i + off + limit - j < ``band.shape[2]``, Ct
contains terms that the mask hides. There C[i, j] is ``band[i, delta]`` instead, a sum of visible
terms alone, so that hidden keys change no bit of it. Here ``kernel`` is scale * W, ``off`` is Nk -
Nq, ``limit`` is 0 for a causal mask, and G counts independent heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..planner.lift.band import Band, bands
from ..spec import Spec


def lift(spec: Spec, q: Tensor, k: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands whose product is the convolved scores, and the scores next to the mask's
    edge.

    With cq <= ck, left[i] = (q[i-(cq-1)+u])_u and right[j] = (sum_v W[u,v] k[j-pL+v])_u. Otherwise
    queries and keys change roles.

    Args:
        spec: the operator.
        q: ``[G, Nq, D]``, aligned to the end of the keys.
        k: ``[G, Nk, D]``.
        kernel: ``[G, cq, ck]``, all three of one float dtype.

    Returns:
        ``left [G, Nq, m, D]``, ``right [G, Nk, m, D]`` with m = min(cq, ck), one of them an overlapping view,
        and ``band [G, Nq, width]``, whose width is 0 where no mask hides terms.
    """
    if spec.cq <= spec.ck:
        left, right = _windows(q, spec.cq, spec.cq - 1), _mix(k, kernel, spec.pad_left)
    else:
        left, right = _mix(q, kernel.mT, spec.cq - 1), _windows(k, spec.ck, spec.pad_left)
    return left, right, _band(spec, q, k, kernel)


def lift_backward(
    spec: Spec, dleft: Tensor, dright: Tensor, dband: Tensor, q: Tensor, k: Tensor, kernel: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and kernel, given those of the three results of :func:`lift`."""
    if spec.cq <= spec.ck:
        dq = _windows_backward(dleft, spec.cq - 1)
        dk, dkernel = _mix_backward(dright, k, kernel, spec.pad_left)
    else:
        dq, dkernel = _mix_backward(dleft, q, kernel.mT, spec.cq - 1)
        dk, dkernel = _windows_backward(dright, spec.pad_left), dkernel.mT
    if (band := _edge(spec)) is not None:
        band_dq, band_dk, band_dkernel = _band_backward(spec, band, dband, q, k, kernel)
        return dq + band_dq, dk + band_dk, dkernel + band_dkernel
    return dq, dk, dkernel


def _edge(spec: Spec) -> Band | None:
    """Return the band next to a row's last visible key, if there is one; no earlier key is hidden
    here.
    """
    return next(iter(bands(spec)), None)


def _band(spec: Spec, q: Tensor, k: Tensor, kernel: Tensor) -> Tensor:
    """Return the convolved scores of the band.

    They are a matrix product: windows of A, the scores on the diagonals of terms, times a
        rearranged kernel.
    """
    band = _edge(spec)
    if band is None:
        return q.new_empty(*q.shape[:2], 0)
    return _term_windows(spec, band, q, k) @ _band_kernel(spec, band, kernel)


def _band_backward(
    spec: Spec, band: Band, dband: Tensor, q: Tensor, k: Tensor, kernel: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    entries, taps = _band_taps(spec, band, q.device)
    dmatrix = _term_windows(spec, band, q, k).mT @ dband
    dkernel = torch.zeros_like(kernel).flatten(1).index_add_(1, taps, dmatrix.flatten(1)[:, entries])
    dwindows = dband @ _band_kernel(spec, band, kernel).mT
    dterms = _windows_backward(torch.unflatten(dwindows, 2, (spec.cq, -1)), spec.cq - 1)

    pad = _term_padding(band, q, k)
    keys, dq = F.pad(k, pad), torch.zeros_like(q)
    dkeys = torch.zeros_like(keys)
    for place, column in enumerate(dterms.unsqueeze(2).unbind(3)):
        met = slice(place, place + q.shape[1])
        dq.addcmul_(column, keys[:, met])
        dkeys[:, met].addcmul_(column, q)
    return dq, F.pad(dkeys, [-p for p in pad]), dkernel.view_as(kernel)


def _term_windows(spec: Spec, band: Band, q: Tensor, k: Tensor) -> Tensor:
    """Return windows ``[G, Nq, cq * reach]`` of A: rows i-(cq-1) to i, where A[i, p] = q[i] . k[i +
    off + first key + p].

    With ``mask="output"`` they are 0 where row i does not see the key, so that no product of 0 and
    inf makes a NaN.
    """
    keys, n = F.pad(k, _term_padding(band, q, k)), q.shape[1]
    terms = [torch.linalg.vecdot(q, keys[:, place : place + n]) for place in range(band.reach)]
    windows = _windows(torch.stack(terms, -1), spec.cq, spec.cq - 1)
    if spec.mask == "output":
        u, place = (torch.arange(extent, device=q.device) for extent in windows.shape[2:])
        windows = windows.masked_fill(_diagonal(band, place) + spec.cq - 1 - u.unsqueeze(1) < 0, 0)
    return windows.flatten(2)


def _diagonal(band: Band, place: Tensor) -> Tensor:
    """Return the diagonals on which the places of a window of A are, in the rows of the window."""
    return band.first + band.reach - 1 - place


def _term_padding(band: Band, q: Tensor, k: Tensor) -> list[int]:
    """Return padding that makes row i + p of the keys the p-th key of row i's terms; negative
    crops.
    """
    before = -int(band.key(k.shape[1] - q.shape[1], band.first + band.reach - 1))
    return [0, 0, before, q.shape[1] + band.reach - 1 - before - k.shape[1]]


def _band_kernel(spec: Spec, band: Band, kernel: Tensor) -> Tensor:
    """Return the kernel as the matrix ``[G, cq * reach, width]`` from windows of A to scores."""
    entries, taps = _band_taps(spec, band, kernel.device)
    matrix = kernel.new_zeros(kernel.shape[0], entries.numel())
    matrix[:, entries] = kernel.flatten(1)[:, taps]
    return torch.unflatten(matrix, 1, (-1, band.width))


def _band_taps(spec: Spec, band: Band, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which entries of the flattened band matrix hold a tap, and each tap's index u*ck + v."""
    u, place, delta = torch.meshgrid(
        *(torch.arange(extent, device=device) for extent in (spec.cq, band.reach, band.width)), indexing="ij"
    )
    v = delta - _diagonal(band, place) + u - (spec.cq - 1) + spec.pad_left
    entries = (v >= 0) & (v < spec.ck)
    if spec.mask == "output":
        entries &= v - spec.pad_left <= delta
    return entries.flatten(), (u * spec.ck + v)[entries]


def _padded(x: Tensor, n: int, before: int) -> Tensor:
    """Pad x ``[G, N, d]`` for n taps from i - before on, and flatten it to ``[G, (N+n-1) * d]``."""
    return F.pad(x, (0, 0, before, n - 1 - before)).flatten(1)


def _windows(x: Tensor, n: int, before: int) -> Tensor:
    """Return an overlapping view ``[G, N, n, d]``: entry [i, t] is x[i-before+t], zero outside."""
    view = _padded(x, n, before).unfold(1, n * x.shape[2], x.shape[2])
    return torch.unflatten(view, 2, (n, x.shape[2]))


def _windows_backward(grad: Tensor, before: int) -> Tensor:
    return _fold(grad.transpose(1, 2), before)


def _mix(x: Tensor, mix: Tensor, before: int) -> Tensor:
    """Return ``[G, N, m, d]``: entry [i, s] is sum_t mix[s, t] x[i-before+t], with mix ``[G, m,
    n]``.
    """
    mixed = mix @ _taps(x, mix.shape[2], before)
    return torch.unflatten(mixed, 2, x.shape[1:]).transpose(1, 2).contiguous()


def _mix_backward(grad: Tensor, x: Tensor, mix: Tensor, before: int) -> tuple[Tensor, Tensor]:
    grad = grad.transpose(1, 2).flatten(2)
    dx = _fold(torch.unflatten(mix.mT @ grad, 2, x.shape[1:]), before)
    return dx, grad @ _taps(x, mix.shape[2], before).mT


def _taps(x: Tensor, n: int, before: int) -> Tensor:
    """Return an overlapping view ``[G, n, N*d]``: row t is all of x shifted by t - before."""
    return _padded(x, n, before).unfold(1, x.shape[1] * x.shape[2], x.shape[2])


def _fold(grad: Tensor, before: int) -> Tensor:
    """Apply the adjoint of :func:`_taps`: sum ``[G, n, N, d]`` to ``[G, N, d]``."""
    heads, n, rows, d = grad.shape
    padded = grad.new_zeros(heads, rows + n - 1, d)
    for tap in range(n):
        padded[:, tap : tap + rows] += grad[:, tap]
    return padded[:, before : before + rows]
