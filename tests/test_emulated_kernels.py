"""The emitted CUDA kernels and their host functions, run on a CPU that plays the GPU (see ``emulator/device.h``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulator
import hidden
import problems
import pytest
import torch
from emulator import host_function, needs_compiler
from single_pass import cheapest
from torch import Tensor

from mtagen import plan
from mtagen.accuracy import compare
from mtagen.check import failures
from mtagen.codegen import render
from mtagen.dropout import dropout_mask
from mtagen.dtypes import TORCH_DTYPES
from mtagen.measure.cases import Sizes
from mtagen.measure.judge import eager_op
from mtagen.ops import library
from mtagen.ops.attention import AttentionOp
from mtagen.ops.executor import Executor
from mtagen.planner import get_target
from mtagen.planner.passes import PASSES, passes_of
from mtagen.planner.splits import SplitRule
from mtagen.planner.tile import layout
from mtagen.planner.tile.references import References
from mtagen.runtime.load import Passes, plan_key
from mtagen.spec import MAX_NEW_TOKENS, Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory_starts_as_nan")]

SIZES = (
    Sizes(2, 2, 1, 1, 1),
    Sizes(1, 2, 2, 9, 13),
    Sizes(1, 4, 2, 133, 150),  # some tiles, grouped queries
    Sizes(1, 1, 1, 70, 9),  # when causal, most queries see no key
)
SM90, SM80 = ("sm_90a", Spec((6, 11), 64)), ("sm_80", Spec((6, 11), 64, dtype="fp16"))
SM90_OUTPUT = ("sm_90a", Spec((6, 11), 128, mask="output"))
SM90_DROPOUT = ("sm_90a", Spec((6, 11), 64, dropout=True))
SM90_FULL = ("sm_90a", Spec((3, 3), 32, causal=False, key_padding="left", dtype="fp16"))
SM90_ONE_TAP, SM80_FULL = ("sm_90a", Spec((1, 1), 32)), ("sm_80", Spec((3, 3), 80, causal=False))
SPECS = [
    SM90,
    SM90_OUTPUT,
    SM90_FULL,
    ("sm_90a", Spec((11, 11), 80, key_padding="right")),
    ("sm_90a", Spec((5, 17), 64, dtype="fp16")),
    ("sm_90a", Spec((16, 3), 64, causal=False)),
    ("sm_90a", Spec((7, 11), 48, mask="output")),  # backward with operands of W's gradient not loaded ahead
    ("sm_90a", Spec((4, 2), 32)),
    ("sm_90a", Spec((5, 1), 32, mask="output")),  # backward with an operand of one row shift
    ("sm_90a", Spec((7, 7), 64, causal=False)),  # backward with two columns of zeros beside W
    ("sm_90a", Spec((3, 3), 32, value_head_dim=80)),
    ("sm_90a", Spec((6, 11), 64, value_head_dim=16)),
    SM90_ONE_TAP,
    ("sm_80", Spec((1, 1), 32, mask="output")),
    SM80,
    SM80_FULL,
    ("sm_89", Spec((11, 4), 32, key_padding="left", mask="output")),
]
WINDOWED = [
    ("sm_90a", Spec((6, 11), 64, window=(40, -1))),
    ("sm_90a", Spec((3, 3), 32, causal=False, window=(20, 7), mask="output")),
    ("sm_90a", Spec((1, 1), 64, window=(30, -1))),
    ("sm_90a", Spec((5, 4), 32, causal=False, window=(-1, 5))),
    ("sm_80", Spec((6, 11), 64, causal=False, window=(30, -1), mask="output", key_padding="left")),
    ("sm_80", Spec((1, 1), 32, window=(0, -1))),
    ("sm_80", Spec((6, 11), 32, causal=False, window=(3, 2))),
]
TABULATED = [
    ("sm_90a", Spec((6, 11), 64, **problems.PREFIX)),
    ("sm_90a", Spec(None, 32, causal=False, visible="i // 48 == j // 48", sink=True)),
    ("sm_80", Spec((3, 3), 32, window=(100, -1), visible="j >= i // 2")),  # tiles begin with keys that some rows see
    ("sm_80", Spec((3, 3), 32, causal=False, visible="(j < 95 - i) & (j >= 42 - i)")),  # later rows see earlier keys
]
WITH_LOGITS = [
    (target, replace(spec, logits=problems.LOGITS))
    for target, spec in (SM90, SM90_ONE_TAP, ("sm_90a", Spec((6, 11), 64, window=(40, -1))), SM80, SM80_FULL)
]
# They grow by a factor of 2^180 and more in a tile of keys.
GROWING_LOGITS = [(target, replace(spec, logits="s - (i - j) / (1 + h)")) for target, spec in (SM90, SM80)]
DECODED_TERMS = [  # of tiles of 64 and of 32 keys
    ("sm_90a", Spec((6, 11), 256, mask="output", window=(3, -1))),
    ("sm_89", Spec((6, 11), 64, mask="output", window=(3, -1))),
    ("sm_89", Spec((3, 4), 192, mask="output", window=(9, 2), causal=False, key_padding="left", dtype="fp16")),
]
DROPPING = [
    ("sm_90a", Spec((6, 11), 64, dropout=True), 0.1),
    ("sm_90a", Spec((3, 3), 32, causal=False, window=(20, 7), mask="output", dtype="fp16", dropout=True), 0.9),
    ("sm_90a", Spec((1, 1), 64, window=(30, -1), dropout=True), 0.5),
    ("sm_90a", Spec((8, 6), 48, mask="output", dropout=True), 0.5),  # backward with three columns of zeros beside W
    ("sm_80", Spec((6, 11), 64, causal=False, window=(30, -1), key_padding="left", dropout=True), 0.1),
    ("sm_86", Spec((6, 11), 32, mask="output", dropout=True), 0.5),
    ("sm_86", Spec((2, 2), 128, dropout=True), 0.9),  # rows of 32 keys, parts of 16
]
SPLITS = [
    SM90,
    SM90_ONE_TAP,
    ("sm_90a", Spec((2, 9), 32, causal=False, key_padding="left", dtype="fp16")),  # the first output has no lag
    ("sm_90a", Spec((6, 11), 48, mask="output", key_padding="right")),
    ("sm_90a", Spec((3, 3), 32, causal=False, window=(20, 70), mask="output")),
    SM80,
    SM80_FULL,
    ("sm_80", Spec((11, 4), 32, window=(90, -1))),
]
RACES = [
    *((name, target, Spec((6, 11), 64)) for target in ("sm_80", "sm_90a") for name in ("forward", "decode")),
    ("forward", "sm_90a", Spec((11, 11), 80, key_padding="right")),
    *(("backward", target, Spec((6, 11), 64)) for target in ("sm_80", "sm_90a")),
    ("backward", "sm_90a", Spec((5, 17), 64, dtype="fp16")),
    ("backward", "sm_90a", Spec((11, 11), 80, key_padding="right")),
    ("backward", "sm_90a", Spec((1, 1), 64)),
    ("backward", "sm_90a", Spec((7, 7), 96)),
    ("backward", "sm_90a", Spec((6, 11), 64, value_head_dim=128)),
    *((name, "sm_90a", Spec((6, 11), 64, window=(40, -1))) for name in PASSES),
    *((name, target, Spec((6, 11), 64, dropout=True)) for target in ("sm_80", "sm_90a") for name in PASSES[:2]),
]


def case_id(value: object) -> str:
    if not isinstance(value, Spec):
        return str(value)
    values = f"-dv{value.value_head_dim}" * (value.value_head_dim != value.head_dim)
    kernel = f"{value.cq}x{value.ck}-d{value.head_dim}{values}-{value.dtype}-{value.key_padding}"
    window = "-left{}-right{}".format(*value.window) if value.window != (-1, -1) else ""
    mask = f"causal-{value.mask}" if value.causal else "full"
    return f"{kernel}-{mask}{window}{'-tables' * (value.visible is not None)}{'-dropout' * value.dropout}"


def passes(spec: Spec, target: str, folder: Path, seed: int, **options: Any) -> dict[str, Callable[..., Any]]:
    """The host functions of a spec's passes, with emulated kernels; options are those of ``host_function``."""
    planned = plan(spec, target, "cuda")
    return {name: host_function(planned.tile[name], folder, seed, **options) for name in passes_of(spec)}


