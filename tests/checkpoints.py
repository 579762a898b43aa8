"""Selective checkpointing that saves what the forward op returns, by its name, and computes the rest again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from mtagen.ops.executor import Executor


def _policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = function is torch.ops.mtagen.forward.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


save_forward: Callable[[], Any] = partial(create_selective_checkpoint_contexts, _policy)
"""What a checkpoint takes as ``context_fn``."""


def forward_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each time that the forward op runs from now on."""
    calls = []
    forward = Executor.forward

    def counted(self: Executor, *args: Any) -> Any:
        calls.append(args)
        return forward(self, *args)

    monkeypatch.setattr(Executor, "forward", counted)
    return calls
