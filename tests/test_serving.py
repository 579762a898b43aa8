"""Rings of earlier queries against a list of all queries: chunks, single tokens, shared pages, tokens taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import CONTEXT, HEADS, WIDTH, Engine
from torch import Tensor

import mtagen
from mtagen import InputError
from mtagen.serving import Rings, Step

COMMANDS = st.one_of(
    st.tuples(st.just("step"), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.booleans(), st.integers(0, 2)),
    st.tuples(st.just("remove"), st.integers(0, 9), st.integers(1, 4)),
    st.tuples(st.just("fork"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.integers(0, 9)),
)


@settings(max_examples=100, deadline=None)
@given(
    size=st.sampled_from((2, 4, 8, 16)), spare=st.integers(0, 3), commands=st.lists(COMMANDS, min_size=1, max_size=10)
)
def test_chunks_drafts_forks_shared_pages_and_evictions(size: int, spare: int, commands: list[tuple[Any, ...]]) -> None:
    engine = Engine(size, spare)
    for _ in range(2):
        engine.begin()
    for name, *arguments in commands:
        requests = len(engine.tables)
        if name == "step":
            counts, hits, padding = arguments
            counts = [counts[request % len(counts)] for request in range(requests)]
            engine.step(counts, hits=[0] if hits and requests < 5 else [], padding=padding)
        elif name == "remove":
            request = arguments[0] % requests
            engine.remove(request, min(arguments[1], engine.removable(request)))
        elif name == "fork" and requests < 5:
            engine.fork(arguments[0] % requests)
        elif name == "evict" and requests > 1:
            engine.evict(arguments[0] % requests)


@pytest.mark.parametrize("size", [4, 8])
def test_full_pages_are_shared(size: int) -> None:
    engine = Engine(size, 0)
    engine.begin()
    engine.step([2 * size + 1])
    engine.begin(shared=2)
    engine.step([1, 3])
    engine.step([2, 1])


def test_a_page_that_another_request_fills_in_the_same_step() -> None:
    """The second request's earlier queries are not there before the step."""
    engine = Engine(8, 0)
    engine.begin()
    before = engine.rings.queries.clone()
    engine.step([9], hits=[0])
    page = engine.tables[1][0]
    assert before[page].isnan().all()
    assert not engine.rings.queries[page].isnan().any()


def test_without_spare_slots_tokens_cannot_be_taken_back() -> None:
    engine = Engine(8, 0)
    engine.begin()
    engine.step([15])
    engine.remove(0, 2)
    with pytest.raises(AssertionError, match="earlier queries"):
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
    assert rings.queries.isnan().all()


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
    with pytest.raises(InputError, match="lengths: got 'list'; must fit the requests"):
        Step.of_tables(rings, boundaries[0], [3], 3, table)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="total: got '3'; must be an int"):
        Step.of_tables(rings, *boundaries, "3", table)  # type: ignore[arg-type]


def one_step() -> tuple[Rings, Step, dict[str, Tensor]]:
    """Return rings, a step of 3 and 2 tokens, and keys, values and pages as :meth:`Rings.append` takes them."""
    rings = Rings(torch.zeros(4, CONTEXT, HEADS, WIDTH), 8, CONTEXT)
    boundaries, lengths = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
    step = Step.of_tables(rings, boundaries, lengths, 6, torch.tensor([[3, 0], [2, 1]], dtype=torch.int32))
    stored = {"k": torch.randn(6, 1, WIDTH), "v": torch.randn(6, 1, 4)}
    return rings, step, stored | {"k_pages": torch.zeros(4, 8, 1, WIDTH), "v_pages": torch.zeros(4, 8, 1, 4)}


