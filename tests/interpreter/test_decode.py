"""The generated decode kernels in Triton's interpreter against the reference: splits, lengths, layouts, masks."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mtagen import reference
from mtagen.accuracy import compare
from mtagen.codegen import render
from mtagen.planner import plan
from mtagen.runtime.loader import load_module
from mtagen.spec import Spec

DIM, VALUE_DIM, SCALE = 16, 24, 0.3
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
RAGGED = (40, 0, 3, 26)  # many tiles; nothing; fewer than cq and than the halo; keys that end inside a tile


@dataclass(frozen=True)
class Case:
    """One call of decode.

    Attributes:
        lengths: one per batch entry; None means the whole cache.
        capacity: keys that the cache has room for.
        growth: size of the cache's last key over that of the first.
    """

    kernel: tuple[int, int] = (6, 11)
    heads: int = 2
    kv_heads: int = 2
    n_new: int = 1
    lengths: tuple[int, ...] | None = RAGGED
    capacity: int = 45
    growth: float = 1.0
    splits: int | None = 3
    causal: bool = True
    key_padding: str = "both"
    mask: str = "source"
    dtype: str = "fp32"
    layout: str = "plain"
    window: tuple[int, int] = (-1, -1)

    @property
    def spec(self) -> Spec:
        return Spec(
            self.kernel, DIM, VALUE_DIM, self.causal, self.key_padding, self.mask, self.dtype, window=self.window
        )


KERNELS = ((1, 1), (6, 11), (3, 3), (5, 2), (2, 9))
CASES = [
    *(Case(kernel, n_new=n_new) for kernel in KERNELS for n_new in (1, 2, 8)),
    *(Case(kernel, n_new=2, causal=False) for kernel in KERNELS),
    *(
        Case((5, 4), n_new=n_new, causal=causal, key_padding=padding, mask=mask)
        for n_new, causal, padding, mask in itertools.product(
            (1, 3), (True, False), ("both", "left", "right"), ("source", "output")
        )
        if causal or mask == "source"
    ),
    *(Case(heads=4, kv_heads=kv_heads, n_new=n_new) for kv_heads in (1, 2) for n_new in (1, 3)),
    *(Case(splits=splits) for splits in (None, 1, 2, 9)),
    *(Case(lengths=None, splits=splits, n_new=n_new) for splits in (None, 4) for n_new in (1, 8)),
    *(Case(lengths=(length,), splits=2, n_new=8) for length in (1, 5, 7, 8, 13, 16, 17)),
    *(Case(layout=layout, n_new=2, heads=4) for layout in ("tokens first", "packed")),
    *(Case(kernel, n_new=n_new, dtype="fp16") for kernel in ((6, 11), (3, 3)) for n_new in (1, 8)),
    *(Case(heads=4, kv_heads=1, dtype="fp16", causal=causal) for causal in (True, False)),
    *(
        Case(kernel, n_new=n_new, causal=causal, mask=mask, window=window)
        for kernel, mask in (((6, 11), "source"), ((5, 2), "output"), ((3, 3), "source"), ((1, 1), "source"))
        for n_new, causal, window in ((1, True, (9, -1)), (3, True, (0, -1)), (2, False, (12, 2)), (8, False, (30, 0)))
    ),
]


def run(case: Case) -> list[str]:
    """What is wrong with decode in this case: one line per result that breaks the accuracy rule."""
    torch.manual_seed(0)
    dtype = DTYPES[case.dtype]
    lengths = tuple(min(length, case.capacity) for length in case.lengths or (case.capacity, case.capacity))
    batch, tail = len(lengths), case.kernel[0] - 1 + case.n_new
    q = torch.randn(batch, case.heads, tail, DIM).to(dtype)
    k, v = _caches(case, batch, dtype)
    k *= torch.linspace(1, case.growth, case.capacity)[:, None]
    weight = torch.randn(case.heads, *case.kernel) / 3
    for entry, length in enumerate(lengths):
        k[entry, :, length:], v[entry, :, length:] = torch.nan, torch.nan
        q[entry, :, : max(0, tail - length)] = torch.nan  # queries at negative positions
    seqlens = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32)
    out, lse = _module(case.spec).decode(q, k, v, weight, SCALE, seqlens, case.splits)
    eager, exact = (_expected(case, q, k, v, weight, lengths, wide) for wide in (dtype, torch.float64))
    largest = v.nan_to_num().abs().max().item()
    verdicts = {
        "out": compare(out, eager[0], exact[0], terms=largest),
        "lse": compare(lse.to(dtype), eager[1], exact[1]),
    }
    return [f"{name}: {verdict}" for name, verdict in verdicts.items() if not verdict.ok]


def _caches(case: Case, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if case.layout == "packed":  # slices of one projection; rows of values start 16-byte aligned
        packed = torch.randn(batch, case.capacity, case.kv_heads, DIM + VALUE_DIM).to(dtype).transpose(1, 2)
        return packed[..., :DIM], packed[..., DIM:]
    shape = (batch, case.kv_heads, case.capacity)
    if case.layout == "tokens first":
        shape = (batch, case.capacity, case.kv_heads)
    k, v = (torch.randn(*shape, size).to(dtype) for size in (DIM, VALUE_DIM))
    return (k.transpose(1, 2), v.transpose(1, 2)) if case.layout == "tokens first" else (k, v)


def _expected(
    case: Case, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The reference on each entry's own keys and queries: the new rows, empty where before the sequence."""
    out = torch.zeros(*q.shape[:2], case.n_new, VALUE_DIM, dtype=dtype)
    lse = torch.full(out.shape[:3], -torch.inf, dtype=dtype)
    for entry, length in enumerate(lengths):
        rows, new = min(q.shape[2], length), min(case.n_new, length)
        if length:
            queries = q[entry : entry + 1, :, q.shape[2] - rows :]
            keys, values = (x[entry : entry + 1, :, :length] for x in (k, v))
            result = reference(
                *(x.to(dtype) for x in (queries, keys, values, weight)),
                causal=case.causal,
                window=case.window,
                key_padding=case.key_padding,
                mask=case.mask,
                scale=SCALE,
                return_lse=True,
            )
            out[entry, :, case.n_new - new :] = result[0][0, :, rows - new :]
            lse[entry, :, case.n_new - new :] = result[1][0, :, rows - new :]
    return out, lse


