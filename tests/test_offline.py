"""Every kernel compiles with no GPU, and uses what the plan's resource model says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtagen.planner import Plan, get_target, plan
from mtagen.planner.lift.tiling import TENSOR_ROLES, resources
from mtagen.runtime.load import load_triton
from mtagen.runtime.offline import Usage, compile_offline
from mtagen.spec import Spec

HOPPER = [((6, 11), 64), ((6, 11), 128), ((1, 1), 128), ((5, 2), 64)]
OTHERS = [
    *((target, (6, 11), 64) for target in ("sm_80", "sm_120", "gfx942")),
    *((target, (5, 2), 64) for target in ("sm_86", "sm_89")),
]
MAIN_KERNELS = {"forward": "fwd", "scores": "bwd_scores"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def compiled(planned: Plan) -> dict[str, Usage]:
    usage = compile_offline(planned, load_triton(planned))
    assert len(usage) > 8
    assert all(name.startswith("mta_") and name.endswith(planned.suffix) for name in usage)
    return usage


def main_kernels(planned: Plan, usage: dict[str, Usage]) -> dict[str, Usage]:
    """Role -> usage of the kernels made of matrix products."""
    roles = [role for role, _, _ in planned.tiles if role in TENSOR_ROLES]
    return {role: usage[planned.kernel_name(MAIN_KERNELS.get(role, f"bwd_{role}"))] for role in roles}


@pytest.mark.parametrize(("kernel", "head_dim"), HOPPER)
def test_hopper(kernel: tuple[int, int], head_dim: int) -> None:
    planned = plan(Spec(kernel, head_dim), "sm_90a", "triton")
    usage = compiled(planned)
    target = get_target("sm_90a")
    assert all(kernel.shared <= target.shared_per_block for kernel in usage.values())
    for role, kernel_usage in main_kernels(planned, usage).items():
        need = resources(role, planned.tile(role), planned.spec, planned.lift)
        assert kernel_usage.shared <= 1.05 * need.shared + 1024, role
        # Accumulators that do not fit registers cost a kernel its speed; a few values outside its loops do not.
        assert kernel_usage.stack <= 512, role
        assert re.search(r"\bHGMMA", kernel_usage.assembly), role
        assert re.search(r"\bUTMALDG", kernel_usage.assembly), role


@pytest.mark.parametrize(("target", "kernel", "head_dim"), OTHERS)
def test_other_targets(target: str, kernel: tuple[int, int], head_dim: int) -> None:
    planned = plan(Spec(kernel, head_dim), target, "triton")
    usage = compiled(planned)
    assert all(kernel.shared <= get_target(target).shared_per_block for kernel in usage.values())
    for role, kernel_usage in main_kernels(planned, usage).items():
        assert re.search(r"\bHMMA|v_mfma", kernel_usage.assembly), role


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_keeps_to_its_registers(head_dim: int, target: str) -> None:
    planned = plan(Spec((6, 11), head_dim), target, "triton")
    usage = compile_offline(planned, load_triton(planned), part="decode")
    assert len(usage) == 3
    for name, use in usage.items():
        # The wide kernel's measured tile, the fastest, keeps a few values on the stack.
        assert use.stack <= (64 if "wide" in name else 0), f"{name} keeps {use.stack} bytes on the stack"
