"""The emitted CUDA kernels that read keys and values from pages, run on a CPU that plays the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulator import host_function, needs_compiler
from single_pass import cheapest
from test_emulated_kernels import case_id
from torch import Tensor

from mtagen.dtypes import TORCH_DTYPES
from mtagen.planner import get_target
from mtagen.spec import Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory_starts_as_nan", "one_thread")]

SIZE = 16
KEYS = (75, 0, 3, 70, 16)  # of each sequence
SPECS = [
    ("sm_90a", Spec((6, 11), 32)),
    ("sm_80", Spec((3, 4), 32, dtype="fp16", window=(20, 0))),
    ("sm_80", Spec(None, 32)),
]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def in_pages(sequences: Sequence[Tensor], size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Keys ``(N, heads, D)`` of sequences in pages ``(pages, heads, size, D)``, and the table of their pages.

    The order is random. What no sequence has is NaN, and no page in the table.
    """
    used = [-(-len(x) // size) for x in sequences]
    order = torch.randperm(sum(used) + 2, generator=torch.Generator().manual_seed(0))
    _, heads, dim = sequences[0].shape
    pages = torch.full((len(order), size, heads, dim), torch.nan, dtype=sequences[0].dtype)
    table = torch.full((len(used), max(used) + 1), 10**6, dtype=torch.int32)
    for row, count, x in zip(table, used, sequences, strict=True):
        (row[:count], order), place = (order[:count], order[count:]), torch.arange(len(x))
        pages[row[place // size], place % size] = x
    return pages.transpose(1, 2), table


@pytest.mark.parametrize(("target", "spec"), SPECS, ids=case_id)
@pytest.mark.parametrize("splits", [1, 3])
def test_steps_have_the_bits_of_a_cache(target: str, spec: Spec, splits: int, folder: Path) -> None:
    check_step(target, replace(spec, page_size=SIZE), KEYS, splits, folder)


@pytest.mark.parametrize(("dim", "size"), [(32, 4), (32, 8), (32, 64), (128, 16)])
def test_steps_of_several_tiles_have_the_bits_of_a_cache(dim: int, size: int, folder: Path) -> None:
    """Three tiles, which begin inside a page; their pages are too many for a warp to look up together at size 4. The
    ring has 3 stages, with 128 columns 2.
    """
    check_step("sm_90a", Spec((6, 11), dim, page_size=size), (300, 141), 1, folder)


def check_step(target: str, spec: Spec, keys: Sequence[int], splits: int, folder: Path) -> None:
    """Compare a step from pages with one on a cache; each has 2 new tokens, and ``keys`` are those of each sequence."""
    assert spec.page_size is not None
    whole, paged = (
        host_function(cheapest("decode", one, get_target(target)), folder, 0)
        for one in (replace(spec, page_size=None), spec)
    )
    dtype, most, lengths, dim = (
        TORCH_DTYPES[spec.dtype],
        max(keys),
        torch.tensor(keys, dtype=torch.int32),
        spec.head_dim,
    )
    q, weight = drawn(len(keys), 4, spec.cq + 1, dim, dtype=dtype), drawn(4, spec.cq, spec.ck, dtype=torch.float32)
    caches = [torch.full((len(keys), 2, most, dim), torch.nan, dtype=dtype) for _ in "kv"]
    sequences = [[drawn(n, 2, dim, dtype=dtype) * (1 + i) for n in keys] for i in range(2)]
    for cache, parts in zip(caches, sequences, strict=True):
        for entry, x in zip(cache, parts, strict=True):
            entry[:, : len(x)] = x.transpose(0, 1)
    (k, table), (v, _) = (in_pages(parts, spec.page_size) for parts in sequences)
    expected = whole(q, *caches, weight, 0.2, lengths, splits)
    got = paged(q, k, v, weight, 0.2, lengths, splits, table, most)
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)
        assert x.isnan().sum() == 0


@pytest.mark.parametrize(("target", "spec"), SPECS, ids=case_id)
def test_chunks_have_the_bits_of_packed_documents(target: str, spec: Spec, folder: Path) -> None:
    packed = replace(spec, packed=True)
    whole, paged = (
        host_function(cheapest("forward", one, get_target(target)), folder, 0)
        for one in (packed, replace(packed, page_size=SIZE))
    )
    dtype, rows = TORCH_DTYPES[spec.dtype], [40, 3, 1, 70, 9]
    boundaries = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (rows, KEYS)]
    q, weight = drawn(sum(rows) + 4, 4, 32, dtype=dtype), drawn(4, spec.cq, spec.ck, dtype=torch.float32)
    sequences = [[drawn(n, 2, 32, dtype=dtype) * (1 + i) for n in KEYS] for i in range(2)]
    (k, table), (v, _) = map(in_pages, sequences)
    call = (weight, 0.2, *boundaries, max(rows), max(KEYS))
    expected = whole(q, *map(torch.cat, sequences), *call)
    for x, y in zip(paged(q, k, v, *call, table), expected, strict=True):
        assert torch.equal(x, y)
        assert x.isnan().sum() == 0
