"""Modules of the layer with parameters of their own, named as in the authors' state dicts."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention import autocast_dtype
from .kernel_choice import has_kernels, is_fused

_EPSILON = 1e-5  # added to the mean square in the norm
_FACTOR_EPSILON = 1e-6  # and in that of factors of mixings
_HIDDEN = 4  # hidden elements of a head, of which the factors of mixings are made


@torch.no_grad()
def set_parameter(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to a value that all ranks have; each rank takes its part if it is sharded."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor  # some builds of PyTorch lack it

        assert isinstance(parameter, DTensor)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, which is the whole one unless it is sharded.

    A replicated parameter is used by each rank on its own heads, so its gradient is the sum over
    ranks.
    """
    if not hasattr(parameter, "device_mesh"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial  # some builds of PyTorch lack it

    assert isinstance(parameter, DTensor)
    placements = parameter.placements
    of_gradient = [Partial() if placement.is_replicate() else placement for placement in placements]
    return parameter.redistribute(placements=placements).to_local(grad_placements=of_gradient)


def set_identity(parameter: Tensor) -> None:
    """Set matrices ``(..., n, n)`` to the identity."""
    eye = torch.eye(parameter.shape[-1], device=parameter.device, dtype=parameter.dtype)
    set_parameter(parameter, eye.expand(parameter.shape))


class HeadMixer(nn.Module):
    """Matrices that mix heads, ``[out, in]``, or ``[group, out, in]`` for several groups.

    The module only holds the matrices under their name in state dicts; the op applies them. They are
    read by a call, as tools expect that load, replace or gather weights when a module is called.
    """

    def __init__(
        self, heads: int, group: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        shape = (heads, heads) if group == heads else (heads // group, group, group)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the matrices to the identity, which mixes no heads."""
        set_identity(self.weight)

    def forward(self) -> Tensor:
        """Return the matrices of this rank's heads."""
        return local(self.weight)

    def extra_repr(self) -> str:
        """Return the shape of the matrices."""
        return f"{tuple(self.weight.shape)}"


class TokenMixing(nn.Module):
    """The factors of the matrices that tokens add to a mixing of heads, as in DCMHA (Xiao et al., arXiv 2405.08553).

    A token's vector x adds the matrix sum over r of b_r a_r^T, and the diagonal of tanh(gates x), to the matrix of
    each group of heads. The a_r are the vectors of a group in inner gelu(hidden x), each divided by the root of its
    mean square, and the b_r those in outer gelu(hidden x). Initially ``outer`` and ``gates`` are 0, so that tokens add
    nothing.

    ==================================  =====================================================
    ``hidden.weight``                   (4 H, dim)
    ``inner.weight``, ``outer.weight``  (R H, 4 H): the rows of a group of heads are [r, head]
    ``gates.weight``                    (H, dim)
    ==================================  =====================================================

    Args:
        dim: elements of a token's vector.
        heads: H.
        group: m, heads of a group.
        rank: R.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        group: int,
        rank: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group, self.rank = group, rank
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.hidden = nn.Linear(dim, _HIDDEN * heads, **made)
        self.inner = nn.Linear(_HIDDEN * heads, rank * heads, **made)
        self.outer = nn.Linear(_HIDDEN * heads, rank * heads, **made)
        self.gates = nn.Linear(dim, heads, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise ``hidden`` and ``inner`` like ``torch.nn.Linear``, and ``outer`` and ``gates`` to 0."""
        self.hidden.reset_parameters()
        self.inner.reset_parameters()
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.gates.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the factors ``(..., H, 2 R + 1)`` of tokens ``(..., dim)``, as the op takes them."""
        hidden = F.gelu(self.hidden(x))
        by_group = -1, self.rank, self.group
        inner, outer = (torch.unflatten(part(hidden), -1, by_group) for part in (self.inner, self.outer))
        wide = inner.to(torch.promote_types(inner.dtype, torch.float32))
        inner = F.rms_norm(wide, (self.group,), eps=_FACTOR_EPSILON).to(inner.dtype)
        gates = torch.unflatten(torch.tanh(self.gates(x)), -1, (-1, 1, self.group))
        return torch.cat((inner, outer, gates), -2).mT.flatten(-3, -2)


class ScoreParameters(nn.ParameterDict):
    """The tensors that expressions read, by their names; a call returns them, like that of a :class:`HeadMixer`."""

    __call__ = nn.Module.__call__  # a ParameterDict refuses to be called

    def forward(self) -> dict[str, Tensor]:
        """Return the tensors of this rank's heads by name."""
        return {name: local(x) for name, x in self.items()}


class HeadNorm(nn.Module):
    """The root mean square norm of each head's output, with a scale that heads share.

    x * rsqrt(mean(x^2) + 1e-5) is computed in fp32 or fp64 and cast to the dtype of ``x`` before it
    is scaled, in that dtype. If a depth is given, the result is also multiplied by 1 - (0.8 - 0.6 exp(-0.3 depth))
    (Ye et al., "Differential Transformer", arXiv 2410.05258).
    """

    def __init__(
        self,
        head_dim: int,
        depth: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.factor = None if depth is None else 1 - (0.8 - 0.6 * math.exp(-0.3 * depth))
        self.weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last axis, head_dim."""
        weight = local(self.weight)
        if has_kernels(x, weight):
            from .row_kernels import Norm  # needs Triton

            return Norm.apply(x, weight, 1.0 if self.factor is None else self.factor, _EPSILON)  # type: ignore[no-any-return, no-untyped-call]
        casts = autocast_dtype(x.device.type) is not None
        with torch.autocast(x.device.type, enabled=False) if casts else nullcontext():  # it would make the norm fp32
            normed = F.rms_norm(x, x.shape[-1:], eps=_EPSILON)
        scaled = normed * weight.to(x.dtype)
        return scaled if self.factor is None else scaled * self.factor


class Gate(nn.Module):
    """The gate of a head's output: a sigmoid of a linear function of it, for all channels or per
    channel.

    The gate is no ``torch.nn.Linear`` and holds none, because tools for low precision and adapters
    replace every Linear by a module of their own, which would leave out the sigmoid and the
    product.
    """

    def __init__(
        self, head_dim: int, gates: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(gates, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(gates, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight like ``torch.nn.Linear``, and the bias to 0."""
        nn.init.kaiming_uniform_(self.weight, math.sqrt(5))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x * sigmoid(weight x + bias) over the last axis, head_dim."""
        weight, bias = local(self.weight), local(self.bias)
        if len(bias) == 1 and has_kernels(x, weight, bias):
            from .row_kernels import ScalarGate  # needs Triton

            return ScalarGate.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
        if len(bias) == 1 and is_fused():  # a compiler does not fuse products by a library
            wide, weight, bias = (y.to(torch.promote_types(x.dtype, torch.float32)) for y in (x, weight, bias))
            return (wide * torch.sigmoid((wide * weight).sum(-1, keepdim=True) + bias)).to(x.dtype)
        return x * torch.sigmoid(F.linear(x, weight, bias))

    def extra_repr(self) -> str:
        """Return the shape of the weight."""
        return f"{tuple(self.weight.shape)}"
