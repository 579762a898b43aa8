"""Fused backward: its plan, its index arithmetic in NumPy, what the compiler makes of it; on a GPU, its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mtagen.accuracy import GRADIENT_FACTOR, compare
from mtagen.codegen.cuda import render
from mtagen.dtypes import TORCH_DTYPES
from mtagen.errors import PlanError
from mtagen.naive import reference
from mtagen.planner import get_target
from mtagen.planner.fused.backward import GROUP, GROUPS, ROWS, FusedBackward, fused_backward
from mtagen.runtime.cuda import cuda_pass
from mtagen.runtime.cuda.compiler import compile_cubin
from mtagen.runtime.offline import sass_opcodes, usage_of_cubin
from mtagen.spec import Spec

TARGET = get_target("sm_90a")
KERNELS = ((6, 11), (1, 1), (3, 3), (2, 9), (7, 7), (4, 2), (11, 11), (5, 17), (16, 3), (16, 17), (1, 8))
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128)
Array = npt.NDArray[np.float64]


def plans() -> Iterator[FusedBackward]:
    for kernel, dim in itertools.product(KERNELS, HEAD_DIMS):
        yield fused_backward(Spec(kernel, dim), TARGET)


# ---- The plan ----


def test_plans_fit_the_chip() -> None:
    for plan in plans():
        main, helper = plan.register_split
        assert plan.shared.size <= TARGET.shared_per_block
        assert 128 * (plan.warpgroups * main + helper) <= TARGET.registers_per_multiprocessor
        assert plan.registers <= main


def test_operands_are_aligned() -> None:
    for plan in plans():
        assert plan.lag % 8 == 0  # the K tile's rows, in swizzle atoms
        assert plan.shift % 2 == 0  # G is stored two columns at a time
        assert plan.strip_row % 32 == 16  # an odd number of 16-byte chunks: no bank conflicts
        assert plan.lag + 16 * plan.dq_steps <= plan.keys
        assert 8 * plan.tiles * plan.warpgroups <= plan.keys
        assert plan.shift + plan.columns <= plan.keys + 8  # G's last columns fit a strip's row
        assert plan.dq_columns * plan.dq_parts >= plan.spec.head_dim
        assert plan.dq_parts <= plan.warpgroups


def test_every_row_shift_has_its_block() -> None:
    for plan in plans():
        share = plan.weight_gradient
        assert share.shifts * share.splits >= plan.spec.cq
        blocks = [block for block, _, _ in share.blocks]
        assert sorted(blocks) == sorted(itertools.product(range(share.shifts), range(share.chunks)))


@pytest.mark.parametrize(
    ("spec", "target", "limit"),
    [
        (Spec((6, 11), 192), "sm_90a", "registers"),
        (Spec((6, 11), 64, value_head_dim=128), "sm_90a", "value_head_dim"),
        (Spec((6, 11), 64, mask="output"), "sm_90a", "mask"),
        (Spec((6, 11), 64, dtype="fp32"), "sm_90a", "dtype"),
        (Spec((17, 11), 64), "sm_90a", "kernel"),
        (Spec((6, 19), 64), "sm_90a", "kernel"),
        (Spec((6, 11), 64), "sm_80", "target"),
    ],
)
def test_refusals_name_the_limit(spec: Spec, target: str, limit: str) -> None:
    with pytest.raises(PlanError, match=limit):
        fused_backward(spec, get_target(target))


# ---- The kernel's index arithmetic, in NumPy ----


class Gradients(NamedTuple):
    dq: Array
    dk: Array
    dv: Array
    dw: Array


def direct(spec: Spec, q: Array, k: Array, v: Array, w: Array, grad_out: Array) -> Gradients:
    """From the definition, by autograd in float64."""
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, w)]
    out = reference(
        *(x[None, None] for x in leaves[:3]),
        leaves[3][None],
        causal=spec.causal,
        key_padding=spec.key_padding,
        scale=1.0,
    )
    assert isinstance(out, Tensor)
    return Gradients(*(x.numpy() for x in torch.autograd.grad(out, leaves, torch.from_numpy(grad_out)[None, None])))


def modelled(
    plan: FusedBackward, q: Array, k: Array, v: Array, w: Array, grad_out: Array, lse: Array, dot: Array
) -> Gradients:
    """As the kernel goes: CTA by CTA, tile by tile, through strips whose columns and rows are the plan's."""
    spec = plan.spec
    (n_q, dim), (n_k, _) = q.shape, k.shape
    dq, dk, dv, dw = (np.zeros_like(x) for x in (q, k, v, w))
    taps = np.zeros((spec.cq, plan.taps))
    taps[:, : spec.ck] = w
    off = n_k - n_q

    def rows_of(x: Array, first: int, count: int, outside: float = 0.0) -> Array:
        at = np.arange(first, first + count)
        inside = (at >= 0) & (at < len(x))
        return np.where(inside.reshape(-1, *[1] * (x.ndim - 1)), x[np.clip(at, 0, len(x) - 1)], outside)

    for block in range(-(-n_k // plan.owned)):
        c0 = block * plan.owned - plan.halo
        first = max(0, c0 - off) if spec.causal else 0
        key_tile, value_tile = rows_of(k, c0, plan.keys), rows_of(v, c0 + plan.pad_left, plan.keys)
        scores = np.zeros((plan.score_ring * GROUP, plan.keys + 16))
        gradients = np.zeros((plan.gradient_ring * GROUP, plan.keys + 16))
        x, r = np.arange(plan.keys), np.arange(ROWS)[:, None]
        hidden = lambda t, lag, row: spec.causal & (c0 + lag + x > first + t * ROWS + row + off)  # noqa: E731

        for t in range((n_q - first + GROUP + ROWS - 1) // ROWS):
            row = first + t * ROWS
            tile_q, tile_do = rows_of(q, row, ROWS), rows_of(grad_out, row, ROWS)
            scores[(t * ROWS + r[:, 0]) % len(scores), : plan.keys] = np.where(hidden(t, 0, r), 0, tile_q @ key_tile.T)

            def window(strip: Array, begin: int, u: int, i: int) -> Array:
                return strip[(begin + np.arange(ROWS) + u) % len(strip)][:, i : i + plan.keys]  # noqa: B023

            c = np.zeros((ROWS, plan.keys))
            for u, i in np.ndindex(taps.shape):
                part = window(scores, t * ROWS - (spec.cq - 1), u, i)
                c[:, : part.shape[1]] += taps[u, i] * part
            exists = (x >= max(0, -(c0 + plan.pad_left))) & (x < min(plan.columns, n_k - c0 - plan.pad_left))
            p = np.exp(c - rows_of(lse, row, ROWS, np.inf)[:, None])
            p = np.where(exists & ~hidden(t, plan.pad_left, r), p, 0)
            g = p * (tile_do @ value_tile.T - rows_of(dot, row, ROWS)[:, None])
            gradients[(t * ROWS + r[:, 0]) % len(gradients), plan.shift : plan.shift + plan.keys] = g

            ds = np.zeros((ROWS, plan.keys))
            for u, i in np.ndindex(taps.shape):
                part = window(gradients, t * ROWS - GROUP, u, i)
                ds[:, : part.shape[1]] += taps[spec.cq - 1 - u, plan.halo - i] * part
            ds = np.where((x >= plan.shift) & (x < plan.end) & ~hidden(t, plan.lag, r - GROUP), ds, 0)
            assert not ds[:, 8 * plan.tiles * plan.warpgroups :].any()

            above = np.concatenate([rows_of(q, row - GROUP, GROUP), tile_q[: ROWS - GROUP]])
            part = ds[:, : 16 * plan.dq_steps] @ key_tile[plan.lag : plan.lag + 16 * plan.dq_steps]
            for i in range(ROWS):
                if 0 <= row - GROUP + i < n_q:
                    dq[row - GROUP + i] += part[i]
            for sums, tile, lag, begin in (
                (dk, ds.T @ above, plan.lag, plan.shift),
                (dv, p.T @ tile_do, plan.pad_left, plan.pad_right),
            ):
                for column in range(begin, min(begin + plan.owned, n_k - c0 - lag)):
                    sums[c0 + lag + column] += tile[column]

            begin, end = plan.owned_gradient
            for chunk in range(begin // 8, -(-end // 8)):
                columns = np.arange(8 * chunk, 8 * chunk + 8)
                owned = gradients[(t * ROWS + np.arange(ROWS)) % len(gradients)][:, columns]
                owned = np.where((columns >= begin) & (columns < end), owned, 0)
                for u, d in itertools.product(range(spec.cq), range(plan.weight_chunks)):
                    at = 8 * (chunk + plan.first_weight_chunk + d)
                    if at < 0:
                        continue
                    part = (
                        scores[(t * ROWS - (spec.cq - 1) + u + np.arange(ROWS)) % len(scores)][:, at : at + 8].T @ owned
                    )
                    for m, n in np.ndindex(8, 8):
                        i = 8 * (plan.first_weight_chunk + d) + m - n + plan.shift
                        if 0 <= i < spec.ck:
                            dw[u, i] += part[m, n]
    return Gradients(dq, dk, dv, dw)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padding", ["both", "left", "right"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_model_of_the_kernel(kernel: tuple[int, int], padding: str, causal: bool) -> None:
    """Every pair of row and key in exactly one CTA, every window in its strip: the sums equal the definition's."""
    rng = np.random.default_rng(0)
    spec = Spec(kernel, 128, causal=causal, key_padding=padding)
    plan = fused_backward(spec, TARGET)
    for n_q, n_k in ((150, 260), (140, 97), (130, 130)):
        q, k, v, grad_out = (rng.standard_normal((n, 4)) / 2 for n in (n_q, n_k, n_k, n_q))
        w = rng.standard_normal(kernel) / 4
        tensors = [torch.from_numpy(x)[None, None] for x in (q, k, v)]
        weight = torch.from_numpy(w)[None]
        out, lse = reference(*tensors, weight, causal=causal, key_padding=padding, scale=1.0, return_lse=True)
        dot = (out[0, 0].numpy() * grad_out).sum(1)
        row_lse = np.where(np.isinf(lse[0, 0].numpy()), np.inf, lse[0, 0].numpy())
        ours = modelled(plan, q, k, v, w, grad_out, row_lse, dot)
        for name, a, b in zip(Gradients._fields, ours, direct(spec, q, k, v, w, grad_out), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12, err_msg=f"{name}, {n_q} x {n_k}")
