"""The formulas of docs/mathematics.md, section by section as they stand there, in float64 against the reference.

They are written anew here, with the page's names, and use none of mtagen's own code but the reference that they are
compared with, and the plan's count of flop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mtagen import Spec, plan, reference
from mtagen.eager import _mix

pytestmark = pytest.mark.usefixtures("one_thread")

Array = npt.NDArray[np.float64]

SMALL = [(1, 1), (1, 4), (3, 1), (2, 3), (3, 5), (4, 2)]
LARGE = [(1, 1), (3, 1), (1, 4), (2, 3), (7, 2), (6, 11), (5, 10), (16, 3), (2, 17)]
MASKS = [(True, "source"), (True, "output"), (False, "source")]
PADDINGS = ["both", "left", "right"]
CHUNK = 8  # columns in 16 bytes of fp16
INTERLEAVED = np.r_[0:16:2, 1:16:2]  # fragment row g is row 2 g of a row tile, row g + 8 is row 2 g + 1

small = pytest.mark.parametrize("kernel", SMALL, ids=str)
large = pytest.mark.parametrize("kernel", LARGE, ids=str)
padded = pytest.mark.parametrize("padding", PADDINGS)
masked = pytest.mark.parametrize(("causal", "mask"), MASKS)


def block(x: Array, i: int, j: int, n: int, m: int) -> Array:
    """x[i : i + n, j : j + m], zeros outside."""
    to = np.zeros((n, m))
    top, bottom, left, right = max(i, 0), min(i + n, x.shape[0]), max(j, 0), min(j + m, x.shape[1])
    if top < bottom and left < right:
        to[top - i : bottom - i, left - j : right - j] = x[top:bottom, left:right]
    return to


def rows(x: Array, i: int, n: int) -> Array:
    """x[i : i + n], zeros outside."""
    return block(x, i, 0, n, x.shape[1])


class Gradients(NamedTuple):
    """Of the loss with respect to the inputs."""

    dq: Array
    dk: Array
    dv: Array
    dw: Array


@dataclass(frozen=True, eq=False)
class Head:
    """One head: its inputs, the gradients of its two results, and what the reference makes of them."""

    q: Array  # [Nq, d]
    k: Array  # [Nk, d]
    v: Array  # [Nk, dv]
    w: Array  # [cq, ck]
    d_out: Array  # [Nq, dv]
    d_lse: Array  # [Nq]
    causal: bool
    mask: str
    padding: str
    alpha: float = 0.6

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Nq, Nk, cq, ck."""
        return len(self.q), len(self.k), *self.w.shape

    @property
    def off(self) -> int:
        return len(self.k) - len(self.q)

    @property
    def p_l(self) -> int:
        ck = self.w.shape[1]
        return {"both": (ck - 1) // 2, "left": ck - 1, "right": 0}[self.padding]

    @property
    def p_r(self) -> int:
        return self.w.shape[1] - 1 - self.p_l

    def taps(self) -> Iterator[tuple[int, int]]:
        """All (u, v)."""
        return itertools.product(*map(range, self.w.shape))

    def sees(self, i: int, j: int, n: int, m: int) -> npt.NDArray[np.bool_]:
        """Whether query i + r sees key j + c, for r < n and c < m; both may lie outside."""
        r, c = np.ogrid[:n, :m]
        return (j + c <= i + r + self.off) | np.full((n, m), not self.causal)

    @cached_property
    def s(self) -> Array:
        """alpha q k^T; zeros where a score is hidden from every row of outputs, with mask="source"."""
        scores = self.alpha * self.q @ self.k.T
        return scores * self.sees(0, 0, *scores.shape) if self.mask == "source" else scores

    @cached_property
    def expected(self) -> tuple[Array, Array, Gradients]:
        """out, lse and the gradients of sum(out d_out) + sum(lse d_lse), by the reference and its autograd."""
        leaves = [torch.tensor(x, requires_grad=True) for x in (self.q, self.k, self.v, self.w)]
        q, k, v, w = leaves
        out, lse = reference(
            *(x[None, None] for x in (q, k, v)),
            w[None],
            causal=self.causal,
            key_padding=self.padding,
            mask=self.mask,
            scale=self.alpha,
            return_lse=True,
        )
        seen = lse.isfinite()[0, 0]
        loss = (out[0, 0] * torch.tensor(self.d_out)).sum() + (lse[0, 0] * torch.tensor(self.d_lse))[seen].sum()
        gradients = torch.autograd.grad(loss, leaves)
        return out[0, 0].detach().numpy(), lse[0, 0].detach().numpy(), Gradients(*(x.numpy() for x in gradients))


@cache
def head(kernel: tuple[int, int], n_q: int, n_k: int, causal: bool, mask: str, padding: str) -> Head:
    random = np.random.default_rng(0)
    shapes = (n_q, 3), (n_k, 3), (n_k, 2), kernel, (n_q, 2), (n_q,)
    return Head(*map(random.standard_normal, shapes), causal, mask, padding)


def heads(kernel: tuple[int, int], causal: bool, mask: str, padding: str) -> Iterator[Head]:
    """As many queries as keys, fewer, and more, of which the first see no key if causal."""
    for n_q, n_k in ((5, 5), (3, 6), (6, 3)):
        yield head(kernel, n_q, n_k, causal, mask, padding)


def assert_equal(ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)


# ---- 1. What is computed ----


def term(x: Head, u: int, v: int) -> Array:
    """Of every (i, j): the score S[i - (cq-1) + u, j - pL + v] if it counts, else 0."""
    n_q, n_k, cq, _ = x.sizes
    scores = block(x.s, -(cq - 1) + u, -x.p_l + v, n_q, n_k)
    return scores * x.sees(0, -x.p_l + v, n_q, n_k) if x.mask == "output" else scores


def convolved(x: Head) -> Array:
    """C, and -inf where it is hidden."""
    c = sum(x.w[u, v] * term(x, u, v) for u, v in x.taps())
    return np.where(x.sees(0, 0, *x.s.shape), c, -np.inf)


def softmax(c: Array) -> tuple[Array, Array]:
    """P and LSE; zeros and -inf in rows that see no key."""
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(c).sum(1))
    return np.exp(c - np.where(np.isinf(lse), 0, lse)[:, None]), lse


