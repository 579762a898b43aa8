"""Triton is optional: a process in which it cannot be imported, and one in which it is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtagen import Spec, plan
from mtagen.codegen import render
from mtagen.runtime import triton_package as package
from mtagen.runtime.load import available_backends, plan_key

BLOCKED = "import sys; sys.modules['triton'] = None\n"

ON_THE_CPU = """
import torch
import mtagen

op = mtagen.build((2, 3), 16, dtype="fp64")
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.float64, requires_grad=True) for _ in "qkv")
weight = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
leaves = (q, k, v, weight)
out, expected = op(*leaves), mtagen.reference(*leaves)
torch.testing.assert_close(out, expected)
grads, expected_grads = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected))
torch.testing.assert_close(grads, expected_grads)
with torch.no_grad():
    torch.testing.assert_close(op.decode(q[:, :, -2:], k, v, weight), out[:, :, -1:])
assert op.plan.backend == "torch"
"""

REFUSALS = """
import mtagen
from mtagen.runtime.load import available_backends

assert "triton" not in available_backends()
for options in ({"backend": "triton"}, {"backend": "auto", "dtype": "fp32"}):  # CUDA has no fp32
    try:
        mtagen.build((2, 3), 16, target="sm_90a", **options)
    except mtagen.MtagenError as error:
        print(type(error).__name__, error)
print(mtagen.build((2, 3), 16, target="sm_90a").plan.reason)
"""

WITHOUT_TABLES = """
import mtagen
from mtagen.codegen import render
from mtagen.runtime.load import load, load_tables

made = mtagen.plan(mtagen.Spec((2, 3), 16, visible="i // 8 == j // 8"), "sm_90a", "cuda")
sources = render(made)
assert sources.tables in sources.files
assert load_tables(made, sources) is None
assert load(made, sources).tables == {}
"""

COMMANDS = """
from typer.testing import CliRunner
from mtagen.cli import app

selection = ["--kernel", "2,3", "--head-dim", "16"]
for command in (
    ["--help"],
    ["plan", *selection, "--backend", "triton"],
    ["emit", *selection, "--backend", "cuda", "--out", "kernels"],
    ["emit", *selection, "--backend", "triton", "--out", "kernels"],
    ["show-config"],
    ["collect-env", "--json"],
    ["check", *selection, "--device", "cpu"],
):
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (command, result.output)
"""


def run(script: str, folder: Path) -> str:
    environment = os.environ | {"MTAGEN_CACHE_DIR": str(folder / "cache")}
    made = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=folder, env=environment
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_the_cpu_is_served(tmp_path: Path) -> None:
    run(BLOCKED + ON_THE_CPU, tmp_path)


def test_what_needs_it_is_refused(tmp_path: Path) -> None:
    named, left, served = run(BLOCKED + REFUSALS, tmp_path).splitlines()
    assert named.startswith("BackendError backend: got 'triton'; the triton package cannot be imported")
    assert "legal: pip install triton" in named
    assert left.startswith("PlanError dtype: got 'fp32'; the cuda backend supports 16-bit dtypes only")
    assert served.startswith("not triton: backend: got 'triton'; is not installed; legal: pip install triton")


def test_pytorch_computes_the_tables_of_cuda_kernels(tmp_path: Path) -> None:
    run(BLOCKED + WITHOUT_TABLES, tmp_path)


def test_the_command_line_works(tmp_path: Path) -> None:
    run(BLOCKED + COMMANDS, tmp_path)
    assert {path.suffix for path in (tmp_path / "kernels").iterdir()} == {".cu", ".py"}


def test_cuda_kernels_can_be_tuned(tmp_path: Path) -> None:
    run(BLOCKED + "import mtagen.tuning", tmp_path)


def test_nothing_imports_it_before_a_kernel_is_loaded(tmp_path: Path) -> None:
    """Where it is installed, too; but PyTorch's flop counter, which the registered ops are known to, does."""
    script = "import sys, mtagen.planner, mtagen.codegen, mtagen.runtime.load, mtagen.runtime.tuned\n"
    script += "mtagen.codegen.render(mtagen.plan(mtagen.Spec((2, 3), 16), 'sm_90a', 'triton'))\n"
    run(
        script + "assert mtagen.runtime.load.available_backends() == ('cuda', 'triton')\n"
        "assert 'triton' not in sys.modules",
        tmp_path,
    )


def test_it_is_available_here() -> None:
    assert available_backends() == ("cuda", "triton")


@pytest.mark.parametrize(("backend", "depends"), [("triton", True), ("cuda", False), ("torch", False)])
def test_keys_hold_the_versions_of_what_runs_a_plan(
    backend: str, depends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    made = plan(Spec((2, 3), 16), "sm_90a", backend)
    sources = render(made)
    keys = [plan_key(made, sources)]
    monkeypatch.setattr(triton, "__version__", "9.9")
    keys.append(plan_key(made, sources))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert package.triton_version() is None
    keys.append(plan_key(made, sources))
    assert len(set(keys)) == (3 if depends else 1)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert plan_key(made, sources) not in keys
