"""The lowering "strip" as a GPU runs it: Triton's kernels in the interpreter, CUDA's on a CPU that plays the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import dropping
import problems
import pytest
import torch
from emulator import load_emulated
from host_functions import retiled
from on_chip import mixed_on_chip
from paged import contiguous, draw
from torch import Tensor

from mtagen import Plan, Spec, plan
from mtagen.codegen import render
from mtagen.dropout import Dropout
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Sampler
from mtagen.ops import library
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.planner.strip import contractions
from mtagen.planner.strip.module import StripModule
from mtagen.runtime.load import load_host

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {  # heads and stages
    "all stages": (4, {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 5), "post_mixed_heads": 4}),
    "all stages, full": (2, {"kernel": (6, 11), "mixed_heads": 2, "post_kernel": (3, 3), "causal": False}),
    "pairs of 10 heads": (10, {"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2}),
    "a convolution after": (4, {"kernel": None, "post_kernel": (3, 3), "key_padding": "left"}),
    "a convolution, then pairs": (4, {"kernel": (6, 11), "post_mixed_heads": 2}),
    "groups of 4, full": (8, {"kernel": None, "post_mixed_heads": 4, "causal": False}),
    "all stages in a window": (
        4,
        {"kernel": (6, 11), "mixed_heads": 2, "post_kernel": (3, 3), "post_mixed_heads": 4, "window": (20, -1)},
    ),
    "pairs of 10 heads in a window on both sides": (
        10,
        {"kernel": None, "mixed_heads": 2, "post_mixed_heads": 2, "causal": False, "window": (9, 5)},
    ),
    "a convolution in a window, then pairs": (4, {"kernel": (6, 11), "post_mixed_heads": 2, "window": (20, -1)}),
    "a convolution, then groups of 3, by output": (
        6,
        {"kernel": (3, 4), "post_mixed_heads": 3, "value_head_dim": 32, "mask": "output", "key_padding": "left"},
    ),
    "a convolution, then groups of 8, full": (8, {"kernel": (5, 2), "post_mixed_heads": 8, "causal": False}),
    "a convolution after, earlier keys, by output": (
        4,
        {"kernel": None, "post_kernel": (3, 3), "causal": False, "window": (30, -1), "mask": "output"},
    ),
    "20 heads mix": (20, {"kernel": (3, 3), "mixed_heads": 20, "post_kernel": (2, 3)}),  # too many for CUDA
}

# Options of fused kernels, of values side by side
SIDE_BY_SIDE = {"kernel", "causal", "post_mixed_heads", "window", "value_head_dim", "mask", "key_padding"}


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTAGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def build(folder: Path, stages: dict[str, Any], workspace_bytes: int = 2**30, *, but: str | None = None) -> AttentionOp:
    """The op of a plan for an H200 as ``auto`` makes it, with a workspace of this size.

    If ``but`` is given, all kernels but that one have the form that the cost model likes least.
    """
    made = plan(Spec(head_dim=16, dtype="fp16", **stages), "sm_90a")
    for one in made.strip.values() if but else ():
        for key in one.decisions():
            if one.role(key) != but:
                made = made.decided(key, one.alternatives(key)[-1].decisions()[key])
    made = retiled(made, workspace_bytes=workspace_bytes)
    assert made.backend == "cuda"
    assert [bool(one.fused) for one in made.strip.values()][:2] == 2 * [stages.keys() <= SIDE_BY_SIDE]
    load_emulated(made, folder)
    return assemble(made, torch_on_cpu=False)


@pytest.mark.parametrize(("heads", "stages"), PIPELINES.values(), ids=PIPELINES)
def test_training(heads: int, stages: dict[str, Any], folder: Path) -> None:
    """Two sequences with grouped keys; more keys; more queries; one of each, where softmax has no gradient.

    Gradients come through the log-sum-exp, too.
    """
    op = build(folder, stages)
    for sizes in (Sizes(2, heads, heads // 2, 17, 17), Sizes(1, heads, 1, 13, 140), Sizes(1, heads, heads, 75, 13)):
        assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, sizes))
    assert not problems.failures(op, op.plan.spec, problems.random(op.plan.spec, Sizes(8, heads, heads, 1, 1)))


@pytest.mark.parametrize(
    ("heads", "stages"),
    [
        (16, {"mixed_heads": 16, "post_mixed_heads": 16}),
        (12, {"mixed_heads": 12, "window": (20, -1)}),
    ],
    ids=["16 heads before and after", "12 heads before, in a window"],
)
def test_training_with_heads_mixed_on_the_chip(heads: int, stages: dict[str, Any], folder: Path) -> None:
    """The lowering "heads" makes the forward pass, and strips the backward pass, with its log-sum-exps."""
    made = mixed_on_chip(Spec(**({"kernel": None, "head_dim": 16, "dtype": "fp16"} | stages)))
    assert made["forward"].lowering == "heads"
    load_emulated(made, folder)
    op = assemble(made, torch_on_cpu=False)
    for sizes in (Sizes(2, heads, heads // 2, 17, 17), Sizes(1, heads, 1, 13, 140), Sizes(1, heads, heads, 75, 13)):
        assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, sizes))


# Stages of head dim 64, and calls of several strips, some of which see no key: sequences, heads of queries and of keys,
# queries, keys
BEFORE_AND_AFTER: dict[str, Any] = {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3)}
SHARED: dict[str, tuple[dict[str, Any], Sizes]] = {
    "rows without keys": (BEFORE_AND_AFTER, Sizes(1, 2, 1, 300, 20)),
    "a window": (BEFORE_AND_AFTER | {"window": (20, -1)}, Sizes(1, 2, 1, 150, 330)),
    "a window on both sides": (BEFORE_AND_AFTER | {"causal": False, "window": (20, 40)}, Sizes(1, 2, 1, 300, 31)),
    "by output": ({"kernel": (6, 4), "mixed_heads": 2, "mask": "output"}, Sizes(1, 2, 1, 300, 20)),
    "by output, a window on both sides": (
        {"kernel": (6, 4), "mixed_heads": 2, "mask": "output", "causal": False, "window": (20, 9)},
        Sizes(1, 2, 2, 290, 40),
    ),
}


ALL_STAGES: dict[str, Any] = BEFORE_AND_AFTER | {"post_mixed_heads": 2}


@pytest.mark.parametrize("head_dim", [64, 128, 32])
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(ALL_STAGES, id="all stages"),
        pytest.param({"kernel": (6, 11), "mixed_heads": 2, "window": (20, -1)}, id="a convolution before, in a window"),
        pytest.param({"kernel": None, "post_kernel": (2, 5)}, id="a convolution after"),
        pytest.param(ALL_STAGES | {"causal": False, "window": (40, 9)}, id="all stages, a window on both sides"),
    ],
)
def test_keys_that_no_kernel_reads(stages: dict[str, Any], head_dim: int, folder: Path) -> None:
    """They are not cleared. A strip has three tiles of rows, and of keys, of which many are hidden. cuBLAS reads all
    keys.
    """
    made = plan(Spec(head_dim=head_dim, dtype="fp16", **stages), "sm_90a")
    assert StripModule.of([made["backward"]]).contracts("backward") == (head_dim >= 64)
    load_emulated(made, folder)
    op = assemble(made, torch_on_cpu=False)
    rows = 590 if head_dim == 128 else 290
    assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, Sizes(1, 2, 1, rows, rows + 30)))


@pytest.mark.parametrize(("stages", "sizes"), SHARED.values(), ids=SHARED)
def test_strips_add_to_gradients_that_they_share(stages: dict[str, Any], sizes: Sizes, folder: Path) -> None:
    """mtagen's kernels multiply planes by rows. Gradients that no strip computes are zeros."""
    made = retiled(plan(Spec(head_dim=64, dtype="fp16", **stages), "sm_90a"), workspace_bytes=2**10)
    assert StripModule.of([made["backward"]]).contracts("backward")
    load_emulated(made, folder)
    op = assemble(made, torch_on_cpu=False)
    assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, sizes))


