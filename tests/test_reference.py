"""The specification against a brute-force loop that shares no code with it, and against torch's attention."""

from __future__ import annotations

import itertools
import math
import operator

import pytest
import torch
import torch.nn.functional as F

import mtagen
from mtagen import InputError, SpecError, reference

pytestmark = pytest.mark.usefixtures("one_thread")

F64 = torch.float64
KERNELS = [(1, 1), (1, 4), (2, 1), (3, 3), (4, 6)]
WINDOWS = [(0, -1), (1, -1), (-1, 1), (2, 3), (9, 0)]
LENGTHS = [(5, 5), (3, 6), (6, 3), (1, 1)]


def inputs(kernel, nq, nk, heads=2, kv_heads=1, dim=3, value_dim=2, **options):
    torch.manual_seed(0)
    shapes = (1, heads, nq, dim), (1, kv_heads, nk, dim), (1, kv_heads, nk, value_dim), (heads, *kernel)
    return [torch.randn(shape, dtype=F64, **options) for shape in shapes]


def brute_force(
    q,
    k,
    v,
    weight=None,
    head_weight=None,
    post_weight=None,
    post_head_weight=None,
    *,
    causal=True,
    window=(-1, -1),
    key_padding="both",
    mask="source",
):
    """The definition, one scalar at a time. What has a head, a query and a key is a dict of numbers by these three."""
    (_, heads, nq, dim), (_, kv_heads, nk, value_dim) = q.shape, v.shape
    queries, keys, group = q[0].tolist(), k[0].tolist(), heads // kv_heads
    out, lse = (
        torch.zeros(1, heads, nq, value_dim, dtype=F64),
        torch.full((1, heads, nq), -torch.inf, dtype=F64),
    )

    def allowed(i, j):
        position, (left, right) = i + nk - nq, window
        if causal and j > position:
            return False
        return (left < 0 or j >= position - left) and (right < 0 or j <= position + right)

    def dot(x, y):
        return sum(map(operator.mul, x, y))

    def convolve(x, weight):
        if weight is None:
            return x
        _, cq, ck = weight.shape
        kernels, results = weight.tolist(), {}
        left = {"both": (ck - 1) // 2, "left": ck - 1, "right": 0}[key_padding]
        for h, i, j in x:
            results[h, i, j] = 0.0
            for a, b in itertools.product(range(cq), range(ck)):
                i2, j2 = i - (cq - 1) + a, j - left + b
                if 0 <= i2 < nq and 0 <= j2 < nk and allowed(i2 if mask == "source" else i, j2):
                    results[h, i, j] += kernels[h][a][b] * x[h, i2, j2]
        return results

    def mix(x, weight):
        if weight is None:
            return x
        matrices, m = weight.tolist(), weight.shape[-1]
        return {(h, i, j): sum(matrices[h // m][h % m][g] * x[h - h % m + g, i, j] for g in range(m)) for h, i, j in x}

    def shares_of(x):
        shares = dict.fromkeys(x, 0.0)
        for h, i in itertools.product(range(heads), range(nq)):
            row = [(h, i, j) for j in range(nk) if allowed(i, j)]
            if row:
                total = sum(math.exp(x[entry]) for entry in row)
                lse[0, h, i] = math.log(total)
                shares |= {entry: math.exp(x[entry]) / total for entry in row}
        return shares

    entries = itertools.product(range(heads), range(nq), range(nk))
    scores = {(h, i, j): dot(queries[h][i], keys[h // group][j]) / math.sqrt(dim) for h, i, j in entries}
    shares = convolve(shares_of(mix(convolve(scores, weight), head_weight)), post_weight)
    shares = mix({(h, i, j): x if allowed(i, j) else 0.0 for (h, i, j), x in shares.items()}, post_head_weight)
    for (h, i, j), share in shares.items():
        out[0, h, i] += share * v[0, h // group, j]
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


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows_equal_brute_force(window, causal, mask):
    options = {"causal": causal, "window": window, "mask": mask}
    for nq, nk in LENGTHS:
        args = inputs((3, 4), nq, nk)
        post = torch.randn(args[0].shape[1], 2, 3, dtype=F64)
        torch.testing.assert_close(
            reference(*args, post_weight=post, **options, return_lse=True),
            brute_force(*args, post_weight=post, **options),
            rtol=0,
            atol=1e-12,
        )


def stages(heads, kernel, mixed_heads, post_kernel, post_mixed_heads):
    """The weights of a pipeline by name, None for a stage that there is not."""
    shapes = {
        "weight": kernel and (heads, *kernel),
        "head_weight": mixed_heads and (heads // mixed_heads, mixed_heads, mixed_heads),
        "post_weight": post_kernel and (heads, *post_kernel),
        "post_head_weight": post_mixed_heads and (heads // post_mixed_heads, post_mixed_heads, post_mixed_heads),
    }
    return {name: shape and torch.randn(shape, dtype=F64) for name, shape in shapes.items()}


@pytest.mark.parametrize("mask", ["source", "output"])
@pytest.mark.parametrize("key_padding", ["both", "left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("post_mixed_heads", [None, 4])
@pytest.mark.parametrize("post_kernel", [None, (2, 3)], ids=str)
@pytest.mark.parametrize("mixed_heads", [None, 2])
@pytest.mark.parametrize("kernel", [None, (3, 2)], ids=str)
def test_pipelines_equal_brute_force(kernel, mixed_heads, post_kernel, post_mixed_heads, causal, key_padding, mask):
    options = {"causal": causal, "key_padding": key_padding, "mask": mask}
    for nq, nk in LENGTHS:
        q, k, v, _ = inputs((1, 1), nq, nk, heads=4, kv_heads=2)
        weights = stages(4, kernel, mixed_heads, post_kernel, post_mixed_heads)
        torch.testing.assert_close(
            reference(q, k, v, **weights, **options, return_lse=True),
            brute_force(q, k, v, **weights, **options),
            rtol=0,
            atol=1e-12,
        )


@pytest.mark.parametrize(("mixed_heads", "post_mixed_heads"), [(1, 6), (3, 2), (6, 3), (2, 1)])
def test_groups_of_any_size_equal_brute_force(mixed_heads, post_mixed_heads):
    """A scale for each head; groups with parts of groups that share keys; all heads."""
    q, k, v, _ = inputs((1, 1), 4, 5, heads=6, kv_heads=3)
    weights = stages(6, (2, 2), mixed_heads, (1, 2), post_mixed_heads)
    expected = brute_force(q, k, v, **weights)
    torch.testing.assert_close(reference(q, k, v, **weights, return_lse=True), expected, rtol=0, atol=1e-12)


def test_layouts_of_weights():
    """Kernels with an axis of input channels, as of torch's convolutions; the one matrix of all heads."""
    q, k, v, _ = inputs((1, 1), 5, 5, heads=4, kv_heads=2)
    weights = stages(4, (2, 3), 4, (3, 2), 4)
    other = {
        "weight": weights["weight"].unsqueeze(1),
        "head_weight": weights["head_weight"][0],
        "post_weight": weights["post_weight"].unsqueeze(1),
        "post_head_weight": weights["post_head_weight"][0],
    }
    assert torch.equal(reference(q, k, v, **other), reference(q, k, v, **weights))


@pytest.mark.parametrize("mask", ["source", "output"])
def test_gradients_of_a_pipeline_where_some_rows_see_no_key(mask):
    q, k, v, _ = inputs((1, 1), 5, 3, heads=2)
    weights = stages(2, (2, 3), 2, (2, 2), 2)
    leaves = [x.requires_grad_() for x in (q, k, v, *weights.values())]

    def visible_rows(q, k, v, *given):
        out, lse = reference(q, k, v, **dict(zip(weights, given, strict=True)), mask=mask, return_lse=True)
        return out, lse[:, :, 2:]

    assert not visible_rows(*leaves)[0][:, :, :2].any()
    assert torch.autograd.gradcheck(visible_rows, leaves)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(visible_rows(*leaves)[0].sum(), leaves))


@pytest.mark.parametrize("causal", [True, False])
def test_identities_are_plain_attention(causal):
    q, k, v, _ = inputs((1, 1), 7, 7, heads=4, kv_heads=2)
    weights = stages(4, (3, 5), 2, (2, 3), 4)
    for name in ("weight", "post_weight"):
        kernel = weights[name].zero_()
        kernel[:, -1, (kernel.shape[2] - 1) // 2] = 1
    for name in ("head_weight", "post_head_weight"):
        weights[name].copy_(torch.eye(weights[name].shape[-1]))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    for given in (weights, {}):
        torch.testing.assert_close(reference(q, k, v, **given, causal=causal), expected, rtol=0, atol=1e-12)


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
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out, lse = reference(q, k, v, weight.float(), return_lse=True)
    assert out.dtype == lse.dtype == dtype
    assert torch.equal(out, reference(q, k, v, weight.to(dtype)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """Its checks are traced, too."""
    torch._dynamo.reset()
    q, k, v, _ = inputs((1, 1), 5, 5, heads=4, kv_heads=2)
    given = stages(4, (2, 3), 2, (2, 2), 4)
    options = {"window": (3, -1), "dropout_p": 0.5, "dropout_mask": torch.arange(100).reshape(1, 4, 5, 5) % 3 > 0}
    compiled = torch.compile(reference, fullgraph=True, dynamic=dynamic, backend="eager")
    assert torch.equal(compiled(q, k, v, **given, **options), reference(q, k, v, **given, **options))


# What is refused.

BATCH = (2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 24)
BUILT = {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 5), "post_mixed_heads": 4}


def arguments(**changed):
    q, k, v = (torch.zeros(shape) for shape in BATCH)
    weights = {"weight": torch.zeros(4, 3, 4), "head_weight": torch.zeros(2, 2, 2)}
    weights |= {"post_weight": torch.zeros(4, 2, 5), "post_head_weight": torch.zeros(1, 4, 4)}
    return {"q": q, "k": k, "v": v} | weights | changed


def refusal(function):
    with pytest.raises(mtagen.MtagenError) as caught:
        function()
    return type(caught.value), str(caught.value)


RULES = {
    "window that is none": {"window": (3,)},
    "window out of range": {"window": (-2, 0)},
    "window too large": {"window": (0, 2**30)},
    "window of floats": {"window": (1.0, -1)},
    "causal": {"causal": 1},
    "key_padding": {"key_padding": "top"},
    "mask": {"mask": "both"},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_refuses_rules_as_build_does(rules):
    expected = refusal(lambda: mtagen.build(**BUILT, head_dim=16, **rules))
    assert refusal(lambda: reference(**arguments(), **rules)) == expected
    plain = [torch.zeros(shape) for shape in BATCH]
    assert refusal(lambda: reference(*plain, **rules)) == expected  # without a stage that the rule is for


CALLS = {
    "no tensor": {"k": [1.0]},
    "rank of q": {"q": torch.zeros(4, 5, 16)},
    "rank of v": {"v": torch.zeros(1, *BATCH[2])},
    "batch of k": {"k": torch.zeros(1, 2, 7, 16)},
    "batch of v": {"v": torch.zeros(4, 2, 7, 24)},
    "heads of v": {"v": torch.zeros(2, 4, 7, 24)},
    "heads of k": {"k": torch.zeros(2, 3, 7, 16)},
    "no heads of k": {"k": torch.zeros(2, 0, 7, 16)},
    "keys": {"v": torch.zeros(2, 2, 8, 24)},
    "head dim": {"k": torch.zeros(2, 2, 7, 24)},
    "dtype of k": {"k": torch.zeros(BATCH[1]).half()},
    "dtype of v": {"v": torch.zeros(BATCH[2]).double()},
    "device": {"k": torch.zeros(BATCH[1], device="meta")},
    "sparse q": {"q": torch.zeros(BATCH[0]).to_sparse()},
    "heads of a kernel": {"weight": torch.zeros(1, 3, 4)},
    "rank of a kernel": {"post_weight": torch.zeros(2, 5)},
    "axes of a kernel": {"weight": torch.zeros(4, 2, 3, 4)},
    "dtype of a kernel": {"weight": torch.zeros(4, 3, 4).half()},
    "wider kernel": {"post_weight": torch.zeros(4, 2, 5).double()},
    "device of a kernel": {"weight": torch.zeros(4, 3, 4, device="meta")},
    "sparse kernel": {"weight": torch.zeros(4, 3, 4).to_sparse()},
    "groups": {"head_weight": torch.zeros(4, 2, 2)},
    "one matrix of two groups": {"head_weight": torch.zeros(2, 2)},
    "no square": {"post_head_weight": torch.zeros(1, 3, 4)},
    "scale": {"scale": math.nan},
    "infinite scale": {"scale": math.inf},
    "scale of a tensor": {"scale": torch.tensor(1.0)},
    "dropout": {"dropout_p": 1.0},
    "negative dropout": {"dropout_p": -0.1},
}


@pytest.mark.parametrize("changed", CALLS.values(), ids=CALLS)
def test_refuses_calls_as_the_op_does(changed):
    op = mtagen.build(**BUILT, head_dim=16, value_head_dim=24, target="cpu", dropout=True)
    given = arguments(**changed)
    assert refusal(lambda: reference(**given)) == refusal(lambda: op(**given))


def test_refuses_groups_that_do_not_divide_the_heads():
    op = mtagen.build(None, 16, value_head_dim=24, mixed_heads=3, target="cpu")
    given = dict(zip("qkv", (torch.zeros(shape) for shape in BATCH), strict=True)) | {"head_weight": torch.eye(3)[None]}
    assert refusal(lambda: reference(**given)) == refusal(lambda: op(**given))


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"q": torch.zeros(BATCH[0], dtype=torch.int64)}, InputError, r"q\.dtype: got torch\.int64; is not supported"),
        ({"weight": torch.zeros(4)}, InputError, r"weight\.shape: got \(4,\); must have at least two dimensions"),
        ({"weight": torch.zeros(4, 3, 65)}, SpecError, r"kernel: got \(3, 65\); cq and ck are out of range"),
        ({"weight": torch.zeros(4, 0, 3)}, SpecError, r"kernel: got \(0, 3\); cq and ck are out of range"),
        ({"head_weight": torch.zeros(2, 0, 0)}, SpecError, "mixed_heads: got 0"),
        ({"dropout_p": 0.5}, InputError, r"dropout_p: got 0\.5; .*legal: 0, or with dropout_mask=mtagen\.dropout_mask"),
        ({"dropout_mask": True}, InputError, "dropout_mask: got 'bool'; must be a tensor"),
        ({"dropout_mask": torch.ones(2, 4, 5, 7)}, InputError, r"dropout_mask: got .*torch\.float32.*torch\.bool"),
        ({"dropout_mask": torch.ones(2, 4, 7, 5).bool()}, InputError, r"dropout_mask: .*shape \(2, 4, 5, 7\)"),
        ({"dropout_mask": torch.ones(2, 4, 5, 7, device="meta").bool()}, InputError, "dropout_mask: .*meta.*cpu"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_refuses(changed, error, match):
    with pytest.raises(error, match=match):
        reference(**arguments(**changed))


def test_head_dims_and_strides_are_any():
    q, k, v, _ = inputs((1, 1), 5, 5, dim=3)
    transposed = (x.mT.contiguous().mT for x in (q, k, v))
    torch.testing.assert_close(reference(*transposed), reference(q, k, v), rtol=0, atol=1e-12)
