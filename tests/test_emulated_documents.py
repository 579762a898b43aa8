"""The emitted CUDA kernels of packed documents, run on a CPU that plays the GPU, with their host functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import problems
import pytest
import torch
from emulator import host_function, needs_compiler
from test_emulated_kernels import case_id, op_of
from torch import Tensor

from mtagen import plan
from mtagen.call import Documents
from mtagen.check import check
from mtagen.dropout import Dropout
from mtagen.measure.cases import Sizes
from mtagen.measure.inputs import Inputs
from mtagen.planner.tile import layout
from mtagen.spec import Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("memory_starts_as_nan", "one_thread")]

# First documents with keys or queries only. Then some tiles of queries and more keys than a CTA owns; shorter than the
# halo; neither keys nor queries; when causal, queries that see no key; keys that no window reaches.
LENGTHS = [(0, 5), (9, 0), (133, 60), (1, 1), (3, 2), (0, 0), (40, 9), (20, 203), (0, 3)]
SM90, SM80 = ("sm_90a", Spec((6, 11), 64, packed=True)), ("sm_80", Spec((6, 11), 32, dtype="fp16", packed=True))
SM80_WINDOW = ("sm_80", Spec((3, 4), 32, causal=False, window=(20, 7), mask="output", packed=True))
SPECS = [
    SM90,
    ("sm_90a", Spec((3, 3), 32, causal=False, key_padding="left", dtype="fp16", packed=True)),
    ("sm_90a", Spec((6, 11), 48, mask="output", window=(40, -1), packed=True)),
    ("sm_90a", Spec(None, 32, packed=True)),
    SM80,
    SM80_WINDOW,
]
DROPPING = [
    ("sm_90a", Spec((6, 11), 64, window=(40, -1), packed=True, dropout=True)),
    ("sm_80", Spec((3, 3), 32, packed=True, dropout=True)),
]


def passes(
    spec: Spec, target: str, folder: Path, seed: int = 0, *, checked: bool = False
) -> dict[str, Callable[..., Any]]:
    """The host functions of a spec's passes, with emulated kernels."""
    tile = plan(spec, target, "cuda").tile
    return {name: host_function(one, folder, seed, checked=checked) for name, one in tile.items()}