def op_of(
    spec: Spec, target: str, folder: Path, seed: int, *, variant: Spec | None = None, **options: Any
) -> AttentionOp:
    """What ``build`` makes of a spec, with emulated kernels on CPU tensors.

    Args:
        spec: the op.
        target: the GPU that its kernels are planned for.
        folder, seed: see :func:`emulator.emulated`.
        variant: the spec of the kernels for packed documents or dropout; by default ``spec``.
        options: those of :func:`emulator.host_function`.
    """
    planned = plan(spec, target, "cuda")
    key = f"{plan_key(planned, render(planned))}-emulated{seed}{options}{variant}"
    kernels, others = (Passes(**passes(one, target, folder, seed, **options)) for one in (spec, variant or spec))
    library.register(key, Executor(spec, kernels, kernels_on_cpu=True, torch_on_cpu=False, variants=lambda *_: others))
    return AttentionOp(planned, key, (TORCH_DTYPES[spec.dtype],), drops=(variant or spec).dropout)


def dropout_of(spec: Spec) -> tuple[Any, ...]:
    """A seed and a probability, where the kernels take them."""
    return (torch.tensor([1, 2]), 0.3) if spec.dropout else ()


def results(spec: Spec, host: dict[str, Callable[..., Any]], name: str, n_q: int, n_k: int) -> tuple[Tensor, ...]:
    """What one pass returns of random inputs with 4 heads, 2 of keys."""
    random = torch.Generator().manual_seed(0)
    dtype, scale = TORCH_DTYPES[spec.dtype], spec.head_dim**-0.5
    dropout = dropout_of(spec)

    def rows(n: int, heads: int, width: int) -> Tensor:
        return torch.randn(1, n, heads, width, generator=random).to(dtype).transpose(1, 2)

    (q, k), dv = (rows(n, heads, spec.head_dim) for n, heads in ((n_q, 4), (n_k, 2))), spec.value_head_dim
    v, grad_out = rows(n_k, 2, dv), rows(n_q, 4, dv)
    weight = torch.randn(4, *spec.kernel, generator=random) / (spec.cq * spec.ck) ** 0.5
    if name == "decode":
        return host["decode"](
            q[:, :, : spec.cq + 1], k, v, weight, scale, torch.tensor([n_k - 5], dtype=torch.int32), 2
        )
    out, lse = host["forward"](q, k, v, weight, scale, *dropout)
    if name == "forward":
        return out, lse
    grad_lse = torch.ones_like(lse)
    return host["backward"](grad_out, grad_lse, q, k, v, weight, out, lse, scale, *dropout, deterministic=True)


