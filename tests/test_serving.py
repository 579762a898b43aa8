"""Rings of earlier queries against a list of all queries: chunks, single tokens, shared pages, tokens taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mtagen
from mtagen import InputError
from mtagen.serving import Rings, Step

CONTEXT, WIDTH, PAGES = 5, 3, 12  # of (6, 11); a query has WIDTH numbers here


class Engine:
    """Requests of an engine with rings, and the queries of each request as a list."""

    def __init__(self, size: int, spare: int) -> None:
        self.rings = Rings(torch.full((PAGES + 1, CONTEXT + spare, 1, WIDTH), torch.nan), size, CONTEXT)
        self.size, self.free = size, list(range(PAGES))
        self.tables: list[list[int]] = []
        self.queries: list[list[Tensor]] = []
        self.drawn = torch.Generator().manual_seed(0)

    def begin(self, shared: int = 0, of: int = 0) -> None:
        """Add a request that begins with some pages of another."""
        self.tables.append(self.tables[of][:shared] if shared else [])
        self.queries.append(self.queries[of][: shared * self.size] if shared else [])

    def step(self, counts: list[int], new: list[Tensor] | None = None) -> None:
        """Take the next tokens of all requests, and check the rows before them."""
        drawn = new or [torch.randn(count, 1, WIDTH, generator=self.drawn) for count in counts]
        past = [list(queries) for queries in self.queries]
        for table, queries, rows in zip(self.tables, self.queries, drawn, strict=True):
            queries.extend(rows)
            while len(table) * self.size < len(queries):
                table.append(self.free.pop())
        width = max(map(len, self.tables), default=0)
        tables = torch.tensor([table + [-1] * (width + 1 - len(table)) for table in self.tables], dtype=torch.int32)
        cu_seq_q = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([len(queries) for queries in self.queries], dtype=torch.int32)
        step = Step.of_tables(self.rings, cu_seq_q, lengths, sum(counts), tables)
        got = self.rings.append(torch.cat(drawn), step).split((cu_seq_q.diff() + CONTEXT).tolist())
        for rows, before, own in zip(got, past, drawn, strict=True):
            earlier = [torch.zeros(1, WIDTH)] * CONTEXT + before
            assert torch.equal(rows, torch.cat([torch.stack(earlier[-CONTEXT:]), own]))

    def remove(self, request: int, count: int) -> None:
        """Take back the last tokens of a request."""
        kept = len(self.queries[request]) - count
        del self.queries[request][kept:]
        while (len(self.tables[request]) - 1) * self.size >= kept and self.tables[request]:
            self.free.append(self.tables[request].pop())


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from((2, 4, 8, 16)),
    steps=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_chunks_and_single_tokens(size: int, steps: list[list[int]]) -> None:
    engine = Engine(size, 0)
    engine.free = list(range(100))
    engine.rings = Rings(torch.full((101, CONTEXT, 1, WIDTH), torch.nan), size, CONTEXT)
    for _ in range(3):
        engine.begin()
    for counts in steps:
        engine.step(counts)


@settings(max_examples=60, deadline=None)
@given(
    spare=st.integers(1, 4),
    prompt=st.integers(1, 30),
    steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=8),
)
def test_tokens_are_taken_back(spare: int, prompt: int, steps: list[tuple[int, int]]) -> None:
    engine = Engine(8, spare)
    engine.free = list(range(100))
    engine.rings = Rings(torch.full((101, CONTEXT + spare, 1, WIDTH), torch.nan), 8, CONTEXT)
    engine.begin()
    engine.step([prompt])
    for count, removed in steps:
        engine.step([count])
        engine.remove(0, min(removed, count, spare))


@pytest.mark.parametrize("size", [4, 8])
def test_full_pages_are_shared(size: int) -> None:
    engine = Engine(size, 0)
    engine.begin()
    engine.step([2 * size + 1])
    engine.begin(shared=2)
    engine.step([1, 3])
    engine.step([2, 1])


def two_requests_with_one_page() -> tuple[Engine, list[Tensor]]:
    """Return an engine whose first request fills a page of the second in the next step, and the step's queries."""
    engine = Engine(8, 0)
    rows = torch.randn(9, 1, WIDTH, generator=engine.drawn)
    engine.begin()
    engine.tables[0] = [engine.free.pop(), engine.free.pop()]
    engine.begin()
    engine.tables[1], engine.queries[1] = engine.tables[0][:1], list(rows[:8])
    return engine, [rows, torch.randn(2, 1, WIDTH, generator=engine.drawn)]


