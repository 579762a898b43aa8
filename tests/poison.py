"""Memory that spoils what is made of it where nothing was written."""

from __future__ import annotations

import pytest
import torch


def memory_starts_as_nan(patch: pytest.MonkeyPatch) -> None:
    """From here on, floating-point tensors that PyTorch leaves empty hold NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        empty = getattr(owner, name)
        patch.setattr(owner, name, lambda *size, empty=empty, **options: _spoilt(empty(*size, **options)))


def _spoilt(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan) if x.is_floating_point() else x