@pytest.mark.parametrize(("target", "spec"), SPECS, ids=case_id)
def test_accurate(target: str, spec: Spec, folder: Path) -> None:
    for seed, sizes in enumerate((SIZES, SIZES[-2:])):  # copies and products come early, then late
        assert not failures(op_of(spec, target, folder, seed), spec, torch.device("cpu"), sizes)


@pytest.mark.parametrize(
    ("target", "spec"),
    [SM90, ("sm_90a", Spec((6, 11), 128)), ("sm_90a", Spec((9, 2), 48, dtype="fp16")), ("sm_90a", Spec((3, 3), 64))],
    ids=case_id,
)
def test_more_rows_than_a_ring_has(target: str, spec: Spec, folder: Path) -> None:
    """That of S, in the backward pass, has up to ten row tiles of 16 rows."""
    assert not failures(op_of(spec, target, folder, 0), spec, torch.device("cpu"), (Sizes(1, 1, 1, 230, 70),))


@pytest.mark.parametrize(("target", "spec"), WITH_LOGITS, ids=case_id)
def test_logits(target: str, spec: Spec, folder: Path) -> None:
    """They are largest elsewhere than the scores, and depend on the position, the key and the head."""
    op = op_of(spec, target, folder, 0)
    assert not failures(op, spec, torch.device("cpu"), SIZES[1:])
    problem = problems.growing(spec, Sizes(1, 2, 1, 66, 203))
    assert not problems.failures(op, spec, problem)
    assert not problems.decode_failures(op, spec, problem, num_splits=2)