@masked
@padded
@small
def test_definition(kernel: tuple[int, int], padding: str, causal: bool, mask: str) -> None:
    for x in heads(kernel, causal, mask, padding):
        p, lse = softmax(convolved(x))
        assert_equal((p @ x.v, lse), x.expected[:2])


@padded
@small
def test_identity_kernel_is_plain_attention(kernel: tuple[int, int], padding: str) -> None:
    for x in heads(kernel, True, "source", padding):
        identity = np.zeros_like(x.w)
        identity[-1, x.p_l] = 1
        plain = np.where(x.sees(0, 0, *x.s.shape), x.alpha * x.q @ x.k.T, -np.inf)
        assert_equal((convolved(replace(x, w=identity)),), (plain,))


# ---- 2. Gradients ----


def score_gradient(x: Head) -> tuple[Array, Array]:
    """P, and G, the gradient of C."""
    p, _ = softmax(convolved(x))
    d = (x.d_out * (p @ x.v)).sum(1) - x.d_lse
    return p, p * (x.d_out @ x.v.T - d[:, None])


@masked
@padded
@small
def test_gradients(kernel: tuple[int, int], padding: str, causal: bool, mask: str) -> None:
    for x in heads(kernel, causal, mask, padding):
        n_q, n_k, cq, _ = x.sizes
        p, g = score_gradient(x)
        ds, dw = np.zeros((n_q, n_k)), np.zeros_like(x.w)
        for u, v in x.taps():
            i, j = cq - 1 - u, x.p_l - v  # added to i', j'
            counts = x.sees(i, 0, n_q, n_k) if x.mask == "output" else x.sees(0, 0, n_q, n_k)
            ds += x.w[u, v] * counts * block(g, i, j, n_q, n_k)
            dw[u, v] = (g * term(x, u, v)).sum()
        assert_equal(Gradients(x.alpha * ds @ x.k, x.alpha * ds.T @ x.q, p.T @ x.d_out, dw), x.expected[2])


# ---- 3. Lift ----


def shifted_queries(x: Head, u: int) -> Array:
    """Row i is Q[i - (cq-1) + u]."""
    return rows(x.q, -(len(x.w) - 1) + u, len(x.q))


def shifted_keys(x: Head, v: int) -> Array:
    """Row j is K[j - pL + v]."""
    return rows(x.k, -x.p_l + v, len(x.k))


def lifted_keys(x: Head, u: int) -> Array:
    return x.alpha * sum(x.w[u, v] * shifted_keys(x, v) for v in range(x.w.shape[1]))


def lifted_queries(x: Head, v: int) -> Array:
    return x.alpha * sum(x.w[u, v] * shifted_queries(x, u) for u in range(x.w.shape[0]))


def band_width(x: Head) -> int:
    """F."""
    return 0 if not x.causal else x.p_r + (len(x.w) - 1 if x.mask == "source" else 0)


def first_diagonal(x: Head) -> int:
    """The outermost diagonal of a term that counts, in its own row."""
    return 0 if x.mask == "source" else 1 - len(x.w)


def counted_terms(x: Head) -> Iterator[tuple[int, int, int, int]]:
    """(u, v, delta, f) of the terms of a score on diagonal delta that count; f numbers the diagonals of their rows."""
    for (u, v), delta in itertools.product(x.taps(), range(band_width(x))):
        e = delta + u - (len(x.w) - 1) - (v - x.p_l)
        if e >= 0 if x.mask == "source" else v - x.p_l <= delta:
            yield u, v, delta, e - first_diagonal(x)


def scores_on_diagonals(x: Head) -> Array:
    """A, column f."""
    a = np.zeros((len(x.q), sum(x.w.shape) - 2 if band_width(x) else 0))
    for f in range(a.shape[1]):
        a[:, f] = (x.q * rows(x.k, x.off - first_diagonal(x) - f, len(x.q))).sum(1)
    return a


def band_scores(x: Head) -> Array:
    """C on the band."""
    a, c = scores_on_diagonals(x), np.zeros((len(x.q), band_width(x)))
    for u, v, delta, f in counted_terms(x):
        c[:, delta] += x.alpha * x.w[u, v] * rows(a, -(len(x.w) - 1) + u, len(x.q))[:, f]
    return c


@masked
@padded
@small
@pytest.mark.parametrize("lifts", ["keys", "queries"])
def test_lifted_scores(lifts: str, kernel: tuple[int, int], padding: str, causal: bool, mask: str) -> None:
    for x in heads(kernel, causal, mask, padding):
        n_q, n_k, cq, ck = x.sizes
        if lifts == "keys":
            c = sum(shifted_queries(x, u) @ lifted_keys(x, u).T for u in range(cq))
        else:
            c = sum(lifted_queries(x, v) @ shifted_keys(x, v).T for v in range(ck))
        band = band_scores(x)
        for i, delta in np.ndindex(band.shape):
            if 0 <= i + x.off - delta < n_k:
                c[i, i + x.off - delta] = band[i, delta]
        assert_equal((np.where(x.sees(0, 0, n_q, n_k), c, -np.inf),), (convolved(x),))


