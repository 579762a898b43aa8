"""The layout of packed documents in strips: each row of a document has a place in the planes.

The places of a document begin at a multiple of ``TILE``, so that no block of a kernel has rows of
two documents: document b begins at place (cu_seq_q[b] // TILE + b) * TILE. A strip has whole tiles
of places. Kernels get a record for each tile.
"""

from __future__ import annotations

from ...spec import DROPOUT_GROUP, Spec

TILE = 128  # places of a tile; the block of rows of any kernel divides it
RECORD = ("document", "row", "n_q", "query", "n_k", "key")
"""The record of a tile: its document, its first row in the document, and the document's numbers and first indices of
queries and keys."""
PART = 4 * TILE  # places over which one program sums the gradient of a convolution's weight


def begin_multiple(spec: Spec) -> int:
    """Return the number of which, with a window, the first key of a strip or document is a
    multiple.

    Dropout draws for whole groups of keys. With packed documents, rows begin with whole vectors of
    16 bytes.
    """
    return max(DROPOUT_GROUP if spec.dropout else 1, 16 // spec.itemsize if spec.packed else 1)


def context_places(context: int) -> int:
    """Return the places before a strip's rows of outputs for ``context`` rows of context: whole
    tiles.
    """
    return -(-context // TILE) * TILE
