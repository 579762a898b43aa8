"""Triton kernels of what surrounds attention in each row: rotary embedding, norm and gate of a head's vector.

Each of them reads a row once and writes it once. PyTorch's operations would do so for every step of
the formulas of :mod:`.rope` and :mod:`.parts`, which these kernels compute.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.checks import is_aligned
from ..runtime.devices import devices_for, local_target
from .kernel_choice import DTYPES

BLOCK = 2048  # numbers of a program's block of rows
_SIZES = ("count", "N", "H", "stride_b", "stride_n", "stride_h")  # for which nothing is compiled again
PROGRAMS = 1024  # of a backward kernel, at most: each writes its part of the sums over rows


@triton.jit
def _rows(first, N, H, stride_b, stride_n, stride_h, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """Numbers of a block's rows, counted token by token, and where they begin in a tensor (B, N, H, D).

    They begin at multiples of VECTOR numbers, 16 bytes.
    """
    row = first + tl.arange(0, ROWS)
    token = row // H
    at = (token // N).to(tl.int64) * stride_b + (token % N).to(tl.int64) * stride_n + (row % H).to(tl.int64) * stride_h
    return row, tl.multiple_of(at, VECTOR)


@triton.jit
def _load(pointer, at, count, row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows that begin at ``at``, in fp32; zeros after row ``count`` and column D."""
    columns = tl.arange(0, BLOCK_D)
    inside = (row < count)[:, None] & (columns < D)
    return tl.load(pointer + at[:, None] + columns, inside, 0.0).to(tl.float32)


