"""The planner of the lowering "strip" by brute force: bundles of heads, windows, strips, planes; plans of pipelines."""

from __future__ import annotations

import ast
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mtagen
from mtagen import Plan, PlanError, Spec, plan
from mtagen.codegen import cuda, render
from mtagen.codegen.strip import render as render_module
from mtagen.planner.choice import GENERATED, candidates
from mtagen.planner.passes import PASSES
from mtagen.planner.sizes import B0, B1, COUNT, KEYS, N_HEADS, SLOTS
from mtagen.planner.strip import contractions
from mtagen.planner.strip.documents import RECORD
from mtagen.planner.strip.kernels import SECTION, SPLIT, SUMS, decode_rows
from mtagen.planner.strip.limits import Limits
from mtagen.planner.strip.module import StripModule
from mtagen.planner.strip.passes import CUDA_OVER_TRITON, StripPass
from mtagen.planner.strip.planes import PlaneConvolution, PlaneGradient, plane_kernels
from mtagen.planner.strip.source import Form
from mtagen.planner.strip.stages import Stages, block_of
from mtagen.planner.tables import TUNED, Shape, Table
from mtagen.planner.targets import get_target
from mtagen.runtime.launches import exercise, recorded
from mtagen.runtime.load import load_host
from mtagen.spec import DROPOUT_GROUP, KEY_PADDINGS, MAX_KERNEL, MAX_NEW_TOKENS

GROUPS = (None, 1, 2, 3, 5, 6, 8, 10, 16, 20, 36, 48, 64)
BEFORE: tuple[dict[str, Any], ...] = (
    {"kernel": None},
    {"kernel": (3, 4)},
    {"kernel": None, "mixed_heads": 2},
    {"kernel": (3, 4), "mixed_heads": 2},
)
AFTER: tuple[dict[str, Any], ...] = (
    {},
    {"post_kernel": (2, 5)},
    {"post_mixed_heads": 4},
    {"post_kernel": (2, 5), "post_mixed_heads": 4},
)
PIPELINES = [
    spec
    for before, after in itertools.product(BEFORE, AFTER)
    if not (spec := Spec(head_dim=64, **before, **after)).convolves_only
]
EVERYTHING = Spec((6, 11), 64, mixed_heads=16, post_kernel=(5, 8), post_mixed_heads=16)
TOO_MANY = Spec(None, 64, mixed_heads=48, post_mixed_heads=36)

every_pipeline = pytest.mark.parametrize("spec", [*PIPELINES, TOO_MANY], ids=lambda spec: plan(spec, "cpu").suffix)


