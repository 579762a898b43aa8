"""Every kernel compiles with no GPU, and uses what the plan's resource model says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compilers import OLD_COMPILER_STACK

from mtagen.planner import Plan, get_target, plan
from mtagen.planner.kernel import Kernel
from mtagen.planner.lift.tiling import TENSOR_ROLES
from mtagen.runtime.loaded import without_launches
from mtagen.runtime.offline import Usage, compile_offline
from mtagen.spec import Spec

HOPPER = [
    ((6, 11), 64),
    ((6, 11), 128),
    *(pytest.param(kernel, head_dim, marks=pytest.mark.sweep) for kernel, head_dim in (((1, 1), 128), ((5, 2), 64))),
]
OTHERS = [
    *((target, (6, 11), 64) for target in ("sm_80", "gfx942")),
    pytest.param("sm_120", (6, 11), 64, marks=pytest.mark.sweep),
    pytest.param("sm_86", (5, 2), 64, marks=pytest.mark.sweep),
]
BY_POINTERS = [  # targets without TMA
    *(("sm_80", kernel, head_dim) for kernel, head_dim in (((6, 11), 64), ((6, 11), 128))),
    pytest.param("sm_80", (1, 1), 128, marks=pytest.mark.sweep),
    *(
        pytest.param("sm_89", kernel, head_dim, marks=pytest.mark.sweep)  # the machine code of sm_80, but for limits
        for kernel, head_dim in (((3, 3), 64), ((3, 3), 128), ((1, 1), 64))
    ),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def compiled(planned: Plan) -> dict[str, Usage]:
    usage = compile_offline(planned)
    assert usage.keys() == {kernel.name for made in planned.lift.values() for kernel in made.kernels}
    assert all(name.startswith("mta_lift_") and name.endswith(planned.suffix) for name in usage)
    return usage


def main_kernels(planned: Plan, usage: dict[str, Usage]) -> list[tuple[Kernel, Usage]]:
    """The kernels of the training passes that are made of matrix products, and what each uses."""
    kernels = {kernel.role: kernel for name in ("forward", "backward") for kernel in planned.lift[name].kernels}
    roles = {role for made in planned.lift.values() for role, _ in made.tiles} & {*TENSOR_ROLES}
    names = {"forward": "fwd"} | {role: f"bwd_{role}" for role in roles - {"forward"}}
    assert len(names) == 4
    return [(kernels[name], usage[kernels[name].name]) for name in names.values()]


@pytest.mark.parametrize(
    "stages",
    [{"kernel": (6, 11)}, pytest.param({"kernel": (3, 3), "mixed_heads": 4}, marks=pytest.mark.sweep)],
    ids=str,
)
def test_pages(stages: dict[str, Any]) -> None:
    """Steps of decoding, and chunks, that read keys from pages compile."""
    for packed, pass_name in ((False, "decode"), (True, "forward")):
        planned = plan(Spec(head_dim=64, page_size=16, packed=packed, **stages), "sm_90a", "triton")
        usage = compile_offline(planned)
        kernels = (planned.lift | planned.strip)[pass_name].kernels
        assert usage.keys() == {kernel.name for kernel in kernels}
        assert all(used.stack == 0 for used in usage.values())


@pytest.mark.parametrize(("kernel", "head_dim"), HOPPER)
def test_hopper(kernel: tuple[int, int], head_dim: int) -> None:
    planned = plan(Spec(kernel, head_dim), "sm_90a", "triton")
    usage = compiled(planned)
    target = get_target("sm_90a")
    assert all(kernel.shared <= target.shared_per_block for kernel in usage.values())
    for planned_kernel, used in main_kernels(planned, usage):
        role = planned_kernel.role
        assert used.shared <= 1.05 * planned_kernel.shared + 1024, role
        # Accumulators that do not fit registers cost a kernel its speed; a few values outside its loops do not.
        assert used.stack <= 512, role
        assert re.search(r"\bHGMMA", used.assembly), role
        assert re.search(r"\bUTMALDG", used.assembly), role


@pytest.mark.parametrize(("target", "kernel", "head_dim"), OTHERS)
def test_other_targets(target: str, kernel: tuple[int, int], head_dim: int) -> None:
    planned = plan(Spec(kernel, head_dim), target, "triton")
    usage = compiled(planned)
    assert all(kernel.shared <= get_target(target).shared_per_block for kernel in usage.values())
    for planned_kernel, used in main_kernels(planned, usage):
        assert re.search(r"\bHMMA|v_mfma", used.assembly), planned_kernel.role


def test_windows() -> None:
    """Their edge tiles and second band cost no registers where tiles are interior."""
    planned = plan(Spec((6, 11), 128, window=(1024, -1)), "sm_90a", "triton")
    for planned_kernel, used in main_kernels(planned, compiled(planned)):
        assert used.stack <= 512, planned_kernel.role


@pytest.mark.parametrize(("target", "kernel", "head_dim"), BY_POINTERS)
def test_tiles_by_pointers(target: str, kernel: tuple[int, int], head_dim: int) -> None:
    """Loads are of 16 bytes, those of main loops asynchronous, and what does not fit registers is little."""
    planned = plan(Spec(kernel, head_dim), target, "triton")
    usage = {}
    for part in ("_fwd_", "_bwd_scores_", "_bwd_dq_", "_bwd_dk_"):
        usage |= compile_offline(planned, part)
    for planned_kernel, used in main_kernels(planned, usage):
        role = planned_kernel.role
        assert used.shared <= min(1.05 * planned_kernel.shared, get_target(target).shared_per_block), role
        assert used.stack <= 256 + OLD_COMPILER_STACK, f"{role} keeps {used.stack} bytes on the stack"
        assert re.search(r"\bHMMA", used.assembly), role
        assert re.search(r"\bLDGSTS\S*\.128", used.assembly), role
        assert not re.search(r"\bLDG(STS)?\S*\.[US](8|16)\b", used.assembly), role


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=pytest.mark.sweep), "sm_90a"])
@pytest.mark.parametrize("data", ["packed", "dropout"])
def test_packed_documents_and_dropout(data: str, target: str) -> None:
    """Kernels that look for documents, or draw what is kept, still fit, but for a few values."""
    planned = plan(Spec((6, 11), 64, **{data: True}), target, "triton")
    for part in ("_fwd_", "_bwd_scores_", *(("_bwd_dq_", "_bwd_dk_") if data == "packed" else ())):
        for name, used in compile_offline(planned, part).items():
            assert used.shared <= get_target(target).shared_per_block, name
            assert used.stack <= 256, f"{name} keeps {used.stack} bytes on the stack"
            assert target != "sm_90a" or "_bwd_d" in name or re.search(r"\bHGMMA", used.assembly), name


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_keeps_to_its_registers(head_dim: int, target: str) -> None:
    planned = plan(Spec((6, 11), head_dim), target, "triton")
    usage = compile_offline(planned, part="decode")
    assert len(usage) == 3
    for name, use in usage.items():
        # The wide kernel's measured tile, the fastest, keeps a few values on the stack.
        assert use.stack <= (64 if "wide" in name else 0), f"{name} keeps {use.stack} bytes on the stack"


def test_gradients_of_parameters() -> None:
    """A table whose index is one number for all scores is summed like others."""
    text = "s * t[h] + table[h, 1] + table[h, min(3, i - j)] + u[b, h, i] - u[b, h, j]"
    parameters = {"t": "h", "table": "h,4", "u": "b,h,j"}
    planned = plan(Spec(None, 64, logits=text, parameters=parameters), "sm_90a", "triton")
    ((_, used),) = compile_offline(planned, "_bwd_scores_").items()
    assert re.search(r"\bHGMMA", used.assembly)


def test_loaded_kernels_stay() -> None:
    """Where no kernel is launched for the CPU, tables of a module keep what GPUs have loaded."""
    loaded = {"scores": {0: {"scores": len}}, "values": {None: {"values": len}}}
    module: Any = SimpleNamespace(LOADED={name: {**table} for name, table in loaded.items()})
    module.KERNELS = {name: {name: ()} for name in loaded}
    with without_launches(module):
        assert all(module.LOADED[name][None][name]((1,), 2.0) is None for name in loaded)
    assert [*module.LOADED.values()] == [*loaded.values()]