@pytest.mark.parametrize(("target", "spec"), GROWING_LOGITS, ids=case_id)
def test_logits_that_grow_along_the_keys(target: str, spec: Spec, folder: Path) -> None:
    """Every tile gives rows of the first head new references, and in bf16 some tiles give none to the last head's."""
    op = op_of(spec, target, folder, 0)
    assert not failures(op, spec, torch.device("cpu"), (Sizes(1, 4, 2, 33, 300), Sizes(1, 1, 1, 150, 150)))


@pytest.mark.parametrize(("target", "spec"), [SM90, ("sm_80", Spec((3, 3), 32))], ids=case_id)
def test_reference_that_rises_by_its_whole_range(target: str, spec: Spec, folder: Path) -> None:
    """The last of 300 keys is 2^8 times as likely as each of 149 others, which nearly exceed the limit."""
    below, above = References.of(replace(spec, logits="s + j"))
    level = below + above - 6  # a thread sums up to 32 probabilities of a tile
    nats, last = level * math.log(2), (level + 8) * math.log(2)
    spec = replace(spec, logits=f"s / 100 + where(j < 150, 0, where(j < 299, {nats}, {last}))", causal=False)
    assert plan(spec, target, "cuda").tile["forward"].references == (below, above)
    assert not failures(op_of(spec, target, folder, 0), spec, torch.device("cpu"), (Sizes(1, 1, 1, 33, 300),))


@pytest.mark.parametrize(("target", "spec"), WINDOWED, ids=case_id)
def test_windows(target: str, spec: Spec, folder: Path) -> None:
    sizes = (*SIZES[:2], Sizes(1, 2, 1, 9, 240), *SIZES[-2:])  # the first keys of 240 are seen by no query
    assert not failures(op_of(spec, target, folder, 0), spec, torch.device("cpu"), sizes)


@pytest.mark.parametrize(("target", "spec"), TABULATED, ids=case_id)
def test_masks_in_tables(target: str, spec: Spec, folder: Path) -> None:
    """The first keys of 240 are seen by few queries or none; splits and steps begin with the first seen key."""
    sizes = (SIZES[0], Sizes(1, 2, 1, 9, 240), Sizes(1, 2, 1, 133, 150), SIZES[-1])
    assert not failures(op_of(spec, target, folder, 0), spec, torch.device("cpu"), sizes)
    split, problem = op_of(spec, target, folder, 1, splits=3), problems.random(spec, Sizes(2, 4, 2, 66, 203))
    assert not problems.failures_through_lse(split, spec, problem)
    assert not problems.decode_failures(split, spec, problem, lengths=(203, 90))


@pytest.mark.parametrize(("target", "spec"), TABULATED[:3:2], ids=case_id)
def test_masks_in_tables_have_no_races_and_the_same_bits_again(target: str, spec: Spec, folder: Path) -> None:
    problem = problems.random(spec, Sizes(1, 2, 1, 130, 150))

    def results(op: AttentionOp) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (problem.inputs.q, problem.inputs.k, problem.inputs.v)]
        options = problem.inputs.options(problem.inputs.named)
        out = op(*leaves, **options)
        step = op.decode(problem.q_tail, *leaves[1:], **options)
        return out, step, *torch.autograd.grad(out, leaves, problem.grad_out)

    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (results(op_of(spec, target, folder, seed, checked=seed == 0)) for seed in range(3))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("target", "kernel"), [("sm_90a", (3, 3)), ("sm_80", None)], ids=str)
def test_tiles_that_no_row_sees_are_skipped(target: str, kernel: tuple[int, int] | None, folder: Path) -> None:
    """Values, and gradients of outputs, are NaN there; probabilities of 0 would multiply them."""
    n, chunk = 1200, 400
    spec = Spec(kernel, 32, causal=False, visible=f"i // {chunk} == j // {chunk}")
    # One split, because results of splits that see no key are dropped.
    op, problem = op_of(spec, target, folder, 0, splits=1), problems.random(spec, Sizes(1, 1, 1, n, n))
    inputs, options = problem.inputs, problem.inputs.options(problem.inputs.named)
    outside = (torch.arange(n) - (n - 1) / 2).abs() - chunk / 2  # distance from the middle chunk; negative in it
    far, inside = outside > 200, outside < -192  # rows and keys whose CTAs lie in the chunk
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    infinite = hidden.changed(inputs.v, far, None)
    spoilt = op(inputs.q, inputs.k, infinite, **options)
    assert spoilt[:, :, inside].isfinite().all()
    assert not spoilt[:, :, far].isfinite().any()
    grads = torch.autograd.grad(op(*leaves, **options), leaves, hidden.changed(problem.grad_out, far, None))
    assert all(grad[:, :, inside].isfinite().all() for grad in grads)
    assert not grads[2][:, :, far].isfinite().any()
    length = torch.tensor([2 * chunk], dtype=torch.int32)
    tail = inputs.q[:, :, : spec.cq]
    assert op.decode(tail, inputs.k, infinite, **options, cache_seqlens=length, num_splits=2).isfinite().all()


