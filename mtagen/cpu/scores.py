"""The functions of scores in PyTorch ops, and the parameters and sinks that they take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..evaluate import evaluate, indices_of
from ..expressions.functions import GRADIENT, functions_of
from ..expressions.language import ENTRY, HEAD, KEY, POSITION, SCORE
from ..spec import Spec


class Place(NamedTuple):
    """Where a block of scores ``[G, R, J]`` lies.

    Attributes:
        entries, heads: batch entry and head of queries of each plane, ``[G]``.
        position, key: the first position and the first key.
    """

    entries: Tensor
    heads: Tensor
    position: int
    key: int

    @property
    def corner(self) -> int:
        """The first position minus the first key: i + off - j of the first score."""
        return self.position - self.key


def named_learned(spec: Spec, learned: list[Tensor]) -> dict[str, Tensor]:
    """Return the factors, the sink and the parameters of a call by name."""
    return {argument.name: x for argument, x in zip(spec.learned_arguments, learned, strict=True)}


class Functions:
    """The functions of scores of a call, applied to blocks; they accumulate the gradients of parameters.

    Attributes:
        sink: the sink, or None.
        factors: the factors of mixings by name.
        gradients: of the factors, the sink and the parameters, by name, except integers and constants.
    """

    def __init__(self, spec: Spec, learned: list[Tensor], dtype: torch.dtype) -> None:
        named = named_learned(spec, learned)
        self._functions, self._given = functions_of(spec.expressions, spec.parameters), named
        self._parameters = {name: x.to(dtype) for name, x in named.items() if name not in spec.mask_parameters}
        self.sink = self._parameters.pop("sink") if spec.sink else None
        self.factors = {name: self._parameters.pop(name) for name in spec.ranks}
        differentiable = [argument.name for argument in spec.learned_arguments if argument.differentiable]
        self.gradients = {name: torch.zeros_like(named[name], dtype=dtype) for name in differentiable}

    def value(self, name: str, scores: Tensor, place: Place) -> Tensor:
        """Return the values of scores, in a new tensor unless they are the scores.

        Args:
            name: the option that holds the function.
            scores: ``[G, R, J]``.
            place: where they lie.
        """
        function = self._functions.get(name)
        if function is None:
            return scores
        return evaluate(function.expr, _places(scores, place), self._parameters).expand_as(scores)

    def backward(self, name: str, gradient: Tensor, scores: Tensor, place: Place) -> Tensor:
        """Return the gradient of scores from that of their values; add those of parameters to ``gradients``."""
        function = self._functions.get(name)
        if function is None:
            return gradient
        values = _places(scores, place) | {GRADIENT: gradient}
        for load in function.loads:
            if load.parameter not in self.gradients:
                continue
            terms = evaluate(function.load_backward(load), values, self._parameters).expand_as(scores)
            total = self.gradients[load.parameter]
            indices = indices_of(load, values, total)
            read = sum(indices, terms.new_zeros(()))  # of the shape that the indices broadcast to
            shape = (terms.new_zeros(1, 1, 1) + read).shape
            shared = [axis for axis, extent in enumerate(shape) if extent == 1]  # scores along these read one entry
            terms = terms.sum(shared, keepdim=True) if shared else terms
            if indices:
                total.index_put_(indices, terms.view(read.shape), accumulate=True)
            else:
                total += terms.view(())
        return evaluate(function.backward, values, self._parameters).expand_as(scores)

    def results(self) -> list[Tensor]:
        """Return ``gradients`` in the order and the dtypes of the tensors; of shape (0,) for those that have none."""
        sums = self.gradients
        return [sums[name].to(x.dtype) if name in sums else x.new_empty(0) for name, x in self._given.items()]

    def sink_of(self, place: Place) -> Tensor | None:
        """Return the sink's logit of each plane, ``[G, 1, 1]``, or None."""
        return None if self.sink is None else self.sink[place.heads, None, None]

    def sink_backward(self, lse: Tensor, minus_dots: Tensor, place: Place) -> None:
        """Add the gradient of the sink, ``exp(sink - lse) (dlse - D)`` of each row, to ``gradients``.

        Args:
            lse: log-sum-exps of rows, ``[G, R, 1]``.
            minus_dots: dlse - D, alike.
            place: of the rows.
        """
        sink = self.sink_of(place)
        if sink is not None:
            terms = ((sink - lse).exp() * minus_dots).sum((1, 2))
            self.gradients["sink"].index_add_(0, place.heads, terms)


def _places(scores: Tensor, place: Place) -> dict[object, Tensor]:
    rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape[1:])
    values = {SCORE: scores, HEAD: place.heads[:, None, None], ENTRY: place.entries[:, None, None]}
    return values | {POSITION: rows[:, None] + place.position, KEY: keys + place.key}