def test_a_page_that_another_request_fills_in_the_same_step() -> None:
    engine, new = two_requests_with_one_page()
    engine.step([9, 2], new)


def test_rings_that_are_read_too_early_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Step.of_tables

    def early(*arguments: Any) -> Step:
        step = of(*arguments)
        return Step(**{**vars(step), "is_open": torch.ones_like(step.is_open)})

    monkeypatch.setattr(Step, "of_tables", early)
    engine, new = two_requests_with_one_page()
    with pytest.raises(AssertionError):
        engine.step([9, 2], new)


def test_without_spare_slots_tokens_cannot_be_taken_back() -> None:
    engine = Engine(8, 0)
    engine.begin()
    engine.step([15])
    engine.remove(0, 2)
    with pytest.raises(AssertionError):
        engine.step([1])


def test_padding_is_stored_nowhere() -> None:
    rings = Rings(torch.full((4, CONTEXT, 1, WIDTH), torch.nan), 8, CONTEXT)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    cu_seq_q, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    q = torch.arange(5.0)[:, None, None].expand(5, 1, WIDTH)
    rows = rings.append(q, Step.of_tables(rings, cu_seq_q, lengths, 5, table))
    assert torch.equal(rows[:, 0, 0], torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 2, 3, 4]))
    assert torch.equal(rings.queries[0, :2, 0, 0], torch.tensor([0.0, 1]))
    assert rings.queries[0, 2:].isnan().all()
    assert rings.queries[1:3].isnan().all()


def test_steps_without_requests_and_tokens() -> None:
    rings = Rings(torch.full((4, CONTEXT, 1, WIDTH), torch.nan), 8, CONTEXT)
    nothing = torch.zeros(0, dtype=torch.int32)
    step = Step.of_tables(rings, torch.zeros(1, dtype=torch.int32), nothing, 3, torch.zeros(0, 1, dtype=torch.int32))
    q = torch.ones(3, 1, WIDTH)
    assert torch.equal(rings.append(q, step), q)
    none = torch.zeros(2, dtype=torch.int32)
    step = Step.of_tables(rings, none, none[:1], 0, torch.zeros(1, 0, dtype=torch.int32))
    assert torch.equal(rings.append(q[:0], step), torch.zeros(CONTEXT, 1, WIDTH))
    assert rings.queries[:-1].isnan().all()


def test_steps_of_other_rings_are_refused() -> None:
    rings = Rings(torch.zeros(4, CONTEXT, 1, WIDTH), 8, CONTEXT)
    others = Rings(torch.zeros(4, 0, 1, WIDTH), 8, 0)
    boundaries = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    step, other = (Step.of_tables(x, *boundaries, 3, table) for x in (rings, others))
    q = torch.zeros(3, 1, WIDTH)
    for held, wrong in ((rings, other), (others, step)):
        with pytest.raises(InputError, match="the step was made for rings of other pages, slots, sizes or context"):
            held.append(q, wrong)
    with pytest.raises(InputError, match="must fit the requests"):
        Step.of_tables(rings, boundaries[0].long(), boundaries[1], 3, table)


def test_the_last_token_of_a_shared_page_is_computed_again() -> None:
    engine = Engine(8, 1)
    engine.begin()
    engine.step([8])
    engine.begin(shared=1)
    last = engine.queries[1].pop()
    engine.step([1, 1], [torch.randn(1, 1, WIDTH), last[None]])


def test_pages_that_an_engine_copies() -> None:
    engine = Engine(8, 0)
    engine.begin()
    engine.step([6])
    engine.begin()
    engine.tables[1], engine.queries[1] = [engine.free.pop()], list(engine.queries[0])
    engine.rings.copy_pages(torch.tensor(engine.tables[0]), torch.tensor(engine.tables[1]))
    engine.step([1, 2])