@masked
@padded
@small
@pytest.mark.parametrize("lifts", ["keys", "queries"])
def test_lifted_gradients(lifts: str, kernel: tuple[int, int], padding: str, causal: bool, mask: str) -> None:
    for x in heads(kernel, causal, mask, padding):
        n_q, n_k, cq, ck = x.sizes
        p, g = score_gradient(x)
        dq, dk, dw = np.zeros_like(x.q), np.zeros_like(x.k), np.zeros_like(x.w)
        g_band = np.zeros((n_q, band_width(x)))
        for i, delta in np.ndindex(g_band.shape):
            if 0 <= (j := i + x.off - delta) < n_k:
                g_band[i, delta], g[i, j] = g[i, j], 0.0
        if lifts == "keys":
            lifted_gradient = [g.T @ shifted_queries(x, u) for u in range(cq)]
            for u in range(cq):
                dq += rows(g, cq - 1 - u, n_q) @ lifted_keys(x, u)
            for u, v in x.taps():
                dk += x.alpha * x.w[u, v] * rows(lifted_gradient[u], x.p_l - v, n_k)
                dw[u, v] = x.alpha * (lifted_gradient[u] * shifted_keys(x, v)).sum()
        else:
            lifted_gradient = [g @ shifted_keys(x, v) for v in range(ck)]
            for v in range(ck):
                dk += rows(g.T, x.p_l - v, n_k) @ lifted_queries(x, v)
            for u, v in x.taps():
                dq += x.alpha * x.w[u, v] * rows(lifted_gradient[v], cq - 1 - u, n_q)
                dw[u, v] = x.alpha * (lifted_gradient[v] * shifted_queries(x, u)).sum()

        a = scores_on_diagonals(x)
        da = np.zeros_like(a)
        for u, v, delta, f in counted_terms(x):
            dw[u, v] += x.alpha * (g_band[:, delta] * rows(a, -(cq - 1) + u, n_q)[:, f]).sum()
            da[:, f] += x.alpha * x.w[u, v] * rows(g_band, cq - 1 - u, n_q)[:, delta]
        for f in range(a.shape[1]):
            e = first_diagonal(x) + f
            dq += da[:, f : f + 1] * rows(x.k, x.off - e, n_q)
            dk += rows(da, e - x.off, n_k)[:, f : f + 1] * rows(x.q, e - x.off, n_k)
        assert_equal(Gradients(dq, dk, p.T @ x.d_out, dw), x.expected[2])


# ---- 4. Tile ----


def toeplitz(w: Array, u: int, e: int) -> Array:
    """T[k, n] = W[u, 8 e + k - n], 0 outside the kernel."""
    k, n = np.indices((CHUNK, CHUNK))
    inside = (u < len(w)) & (CHUNK * e + k - n >= 0) & (CHUNK * e + k - n < w.shape[1])
    return np.where(inside, w[u % len(w), (CHUNK * e + k - n) % w.shape[1]], 0.0)


def chunks_of_window(ck: int) -> int:
    """Chunks that 8 neighbouring output columns read."""
    return math.ceil((ck + 7) / CHUNK)


def carried_columns(ck: int) -> int:
    return CHUNK * math.ceil((ck - 1) / CHUNK)


def direct(slab: Array, w: Array, n: int, m: int) -> Array:
    """[n, m]: what a convolution makes of a slab."""
    return np.array([[(w * slab[r : r + w.shape[0], c : c + w.shape[1]]).sum() for c in range(m)] for r in range(n)])


@large
def test_interleaved_fragments(kernel: tuple[int, int]) -> None:
    """An mma sums two blocks, and all A operands of a chunk are made of cq + 1 matrices."""
    cq, ck = kernel
    random, blocks = np.random.default_rng(0), list(itertools.product(range(cq), range(chunks_of_window(ck))))
    slab, w = random.standard_normal((16 + cq, CHUNK * chunks_of_window(ck))), random.standard_normal(kernel)
    used, out = set(), np.zeros((16, CHUNK))

    def matrix(s: int, e: int) -> Array:
        """M_s of chunk e: its rows 2 g + s."""
        used.add(s)
        return slab[s : s + 16 : 2, CHUNK * e : CHUNK * e + CHUNK]

    for (u, e), (u1, e1) in itertools.zip_longest(blocks[::2], blocks[1::2], fillvalue=blocks[0]):
        a = np.block([[matrix(u, e), matrix(u1, e1)], [matrix(u + 1, e), matrix(u1 + 1, e1)]])
        alone = (u, e) == blocks[-1] and len(blocks) % 2  # the last of an odd number meets zeros
        b = np.concatenate([toeplitz(w, u, e), toeplitz(w, cq if alone else u1, e1)])
        out += a @ b
    assert_equal((out,), (direct(slab, w, 16, CHUNK)[INTERLEAVED],))
    assert used == set(range(cq + 1))


