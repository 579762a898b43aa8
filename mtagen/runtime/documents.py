"""Scheduling of tiles of packed documents by one kernel, in place of the operations of generated host modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .triton_package import serves

MOST_DOCUMENTS = 4096  # the kernel compares each tile with all documents; operations that sort win with more documents

Schedule: TypeAlias = tuple[int, str] | None  # number and order of tiles, or None if nobody reads them


def install(module: ModuleType) -> None:
    """Let a generated host module schedule tiles of documents by one kernel where Triton serves the device.

    A module without packed documents stays as it is.
    """
    if function := getattr(module, "_with_tiles", None):
        module._with_tiles = _with_kernel(inspect.unwrap(function))  # type: ignore[attr-defined]


def compile_kernel(device: torch.device) -> None:
    """Compile the kernel for the current device, which is ``device``, by a launch for one document."""
    cu_seq = torch.tensor([0, 1], dtype=torch.int32, device=device)
    _schedule(cu_seq, cu_seq, 1, 1, 1, (1, "later"), None, 0)


def _with_kernel(operations: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``_with_tiles`` of ``templates/host/documents.py`` does, by a kernel where it serves."""

    @wraps(operations)
    def with_tiles(
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        total_q: int,
        total_k: int | None,
        tile: int,
        rows: Schedule,
        keys: Schedule,
        carried: int = 0,
    ) -> Any:
        by_kernel = serves(cu_seq_q) and len(cu_seq_q) <= MOST_DOCUMENTS
        function = _schedule if by_kernel else operations
        return function(cu_seq_q, cu_seq_k, total_q, total_k, tile, rows, keys, carried)

    return with_tiles


def _schedule(
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    total_q: int,
    total_k: int | None,
    tile: int,
    rows: Schedule,
    keys: Schedule,
    carried: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    from .document_kernel import EARLIER, LATER, LONGEST, TILES, schedule_documents

    orders = {"later": LATER.value, "earlier": EARLIER.value, "longest": LONGEST.value}
    given = len(cu_seq_q) - 1
    documents, first_rest_k = (given + 1, given + 2) if total_k is None else (given + 2, given + 1)
    added_q, added_k = cu_seq_q.new_empty(documents + 1), cu_seq_k.new_empty(documents + 1)
    row_tiles, key_tiles = (None if asked is None else cu_seq_q.new_empty(asked[0], 2) for asked in (rows, keys))
    (n_rows, row_order), (n_keys, key_order) = rows or (0, "later"), keys or (0, "later")
    schedule_documents[-(-max(n_rows, n_keys, 1) // TILES.value), 2](
        added_q,
        added_k,
        added_q if row_tiles is None else row_tiles,  # not written if there are no tiles
        added_k if key_tiles is None else key_tiles,
        cu_seq_q,
        cu_seq_k,
        documents,
        given,
        first_rest_k,
        total_q,
        total_k or 0,
        tile,
        carried,
        n_rows,
        orders[row_order],
        n_keys,
        orders[key_order],
        num_warps=4,
    )
    return added_q, added_k, row_tiles, key_tiles
