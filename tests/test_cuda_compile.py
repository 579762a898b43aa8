"""What NVRTC makes of the emitted CUDA sources, with no GPU: silence, registers, stack, shared memory, instructions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from machine_code import MachineCode, UnknownError
from single_pass import cheapest

from mtagen.codegen.cuda import render
from mtagen.planner.geometry.mask import Mask
from mtagen.planner.kernel import Kernel
from mtagen.planner.passes import PASSES
from mtagen.planner.targets import TARGETS
from mtagen.planner.tile.forward import TileForward
from mtagen.runtime.nvrtc import compile_cubin
from mtagen.runtime.offline import Usage, usage_of_cubins
from mtagen.spec import Spec

# Bytes of stack that a thread may use, for what its main loop touches seldom and for some B operands of large kernels.
STACK = {"forward": 128, "decode": 0}
STACK_OF_BACKWARD = {"sm_80": 64, "sm_90a": 64}  # of its main kernel; other targets and kernels have none
STACK_OF_CONVOLUTION = 96  # and what operands of the convolution in the backward pass take on sm_90a
STACK_AT_EDGES = 64  # and what the tiles near the diagonal touch besides, where columns are cut from fragments
LARGEST = Spec((16, 17), 128)
STACK_OF_LARGEST = 864  # and 24 B operands of its convolution, which do not fit beside dK and dV
STACK_OF_PARAMETERS = 64  # and what sums of gradients of parameters take
# Bytes that every kernel has as static shared memory.
SYSTEM_SHARED = {"sm_80": 0, "sm_86": 0, "sm_89": 0, "sm_90a": 1024, "sm_120": 1024}

FORWARD = [
    Spec((6, 11), 64),
    Spec((6, 11), 64, causal=False, dtype="fp16"),
    Spec((6, 11), 128),
    Spec((1, 1), 128, causal=False),
    Spec((3, 3), 96, key_padding="left"),
    Spec((9, 11), 64, key_padding="right"),
    Spec((16, 17), 128, dtype="fp16"),
    Spec((6, 11), 128, mask="output"),
]
HOPPER_ONLY = [
    Spec((2, 2), 16, causal=False),
    Spec((11, 11), 64),
    Spec((4, 10), 80, value_head_dim=48),
    Spec((7, 7), 192),
    Spec((6, 11), 256),
]
BACKWARD_OF_SWEEP = [
    ("sm_90a", Spec((6, 11), 80, dtype="fp16", causal=False)),
    ("sm_90a", LARGEST),
    ("sm_80", Spec((6, 11), 64, dtype="fp16", causal=False)),
    ("sm_80", Spec((16, 17), 80)),
    ("sm_89", Spec((6, 11), 128)),
    ("sm_89", Spec((6, 11), 112)),
]
CASES = [
    *(("forward", target, spec) for target in ("sm_80", "sm_90a") for spec in FORWARD),
    *(("forward", "sm_90a", spec) for spec in HOPPER_ONLY),
    *(pytest.param("forward", "sm_89", spec, marks=pytest.mark.sweep) for spec in FORWARD[1:3]),
    *(("backward", "sm_90a", spec) for spec in (Spec((6, 11), 64), Spec((6, 11), 128), Spec((9, 2), 80))),
    *(("backward", "sm_90a", spec) for spec in (Spec((6, 11), 48), Spec((16, 17), 64))),  # one warpgroup makes dQ
    *(("backward", target, Spec((6, 11), 64, causal=False)) for target in ("sm_80", "sm_90a")),
    ("backward", "sm_80", Spec((6, 11), 128)),
    *(("backward", target, Spec((6, 11), 64, mask="output")) for target in ("sm_80", "sm_90a")),
    *(("backward", target, Spec((1, 1), d)) for target in ("sm_80", "sm_90a") for d in (64, 128)),
    ("backward", "sm_90a", Spec((1, 1), 32)),
    ("backward", "sm_80", Spec((1, 1), 256)),
    *(("backward", target, Spec((4, 2), 64, key_padding="left")) for target in ("sm_89", "sm_90a")),
    *(("backward", "sm_89", spec) for spec in (Spec((6, 11), 128, dtype="fp16"), Spec((9, 2), 80))),
    *(pytest.param("backward", target, spec, marks=pytest.mark.sweep) for target, spec in BACKWARD_OF_SWEEP),
    *(("decode", target, Spec((6, 11), 128)) for target in ("sm_80", "sm_89", "sm_90a")),
    *((name, "sm_120", Spec((6, 11), 128)) for name in PASSES),
    *(pytest.param(name, "sm_120", Spec((6, 11), 64), marks=pytest.mark.sweep) for name in PASSES),
    *(pytest.param(name, "sm_86", Spec((6, 11), d), marks=pytest.mark.sweep) for name in PASSES for d in (64, 128)),
    *((name, target, Spec((6, 11), 128, window=(1024, -1))) for target in ("sm_80", "sm_90a") for name in PASSES),
    ("forward", "sm_90a", Spec((6, 11), 128, causal=False, window=(300, 40))),
    *((name, "sm_90a", Spec((3, 3), 64, causal=False, mask="output", window=(40, 30))) for name in PASSES),
    *((name, target, Spec((6, 11), 128, packed=True)) for target in ("sm_80", "sm_90a") for name in PASSES[:2]),
    *((name, "sm_90a", Spec((6, 11), 64, packed=True)) for name in PASSES[:2]),
    *(("decode", target, Spec((6, 11), 128, page_size=64)) for target in ("sm_80", "sm_90a")),
    *(("forward", target, Spec((6, 11), 128, packed=True, page_size=64)) for target in ("sm_80", "sm_90a")),
    *((name, target, Spec((6, 11), 128, visible="j >= i // 2")) for target in ("sm_80", "sm_90a") for name in PASSES),
    *((name, target, Spec((6, 11), 128, dropout=True)) for target in ("sm_80", "sm_90a") for name in PASSES[:2]),
]


def case_id(value: object) -> str:
    if not isinstance(value, Spec):
        return str(value)
    mask = Mask.of(value).name
    options = "-packed" * value.packed + "-dropout" * value.dropout + "-pages" * (value.page_size is not None)
    return f"{value.cq}x{value.ck}-d{value.head_dim}-{value.dtype}-{mask}-{value.key_padding}{options}"


def count(opcodes: dict[str, int], *prefixes: str) -> int:
    return sum(n for name, n in opcodes.items() if name.startswith(prefixes))


@pytest.mark.parametrize(("pass_name", "target", "spec"), CASES, ids=case_id)
def test_compiles(pass_name: str, target: str, spec: Spec, log: Callable[[], str]) -> None:
    plan = cheapest(pass_name, spec, TARGETS[target])
    source = render(plan)
    cubin = compile_cubin(source, target, plan.name)
    # Silence: ptxas reports products of warpgroups that it must serialise, NVRTC what is odd in the source.
    assert not log()
    usage = usage_of_cubins(cubin)
    assert set(usage) == {kernel.name for kernel in plan.kernels}
    for kernel in plan.kernels:
        check_resources(kernel, target, usage[kernel.name], stack_of(kernel, pass_name, target, spec))
        if pass_name == "backward":
            is_main, opcodes = kernel.role == "backward", usage[kernel.name].opcodes
            assert bool(count(opcodes, "HGMMA")) == (is_main and plan.hopper)
            assert bool(count(opcodes, "HMMA")) == is_main
    if isinstance(plan, TileForward):
        printed = dict(re.findall(r"constexpr int SHARED_(\w+) = (\d+);", source))
        assert printed == {region.name: str(region.offset) for region in plan.shared.regions}
        check_forward(plan, usage[plan.name])


@pytest.mark.parametrize("pass_name", PASSES[:2])
def test_parameters_compile(pass_name: str, log: Callable[[], str]) -> None:
    """Kernels with a table, a vector of keys and their gradients spill a few registers more."""
    logits = "s + table[h, max(0, min(64, i - j))] - gates[b, h, j]"
    spec = Spec((6, 11), 128, logits=logits, parameters={"table": "h,65", "gates": "b,h,j"})
    plan = cheapest(pass_name, spec, TARGETS["sm_90a"])
    usage = usage_of_cubins(compile_cubin(render(plan), "sm_90a", plan.name))
    assert not log()
    for kernel in plan.kernels:
        stack = stack_of(kernel, pass_name, "sm_90a", spec) + STACK_OF_PARAMETERS
        check_resources(kernel, "sm_90a", usage[kernel.name], stack)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "spec", [Spec((6, 11), 128), Spec((1, 1), 64), Spec((6, 11), 128, window=(1024, -1))], ids=case_id
)
def test_splits_of_the_keys_compile(target: str, spec: Spec, log: Callable[[], str]) -> None:
    """They have the same limits as the kernel of calls that are not split."""
    plan = cheapest("forward", spec, TARGETS[target]).split
    cubin = compile_cubin(render(plan), target, plan.name)
    assert not log()
    usage = usage_of_cubins(cubin)
    for kernel in plan.kernels:
        check_resources(kernel, target, usage[kernel.name], STACK["forward"])
    check_forward(plan, usage[plan.name])


@pytest.mark.parametrize(
    "spec",
    [
        Spec((13, 5), 128),
        pytest.param(Spec((16, 17), 128), marks=pytest.mark.sweep),
        Spec((11, 11), 128, dropout=True),
        Spec((7, 7), 64),
        Spec((6, 11), 128, window=(100, -1)),
    ],
    ids=case_id,
)
def test_tiles_are_stored_whole(spec: Spec) -> None:
    """Each word of P and of dS once, by either copy of the convolution before it, where registers are few."""
    plan = cheapest("backward", spec, TARGETS["sm_90a"])
    code = MachineCode(usage_of_cubins(compile_cubin(render(plan), "sm_90a", plan.name))[plan.name].assembly)
    chunks, words = plan.keys // plan.geometry.parts // 8, plan.rows * plan.keys // plan.geometry.parts // 2
    for tile in (region.offset for region in plan.shared.regions if region.name in ("P", "DS")):
        halves = [list(code.stores(tile + rows)) for rows in (0, 8 * 128)]  # of a row tile
        assert [len(half) for half in halves] == [2 * chunks] * 2
        for copy in (slice(0, chunks), slice(chunks, None)):
            stored = [address for half in halves for addresses in half[copy] for address in addresses]
            assert len(set(stored)) == len(stored) == words


CODE = """
        /*0000*/                   S2R R2, SR_TID.X ;                  /* 0x0000000000027919 */
        /*0010*/                   SHF.R.U32.HI R3, RZ, 0x2, R2.reuse ;
        /*0020*/                   STL.64 [R1+0x8], R2 ;
        /*0030*/                   LOP3.LUT R2, R2, 0x3, RZ, 0xc0, !PT ;
        /*0040*/              @!P0 BRA 0x70 ;
        /*0050*/                   LDL.LU R4, [R1+0xc] ;
        /*0060*/                   BRA 0x80 ;
        /*0070*/                   LDL R4, [R1+0xc] ;
        /*0080*/                   IMAD R5, R4, 0x10, RZ ;
        /*0090*/                   LEA R5, R2, R5, 0x2 ;
        /*00a0*/                   STS [R5+0x100], R7 ;
        /*00b0*/                   EXIT ;