@pytest.mark.parametrize(
    ("kept", "short"),
    [(0, 2**30), (2**30, 2**30), (0, 80), (2**30, 0)],
    ids=["heads side by side", "one after the other", "heads in two parts", "heads in four parts"],
)
@pytest.mark.parametrize("workspace_bytes", [2**10, 2**24], ids=["several strips", "one strip"])
def test_ctas_of_products(
    kept: int, short: int, workspace_bytes: int, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """CTAs of heads whose planes L2 does not keep run side by side, and several divide heads that share a key."""
    monkeypatch.setattr(contractions, "KEPT", kept)
    monkeypatch.setattr(contractions, "SHORT", short)
    spec = Spec(head_dim=64, dtype="fp16", **ALL_STAGES | {"window": (60, -1)})
    made = retiled(plan(spec, "sm_90a"), workspace_bytes=workspace_bytes)
    load_emulated(made, folder)
    op = assemble(made, torch_on_cpu=False)
    rows = 150 if workspace_bytes == 2**10 else 37
    assert not problems.failures_through_lse(op, spec, problems.random(spec, Sizes(2, 4, 1, rows, rows + 20)))


def test_training_in_other_forms(folder: Path) -> None:
    """Gradients of the two convolutions' weights are summed over tiles of different sizes."""
    heads, stages = PIPELINES["all stages"]
    op = build(folder, stages, but="post_convolution_gradient")
    backward = op.plan.strip["backward"]
    sizes = {backward.cuda[f"{name}_gradient"].form.keys for name in ("convolution", "post_convolution")}
    assert sizes == {64, 128}
    for shape in (Sizes(2, heads, heads // 2, 17, 17), Sizes(1, heads, 1, 13, 140)):
        assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, shape))


@pytest.mark.parametrize(("heads", "stages"), PIPELINES.values(), ids=PIPELINES)
def test_decode(heads: int, stages: dict[str, Any], folder: Path) -> None:
    """Some sequences use all of the cache, some few keys or none."""
    op = build(folder, stages)
    for new_tokens, lengths, splits in ((1, (140, 3), None), (8, (0, 99), 2)):
        problem = problems.random(op.plan.spec, Sizes(2, heads, heads // 2, 1, 140), new_tokens=new_tokens)
        assert not problems.decode_failures(op, op.plan.spec, problem, lengths, splits)


@pytest.mark.parametrize("name", ["all stages", "all stages in a window"])
def test_decode_from_pages(name: str, folder: Path) -> None:
    """The bits of a cache; slots that hold no token are NaN."""
    heads, stages = PIPELINES[name]
    op = build(folder, stages)
    load_emulated(plan(replace(op.plan.spec, page_size=16), "sm_90a", "cuda"), folder)
    requests = [(2, keys) for keys in (2, 17, 70)]
    given = draw(op.plan.spec, requests, 16, heads=heads, kv_heads=heads // 2, dtype=torch.float16)
    assert torch.equal(op.paged(**given.arguments), contiguous(op, given))


@pytest.mark.parametrize("name", ["all stages", "all stages in a window"])
def test_chunks_from_pages(name: str, folder: Path) -> None:
    """The bits of packed documents."""
    heads, stages = PIPELINES[name]
    op = build(folder, stages)
    for packed, page_size in ((True, None), (True, 16), (False, 16)):
        load_emulated(plan(replace(op.plan.spec, packed=packed, page_size=page_size), "sm_90a", "cuda"), folder)
    requests = [(9, 9), (0, 3), (20, 70)]
    given = draw(op.plan.spec, requests, 16, heads=heads, kv_heads=heads // 2, dtype=torch.float16)
    assert library.executor_of(op._key).variants(True, False, 16).reads_pages
    assert torch.equal(op.paged(**given.arguments), contiguous(op, given))


@pytest.mark.parametrize(
    "name", ["all stages", "pairs of 10 heads", "a convolution, then pairs", "all stages in a window"]
)
def test_many_strips(name: str, folder: Path) -> None:
    """The last of a sequence has few rows, and those before as context."""
    heads, stages = PIPELINES[name]
    op = build(folder, stages, 2**10)
    sizes = Sizes(1, heads, heads, 135, 130)
    assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, sizes))


def step(op: AttentionOp, sizes: Sizes, seed: int) -> list[Tensor]:
    """Results and gradients of a call and of a decode step, with random arguments in one of two layouts."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(op.plan.spec, sizes, torch.device("cpu"), generator, rows_outside_heads=seed % 2 == 0)
    inputs, grad_out, q_tail = sampler.inputs(), sampler.outputs(), sampler.queries(2, decode=True)
    leaves = [x.requires_grad_() for x in inputs.arguments]
    weights = dict(zip(inputs.weights, leaves[3:], strict=True))
    out, lse = op(*leaves[:3], **weights, return_lse=True)
    made = [out, lse, *torch.autograd.grad((out, lse), leaves, (grad_out, torch.ones_like(lse)))]
    return [*made, op.decode(q_tail, *leaves[1:3], **weights).detach()]


@pytest.mark.parametrize(
    ("name", "workspace_bytes", "rows"),
    [("all stages", 2**10, 135), ("pairs of 10 heads", 2**30, 17), ("a convolution, then pairs", 2**30, 17)],
)
def test_recipes(name: str, workspace_bytes: int, rows: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by recipes have the bits of calls launch by launch, with other tensors in either of two layouts."""
    heads, stages = PIPELINES[name]
    op = build(folder, stages, workspace_bytes)
    module = load_host(op.plan, render(op.plan), "forward")
    recipes = module.Recipes()
    monkeypatch.setattr(module, "RECIPES", recipes)
    monkeypatch.setattr(recipes, "serves", lambda x: True)
    sizes = Sizes(2, heads, heads // 2, rows, rows)
    with recipes.suspended():
        expected = [step(op, sizes, seed) for seed in range(6)]
    for seed, results in enumerate(expected):
        assert all(torch.equal(x, y) for x, y in zip(step(op, sizes, seed), results, strict=True))
    assert len(recipes._recipes) == 6  # of each pass, one for either layout


# Strips of one sequence each; of some rows; and rows of which a warp has more blocks than room for them.
SEQUENCES, STRIPS, LONG = Sizes(2, 2, 1, 9, 21), Sizes(1, 2, 1, 131, 139), Sizes(2, 2, 1, 1, 5000)
WINDOW = {"window": (21, -1)}
DROPPED: dict[str, tuple[dict[str, Any], str, Sizes, float]] = {  # stages, the target, sizes, and the probability
    "mixing in a window": ({"mixed_heads": 2} | WINDOW, "sm_90a", STRIPS, 0.1),
    "pairs": ({"post_mixed_heads": 2}, "sm_90a", LONG, 0.9),
    "a convolution after, full": ({"post_kernel": (2, 2), "causal": False}, "sm_80", SEQUENCES, 0.9),
    "a convolution after in a window": ({"post_kernel": (2, 2)} | WINDOW, "sm_90a", STRIPS, 0.1),
    "both after in a window": ({"post_kernel": (2, 2), "post_mixed_heads": 2} | WINDOW, "sm_90a", STRIPS, 0.1),
}


@pytest.mark.parametrize(("stages", "target", "sizes", "p"), DROPPED.values(), ids=DROPPED)
def test_dropout(stages: dict[str, Any], target: str, sizes: Sizes, p: float, folder: Path) -> None:
    """Queries, and in a window keys, count from the sequence's first, wherever a strip begins."""

    def plan_like(spec: Spec) -> Plan:
        made = retiled(plan(spec, target), workspace_bytes=2**10)
        assert made.backend == "cuda"
        assert not made.strip["forward"].fused
        load_emulated(made, folder, checked=True)
        return made

    made = plan(Spec(None, 16, 32, dtype="fp16", **stages), target)
    op = assemble(made, torch_on_cpu=False, dropout=True, plan_like=plan_like)
    assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, sizes), p)
    dropping.assert_masks(op, made.spec, 2, 9, 21, 0.5)


# Packed documents: keys or queries only, one token, more rows than a tile of a kernel has and than keys, fewer than a
# halo. A document's rows begin with a tile of 128 places.
LENGTHS = ((0, 3), (4, 0), (75, 40), (1, 1), (3, 90))
IN_A_WINDOW = {"kernel": None, "mixed_heads": 2, "post_kernel": (6, 11), "window": (20, 5), "causal": False}
PACKED: dict[str, tuple[int, dict[str, Any], documents.Lengths, int]] = {  # heads, stages, documents, workspace
    "all stages": (*PIPELINES["all stages"], LENGTHS, 2**30),
    "strips": (*PIPELINES["all stages"], ((3, 2), (140, 131), (130, 9)), 2**10),
    "strips in a window": (2, IN_A_WINDOW, ((140, 131), (5, 8)), 2**10),
}


def packed_host(
    folder: Path, stages: dict[str, Any], workspace_bytes: int, target: str = "sm_90a"
) -> tuple[Spec, Mapping[str, Callable[..., Any]]]:
    """Host functions for packed documents with CUDA's kernels, beside Triton's."""
    spec = Spec(head_dim=16, dtype="fp16", **stages)
    made = retiled(plan(replace(spec, packed=True), target, "cuda"), workspace_bytes=workspace_bytes)
    assert spec.convolves_only or bool(made.strip["forward"].fused) == (stages.keys() <= SIDE_BY_SIDE)
    load_emulated(made, folder)
    sources = render(made)
    return spec, {name: getattr(load_host(made, sources, name), name) for name in sources.hosts}


@pytest.mark.parametrize(("heads", "stages", "lengths", "workspace_bytes"), PACKED.values(), ids=PACKED)
def test_packed_documents(
    heads: int, stages: dict[str, Any], lengths: documents.Lengths, workspace_bytes: int, folder: Path
) -> None:
    spec, host = packed_host(folder, stages, workspace_bytes)
    assert not documents.failures(host, spec, lengths, heads, heads // 2)


@pytest.mark.parametrize(
    ("stages", "target"),
    [
        ({"kernel": (3, 3), "post_mixed_heads": 2}, "sm_80"),  # whose gradients of shares may be anything where hidden
        ({"kernel": None, "post_mixed_heads": 2, "window": (30, -1)}, "sm_90a"),
    ],
    ids=["sm_80", "sm_90a in a window"],
)
def test_packed_pairs(stages: dict[str, Any], target: str, folder: Path) -> None:
    """The fused kernel takes tiles of documents, and outputs are mixed row by row."""
    spec, host = packed_host(folder, stages, 2**30, target)
    assert not documents.failures(host, spec, LENGTHS, 4, 2)


@pytest.mark.parametrize(
    ("stages", "target"),
    [
        ({"mixed_heads": 2, "window": (21, 3), "causal": False}, "sm_90a"),
        ({"post_kernel": (2, 2), "window": (21, -1)}, "sm_90a"),
        ({"post_kernel": (2, 2), "post_mixed_heads": 2}, "sm_80"),
    ],
    ids=str,
)
def test_dropout_of_packed_documents(stages: dict[str, Any], target: str, folder: Path) -> None:
    """Queries and keys count from the document's first, wherever strips begin."""
    spec, host = packed_host(folder, {"kernel": None, "dropout": True, **stages}, 2**10, target)
    lengths = ((9, 4), (140, 170), (5, 6))
    assert not documents.failures(host, spec, lengths, 2, 1, Dropout(dropping.SEED, 0.4))


# Fused forward passes without a fused backward pass: of values of another head dim, and of a wide one.
STANDS_IN: dict[str, dict[str, Any]] = {
    "(6, 11)": {"kernel": (6, 11), "value_head_dim": 32},
    "(3, 3), full": {"kernel": (3, 3), "head_dim": 32, "value_head_dim": 16, "causal": False},
    "one tap in a window": {"kernel": (1, 1), "value_head_dim": 32, "window": (20, -1)},
    "wide": {"kernel": (2, 9), "head_dim": 144},
    "a sink": {"kernel": (3, 3), "value_head_dim": 32, "sink": True},
}


@pytest.mark.parametrize("stages", STANDS_IN.values(), ids=STANDS_IN)
def test_backward_of_a_fused_forward(stages: dict[str, Any], folder: Path) -> None:
    """Strips make it. Where a row sees one key, its probability is 1 though forward and backward round otherwise."""
    spec = Spec(**{"head_dim": 16, "dtype": "fp16", **stages})
    made = plan(spec, "sm_90a" if spec.head_dim == spec.value_head_dim else "sm_80", "cuda")
    assert (made.tile.keys(), made.strip.keys()) == ({"forward", "decode"}, {"backward"})
    load_emulated(made, folder)
    op = assemble(made, torch_on_cpu=False)
    for sizes in (Sizes(2, 4, 2, 17, 17), Sizes(1, 2, 1, 13, 140), Sizes(1, 2, 2, 75, 13), Sizes(8, 2, 2, 1, 1)):
        assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, sizes))


def test_dropout_of_a_fused_forward(folder: Path) -> None:
    """Strips drop what the fused kernel dropped."""
    made = plan(Spec(value_head_dim=32, head_dim=16, dtype="fp16", kernel=(6, 11)), "sm_80", "cuda")

    def plan_like(spec: Spec) -> Plan:
        dropping_plan = retiled(plan(spec, "sm_80", "cuda"), workspace_bytes=2**10)
        load_emulated(dropping_plan, folder)
        return dropping_plan

    op = assemble(made, torch_on_cpu=False, dropout=True, plan_like=plan_like)
    assert not problems.failures_through_lse(op, made.spec, problems.random(made.spec, STRIPS), 0.4)


def test_packed_documents_of_a_fused_forward(folder: Path) -> None:
    spec, host = packed_host(folder, {"kernel": (6, 11), "value_head_dim": 32, "dropout": True}, 2**10, "sm_80")
    assert not documents.failures(host, spec, ((140, 131), (0, 3), (1, 1), (9, 4)), 2, 1, Dropout(dropping.SEED, 0.4))


def test_rows_behind_the_last_document(folder: Path) -> None:
    """They get zeros, and change nothing, though they hold NaN: as padding to a fixed length may."""
    for stages in (PIPELINES["all stages"][1], IN_A_WINDOW, {"kernel": (6, 11), "post_mixed_heads": 2}):
        spec, host = packed_host(folder, stages, 2**30)
        assert not documents.failures(documents.with_rest(host, 140, 70), spec, ((9, 20), (0, 2), (30, 12)), 4, 2)


def test_nothing_leaks_between_documents(folder: Path) -> None:
    """A document among others that hold no numbers gives the bits that it gives alone."""
    for stages in (PIPELINES["all stages"][1], IN_A_WINDOW, {"kernel": (6, 11), "post_mixed_heads": 2}):
        spec, host = packed_host(folder, stages, 2**30)
        assert not documents.leaks(host, spec, ((9, 20), (70, 33), (12, 12)), 4, 2)
