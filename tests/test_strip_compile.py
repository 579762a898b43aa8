"""The kernels of the lowering "strip" compile with no GPU: on tensor cores, within shared memory, with little stack."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from compilers import OLD_COMPILER_STACK

from mtagen.codegen import cuda
from mtagen.errors import PlanError
from mtagen.planner import TARGETS, get_target, plan
from mtagen.planner.passes import passes_of
from mtagen.planner.strip.contractions import ContractionKernel, contractions
from mtagen.planner.strip.kernels import SUMS
from mtagen.planner.strip.passes import StripPass
from mtagen.planner.strip.products import WarpgroupProduct
from mtagen.planner.strip.rows import RowKernel
from mtagen.planner.strip.source import StripSource
from mtagen.planner.strip.stages import Stages
from mtagen.runtime.nvrtc import compile_cubin
from mtagen.runtime.offline import Usage, compile_offline, usage_of_cubins
from mtagen.spec import Spec

EVERYTHING = {"kernel": (6, 11), "mixed_heads": 16, "post_kernel": (6, 11), "post_mixed_heads": 16}
CONVOLVED = {"kernel": (6, 11), "post_kernel": (6, 11)}  # gradients of shares are asked for where they are hidden
MIXED = {"kernel": None, "mixed_heads": 16, "post_mixed_heads": 16}
TEN_HEADS = {"kernel": None, "mixed_heads": 10, "post_mixed_heads": 10}
# Bytes of stack of a thread, by role: what does not fit registers. All other kernels keep to theirs.
HOPPER_STACK: dict[str, int] = {}
TEN_HEADS_STACK = {"softmax_backward": 240}
FUNCTIONS_STACK = {"softmax_backward": 16}
PARAMETERS_STACK = {"softmax": 64, "softmax_backward": 48}
CUDA_STACK = 96  # of CUDA's kernels, whatever their role
WHOLE = ("sm_80", "sm_90a")  # targets on which all stages are compiled; on others the mixtures alone
CUDA_CASES: list[Any] = [
    *((name, EVERYTHING if name in WHOLE else MIXED) for name, target in TARGETS.items() if "mma" in target.matrix),
    pytest.param("sm_89", EVERYTHING, marks=pytest.mark.sweep),  # the machine code of sm_80
    pytest.param("sm_90a", EVERYTHING | {"causal": False, "dtype": "fp16"}, marks=pytest.mark.sweep),
    ("sm_90a", MIXED),
    ("sm_90a", {"kernel": None, "mixed_heads": 16}),
    ("sm_90a", TEN_HEADS | {"dtype": "fp16"}),
    pytest.param("sm_90a", {"kernel": (16, 16), "post_kernel": (3, 3), "post_mixed_heads": 2}, marks=pytest.mark.sweep),
    pytest.param("sm_90a", EVERYTHING | {"window": (1023, -1)}, marks=pytest.mark.sweep),
    ("sm_80", CONVOLVED | {"window": (1023, 1023), "causal": False}),
    ("sm_90a", CONVOLVED | {"window": (1023, -1), "packed": True}),
]
CONTRACTIONS = {"outputs", "grad_queries", "grad_keys", "grad_values"}  # of packed documents, which Triton has alone
CONTRACTION_STACK = 96
PRODUCTS = ("scores", "grad_shares", "decode_scores")  # the kernels whose registers depend on the head dim most


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def compiled(spec: Spec, target: str, *parts: str) -> dict[str, Usage]:
    """What each kernel uses, by role; of some, if parts of names are given."""
    made = plan(spec, target, "triton")
    roles = {kernel.name: kernel.role for one in made.strip.values() for kernel in one.kernels}
    used: dict[str, Usage] = {}
    for part in parts or ("",):
        used |= {roles[name]: usage for name, usage in compile_offline(made, part).items()}
    assert parts or used.keys() == {*roles.values()}
    return used


def assert_fits(used: dict[str, Usage], target: str, stack: dict[str, int]) -> None:
    for role, usage in used.items():
        assert usage.shared <= get_target(target).shared_per_block, role
        assert usage.stack <= stack.get(role, 0) + OLD_COMPILER_STACK, f"{role} keeps {usage.stack} bytes on the stack"
        assert re.search(r"\bHG?MMA", usage.assembly) or role in ("probabilities", *SUMS), role


def test_hopper() -> None:
    """Products are of warpgroups, and their operands come by TMA."""
    used = compiled(Spec(head_dim=64, **EVERYTHING), "sm_90a")
    used |= compiled(Spec(head_dim=64, **CONVOLVED), "sm_90a", "grad_shares")
    assert_fits(used, "sm_90a", HOPPER_STACK)
    for role in ("scores", "grad_shares"):
        assert re.search(r"\bHGMMA", used[role].assembly), role
        assert re.search(r"\bUTMALDG", used[role].assembly), role
    for role in ("convolution", "post_convolution", "post_convolution_adjoint"):
        assert re.search(r"\bUTMALDG", used[role].assembly), role


def test_hopper_with_functions_of_scores() -> None:
    """Products apply a function to tiles, and multiply tiles of a plane by its slope; rows apply one, too."""
    functions = {"scores": "3 * tanh(s / 3)", "convolved": "s * log(i + 2) / 4", "logits": "50 * tanh(s / 50)"}
    spec = Spec(head_dim=128, **EVERYTHING, **functions)
    used = compiled(spec, "sm_90a", "strip_scores", "softmax", "probabilities")
    assert_fits(used, "sm_90a", FUNCTIONS_STACK)


def test_hopper_with_parameters() -> None:
    """Each function reads numbers of heads, a table and tokens, whose gradients are summed."""
    text = "s * t[h] + table[h, 1] + table[h, max(0, min(64, i - j))] + u[b, h, i] - u[b, h, j]"
    parameters = {"t": "h", "table": "h,65", "u": "b,h,j"}
    spec = Spec(head_dim=128, **EVERYTHING, scores=text, convolved=text, parameters=parameters)
    used = compiled(spec, "sm_90a", "strip_scores", "strip_softmax")
    assert_fits(used, "sm_90a", PARAMETERS_STACK)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_steps_read_pages(target: str) -> None:
    """CUDA's kernels; test_offline compiles Triton's."""
    decode = plan(Spec(head_dim=64, page_size=16, **CONVOLVED), target, "cuda").strip["decode"]
    for role in ("decode_scores", "decode_values"):
        source = decode.cuda[role]
        ((_, used),) = usage_of_cubins(compile_cubin(cuda.render(source), target, source.name)).items()
        assert used.stack == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_chunks_read_pages(target: str) -> None:
    source = (
        plan(Spec(head_dim=64, page_size=16, packed=True, **CONVOLVED), target, "cuda").strip["forward"].cuda["scores"]
    )
    ((_, used),) = usage_of_cubins(compile_cubin(cuda.render(source), target, source.name)).items()
    assert used.stack == 0


def test_hopper_with_wide_heads() -> None:
    """The kernels that hold vectors of queries, keys or values; the others are the same."""
    used = compiled(Spec(head_dim=128, **CONVOLVED), "sm_90a", "_scores_", "grad_shares", "decode_values")
    assert used.keys() == {*PRODUCTS, "decode_values"}
    assert_fits(used, "sm_90a", HOPPER_STACK)


@pytest.mark.sweep
def test_hopper_in_a_window() -> None:
    """The edges of a window cost no stack."""
    assert_fits(compiled(Spec(head_dim=64, window=(1023, -1), **EVERYTHING), "sm_90a"), "sm_90a", HOPPER_STACK)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_hopper_with_a_mask_in_tables(packed: bool) -> None:
    mask = {"causal": False, "visible": "j < lengths[b]", "parameters": {"lengths": "b"}}
    parts = ("strip_scores", "_convolution_", "softmax", "post_mix")  # the kernels that read tables
    used = compiled(Spec(head_dim=64, packed=packed, **mask, **EVERYTHING), "sm_90a", *parts)
    assert_fits(used, "sm_90a", HOPPER_STACK)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_mixings_that_depend_on_tokens(target: str, log: Callable[[], str]) -> None:
    """Factors and the sums of their gradients stay in registers."""
    spec = Spec(head_dim=64, **MIXED, dynamic_ranks=(2, 2), post_dynamic_ranks=(2, 2))
    used = compiled(spec, target, "strip_mix_", "strip_post_mix_")
    assert {role.removeprefix("post_") for role in used} >= {"mix", "mix_backward", "mix_matrices"}
    for role, usage in used.items():
        assert usage.stack <= OLD_COMPILER_STACK, role
    made = StripPass(spec, target, "backward", "cuda").cuda
    sources = [made[role] for role in ("mix", "mix_backward", "post_mix_backward")]
    for usage in assert_compile(sources, log):
        assert usage.stack == 0


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "fp16"), (64, "bf16")])
def test_heads_that_are_no_power_of_two(head_dim: int, dtype: str) -> None:
    used = compiled(Spec(head_dim=head_dim, dtype=dtype, **TEN_HEADS), "sm_90a")
    assert_fits(used, "sm_90a", TEN_HEADS_STACK)


@pytest.mark.parametrize("target", ["sm_80", pytest.param("sm_89", marks=pytest.mark.sweep)])
def test_targets_without_tma(target: str) -> None:
    """Tiles are loaded by pointers, 16 bytes at a time, and those of loops over products asynchronously."""
    used = compiled(Spec(head_dim=128, **EVERYTHING), target)
    used |= compiled(Spec(head_dim=128, **CONVOLVED), target, "grad_shares")
    assert_fits(used, target, {})
    for role in PRODUCTS:
        assert re.search(r"\bLDGSTS\S*\.128", used[role].assembly), role
    for role in (*PRODUCTS, "convolution", "post_convolution_adjoint", "convolution_gradient"):
        assert re.search(r"\bLDG(STS)?\S*\.128", used[role].assembly), role
        assert not re.search(r"\bLDG(STS)?\S*\.[US](8|16)\b", used[role].assembly), role


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_contractions_of_packed_documents(target: str) -> None:
    """They read planes and rows 16 bytes at a time, asynchronously, and multiply on the tensor cores."""
    parts = ("outputs", "grad_queries", "grad_keys")  # gradients of values are as those of keys
    for role, usage in compiled(Spec(head_dim=128, packed=True, **EVERYTHING), target, *parts).items():
        assert_fits({role: usage}, target, {role: CONTRACTION_STACK})
        assert re.search(r"\bLDGSTS\S*\.128", usage.assembly), role


@pytest.mark.parametrize(
    "spec",
    [Spec((16, 16), 64, post_mixed_heads=2), Spec((6, 11), 64, post_mixed_heads=2, dtype="fp32")],
    ids=["(16, 16)", "(6, 11) in fp32"],
)
def test_shared_memory_of_large_kernels_in_decode(spec: Spec) -> None:
    for role, usage in compiled(spec, "sm_90a", "decode_convolution").items():
        assert usage.shared <= get_target("sm_90a").shared_per_block, role


@pytest.mark.parametrize("target", ["sm_89", pytest.param("sm_120", marks=pytest.mark.sweep)])
def test_100_kb_are_enough_for_convolutions_in_fp32(target: str) -> None:
    used = compiled(Spec(head_dim=64, **CONVOLVED, dtype="fp32"), target, "convolution")
    assert len(used) == 8
    for role, usage in used.items():
        assert usage.shared <= get_target(target).shared_per_block, role


def test_shared_memory_of_wide_heads_in_fp32() -> None:
    used = compiled(Spec(None, 256, post_kernel=(1, 2), dtype="fp32"), "sm_90a", *PRODUCTS)
    assert used.keys() == {*PRODUCTS}
    for role, usage in used.items():
        assert usage.shared <= get_target("sm_90a").shared_per_block, role


def test_heads_too_wide_for_shared_memory_are_refused() -> None:
    with pytest.raises(PlanError, match=r"head dim: got 256; generic has 49152 bytes of shared memory, .* needs \d+"):
        plan(Spec(None, 256, mixed_heads=4, dtype="fp32"), "generic", "triton")


def test_gradient_sums_load_16_bytes() -> None:
    """Parts of matrices; a row of a tile is 64 bytes of a part."""
    used = compiled(Spec(head_dim=64, **EVERYTHING), "sm_90a", "gradient_sums")["gradient_sums"]
    assert used.stack == 0
    assert any(code.startswith("LDG.E.128") for code in used.opcodes)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("kernel", [(6, 11), None])
def test_values_side_by_side(target: str, kernel: tuple[int, int] | None, log: Callable[[], str]) -> None:
    """The fused kernel with values of four heads in a row, and Triton's that mixes what it makes."""
    spec = Spec(kernel, 64, post_mixed_heads=4)
    fused = StripPass(spec, target, "forward", "cuda").fused
    assert fused
    ((_, used),) = usage_of_cubins(compile_cubin(cuda.render(fused), target, fused.name)).items()
    assert not log()
    assert used.stack <= 32
    assert used.registers <= fused.kernels[0].registers
    made = plan(spec, target)
    for role in ("side_by_side", "mixed_outputs"):
        ((_, around),) = compile_offline(made, role).items()
        assert (around.stack, around.shared) == (0, 0)