@pytest.mark.parametrize(("target", "spec"), [SM90, SM80], ids=case_id)
def test_scores_that_grow_along_the_keys(target: str, spec: Spec, folder: Path) -> None:
    """Every other row meets larger scores in each tile of keys than in all tiles before."""
    op = op_of(spec, target, folder, 0)
    problem = problems.growing(spec, Sizes(1, 2, 1, 70, 203))
    assert not problems.failures(op, spec, problem)
    for splits in (1, 2):
        assert not problems.decode_failures(op, spec, problem, num_splits=splits)


@pytest.mark.parametrize(("target", "spec"), [SM90, SM80_FULL], ids=case_id)
def test_products_as_large_as_is_supported(target: str, spec: Spec, folder: Path) -> None:
    op = op_of(spec, target, folder, 0)
    problem = problems.large_products(spec, Sizes(1, 2, 1, 70, 90))
    assert not problems.failures(op, spec, problem)
    assert not problems.decode_failures(op, spec, problem)


@pytest.mark.parametrize(("target", "spec"), [SM90, SM80_FULL], ids=case_id)
def test_larger_products_give_nan_and_no_wrong_number(target: str, spec: Spec, folder: Path) -> None:
    """In the rows that one large query is convolved into, and in no other."""
    op = op_of(spec, target, folder, 0)
    inputs, _, _, scale = problems.large_products(spec, Sizes(1, 2, 1, 70, 90))
    inputs.q[:, :, 40] *= 8
    eager, tensors = eager_op(spec, return_lse=True), inputs.arguments
    ours, plain, exact = (
        op(*tensors, scale=scale, return_lse=True),
        eager(*tensors, scale=scale),
        eager(*(x.double() for x in tensors), scale=scale),
    )
    others = [*range(40), *range(40 + spec.cq, 70)]
    for results in zip(ours, plain, exact, strict=True):
        assert results[0][:, :, 40 : 40 + spec.cq].isnan().all()
        assert compare(*(x[:, :, others] for x in results), terms=inputs.v.abs().max().item()).ok


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize(("target", "spec"), [SM90, SM90_ONE_TAP, SM80], ids=case_id)
def test_any_scale(target: str, spec: Spec, scale: float, folder: Path) -> None:
    op = op_of(spec, target, folder, 0)
    problem = problems.random(spec, Sizes(2, 8, 4, 21, 30), scale)
    assert not problems.failures(op, spec, problem)
    assert not problems.decode_failures(op, spec, problem)


@pytest.mark.parametrize(("target", "spec"), SPLITS, ids=case_id)
def test_splits_of_the_keys(target: str, spec: Spec, folder: Path) -> None:
    """Of some rows a split sees no key, and some splits have none; all have fewer than a window in the shortest."""
    made = plan(spec, target, "cuda").tile["forward"]
    sizes = (Sizes(1, 1, 1, 1, 1), Sizes(2, 4, 2, 9, 300), Sizes(1, 2, 1, 205, 212), Sizes(1, 1, 1, 70, 9))
    for splits in (2, 3, 7):
        forward = host_function(made, folder, splits, splits=splits)
        for problem in [problems.random(spec, one) for one in sizes]:
            assert not problems.forward_failures(forward, spec, problem)
        if splits == 2 and min(spec.window) < 0:
            assert not problems.forward_failures(forward, spec, problems.growing(spec, Sizes(1, 2, 1, 70, 203)))


