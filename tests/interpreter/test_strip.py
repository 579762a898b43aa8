"""The rendered kernels of the lowering "strip", run on the CPU by Triton's interpreter, against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import documents
import dropping
import problems
import pytest
import sympy
import torch
from torch import Tensor

import mtagen
from mtagen import Spec, plan
from mtagen.call import NO_LEARNED
from mtagen.codegen import render
from mtagen.dropout import Dropout
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.planner.strip import kernels
from mtagen.planner.strip.module import StripModule
from mtagen.planner.strip.stages import Stages, block_of
from mtagen.runtime.load import load_host
from mtagen.spec import WEIGHTS

BEFORE: dict[str, dict[str, Any]] = {
    "none": {"kernel": None},
    "convolution": {"kernel": (3, 4)},
    "mixing": {"kernel": None, "mixed_heads": 2},
    "both": {"kernel": (3, 4), "mixed_heads": 2},
}
AFTER: dict[str, dict[str, Any]] = {
    "none": {},
    "convolution": {"post_kernel": (2, 5)},
    "mixing": {"post_mixed_heads": 4},
    "both": {"post_kernel": (2, 5), "post_mixed_heads": 4},
}
PIPELINES = {
    f"{before} before, {after} after": BEFORE[before] | AFTER[after]
    for before, after in itertools.product(BEFORE, AFTER)
    if after != "none" or before in ("mixing", "both")  # the lowering "lift" makes the other two
}
EVERYTHING = PIPELINES["both before, both after"]
WIDE = {"kernel": (6, 11), "mixed_heads": 4, "post_kernel": (5, 8), "post_mixed_heads": 2}  # a halo of 9 rows

MASKS = ({"causal": True, "mask": "source"}, {"causal": True, "mask": "output"}, {"causal": False, "mask": "source"})
PADDINGS = ("both", "left", "right")
SIZES = (  # two sequences, grouped keys; more keys, more queries
    Sizes(2, 4, 2, 17, 17),
    Sizes(1, 4, 1, 13, 26),
    Sizes(1, 4, 4, 26, 13),
)
# Every pipeline with two of the masks; paddings and sizes change from one to the next, so that each mask meets each.
VARIANTS = {
    f"{name}-{'causal' if mask['causal'] else 'full'}-{mask['mask']}-{PADDINGS[(i + n) % 3]}": (
        stages | mask | {"key_padding": PADDINGS[(i + n) % 3]},
        SIZES[(i + n // 3) % 3],
    )
    for n, (name, stages) in enumerate(PIPELINES.items())
    for i, mask in enumerate(MASKS)
    if (i + n // 2) % 3 or stages == EVERYTHING
}
# New tokens, lengths in a cache of 29 keys (none; fewer than the context; a part; more than there are), and splits.
STEPS = ((1, (29, 0, 2, 14), None), (3, (1, 26, 0, 40), 1), (8, (7, 0, 28, 3), 9))


@pytest.fixture(autouse=True, scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all tests, which share ops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTAGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def build(stages: dict[str, Any], **options: Any) -> AttentionOp:
    given = {"head_dim": 16, "value_head_dim": 24, "dtype": "fp32", "target": "generic"} | stages | options
    op = mtagen.build(**given, backend="triton")
    assert set(op.plan.strip) == {"forward", "backward", "decode"}
    return op


def assert_accurate(op: AttentionOp, *sizes: Sizes) -> None:
    """Out, the log-sum-exp and all gradients, which come through both."""
    for one in sizes:
        assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, one))


def assert_decodes(op: AttentionOp, sizes: Sizes, *steps: tuple[int, tuple[int, ...], int | None]) -> None:
    """New tokens after caches of some lengths, past which they hold NaN, as do queries from before the sequence."""
    for new_tokens, lengths, splits in steps:
        problem = problems.random(op.plan.spec, sizes._replace(batch=len(lengths)), new_tokens=new_tokens)
        assert not problems.decode_failures(op, op.plan.spec, problem, lengths, splits)


def noting(empty: Callable[..., Tensor], sizes: list[int]) -> Callable[..., Tensor]:
    """`empty`, which notes the sizes of what it allocates."""

    def allocate(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        sizes.append(made.numel())
        return made

    return allocate


def with_workspace(op: AttentionOp, workspace_bytes: int, *, dropout: bool = False) -> AttentionOp:
    """The op with another workspace in every pass."""

    def smaller(made: mtagen.Plan) -> mtagen.Plan:
        for one in made.strip.values():
            made = made.replaced(replace(one, workspace_bytes=workspace_bytes))
        return made

    def plan_like(spec: mtagen.Spec) -> mtagen.Plan:
        return smaller(mtagen.plan(spec, op.plan.target, "triton"))

    return assemble(smaller(op.plan), torch_on_cpu=False, dropout=dropout, plan_like=plan_like)


def strips(op: AttentionOp, sizes: Sizes, planes: int) -> tuple[int, int]:
    """Sequences and rows of a strip of a call with so many planes, as the host code cuts it."""
    module = load_host(op.plan, render(op.plan), "forward")
    workspace_bytes = op.plan.strip["forward"].workspace_bytes
    division = module.LIMITS.divided(sizes.batch, sizes.heads, sizes.nq, sizes.nk, planes, workspace_bytes)
    return division.sequences, division.rows


@pytest.mark.parametrize(("options", "sizes"), VARIANTS.values(), ids=VARIANTS)
def test_training(options: dict[str, Any], sizes: Sizes) -> None:
    assert_accurate(build(options), sizes)


@pytest.mark.parametrize("name", PIPELINES)
def test_decode(name: str) -> None:
    """Each pipeline with one of the masks, paddings and steps."""
    n = [*PIPELINES].index(name)
    options = PIPELINES[name] | MASKS[n % 3] | {"key_padding": PADDINGS[n // 3 % 3]}
    assert_decodes(build(options), Sizes(4, 4, 2, 1, 29), STEPS[n * 2 % 5 % 3])


@pytest.mark.parametrize(("mask", "step"), [*zip(MASKS, STEPS, strict=True)], ids=str)
def test_decode_of_wide_kernels(mask: dict[str, Any], step: tuple[int, tuple[int, ...], int | None]) -> None:
    assert_decodes(build(WIDE, **mask), Sizes(4, 4, 1, 1, 29), step)


@pytest.mark.usefixtures("memory_starts_as_nan")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_decode_of_full_caches(mask: dict[str, Any]) -> None:
    """Without lengths; outputs of one part, and sums of three."""
    op = build(EVERYTHING, **mask, value_head_dim=80)
    problem = problems.random(op.plan.spec, Sizes(2, 4, 2, 1, 150), new_tokens=2)
    for splits in (1, 3):
        assert not problems.decode_failures(op, op.plan.spec, problem, None, splits)


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_shorter_than_a_halo(mask: dict[str, Any]) -> None:
    lengths = ((1, 1), (2, 9), (9, 2), (5, 4))
    assert_accurate(build(WIDE, **mask), *(Sizes(1, 4, 2, *both) for both in lengths))


@pytest.mark.usefixtures("memory_starts_as_nan")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("stages", "mask"),
    [(WIDE, MASKS[0]), (EVERYTHING, MASKS[2]), ({"kernel": (3, 4), "post_kernel": (2, 5)}, MASKS[1])],
    ids=str,
)
def test_tiles_by_pointer_and_by_descriptor(stages: dict[str, Any], mask: dict[str, Any], target: str) -> None:
    """Both ways read zeros outside of a plane, wherever a tile begins and ends, and of rows that are no power of 2."""
    op = build(stages | mask, target=target, head_dim=40, dtype="fp16")
    assert_accurate(op, *(Sizes(1, 4, 2, *lengths) for lengths in ((1, 1), (13, 29), (37, 5))))
    assert_decodes(op, Sizes(3, 4, 2, 1, 29), (2, (29, 0, 13), 2))


@pytest.mark.parametrize("stages", [{"kernel": (3, 4), "post_kernel": (2, 5)}, {"kernel": None}], ids=str)
def test_strips_of_some_rows(stages: dict[str, Any]) -> None:
    """The second strip has rows of the first as context, or has none."""
    op = with_workspace(build(stages | {"mixed_heads": 2, "post_mixed_heads": 2}), 2**10)
    sizes = Sizes(1, 2, 1, 135, 130)
    assert strips(op, sizes, 1) == (1, 128)
    assert_accurate(op, sizes)


def test_strips_of_early_rows_are_longer() -> None:
    """Rows that see fewer keys have shorter rows of planes, of which more fit the workspace."""
    stages = {"kernel": (3, 4), "mixed_heads": 2, "post_mixed_heads": 2}
    op = with_workspace(build(stages), 2**20)
    sizes = Sizes(1, 2, 1, 300, 290)
    assert strips(op, sizes, 2) == (1, 174)
    assert_accurate(op, sizes)


@pytest.mark.parametrize("kernel", [(3, 4), None], ids=str)
def test_strips_whose_rows_see_no_key(kernel: tuple[int, int] | None) -> None:
    """Gradients of rows that two strips share come from the one with keys, as convolutions read hidden scores."""
    op = with_workspace(build({"kernel": kernel, "mixed_heads": 2}, mask="output"), 2**10)
    sizes = Sizes(1, 2, 1, 260, 132)
    assert strips(op, sizes, 1) == (1, 128)
    assert_accurate(op, sizes)


@pytest.mark.parametrize("name", ["both before, both after", "mixing before, mixing after"])
def test_strips_of_some_sequences(name: str) -> None:
    """The last strip has fewer of them than the others; decode takes strips of its own."""
    op, sizes = build(PIPELINES[name]), Sizes(7, 4, 2, 11, 12)
    spec, stages = op.plan.spec, Stages(op.plan.spec)
    planes = [len(stages.forward_planes), len(stages.backward_planes)]
    of_a_sequence = sizes.heads * (sizes.nq + spec.context) * 256 * spec.itemsize
    op = with_workspace(op, 2 * planes[1] * of_a_sequence)
    assert [strips(op, sizes, one) for one in planes] == [(2 * planes[1] // planes[0], 11), (2, 11)]
    assert_accurate(op, sizes)
    assert_decodes(with_workspace(op, 3 * planes[0] * of_a_sequence // (sizes.nq + spec.context)), sizes, STEPS[1])


# Windows narrower than a tile, with a limit on one side or both, of the own key alone, and wider than any sequence.
WINDOWS: dict[str, dict[str, Any]] = {
    "causal": {"window": (5, -1), "causal": True},
    "causal, by output": {"window": (5, 2), "causal": True, "mask": "output", "key_padding": "left"},
    "both sides": {"window": (4, 3), "causal": False, "key_padding": "right"},
    "both sides, by output": {"window": (3, 6), "causal": False, "mask": "output"},
    "earlier keys only": {"window": (6, -1), "causal": False},
    "later keys only, by output": {"window": (-1, 4), "causal": False, "mask": "output"},
    "its own key": {"window": (0, 0), "causal": False},
    "wide": {"window": (100, 100), "causal": False},
}
WINDOWED = {
    f"{name}, {window}": PIPELINES[name] | WINDOWS[window]
    for n, window in enumerate(WINDOWS)
    for name in ("both before, both after", [*PIPELINES][n * 3 % len(PIPELINES)])
}


@pytest.mark.parametrize("options", WINDOWED.values(), ids=WINDOWED)
def test_windows(options: dict[str, Any]) -> None:
    """Of more queries than keys, some see no key, or some keys after their own position alone."""
    n = [*WINDOWED.values()].index(options)
    op = build(options)
    assert_accurate(op, SIZES[n % 3], Sizes(1, 4, 4, 26, 13), Sizes(1, 4, 1, 1, 1))
    assert_decodes(op, Sizes(4, 4, 2, 1, 29), STEPS[n % 3])


@pytest.mark.parametrize("window", ["causal, by output", "both sides"])
def test_windows_of_wide_kernels(window: str) -> None:
    """Context takes more keys than the window has."""
    op = build(WIDE | WINDOWS[window])
    assert_accurate(op, Sizes(1, 4, 2, 19, 30), Sizes(1, 4, 2, 9, 2))
    assert_decodes(op, Sizes(4, 4, 1, 1, 29), STEPS[1])


@pytest.mark.parametrize(("mask", "right"), [("source", -1), ("output", 40)], ids=str)
def test_windows_of_strips(mask: str, right: int) -> None:
    """Strips do not see the first keys, nor do the later rows of a strip those that the first ones see.

    Rows see parts of several chunks of keys, which kernels divide among programs.
    """
    stages = {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 5), "post_mixed_heads": 2}
    op = with_workspace(build(stages, window=(600, right), causal=right < 0, mask=mask), 2**10)
    sizes = Sizes(1, 2, 1, 140, 1100)
    assert strips(op, sizes, 1) == (1, 128)
    assert_accurate(op, sizes)


def test_a_decode_step_reads_the_window_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache of any length, planes have the keys of the window and of the context."""
    op = build(EVERYTHING, window=(20, -1))
    spec, sizes = op.plan.spec, []
    for keys in (300, 900):
        problem = problems.random(spec, Sizes(2, 4, 2, 1, keys))
        k, v = (x.clone() for x in (problem.inputs.k, problem.inputs.v))
        lengths = torch.tensor([keys, keys - 9], dtype=torch.int32)
        expected = op.decode(problem.q_tail, k, v, **problem.inputs.weights, cache_seqlens=lengths)
        for x, n in ((x, n) for one in (k, v) for x, n in zip(one, lengths.tolist(), strict=True)):
            x[:, : n - problem.q_tail.shape[2] - 20] = torch.nan
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "new_empty", noting(Tensor.new_empty, made := list[int]()))
            given = op.decode(problem.q_tail, k, v, **problem.inputs.weights, cache_seqlens=lengths)
        assert torch.equal(given, expected)
        sizes.append(made)
    assert len(sizes[0]) > 1
    assert sizes[0] == sizes[1]