"""


def test_integers_are_read_off_machine_code() -> None:
    assert list(MachineCode(CODE).stores(0x100)) == [tuple(0x100 + 4 * thread for thread in range(128))]
    given_away = CODE.replace("LDL R4, [R1+0xc]", "LDL R4, [R1+0x8]")  # on one of two ways
    too_early = CODE.replace("S2R R2, SR_TID.X", "LDS R2, [R9]")
    for wrong in (given_away, too_early):
        with pytest.raises(UnknownError):
            list(MachineCode(wrong).stores(0x100))


def stack_of(kernel: Kernel, pass_name: str, target: str, spec: Spec) -> int:
    """The bytes of stack that a thread of a kernel may use."""
    at_edges = STACK_AT_EDGES * Mask.of(spec).zeroes_terms
    if pass_name != "backward":
        return STACK[pass_name] + at_edges
    if kernel.role != "backward":
        return 0
    convolution = STACK_OF_CONVOLUTION * (target == "sm_90a" and spec.cq * spec.ck > 1)
    return STACK_OF_BACKWARD.get(target, 0) + convolution + at_edges + STACK_OF_LARGEST * (spec == LARGEST)


def check_resources(kernel: Kernel, target: str, used: Usage, stack: int) -> None:
    chip = TARGETS[target]
    assert used.stack <= stack
    assert used.registers <= kernel.registers
    assert used.registers * kernel.threads <= chip.registers_per_multiprocessor
    assert kernel.shared <= chip.shared_per_block
    if kernel.shared:
        assert used.shared == SYSTEM_SHARED[target]  # all of the plan's is dynamic


def check_forward(plan: TileForward, used: Usage) -> None:
    opcodes = used.opcodes
    scores = plan.row_tiles * plan.keys // 2  # of a tile, in a thread
    products = plan.row_tiles * plan.geometry.tiles * plan.toeplitz.mma_of_scores
    if plan.hopper:
        computes, loads = plan.registers.split
        given = 128 * (plan.warps // 4 * computes + loads)  # by setmaxnreg
        assert used.registers * plan.geometry.threads >= given
        # The first scores before the loop, and in it the next ones and the values. Where a warpgroup has steps of its
        # own they are there once more, and the last step has values alone.
        copies_of_scores, copies_of_values = (3, 3) if plan.warpgroups_leave else (2, 1)
        products_of_scores = copies_of_scores * (plan.spec.head_dim // 16)
        assert count(opcodes, "HGMMA") == products_of_scores + copies_of_values * (plan.keys // 16)
        convolving = count(opcodes, "HMMA")
    else:
        assert used.registers * plan.geometry.threads * plan.blocks <= TARGETS[plan.target].registers_per_multiprocessor
        # Scores and values, by pairs of output tiles, for each fragment.
        dims = plan.spec.head_dim + plan.spec.value_head_dim
        convolving = count(opcodes, "HMMA") - plan.row_tiles * plan.geometry.tiles * dims // 16
    if products:  # the compiler, or the kernel, may have the convolution more than once, yet always whole
        assert convolving % products == 0
        assert convolving > 0
    else:
        assert convolving == 0
    # No convolution on the CUDA cores: the softmax's multiply-adds of a score, in two versions, and a few of a row.
    assert count(opcodes, "FFMA") <= 4 * scores + 64
    assert count(opcodes, "HFMA2.MMA", "HMUL2", "HADD2", "IDP") <= scores


def test_the_log_is_seen(log: Callable[[], str]) -> None:
    """The compiler's remarks reach the log with the options that kernels are compiled with."""
    plan = cheapest("forward", Spec((6, 11), 64), TARGETS["sm_90a"])
    compile_cubin(render(plan).replace("wgmma_wait<1>();", ""), "sm_90a")
    assert "wgmma.mma_async instructions are serialized" in log()
