"""The host functions that divide the work of the lowering "strip" (``templates/host/strips.py``), by brute force."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from mtagen import Spec
from mtagen.planner.geometry.mask import Mask
from mtagen.planner.strip.module import StripModule
from mtagen.planner.strip.passes import StripPass
from mtagen.templates.host.strips import Limits, Strip, _strips

CONTEXT = Spec((6, 11), 64, post_kernel=(3, 3), post_mixed_heads=2, dtype="fp16")
MASKS = {
    "causal": CONTEXT,
    "all keys": replace(CONTEXT, causal=False),
    "window": replace(CONTEXT, window=(40, -1)),
    "both edges": replace(CONTEXT, causal=False, window=(40, 30), dropout=True),
    "no context": Spec(None, 64, mixed_heads=2, dtype="fp16"),
}
SIZES = [(1, 2, 300, 300), (3, 2, 130, 513), (2, 1, 700, 140), (5, 1, 1, 1), (1, 1, 2500, 2500)]


def limits_of(spec: Spec) -> Limits:
    return Limits(**StripModule((StripPass(spec, "sm_90a", "forward"),)).limits)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("workspace_bytes", [2**10, 2**20, 2**30])
def test_strips(name: str, sizes: tuple[int, int, int, int], workspace_bytes: int) -> None:
    """Each row of outputs is in one strip, which has its context, the keys that these rows see, and room for them."""
    spec, (batch, heads, n_q, n_k) = MASKS[name], sizes
    limits, mask, off = limits_of(spec), Mask.of(spec), n_k - n_q
    chosen = limits.sizes(batch, heads, n_q, n_k, 2, workspace_bytes)
    owners = Counter[tuple[int, int]]()
    for strip in _strips(limits, chosen, batch, heads, n_q, n_k, 2, torch.float16, torch.device("cpu")):
        owners.update((b, i) for b in range(strip.b0, strip.b1) for i in range(strip.begin, strip.end))
        assert strip.first == max(0, strip.begin - spec.context)
        assert strip.key0 % limits.begin_multiple == 0
        assert_holds(strip, mask, off, n_k)
        assert [x.shape[:2] for x in strip.planes] == [((strip.b1 - strip.b0) * heads, strip.end - strip.first)] * 2
        assert strip.planes[0].shape[2] >= max(strip.keys, 0)
        shortest = strip.end - strip.first <= limits.min_rows and strip.b1 - strip.b0 == 1
        assert shortest or sum(x.nbytes for x in strip.planes) <= workspace_bytes
    assert owners == Counter((b, i) for b in range(batch) for i in range(n_q))


def assert_holds(strip: Strip, mask: Mask, off: int, n_k: int) -> None:
    """The keys of a strip exist, and are all that its rows see."""
    held = range(strip.key0, strip.key0 + strip.keys)
    assert not held or held[-1] < n_k
    for position in (strip.first + off, strip.end - 1 + off):
        first, last = mask.first_key(position), mask.last_key(position)
        seen = range(max(0, first or 0), n_k if last is None else min(n_k, last + 1))
        assert not seen or (seen[0] in held and seen[-1] in held)
