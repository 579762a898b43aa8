"""Grids of all kernels of large problems, recorded from host functions that are called with tensors of no memory."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from single_pass import RecordedKernel
from torch import Tensor

from mtagen import InputError, Plan, Spec, plan
from mtagen.codegen import Sources, render
from mtagen.dtypes import TORCH_DTYPES
from mtagen.ops.checks import check_decode
from mtagen.planner.targets import GRID_X, GRID_YZ
from mtagen.runtime.launches import recorded
from mtagen.runtime.load import load_host

MASKED = {"causal": False, "window": (64, 3)}
TILE: dict[str, Spec] = {
    "tile": Spec((6, 11), 16),
    "tile in a window": Spec((6, 11), 16, **MASKED),
    "plain": Spec(None, 16, causal=False),
}
STRIP: dict[str, Spec] = {
    "pairs after": Spec(None, 16, post_mixed_heads=2),  # CUDA has a fused forward pass of these
    "all stages": Spec((3, 4), 16, mixed_heads=2, post_kernel=(2, 3), post_mixed_heads=2),
    "pairs before, in a window": Spec(None, 16, mixed_heads=2, **MASKED),
}
SPECS = TILE | STRIP
BACKENDS = [("cuda", "sm_90a"), ("cuda", "sm_80"), ("triton", "sm_90a")]


class Sizes(NamedTuple):
    """Sequences, heads of queries and of keys, and rows of each."""

    batch: int
    heads: int
    kv_heads: int
    n: int


MANY_SEQUENCES = Sizes(2**26, 2, 2, 1)
MORE_SEQUENCES_THAN_Y = Sizes(65_536, 2, 2, 16)
MANY_HEADS = Sizes(1, 2**26, 2**25, 1)
LONG = Sizes(1, 1, 1, 2**27)
LONG_CACHE = Sizes(1, 2, 2, 2**26)
RATHER_LONG = Sizes(1, 2, 2, 2**15)  # strips, and those of lift's backward pass, are made by a loop


@functools.cache
def planned(spec: Spec, target: str, backend: str) -> tuple[Plan, Sources]:
    """A plan and what it is rendered to."""
    made = plan(spec, target, backend)
    return made, render(made)


def grids(
    spec: Spec, backend: str, target: str, pass_name: str, sizes: Sizes, documents: int = 0, splits: int | None = None
) -> list[tuple[int, ...]]:
    """The grids of a pass.

    Args:
        spec: what is computed.
        backend: of the kernels.
        target: of the kernels.
        pass_name: the pass.
        sizes: its sizes; of packed documents, rows of all of them.
        documents: how many there are.
        splits: of decode.
    """
    made, sources = planned(spec, target, backend)
    module = load_host(made, sources, pass_name)
    device, dtype = torch.device("meta"), TORCH_DTYPES[spec.dtype]
    launches: list[Any] = []
    for pass_ in (*made.tile.values(), *made.strip.values()):
        for role, source in pass_.cuda.items():
            if role in getattr(module, "LOADED", {}):
                module.LOADED[role][None] = {one.role: RecordedKernel(one, launches) for one in source.kernels}

    def vectors(heads: int, rows: int) -> Tensor:
        shape = (rows, heads, 16) if spec.packed else (sizes.batch, heads, rows, 16)
        return torch.empty(shape, dtype=dtype, device=device)

    q, k = vectors(sizes.heads, sizes.n), vectors(sizes.kv_heads, sizes.n)
    shapes = spec.weights(sizes.heads).values() or [(sizes.heads, 1, 1)]
    weights = [torch.empty(shape, device=device) for shape in shapes]
    lse = torch.empty(q.shape[1::-1] if spec.packed else q.shape[:-1], device=device)
    cu_seq = torch.empty(documents + 1, dtype=torch.int32, device=device)
    others = (cu_seq, cu_seq, min(2**10, sizes.n), min(2**10, sizes.n)) if spec.packed else ()
    with recorded(module, run=False) as triton_launches:
        if pass_name == "forward":
            module.forward(q, k, k, *weights, 1.0, *others)
        elif pass_name == "backward":
            module.backward(q, lse, q, k, k, *weights, q, lse, 1.0, *others)
        else:
            module.decode(vectors(sizes.heads, spec.context + 1), k, k, *weights, 1.0, None, splits)
    return [launch.grid for launch in (*launches, *triton_launches)]


def assert_legal(found: list[tuple[int, ...]]) -> None:
    assert found
    for x, *others in found:
        assert 0 < x <= GRID_X
        assert len(others) <= 2
        assert all(0 < size <= GRID_YZ for size in others)


@pytest.mark.parametrize("sizes", [MANY_SEQUENCES, MORE_SEQUENCES_THAN_Y, MANY_HEADS, LONG], ids=str)
@pytest.mark.parametrize("pass_name", ["forward", "backward", "decode"])
@pytest.mark.parametrize(("backend", "target"), BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_batches(name: str, backend: str, target: str, pass_name: str, sizes: Sizes) -> None:
    spec = SPECS[name]
    in_strips = name in STRIP or (backend == "triton" and pass_name == "backward")
    if sizes == LONG and in_strips:
        sizes = LONG_CACHE if pass_name == "decode" else RATHER_LONG
    in_sections = (backend, target) == ("cuda", "sm_90a") and pass_name != "decode" and spec.left is None
    if sizes == LONG and in_sections:
        sizes = Sizes(1, 1, 1, 2**22)  # see test_a_sequence_of_too_many_tiles
    assert_legal(grids(spec, backend, target, pass_name, sizes))


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_sequence_of_too_many_tiles(pass_name: str) -> None:
    """Where y of a grid has tiles and z sections of heads, nothing is launched."""
    spec = TILE["tile"]
    owned = plan(spec, "sm_90a", "cuda").tile[pass_name].geometry.owned
    assert_legal(grids(spec, "cuda", "sm_90a", pass_name, Sizes(1, 1, 1, owned * GRID_YZ)))
    with pytest.raises(ValueError, match=r"sequence length: got 65536 tiles of rows; a grid .* at most 65535; legal"):
        grids(spec, "cuda", "sm_90a", pass_name, Sizes(1, 1, 1, owned * GRID_YZ + 1))


@pytest.mark.parametrize("layers", [1, 2, 7])
def test_a_schedule_fills_layers(layers: int) -> None:
    made, sources = planned(Spec(None, 16, packed=True), "sm_90a", "cuda")
    cu_seq = torch.tensor([0, 5, 9, 40], dtype=torch.int32)
    host = load_host(made, sources, "forward")
    count = host._most_tiles(40, 3, 16, layers)
    tiles = host._schedule(cu_seq, 16, count, "longest")
    assert len(tiles) == count
    assert count % layers == 0
    assert sorted(map(tuple, tiles[tiles[:, 0] >= 0].tolist())) == [(0, 0), (1, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize(("backend", "target"), BACKENDS)
@pytest.mark.parametrize("name", SPECS)
def test_packed_documents(name: str, backend: str, target: str, pass_name: str) -> None:
    spec = Spec(**SPECS[name].to_dict() | {"packed": True})
    in_strips = name in STRIP or backend == "triton"
    sizes, documents = (Sizes(1, 2, 2, 2**17), 2**10) if in_strips else (Sizes(1, 2, 2, 2**26), 2**20)
    assert_legal(grids(spec, backend, target, pass_name, sizes, documents))


def test_tiles_fill_layers_of_a_grid() -> None:
    """As many along y as a grid may have, then as many along z, which are no more than needed."""
    spec = Spec(None, 16, packed=True)
    owned = plan(spec, "sm_90a", "cuda").tile["forward"].geometry.owned
    for tiles, expected in ((65_535, (65_535, 1)), (65_536, (32_768, 2)), (200_000, (50_000, 4))):
        sizes = Sizes(1, 2, 2, owned * (tiles - 12))
        ((x, *others),) = grids(spec, "cuda", "sm_90a", "forward", sizes, 10)
        assert (x, tuple(others)) == (2, expected)
        assert math.prod(others) >= tiles


def test_splits_of_too_many_outputs() -> None:
    q, k = (torch.empty(2**16, 2, rows, 16, device="meta") for rows in (1, 2**20))
    weights = (None,) * 4
    check_decode(Spec(None, 16, dtype="fp32"), (q.dtype,), q, k, k, weights, None, 2**13)
    with pytest.raises(InputError, match=r"num_splits: got 16384; 131072 rows .*partial results each.*16383 or less"):
        check_decode(Spec(None, 16, dtype="fp32"), (q.dtype,), q, k, k, weights, None, 2**14)
