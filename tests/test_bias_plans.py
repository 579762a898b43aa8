"""Plans of expressions before the convolution: which are a bias of lifted scores, and the kernels that this takes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from mtagen import Spec, plan
from mtagen.codegen import render
from mtagen.planner.geometry.affine import N_K, N_Q
from mtagen.planner.lift.bias import bias

ALIBI = "s - (i - j) / 8"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scores": "3 * tanh(s / 3)"}, "is no constant times s"),
        ({"scores": "s * t[h] + 1", "parameters": {"t": "h"}}, "is no constant times s"),
        ({"scores": "s + j / 8"}, "not of the distance"),
        ({"scores": "s + t[b] * (i - j)", "parameters": {"t": "b"}}, "a parameter of batch entries"),
        ({"scores": "s + i - j", "packed": True}, "packed documents"),
    ],
    ids=str,
)
def test_plans_say_why_others_take_strips(options: dict[str, Any], reason: str) -> None:
    planned = plan(Spec((3, 4), 64, **options), "sm_90a", "triton")
    assert len(planned.strip) == len(planned.passes)
    assert reason in str(planned)


def test_emitted_kernels_have_no_atomics() -> None:
    spec = Spec((3, 4), 64, scores="s + t[h, max(0, min(8, i - j + 2))]", parameters={"t": "h,9"})
    planned = plan(spec, "sm_90a", "triton")
    (text,) = render(planned).files.values()
    assert "_bias_of_tile" in text
    assert "atomic" not in text
    assert {"bias", "bwd_bias_gather", "bwd_bias"} <= {kernel.role for kernel in planned["backward"].kernels}


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": (3, 4)},
        {"kernel": (3, 4), "causal": False},
        {"kernel": (1, 4), "key_padding": "left"},
        {"kernel": (4, 3), "mask": "output", "window": (5, 0)},
        {"kernel": (2, 5), "causal": False, "window": (3, 2)},
    ],
    ids=str,
)
def test_scores_without_entries_of_their_own_have_all_taps_that_count(options: dict[str, Any]) -> None:
    """Each pair of a small grid, against the taps of its filter that are outside of the sequence."""
    spec = Spec(head_dim=16, scores=ALIBI, **options)
    found = bias(spec)
    assert found
    n_q, n_k, off = 7, 9, 2
    entries = n_q + n_k - 1 + 2 * found.margin + found.rows * n_k + (found.before + found.after) * n_q
    assert found.entries.subs({N_Q: n_q, N_K: n_k}) == entries
    for i, j in product(range(n_q), range(n_k)):
        if i < found.rows or j < found.before or j >= n_k - found.after:
            continue
        for u, v in product(range(spec.cq), range(spec.ck)):
            row, key = i + u - (spec.cq - 1), j + v - spec.pad_left
            position = i if spec.mask == "output" else row
            seen = spec.right is None or key - (position + off) <= spec.right
            assert not seen or (row >= 0 and 0 <= key < n_k)
