"""The parts of the layer that have parameters of their own, named as in the authors' state dicts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EPSILON = 1e-5  # of the norm


@torch.no_grad()
def set_parameter(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter a value that is the same on every rank, whose part each takes if it is sharded."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor  # only here, for not every PyTorch has it

        assert isinstance(parameter, DTensor)
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def local(parameter: Tensor) -> Tensor:
    """What this rank computes with: the parameter, or of one that is spread over ranks this rank's part.

    Where all ranks have the same part, each uses it on its own heads, and the gradient is the sum of theirs.
    """
    if not hasattr(parameter, "device_mesh"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial  # only here, for not every PyTorch has it

    assert isinstance(parameter, DTensor)
    placements = parameter.placements
    of_gradient = [Partial() if placement.is_replicate() else placement for placement in placements]
    return parameter.redistribute(placements=placements).to_local(grad_placements=of_gradient)


def set_identity(parameter: Tensor) -> None:
    """Make matrices ``(..., n, n)`` the identity."""
    eye = torch.eye(parameter.shape[-1], device=parameter.device, dtype=parameter.dtype)
    set_parameter(parameter, eye.expand(parameter.shape))


class HeadMixer(nn.Module):
    """Matrices that mix heads, ``[out, in]``, or ``[group, out, in]`` where groups are smaller than all heads.

    The op applies them; this module holds them under their name.
    """

    def __init__(
        self, heads: int, group: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        shape = (heads, heads) if group == heads else (heads // group, group, group)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Mix nothing: the identity."""
        set_identity(self.weight)

    def extra_repr(self) -> str:
        """The shape of the matrices."""
        return f"{tuple(self.weight.shape)}"


class HeadNorm(nn.Module):
    """The root mean square norm of each head's output, with a scale that heads share.

    x * rsqrt(mean(x^2) + 1e-5) is computed in fp32 at least and cast to the dtype of ``x`` before it is scaled. With a
    depth it is multiplied by 1 - (0.8 - 0.6 exp(-0.3 depth)) besides (Ye et al., "Differential Transformer", arXiv
    2410.05258).
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
        """A scale of 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last axis, head_dim."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)
        scaled = normed.to(x.dtype) * local(self.weight)
        return scaled if self.factor is None else scaled * self.factor


class Gate(nn.Module):
    """What a head's output is multiplied by: the sigmoid of a linear function of it, one for all channels or each.

    It is no ``torch.nn.Linear`` and holds none: tools for low precision and for adapters put modules of their own in
    the place of every Linear, and such a module would leave out the sigmoid and the product.
    """

    def __init__(
        self, head_dim: int, gates: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(gates, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(gates, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As of ``torch.nn.Linear``, with a bias of 0."""
        nn.init.kaiming_uniform_(self.weight, math.sqrt(5))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x * sigmoid(weight x + bias) over the last axis, head_dim."""
        return x * torch.sigmoid(F.linear(x, local(self.weight), local(self.bias)))

    def extra_repr(self) -> str:
        """The shape of the weight."""
        return f"{tuple(self.weight.shape)}"