@triton.jit
def _store(pointer, x, count, row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write rows one after another."""
    columns = tl.arange(0, BLOCK_D)
    inside = (row < count)[:, None] & (columns < D)
    tl.store(pointer + row.to(tl.int64)[:, None] * D + columns, x.to(pointer.dtype.element_ty), inside)


@triton.jit
def _load_vector(pointer, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    return tl.load(pointer + columns, columns < D, 0.0)


@triton.jit(do_not_specialize=(*_SIZES, "angles_b"))
def _rotate(
    x_pointer, cos_pointer, sin_pointer, y_pointer, count, N, H, stride_b, stride_n, stride_h, angles_b, sign,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of each row by the angles of its token; backwards if ``sign`` is -1."""
    row, at = _rows(tl.program_id(0) * ROWS, N, H, stride_b, stride_n, stride_h, ROWS, VECTOR)
    token = row // H
    pair = tl.arange(0, BLOCK_D // 2)
    at_angle = ((token // N) * angles_b + token % N).to(tl.int64)[:, None] * (D // 2) + pair
    inside = (row < count)[:, None] & (pair < D // 2)
    cos, sin = tl.load(cos_pointer + at_angle, inside, 0.0), tl.load(sin_pointer + at_angle, inside, 0.0) * sign
    pairs = _load(x_pointer, at, count, row, D, BLOCK_D).reshape(ROWS, BLOCK_D // 2, 2)
    first, second = pairs.split()
    turned = tl.join(first * cos - second * sin, first * sin + second * cos)
    _store(y_pointer, turned.reshape(ROWS, BLOCK_D), count, row, D, BLOCK_D)


@triton.jit
def _normed(x, eps, D: tl.constexpr):
    """Rows divided by their root mean square, and the reciprocal of the latter."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * scale[:, None], scale


@triton.jit(do_not_specialize=_SIZES)
def _norm_forward(
    x_pointer, weight_pointer, y_pointer, count, N, H, stride_b, stride_n, stride_h, factor, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row, at = _rows(tl.program_id(0) * ROWS, N, H, stride_b, stride_n, stride_h, ROWS, VECTOR)
    dtype = y_pointer.dtype.element_ty
    normed, _ = _normed(_load(x_pointer, at, count, row, D, BLOCK_D), eps, D)
    weight = _load_vector(weight_pointer, D, BLOCK_D).to(dtype).to(tl.float32)
    scaled = (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    _store(y_pointer, scaled * factor, count, row, D, BLOCK_D)


@triton.jit(do_not_specialize=_SIZES)
def _norm_backward(
    grad_pointer, x_pointer, weight_pointer, dx_pointer, sums_pointer, count, N, H, stride_b, stride_n, stride_h,
    factor, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """With n the normed row, r its scale and g the gradient of n: dx = r (g - n mean(g n))."""
    weight = _load_vector(weight_pointer, D, BLOCK_D).to(x_pointer.dtype.element_ty).to(tl.float32)
    dweight = tl.zeros([BLOCK_D], tl.float32)
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        row, at = _rows(first, N, H, stride_b, stride_n, stride_h, ROWS, VECTOR)
        normed, scale = _normed(_load(x_pointer, at, count, row, D, BLOCK_D), eps, D)
        grad = _load(grad_pointer, row.to(tl.int64) * D, count, row, D, BLOCK_D) * factor
        dweight += tl.sum(grad * normed, 0)
        grad *= weight
        mean = tl.sum(grad * normed, 1) / D
        _store(dx_pointer, (grad - normed * mean[:, None]) * scale[:, None], count, row, D, BLOCK_D)
    columns = tl.arange(0, BLOCK_D)
    tl.store(sums_pointer + tl.program_id(0) * D + columns, dweight, columns < D)


@triton.jit
def _gate(x, weight, bias):
    """The sigmoid of each row's logit."""
    return tl.sigmoid(tl.sum(x * weight, 1) + bias)


@triton.jit(do_not_specialize=_SIZES)
def _gate_forward(
    x_pointer, weight_pointer, bias_pointer, y_pointer, count, N, H, stride_b, stride_n, stride_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row, at = _rows(tl.program_id(0) * ROWS, N, H, stride_b, stride_n, stride_h, ROWS, VECTOR)
    x = _load(x_pointer, at, count, row, D, BLOCK_D)
    weight = _load_vector(weight_pointer, D, BLOCK_D).to(tl.float32)
    gate = _gate(x, weight, tl.load(bias_pointer).to(tl.float32))
    _store(y_pointer, x * gate[:, None], count, row, D, BLOCK_D)


@triton.jit(do_not_specialize=_SIZES)
def _gate_backward(
    grad_pointer, x_pointer, weight_pointer, bias_pointer, dx_pointer, sums_pointer, count, N, H,
    stride_b, stride_n, stride_h, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """With s the sigmoid and z its logit: dz = s (1 - s) sum(grad x), dx = s grad + dz weight."""
    weight = _load_vector(weight_pointer, D, BLOCK_D).to(tl.float32)
    bias = tl.load(bias_pointer).to(tl.float32)
    dweight, dbias = tl.zeros([BLOCK_D], tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        row, at = _rows(first, N, H, stride_b, stride_n, stride_h, ROWS, VECTOR)
        x = _load(x_pointer, at, count, row, D, BLOCK_D)
        grad = _load(grad_pointer, row.to(tl.int64) * D, count, row, D, BLOCK_D)
        gate = _gate(x, weight, bias)
        dlogit = tl.sum(grad * x, 1) * gate * (1 - gate)
        _store(dx_pointer, grad * gate[:, None] + dlogit[:, None] * weight, count, row, D, BLOCK_D)
        dweight += tl.sum(dlogit[:, None] * x, 0)
        dbias += dlogit
    columns = tl.arange(0, BLOCK_D)
    sums_pointer += tl.program_id(0) * (D + 1)
    tl.store(sums_pointer + columns, dweight, columns < D)
    tl.store(sums_pointer + D, tl.sum(dbias, 0))


def _launch(kernel: Any, tensors: tuple[Tensor, ...], x: Tensor, programs: int | None, *numbers: float) -> None:
    """Launch a kernel on the rows of ``x``, ``(B, N, H, D)`` or packed ``(total, H, D)``."""
    *_, tokens, heads, dim = x.shape
    count = x.numel() // dim
    strides = (0, *x.stride()[:2]) if x.ndim == 3 else x.stride()[:3]
    grid = (triton.cdiv(count, _block(dim)) if programs is None else programs,)
    sizes = {"D": dim, "BLOCK_D": triton.next_power_of_2(dim), "ROWS": _block(dim), "VECTOR": 16 // x.element_size()}
    with _on(x):
        kernel[grid](*tensors, count, tokens, heads, *strides, *numbers, **sizes)


def _block(dim: int) -> int:
    """Return how many rows of ``dim`` numbers a program takes at a time."""
    return max(1, BLOCK // int(triton.next_power_of_2(dim)))


def _sums(x: Tensor, extent: int) -> Tensor:
    """Return room for the sums over rows of each program of a backward kernel."""
    programs = min(triton.cdiv(x.numel() // x.shape[-1], _block(x.shape[-1])), PROGRAMS)
    return x.new_empty(programs, extent, dtype=torch.float32)


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of ``x`` the current device, on which kernels are launched."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


class Rotation(torch.autograd.Function):
    """``rotate`` of one tensor of vectors: ``apply(x, cos, sin)``, with contiguous cosines and sines in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad if is_aligned(grad) else grad.contiguous(), cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    y = x.new_empty(x.shape)
    tokens_of_angles = cos.shape[-3] if cos.ndim == x.ndim == 4 and len(cos) > 1 else 0  # from an entry to the next
    _launch(_rotate, (x, cos, sin, y), x, None, tokens_of_angles, sign)
    return y


class Norm(torch.autograd.Function):
    """``HeadNorm`` of rows: ``apply(x, weight, factor, eps)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.numbers = factor, eps
        y = x.new_empty(x.shape)
        _launch(_norm_forward, (x, weight, y), x, None, factor, eps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, sums = x.new_empty(x.shape), _sums(x, x.shape[-1])
        _launch(_norm_backward, (grad.contiguous(), x, weight, dx, sums), x, len(sums), *ctx.numbers)
        return dx, sums.sum(0).to(weight.dtype), None, None


class ScalarGate(torch.autograd.Function):
    """``Gate`` of rows with one sigmoid each: ``apply(x, weight, bias)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        y = x.new_empty(x.shape)
        _launch(_gate_forward, (x, weight, bias, y), x, None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias = ctx.saved_tensors
        dim = x.shape[-1]
        dx, sums = x.new_empty(x.shape), _sums(x, dim + 1)
        _launch(_gate_backward, (grad.contiguous(), x, weight, bias, dx, sums), x, len(sums))
        total = sums.sum(0)
        return dx, total[:dim].to(weight.dtype).view_as(weight), total[dim:].to(bias.dtype)


def compile_for(head_dim: int, dtype: torch.dtype, parameters: torch.dtype, *, norm: bool, gate: bool) -> None:
    """Compile the kernels for all GPUs for which ops are built, if they have the dtype; without a GPU do nothing.

    Args:
        head_dim: numbers of a row.
        dtype: dtype of the rows, which the parameters may have, too, as under a policy of mixed precision.
        parameters: dtype of the norm's and the gate's parameters.
        norm, gate: whether kernels of the norm and of the gate are compiled.
    """
    for device, kind in product(devices_for(local_target()) if dtype in DTYPES else (), {dtype, parameters}):
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros(1, 1, 1, head_dim, device=device, dtype=dtype, requires_grad=True)
            weight, bias = torch.zeros(1, head_dim, device=device, dtype=kind), x.new_zeros(1, dtype=kind)
            angles = torch.zeros(1, 1, head_dim // 2, device=device)
            y = Rotation.apply(x, angles, angles)  # type: ignore[no-untyped-call]
            y = Norm.apply(y, weight[0], 1.0, 1.0) if norm else y  # type: ignore[no-untyped-call]
            y = ScalarGate.apply(y, weight, bias) if gate else y  # type: ignore[no-untyped-call]
            y.sum().backward()