def test_gradients_of_values_side_by_side(log: Callable[[], str]) -> None:
    """The fused kernels with values of two heads in a row spill no more than those of one; Triton's do not at all."""
    made = plan(Spec((6, 11), 64, post_mixed_heads=2), "sm_90a", "cuda")
    stacks = []
    for fused in (plan(Spec((6, 11), 64), "sm_90a", "cuda").tile["backward"], made.strip["backward"].fused):
        assert fused
        used = usage_of_cubins(compile_cubin(cuda.render(fused), "sm_90a", fused.name))
        assert not log()
        stacks.append(used[fused.name].stack)
    assert stacks[1] <= stacks[0]
    for role in ("side_by_side", "mixed_outputs_backward", "side_by_side_backward"):
        around = compile_offline(made, role).values()
        assert around
        assert all(one.stack == 0 for one in around)


def assert_compile(sources: Sequence[StripSource], log: Callable[[], str]) -> list[Usage]:
    """CUDA kernels of one target, each with a name of its own, keep to what they are launched with."""
    cubins, target = [], sources[0].target
    for source in sources:
        cubins.append(compile_cubin(cuda.render(source), target, source.name))
        assert not log(), source.role
    used = usage_of_cubins(*cubins)
    assert [*used] == [source.kernel.name for source in sources]
    for source, usage in zip(sources, used.values(), strict=True):
        assert usage.stack <= CUDA_STACK, f"{source.role} keeps {usage.stack} bytes on the stack"
        assert usage.registers <= source.kernel.registers, source.role
        assert source.kernel.shared + usage.shared <= get_target(target).shared_per_block + 1024, source.role
    return [*used.values()]


