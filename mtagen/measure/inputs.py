"""Random arguments of an operator: the one place that knows which tensors it takes, their shapes and their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dtypes import TORCH_DTYPES
from ..spec import Spec
from .cases import Sizes


@dataclass(frozen=True)
class Inputs:
    """The differentiable arguments of a call.

    Attributes:
        q: ``(B, H, Nq, D)``; for decode the rows before the new ones that these need, then the new ones.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, DV)``.
        weights: as :meth:`mtagen.Spec.weights` names them, fp32; plain attention has none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Mapping[str, Tensor]

    @property
    def named(self) -> dict[str, Tensor]:
        """All by name, in the order of a call."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.weights}

    @property
    def arguments(self) -> list[Tensor]:
        """All in the order of a call."""
        return list(self.named.values())


@dataclass(frozen=True)
class Sampler:
    """Draws standard normal tensors for one operator at one size; equal samplers draw equal tensors.

    Attributes:
        spec: the operator.
        sizes: of its arguments.
        device: where the tensors are.
        generator: draws the numbers, on a device of its own.
        rows_outside_heads: whether a tensor lies in memory as ``(B, N, H, D)`` instead of ``(B, H, N, D)``.
    """

    spec: Spec
    sizes: Sizes
    device: torch.device
    generator: torch.Generator
    rows_outside_heads: bool

    @classmethod
    def for_checks(cls, spec: Spec, sizes: Sizes, device: torch.device) -> Sampler:
        """Numbers that are the same on every device, laid out as a projection leaves them, ``(B, N, H, D)``."""
        return cls(spec, sizes, device, torch.Generator().manual_seed(0), rows_outside_heads=True)

    @classmethod
    def for_timing(cls, spec: Spec, sizes: Sizes, device: torch.device) -> Sampler:
        """Numbers drawn where they are used, for they may be many, in dense tensors."""
        return cls(spec, sizes, device, torch.Generator(device).manual_seed(0), rows_outside_heads=False)

    def inputs(self, *, decode: bool = False) -> Inputs:
        """The arguments of a call, or of a decode step."""
        return Inputs(
            q=self.queries(self.sizes.nq, decode=decode),
            k=self._rows(self.sizes.kv_heads, self.sizes.nk, self.spec.head_dim),
            v=self._rows(self.sizes.kv_heads, self.sizes.nk, self.spec.value_head_dim),
            weights={
                name: self._weight(shape, self.spec.mixed.get(name) or math.prod(shape[1:]))
                for name, shape in self.spec.weights(self.sizes.heads).items()
            },
        )

    def queries(self, n: int, *, decode: bool = False) -> Tensor:
        """q of ``n`` rows, or of ``n`` new tokens and what decode needs before them."""
        return self._rows(self.sizes.heads, n + (self.spec.context if decode else 0), self.spec.head_dim)

    def outputs(self) -> Tensor:
        """Like out, ``(B, H, Nq, DV)``: the gradient of it, say."""
        return self._rows(self.sizes.heads, self.sizes.nq, self.spec.value_head_dim)

    def _rows(self, heads: int, n: int, dim: int) -> Tensor:
        if self.rows_outside_heads:
            return self._normal(self.sizes.batch, n, heads, dim).transpose(1, 2)
        return self._normal(self.sizes.batch, heads, n, dim)

    def _normal(self, *shape: int) -> Tensor:
        dtype, generator = TORCH_DTYPES[self.spec.dtype], self.generator
        # Versions of PyTorch differ in whether they draw the same numbers in 16 bits as in fp32.
        wide = torch.promote_types(dtype, torch.float32)
        return torch.randn(shape, generator=generator, dtype=wide, device=generator.device).to(self.device, dtype)

    def _weight(self, shape: tuple[int, ...], terms: int) -> Tensor:
        """What an output sums has a sum of squares of about 1, so that what is mixed keeps its size."""
        entries = torch.randn(shape, generator=self.generator, device=self.generator.device).to(self.device)
        return entries * float(terms**-0.5)
