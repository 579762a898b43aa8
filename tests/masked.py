"""Ops with the option ``visible``, and arguments of their calls."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import mtagen
from mtagen.call import Call

HEADS, KV_HEADS, DIM = 4, 2, 16
# Each with the integers that it reads: a function of (batch, tokens).
MASKS: dict[str, dict[str, Any]] = {
    "prefix": {"causal": False, "visible": "(j <= i) | (j < prefix[b])", "parameters": {"prefix": "b"}},
    "padding": {"causal": False, "visible": "j < lengths[b]", "parameters": {"lengths": "b"}},
    "chunks": {"visible": "i // 8 == j // 8"},
    "chunks seen whole": {"causal": False, "visible": "i // 8 == j // 8", "window": (5, -1)},
    "earlier queries only": {"visible": "j < i"},
    "begins with a token": {"visible": "j >= first[b, i]", "parameters": {"first": "b,i"}},
    "table": {"causal": False, "visible": "j < ends[min(3, max(0, i // 8))]", "parameters": {"ends": "4"}},
    "two bounds on a side": {"visible": "(abs(i - j) < 9) & (j >= i // 2)"},
    "nothing": {"visible": "(j < 2) & (j > 3)"},
}
# Masks whose keys may have gaps. The first three are two runs with a gap between them.
GAPS: dict[str, dict[str, Any]] = {
    "sinks and a window": {"visible": "(j < 4) | (i - j < 9)"},
    "two windows": {
        "causal": False,
        "visible": "(abs(i - j) < 3) | ((i - j >= 12) & (i - j <= starts[b]))",
        "parameters": {"starts": "b"},
    },
    "a gap that moves back": {"visible": "(j < 20 - i // 2) | (i - j < 4)"},
    "every other key": {"visible": "j % 2 == 0"},
    "a dilated window": {"visible": "((i - j) % 3 == 0) & (i - j < 20)"},
    "documents by numbers": {"visible": "ids[b, i] % 3 == ids[b, j] % 3", "parameters": {"ids": "b,i"}},
    "a list of keys": {
        "causal": False,
        "visible": "(list[min(3, j // 8)] % 2 == 1) | (j == i)",
        "parameters": {"list": "4"},
    },
    "chosen blocks": {
        "visible": "(blocks[b, i // 8, j // 8] % 3 == 1) | ((blocks[b, i // 8, j // 8] % 3 == 2) & (i - j < 9))",
        "parameters": {"blocks": "b, i // 8, j//8"},
    },
    "not itself": {"causal": False, "visible": "~((j == i) | (j % 5 == i // 8)) & (j >= i // 2)"},
}


class Problem:
    """An op, and fp64 arguments of a call."""

    def __init__(self, options: dict[str, Any], nq: int = 30, nk: int = 37, batch: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        self.op = mtagen.build(head_dim=DIM, target="cpu", dtype="fp64", **options)
        self.spec = self.op.plan.spec
        sizes = {"B": batch, "H": HEADS, "Hkv": KV_HEADS, "Nq": nq, "Nk": nk, "D": DIM, "DV": DIM}
        self.tensors = {}
        for x in self.spec.arguments:
            shape = x.extents(sizes)
            if x.differentiable:
                self.tensors[x.name] = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
            else:
                self.tensors[x.name] = torch.randint(0, nk + 2, shape, generator=generator, dtype=torch.int32)
        names = [name for name, _ in self.spec.parameters]
        self.parameters = {name: self.tensors[name] for name in names}
        self.call = {name: x for name, x in self.tensors.items() if name not in names}
        self.call |= {"parameters": self.parameters or None}
        rules = ("causal", "window", "visible", "logits")
        self.rules = {name: options[name] for name in rules if name in options}

    def gradients(self, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """Gradients of a function of the output and of log-sum-exps that are finite."""
        loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum()
        leaves = {name: x for name, x in self.tensors.items() if x.requires_grad}
        return dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True), strict=True))


def call_of(problem: Problem, **others: Any) -> Call:
    """The record of a call; of an op whose only stage is a convolution, or none."""
    slots = {f"parameter{number}": x for number, x in enumerate(problem.parameters.values())}
    fields = dict.fromkeys(Call._fields) | {name: problem.tensors[name] for name in "qkv"} | slots
    return Call(**fields | {"weight": problem.tensors.get("weight"), "scale": 1.0, "key": ""} | others)
