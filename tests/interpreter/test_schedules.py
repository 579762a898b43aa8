"""The kernel that schedules tiles of packed documents, against PyTorch's operations: every number is equal."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtagen
from mtagen import Spec, plan
from mtagen.codegen import render
from mtagen.runtime import documents
from mtagen.runtime.load import load_host

ORDERS = ("later", "earlier", "longest")
FUNCTIONS = ("_most_tiles", "_with_tiles")
# Documents, rows or keys of the longest one, and rows of a tile. More than 64 documents or tiles take several steps.
CASES = [(0, 1, 16), (1, 40, 16), (3, 30, 1), (5, 300, 128), (9, 50, 16), (150, 40, 16)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def generated() -> tuple[Callable[..., int], Callable[..., Any]]:
    """The host's functions that count tiles and schedule them, as a module without mtagen has them."""
    made = plan(Spec((2, 3), 16, packed=True), "sm_90a", "triton")
    module = load_host(made, render(made), "forward")
    count, schedule = (getattr(module, name) for name in FUNCTIONS)
    return count, inspect.unwrap(schedule)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def assert_equal(made: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    assert len(made) == len(expected) == 4
    for own, other in zip(made, expected, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert own.dtype == other.dtype == torch.int32
            assert own.is_contiguous()
            assert torch.equal(own, other)


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize(("number", "longest", "tile"), CASES)
def test_every_number(number: int, longest: int, tile: int, in_pages: bool) -> None:
    """For all orders, with empty documents, documents of equal lengths and rows behind the last document."""
    most_tiles, operations = generated()
    draws = random.Random(number)
    for order_of_rows, order_of_keys, layers, carried in zip(
        ORDERS, (None, *ORDERS), (1, 7, 1), (0, 5, 0), strict=False
    ):
        queries, keys = ([draws.choice((0, longest, draws.randint(0, longest))) for _ in range(number)] for _ in "qk")
        total_q, total_k = sum(queries) + draws.choice((0, 100)), sum(keys) + draws.choice((0, 7))
        all_documents = number + (1 if in_pages else 2)
        n_rows = most_tiles(total_q + carried * all_documents, all_documents, tile, layers)
        keys_of_call = order_of_keys and (most_tiles(total_k, all_documents, tile), order_of_keys)
        call = starts(queries), starts(keys), total_q, None if in_pages else total_k, tile
        schedules = (n_rows, order_of_rows), keys_of_call, carried
        assert_equal(documents._schedule(*call, *schedules), operations(*call, *schedules))


def test_only_keys_or_nothing() -> None:
    _, operations = generated()
    call = starts([3, 0, 9]), starts([5, 20, 0]), 14, 30, 8
    for keys in ((12, "earlier"), None):
        assert_equal(documents._schedule(*call, None, keys, 0), operations(*call, None, keys, 0))


def test_host_modules_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lowering does, but operations schedule many documents, and a module that is loaded again is not wrapped
    again.
    """
    calls = []
    monkeypatch.setattr(documents, "_schedule", lambda *call: calls.append(call))
    for backend, options in (
        ("triton", {}),
        ("cuda", {}),
        ("cuda", {"page_size": 16}),
        ("cuda", {"kernel": None, "post_mixed_heads": 2}),
    ):
        made = plan(Spec(**{"kernel": (2, 3), "head_dim": 16, "packed": True, **options}), "sm_90a", backend)
        sources = render(made)
        module = load_host(made, sources, "forward")
        assert load_host(made, sources, "forward") is module
        assert not hasattr(module._with_tiles.__wrapped__, "__wrapped__")
        call = starts([3]), starts([4]), 3, 4, 16, (3, "later"), None
        assert module._with_tiles(*call) is None
        assert calls.pop() == (*call, 0)
        many = torch.zeros(documents.MOST_DOCUMENTS + 1, dtype=torch.int32)
        assert len(module._with_tiles(many, many, 0, 0, 16, None, None)[0]) == len(many) + 2
        assert not calls


@pytest.mark.parametrize(("kernel", "lifts_keys"), [((2, 3), True), ((3, 2), False)])
def test_forward_schedules_keys_only_to_lift_them(
    kernel: tuple[int, int], lifts_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = mtagen.build(kernel, 16, backend="triton", target="sm_80")
    schedule, read = documents._schedule, []

    def noted(*call: Any) -> Any:
        read.append(tuple(asked is not None for asked in call[5:7]))
        return schedule(*call)

    monkeypatch.setattr(documents, "_schedule", noted)
    q, k, v = (torch.randn(5, 1, 16, requires_grad=True) for _ in range(3))
    cu_seq = starts([2, 3])
    out = op.varlen(q, k, v, torch.ones(1, *kernel), cu_seq_q=cu_seq, cu_seq_k=cu_seq, max_q=3, max_k=3)
    assert read == [(True, lifts_keys)]
    out.sum().backward()
    assert read[1:] == [(True, True)]