@pytest.mark.parametrize(("target", "stages"), CUDA_CASES, ids=str)
def test_cuda(target: str, stages: dict[str, Any], log: Callable[[], str]) -> None:
    """CUDA's kernels, each a source of its own, use the tensor cores."""
    spec = Spec(head_dim=64, **stages)
    sources: dict[str, StripSource] = {}
    for name in passes_of(spec):
        made = StripPass(spec, target, name, "cuda")
        expected = {kernel.role for kernel in made.kernels} - SUMS - (CONTRACTIONS if spec.packed else set())
        assert {*made.cuda} == expected
        sources |= {cuda.render(source): source for source in made.cuda.values()}  # passes share some
    assert all(isinstance(source, StripSource) for source in sources.values())
    for source, used in zip(sources.values(), assert_compile([*sources.values()], log), strict=True):
        multiplies = not isinstance(source, RowKernel) or not source.formula.reads_scores or source.formula.matrices
        by_warpgroups = isinstance(source, (WarpgroupProduct, ContractionKernel))
        instruction = r"\bHGMMA" if by_warpgroups else r"\bHMMA"
        assert bool(re.search(instruction, used.assembly)) == multiplies, source.role


@pytest.mark.parametrize(
    "stages", [EVERYTHING, MIXED, CONVOLVED | {"causal": False, "window": (1023, 1023), "dtype": "fp16"}], ids=str
)
def test_contractions_with_128_columns(stages: dict[str, Any], log: Callable[[], str]) -> None:
    """They have as many registers as a thread gets, and keep nothing on the stack."""
    spec = Spec(head_dim=128, **stages)
    sources = [*contractions("forward", spec, "sm_90a"), *contractions("backward", spec, "sm_90a")]
    assert {role for source in sources for role in source.roles} == CONTRACTIONS
    assert all(used.stack == 0 for used in assert_compile(sources, log))