@pytest.mark.parametrize(("target", "spec"), [SM90, SM80], ids=case_id)
def test_splits_of_the_keys_have_no_races_and_the_same_bits_again(target: str, spec: Spec, folder: Path) -> None:
    made, problem = plan(spec, target, "cuda").tile["forward"], problems.random(spec, Sizes(1, 1, 1, 190, 300))
    first, *others = (
        host_function(made, folder, seed, checked=seed == 0, splits=3)(*problem.inputs.arguments, problem.scale)
        for seed in range(4)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("target", "spec"),
    [
        ("sm_90a", Spec((6, 11), 64, window=(40, -1))),
        ("sm_80", Spec((6, 11), 64, dtype="fp16")),
        ("sm_80", Spec((3, 4), 32, causal=False)),
    ],
    ids=case_id,
)
def test_layers_of_tiles(target: str, spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a grid's y has room for 2 tiles, the others lie along z; the last layer may have tiles behind the last."""
    monkeypatch.setattr(layout, "GRID_YZ", 2)
    host = {name: host_function(one, folder, splits=1) for name, one in plan(spec, target, "cuda").tile.items()}
    problem = problems.random(spec, Sizes(1, 2, 1, 450, 470))
    q, k, v, weight = problem.inputs.arguments
    out, lse = host["forward"](q, k, v, weight, 0.125)
    grads = host["backward"](problem.grad_out, torch.zeros_like(lse), q, k, v, weight, out, lse, 0.125)
    monkeypatch.undo()
    whole = {name: host_function(one, folder, splits=1) for name, one in plan(spec, target, "cuda").tile.items()}
    expected = whole["forward"](q, k, v, weight, 0.125)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    expected = whole["backward"](problem.grad_out, torch.zeros_like(lse), q, k, v, weight, out, lse, 0.125)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("target", "spec"), [SM90, SM90_OUTPUT, SM90_ONE_TAP, SM90_FULL, SM90_DROPOUT], ids=case_id)
def test_heads_in_sections(target: str, spec: Spec, folder: Path) -> None:
    """Bits are the same whichever heads' CTAs run beside each other."""
    made, problem = plan(spec, target, "cuda").tile, problems.random(spec, Sizes(2, 4, 2, 200, 300))
    given, after = problem.inputs.arguments, (problem.scale, *dropout_of(spec))

    def both(together: int, kv_together: int) -> tuple[Tensor, ...]:
        out, lse = host_function(made["forward"], folder, together=together)(*given, *after)
        backward = host_function(made["backward"], folder, together=kv_together)
        return out, lse, *backward(problem.grad_out, torch.ones_like(lse), *given, out, lse, *after)

    expected = both(8, 4)
    for sections in ((4, 2), (2, 1), (1, 2)):
        assert all(torch.equal(a, b) for a, b in zip(both(*sections), expected, strict=True))


@pytest.mark.parametrize(("heads", "n_new"), [((2, 2), 8), ((8, 1), 8), ((12, 1), 1)], ids=str)
@pytest.mark.parametrize(("target", "spec"), [SM90, SM80, ("sm_80", Spec((3, 3), 256))], ids=case_id)
def test_decode(target: str, spec: Spec, heads: tuple[int, int], n_new: int, folder: Path) -> None:
    """A CTA's tokens, or a group's heads, are more than one step or one CTA takes; lengths are any.

    A step takes one token where tiles have 128 keys, and two with a head dim of 256, where they have 64.
    """
    op = op_of(spec, target, folder, 0)
    problem = problems.random(spec, Sizes(4, *heads, 1, 70), new_tokens=n_new)
    for splits in (1, 3):
        assert not problems.decode_failures(op, spec, problem, [75, 0, 3, 70], splits)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 1)], ids=str)
@pytest.mark.parametrize(("target", "spec"), DECODED_TERMS, ids=case_id)
def test_decode_of_terms_that_each_token_sees(target: str, spec: Spec, heads: tuple[int, int], folder: Path) -> None:
    """Tiles of 64 and 32 keys take 2 and 4 tokens in a step, and tokens are mostly no multiple of them."""
    decode = host_function(cheapest("decode", spec, get_target(target)), folder)
    for new_tokens in range(1, MAX_NEW_TOKENS + 1):
        problem = problems.random(spec, Sizes(2, *heads, 1, 90), new_tokens=new_tokens)
        assert not problems.host_decode_failures(decode, spec, problem, [90, new_tokens + 1], 2)


