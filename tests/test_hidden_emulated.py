"""CUDA kernels on a CPU that plays the GPU: what the mask hides changes no bit of results that do not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import hidden
import problems
import pytest
import torch
from emulator import host_function, needs_compiler
from hidden import Call
from test_emulated_documents import results as results_of_documents
from test_emulated_kernels import SM80, SM80_FULL, SM90, SM90_DROPOUT, SM90_ONE_TAP, case_id, dropout_of, op_of
from torch import Tensor

from mtagen import plan
from mtagen.dtypes import TORCH_DTYPES
from mtagen.spec import Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory_starts_as_nan", "one_thread")]

N_Q, N_K, CUT = 130, 203, 150  # the cut is in the second tile of keys, whose references are those of the first
SPECS = [
    SM90,
    SM90_ONE_TAP,
    SM90_DROPOUT,
    ("sm_90a", Spec((3, 3), 32, causal=False, window=(20, 7), mask="output")),
    ("sm_90a", Spec((6, 11), 64, window=(40, -1))),
    ("sm_90a", Spec((5, 4), 32, causal=False, window=(-1, 5))),
    ("sm_80", Spec((1, 1), 32, window=(0, -1))),
    SM80,
    ("sm_80", Spec((1, 1), 32, mask="output")),
    ("sm_80", Spec((6, 11), 32, causal=False, window=(3, 2))),
    ("sm_80", Spec((3, 3), 32, window=(40, -1), sink=True, **problems.OF_HEADS)),
]
EXPRESSIONS = [
    ("sm_90a", "s - (i - j) / 80"),
    ("sm_90a", "s + log(1 + abs(i - j))"),
    ("sm_90a", "s + min(j, 90) / 40"),
    ("sm_90a", "30 * tanh(s / 30) - (i - j) / 80"),
    ("sm_80", "s + log(1 + abs(i - j))"),
]
PAIRS = [(target, Spec(None, 64, post_mixed_heads=2)) for target in ("sm_90a", "sm_80")]
SPLITS = [SM90, ("sm_80", Spec((11, 4), 32, window=(30, -1)))]
DECODE = [SM90, SM80, ("sm_90a", Spec((6, 11), 64, window=(40, -1))), SM80_FULL]
DOCUMENTS = [("sm_90a", Spec((6, 11), 64, packed=True)), ("sm_80", Spec((6, 11), 32, dtype="fp16", packed=True))]


def rows(spec: Spec, *shapes: tuple[int, int, int]) -> Iterator[Tensor]:
    """Normal numbers, (1, heads, N, width), for each (heads, N, width)."""
    random = torch.Generator().manual_seed(0)
    for heads, n, width in shapes:
        yield torch.randn(1, heads, n, width, generator=random).to(TORCH_DTYPES[spec.dtype])


def weight_of(spec: Spec) -> Tensor:
    """Random taps of two heads; of plain attention, the tap of ones that stands for no convolution."""
    if spec.kernel is None:
        return torch.ones(2, 1, 1)
    random = torch.Generator().manual_seed(1)
    return torch.randn(2, *spec.kernel, generator=random) / (spec.cq * spec.ck) ** 0.5


def call_of(spec: Spec) -> Call:
    """A call of two heads that share their keys."""
    d, dv = spec.head_dim, spec.value_head_dim
    return Call(*rows(spec, (2, N_Q, d), (1, N_K, d), (1, N_K, dv), (2, N_Q, dv)))


def training(
    spec: Spec, forward: Callable[..., Any], backward: Callable[..., Any] | None = None
) -> Callable[[Call], dict[str, Tensor]]:
    """The results of both passes, or of the forward pass alone."""
    weight, scale, dropout = weight_of(spec), spec.head_dim**-0.5, dropout_of(spec)
    random, sizes = torch.Generator().manual_seed(2), {"B": 1, "H": 2, "Nk": N_K}
    learned = [torch.randn(x.extents(sizes), generator=random) for x in spec.learned_arguments]

    def results(call: Call) -> dict[str, Tensor]:
        *qkv, grad_out = call
        out, lse = forward(*qkv, weight, *learned, scale, *dropout)
        made = {"out": out, "lse": lse}
        if backward:
            gradients = grad_out, torch.ones_like(lse), *qkv, weight, *learned, out, lse, scale, *dropout
            made |= zip(("dq", "dk", "dv"), backward(*gradients, deterministic=True), strict=False)
        return made

    return results


def failures(spec: Spec, results: Callable[[Call], dict[str, Tensor]]) -> list[str]:
    return hidden.failures(results, call_of(spec), hidden.edges(spec, N_Q, N_K, CUT))


@pytest.mark.parametrize(("target", "spec"), SPECS, ids=case_id)
def test_training(target: str, spec: Spec, folder: Path) -> None:
    tile = plan(spec, target, "cuda").tile
    assert not failures(spec, training(spec, *(host_function(tile[name], folder) for name in ("forward", "backward"))))


@pytest.mark.parametrize(("target", "logits"), EXPRESSIONS)
def test_expressions(target: str, logits: str, folder: Path) -> None:
    """Rows keep their references where other rows of their warp see keys that exceed theirs."""
    spec = Spec((6, 11), 64, logits=logits)
    tile = plan(spec, target, "cuda").tile
    assert not failures(spec, training(spec, *(host_function(tile[name], folder) for name in ("forward", "backward"))))


@pytest.mark.parametrize(
    ("target", "spec"),
    [
        ("sm_90a", Spec((3, 3), 32, **problems.PREFIX)),
        ("sm_80", Spec((6, 11), 32, causal=False, visible="i // 100 == j // 100")),
    ],
    ids=case_id,
)
def test_masks_in_tables(target: str, spec: Spec, folder: Path) -> None:
    """Rows that do not see changed keys stay, as do gradients of what these rows see. A step stays, too."""
    op, rows_of_mask = op_of(spec, target, folder, 0), 100
    q, k, v, _ = call_of(spec)
    weight, keys = weight_of(spec), torch.arange(N_K)
    parameters = {"prefix": torch.tensor([70])} if spec.parameters else None
    offset = N_K - N_Q
    seeing = rows_of_mask - offset  # the first rows, which see no key from 100 on

    def results(k: Tensor, v: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = op(*leaves, weight=weight, parameters=parameters)[:, :, :seeing]
        grads = torch.autograd.grad(out.square().sum(), leaves)
        lengths = torch.tensor([rows_of_mask], dtype=torch.int32)
        step = op.decode(q[:, :, : spec.cq + 1], k, v, weight, cache_seqlens=lengths, parameters=parameters)
        return [out, step, grads[0][:, :, :seeing], *(grad[:, :, :rows_of_mask] for grad in grads[1:])]

    expected = results(k, v)
    assert all(x.isfinite().all() and x.any() for x in expected)
    for factor in (100.0, 10_000.0):
        ours = results(*(hidden.changed(x, keys >= rows_of_mask, factor) for x in (k, v)))
        assert all(map(torch.equal, ours, expected))
    ours = results(hidden.changed(k, keys >= rows_of_mask, None), v)
    assert all(map(torch.equal, ours[:2], expected))  # gradients multiply such keys by zeros


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("kernel", [(5, 2), (7, 11), (6, 11)], ids=str)
def test_keys_that_meet_weights_of_zero(kernel: tuple[int, int], target: str, folder: Path) -> None:
    """A tile reads 8 row shifts of its last columns, more than the kernel has; each place in a tile is tried."""
    spec, n = Spec(kernel, 32), 64
    forward = training(spec, host_function(plan(spec, target, "cuda").tile["forward"], folder))
    call = Call(*rows(spec, (2, n, 32), (1, n, 32), (1, n, 32), (2, n, 32)))
    expected = forward(call)
    for cut in range(33, 49):
        ours = forward(call._replace(k=hidden.changed(call.k, torch.arange(n) >= cut, None)))
        for name in ("out", "lse"):
            assert torch.equal(ours[name][:, :, :cut], expected[name][:, :, :cut]), (name, cut)


@pytest.mark.parametrize(("target", "spec"), PAIRS, ids=case_id)
def test_values_side_by_side(target: str, spec: Spec, folder: Path) -> None:
    """The fused kernels of pairs that are mixed after the softmax."""
    strip = plan(spec, target, "cuda").strip
    forward, *backward = (one for one in (strip["forward"].fused, strip["backward"].fused) if one)
    assert len(backward) == (target == "sm_90a")
    host = [host_function(one, folder) for one in (forward, *backward)]
    assert not failures(forward.spec, training(forward.spec, *host))


@pytest.mark.parametrize(("target", "spec"), SPLITS, ids=case_id)
def test_splits_of_the_keys(target: str, spec: Spec, folder: Path) -> None:
    forward = host_function(plan(spec, target, "cuda").tile["forward"], folder, splits=2)
    assert not failures(spec, training(spec, forward))


@pytest.mark.parametrize(("target", "spec"), DECODE, ids=case_id)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode(target: str, spec: Spec, splits: int, folder: Path) -> None:
    """Keys past those in use, later than a new token, and before all windows. Values that are in use are finite."""
    decode, weight, scale = host_function(plan(spec, target, "cuda").tile["decode"], folder), weight_of(spec), 0.1
    new, length, keys = 3, 170, torch.arange(N_K)
    d = spec.head_dim
    q, k, v = rows(spec, (2, spec.context + new, d), (1, N_K, d), (1, N_K, d))

    def results(k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return decode(q, k, v, weight, scale, torch.tensor([length], dtype=torch.int32), splits)

    edges = [(keys >= length, slice(None))]
    if spec.right is not None:
        edges.append((keys >= length - 1, slice(0, new - 1)))
    if spec.left is not None:
        edges.append((keys < length - new - spec.context - spec.left, slice(None)))
    expected = results(k, v)
    assert all(x.isfinite().all() for x in expected)
    for hidden_keys, tokens in edges:
        for factor in (100.0, 10_000.0, None):
            whole = factor or hidden_keys is edges[0][0]
            values = hidden.changed(v, hidden_keys, factor) if whole else v
            ours = results(hidden.changed(k, hidden_keys, factor), values)
            assert all(torch.equal(a[:, :, tokens], b[:, :, tokens]) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize(("target", "spec"), DOCUMENTS, ids=case_id)
@pytest.mark.parametrize("factor", [100.0, 10_000.0])
def test_documents(target: str, spec: Spec, factor: float, folder: Path) -> None:
    """A document's neighbours; ``test_nothing_leaks`` has infinite ones."""
    tile = plan(spec, target, "cuda").tile
    host = {name: host_function(one, folder) for name, one in tile.items()}
    lengths = [(9, 30), (70, 150), (40, 9)]
    packed = documents.packed(lengths)
    inputs, grad_out = documents.random(spec, lengths, 2, 1)
    queries, keys = documents.rows_of(packed, 1)

    def large(x: Tensor, own: slice) -> Tensor:
        others = x * factor
        others[own] = x[own]
        return others

    among = type(inputs)(large(inputs.q, queries), large(inputs.k, keys), large(inputs.v, keys), inputs.weights)
    ours = results_of_documents(host, spec, packed, among, large(grad_out, queries), deterministic=True)
    expected = results_of_documents(host, spec, packed, inputs, grad_out, deterministic=True)
    for own, a, b in zip((queries, queries, queries, keys, keys), ours, expected, strict=False):
        assert torch.equal(a[own], b[own])
