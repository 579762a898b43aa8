"""Kernels of rotary embedding, norm and gate: against float64, beside PyTorch's operations in the same dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtagen.accuracy import compare
from mtagen.nn import parts, rope, row_kernels
from mtagen.nn.kernel_choice import has_kernels
from mtagen.nn.parts import Gate, HeadNorm

DIM = 24
PARTS = {"norm": lambda: HeadNorm(DIM, None), "deep norm": lambda: HeadNorm(DIM, 3), "gate": lambda: Gate(DIM, 1)}
# With the axes of tokens and heads exchanged in memory, as outputs of the op are, or packed.
SHAPES: dict[str, tuple[tuple[int, ...], bool]] = {
    "a batch": ((2, 5, 3, DIM), False),
    "heads before tokens": ((2, 67, 2, DIM), True),
    "one token": ((1, 1, 1, DIM), False),
    "packed": ((203, 2, DIM), False),
}


def random(shape: tuple[int, ...], heads_first: bool, dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else x


def random_part(name: str) -> nn.Module:
    torch.manual_seed(0)
    part = PARTS[name]()
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    return part


def train(part: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of what goes in."""
    x = x.detach().requires_grad_()
    out = part(x)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *part.parameters()], grad)]


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("same_dtype", [True, False], ids=["parameters alike", "parameters in fp32"])
@pytest.mark.parametrize(("shape", "heads_first"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", PARTS)
def test_accurate(
    name: str,
    shape: tuple[int, ...],
    heads_first: bool,
    same_dtype: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_kernels, "PROGRAMS", 2)  # so that each takes several blocks of rows
    part, x = random_part(name), random(shape, heads_first, dtype)
    part = part.to(dtype) if same_dtype else part
    exact = train(copy.deepcopy(part).double(), x.double())
    found = train(part, x)
    assert has_kernels(x, *part.parameters())
    monkeypatch.setattr(parts, "has_kernels", lambda *_: False)
    # Operations of parameters in another dtype compute in fp32, so that they compare with those of 16 bits.
    eager = train(copy.deepcopy(part).to(dtype), x)
    for factor, result, theirs, reference in zip((2.0, 3.0, 3.0, 3.0), found, eager, exact, strict=False):
        comparison = compare(result, theirs, reference, factor=factor)
        assert comparison.ok, comparison


@pytest.mark.parametrize("each_entry", [False, True], ids=["positions alike", "positions of each entry"])
@pytest.mark.parametrize(("shape", "heads_first"), SHAPES.values(), ids=SHAPES)
def test_rotation(
    shape: tuple[int, ...], heads_first: bool, each_entry: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors have different numbers of heads. Their gradients come with heads before tokens."""
    q = random(shape, heads_first, dtype)
    vectors = [q, q[..., :1, :].contiguous()]
    tokens = shape[-3]
    positions = torch.arange(7, 7 + tokens)
    if each_entry and len(shape) == 4:
        positions = positions + 100 * torch.arange(shape[0])[:, None]

    def rotate(dtype: torch.dtype) -> list[Tensor]:
        angles = rope.rotation(positions, DIM, 1e4, None, dtype)
        xs = [x.to(dtype).requires_grad_() for x in vectors]
        ys = rope.rotate(angles, *xs)
        grads = [random(y.shape, y.ndim == 4, y.dtype) for y in ys]
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, xs, grads)]

    found, exact = rotate(dtype), rotate(torch.float64)
    assert all(has_kernels(x) for x in vectors)
    monkeypatch.setattr(rope, "has_kernels", lambda *_: False)
    for result, eager, reference in zip(found, rotate(dtype), exact, strict=True):
        comparison = compare(result, eager, reference)
        assert comparison.ok, comparison


def test_rounds_as_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are rounded after the norm and again after the scale, before the factor of a depth."""
    part, x = random_part("deep norm"), random((4, 50, 2, DIM), False, torch.float16)
    found = part(x)
    monkeypatch.setattr(parts, "has_kernels", lambda *_: False)
    assert (found == part(x)).double().mean() > 0.99  # except where sums of squares round to another number


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 2, DIM, dtype=torch.float64),
        torch.randn(2, 0, 2, DIM),
        torch.randn(3, DIM),
        torch.randn(2 * DIM + 1)[1:].view(1, 2, DIM),
        torch.randn(2, 3, DIM, 2).transpose(2, 3),
    ],
    ids=["fp64", "no tokens", "rows", "unaligned", "strides"],
)
@pytest.mark.parametrize("name", PARTS)
def test_what_operations_compute(name: str, x: Tensor) -> None:
    part = random_part(name).to(x.dtype)
    assert not has_kernels(x, *part.parameters())
    assert part(x).shape == x.shape