@pytest.mark.parametrize("kernel", [(6, 11), (10, 2), (3, 3), (9, 10)], ids=str)
def test_gathered_columns(kernel: tuple[int, int]) -> None:
    """The one or two columns of a window's last chunk are summed over 8 row shifts at once: three words a lane."""
    cq, ck = kernel
    random, whole = np.random.default_rng(0), (ck + 7) // CHUNK
    slab, w = random.standard_normal((32 + cq, CHUNK * whole + 2)), random.standard_normal(kernel)
    out = np.zeros((16, CHUNK))
    for u, e in itertools.product(range(cq), range(whole)):
        out += slab[INTERLEAVED + u, CHUNK * e : CHUNK * e + CHUNK] @ toeplitz(w, u, e)
    for first in range(0, cq, 8):
        a, b = np.zeros((16, 16)), np.zeros((16, CHUNK))
        for g, t in np.ndindex(8, 4):
            words = slab[2 * g + first + 2 * t :][:3, CHUNK * whole :]
            a[g, 2 * t : 2 * t + 2], a[g, 8 + 2 * t : 10 + 2 * t] = words[0], words[1]
            a[g + 8, 2 * t : 2 * t + 2], a[g + 8, 8 + 2 * t : 10 + 2 * t] = words[1], words[2]
        for t in range(4):
            b[2 * t : 2 * t + 2] = toeplitz(w, first + 2 * t, whole)[:2]
            b[8 + 2 * t : 10 + 2 * t] = toeplitz(w, first + 2 * t + 1, whole)[:2]
        out += a @ b
    assert not any(toeplitz(w, u, whole)[2:].any() for u in range(cq))
    assert_equal((out,), (direct(slab, w, 16, CHUNK)[INTERLEAVED],))


class RunningSoftmax:
    """Softmax of some rows, each relative to a reference that rises only when a tile exceeds it by too much."""

    LIMIT = 2.0**14

    def __init__(self, count: int, dim: int) -> None:
        self.reference, self.total, self.out = np.full(count, -1e20), np.zeros(count), np.zeros((count, dim))
        self.restarts = 0

    def add(self, c: Array, v: Array) -> None:
        x = c * math.log2(math.e)
        with np.errstate(over="ignore"):
            p = np.exp2(x - self.reference[:, None])
        exceeds = p.sum(1) > self.LIMIT
        if exceeds.any():
            self.restarts += 1
            raised = np.where(exceeds, np.maximum(self.reference, x.max(1)), self.reference)
            rescale = np.exp2(self.reference - raised)
            self.reference, self.total, self.out = raised, self.total * rescale, self.out * rescale[:, None]
            p = np.exp2(x - raised[:, None])
        self.total, self.out = self.total + p.sum(1), self.out + p @ v

    def results(self) -> tuple[Array, Array]:
        """out and lse."""
        empty, total = self.total == 0, np.where(self.total == 0, 1, self.total)
        return self.out / total[:, None], np.where(empty, -np.inf, (self.reference + np.log2(total)) * math.log(2))


def tile_forward(x: Head, row_tiles: int, keys: int) -> tuple[Array, Array, int]:
    """out, lse, and how often the softmax raised its reference."""
    n_q, n_k, cq, ck = x.sizes
    halo, count, carried = cq - 1, 16 * row_tiles, carried_columns(ck)
    lag = carried - x.p_l
    out, lse, restarts = np.zeros((n_q, x.v.shape[1])), np.zeros(n_q), 0
    for first in range(-halo, n_q - halo, count - halo):
        slab = np.zeros((halo + count, carried + keys + CHUNK))  # the rows above the CTA's first stay zeros
        running = RunningSoftmax(count, x.v.shape[1])
        last = min(n_k, first + count + x.off) if x.causal else n_k
        for t in range(max(0, math.ceil((last + lag) / keys))):
            slab[:, :carried] = slab[:, keys : keys + carried]
            slab[halo:, carried : carried + keys] = block(x.s, first, t * keys, count, keys)
            c = np.zeros((count, keys))
            for n, u, e in itertools.product(range(0, keys, CHUNK), range(cq), range(chunks_of_window(ck))):
                column = n + CHUNK * e
                a = slab[u : u + count, column : column + CHUNK]
                if x.mask == "output":
                    a = a * x.sees(first, t * keys - carried + column, count, CHUNK)
                c[:, n : n + CHUNK] += a @ toeplitz(x.w, u, e)
            key = t * keys - lag + np.arange(keys)
            seen = x.sees(first, t * keys - lag, count, keys) & (key >= 0) & (key < n_k)
            running.add(np.where(seen, c, -np.inf), rows(x.v, t * keys - lag, keys))
        restarts += running.restarts
        end = min(first + count, n_q)
        out[first + halo : end], lse[first + halo : end] = (y[halo : end - first] for y in running.results())
    return out, lse, restarts


@masked
@padded
@large
def test_tile_forward(kernel: tuple[int, int], padding: str, causal: bool, mask: str) -> None:
    for n_q, n_k in ((21, 37), (30, 19)):
        x = head(kernel, n_q, n_k, causal, mask, padding)
        assert_equal(tile_forward(x, 2, 24)[:2], x.expected[:2])


@pytest.mark.parametrize(("growth", "restarts"), [(-3.0, 1), (0.0, 1), (3.0, 5)])
def test_reference_of_the_softmax(growth: float, restarts: int) -> None:
    """Scores that fall along the keys set the reference once; scores that grow raise it in every tile."""
    scores = growth * np.arange(64) + np.random.default_rng(1).standard_normal((15, 64))
    x = head((2, 3), 15, 64, False, "source", "both")
    x = replace(x, q=np.eye(15), k=scores.T.copy(), w=np.abs(x.w))
    out, lse, raised = tile_forward(x, 1, 16)
    assert_equal((out, lse / 1e3), (x.expected[0], x.expected[1] / 1e3))
    assert raised == restarts