@pytest.mark.parametrize(("target", "spec"), [SM90, SM80], ids=case_id)
def test_decode_of_lengths_in_splits_of_the_longest(
    target: str, spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three sequences fill half of such a GPU.
    monkeypatch.setattr("mtagen.planner.tile.decode.split_rule", lambda *_: SplitRule(6, 128, 4))
    decode = host_function(cheapest("decode", spec, get_target(target)), folder, splits=2)
    problem = problems.random(spec, Sizes(3, 1, 1, 1, 400))
    assert not problems.host_decode_failures(decode, spec, problem, [400, 150, 230])


def test_decode_in_more_splits_than_a_warp_has_lanes(folder: Path) -> None:
    target, spec = SM90
    op = op_of(spec, target, folder, 0)
    assert not problems.decode_failures(op, spec, problems.random(spec, Sizes(1, 1, 1, 1, 4000)), num_splits=36)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_null_stands_for_taps_of_one_and_for_no_gradient_of_the_log_sum_exp(target: str, folder: Path) -> None:
    spec = Spec((1, 1), 32)
    problem = problems.random(spec, Sizes(1, 4, 2, 70, 90))
    (q, k, v, _), host = problem.inputs.arguments, passes(spec, target, folder, 0)
    ones = torch.ones(4, 1, 1)
    out, lse = host["forward"](q, k, v, ones, problem.scale)
    for got, expected in zip(host["forward"](q, k, v, None, problem.scale), (out, lse), strict=True):
        assert torch.equal(got, expected)
    given = (out, lse, problem.scale)
    *expected, dweight = host["backward"](out, torch.zeros_like(lse), q, k, v, ones, *given, deterministic=True)
    *got, none = host["backward"](out, None, q, k, v, None, *given, deterministic=True)
    assert all(map(torch.equal, got, expected))
    assert dweight.shape == (4, 1, 1)
    assert none is None


def test_gradient_through_the_log_sum_exp(folder: Path) -> None:
    target, spec = SM90
    op = op_of(spec, target, folder, 0)
    assert not problems.failures_through_lse(op, spec, problems.random(spec, Sizes(2, 2, 1, 70, 66)))


@pytest.mark.parametrize(("target", "spec"), [SM90, SM90_OUTPUT, SM80], ids=case_id)
def test_far_more_queries_than_keys(target: str, spec: Spec, folder: Path) -> None:
    """Whole blocks of rows see no key, and wait for none; of a block, a whole warpgroup's."""
    op = op_of(spec, target, folder, 0)
    for n_k in (20, 5):
        assert not problems.failures(op, spec, problems.random(spec, Sizes(1, 2, 1, 450, n_k)))


@pytest.mark.parametrize(("target", "spec", "p"), DROPPING, ids=case_id)
def test_dropout(target: str, spec: Spec, p: float, folder: Path) -> None:
    for seed, sizes in enumerate((Sizes(2, 2, 1, 3, 5), Sizes(2, 4, 2, 73, 250), Sizes(1, 2, 2, 70, 9))):
        op = op_of(spec, target, folder, seed % 2)
        assert not problems.failures(op, spec, problems.random(spec, sizes), dropout_p=p)


def test_dropout_and_the_gradient_through_the_log_sum_exp(folder: Path) -> None:
    target, spec, p = DROPPING[0]
    op = op_of(spec, target, folder, 0)
    assert not problems.failures_through_lse(op, spec, problems.random(spec, Sizes(2, 2, 1, 70, 66)), dropout_p=p)


@pytest.mark.parametrize(("target", "spec", "p"), DROPPING, ids=case_id)
def test_what_is_dropped_is_what_the_mask_says(target: str, spec: Spec, p: float, folder: Path) -> None:
    """All probabilities of a row are alike; a value, or the gradient of an output, is in a column of its own."""
    host, dtype, d, seed = passes(spec, target, folder, 0), TORCH_DTYPES[spec.dtype], spec.head_dim, 2**62 + 3
    dropout = torch.tensor([seed, -5]), p
    batch, heads, n_q, n_k = 2, 2, 75, 203
    q, k = (torch.zeros(batch, heads, n, d, dtype=dtype) for n in (n_q, n_k))
    weight = torch.zeros(heads, *spec.kernel)
    after = torch.arange(n_k) - torch.arange(n_k - n_q, n_k)[:, None]
    seen = (after >= -(n_k if spec.left is None else spec.left)) & (
        after <= (n_k if spec.right is None else spec.right)
    )
    kept = dropout_mask(*dropout, batch, heads, n_q, n_k) & seen

    def one_column_each(rows: Tensor, first: int) -> Tensor:
        """Row `first` has 1 in column 0, the next in column 1."""
        return torch.eye(rows.shape[2], first + d, dtype=dtype)[:, first:].expand_as(rows).contiguous()

    for key in range(0, n_k, d):
        out, lse = host["forward"](q, k, one_column_each(k, key), weight, 1.0, *dropout)
        assert torch.equal(out[..., : n_k - key] != 0, kept[..., key : key + d])
    for query in range(0, n_q, d):
        grad_out, grad_lse = one_column_each(q, query), torch.zeros_like(lse)
        _, _, dv, _ = host["backward"](grad_out, grad_lse, q, k, k, weight, torch.zeros_like(q), lse, 1.0, *dropout)
        assert torch.equal(dv.mT[:, :, : n_q - query] != 0, kept[..., query : query + d, :])


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_the_order_of_warps_changes_nothing(name: str, target: str, folder: Path) -> None:
    spec = Spec((6, 11), 64)
    first, *others = (results(spec, passes(spec, target, folder, seed), name, 190, 203) for seed in range(6))
    assert all(x.isfinite().all() for x in first)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("name", "target", "spec"), RACES, ids=case_id)
