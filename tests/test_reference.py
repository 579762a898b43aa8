"""The specification against a brute-force loop that shares no code with it, and against torch's attention."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
import torch
import torch.nn.functional as F

from mtagen.naive import reference

F64 = torch.float64
KERNELS = [(1, 1), (1, 4), (2, 1), (3, 3), (4, 6)]
LENGTHS = [(5, 5), (3, 6), (6, 3), (1, 1)]


def inputs(kernel, nq, nk, heads=2, kv_heads=1, dim=3, value_dim=2, **options):
    torch.manual_seed(0)
    shapes = (1, heads, nq, dim), (1, kv_heads, nk, dim), (1, kv_heads, nk, value_dim), (heads, *kernel)
    return [torch.randn(shape, dtype=F64, **options) for shape in shapes]


def brute_force(q, k, v, weight, causal, key_padding, mask):
    """The definition, one scalar at a time."""
    (_, heads, nq, dim), (_, kv_heads, nk, value_dim) = q.shape, v.shape
    _, cq, ck = weight.shape
    queries, keys, kernels = q[0].tolist(), k[0].tolist(), weight.tolist()
    left = {"both": (ck - 1) // 2, "left": ck - 1, "right": 0}[key_padding]
    out, lse = (
        torch.zeros(1, heads, nq, value_dim, dtype=F64),
        torch.full((1, heads, nq), -torch.inf, dtype=F64),
    )

    def allowed(i, j):
        return not causal or j <= i + nk - nq

    def dot(x, y):
        return sum(map(operator.mul, x, y))

    for h, i in itertools.product(range(heads), range(nq)):
        kv = h // (heads // kv_heads)
        row = {}
        for j in (j for j in range(nk) if allowed(i, j)):
            row[j] = 0.0
            for a, b in itertools.product(range(cq), range(ck)):
                i2, j2 = i - (cq - 1) + a, j - left + b
                if 0 <= i2 < nq and 0 <= j2 < nk and allowed(i2 if mask == "source" else i, j2):
                    row[j] += kernels[h][a][b] * dot(queries[h][i2], keys[kv][j2]) / math.sqrt(dim)
        if row:
            total = sum(map(math.exp, row.values()))
            lse[0, h, i] = math.log(total)
            out[0, h, i] = sum(math.exp(c) / total * v[0, kv, j] for j, c in row.items())
    return out, lse


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("key_padding", ["both", "left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_equals_brute_force(kernel, causal, key_padding, mask):
    options = {"causal": causal, "key_padding": key_padding, "mask": mask}
    for nq, nk in LENGTHS:
        args = inputs(kernel, nq, nk)
        torch.testing.assert_close(
            reference(*args, **options, return_lse=True), brute_force(*args, **options), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("key_padding", ["both", "left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 5), (2, 4)], ids=str)
def test_identity_kernel_is_plain_attention(kernel, causal, key_padding):
    q, k, v, weight = inputs(kernel, 7, 7, heads=4, kv_heads=2)
    tap = {"both": (kernel[1] - 1) // 2, "left": kernel[1] - 1, "right": 0}[key_padding]
    weight.zero_()[:, -1, tap] = 1
    out = reference(q, k, v, weight, causal=causal, key_padding=key_padding)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", ["source", "output"])
def test_gradients_where_some_rows_see_no_key(mask):
    args = inputs((2, 3), 5, 3, requires_grad=True)

    def visible_rows(*args):
        out, lse = reference(*args, mask=mask, return_lse=True)
        return out, lse[:, :, 2:]

    out, lse = reference(*args, mask=mask, return_lse=True)
    assert torch.equal(lse.isinf().nonzero()[:, 2].unique(), torch.tensor([0, 1]))
    assert not out[:, :, :2].any()
    assert torch.autograd.gradcheck(visible_rows, args)
    grads = torch.autograd.grad(out.sum() + lse.sum(), args)
    assert all(grad.isfinite().all() for grad in grads)


def test_authors_weight_layout_and_scale():
    q, k, v, weight = inputs((2, 3), 5, 5)
    expected = reference(q * 0.5, k, v, weight, scale=1.0)
    torch.testing.assert_close(reference(q, k, v, weight.unsqueeze(1), scale=0.5), expected)


@pytest.mark.parametrize(("nq", "nk"), [(0, 4), (4, 0), (0, 0)])
def test_no_scores(nq, nk):
    out, lse = reference(*inputs((2, 3), nq, nk), return_lse=True)
    assert torch.equal(out, torch.zeros(1, 2, nq, 2, dtype=F64))
    assert torch.equal(lse, torch.full((1, 2, nq), -torch.inf, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computes_in_the_dtype_of_the_queries(dtype):
    q, k, v, weight = inputs((2, 3), 5, 5)
    out, lse = reference(q.to(dtype), k.to(dtype), v.to(dtype), weight, return_lse=True)
    assert out.dtype == lse.dtype == dtype


def test_unknown_options_are_refused():
    args = inputs((2, 3), 5, 5)
    with pytest.raises(ValueError, match="mask"):
        reference(*args, mask="both")
    with pytest.raises(KeyError):
        reference(*args, key_padding="top")