@cache
def _module(spec: Spec) -> ModuleType:
    """Kernels with tiles of 16 keys, so that short sequences have many."""
    planned = plan(spec, backend="triton")
    decode = planned["decode"]
    tiles = tuple((role, replace(t, block_n=16) if role in decode.decode.roles else t) for role, t in decode.tiles)
    sources = render(planned.replaced(replace(decode, tiles=tiles)))
    with tempfile.TemporaryDirectory() as folder:
        file = sources.hosts["decode"]
        return load_module(Path(folder) / file, sources.files[file].encode())


@pytest.mark.parametrize("case", CASES, ids=map(str, range(len(CASES))))
def test_decode(case: Case) -> None:
    assert not run(case), case


def test_lengths_beyond_the_cache() -> None:
    """They count as the cache's."""
    assert not run(Case(lengths=(60, 41, 40), capacity=40))


def test_more_splits_than_are_merged_at_once() -> None:
    """And the last ones, merged after the others, have the largest scores."""
    assert not run(Case(heads=4, kv_heads=1, lengths=(450,), capacity=450, growth=4, splits=75))


def test_keys_far_apart(tmp_path: Path) -> None:
    """Strides of a cache (tokens, batch, heads, D) may pass 2**31 elements."""
    case, apart = Case(heads=2, kv_heads=1, lengths=(3,), capacity=3), 2**31 + 8
    q = torch.randn(1, 2, case.kernel[0] - 1 + case.n_new, DIM)
    caches = []
    for name, width in (("k", DIM), ("v", VALUE_DIM)):  # files with holes, of which only what is written takes room
        file = torch.from_file(str(tmp_path / name), shared=True, size=3 * apart, dtype=torch.float32)
        cache = file.as_strided((1, 1, 3, width), (apart, apart, apart, 1))
        caches.append(cache.copy_(torch.randn(cache.shape)))
    weight = torch.randn(2, *case.kernel)
    far = _module(case.spec).decode(q, *caches, weight, SCALE)
    near = _module(case.spec).decode(q, *(x.contiguous() for x in caches), weight, SCALE)
    assert all(map(torch.equal, far, near))
