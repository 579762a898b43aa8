"""Tables of masks, and the loops that read them, against every pair of a query and a key."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from masked import GAPS, MASKS, Problem, call_of
from test_loops import BLOCKS, compiled, visited
from test_visible import pairs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtagen.call import Step
from mtagen.ops import mask_tables
from mtagen.planner.geometry.loops import key_loop, row_loop
from mtagen.planner.geometry.mask import Mask
from mtagen.spec import Spec

TABULATED = Mask(None, None, is_tabulated=True)
CHECKED = Mask(None, None, is_tabulated=True, condition="if01234567")
WITH_GAP = Mask(None, None, is_tabulated=True, condition="if01234567", has_gap=True)
SIZES = [(30, 37), (1, 1), (9, 5), (16, 16)]


class Operations(TorchDispatchMode):
    """Names of the operations that start a kernel."""

    VIEWS = ("expand", "unsqueeze", "view", "select", "slice", "transpose")

    def __enter__(self) -> Operations:
        self.names: list[str] = []
        super().__enter__()
        return self

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.names += [name] * (name not in self.VIEWS)
        return function(*args, **(kwargs or {}))


def seen_by(first: Tensor, last: Tensor, n_k: int) -> Tensor:
    keys = torch.arange(n_k)
    return (keys >= first[..., None]) & (keys <= last[..., None])


def assert_rows_of_keys(seen: Tensor, first_rows: Tensor, end_rows: Tensor) -> None:
    """Rows outside of those that tables name see no key of a block; no end has a row too many."""
    n_q, n_k = seen.shape
    for begin, end in itertools.combinations(range(n_k + 1), 2):
        rows = seen[:, begin:end].any(1).nonzero().flatten()
        named = range(int(first_rows[begin]), int(end_rows[end - 1]))
        assert {*rows.tolist()} <= {*named}
    for key in range(n_k):
        rows = seen[:, key:].any(1).nonzero().flatten()
        assert int(first_rows[key]) == (rows[0] if len(rows) else n_q)
        rows = seen[:, : key + 1].any(1).nonzero().flatten()
        assert int(end_rows[key]) == (rows[-1] + 1 if len(rows) else 0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_tables_of_a_batch(mask: str, sizes: tuple[int, int]) -> None:
    problem = Problem(MASKS[mask] | {"kernel": None}, *sizes)
    tables = mask_tables.of_call(problem.spec, call_of(problem), "backward")
    assert [x.dtype for x in tables] == [torch.int32] * 4
    assert all(x.is_contiguous() for x in tables)
    first, last, first_rows, end_rows = tables
    seen = pairs(problem.rules, problem.parameters, 3, *sizes)
    assert torch.equal(seen_by(first, last, sizes[1]), seen)
    for entry in range(3):
        assert_rows_of_keys(seen[entry], first_rows[entry], end_rows[entry])
    short = mask_tables.of_call(problem.spec, call_of(problem), "forward")
    assert all(map(torch.equal, short, tables[:2]))


@pytest.mark.parametrize(("mask", "most"), [("prefix", (14, 22)), ("chunks", (13, 21)), ("padding", (13, 21))])
def test_a_call_starts_few_operations(mask: str, most: tuple[int, int]) -> None:
    """Each takes some microseconds of a call, whatever its sizes; views take none of a GPU."""
    problem = Problem(MASKS[mask] | {"kernel": None})
    for pass_name, count in zip(("forward", "backward"), most, strict=True):
        with Operations() as started:
            mask_tables.of_call(problem.spec, call_of(problem), pass_name)
        assert 0 < len(started.names) <= count, started.names


def test_integers_that_int32_cannot_hold() -> None:
    problem = Problem(MASKS["begins with a token"] | {"kernel": None}, 4, 4, batch=1)
    problem.parameters["first"] = torch.tensor([[0, 2**32, -(2**32), 2**40 + 3]])
    first, last = mask_tables.of_call(problem.spec, call_of(problem), "forward")
    assert first.tolist() == [[0, 2**30, 0, 2**30]]
    assert last.tolist() == [[0, -1, 2, -1]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mask", GAPS)
def test_tables_of_a_batch_with_gaps(mask: str, sizes: tuple[int, int]) -> None:
    """The first and the last keys contain what is seen, no key of a gap is seen, and parameters that kernels read
    follow."""
    problem = Problem(GAPS[mask] | {"kernel": None}, *sizes)
    made = mask_tables.of_call(problem.spec, call_of(problem), "backward")
    names = [x.name for x in (*problem.spec.tables("backward"), *problem.spec.checked_arguments)]
    tables = dict(zip(names, made, strict=True))
    seen = pairs(problem.rules, problem.parameters, 3, *sizes)
    assert not (seen & ~seen_by(tables["first_keys"], tables["last_keys"], sizes[1])).any()
    assert problem.spec.has_gap == ("first_hidden" in names) == (mask in [*GAPS][:3])
    for name in problem.spec.checked_parameters:
        assert torch.equal(tables[f"parameter_{name}"], problem.parameters[name])
    if not problem.spec.has_gap:
        return
    in_gap = seen_by(tables["first_hidden"], tables["last_hidden"], sizes[1])
    assert not (seen & in_gap).any()
    rows = torch.arange(sizes[0])[:, None]
    whole = (rows >= tables["first_hidden_rows"][:, None]) & (rows < tables["end_hidden_rows"][:, None])
    assert not (whole & ~in_gap).any()
    if sizes == (30, 37):
        assert whole[:, 20:].any()
        short = mask_tables.of_call(problem.spec, call_of(problem), "forward")
        assert all(map(torch.equal, short[:4], made[:4]))


def test_gaps_of_documents() -> None:
    """Rows of one document tell nothing about another."""
    problem = Problem(GAPS["sinks and a window"] | {"kernel": None}, 40, 40, batch=1)
    lengths = [3, 0, 20, 14]  # and rows that belong to none
    cu_seq = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = {name: problem.tensors[name][0].transpose(0, 1) for name in "qkv"}
    call = call_of(problem, **packed, cu_seq_q=cu_seq, cu_seq_k=cu_seq, max_q=20, max_k=20)
    *_, first_hidden, last_hidden, _, _, first_rows, end_rows = mask_tables.of_call(problem.spec, call, "backward")
    for begin, n in zip(cu_seq.tolist(), lengths, strict=False):
        own = slice(begin, begin + n)
        seen = pairs(problem.rules, {}, 1, n, n)[0]
        in_gap = seen_by(first_hidden[own], last_hidden[own], n)
        assert not (seen & in_gap).any()
        rows = torch.arange(n)[:, None]
        whole = (rows >= first_rows[own]) & (rows < end_rows[own])
        assert not (whole & ~in_gap).any()
        assert whole.any() == (n > 13)


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "begins with a token"])
def test_tables_of_documents(mask: str) -> None:
    """Rows and keys after the last document belong to none."""
    problem = Problem(MASKS[mask] | {"kernel": None}, 30, 37, batch=4)
    lengths_q, lengths_k = [7, 0, 9, 4], [7, 3, 12, 4]
    cu_seq_q, cu_seq_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths_q, lengths_k))
    packed = {name: problem.tensors[name][0].transpose(0, 1) for name in "qkv"}
    call = call_of(problem, **packed, cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=9, max_k=12)
    first, last, first_rows, end_rows = mask_tables.of_call(problem.spec, call, "backward")
    assert first.shape == last.shape == (30,)
    assert first_rows.shape == end_rows.shape == (37,)
    for document, (n_q, n_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows = slice(int(cu_seq_q[document]), int(cu_seq_q[document + 1]))
        keys = slice(int(cu_seq_k[document]), int(cu_seq_k[document + 1]))
        own = {
            name: x[document : document + 1] if len(x) == 4 and name != "ends" else x
            for name, x in problem.parameters.items()
        }
        seen = pairs(problem.rules, own, 1, n_q, n_k)[0]
        assert torch.equal(seen_by(first[rows], last[rows], n_k), seen)
        assert_rows_of_keys(seen, first_rows[keys], end_rows[keys])


@pytest.mark.parametrize("mask", MASKS)
def test_tables_of_a_step(mask: str) -> None:
    """The rows of a step, among them the earlier queries that the new ones depend on, end at the end of the keys."""
    problem = Problem(MASKS[mask] | {"kernel": (3, 5)}, 37, 37, batch=2)
    slots = {f"parameter{number}": x for number, x in enumerate(problem.parameters.values())}
    lengths = [37, 4]
    fields = dict.fromkeys(Step._fields) | slots | {"scale": 1.0, "num_splits": 0, "key": ""}
    fields |= {"k_cache": problem.tensors["k"], "v_cache": problem.tensors["v"]}
    step = Step(**fields | {"q_tail": problem.tensors["q"][:, :, -5:], "cache_seqlens": torch.tensor(lengths)})
    first, last = mask_tables.of_step(problem.spec, step)
    assert first.shape == last.shape == (2, 5)
    for entry, n in enumerate(lengths):
        own = {
            name: x[entry : entry + 1] if dict(problem.spec.parameters)[name].startswith("b") else x
            for name, x in problem.parameters.items()
        }
        seen = pairs(problem.rules, own, 1, 5, n)[0]
        seen[: max(0, 5 - n)] = False  # rows before the sequence
        assert torch.equal(seen_by(first[entry], last[entry], n), seen)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("seed", range(10))
def test_loops_visit_the_tiles_that_rows_see(blocks: tuple[int, int], seed: int) -> None:
    """Whatever the first and last keys: no visible pair is left out, and none is hidden in an interior tile."""
    block_m, block_n = blocks
    generator = torch.Generator().manual_seed(seed)
    n_q, n_k = 13, 21
    ends = torch.randint(0, n_k, (2, n_q), generator=generator)
    if seed % 2:
        ends = ends.sort(-1).values  # as masks have them mostly
    first, last = ends
    hides_all = first > last
    first, last = torch.where(hides_all, 2**30, first), torch.where(hides_all, -1, last)
    seen = seen_by(first, last, n_k)
    of_keys, of_rows = compiled(key_loop(TABULATED)), compiled(row_loop(TABULATED))
    for i0 in range(0, n_q, block_m):
        own = slice(i0, i0 + block_m)
        padded = [
            torch.cat([x[own], torch.tensor([pad] * (block_m - len(x[own])))])
            for x, pad in ((first, 2**30), (last, -1))
        ]
        extremes = {
            "least_first": int(padded[0].min()),
            "most_first": int(padded[0].max()),
            "least_last": int(padded[1].min()),
            "most_last": int(padded[1].max()),
        }
        tiles = visited(of_keys(BLOCK_M=block_m, BLOCK_N=block_n, **extremes), block_n)
        for start in range(0, n_k, block_n):
            tile = seen[own, start : start + block_n]
            assert start in dict(tiles) or not tile.any()
            assert not dict(tiles).get(start) or (tile.all() and start + block_n <= n_k)
    step = {"first_row": 3, "end_row": 11, "BLOCK_M": block_m, "BLOCK_N": block_n}
    rows = visited(of_rows(**step), block_m)
    assert not any(interior for _, interior in rows)
    assert set(range(3, 11)) <= {start + n for start, _ in rows for n in range(block_m)}


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("seed", range(6))
def test_loops_skip_tiles_in_a_gap(blocks: tuple[int, int], seed: int) -> None:
    """All tiles outside of gaps are visited once and checked, and tiles that all rows have in their gaps are not."""
    block_m, block_n = blocks
    generator = torch.Generator().manual_seed(seed)
    n_k, rows = 40, block_m
    first, first_hidden = torch.randint(0, 12, (2, rows), generator=generator)
    last, last_hidden = torch.randint(20, n_k, (2, rows), generator=generator)
    if seed % 3 == 2:  # a row without a gap
        first_hidden[0], last_hidden[0] = 0, -1
    extremes = {"least_first": first.min(), "most_first": first.max(), "least_last": last.min()}
    extremes |= {
        "most_last": last.max(),
        "most_first_hidden": first_hidden.max(),
        "least_last_hidden": last_hidden.min(),
    }
    numbers = {name: int(x) for name, x in extremes.items()}
    loop = key_loop(WITH_GAP)
    begin, gap_begin, gap_end, end = compiled(loop)(BLOCK_M=block_m, BLOCK_N=block_n, **numbers)
    assert [segment.edge for segment in loop.segments] == [True, True]
    starts = [*range(begin, gap_begin, block_n), *range(gap_end, end, block_n)]
    assert all(start % block_n == 0 for start in starts)
    assert starts == sorted({*starts})
    for start in range(0, n_k, block_n):
        keys = torch.arange(start, min(start + block_n, n_k))
        in_run = (keys >= first[:, None]) & (keys <= last[:, None])
        in_gap = (keys >= first_hidden[:, None]) & (keys <= last_hidden[:, None])
        assert start in starts or not (in_run & ~in_gap).any()
        assert start not in starts or not (in_gap.all() and start + block_n <= n_k)
    step = {"first_row": 3, "end_row": 35, "first_hidden_row": 9, "end_hidden_row": 30}
    begin, gap_begin, gap_end, end = compiled(row_loop(WITH_GAP))(BLOCK_M=block_m, BLOCK_N=block_n, **step)
    visited_rows = {
        row
        for part in ((begin, gap_begin), (gap_end, end))
        for i0 in range(*part, block_m)
        for row in range(i0, i0 + block_m)
    }
    assert {*range(3, 9), *range(30, 35)} <= visited_rows
    assert len(visited_rows & {*range(9, 30)}) < 2 * block_m


def test_conditions_have_no_interior() -> None:
    assert [segment.edge for segment in key_loop(CHECKED).segments] == [True]
    assert [segment.edge for segment in row_loop(CHECKED).segments] == [True]


def test_windows_have_no_tables() -> None:
    assert Spec(None, 16, visible="i - j < 9").tables("backward") == ()
    assert [x.name for x in Spec(None, 16, visible="j < 9").tables("forward")] == ["first_keys", "last_keys"]