def results(
    host: Mapping[str, Callable[..., Any]],
    spec: Spec,
    packed: Documents,
    inputs: Inputs,
    grad_out: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    """out, the log-sum-exp as a column a head, dq, dk, dv and dweight of one call."""
    operands, scale = inputs.arguments, spec.head_dim**-0.5
    out, lse = host["forward"](*operands, scale, *packed)
    grad_lse = grad_out[..., 0].float().T.contiguous()
    return out, lse.T, *host["backward"](grad_out, grad_lse, *operands, out, lse, scale, *packed, **options)


@pytest.mark.parametrize(("target", "kernel"), [("sm_90a", (3, 3)), ("sm_80", None)], ids=str)
def test_masks_in_tables(target: str, kernel: tuple[int, int] | None, folder: Path) -> None:
    """With dropout, too. Each document has its own prefix."""
    spec = Spec(kernel, 32, packed=True, dropout=True, **problems.PREFIX)
    op = op_of(replace(spec, packed=False, dropout=False), target, folder, 0, variant=spec)
    rows = check(op, spec, torch.device("cpu"), [Sizes(3, 2, 1, 150, 140)])
    assert not [f"{row.sizes} {row.result}" for row in rows if not row.comparison.ok]


@pytest.mark.parametrize(("target", "spec"), SPECS, ids=case_id)
def test_accurate(target: str, spec: Spec, folder: Path) -> None:
    assert not documents.failures(passes(spec, target, folder), spec, LENGTHS, 2, 1)


@pytest.mark.parametrize(("target", "spec"), [SPECS[2], SM80], ids=case_id)
def test_layers_of_tiles(target: str, spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a grid's y has room for 3 tiles, the others lie along z."""
    monkeypatch.setattr(layout, "GRID_YZ", 3)
    host = passes(spec, target, folder)
    assert not documents.failures(host, spec, LENGTHS, 2, 1)
    packed, call = documents.packed(LENGTHS), documents.random(spec, LENGTHS, 2, 1)
    results(host, spec, packed, *call, deterministic=True)


@pytest.mark.parametrize(("target", "spec"), DROPPING, ids=case_id)
def test_dropout(target: str, spec: Spec, folder: Path) -> None:
    """Queries and keys count from the first of their document, and documents as entries of a batch do."""
    dropout = Dropout(torch.tensor([7, 2**60]), 0.3)
    assert not documents.failures(passes(spec, target, folder), spec, LENGTHS, 2, 1, dropout)


@pytest.mark.parametrize(("target", "spec"), [*SPECS[1:4], SM80, SM80_WINDOW, *DROPPING], ids=case_id)
def test_rows_behind_the_last_document(target: str, spec: Spec, folder: Path) -> None:
    """They get zeros, and change nothing, though they hold NaN: as padding to a fixed length may."""
    dropout = Dropout(torch.tensor([7, 2**60]), 0.3) if spec.dropout else None
    host = documents.with_rest(passes(spec, target, folder))
    assert not documents.failures(host, spec, [(33, 40), (0, 3), (9, 0), (20, 21)], 2, 1, dropout)


@pytest.mark.parametrize(("target", "spec"), [SM90, SM80_WINDOW], ids=case_id)
def test_nothing_leaks(target: str, spec: Spec, folder: Path) -> None:
    """What other documents hold changes no bit of a document's results."""
    host, packed = passes(spec, target, folder), documents.packed(LENGTHS)
    inputs, grad_out = documents.random(spec, LENGTHS, 2, 1)
    expected = results(host, spec, packed, inputs, grad_out)

    def spoilt(x: Tensor, own: slice) -> Tensor:
        everywhere = torch.where(torch.arange(len(x)) % 2 == 0, torch.inf, torch.nan).to(x.dtype)
        others = everywhere[:, None, None].expand(x.shape).clone()
        others[own] = x[own]
        return others

    for document in (2, 4, 7):
        queries, keys = documents.rows_of(packed, document)
        alone = Inputs(spoilt(inputs.q, queries), spoilt(inputs.k, keys), spoilt(inputs.v, keys), inputs.weights)
        ours = results(host, spec, packed, alone, spoilt(grad_out, queries))
        for own, a, b in zip((queries, queries, queries, keys, keys), ours, expected, strict=False):
            assert torch.equal(a[own], b[own])


@pytest.mark.parametrize(("target", "spec"), [SM90, SM80], ids=case_id)
def test_no_races_and_the_same_bits_again(
    target: str, spec: Spec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the deterministic mode CTAs wait for those before them, of the same document, which are scheduled before."""
    lengths = [(30, 190), (0, 2), (70, 20)]
    packed, call = documents.packed(lengths), documents.random(spec, lengths, 2, 1)
    zeros: list[Tensor] = []
    new_zeros = Tensor.new_zeros

    def kept(*arguments: Any, **options: Any) -> Tensor:
        zeros.append(new_zeros(*arguments, **options))
        return zeros[-1]

    monkeypatch.setattr(Tensor, "new_zeros", kept)
    first, second = (
        results(passes(spec, target, folder, seed, checked=seed == 0), spec, packed, *call, deterministic=True)
        for seed in (0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Each CTA counts the rows that it has added to in a place of its own.
    owned = plan(spec, target, "cuda").tile["backward"].geometry.owned
    counts = [x for x in zeros if x.dtype == torch.int32]
    assert len(counts) == 2
    for progress in counts:
        assert progress.count_nonzero() == 2 * sum(-(-keys // owned) for _, keys in lengths)