def tile_backward(x: Head, row_tiles: int, keys: int) -> Gradients:
    """CTA by CTA, each with a range of keys, and one tile of rows after the other."""
    n_q, n_k, cq, ck = x.sizes
    lse, d = softmax(convolved(x))[1][:, None], ((x.d_out * x.expected[0]).sum(1) - x.d_lse)[:, None]
    halo, count = 2 * (ck // 2), 16 * row_tiles
    w = np.pad(x.w, ((0, 0), (0, halo + 1 - ck)))
    w_adjoint = w[::-1, ::-1]
    owned = keys - halo
    dq, dk, dv, dw = (np.zeros_like(tensor) for tensor in (x.q, x.k, x.v, w))
    for c0 in range(-x.p_l, n_k - x.p_l, owned):
        steps = math.ceil((n_q + 16) / count)
        slab_s, slab_g = (np.zeros((cq - 1 + 16 + steps * count + cq, keys + halo)) for _ in range(2))
        above = cq - 1 + 16  # row i of the scores is row above + i of either slab
        for t in range(steps):
            first = t * count
            slab_s[above + first :][:count, :keys] = block(x.s, first, c0, count, keys)
            # C, P and G have key j in column j - c0 - pL.
            windows = {}
            for u, v in np.ndindex(w.shape):
                windows[u, v] = slab_s[above + first - (cq - 1) + u :][:count, v : v + owned]
                if x.mask == "output":
                    windows[u, v] = windows[u, v] * x.sees(first, c0 + v, count, owned)
            c = sum(w[tap] * window for tap, window in windows.items())
            i, j = first + np.arange(count)[:, None], c0 + x.p_l + np.arange(owned)
            seen = x.sees(first, c0 + x.p_l, count, owned) & (i < n_q) & (j >= 0) & (j < n_k)
            p = np.where(seen, np.exp(np.where(seen, c - rows(lse, first, count), 0)), 0)
            d_out = rows(x.d_out, first, count)
            g = p * (d_out @ rows(x.v, c0 + x.p_l, owned).T - rows(d, first, count))
            slab_g[above + first :][:count, halo:keys] = g
            for column in range(min(owned, n_k - c0 - x.p_l)):
                dv[c0 + x.p_l + column] += p[:, column] @ d_out
            for tap, window in windows.items():
                dw[tap] += (g * window).sum()
            # What G adds to dS has key j in column j - c0, and lags by the 16 rows of a row tile.
            first -= 16
            ds = np.zeros((count, keys))
            for u, v in np.ndindex(w.shape):
                gradients = slab_g[above + first + u :][:count, v : v + keys]
                if x.mask == "output":
                    gradients = gradients * x.sees(first + u, c0, count, keys)
                ds += w_adjoint[u, v] * gradients
            if x.mask == "source":
                ds *= x.sees(first, c0, count, keys)
            begin, end = max(first, 0), min(first + count, n_q)
            key, stop = max(c0, 0), min(c0 + keys, n_k)
            ds = x.alpha * ds[begin - first : end - first, key - c0 : stop - c0]
            dq[begin:end] += ds @ x.k[key:stop]
            dk[key:stop] += ds.T @ x.q[begin:end]
    return Gradients(dq, dk, dv, dw[:, :ck])


@masked
@large
def test_tile_backward(kernel: tuple[int, int], causal: bool, mask: str) -> None:
    for (n_q, n_k), padding in zip(((21, 37), (40, 19), (25, 25)), PADDINGS, strict=True):
        x = head(kernel, n_q, n_k, causal, mask, padding)
        assert_equal(tile_backward(x, 2, 48), x.expected[2])


@large
def test_weight_gradient_lies_on_diagonals(kernel: tuple[int, int]) -> None:
    """The sum over all chunks of 8 columns of S, transposed, times 8 columns of G has dW on its diagonals."""
    cq, ck = kernel
    random, halo = np.random.default_rng(0), 2 * (ck // 2)
    columns = 24
    slab_s, g = random.standard_normal((cq - 1 + 16, columns + halo)), random.standard_normal((16, columns))
    slab_g = np.pad(g, ((0, 0), (halo, -halo % CHUNK)))
    first = -halo // CHUNK  # chunk of S, relative to that of G, in which the windows start
    chunks = 1 - first
    dw = np.zeros(kernel)
    for u, e in itertools.product(range(cq), range(first, first + chunks)):
        product = sum(
            block(slab_s, u, CHUNK * (n + e), 16, CHUNK).T @ slab_g[:, CHUNK * n : CHUNK * n + CHUNK]
            for n in range(slab_g.shape[1] // CHUNK)
        )
        for a, b in np.ndindex(CHUNK, CHUNK):
            v = CHUNK * e + halo + a - b
            if 0 <= v < ck:
                dw[u, v] += product[a, b]
    expected = [[(slab_s[u : u + 16, v : v + columns] * g).sum() for v in range(ck)] for u in range(cq)]
    assert_equal((dw,), (np.array(expected),))


# ---- 5. Decode ----


@masked
@padded
@small
def test_folded_decode(kernel: tuple[int, int], padding: str, causal: bool, mask: str) -> None:
    """A new token's scores are sums along diagonals of one product; the results of the splits are merged."""
    for length, n_new in ((9, 3), (3, 2)):
        x = head(kernel, length, length, causal, mask, padding)
        _, _, cq, ck = x.sizes
        for position in range(length - n_new, length):
            tail = rows(x.q, position - (cq - 1), cq)
            folded = x.alpha * x.w.T @ tail
            product = folded @ x.k.T
            if causal and mask == "source":  # the edge: keys that fewer than all of the cq queries see
                for j in range(max(0, position - (cq - 1) + 1), length):
                    seeing = position - (cq - 1) + np.arange(cq) >= j
                    product[:, j] = x.alpha * (x.w.T * seeing) @ tail @ x.k[j]
            if causal and mask == "output":
                product[:, position + 1 :] = 0
            c = sum(block(product, v, -x.p_l + v, 1, length) for v in range(ck))
            c = np.where(x.sees(position, 0, 1, length), c, -np.inf)
            lses, outs = [], []
            for split in np.array_split(np.arange(length), 3):
                p, lse = softmax(c[:, split])
                lses.append(lse), outs.append(p @ x.v[split])
            lse = np.log(sum(np.exp(lse) for lse in lses))
            out = sum(np.exp(part - lse) * split_out for part, split_out in zip(lses, outs, strict=True))
            assert_equal((out[0], lse), (x.expected[0][position], x.expected[1][position : position + 1]))


@large
def test_convolution_of_one_row(kernel: tuple[int, int]) -> None:
    """The 16 rows of an A operand are 16 chunks of a query's columns; a block is a row and a chunk of the window."""
    cq, ck = kernel
    random, chunks = np.random.default_rng(0), chunks_of_window(ck)
    slab, w = random.standard_normal((cq, CHUNK * (16 + chunks - 1))), random.standard_normal(kernel)
    c = np.zeros((16, CHUNK))
    for u, e in itertools.product(range(cq), range(chunks)):
        c += slab[u].reshape(-1, CHUNK)[e : e + 16] @ toeplitz(w, u, e)
    assert_equal((c.reshape(1, -1),), (direct(slab, w, 1, 16 * CHUNK),))


@pytest.mark.parametrize("n_splits", [1, 2, 3, 7])
def test_splits_own_every_key_once(n_splits: int) -> None:
    ck, keys = 11, 32
    for length in range(1, 300):
        span = keys * math.ceil((math.ceil(length / n_splits) + ck - 1) / keys) - (ck - 1)
        owned = [j for split in range(n_splits) for j in range(split * span, min((split + 1) * span, length))]
        assert owned == list(range(length))
        assert (span + ck - 1) % keys == 0


# ---- 6. Numbers ----


def test_range_of_scores() -> None:
    """What a slab of fp16 makes of q.k 2^-8."""

    def held(score: float) -> float:
        with np.errstate(over="ignore"):
            return float(np.float16(score * 2.0**-8)) * 2.0**8

    assert 1.67e7 < held(65504 * 2.0**8) == 65504 * 2.0**8
    assert math.isinf(held(65520 * 2.0**8))
    assert math.isnan(math.inf * 0.0)  # what an infinite score makes of a zero of the Toeplitz operand
    assert held(2.0**-17) == 0
    assert held(1.01 * 2.0**-17) > 0
    for score in np.exp2(np.random.default_rng(0).uniform(-6, 23, 1000)):  # 2^-6: the least normal number
        assert abs(held(score) - score) <= 2.0**-11 * score


# ---- 7. Cost ----


def instructions(cq: int, ck: int, *, gathers: bool) -> int:
    """mma's that convolve 16 x 8 scores."""
    if gathers:
        chunks = (ck + 7) // CHUNK
        return cq // 2 * chunks + cq % 2 * math.ceil(chunks / 2) + math.ceil(cq / 8)
    chunks = chunks_of_window(ck)
    return cq // 2 * chunks + cq % 2 * math.ceil(chunks / 2)


def fewest_instructions(cq: int, ck: int) -> int:
    """With gathered columns where there are any and they pay."""
    may_gather = ck > 1 and (ck + 7) % CHUNK in (1, 2)
    return min(instructions(cq, ck, gathers=gathers) for gathers in ((True, False) if may_gather else (False,)))


@large
def test_cost(kernel: tuple[int, int]) -> None:
    d, m, mma = 64, min(kernel), fewest_instructions(*kernel)
    lift, tile = (plan(Spec(kernel, d), "sm_90a", backend).flops_per_score() for backend in ("triton", "cuda"))
    assert lift["forward"] == 2 * m * d + 2 * d
    assert lift["backward"] == 6 * m * d + 4 * d
    assert tile["forward"] == 4 * d + (0 if kernel == (1, 1) else 32 * mma)
    assert tile["plain attention forward"] == 4 * d


def test_cost_of_the_papers_kernel() -> None:
    assert fewest_instructions(6, 11) == instructions(6, 11, gathers=True) == 7
    assert instructions(6, 11, gathers=False) == 9
    for d, costs in ((64, (256, 896, 480, 640, 2560, 1504)), (128, (512, 1792, 736, 1280, 5120, 2144))):
        forward = 4 * d, 2 * 6 * d + 2 * d, 4 * d + 32 * 7
        assert (*forward, 10 * d, 6 * 6 * d + 4 * d, 10 * d + 96 * 9) == costs


# ---- 8. Pipelines of stages ----


@dataclass(frozen=True, eq=False)
class Pipeline:
    """All heads of a pipeline, each as a head of section 1; matrices are of all heads, zero outside of groups."""

    heads: list[Head]
    m: Array  # [H, H]
    n: Array  # [H, H]
    u: Array  # [H, cq', ck']

    @property
    def after(self) -> list[Head]:
        """The heads with the kernels after the softmax."""
        return [replace(x, w=u) for x, u in zip(self.heads, self.u, strict=True)]

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        x = self.heads[0]
        return x.sees(0, 0, len(x.q), len(x.k))


def blocks_of(matrices: Array) -> Array:
    """Matrices of groups [H/m, m, m] as one of all heads."""
    groups, m, _ = matrices.shape
    whole = np.zeros((groups * m, groups * m))
    for i, matrix in enumerate(matrices):
        whole[i * m : (i + 1) * m, i * m : (i + 1) * m] = matrix
    return whole


def mixed(matrix: Array, x: Array) -> Array:
    """Sums over the second index of heads."""
    return np.einsum("hg,gij->hij", matrix, x)


def after_softmax(x: Pipeline, p: Array) -> Array:
    """A; P holds what its rule keeps."""
    terms = [replace(one, mask="source", alpha=1.0) for one in x.after]
    a = [
        sum(one.w[u, v] * block(ph, -(one.w.shape[0] - 1) + u, -one.p_l + v, *ph.shape) for u, v in one.taps())
        for one, ph in zip(terms, p, strict=True)
    ]
    return np.where(x.seen, np.stack(a), 0)


def pipeline_forward(x: Pipeline) -> tuple[Array, Array, Array, Array, Array]:
    """O, LSE, and C where it is seen, P, A."""
    c = np.where(x.seen, np.stack([convolved(one) for one in x.heads]), 0)
    p, lse = zip(*(softmax(np.where(x.seen, ch, -np.inf)) for ch in mixed(x.m, c)), strict=True)
    a = after_softmax(x, np.stack(p))
    out = np.stack([ah @ one.v for ah, one in zip(mixed(x.n, a), x.heads, strict=True)])
    return out, np.stack(lse), c, np.stack(p), a


def pipeline_backward(x: Pipeline) -> tuple[Array, ...]:
    """Gradients of q, k, v by heads of queries, and of W, M, U, N."""
    _, _, c, p, a = pipeline_forward(x)
    d_out = np.stack([one.d_out for one in x.heads])
    da_mixed = np.stack([one.d_out @ one.v.T for one in x.heads])
    dv = np.stack([ah.T @ dh for ah, dh in zip(mixed(x.n, a), d_out, strict=True)])
    dn = np.einsum("hij,gij->hg", da_mixed, a)
    da = np.where(x.seen, mixed(x.n.T, da_mixed), 0)
    dp, du = np.zeros_like(p), np.zeros_like(x.u)
    for h, one in enumerate(x.after):
        cq = one.w.shape[0]
        for u, v in one.taps():
            dp[h] += one.w[u, v] * block(da[h], cq - 1 - u, one.p_l - v, *p[h].shape)
            du[h, u, v] = (da[h] * block(p[h], -(cq - 1) + u, -one.p_l + v, *p[h].shape)).sum()
    d = (p * dp).sum(2)
    if x.u.shape[1:] == (1, 1):  # D from what dN sums up, row by row
        rows_of_dn = np.einsum("hij,gij->ihg", da_mixed, p * x.u)
        assert_equal((d,), (np.einsum("hg,ihg->gi", x.n, rows_of_dn),))
    d_lse = np.stack([one.d_lse for one in x.heads])
    dc_mixed = p * (dp - d[:, :, None] + d_lse[:, :, None])
    dm = np.einsum("hij,gij->hg", dc_mixed, c)
    dq, dk, dw = [], [], []
    for one, g in zip(x.heads, mixed(x.m.T, dc_mixed), strict=True):
        n_q, n_k, cq, _ = one.sizes
        ds, dwh = np.zeros((n_q, n_k)), np.zeros_like(one.w)
        for u, v in one.taps():
            i, j = cq - 1 - u, one.p_l - v  # added to i', j'
            counts = one.sees(i, 0, n_q, n_k) if one.mask == "output" else one.sees(0, 0, n_q, n_k)
            ds += one.w[u, v] * counts * block(g, i, j, n_q, n_k)
            dwh[u, v] = (g * term(one, u, v)).sum()
        dq.append(one.alpha * ds @ one.k)
        dk.append(one.alpha * ds.T @ one.q)
        dw.append(dwh)
    return *map(np.stack, (dq, dk)), dv, np.stack(dw), dm, du, dn


@masked
@padded
@pytest.mark.parametrize("kernels", [((1, 1), (1, 1)), ((2, 3), (1, 1)), ((1, 1), (3, 2)), ((2, 3), (3, 4))], ids=str)
@pytest.mark.parametrize("groups", [(1, 4), (2, 2), (4, 1)], ids=str)
def test_pipelines(
    groups: tuple[int, int], kernels: tuple[tuple[int, int], tuple[int, int]], padding: str, causal: bool, mask: str
) -> None:
    """Results and all gradients; four heads, of which two share keys."""
    for n_q, n_k in ((5, 5), (3, 6), (6, 3)):
        random = np.random.default_rng(n_q)
        q, d_out = random.standard_normal((4, n_q, 3)), random.standard_normal((4, n_q, 2))
        k, v, d_lse = (random.standard_normal(shape) for shape in ((2, n_k, 3), (2, n_k, 2), (4, n_q)))
        w, u = (random.standard_normal((4, *kernel)) for kernel in kernels)
        m, n = (random.standard_normal((4 // group, group, group)) for group in groups)
        heads = [Head(q[h], k[h // 2], v[h // 2], w[h], d_out[h], d_lse[h], causal, mask, padding) for h in range(4)]
        x = Pipeline(heads, blocks_of(m), blocks_of(n), u)
        leaves = [torch.tensor(array, requires_grad=True) for array in (q, k, v, w, m, u, n)]
        tensors = [leaf[None] if i < 3 else leaf for i, leaf in enumerate(leaves)]
        options = {"causal": causal, "key_padding": padding, "mask": mask, "scale": heads[0].alpha}
        names = ("weight", "head_weight", "post_weight", "post_head_weight")
        weights = dict(zip(names, tensors[3:], strict=True))
        out, lse = reference(*tensors[:3], **weights, **options, return_lse=True)
        seen = lse.isfinite()
        loss = (out * torch.tensor(d_out)).sum() + (lse * torch.tensor(d_lse))[seen].sum()
        expected = [gradient.numpy() for gradient in torch.autograd.grad(loss, leaves)]
        assert_equal(pipeline_forward(x)[:2], (out[0].detach().numpy(), lse[0].detach().numpy()))
        dq, dk, dv, dw, dm, du, dn = pipeline_backward(x)
        shared = [gradient.reshape(2, 2, n_k, -1).sum(1) for gradient in (dk, dv)]
        grouped = [
            np.stack([whole[i : i + group, i : i + group] for i in range(0, 4, group)])
            for whole, group in zip((dm, dn), groups, strict=True)
        ]
        assert_equal((dq, *shared, dw, grouped[0], du, grouped[1]), tuple(expected))


def test_matrices_of_tokens() -> None:
    """The mixture and all gradients; two groups of three heads."""
    random = np.random.default_rng(0)
    groups, size, rows, keys, rank, key_rank = 2, 3, 4, 5, 2, 1
    heads = groups * size
    c, d_mixed = (random.standard_normal((heads, rows, keys)) for _ in range(2))
    weight = random.standard_normal((groups, size, size))
    of_queries = random.standard_normal((heads, rows, 2 * rank + 1))
    of_keys = random.standard_normal((heads, keys, 2 * key_rank + 1))
    leaves = [torch.tensor(x, requires_grad=True) for x in (c, weight, of_queries, of_keys)]
    expected = _mix(leaves[0][None], leaves[1], leaves[2][None], leaves[3][None])[0]
    gradients = torch.autograd.grad(expected, leaves, torch.tensor(d_mixed))

    same = blocks_of(np.ones((groups, size, size)))  # whether two heads are of one group
    a, b, gate = of_queries[..., :rank], of_queries[..., rank : 2 * rank], of_queries[..., -1]
    a_key, b_key, gate_key = of_keys[..., :key_rank], of_keys[..., key_rank : 2 * key_rank], of_keys[..., -1]
    m_i = (
        blocks_of(weight)[None] + np.einsum("hir,gir->ihg", b, a) * same + np.einsum("hi,hg->ihg", gate, np.eye(heads))
    )
    s = np.einsum("hg,gjr,gij->hrij", same, a_key, c)  # the same for all heads of a group
    mixture = np.einsum("ihg,gij->hij", m_i, c) + np.einsum("hjr,hrij->hij", b_key, s) + gate_key[:, None] * c
    assert_equal((mixture,), (expected.detach().numpy(),))

    d_m_i = np.einsum("hij,gij->ihg", d_mixed, c) * same
    d_a, d_b = np.einsum("ihg,hir->gir", d_m_i, b), np.einsum("ihg,gir->hir", d_m_i, a)
    d_of_queries = np.concatenate([d_a, d_b, np.einsum("ihh->hi", d_m_i)[..., None]], -1)
    u = np.einsum("gh,hjr,hij->grij", same, b_key, d_mixed)
    d_a_key, d_b_key = np.einsum("gij,grij->gjr", c, u), np.einsum("hij,hrij->hjr", d_mixed, s)
    d_of_keys = np.concatenate([d_a_key, d_b_key, np.einsum("hij,hij->hj", d_mixed, c)[..., None]], -1)
    d_c = np.einsum("ihg,hij->gij", m_i, d_mixed) + np.einsum("gjr,grij->gij", a_key, u) + gate_key[:, None] * d_mixed
    d_weight = np.stack([d_m_i.sum(0)[i : i + size, i : i + size] for i in range(0, heads, size)])
    assert_equal((d_c, d_weight, d_of_queries, d_of_keys), tuple(x.numpy() for x in gradients))


@pytest.mark.parametrize("kernels", [((3, 2), (2, 3)), ((1, 1), (4, 1)), ((2, 2), (1, 1))], ids=str)
def test_rows_that_a_strip_needs(kernels: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """The last rows of the output from as many queries before them as both convolutions read, and from no fewer."""
    torch.manual_seed(0)
    (q, k, v), (w, u) = torch.randn(3, 1, 2, 9, 4).double(), (torch.randn(2, *kernel).double() for kernel in kernels)
    context = sum(kernel[0] - 1 for kernel in kernels)
    whole = reference(q, k, v, w, post_weight=u)[:, :, -2:]
    enough, fewer = (reference(q[:, :, -n:], k, v, w, post_weight=u)[:, :, -2:] for n in (2 + context, 1 + context))
    torch.testing.assert_close(enough, whole, rtol=0, atol=1e-12)
    assert (fewer - whole).abs().max() > 1e-3
