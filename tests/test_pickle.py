"""What another process makes of a pickled op, layer or model, and what copies are."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mtagen
from mtagen import BackendError
from mtagen.distributed import ContextParallel
from mtagen.nn import MultiTokenAttention
from mtagen.ops import library
from mtagen.ops.attention import assemble

pytestmark = pytest.mark.usefixtures("one_thread")

LOAD = """
import sys
import torch
torch.set_num_threads(1)
call, arguments, expected = torch.load(sys.argv[1], weights_only=False)
found = call(*arguments)
assert torch.equal(found, expected), (found - expected).abs().max()
"""


def in_another_process(path: Path) -> None:
    """Load what is called, with what, and what came of it here, and call it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


def an_op() -> tuple[Callable[..., Any], list[Any]]:
    op = mtagen.build((3, 4), 16, target="cpu", window=(5, -1), key_padding="left", mask="output", dtype="fp32")
    return op, [torch.randn(1, 2, 9, 16) for _ in range(3)] + [torch.randn(2, 3, 4)]


def a_layer() -> tuple[Callable[..., Any], list[Any]]:
    layer = MultiTokenAttention(64, 4, post_mixed_heads=4, gate="channel", group_norm=True, dtype=torch.bfloat16)
    return layer.requires_grad_(False), [torch.randn(1, 9, 64, dtype=torch.bfloat16)]


class Logits(torch.nn.Module):
    """A language model's logits; importable, so that it can be pickled."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).logits


def a_model() -> tuple[Callable[..., Any], list[Any]]:
    transformers = pytest.importorskip("mtagen.transformers")
    sizes = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.MtaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, gate="scalar")
    model = transformers.MtaForCausalLM(config).eval().requires_grad_(False)
    return Logits(model), [torch.arange(9)[None]]


@pytest.mark.parametrize("make", [an_op, a_layer, a_model], ids=["op", "layer", "model"])
def test_in_another_process(make: Callable[[], tuple[Callable[..., Any], list[Any]]], tmp_path: Path) -> None:
    call, arguments = make()
    torch.save((call, arguments, call(*arguments)), tmp_path / "saved.pt")
    in_another_process(tmp_path / "saved.pt")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_op_is_built_again(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that was asked for. What was planned stays here: another version may plan otherwise."""
    options: dict[str, Any] = {"mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 4, "value_head_dim": 24}
    op = mtagen.build((3, 4), 16, target="cpu", deterministic=True, packed=True, dropout=True, **options)
    pickled = pickle.dumps(op, protocol)
    assert b"mtagen.planner" not in pickled
    monkeypatch.setattr(library, "_executors", {})
    loaded = pickle.loads(pickled)
    assert (loaded.plan, loaded._key, loaded.dtypes, loaded._drops) == (op.plan, op._key, op.dtypes, op._drops)
    assert library.executor_of(op._key).deterministic


def test_unpickling_does_not_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows what tuning has kept, as every build does."""
    monkeypatch.setattr("mtagen.op.remembered", lambda spec, target: object())
    monkeypatch.setattr("mtagen.op.plan", lambda spec, **_: mtagen.plan(spec, "cpu"))
    pickled = pickle.dumps(mtagen.build((3, 4), 16, target="cpu", tune=True))
    monkeypatch.undo()
    assert isinstance(pickle.loads(pickled), mtagen.AttentionOp)


def test_expressions_that_are_functions() -> None:
    """Functions without a name cannot be pickled, but their texts can."""
    options = {"logits": lambda s, i, j: s - 0.1 * (i - j), "visible": lambda i, j: (i - j < 16) & (j != 5)}
    for made in (mtagen.build(None, 16, target="cpu", **options), MultiTokenAttention(64, 4, **options).op):
        assert pickle.loads(pickle.dumps(made)).plan.spec == made.plan.spec
    layer = MultiTokenAttention(64, 4, **options)
    assert pickle.loads(pickle.dumps(layer)).op.plan.spec == layer.op.plan.spec


def test_copies_of_an_op_are_the_op() -> None:
    op, _ = an_op()
    assert copy.copy(op) is op
    assert copy.deepcopy([op])[0] is op


def test_op_of_a_plan_is_not_pickled() -> None:
    op = assemble(mtagen.plan(mtagen.Spec((3, 4), 16, dtype="fp32"), "cpu"))
    with pytest.raises(BackendError, match=r"op: got <mtagen op .*; legal: what mtagen\.build returns"):
        pickle.dumps(op)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layer_is_built_for_the_dtype_that_it_was_cast_to(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a machine that compiles: the layer was made where nothing is."""
    pickled = pickle.dumps(MultiTokenAttention(64, 4, dtype=torch.bfloat16).to(dtype))
    asked = []

    class Compiled:
        """An op of kernels."""

        class plan:
            backend = "triton"

    def build(**options: Any) -> Any:
        asked.append(options["dtype"])
        return Compiled()

    monkeypatch.setattr("mtagen.nn.layer.build", build)
    pickle.loads(pickled)
    assert asked == [dtype if dtype == torch.float16 else None]


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_ranks_are_not_pickled() -> None:
    spread = ContextParallel(an_op()[0], torch.distributed.group.WORLD)
    assert copy.copy(spread) is spread
    assert copy.deepcopy(spread) is spread
    layer = MultiTokenAttention(64, 4, context_parallel=torch.distributed.group.WORLD)
    for whole in (spread, layer):
        with pytest.raises(BackendError, match=r"ContextParallel: got .*; legal: model\.state_dict\(\)"):
            pickle.dumps(whole)
