"""Random arguments of an operator."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..dtypes import ARGUMENT_DTYPES, TORCH_DTYPES
from ..evaluate import evaluate
from ..expressions.functions import GRADIENT, functions_of
from ..expressions.language import ENTRY, HEAD, KEY, POSITION, SCORE
from ..expressions.parameters import block_size
from ..spec import BATCH, FACTORS, SINK, Argument, Spec
from .cases import Sizes

_LARGE_SCORE = 4.0  # scores of normal vectors are rarely larger


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call.

    Attributes:
        q: ``(B, H, Nq, D)``; for decode the earlier rows that the new rows need, then the new rows.
        k: ``(B, Hkv, Nk, D)``.
        v: ``(B, Hkv, Nk, DV)``.
        weights: fp32 weights by the names of :meth:`mtagen.Spec.weights`, the factors of mixings, and the sink; plain
            attention has none.
        parameters: the tensors that expressions read, fp32, and the integers that the mask reads, by name.
        axes: the axes of each parameter, as :class:`mtagen.Spec` names them.
        without_gradients: the names of the parameters that have no gradient: integers and constants.
        slopes: the largest slope of an expression in each parameter, over visible scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    axes: Mapping[str, str] = field(default_factory=dict)
    without_gradients: Collection[str] = ()
    slopes: Mapping[str, float] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, Tensor]:
        """All arguments by name, in the order of a call."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.weights, **self.parameters}

    @property
    def arguments(self) -> list[Tensor]:
        """All arguments in the order of a call."""
        return list(self.named.values())

    def has_gradient(self, x: Tensor) -> bool:
        """Return whether the op has a gradient of one of the arguments."""
        return all(x is not self.parameters[name] for name in self.without_gradients)

    def options(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of a call besides q, k and v, given all tensors by name."""
        options: dict[str, Any] = {name: named[name] for name in self.weights}
        return options | ({"parameters": {name: named[name] for name in self.parameters}} if self.parameters else {})

    def part(self, name: str, x: Tensor, entry: int, tokens: slice) -> Tensor:
        """Return the part of a weight or parameter that one sequence of a batch reads, as a batch of one."""
        if name in FACTORS:
            rows = slice(-tokens.stop, None) if FACTORS[name][1] == 0 else tokens  # of queries, which are the last
            return x[entry : entry + 1, :, rows]
        axes = self.axes.get(name, "").split(",")
        for number, axis in enumerate(axes):
            if axis in ("b", "i", "j"):
                x = x[(slice(None),) * number + (slice(entry, entry + 1) if axis == "b" else tokens,)]
            elif size := block_size(axis):
                x = x[(slice(None),) * number + (slice(-(-tokens.stop // size)),)]
        return x


@dataclass(frozen=True)
class Sampler:
    """Draws standard normal tensors for one operator at one size; equal samplers draw equal tensors.

    Attributes:
        spec: the operator.
        sizes: sizes of its arguments.
        device: device of the tensors.
        generator: draws the numbers, maybe on another device.
        rows_outside_heads: whether a tensor lies in memory as ``(B, N, H, D)`` instead of ``(B, H, N, D)``.
    """

    spec: Spec
    sizes: Sizes
    device: torch.device
    generator: torch.Generator
    rows_outside_heads: bool

    @classmethod
    def for_checks(cls, spec: Spec, sizes: Sizes, device: torch.device) -> Sampler:
        """Return a sampler of equal numbers on every device, in the layout of a projection's
        output, ``(B, N, H, D)``.
        """
        return cls(spec, sizes, device, torch.Generator().manual_seed(0), rows_outside_heads=True)

    @classmethod
    def for_timing(cls, spec: Spec, sizes: Sizes, device: torch.device) -> Sampler:
        """Return a sampler of dense tensors that draws on their device, because the numbers may be
        many.
        """
        return cls(spec, sizes, device, torch.Generator(device).manual_seed(0), rows_outside_heads=False)

    def inputs(self, *, decode: bool = False) -> Inputs:
        """Draw the arguments of a call, or of a decode step."""
        spec, (batch, heads, kv_heads, nq, nk) = self.spec, self.sizes
        rows = nq + spec.context if decode else nq
        sizes = {"B": batch, "H": heads, "Hkv": kv_heads, "Nq": rows, "Nk": nk}
        sizes |= {"D": spec.head_dim, "DV": spec.value_head_dim}
        q, k, v = (self._rows(*argument.extents(sizes)) for argument in BATCH)
        weights = {name: self._weight(x, heads) for name, x in spec.weight_arguments.items()}
        described = replace(spec, packed=False).learned_arguments
        learned = {x.name: self._learned(x, sizes) for x in described}
        without_gradients = [x.name for x in described if not x.differentiable]
        weights |= {name: learned.pop(name) for name in (*spec.ranks, SINK.name) if name in learned}
        slopes = self._slopes(learned, without_gradients)
        return Inputs(q, k, v, weights, learned, dict(spec.parameters), without_gradients, slopes)

    def _slopes(self, parameters: Mapping[str, Tensor], without_gradients: Collection[str]) -> dict[str, float]:
        """Return the largest slope of an expression in each parameter with a gradient, for scores as large as normal
        vectors have.
        """
        spec, (batch, heads, _, nq, nk) = self.spec, self.sizes
        slopes = dict.fromkeys((name for name in parameters if name not in without_gradients), 0.0)
        if not slopes:
            return slopes
        entries, hs, rows, keys = (torch.arange(n, device=self.device) for n in (batch, heads, nq, nk))
        values = {ENTRY: entries[:, None, None, None], HEAD: hs[:, None, None], KEY: keys}
        values |= {POSITION: (rows + nk - nq)[:, None], SCORE: torch.tensor(_LARGE_SCORE, device=self.device)}
        values |= {GRADIENT: torch.tensor(1.0, device=self.device)}
        ahead = values[KEY] - values[POSITION]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        seen &= True if spec.right is None else ahead <= spec.right
        seen &= True if spec.left is None else ahead >= -spec.left
        for function in functions_of(spec.expressions, spec.parameters).values():
            for load in (x for x in function.loads if x.parameter in slopes):
                slope = evaluate(function.load_backward(load), values, parameters).abs()
                largest = slope.expand(batch, heads, nq, nk)[:, :, seen]
                slopes[load.parameter] = max(slopes[load.parameter], largest.max().item() if largest.numel() else 0.0)
        return slopes

    def queries(self, n: int, *, decode: bool = False) -> Tensor:
        """Draw q of ``n`` rows, or of ``n`` new tokens and the earlier rows that decode needs."""
        rows = n + self.spec.context if decode else n
        return self._rows(self.sizes.batch, self.sizes.heads, rows, self.spec.head_dim)

    def query_factors(self, n: int, *, decode: bool = False) -> dict[str, Tensor]:
        """Draw the factors of mixings that belong to the rows of :meth:`queries`."""
        rows = n + self.spec.context if decode else n
        sizes = {"B": self.sizes.batch, "H": self.sizes.heads, "Nq": rows}
        drawn = (x for x in self.spec.factor_arguments if "Nq" in x.shape)
        return {x.name: self._learned(x, sizes) for x in drawn}

    def outputs(self) -> Tensor:
        """Draw a tensor like out, ``(B, H, Nq, DV)``, for example the gradient of out."""
        return self._rows(self.sizes.batch, self.sizes.heads, self.sizes.nq, self.spec.value_head_dim)

    def _rows(self, batch: int, heads: int, n: int, dim: int) -> Tensor:
        if self.rows_outside_heads:
            return self._normal(batch, n, heads, dim).transpose(1, 2)
        return self._normal(batch, heads, n, dim)

    def _normal(self, *shape: int) -> Tensor:
        dtype, generator = TORCH_DTYPES[self.spec.dtype], self.generator
        # Some versions of PyTorch draw the same numbers in 16 bits as in fp32, and others do not.
        wide = torch.promote_types(dtype, torch.float32)
        return torch.randn(shape, generator=generator, dtype=wide, device=generator.device).to(self.device, dtype)

    def _learned(self, argument: Argument, sizes: Mapping[str, int]) -> Tensor:
        """Draw a sink or parameter: normal numbers, or keys for a mask."""
        shape, device = argument.extents(sizes), self.generator.device
        if "q" not in argument.dtypes:
            drawn = torch.randint(0, self.sizes.nk + 1, shape, generator=self.generator, device=device)
            return drawn.to(self.device, ARGUMENT_DTYPES[argument.dtypes[-1]])
        drawn = torch.randn(shape, generator=self.generator, device=device).to(self.device)
        # A factor of H^-1/2 keeps the magnitudes of what is mixed.
        return drawn * float(shape[1] ** -0.5) if argument.role == "factors" else drawn

    def _weight(self, weight: Argument, heads: int) -> Tensor:
        """Draw a weight; the squares of the entries in one sum add up to about 1, so that mixing
        keeps magnitudes.
        """
        shape = weight.extents({"H": heads})
        terms = shape[-1] if weight.role == "mixtures" else math.prod(shape[1:])
        entries = torch.randn(shape, generator=self.generator, device=self.generator.device).to(self.device)
        return entries * float(terms**-0.5)