def test_the_registered_op() -> None:
    rings, step, stored = one_step()
    q = torch.randn(6, HEADS, WIDTH)
    pages = rings.queries, stored["k_pages"], stored["v_pages"]
    for tensors in ((*pages, q, stored["k"], stored["v"]), (rings.queries, None, None, q, None, None)):
        torch.library.opcheck(torch.ops.mtagen.append.default, (*tensors, *step.places))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"q": torch.zeros(5, HEADS, WIDTH)}, "q: got ((5, 2, 3), torch.float32"),
    "dtype": ({"k": torch.zeros(6, 1, WIDTH).half()}, "k: got ((6, 1, 3), torch.float16"),
    "a part": ({"v": None}, "k, v, k_pages, v_pages: got ['k', 'k_pages', 'v_pages']; keys and values, and the pages"),
    "size": ({"k_pages": torch.zeros(4, 4, 1, WIDTH)}, "k_pages.shape: got (4, 4, 1, 3); must be pages of 8 tokens"),
    "stride": (
        {"v_pages": torch.zeros(4, 8, 4, 2).mT[:, :, :1]},
        "v_pages.shape: got (4, 8, 1, 4); must be pages of 8 tokens",
    ),
    "pages": ({"v_pages": torch.zeros(3, 8, 1, 4)}, "v_pages.shape: got (3, 8, 1, 4); must have as many pages as"),
    "gradients": ({"q": torch.zeros(6, HEADS, WIDTH, requires_grad=True)}, "calls on pages compute no gradients"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_refused(changes: dict[str, Any], message: str) -> None:
    rings, step, stored = one_step()
    given = {"q": torch.zeros(6, HEADS, WIDTH)} | stored | changes
    with pytest.raises(InputError) as caught:
        rings.append(given.pop("q"), step, **given)
    assert message in str(caught.value)
    assert not stored["k_pages"].any()


def test_tables_of_steps_are_checked() -> None:
    rings, step, _ = one_step()
    boundaries = torch.tensor([0, 3, 5], dtype=torch.int32), step.lengths
    for page in (-1, 4):
        with pytest.raises(InputError, match=rf"block_table\[1\]: got {page}; must be a page; legal: 0..3"):
            Step.of_tables(rings, *boundaries, 5, torch.tensor([[3, page], [2, page]], dtype=torch.int32))
    with pytest.raises(InputError, match=r"lengths\[1\]: got 9; must be a number of keys; legal: 0..8"):
        Step.of_tables(rings, *boundaries, 5, torch.tensor([[3], [2]], dtype=torch.int32))
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    wrong = {
        "begin with 0": [1, 3, 5],
        "not decrease": [0, 5, 3],
        "number of rows, 5": [0, 3, 6],
        "than tokens": [0, 4, 5],
    }
    for rule, values in wrong.items():
        with pytest.raises(InputError, match=rule):
            Step.of_tables(rings, torch.tensor(values, dtype=torch.int32), step.lengths, 5, table)


def test_the_last_token_of_a_shared_page_is_computed_again() -> None:
    engine = Engine(8, 1)
    engine.begin()
    engine.step([8])
    engine.begin(shared=1)
    last = engine.queries[1].pop()
    engine.step([1, 1], [torch.randn(1, HEADS, WIDTH), last[None]])


def test_an_op_without_context_has_no_rings() -> None:
    rings = Rings.for_op(mtagen.build(None, 16, backend="torch"), 2, pages=3, size=4)
    assert rings.queries.shape == (3, 0, 2, 16)
    q = torch.randn(3, 2, 16)
    cu_seq_q, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    step = Step.of_tables(rings, cu_seq_q, lengths, 3, torch.tensor([[0]], dtype=torch.int32))
    assert rings.append(q, step) is q


def test_rings_of_an_op() -> None:
    op = mtagen.build((6, 11), 16, post_kernel=(3, 3), backend="torch")
    rings = Rings.for_op(op, 2, pages=3, size=16, spare=4, dtype=torch.float64)
    assert rings.queries.shape == (3, *Rings.page_shape(op, 2, spare=4)) == (3, 7 + 4, 2, 16)
    assert rings.queries.dtype == torch.float64
    with pytest.raises(InputError, match="spare: got -1; must be an int, at least 0"):
        Rings.for_op(op, 2, pages=3, size=16, spare=-1)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["tokens", "heads"])
def test_rings_in_the_padding_of_pages(order: tuple[int, ...]) -> None:
    """Neither overwrites the other, and no page gets what nobody reads."""
    op = mtagen.build((6, 11), 16, backend="torch")
    pages, size, heads, slots = 4, 8, 2, 7
    content, ring = size * 3 * 32, slots * heads * 16
    memory = torch.full((pages, content + ring + 1), torch.nan)
    shape = [pages, size, 3, 32]
    held = memory[:, :content].unflatten(1, [shape[axis] for axis in order[1:]]).permute(order)
    rings = Rings.in_padding(op, heads, held, spare=2)
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
    assert memory[0].isnan().all()
    with pytest.raises(InputError, match=f"padding: got {ring + 1}; 8 queries of 2 heads"):
        Rings.in_padding(op, heads, held, spare=3)
    with pytest.raises(InputError, match="must lie one after another"):
        Rings.in_padding(op, heads, held[..., :-1], spare=2)


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