def loaded(spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The rendered module, on a machine without a GPU."""
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(folder))
    made = plan(spec, "sm_90a", "triton")
    return load_host(made, render(made), "forward")


# Heads.


def mixing(groups: int | None, head: int) -> set[int]:
    """The heads that one is mixed with."""
    return {head} if groups is None else {head // groups * groups + i for i in range(groups)}


@pytest.mark.parametrize("post_kernel", [None, (2, 3)], ids=str)
@pytest.mark.parametrize("before", GROUPS)
def test_bundles_are_closed_under_mixtures(before: int | None, post_kernel: tuple[int, int] | None) -> None:
    for after in GROUPS:
        spec = Spec(None, 64, mixed_heads=before, post_kernel=post_kernel, post_mixed_heads=after)
        stages = Stages(spec)
        assert stages.separate_post_mix + stages.fused_post_mix == (after is not None)
        for bundle, mixtures in (
            (stages.heads, [before, after] if stages.fused_post_mix else [before]),
            (stages.post_heads, [after]),
        ):
            for head in range(2 * bundle):
                own = {*range(head // bundle * bundle, (head // bundle + 1) * bundle)}
                assert all(mixing(groups, head) <= own for groups in mixtures), (spec, head)
            assert bundle <= block_of(bundle) <= 64
        joined = math.lcm(before or 1, after or 1)
        assert stages.post_is_separate == (post_kernel is not None or (after is not None and joined > 64))


def test_heads_on_chip() -> None:
    """A power of two that a product takes."""
    for heads in range(1, 65):
        assert block_of(heads) == min(size for size in (16, 32, 64) if size >= heads)


def test_mixtures_that_share_no_bundle_have_kernels_of_their_own() -> None:
    """Of 48 heads before and 36 after, 144 mix with each other."""
    forward, backward, decode = (StripPass(TOO_MANY, "sm_90a", name).kernels for name in PASSES)
    assert [kernel.role for kernel in forward] == ["scores", "softmax", "post_mix"]
    roles = ["scores", "statistics", "softmax", "post_mix", "values", "outputs"]
    assert [kernel.role for kernel in decode] == [f"decode_{role}" for role in roles]
    assert {"probabilities", "post_mix_backward"} <= {kernel.role for kernel in backward}
    heads = {kernel.role: dict(kernel.constants)["HEADS"] for kernel in forward[1:]}
    assert heads == {"softmax": 48, "post_mix": 36}


@every_pipeline
def test_row_kernels_take_whole_bundles(spec: Spec) -> None:
    """And tiles of keys that divide the pitch of planes."""
    module = StripModule.of(plan(spec, "sm_90a", "triton").strip.values())
    for kernel in (kernel for one in module.passes for kernel in one.kernels):
        constants = dict(kernel.constants)
        if heads := constants.get("HEADS"):
            post = "post_mix" in kernel.role
            assert heads == (module.stages.post_heads if post else module.stages.heads)
            assert constants["BLOCK_H"] == block_of(heads)
            assert module.limits.pitch_multiple % constants["BLOCK_N"] == 0


# Windows of convolutions.


@pytest.mark.parametrize("padding", KEY_PADDINGS)
@pytest.mark.parametrize("ck", [1, 2, 3, 8, 9, 11, 16, 17, 32, 33, 64])
def test_windows_hold_what_a_tile_of_results_reads(ck: int, padding: str) -> None:
    """From a multiple of 16 bytes on; of the convolution and of its adjoint."""
    spec = Spec((2, ck), 64, key_padding=padding, post_kernel=(3, ck))
    for stage in Stages(spec).convolutions:
        for keys in (16, 32, 64):
            width = stage.window(keys)
            assert width >= 16
            assert width & (width - 1) == 0
            reads = {j - stage.pad_left + v for j in range(keys) for v in range(ck)}
            handed_on = {j + stage.pad_left - v for j in range(keys) for v in range(ck)}
            for read, lead in ((reads, stage.aligned_left), (handed_on, stage.aligned_right)):
                assert lead % 8 == 0
                assert read <= {*range(-lead, width - lead)}


@every_pipeline
def test_kernels_of_convolutions_have_these_windows(spec: Spec) -> None:
    stages = Stages(spec)
    for name in PASSES:
        constants = {kernel.role: dict(kernel.constants) for kernel in StripPass(spec, "sm_90a", name).kernels}
        for stage in stages.convolutions:
            roles = [f"decode_{stage.name}" if name == "decode" else stage.name]
            roles += [f"{stage.name}_adjoint", f"{stage.name}_gradient"] if name == "backward" else []
            for role in roles:
                assert constants[role]["WINDOW"] == stage.window(constants[role]["BLOCK_N"])


# Slabs of CUDA's convolutions.

SLABS = [*itertools.product((1, 2, 3, 6, 16), (1, 2, 3, 8, 9, 10, 11, 12, 16), KEY_PADDINGS)]


def slabs(cq: int, ck: int, padding: str) -> list[PlaneConvolution | PlaneGradient]:
    """The kernels of a convolution, of its adjoint and of its weight's gradient that fit, in each form."""
    spec = Spec((cq, ck), 64, key_padding=padding, mixed_heads=2)
    (stage,) = Stages(spec).convolutions
    return [made for kernel in plane_kernels(spec, "sm_90a", stage, "fp16") for made in kernel.variants]


@pytest.mark.parametrize(("cq", "ck", "padding"), SLABS)
def test_slabs_hold_what_a_tile_of_results_reads(cq: int, ck: int, padding: str) -> None:
    """Tap v of a window comes ``spare`` columns after the window's first; rows of ldmatrix are those of the slab."""
    for made in slabs(cq, ck, padding):
        slab = made.slab
        left = made.stage.pad_right if slab.adjoint else made.stage.pad_left
        down = cq - 1 if slab.adjoint else 0
        assert slab.keys_left % 8 == 0
        for j, v in itertools.product(range(made.tile_keys), range(ck)):
            column = j - left + v + slab.keys_left
            assert column == j + slab.spare + v
            assert 0 <= column < 8 * slab.chunks
        read = {r + down - (cq - 1) + u + slab.rows_above for r in range(made.rows) for u in range(cq)}
        assert min(read) == 0
        if isinstance(made, PlaneGradient):  # shifts past the kernel's are read as the one after it
            loaded = {r + shift for r in range(0, made.rows, 2) for shift in range(cq + 1)}
        else:
            quads = [made.toeplitz.quads[i] for i in made.toeplitz.loads]
            matrices = {s for quad in quads for s, _ in quad.matrices}
            loaded = {r + s for r in range(0, made.rows, 2) for s in matrices}
            windows = {8 * n + k + v for n in range(2) for k in range(8) for v in range(ck + slab.spare)}
            assert windows <= {*range(8 * (1 + made.toeplitz.chunks))}
        assert read <= loaded <= {*range(slab.rows)}
        assert slab.rows % 2 == 0


@pytest.mark.parametrize(("cq", "ck", "padding"), SLABS)
def test_chunks_of_the_gradient_of_a_convolution(cq: int, ck: int, padding: str) -> None:
    for made in (one for one in slabs(cq, ck, padding) if isinstance(one, PlaneGradient)):
        gradient = made.weight_gradient
        for n in range(made.tile_keys // 8):
            touched = {(8 * n + k + made.slab.spare + v) // 8 for k in range(8) for v in range(ck)}
            first = n + gradient.first_chunk
            assert touched <= {*range(first, first + gradient.chunks)} <= {*range(made.slab.chunks)}
        blocks = {(u, d) for u, d, _, _ in gradient.sums}
        assert blocks >= set(itertools.product(range(gradient.shifts), range(gradient.chunks)))
        assert gradient.sets * gradient.shifts >= cq
        assert made.warps % gradient.sets == 0
        sums = 4 * made.warps * (64 + cq * ck)  # floats in the place of the buffers
        assert sums <= made.shared_bytes


@pytest.mark.parametrize(("cq", "ck", "padding"), SLABS)
def test_rows_of_a_matrix_lie_in_different_banks(cq: int, ck: int, padding: str) -> None:
    for made in slabs(cq, ck, padding):
        for pitch in (made.slab.row, made.tile_row if isinstance(made, PlaneGradient) else made.staged_row):
            assert pitch % 16 == 0
            assert len({row * pitch // 16 % 8 for row in range(8)}) == 8


def test_which_windows_fit_slabs() -> None:
    """Up to 17 columns, with those that come before the first tap."""
    for padding in KEY_PADDINGS:
        for ck in range(1, MAX_KERNEL + 1):
            roles = {made.role for made in slabs(3, ck, padding)}
            left, right = Spec((3, ck), 64, key_padding=padding).padding(ck)
            for role in ("convolution", "convolution_adjoint", "convolution_gradient"):
                spare = -(right if role.endswith("adjoint") else left) % 8
                assert (role in roles) == (ck + spare <= 17)


# Recipes.


VIEWS = {"view", "slice", "as_strided", "transpose", "unsqueeze", "alias", "detach", "_unsafe_view"}


class Dispatched(TorchDispatchMode):
    """Notes the names of PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "spec",
    [*PIPELINES, EVERYTHING, Spec(None, 64, mixed_heads=4, dynamic_ranks=(1, 1))],
    ids=lambda x: plan(x, "cpu").suffix,
)
def test_a_kernel_makes_the_gradients_of_weights(spec: Spec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is the last launch of a backward pass. No operation of PyTorch sums, rearranges or casts its results."""
    module, made = loaded(spec, tmp_path, monkeypatch), plan(spec, "sm_90a", "triton")
    with recorded(module, run=False) as launches, Dispatched() as dispatched:
        exercise(made, module, torch.device("cpu"), "backward")
    last = [launch.kernel.__name__ for launch in launches if "gradient_sums" in launch.kernel.__name__]
    assert last == [launches[-1].kernel.__name__]
    memory = {"empty", "new_empty", "new_zeros", "zeros", "zeros_like", "zero_"}
    assert dispatched.names - VIEWS - memory <= {"bmm", "baddbmm", "copy_"}


@pytest.mark.parametrize(
    "spec",
    [*PIPELINES, EVERYTHING, Spec(None, 64, mixed_heads=4, dynamic_ranks=(1, 1))],
    ids=lambda x: plan(x, "cpu").suffix,
)
def test_a_decode_step_is_launches_of_kernels(spec: Spec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No operation of PyTorch fills, sums, casts or copies anything; with or without lengths."""
    module, made = loaded(spec, tmp_path, monkeypatch), plan(spec, "sm_90a", "triton")
    with recorded(module, run=False) as launches, Dispatched() as dispatched:
        exercise(made, module, torch.device("cpu"), "decode")
    assert dispatched.names - VIEWS <= {"empty", "new_empty", "zeros", "zeros_like", "ones"}  # also of arguments
    kernels = [kernel.name for kernel in made.strip["decode"].kernels]
    assert {*kernels} == {launch.kernel.__name__ for launch in launches}
    assert len(launches) == 4 * len(kernels)


def test_a_decode_step_of_one_part_sums_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The product with values makes outputs."""
    spec = Spec(None, 64, mixed_heads=2)
    module, made = loaded(spec, tmp_path, monkeypatch), plan(spec, "sm_90a", "triton")
    *kernels, sums = (kernel.name for kernel in made.strip["decode"].kernels)
    for keys, expected in ((SPLIT, kernels), (SPLIT + 1, [*kernels, sums])):
        q, k, v = (torch.zeros(1, 2, n, 64, dtype=torch.bfloat16) for n in (1, keys, keys))
        with recorded(module, run=False) as launches:
            out, lse = module.decode(q, k, v, torch.zeros(1, 2, 2), 1.0)
        assert [launch.kernel.__name__ for launch in launches] == expected
        assert (out.shape, out.dtype, lse.shape) == (q.shape, q.dtype, q.shape[:3])


def test_what_calls_share_a_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calls with equal shapes, strides and alignment of all tensors; a dense tensor's strides say nothing more."""
    module = loaded(Spec(None, 64, mixed_heads=2), tmp_path, monkeypatch)
    recipes = module.Recipes()
    monkeypatch.setattr(recipes, "serves", lambda x: True)

    def function(call: Any, x: Tensor, y: Tensor | None, scale: float) -> tuple[Tensor, ...]:
        result = call.result(x.shape, x.dtype)
        call.run(torch.Tensor.copy_, result, x)
        call.run(torch.Tensor.mul_, result, scale)
        return (result,)

    memory = torch.arange(100.0)
    dense, other = memory[:16].view(4, 4), memory[16:32].view(4, 4)
    of_length_one = memory[32:36].view(1, 4)
    calls: list[tuple[int, Tensor, Tensor | None, float]] = [
        (0, dense, None, 2.0),
        (0, other, None, 2.0),
        (1, dense, None, 3.0),  # another number
        (2, dense, other, 2.0),
        (3, dense.mT, None, 2.0),  # other strides
        (4, memory[1:17].view(4, 4), None, 2.0),  # not aligned
        (4, memory[5:21].view(4, 4), None, 2.0),
        (5, memory[1:17].view(4, 4).mT, None, 2.0),
        (6, dense.double(), None, 2.0),
        (8, memory[32:64].view(4, 8)[:, :4], None, 2.0),
        (7, of_length_one, None, 2.0),
        (7, of_length_one.as_strided((1, 4), (77, 1)), None, 2.0),  # a stride that leads nowhere
    ]
    for _ in range(3):
        for _, x, y, scale in calls:
            (result,) = recipes.call(function, (x, y), (scale,))
            assert torch.equal(result, scale * x)
    assert len(recipes._recipes) == len({number for number, *_ in calls})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where tensors have no view of another shape. Some rows do not begin at multiples of 16 bytes."""
    call = loaded(Spec(None, 64, mixed_heads=2), tmp_path, monkeypatch).Call(torch.empty(0, dtype=dtype))
    memory = torch.randn(1000).to(dtype)
    for shape, strides, begin, rows in (
        ((2, 3, 4, 24), (400, 24, 80, 1), 8, (6, 4, 24)),
        ((1, 3, 4, 8), (5, 8, 24, 1), 0, (1, 12, 8)),
        ((2, 3, 4, 8), (400, 24, 80, 1), 7, (6, 4, 8)),
        ((2, 3, 4, 8), (400, 13, 80, 1), 8, (6, 4, 8)),
    ):
        x = memory.as_strided(shape, strides, begin)
        assert torch.equal(call.reshaped("rows", x, rows), x.reshape(rows))
    assert call.reshaped("rows", memory, (10, 100)).data_ptr() == memory.data_ptr()


def test_host_functions_record_no_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also outside of autograd's functions, which have turned gradients off."""
    module = loaded(Spec(None, 64, mixed_heads=2), tmp_path, monkeypatch)
    x = torch.ones(1, requires_grad=True)
    doubled = module._without_gradients(lambda x: 2 * x)
    assert not doubled(x).requires_grad
    with torch.no_grad():
        assert not doubled(x).requires_grad
    assert (2 * x).requires_grad


# Strips and planes.


def strips_of(module: ModuleType, batch: int, heads: int, n_q: int, n_k: int, planes: int, workspace: int) -> list[Any]:
    """Return the strips of a call without their memory. Check that a sequence's first strip has its last row."""
    division = module.LIMITS.divided(batch, heads, n_q, n_k, planes, workspace)
    nowhere = torch.device("meta")
    call = module.Call(torch.empty(0, device=nowhere))
    strips = [*module._strips(call, division, batch, heads, planes, torch.float16)]
    for _, of_sequence in itertools.groupby(strips, key=lambda strip: strip.b0):
        first, *others = of_sequence
        assert first.end == n_q > max((strip.end for strip in others), default=0)
        assert division.first_sees_all(n_k) == ((first.key0, first.keys) == (0, n_k))
        assert division.is_whole(n_k) == (not others and division.first_sees_all(n_k))
    return strips


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (250, 0), (90, 60)], ids=str)
@pytest.mark.parametrize(
    "stages",
    [{"kernel": None}, {"kernel": (6, 3)}, {"kernel": (10, 3), "post_kernel": (10, 3), "dropout": True}],
    ids=["no context", "context", "context and dropout"],
)
def test_strips_sum_what_they_share(
    stages: dict[str, Any], window: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels that add to gradients as told write each row and key once, after all strips that have it."""
    spec = Spec(**stages, head_dim=64, mixed_heads=16, causal=False, window=window)
    module = loaded(spec, tmp_path, monkeypatch)
    limits = module.LIMITS
    for n_q, n_k, elements in itertools.product((0, 1, 300, 1500), (0, 1, 450, 1500), (1, 2**17, 2**20)):
        division = module.Division(1, limits.spans(elements, n_q, n_k))
        spans = {span.first: (span.end, span.key0, span.keys) for span in division.spans if span.keys > 0}
        overlaps = division.overlaps(n_q, n_k)
        assert [*overlaps] == [*spans]
        first_row = min(spans, default=n_q)
        unwritten = {"rows": [*range(first_row, n_q)], "keys": [*range(limits.first_key(first_row, n_q, n_k), n_k)]}
        sums: dict[str, set[int]] = {"rows": set(), "keys": set()}
        for first, (end, key0, keys) in spans.items():
            _, seen = limits.keys(first, end, n_q, n_k)
            assert min(end + n_k - n_q + (n_k if spec.right is None else spec.right), n_k) <= key0 + keys <= key0 + seen
            overlap = overlaps[first]
            places = {
                "rows": (range(first, end), overlap.summed_q, overlap.complete_q),
                "keys": (range(key0, key0 + keys), overlap.summed_k, overlap.complete_k),
            }
            for kind, (owned, summed, complete) in places.items():
                for place in owned:
                    assert (place >= summed) == (place in sums[kind])
                    if place < complete:
                        sums[kind].add(place)
                    else:
                        unwritten[kind].remove(place)
        assert unwritten == {"rows": [], "keys": []}


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (250, 0), (90, 60)], ids=str)
def test_keys_of_blocks_of_rows(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`keys_of_blocks` counts all keys that rows of a block see, and fewer than 128 others."""
    spec = Spec(None, 64, mixed_heads=16, causal=False, window=window)
    limits = loaded(spec, tmp_path, monkeypatch).LIMITS
    for n_q, n_k, first, end in ((300, 450, 100, 300), (300, 40, 0, 300), (1, 1, 0, 1)):
        blocks = limits.keys_of_blocks(first, end, 32, n_q, n_k)
        for row, keys in zip(range(first, end, 32), blocks, strict=True):
            positions = range(row + n_k - n_q, min(row + 32, end) + n_k - n_q)
            begin = 0 if spec.left is None else positions[0] - spec.left
            stop = n_k if spec.right is None else positions[-1] + spec.right + 1
            seen = len({*range(begin, stop)} & {*range(n_k)})
            assert seen <= keys < seen + 128


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, None),
        ({"dynamic_ranks": (2, 0)}, None),
        ({"dynamic_ranks": (0, 2)}, 1024),
        ({"kernel": (6, 11), "scores": "s + bias[h, j]", "parameters": {"bias": "h,j"}}, 1024),
        ({"window": (50, -1), "causal": False}, None),
        ({"window": (50, -1)}, 1024),
    ],
    ids=str,
)
def test_most_rows_of_a_strip(options: dict[str, Any], rows: int | None) -> None:
    """Hidden keys of windows, and sums of blocks of rows for each key, do not grow with the workspace."""
    assert Limits.of(Spec(**{"kernel": None, **options}, head_dim=64, mixed_heads=16)).max_rows == rows


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("workspace", [1, 2**24, 2**30])
def test_strips_of_packed_documents_in_a_window(
    workspace: int, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows of planes hold as many keys as the strip's rows and the window have together, from whole vectors on."""
    spec = Spec((3, 4), 64, mixed_heads=2, causal=False, window=(60, 9), dtype=dtype, packed=True)
    module = loaded(spec, tmp_path, monkeypatch)
    left, right = spec.left, spec.right
    assert left is not None
    assert right is not None
    for places, max_k in ((128, 10), (256, 8192), (4096, 30000)):
        for strip in strips_of(module, 1, 16, places, max_k, 4, workspace):
            rows = strip.end - strip.first
            (pitch,) = {x.shape[2] for x in strip.planes}
            assert rows % 128 == strip.first % 128 == 0
            assert strip.keys == min(max_k, rows + left + right + 16 // spec.itemsize - 1)
            assert strip.keys <= pitch < strip.keys + 256


@pytest.mark.parametrize("cq", [1, 2, 6, MAX_KERNEL])
@pytest.mark.parametrize("post_cq", [1, 5, MAX_KERNEL])
def test_at_least_half_of_a_strip_is_no_context(cq: int, post_cq: int) -> None:
    spec = Spec((cq, 2), 64, post_kernel=(post_cq, 3))
    module = StripModule.of([StripPass(spec, "sm_90a", "forward")])
    assert module.limits.min_rows >= 2 * spec.context == 2 * (cq + post_cq - 2)
    assert module.limits.min_rows % module.limits.row_multiple == 0
    assert decode_rows(spec) >= spec.context + MAX_NEW_TOKENS


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("workspace", [1, 2**22, 2**24, 2**30])
@pytest.mark.parametrize("spec", [EVERYTHING, Spec(None, 64, mixed_heads=16)], ids=["everything", "mixing"])
def test_strips(spec: Spec, workspace: int, causal: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They have every row of every sequence once, its context, and the keys that some row sees, in the workspace."""
    spec = Spec.from_dict(spec.to_dict() | {"causal": causal})
    module = loaded(spec, tmp_path, monkeypatch)
    for sizes, count in itertools.product(
        ((1, 16, 1, 1), (3, 16, 200, 300), (2, 16, 700, 690), (1, 32, 1500, 40)), (1, 5)
    ):
        batch, heads, n_q, n_k = sizes
        owned = []
        strips = strips_of(module, *sizes, count, workspace)
        slots = max(planes[0].shape[0] for *_, planes in strips)
        for b0, b1, begin, end, first, key0, keys, planes in strips:
            assert key0 == 0
            owned += itertools.product(range(b0, b1), range(begin, end))
            assert first == max(0, begin - spec.context)
            seen = end + n_k - n_q if causal else n_k
            assert max(0, min(n_k, seen)) <= max(0, keys) <= max(0, min(n_k, -(-seen // 128) * 128))
            pitches = {(x.shape[0], x.shape[1]) for x in planes}
            assert (len(planes), pitches) == (count, {((b1 - b0) * heads, end - first)})
            (pitch,) = {x.shape[2] for x in planes}
            assert keys <= pitch < max(keys, 1) + 256
            taken = sum(x.numel() * x.element_size() for x in planes)
            if first > 0:  # no whole tile of rows more would fit
                assert slots * (end - first + 128) * pitch * 2 * count > workspace
            assert taken <= workspace or (b1 == b0 + 1 and end - first <= 128)
            assert first == 0 or (end - first) % 128 == 0
        assert sorted(owned) == [*itertools.product(range(batch), range(n_q))]
        assert len(owned) > 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("window", "dropout"),
    [((0, 0), False), ((50, -1), False), ((300, 20), False), ((5000, 5000), False), ((101, 27), True)],
    ids=str,
)
@pytest.mark.parametrize("workspace", [1, 2**24, 2**30])
def test_strips_in_a_window(
    workspace: int,
    window: tuple[int, int],
    dropout: bool,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """They have the keys that some row sees, from the first of them on, and few besides.

    Dropout draws for groups of keys, with one of which they begin.
    """
    spec = Spec.from_dict(EVERYTHING.to_dict() | {"causal": causal, "window": window, "dropout": dropout})
    group = DROPOUT_GROUP if dropout else 1
    module = loaded(spec, tmp_path, monkeypatch)
    for batch, heads, n_q, n_k in ((1, 16, 1, 1), (3, 16, 200, 300), (2, 16, 700, 690), (1, 32, 1500, 40)):
        owned = []
        strips = strips_of(module, batch, heads, n_q, n_k, 5, workspace)
        rows = max(end - first for _, _, _, end, first, *_ in strips)
        for b0, b1, begin, end, first, key0, keys, planes in strips:
            owned += itertools.product(range(b0, b1), range(begin, end))
            assert first == max(0, begin - spec.context)
            positions = range(first + n_k - n_q, end + n_k - n_q)
            seen = {
                *range(max(0, positions[0] - window[0]), n_k if spec.right is None else positions[-1] + spec.right + 1)
            } & {*range(n_k)}
            if not seen:
                assert keys <= 0
                continue
            assert key0 == min(seen) // group * group
            assert max(seen) < key0 + keys <= min(n_k, key0 + -(-(max(seen) + 1 - key0) // 128) * 128)
            (pitch,) = {x.shape[2] for x in planes}
            assert keys <= pitch
            if spec.right is not None:
                assert rows <= 1024
                assert pitch < rows + window[0] + spec.right + group - 1 + 256
            taken = sum(x.numel() * x.element_size() for x in planes)
            assert taken <= workspace or (b1 == b0 + 1 and end - first <= 128)
        assert sorted(owned) == [*itertools.product(range(batch), range(n_q))]


@pytest.mark.parametrize("window", [(1000, -1), (500, 400)], ids=str)
def test_planes_in_a_window_do_not_grow_with_the_sequence(
    window: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the scores of all strips are at most in proportion to its length."""
    spec = Spec.from_dict(EVERYTHING.to_dict() | {"window": window, "causal": window[1] < 0})
    module = loaded(spec, tmp_path, monkeypatch)
    sizes, scores = [], []
    for n in (2**13, 2**15, 2**17):
        strips = strips_of(module, 1, 16, n, n, 5, 2**30)
        sizes.append(max(x.numel() for *_, planes in strips for x in planes))
        scores.append(sum((end - first) * keys for _, _, _, end, first, _, keys, _ in strips) / n)
    assert len({*sizes}) == 1
    assert max(scores) <= 1024 / (1024 - spec.context) * (1024 + 1000 + 128)


@every_pipeline
def test_planes_are_those_of_the_host_code(spec: Spec) -> None:
    """As many are asked for as are named, and each is used."""
    passes = plan(spec, "sm_90a", "triton").strip
    tree = ast.parse(render_module(StripModule.of(passes.values())))
    hosts = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, one in passes.items():
        nodes = [*ast.walk(hosts[f"_{name}"])]
        tuples = [tuple(map(ast.unparse, x.elts)) for x in nodes if isinstance(x, ast.Tuple)]
        assert tuples.count(one.planes) == 1
        read = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
        assert read >= {*one.planes}
        calls = [ast.unparse(x) for x in nodes if isinstance(x, ast.Call)]
        count = len(one.planes)
        planes = f"_strips(call, division, batch, n_heads, {count}, torch.float16)"
        assert (f"range({count})" if name == "decode" else planes) in calls


def test_each_pass_has_its_own_workspace() -> None:
    passes = [StripPass(EVERYTHING, "sm_90a", name, workspace_bytes=2**20 + i) for i, name in enumerate(PASSES)]
    source = render_module(StripModule.of(passes))
    for i, name in enumerate(PASSES):
        host = next(x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == f"_{name}")
        assert str(2**20 + i) in ast.unparse(host)


# Plans.


@every_pipeline
def test_round_trip(spec: Spec) -> None:
    for target in ("sm_90a", "sm_80", "generic"):
        made = plan(spec, target)
        again = Plan.from_json(made.to_json())
        assert again == made
        assert hash(again) == hash(made)
        assert set(again.strip) == {*PASSES}


@every_pipeline
def test_auto_takes_cuda_and_says_why(spec: Spec) -> None:
    for target in ("sm_90a", "sm_80"):
        made = plan(spec, target)
        assert made.backend == "cuda"
        for one in made.passes:
            if spec == TOO_MANY:  # what products alone make
                assert one.reason == "1.00 of triton's time, by planned work"
            else:
                ratio = CUDA_OVER_TRITON[one.plan.pass_name]
                assert one.reason == f"{ratio:.2f} of triton's time, or less, as measured for other stages"
    made = plan(spec, "generic")
    assert made.backend == "triton"
    assert made.reason.startswith("not cuda: target: got 'generic'; the cuda backend needs mma instructions")


def test_auto_takes_triton_for_passes_in_which_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little, for both launch as much; and the backward pass takes the forward pass along."""
    ratios = {"forward": 1.0, "backward": 1.1, "decode": 0.5}
    monkeypatch.setattr("mtagen.planner.strip.passes.CUDA_OVER_TRITON", ratios)
    made = plan(EVERYTHING, "sm_90a")
    assert made.served_by("cuda") == ("decode",)
    assert made.served_by("triton") == ("forward", "backward")
    assert "cuda would round scores otherwise than the backward pass" in made.passes[0].reason
    assert "backward: cuda takes 1.10 of its time" in made.reason
    assert Plan.from_json(made.to_json()) == made


def test_a_table_counts_for_its_stages_only() -> None:
    """It survives a file, says more than what is known of other stages, and nothing of a convolution alone."""
    other = Spec.from_dict(EVERYTHING.to_dict() | {"post_mixed_heads": 1})
    table = Table("measured here", cuda_over_triton={"forward": {Shape.of(EVERYTHING): 1.3}})
    tables = [Table.from_dict(table.to_dict(), table.source)]
    assert tables == [table]
    reason = plan(EVERYTHING, "sm_90a", tables=tables).passes[0].reason  # of the backward pass CUDA's is much faster
    assert reason.startswith("1.30 of triton's time, measured here; triton would round scores otherwise")
    assert plan(other, "sm_90a", tables=tables) == plan(other, "sm_90a", tables=[])
    alone = Spec(EVERYTHING.kernel, EVERYTHING.head_dim)
    assert plan(alone, "sm_90a", tables=tables) == plan(alone, "sm_90a", tables=[])


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_backend_that_is_not_installed(backend: str) -> None:
    """Triton's kernels can do without CUDA's, and not the other way round."""
    if backend == "triton":
        assert plan(EVERYTHING, "sm_90a", available=[backend]).backend == backend
    else:
        with pytest.raises(PlanError, match="backend: got 'cuda'; needs Triton's kernels too, and Triton is not inst"):
            plan(EVERYTHING, "sm_90a", available=[backend])


@every_pipeline
def test_cuda_makes_all_kernels_but_a_few(spec: Spec) -> None:
    """Triton makes kernels that mix too many heads, and the sums of gradients."""
    for name in PASSES:
        made = StripPass(spec, "sm_90a", name, "cuda")
        roles = [kernel.role for kernel in made.kernels]
        if made.fused:
            around = {"forward": ["mixed_outputs"], "backward": ["mixed_outputs_backward", "side_by_side_backward"]}
            of_cuda = [kernel.role for source in made.cuda.values() for kernel in source.kernels]
            assert roles == [*of_cuda, "side_by_side", *around[name]]
            continue
        # Beside Triton's kernels cuBLAS multiplies planes, and hidden gradients of shares need not be zeros.
        products = contractions.contractions(name, spec, "sm_90a")
        others = {"grad_shares", *(kernel.role for kernel in products)} & {*roles}
        assert {*roles} == {kernel.role for kernel in StripPass(spec, "sm_90a", name).kernels} | others
        of_rows = ("softmax", "mix", "probabilities", "statistics")
        mixtures = {role for role in roles if spec == TOO_MANY and any(kind in role for kind in of_rows)}
        assert {*roles} - {*made.cuda} - SUMS == mixtures


@pytest.mark.parametrize(
    ("spec", "roles"),
    [
        # Scores count in some rows of results and not in others.
        (Spec.from_dict(EVERYTHING.to_dict() | {"mask": "output"}), {"softmax", "post_mix"}),
        (Spec((3, 3), 72, mixed_heads=2), {"convolution", "softmax"}),  # an mma takes 16 columns
        (Spec((3, 3), 64, mixed_heads=32), {"scores", "convolution"}),
        (
            Spec(None, 64, mixed_heads=2, post_mixed_heads=20, post_kernel=(2, 2)),
            {"scores", "softmax", "post_convolution"},
        ),
        (Spec(None, 64, mixed_heads=4, post_mixed_heads=12), {"scores", "softmax"}),
        (Spec(None, 64, mixed_heads=5, post_mixed_heads=6), {"scores"}),  # of 30 heads all mix with each other
        (Spec((3, 3), 64, post_kernel=(2, 64)), {"scores", "convolution", "softmax"}),  # a window is too wide
    ],
    ids=lambda value: str(value) if isinstance(value, Spec) else "+".join(sorted(value)),
)
def test_which_kernels_are_cudas(spec: Spec, roles: set[str]) -> None:
    assert {*StripPass(spec, "sm_90a", "forward", "cuda").cuda} == roles | (
        {"outputs"} if spec.head_dim == 64 else set()
    )
    assert {*StripPass(spec, "sm_80", "forward", "cuda").cuda} == roles
    assert {*StripPass(spec, "sm_90a", "forward").cuda} == set()


@pytest.mark.parametrize(
    ("spec", "target", "width", "fuses_backward"),
    [
        (Spec((6, 11), 64, post_mixed_heads=2), "sm_90a", 128, True),
        (Spec(None, 32, post_mixed_heads=4, causal=False, logits="s / 2"), "sm_90a", 128, True),
        (Spec((6, 11), 128, post_mixed_heads=2), "sm_90a", 256, False),  # dK and dV do not fit registers
        (Spec(None, 64, post_mixed_heads=4, causal=False), "sm_90a", 256, False),
        (Spec((6, 11), 64, post_mixed_heads=2, packed=True), "sm_90a", 128, False),
        (Spec((6, 11), 64, post_mixed_heads=2, sink=True), "sm_90a", 128, False),
        (Spec((6, 11), 64, post_mixed_heads=2, logits="a[h] * s", parameters={"a": "h"}), "sm_90a", 128, False),
        (Spec((3, 3), 64, 16, post_mixed_heads=1, dtype="fp16"), "sm_80", 16, False),
        (Spec((6, 11), 128, post_mixed_heads=4), "sm_90a", None, False),  # 512 columns are too many
        (Spec((6, 11), 128, post_mixed_heads=2), "sm_86", None, False),  # where products are slow beside memory
        (Spec((6, 11), 64, mixed_heads=2, post_mixed_heads=2), "sm_90a", None, False),
        (Spec((6, 11), 64, post_kernel=(3, 3), post_mixed_heads=2), "sm_90a", None, False),
        (Spec((6, 11), 64, post_kernel=(3, 3)), "sm_90a", None, False),
        (Spec((6, 11), 72, post_mixed_heads=2), "sm_90a", None, False),  # an mma takes 16 columns
    ],
    ids=str,
)
def test_small_groups_have_their_values_side_by_side(
    spec: Spec, target: str, width: int | None, fuses_backward: bool
) -> None:
    """In training by CUDA, where the fused kernels take so long values and their model says that they are faster."""
    made = {(name, backend): StripPass(spec, target, name, backend) for name in PASSES for backend in GENERATED}
    forward, backward = (made.pop((name, "cuda")).fused for name in ("forward", "backward"))
    assert (forward is not None) == bool(width)
    assert (backward is not None) == fuses_backward
    assert not any(one.fused for one in made.values())
    assert plan(spec, target, "cuda").unmixed_columns == (width if fuses_backward else 0)
    if width:
        of_values = replace(spec, value_head_dim=width, post_mixed_heads=None)
        assert {one.spec for one in (forward, backward) if one} == {of_values}
        text = " ".join(str(plan(spec, target, "cuda")).split())
        values = f"values of each head's group side by side, {width} columns"
        assert f"{values}, in one fused kernel; then mixed" in text
        assert (f"{values}, whose outputs the forward pass has kept" in text) == fuses_backward


@pytest.mark.parametrize(
    ("stages", "forward", "backward"),
    [
        ({"mixed_heads": 16}, "softmax", "softmax_backward"),
        ({"mixed_heads": 16, "post_mixed_heads": 16}, "softmax", "softmax_backward"),
        ({"post_mixed_heads": 2}, "softmax; takes mixed shares, so that values do not lie", "softmax_backward"),
        ({"mixed_heads": 48, "post_mixed_heads": 36}, "post_mix", "post_mix_backward"),
        ({"post_kernel": (2, 3), "post_mixed_heads": 2}, "post_mix", "post_mix_backward"),
        ({"mixed_heads": 2, "post_kernel": (2, 3)}, "post_convolution", "grad_shares and post_convolution"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", GENERATED)
def test_what_drops(backend: str, stages: dict[str, Any], forward: str, backward: str) -> None:
    """The last kernel that writes shares, and the first that has their gradients: no others take a seed."""
    spec = Spec(None, 64, dropout=True, **stages)
    text = " ".join(str(plan(spec, "sm_90a", backend)).split())
    for name, told in (("forward", forward), ("backward", backward)):
        one = StripPass(spec, "sm_90a", name, backend)
        drops = {kernel.role for kernel in one.kernels if any(x.name.startswith("seed") for x in kernel.arguments)}
        assert drops == {*told.partition(";")[0].split(" and ")}
        assert f"dropout in {told if backend == 'cuda' else told.partition(';')[0]}" in text


@pytest.mark.parametrize(
    ("spec", "roles"),
    [
        # An mma takes 16 columns of values.
        (
            Spec((3, 3), 64, 24, mixed_heads=2),
            {"decode_scores", "decode_convolution", "decode_statistics", "decode_softmax"},
        ),
        (
            Spec.from_dict(EVERYTHING.to_dict() | {"mask": "output"}),
            {"decode_statistics", "decode_softmax", "decode_post_mix", "decode_values"},
        ),
        (
            Spec((3, 3), 64, post_kernel=(2, 64)),  # a window is too wide
            {"decode_scores", "decode_convolution", "decode_statistics", "decode_softmax", "decode_values"},
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Spec) else "+".join(sorted(value)),
)
def test_which_kernels_of_a_decode_step_are_cudas(spec: Spec, roles: set[str]) -> None:
    assert {*StripPass(spec, "sm_90a", "decode", "cuda").cuda} == roles


def test_a_decode_step_makes_rows_that_are_needed_only() -> None:
    """Of 5 + 4 rows before the new tokens, the last 4 are context of the convolution after the softmax."""
    grids = {
        role: source.kernel.grid for role, source in StripPass(EVERYTHING, "sm_90a", "decode", "cuda").cuda.items()
    }
    sizes = {KEYS: 1, SLOTS: 1, B0: 0, B1: 1, N_HEADS: 16}
    for n_new in (1, 8):
        rows = {role: grid[0].subs(sizes | {COUNT: 9 + n_new}) for role, grid in grids.items()}
        assert rows["decode_convolution"] == -(-(4 + n_new) // 6)
        assert rows["decode_statistics"] == rows["decode_softmax"] == 4 + n_new
        assert rows["decode_post_convolution"] == -(-n_new // 2)
        assert rows["decode_post_mix"] == n_new


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_decode_step_divides_rows_into_sections(backend: str) -> None:
    """A row of 4 sections and a key has 5 programs."""
    kernels = {kernel.role: kernel for kernel in StripPass(EVERYTHING, "sm_90a", "decode", backend).kernels}
    sizes = {COUNT: 10, SLOTS: 16, B0: 0, B1: 1, N_HEADS: 16}
    for role in ("decode_statistics", "decode_softmax", "decode_post_mix"):
        (programs,) = kernels[role].grid
        one, five = (programs.subs(sizes | {KEYS: keys}) for keys in (SECTION, 4 * SECTION + 1))
        assert five == 5 * one
        if backend == "triton":
            assert SECTION % dict(kernels[role].constants)["BLOCK_N"] == 0


def test_the_softmax_of_a_decode_step_begins_where_its_sums_end() -> None:
    made = StripPass(EVERYTHING, "sm_90a", "decode", "cuda").cuda.values()
    reversed_roles = {source.role for source in made if "gridDim.x - 1 - blockIdx.x" in cuda.render(source)}
    assert reversed_roles == {"decode_softmax"}


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize(
    ("spec", "target", "message"),
    [
        (Spec(None, 64, mixed_heads=2, dtype="fp32"), "sm_90a", "dtype: got 'fp32'; the cuda backend supports 16-b"),
        (Spec(None, 64, mixed_heads=2), "generic", "target: got 'generic'; the cuda backend needs mma instructions"),
        (Spec((3, 3), 64, 24, mixed_heads=32, mask="output"), "sm_90a", "stages: got .*; cuda mixes up to 16 heads, "),
    ],
    ids=str,
)
def test_cuda_says_what_it_cannot_do(pass_name: str, spec: Spec, target: str, message: str) -> None:
    for refused in (
        lambda: candidates("cuda", pass_name, spec, get_target(target)),
        lambda: plan(spec, target, "cuda"),
    ):
        with pytest.raises(PlanError, match=message):
            refused()


def test_the_table_of_a_plan_shows_stages_planes_and_kernels() -> None:
    text = " ".join(str(plan(EVERYTHING, "sm_90a", "triton")).split())
    for piece in (
        "convolution before the softmax 6 x 11, 5 keys left, 5 right",
        "mixture before the softmax groups of 16 heads",
        "convolution after the softmax 5 x 8, 3 keys left, 4 right",
        "mixture after the softmax groups of 16 heads",
        "forward halo rows 9 + 0, keys 8 + 9",
        "planes scores, convolved, convolved_shares workspace at most about 1024 MiB",
        "planes scores, convolved, grad_shares, probabilities, shares",
        "post_convolution_adjoint BLOCK_M 128",
        "4 warps decode planes scores, convolved, convolved_shares workspace",
    ):
        assert piece in text


def test_the_table_of_a_plan_shows_which_kernels_are_cudas() -> None:
    lines = [" ".join(line.split()) for line in str(plan(EVERYTHING, "sm_90a")).splitlines()]
    for piece in (
        "scores CUDA, tiles of 128 rows and 128 keys, 10 warps",
        "softmax CUDA, 8 warps, 16 heads of a row",
        "convolution CUDA, tiles of 64 rows and 128 keys, 4 warps, ",
        "post_convolution_gradient CUDA, tiles of 64 rows and 64 keys, 4 warps, ",
        "decode_values CUDA, blocks of 16 rows and 16 keys, 4 warps, rings of 4 blocks",
    ):
        assert any(line.startswith(piece) for line in lines), piece


@pytest.mark.parametrize("target", ["sm_90a", "generic"])
def test_fp64_is_refused(target: str) -> None:
    for backend in ("triton", "auto"):
        with pytest.raises(PlanError, match=r"dtype: got 'fp64'; \w+ has no kernels for this dtype; legal: "):
            plan(Spec(None, 64, dtype="fp64", mixed_heads=2), target, backend)


# Forms of kernels.

MIXED = Spec(None, 128, mixed_heads=16, post_mixed_heads=16)
LAYER = Spec((6, 11), 128, mixed_heads=16, post_kernel=(6, 11), post_mixed_heads=16)
PAIRS = Spec((6, 11), 128, post_mixed_heads=2)
# Microseconds on an H200, 16 heads, N = 8192, causal, of kernels in some forms (benchmarks/notes/strips.md).
MEASURED = {
    (MIXED, "forward", "softmax"): {
        Form(8, 2): 806,
        Form(6, 2): 813,
        Form(5, 3): 836,
        Form(12, 1): 1036,
        Form(16, 1): 1061,
        Form(8, 1): 1062,
    },
    (MIXED, "backward", "softmax_backward"): {Form(8, 1): 1726, Form(4, 4): 1813},
    (PAIRS, "backward", "softmax_backward"): {Form(8, 1): 1738, Form(4, 4): 1790},
    (LAYER, "backward", "probabilities"): {Form(8, 3): 659},
    (LAYER, "backward", "post_mix_backward"): {Form(8, 2): 1317},
    (LAYER, "forward", "post_mix"): {Form(8, 3): 635},
    (MIXED, "forward", "scores"): {
        Form(keys=128, walk=512): 443,
        Form(keys=128, walk=1024): 457,
        Form(keys=128, walk=256): 482,
    },
    (MIXED, "backward", "grad_shares"): {Form(keys=128, walk=512): 455},
    (LAYER, "forward", "convolution"): {Form(4, keys=128, walk=512): 766},
    (LAYER, "backward", "convolution_adjoint"): {Form(4, keys=128, walk=512): 738},
    (LAYER, "backward", "convolution_gradient"): {Form(4, keys=64): 926},
}
# Forms of kernels of which not all of a pass was timed, the fastest first.
ORDERS = {
    "convolution": (Form(4, keys=128, walk=512), Form(8, keys=128, walk=512), Form(4, keys=64, walk=512)),
    "convolution_adjoint": (Form(4, keys=128, walk=512), Form(4, keys=128, walk=2048)),
    "convolution_gradient": (Form(4, keys=64), Form(4, keys=128)),
}


@pytest.mark.parametrize(("spec", "name", "role"), MEASURED, ids=lambda value: "" if isinstance(value, Spec) else value)
def test_the_cost_model_knows_what_was_measured(spec: Spec, name: str, role: str) -> None:
    """Within a fifth; and it prefers the form that was the fastest to all others."""
    source, times = StripPass(spec, "sm_90a", name, "cuda").cuda[role], MEASURED[spec, name, role]
    fastest = min(times, key=times.__getitem__)
    assert source.form == fastest
    costs = {form: replace(source, form=form).cost for form in times}
    assert min(costs, key=costs.__getitem__) == fastest
    target = get_target("sm_90a")
    cycles_per_us = 1e3 * target.dram_gbps / target.dram_bytes_per_cycle  # of all multiprocessors
    for form, cost in costs.items():
        assert cost * 16 * 8192**2 / 2 / cycles_per_us == pytest.approx(times[form], rel=0.21), form


@pytest.mark.parametrize(("role", "forms"), ORDERS.items(), ids=ORDERS)
def test_the_cost_model_orders_forms_as_measured(role: str, forms: tuple[Form, ...]) -> None:
    source = StripPass(LAYER, "sm_90a", "backward", "cuda").cuda[role]
    costs = [replace(source, form=form).cost for form in forms]
    assert costs == sorted(costs)


def test_rows_of_one_cta_leave_gaps() -> None:
    """As measured: those that wait for each other between two passes take a fifth longer alone."""
    source = StripPass(MIXED, "sm_90a", "forward", "cuda").cuda["softmax"]
    costs = [(one.form.ctas == 1, one.cost) for one in source.variants]
    assert min(cost for alone, cost in costs if alone) > 1.1 * max(cost for alone, cost in costs if not alone)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80", "sm_86"])
def test_forms_are_decided_one_by_one(target: str) -> None:
    for one in plan(LAYER, target, "cuda", tables=()).passes:
        made, decisions = one.plan, one.plan.decisions()
        assert bool(decisions) == (made.pass_name != "decode")
        for key, fields in decisions.items():
            rivals = made.alternatives(key)
            assert rivals[0] == made
            assert len({*rivals}) == len(rivals) > 1
            costs = [rival.decision_cost(key) for rival in rivals]
            assert costs[0] > 0
            assert costs == sorted(costs)
            for rival, cost in zip(rivals, costs, strict=True):
                assert {**rival.decisions(), key: fields} == decisions
                assert made.decided(key, rival.decisions()[key]) == rival
                assert rival.decided(key, fields) == made
                assert rival.cost - made.cost == pytest.approx(cost - costs[0])
            for wrong in ({**fields, "colour": 3}, {}):
                with pytest.raises(PlanError, match=f"{key}: got .* is no form of this kernel on {target}; legal: "):
                    made.decided(key, wrong)


def test_passes_share_the_form_of_a_kernel_that_both_have() -> None:
    base = plan(LAYER, "sm_90a", tables=())
    key = "strip convolution cq6 ck11 bf16"
    other = base["forward"].alternatives(key)[-1].decisions()[key]
    made = base.decided(key, other)
    assert made["forward"].decisions()[key] == made["backward"].decisions()[key] == other != base["forward"].decisions()
    assert Plan.from_json(made.to_json()) == made != base
    module = StripModule.of(made.strip.values())
    forward, backward = (made.strip[name].cuda["convolution"] for name in ("forward", "backward"))
    assert forward == backward == module.cuda["convolution"] != base.strip["forward"].cuda["convolution"]
    table = Table(TUNED, {key: other})
    assert plan(LAYER, "sm_90a", tables=(table,)).to_dict()["passes"]["backward"]["decisions"][key] == {
        "fields": other,
        "source": TUNED,
    }


def test_sums_of_gradients_have_room_for_the_smallest_tile() -> None:
    """Both convolutions may have tiles of their own."""
    base = StripPass(LAYER, "sm_90a", "backward", "cuda")
    assert StripModule.of([base]).gradient_chunk == 64
    for chunk, *names in ((64, "convolution"), (128, "convolution", "post_convolution")):
        made = base
        for name in names:
            made = made.decided(f"strip {name}_gradient cq6 ck11 bf16", {"warps": 4, "keys": 128})
        assert StripModule.of([made]).gradient_chunk == chunk


@pytest.mark.parametrize("name", PASSES)
def test_memory_bounds_the_cost(name: str) -> None:
    """Of Triton's kernels and products, that is all of the model."""
    costs = [StripPass(LAYER, "sm_90a", name, backend).cost for backend in GENERATED]
    assert costs[0] > costs[1] > 0


def test_triton_has_nothing_to_decide() -> None:
    made = StripPass(EVERYTHING, "sm_90a", "forward")
    assert not made.decisions()
    for ask in (made.alternatives, made.decision_cost, lambda key: made.decided(key, {})):
        with pytest.raises(PlanError, match="decision: got 'colour'; is no decision of the forward pass by triton"):
            ask("colour")


def test_kernels_of_packed_documents_know_the_order_of_a_record() -> None:
    header = Path(mtagen.__file__).parent / "templates/cuda/strip_packed.cuh"
    assert f"struct Record {{\n    int {', '.join(RECORD)};" in header.read_text(encoding="utf-8")
