"""Emitted modules at work: every pass in a process of its own, where mtagen cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtagen import Spec, plan
from mtagen.check import failures
from mtagen.codegen import emit
from mtagen.measure.cases import Sizes
from mtagen.runtime.devices import local_target

PROGRAM = """
import importlib.util, pathlib, sys
sys.modules["mtagen"] = None  # importing it now fails
import torch
path, pass_name, arguments, results = sys.argv[1:]
spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
torch.save(getattr(module, pass_name)(*torch.load(arguments)), results)
"""


class Emitted:
    """What ``emit`` writes for a plan, called like an op.

    Args:
        spec: the request.
        target: what it is planned for.
        backend: whose kernels.
        folder: where the sources, arguments and results are written.
        environment: variables of the processes besides this one's.
    """

    def __init__(self, spec: Spec, target: str, backend: str, folder: Path, **environment: str) -> None:
        self.scale = spec.head_dim**-0.5
        self._folder, self._environment = folder, os.environ | environment
        (self._module,) = (path for path in emit(plan(spec, target, backend), folder) if path.suffix == ".py")

    def __call__(self, *qkv: Tensor, return_lse: bool, **weights: Tensor) -> tuple[Tensor, Tensor]:
        assert return_lse
        out, lse = _Attention.apply(self, *qkv, *weights.values())
        return out, lse

    def decode(
        self, *operands: Tensor, cache_seqlens: Tensor, return_lse: bool, **weights: Tensor
    ) -> tuple[Tensor, ...]:
        assert return_lse
        return self.run("decode", *operands, *weights.values(), self.scale, cache_seqlens, None)

    def run(self, pass_name: str, *arguments: object) -> tuple[Tensor, ...]:
        """The results of a pass."""
        given, results = self._folder / "arguments.pt", self._folder / "results.pt"
        torch.save(arguments, given)
        command = [sys.executable, "-c", PROGRAM, self._module, pass_name, given, results]
        run = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        returned: tuple[Tensor, ...] = torch.load(results)
        return returned


class _Attention(torch.autograd.Function):
    """The training passes of an emitted module."""

    @staticmethod
    def forward(ctx: Any, emitted: Emitted, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = emitted.run("forward", *tensors, emitted.scale)
        ctx.emitted = emitted
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.emitted.run("backward", *gradients, *ctx.saved_tensors, ctx.emitted.scale)


LAYER = {"mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 4}


@pytest.mark.parametrize("stages", [{}, LAYER], ids=["lift", "strip"])
def test_triton_in_the_interpreter(stages: dict[str, Any], tmp_path: Path) -> None:
    spec = Spec((2, 3), 16, dtype="fp32", **stages)
    op = Emitted(spec, "generic", "triton", tmp_path, TRITON_INTERPRET="1")
    assert not failures(op, spec, torch.device("cpu"), (Sizes(2, 4, 2, 9, 13),))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("backend", "stages"), [("cuda", {}), ("triton", {}), ("triton", LAYER)], ids=str)
def test_on_a_gpu(backend: str, stages: dict[str, Any], tmp_path: Path) -> None:
    """CUDA sources are compiled by the emitted module itself."""
    spec = Spec((6, 11), 64, **stages)
    op = Emitted(spec, local_target(), backend, tmp_path)
    assert not failures(op, spec, torch.device("cuda"), (Sizes(2, 4, 2, 113, 203),))
