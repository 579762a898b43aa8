"""The accuracy rule, and the self-check's power to find a fault in any one result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mtagen import reference
from mtagen.accuracy import GRADIENT_FACTOR, Comparison, compare
from mtagen.check import check
from mtagen.errors import InputError, SpecError
from mtagen.measure.cases import Sizes
from mtagen.spec import Spec

INF = float("inf")
RESULTS = ("out", "lse", "dq", "dk", "dv", "dweight", "decode out", "decode lse")


def far(error: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A result off by ``error`` from the reference 1."""
    return torch.tensor([1.0, 1.0 + error], dtype=dtype)


ONE = torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize("factor", [2.0, GRADIENT_FACTOR])
def test_rule_scales_with_the_error_of_eager(factor: float) -> None:
    assert compare(far(0.99e-3 * factor), far(1e-3), ONE, factor=factor).ok
    assert not compare(far(1.01e-3 * factor), far(1e-3), ONE, factor=factor).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lucky_eager_leaves_the_rounding_of_its_dtype(dtype: torch.dtype) -> None:
    exact, ulp = ONE.to(dtype), torch.finfo(dtype).eps
    assert compare(far(ulp, dtype), exact, ONE).ok
    assert not compare(far(2 * ulp, dtype), exact, ONE).ok


def test_floor_follows_the_size_of_the_terms() -> None:
    zero, noise = torch.zeros(3), torch.full((3,), 1e-6)
    assert not compare(noise, zero, zero.double()).ok
    assert compare(noise, zero, zero.double(), terms=1.0).ok
    assert not compare(noise.double(), zero.double(), zero.double(), terms=1.0).ok


def test_fields_are_largest_absolute_errors() -> None:
    result = compare(torch.tensor([1.0, 1.5]), torch.tensor([0.5, 1.0]), ONE)
    assert (result.error, result.eager_error, result.allowed) == (0.5, 0.5, 1.0)


def test_equal_infinities_are_no_error() -> None:
    lse = torch.tensor([-INF, 1.0])
    assert compare(lse, lse, lse.double()) == compare(lse[1:], lse[1:], lse[1:].double())


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_nothing_not_finite_passes(bad: float) -> None:
    broken = torch.tensor([1.0, bad])
    assert compare(broken, far(0), ONE).error == INF
    assert not compare(broken, far(0), ONE).ok
    assert not compare(far(0), broken, ONE).ok  # an eager result that overflowed is no yardstick
    assert not compare(broken, broken, ONE).ok


def test_empty_results_agree() -> None:
    empty = torch.empty(0, 3)
    assert compare(empty, empty, empty.double()) == Comparison(0.0, 0.0, 0.0)
    assert compare(empty, empty, empty.double()).ok


def test_misuse_is_explained() -> None:
    with pytest.raises(InputError, match="shapes"):
        compare(ONE[:1].float(), ONE.float(), ONE)
    with pytest.raises(InputError, match="float64"):
        compare(ONE.float(), ONE.float(), ONE.float())


class Sound:
    """A sound op: computes in fp32 and rounds its output. ``fault`` names one result to spoil."""

    def __init__(self, spec: Spec, fault: str = "") -> None:
        self.fault = fault
        self.options: dict[str, Any] = {
            "causal": spec.causal,
            "key_padding": spec.key_padding,
            "mask": spec.mask,
            "return_lse": True,
        }

    def spoil(self, x: Tensor, name: str) -> Tensor:
        return x + 0.1 * x.detach() if name == self.fault else x

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, return_lse: bool) -> tuple[Tensor, Tensor]:
        assert return_lse
        leaves = [x.float().clone() for x in (q, k, v, weight)]
        for leaf, name in zip(leaves, ("dq", "dk", "dv", "dweight"), strict=True):
            leaf.register_hook(lambda grad, name=name: self.spoil(grad, name))
        out, lse = reference(*leaves, **self.options)
        return self.spoil(out, "out").to(q.dtype), self.spoil(lse, "lse")

    def decode(
        self,
        q_tail: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        weight: Tensor,
        *,
        cache_seqlens: Tensor,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        assert return_lse
        new = q_tail.shape[2] - weight.shape[1] + 1
        parts = []
        for i, n in enumerate(cache_seqlens.tolist()):
            q, k, v = q_tail[i : i + 1, :, -n:], k_cache[i : i + 1, :, :n], v_cache[i : i + 1, :, :n]
            out, lse = reference(q.float(), k.float(), v.float(), weight, **self.options)
            parts.append((out[:, :, -new:].to(q.dtype), lse[:, :, -new:]))
        out, lse = map(torch.cat, zip(*parts, strict=True))
        return self.spoil(out, "decode out"), self.spoil(lse, "decode lse")


SPECS = [
    Spec((6, 11), 16),
    Spec((3, 4), 16, 24, mask="output", key_padding="right", dtype="fp16"),
    Spec((2, 3), 32, causal=False, dtype="fp32"),
]
SMALL = (Sizes(1, 1, 1, 1, 1), Sizes(2, 4, 2, 20, 33), Sizes(1, 2, 1, 12, 5))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_check_passes_a_sound_op(spec: Spec) -> None:
    rows = list(check(Sound(spec), spec, torch.device("cpu"), SMALL))
    assert [(row.sizes._replace(heads=0, kv_heads=0), row.result) for row in rows] == [
        (sizes._replace(heads=0, kv_heads=0), name) for sizes in SMALL for name in RESULTS
    ]
    assert all(row.comparison.ok for row in rows), rows


@pytest.mark.parametrize(("kernel", "heads"), [((1, 1), 16), ((2, 3), 4), ((3, 3), 2), ((6, 11), 2)])
def test_check_compares_enough_weights(kernel: tuple[int, int], heads: int) -> None:
    """At least 16, for of few the largest error of eager may be small by luck."""
    spec = Spec(kernel, 16, dtype="fp32")
    (sizes,) = {row.sizes for row in check(Sound(spec), spec, torch.device("cpu"), [Sizes(1, 2, 1, 20, 20)])}
    assert sizes == Sizes(1, heads, heads // 2, 20, 20)


@pytest.mark.parametrize("fault", RESULTS)
def test_check_finds_a_fault_in_each_result(fault: str) -> None:
    spec = Spec((3, 5), 16, dtype="fp16")
    rows = check(Sound(spec, fault), spec, torch.device("cpu"), SMALL[1:2])
    assert [row.result for row in rows if not row.comparison.ok] == [fault]


def test_check_refuses_float64() -> None:
    spec = Spec((2, 3), 16, dtype="fp64")
    with pytest.raises(SpecError, match="fp64"):
        next(check(Sound(spec), spec, torch.device("cpu")))