def test_no_races(name: str, target: str, spec: Spec, folder: Path) -> None:
    """Of two accesses to shared memory, one of them a write, a barrier comes between."""
    host = passes(spec, target, folder, 0)
    for seed, sizes in enumerate([(190, 203), (150, 150)]):
        host[name] = passes(spec, target, folder, seed, checked=True)[name]
        results(spec, host, name, *sizes)


@pytest.mark.parametrize(
    ("name", "target", "written", "mistake", "message"),
    [
        (
            "forward",
            "sm_80",
            "copy_wait<0>();\n    __syncthreads();  // the score tile is",
            "__syncthreads();  //",
            "races with copy_async",
        ),
        ("forward", "sm_80", "__syncthreads();  // the score tile", "__syncwarp();  //", "load_matrices .* races with"),
        (
            "forward",
            "sm_90a",
            "copy_wait<0>();  // a thread has one tile in flight: it arrives for a whole tile\n      fence_async();",
            "",
            "races with copy_async",
        ),
        ("forward", "sm_90a", "barrier_arrive(taken + ROWS_READ", "__ldg(&t), (", "deadlock"),
        (
            "forward",
            "sm_90a",
            "barrier_wait(given + ROWS_READ",
            "__ldg(&t), (",
            "store_shared .* races with load_matrices",
        ),
        (
            "forward",
            "sm_90a",
            "barriers + V_EMPTY + BARRIER * (t % STAGES));",
            "barriers + V_EMPTY + 4 * (t % STAGES));",
            "not initialised",
        ),
        ("forward", "sm_90a", "named_barrier(1 + warpgroup, 128);", "", "copy_async .* races with"),
        ("backward", "sm_90a", "barrier_wait(written, done++ & 1);", "done++;", "races with"),
        ("backward", "sm_90a", "barrier_wait(taken, ~done & 1);", "", "races with"),
    ],
)
def test_mistakes_are_seen(
    name: str, target: str, written: str, mistake: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec((6, 11), 96 if target == "sm_90a" else 32)  # of 96, Q is read from shared memory
    host = passes(spec, target, folder, 0)
    source = emulator.render(plan(spec, target, "cuda").tile[name])
    assert written in source
    if name != "forward":  # which precedes it, and makes no mistake
        results(spec, host, "forward", 250, 300)
    host[name] = passes(spec, target, folder, 0, checked=True)[name]
    monkeypatch.setattr(emulator, "render", lambda _: source.replace(written, mistake))
    with pytest.raises(AssertionError, match=message):
        results(spec, host, name, 250, 300)
