"""The CUDA kernels of mixings that depend on tokens, on a CPU that plays the GPU, against their formulas.

Planes, matrices and factors hold small multiples of 1/8. At hidden keys planes hold NaN before a kernel starts.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import needs_compiler
from test_emulated_strip import Strip, assert_close, eighths, empty, planes, run, source_of
from torch import Tensor

from mtagen.dtypes import TORCH_DTYPES
from mtagen.planner.strip.stages import Stages
from mtagen.planner.strip.tokens import TokenKernel
from mtagen.spec import Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]

SPECS = {
    "before": Spec(None, 64, mixed_heads=16, dynamic_ranks=(1, 2)),
    "before, full, queries alone": Spec(None, 64, mixed_heads=16, dynamic_ranks=(2, 0), causal=False, dtype="fp16"),
    "after": Spec(None, 64, post_mixed_heads=16, post_dynamic_ranks=(1, 2), dtype="fp16"),
    "after, a window": Spec(None, 64, post_mixed_heads=16, post_dynamic_ranks=(0, 1), window=(40, -1)),
}
STRIPS = (
    Strip(16, 1, 1),
    Strip(32, 9, 150, first=2, off=130, skip=3, sequences=2, b0=1),  # blocks of keys, groups of heads
    Strip(16, 5, 70, first=1, off=-3, skip=1),  # when causal, 2 rows see nothing
    Strip(16, 135, 70, off=10),  # chunks of rows
)
STEP = Strip(16, 4, 150, sequences=3, b0=1, lengths=(150, 2, 71))


class Tokens:
    """A mixing of the planes of a strip by matrices of rows and of keys, in float64."""

    def __init__(self, spec: Spec, strip: Strip) -> None:
        self.spec, self.strip = spec, strip
        (self.stage,) = Stages(spec).token_mixes
        self.n_q, self.n_k = strip.first + strip.count + 2, strip.keys + (0 if strip.lengths else 5)
        self.sequences, self.groups = strip.b0 + strip.sequences + 1, strip.heads // 16
        self.seen = strip.seen(spec)
        if self.stage.final:
            self.seen = self.seen & (torch.arange(strip.count) >= strip.skip)[:, None]
        shape = strip.slots, strip.count, strip.keys
        self.x, self.dy = (eighths(*shape, seed=n, largest=8) * self.seen for n in (1, 2))
        self.matrices = eighths(self.sequences, self.groups, self.n_q, 16, 16, seed=3, largest=4)
        self.factors = eighths(self.sequences, strip.heads, self.n_k, self.stage.width, seed=4, largest=4)

    @cached_property
    def own_matrices(self) -> Tensor:
        """(sequences, groups, rows, 16, 16)."""
        b0, first = self.strip.b0, self.strip.first
        return self.matrices[b0 : b0 + self.strip.sequences, :, first : first + self.strip.count]

    @cached_property
    def own_factors(self) -> Tensor:
        """(sequences, groups, 16, keys, factors)."""
        b0 = self.strip.b0
        own = self.factors[b0 : b0 + self.strip.sequences, :, : self.strip.keys]
        return own.unflatten(1, (self.groups, 16))

    def mixed(self, x: Tensor, matrices: Tensor, factors: Tensor) -> Tensor:
        """The mixture of planes (slots, rows, keys)."""
        x = x.view(self.strip.sequences, self.groups, 16, *x.shape[1:])
        y = torch.einsum("sgroi,sgirj->sgorj", matrices, x)
        if self.stage.rank:
            rank = self.stage.rank
            inner, outer, gate = factors.split((rank, rank, 1), -1)
            y = y + torch.einsum("sgojf,sgijf,sgirj->sgorj", outer, inner, x)
            y = y + gate[..., 0][:, :, :, None] * x
        return y.flatten(0, 2)

    def derived(self, dy: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the operands of the mixture."""
        leaves = [x.clone().requires_grad_() for x in operands]
        return torch.autograd.grad(self.mixed(*leaves), leaves if self.stage.rank else leaves[:2], dy)

    def run(self, role: str, folder: Path, seed: int = 0, *, checked: bool = False, **more: Any) -> None:
        """Run the kernel of a role."""
        source = source_of(self.spec, role)
        assert isinstance(source, TokenKernel)
        tensors = {"matrices": self.matrices.half(), "adjoints": self.matrices.to(TORCH_DTYPES[self.spec.dtype])}
        tensors |= {"key_factors": self.factors.float(), "n_q": self.n_q, "n_k": self.n_k, "key0": 0}
        run(source, self.strip, folder, seed, checked=checked, **tensors | more)

    def scores(self) -> Tensor:
        """The plane x, NaN where rows see no key."""
        return planes((self.x * self.stage.scale).where(self.seen, torch.nan), torch.float16, self.spec, self.strip)

    def mix(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """What the kernel of forward passes makes of x, in its place."""
        x = self.scores()
        out = x.view(TORCH_DTYPES[self.spec.dtype]) if self.stage.final else x
        role = f"decode_{self.stage.role}" if self.strip.lengths else self.stage.role
        self.run(role, folder, seed, checked=checked, x=x, out=out)
        return out

    def assert_mixed(self, out: Tensor, dtype: str) -> None:
        """The mixture; zeros where rows see no key, if values follow."""
        factor = 1 if self.stage.final else self.stage.scale
        expected = self.mixed(self.x, self.own_matrices, self.own_factors) * factor
        terms = self.mixed(self.x.abs(), self.own_matrices.abs(), self.own_factors.abs()) * factor
        given = out[:, :, : self.strip.keys]
        if self.stage.final:
            expected = expected.where(self.seen, 0)
        else:
            given = given.where(self.seen, 0)
        assert_close(given, expected.where(self.seen, 0), terms, dtype)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_mixing(spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(STRIPS):
        tokens = Tokens(spec, strip)
        tokens.assert_mixed(tokens.mix(folder, seed), spec.dtype if tokens.stage.final else "fp16")


@pytest.mark.parametrize("name", ["before", "after"])
def test_steps(name: str, folder: Path) -> None:
    """Sequences of a step have lengths of their own; rows before a sequence begins see nothing."""
    tokens = Tokens(SPECS[name], STEP)
    tokens.assert_mixed(tokens.mix(folder), tokens.spec.dtype if tokens.stage.final else "fp16")


def gradients(tokens: Tokens, folder: Path, seed: int = 0, *, checked: bool = False) -> dict[str, Tensor]:
    """The results of the kernel of gradients by names of arguments; sums of factors start as ones."""
    strip, dtype = tokens.strip, TORCH_DTYPES[tokens.spec.dtype]
    x = tokens.scores()
    source = source_of(tokens.spec, f"{tokens.stage.role}_backward")
    blocks, chunks = -(-strip.keys // 64), -(-strip.count // source.rows) + 1
    made = {
        "dy": planes(tokens.dy.where(tokens.seen, torch.nan), dtype, tokens.spec, strip),
        "out": x.view(dtype) if tokens.stage.final else empty(dtype, tokens.spec, strip),
        "matrix_parts": torch.zeros(blocks, strip.sequences, tokens.groups, strip.count, 16, 16),
        "key_partial": torch.ones(tokens.sequences, strip.heads, chunks, tokens.n_k, tokens.stage.width),
    }
    role = f"{tokens.stage.role}_backward"
    tokens.run(role, folder, seed, checked=checked, x=x, all_chunks=chunks, **made)
    return made


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradients(spec: Spec, folder: Path) -> None:
    """By autograd in float64; sums lie in the places of their blocks of keys and chunks of rows."""
    for seed, strip in enumerate(STRIPS):
        tokens = Tokens(spec, strip)
        made = gradients(tokens, folder, seed)
        operands = tokens.x, tokens.own_matrices, tokens.own_factors
        if tokens.stage.final:
            tokens.assert_mixed(made["out"], spec.dtype)

        exact = tokens.derived(tokens.dy, *operands)
        terms = tokens.derived(tokens.dy.abs(), *(x.abs() for x in operands))
        dx = made["dy"][:, :, : strip.keys]
        dx = dx if tokens.stage.final else dx.where(tokens.seen, 0)
        assert_close(dx, exact[0] * tokens.seen, terms[0], spec.dtype)
        assert_close(made["matrix_parts"].sum(0), exact[1], terms[1], "bf16")
        if not tokens.stage.rank:
            continue
        sums = made["key_partial"].double() - 1
        own = sums[strip.b0 : strip.b0 + strip.sequences, :, :, : strip.keys]
        assert own.count_nonzero() == sums.count_nonzero()
        summed = own.sum(2).unflatten(1, (tokens.groups, 16))
        assert_close(summed, exact[2], terms[2] + 1, "bf16")


@pytest.mark.parametrize("name", ["before", "after"])
def test_no_races(name: str, folder: Path) -> None:
    strip = Strip(16, 19, 70, off=60)
    for seed in (0, 1):
        tokens = Tokens(SPECS[name], strip)
        assert torch.equal(tokens.mix(folder, seed, checked=True)[:, 5:, :60], tokens.mix(folder)[:, 5:, :60])
        results = [gradients(tokens, folder, seed, checked=True), gradients(tokens, folder)]
        for part in ("matrix_parts", "key_partial"):
            assert torch.equal(*(result[part] for result in results))