@pytest.mark.parametrize("after", [{"post_mixed_heads": 16}, {"post_kernel": (2, 3)}, EVERYTHING], ids=str)
def test_dropout_in_cuda(after: dict[str, Any], log: Callable[[], str]) -> None:
    """A mask of two halves is one instruction, which the emulator does not see."""
    spec = Spec(**{"kernel": None, "mixed_heads": 16, "head_dim": 64, "dropout": True} | after)
    dropped = set()
    for name in passes_of(spec):
        made = StripPass(spec, "sm_90a", name, "cuda").cuda
        if draws := [source for role, source in made.items() if role in Stages(spec).dropping]:
            for source, used in zip(draws, assert_compile(draws, log), strict=True):
                assert re.search(r"\bPRMT .*0xbb99", used.assembly), source.role
                dropped.add(source.role)
    assert dropped == {*Stages(spec).dropping}


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "role", ["scores", "convolution", "convolution_gradient", "softmax_backward", "post_mix_backward"]
)
def test_cuda_in_all_forms(role: str, target: str, log: Callable[[], str]) -> None:
    source = StripPass(Spec(head_dim=128, **EVERYTHING), target, "backward", "cuda").cuda[role]
    assert isinstance(source, StripSource)
    for other in source.variants[1:]:
        assert_compile([other], log)