HEADS = {  # bundles: heads that mix with each other, and as many more as a tile holds anyway
    "one bundle with room for more": (6, {"mixed_heads": 2, "post_mixed_heads": 2}),
    "two of an odd size": (10, {"mixed_heads": 5, "post_mixed_heads": 5}),
    "all of a size that is no power of two": (10, {"mixed_heads": 10, "post_mixed_heads": 10}),
    "different groups in one bundle": (6, {"mixed_heads": 3, "post_mixed_heads": 2}),
    "the last bundle has fewer groups": (18, {"mixed_heads": 2, "post_mixed_heads": 6}),
    "different bundles after a convolution": (20, {"mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 5}),
    "more than a tile of 16": (20, {"mixed_heads": 20}),
    "a scale for each head": (2, {"mixed_heads": 1, "post_mixed_heads": 1}),
    "none is mixed before": (20, {"post_mixed_heads": 10}),
    "too many to share a bundle": (144, {"mixed_heads": 48, "post_mixed_heads": 36}),
}


@pytest.mark.parametrize(("heads", "stages"), HEADS.values(), ids=HEADS)
def test_heads_and_bundles(heads: int, stages: dict[str, Any]) -> None:
    op, sizes = build({"kernel": None, **stages}), Sizes(1 if heads > 18 else 2, heads, heads // 2, 5, 9)
    assert_accurate(op, sizes)
    assert_decodes(op, sizes, (2, (5, 9)[: sizes.batch], None))


def test_chunks_of_keys() -> None:
    """More keys than a program of most kernels takes, and than the row kernels take at once."""
    assert_accurate(build(EVERYTHING, mask="output"), Sizes(1, 4, 4, 3, 1030))


def test_chunks_of_the_gradient_of_a_convolution() -> None:
    op = build({"kernel": (1, 3), "post_kernel": (2, 1)}, causal=False)
    assert_accurate(op, Sizes(1, 1, 1, 2, 2060))


def test_more_rows_than_programs() -> None:
    """Of the backward pass, whose programs sum gradients of matrices over several rows."""
    op = build({"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2}, causal=False)
    assert_accurate(op, Sizes(1, 2, 2, 530, 3))


def test_results_are_laid_out_as_traced_code_expects() -> None:
    """Of a mixture in groups, too: on chip there are more heads than a group has."""
    op = build({"kernel": None, "mixed_heads": 2, "post_mixed_heads": 4})
    inputs = problems.random(op.plan.spec, Sizes(1, 4, 2, 3, 5)).inputs
    q, k, v, *_ = inputs.arguments
    weights = [inputs.named.get(name) for name in WEIGHTS]
    out, lse = op(**inputs.named, return_lse=True)
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, *weights, *NO_LEARNED, out, lse, 0.25, op._key)
    torch.library.opcheck(torch.ops.mtagen.backward.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("name", ["both before, both after", "mixing before, mixing after", "both before, none after"])
def test_fp16(name: str) -> None:
    op = build(PIPELINES[name], dtype="fp16", value_head_dim=16)
    assert_accurate(op, Sizes(1, 4, 2, 40, 45))
    assert_decodes(op, Sizes(1, 4, 2, 1, 29), STEPS[2])


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale: float) -> None:
    op = build(EVERYTHING)
    problem = problems.random(op.plan.spec, Sizes(2, 4, 2, 9, 13), scale)
    assert not problems.failures(op, op.plan.spec, problem)
    assert not problems.decode_failures(op, op.plan.spec, problem)


DROPPED: dict[str, tuple[float, dict[str, Any]]] = {  # the probability, and stages
    "mixing": (0.9, {"kernel": None, "mixed_heads": 2}),
    "mixing before and after": (0.1, {"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2}),
    "pairs": (0.1, {"kernel": None, "post_mixed_heads": 2}),
    "a convolution after": (0.9, {"kernel": None, "post_kernel": (2, 5), "mask": "output", "causal": False}),
    "all in a window": (0.1, EVERYTHING | {"window": (9, 3), "causal": False}),
}


@pytest.mark.usefixtures("memory_starts_as_nan")
@pytest.mark.parametrize(("p", "stages"), DROPPED.values(), ids=DROPPED)
def test_dropout(p: float, stages: dict[str, Any]) -> None:
    """Each of two sequences has a strip of its own."""
    op = with_workspace(build(stages), 2**10, dropout=True)
    assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, Sizes(2, 4, 2, 7, 19)), p)
    dropping.assert_masks(op, op.plan.spec, 4, 7, 19, 0.5)


@pytest.mark.parametrize("stages", [{"mixed_heads": 2}, {"post_kernel": (2, 5)}], ids=str)
def test_dropout_in_strips_of_some_rows(stages: dict[str, Any]) -> None:
    """Queries, and in a window keys, count from the sequence's first, wherever a strip begins."""
    op = with_workspace(build({"kernel": None, "window": (21, -1), **stages}), 2**10, dropout=True)
    assert not problems.failures_through_lse(
        op, op.plan.spec, problems.random(op.plan.spec, Sizes(1, 2, 1, 131, 139)), 0.3
    )


def test_results_are_the_same_every_time() -> None:
    op = build(EVERYTHING)
    problem = problems.random(op.plan.spec, Sizes(2, 4, 2, 9, 13))

    def run() -> list[Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in problem.inputs.named.items()}
        q, k, v, *_ = leaves.values()
        out, lse = op(q, k, v, **{name: leaves[name] for name in problem.inputs.weights}, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, [*leaves.values()], problem.grad_out)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


# Sums of gradients' parts: more heads than a bundle, a bundle of several groups, padded heads, other extents than 1.

SUMMED: dict[str, tuple[int, dict[str, Any]]] = {
    "16 heads before and after": (32, {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16}),
    "groups in bundles": (20, {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 5), "post_mixed_heads": 5}),
    "padded heads": (36, {"kernel": None, "mixed_heads": 3, "post_mixed_heads": 18}),
    "a large filter": (3, {"kernel": (6, 11), "post_kernel": (9, 17)}),
    "factors of keys": (24, {"kernel": None, "mixed_heads": 12, "dynamic_ranks": (0, 2)}),
}


@pytest.mark.parametrize(("heads", "stages"), SUMMED.values(), ids=SUMMED)
def test_gradient_sums(heads: int, stages: dict[str, Any]) -> None:
    """Sums of integers are exact. Places that are no result's are NaN, and no result is left out."""
    made = plan(Spec(head_dim=16, dtype="fp32", **stages), "generic", "triton")
    module = StripModule.of(made.strip.values())
    sizes = {"batch": 3, "n_heads": heads, "parts": 3, "all_chunks": 50, "n_k": 301, "mix_chunks": 5}

    def extents(shape: tuple[Any, ...]) -> list[int]:
        return [
            int(sympy.sympify(size).subs({x: sizes[x.name] for x in sympy.sympify(size).free_symbols}))
            for size in shape
        ]

    tensors, expected = [], []
    for one in module.gradient_sums:
        outer, slots, inner, entries = extents(one.buffer)
        parts = torch.randint(-99, 99, (outer, slots, inner, entries)).float()
        if one.of in made.spec.mixed:
            mixed, bundle = made.spec.mixed[one.of], module.stages.matrix_partials[one.partial]
            block = block_of(bundle)
            rows = torch.arange(block)
            grouped = (rows // mixed)[:, None] == (rows // mixed)
            own = grouped & (rows < bundle)[:, None] & (rows < bundle)
            parts = parts.view(outer, slots, inner, block, block).masked_fill(~own, torch.nan)
            summed = parts.sum((0, 2))
            matrices = [
                summed[first // bundle, row : row + mixed, row : row + mixed]
                for first in range(0, heads, mixed)
                for row in [first % bundle]
            ]
            expected.append(torch.stack(matrices))
        else:
            expected.append(parts.sum((0, 2)).view(extents(one.shape)))
        tensors += [parts, torch.full(extents(one.shape), torch.nan)]
    kernel = module.kernel("gradient_sums")
    numbers = [sizes[argument.name] for argument in kernel.arguments if not argument.pointer]
    launched = getattr(load_host(made, render(made), "backward"), kernel.name)
    launched[tuple(extents(kernel.grid))](*tensors, *numbers)
    assert all(torch.equal(x, y) for x, y in zip(tensors[1::2], expected, strict=True))


# Packed documents. Their rows begin with a tile of 128 places each.

NARROW: dict[str, Any] = {"head_dim": 16, "value_head_dim": 24, "dtype": "fp32"}


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward kernels of rows have few programs, each of many rows: the interpreter takes long for a program."""
    monkeypatch.setattr(kernels, "PROGRAMS", 8)


packs = pytest.mark.usefixtures("memory_starts_as_nan", "few_programs")


def host_of(options: dict[str, Any], workspace_bytes: int = 2**30) -> Mapping[str, Callable[..., Any]]:
    """The host functions of a spec of packed documents."""
    made = plan(Spec(**NARROW | {"packed": True} | options), "generic")
    for one in made.strip.values():
        made = made.replaced(replace(one, workspace_bytes=workspace_bytes))
    module = load_host(made, render(made), "forward")
    return {name: getattr(module, name) for name in made.strip}


def packed_failures(
    options: dict[str, Any], lengths: documents.Lengths, heads: int, kv_heads: int, **more: Any
) -> list[str]:
    """Results that break the accuracy rule, a line each."""
    spec = Spec(**NARROW | options)
    return documents.failures(host_of(options, **more), spec, lengths, heads, kv_heads)


@packs
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        # Keys or queries only, more queries than keys, fewer rows than a halo.
        (PIPELINES["both before, both after"] | {"mask": "output"}, ((0, 3), (17, 9), (4, 0), (1, 1))),
        (PIPELINES["none before, convolution after"] | {"causal": False, "dtype": "fp16"}, ((13, 21), (5, 2))),
    ],
    ids=str,
)
def test_packed_documents(options: dict[str, Any], lengths: documents.Lengths) -> None:
    assert not packed_failures(options, lengths, 4, 2)


@packs
@pytest.mark.parametrize(
    "options",
    [
        PIPELINES["both before, both after"] | {"mask": "output"},
        {"kernel": (3, 4), "mixed_heads": 2, "window": (4, 2), "causal": False},
        {"kernel": None, "post_mixed_heads": 2},
    ],
    ids=str,
)
def test_rows_behind_the_last_document(options: dict[str, Any]) -> None:
    """They get zeros, and change nothing, though they hold NaN: as padding to a fixed length may."""
    host = documents.with_rest(host_of(options), 140, 9)
    assert not documents.failures(host, Spec(**NARROW | options), ((0, 3), (17, 9), (4, 0)), 4, 2)


@packs
@pytest.mark.parametrize("stages", [{"post_mixed_heads": 2}, {"post_kernel": (2, 2)}], ids=str)
def test_dropout_of_packed_documents(stages: dict[str, Any]) -> None:
    """Queries and keys count from the document's first."""
    options = {"kernel": None, "window": (4, 1), "causal": False, "dropout": True} | stages
    spec = Spec(**NARROW | options)
    assert not documents.failures(host_of(options), spec, ((5, 2), (29, 30)), 2, 1, Dropout(dropping.SEED, 0.4))


@packs
def test_packed_documents_of_strips() -> None:
    """The second strip has rows of the first as context, but for the document that begins with it."""
    options = {"kernel": (3, 4), "mixed_heads": 2, "window": (60, 9), "causal": False}
    assert not packed_failures(options, ((131, 140), (3, 7)), 2, 1, workspace_bytes=2**10)


@packs
def test_packed_documents_longer_than_a_window() -> None:
    """Planes have room for the keys of a strip's rows and of the window; a document's first key there is rounded."""
    options = {"kernel": None, "mixed_heads": 2, "window": (5, 9), "causal": False}
    assert not packed_failures(options, ((131, 343), (3, 7)), 2, 1, workspace_bytes=2**10)


@packs
def test_more_blocks_of_keys_than_tiles_of_rows() -> None:
    """Of a document with two tiles of rows, which share its keys, and of a short one beside it."""
    options = {"kernel": None, "post_mixed_heads": 2, "causal": False}
    assert not packed_failures(options, ((130, 330), (3, 7)), 2, 1)


@packs
def test_nothing_leaks_between_documents() -> None:
    """A document among others that hold no numbers gives the bits that it gives alone."""
    options = {"kernel": (3, 4), "post_kernel": (2, 5), "window": (4, -1)}
    assert not documents.leaks(host_of(options), Spec(**NARROW | options), ((2, 9), (6, 5), (7, 4)), 4, 2)


def test_planes_of_packed_documents() -> None:
    """Memory and programs follow from the number of tokens and of documents, not from the longest document."""
    made = plan(Spec(None, 16, dtype="fp32", packed=True, mixed_heads=2), "generic")
    module = load_host(made, render(made), "forward")
    packed = documents.packed([(32, 40)] * 1000 + [(0, 5), (300, 3)])
    places = (packed.cu_seq_q[-1].item() // 128 + 1002) * 128
    records = module._documents(*packed[:2], places, 128)
    assert records.dtype == torch.int32
    assert len(records) == places // 128
    rows = [(record[0], i) for record in records.tolist() for i in range(record[1], min(record[1] + 128, record[2]))]
    assert rows == [(b, i) for b in range(1000) for i in range(32)] + [(1001, i) for i in range(300)]
    assert records[-1].tolist()[2:] == [300, 32000, 3, 40005]