def test_an_op_without_context_has_no_rings() -> None:
    rings = Rings.for_op(mtagen.build(None, 16, backend="torch"), 2, pages=3, size=4)
    assert rings.queries.shape == (4, 0, 2, 16)
    q = torch.randn(3, 2, 16)
    cu_seq_q, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    step = Step.of_tables(rings, cu_seq_q, lengths, 3, torch.tensor([[0]], dtype=torch.int32))
    assert rings.append(q, step) is q


def test_rings_of_an_op() -> None:
    op = mtagen.build((6, 11), 16, post_kernel=(3, 3), backend="torch")
    rings = Rings.for_op(op, 2, pages=3, size=16, spare=4, dtype=torch.float64)
    assert rings.queries.shape == (4, *Rings.page_shape(op, 2, spare=4)) == (4, 7 + 4, 2, 16)
    assert rings.queries.dtype == torch.float64
    with pytest.raises(InputError, match="spare: got -1; must be an int, at least 0"):
        Rings.for_op(op, 2, pages=3, size=16, spare=-1)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["tokens", "heads"])
def test_rings_in_the_padding_of_pages(order: tuple[int, ...]) -> None:
    """Neither overwrites the other, and page 0 takes what nobody reads."""
    op = mtagen.build((6, 11), 16, backend="torch")
    pages, size, heads, slots = 4, 8, 2, 7
    content, ring = size * 3 * 32, slots * heads * 16
    memory = torch.full((pages, content + ring + 1), torch.nan)
    shape = [pages, size, 3, 32]
    held = memory[:, :content].unflatten(1, [shape[axis] for axis in order[1:]]).permute(order)
    rings = Rings.in_padding(op, heads, held, spare=2, unread=0)
    assert rings.queries.shape == (pages, slots, heads, 16)
    assert (rings.size, rings.context) == (size, 5)
    table, done = torch.tensor([[2, 1, 3]], dtype=torch.int32), 0
    q = torch.randn(21, heads, 16)
    for count in (12, 1, 8):
        cu_seq_q, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, count], [done + count]))
        step = Step.of_tables(rings, cu_seq_q, lengths, count, table)
        rows = rings.append(q[done : done + count], step)
        expected = torch.cat([torch.zeros(5, heads, 16), q])[done : done + count + 5]
        assert torch.equal(rows, expected)
        done += count
    assert held.isnan().all()
    assert memory[:, -1].isnan().all()
    assert not memory[0, content:-1].isnan().all()
    with pytest.raises(InputError, match=f"padding: got {ring + 1}; 8 queries of 2 heads"):
        Rings.in_padding(op, heads, held, spare=3, unread=0)
    with pytest.raises(InputError, match="must lie one after another"):
        Rings.in_padding(op, heads, held[..., :-1], spare=2, unread=0)


def test_a_whole_engine_step_equals_the_op() -> None:
    op = mtagen.build((6, 11), 16, post_kernel=(3, 3), post_mixed_heads=2, backend="torch")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 30, 2, 16, dtype=torch.float64)
    weights = {name: torch.randn(shape).double() for name, shape in op.plan.spec.weights(2).items()}
    whole = op(*(x.transpose(0, 1)[None] for x in (q, k, v)), **weights)[0].transpose(0, 1)
    pages = torch.full((2, 6, 8, 2, 16), torch.nan, dtype=torch.float64)
    rings = Rings.for_op(op, 2, pages=6, size=8, dtype=torch.float64)
    table, done, outs = torch.tensor([[4, 1, 5, 2]], dtype=torch.int32), 0, []
    for count in (3, 1, 9, 1, 1, 15):
        positions = torch.arange(done, done + count)
        for held, x in zip(pages, (k, v), strict=True):
            held[table[0, positions // 8], positions % 8] = x[positions]
        done += count
        cu_seq_q, lengths = torch.tensor([0, count], dtype=torch.int32), torch.tensor([done], dtype=torch.int32)
        step = Step.of_tables(rings, cu_seq_q, lengths, count, table)
        rows = rings.append(q[positions], step)
        boundaries = {"cu_seq_q": step.cu_seq_q, "lengths": lengths, "max_q": len(rows), "max_k": 30}
        outs.append(op.paged(rows, *pages, **weights, block_table=table, **boundaries))
    torch.testing.assert_close(torch.cat(outs), whole)
