"""Where packed documents lie in strips: their rows have places in the planes, one document after the other.

The places of a document begin with a tile, so that no tile of a kernel has rows of two documents: document b begins at
place (cu_seq_q[b] // TILE + b) * TILE. A strip has whole tiles of places. Kernels get a record for each tile.
"""

from __future__ import annotations

from ...spec import DROPOUT_GROUP, Spec

TILE = 128  # places; the rows of a kernel's tile divide it
RECORD = ("document", "row", "n_q", "query", "n_k", "key")
"""A tile's document, the tile's first row in it, its queries and the first of them, its keys and the first of them."""
PART = 4 * TILE  # places of a strip whose gradient of a convolution's weight one program sums up


def begin_multiple(spec: Spec) -> int:
    """In a window, the first key of a strip, or of a document in it, is a multiple of this.

    Dropout draws for whole groups of keys; rows of keys of one document begin with whole vectors of 16 bytes.
    """
    return max(DROPOUT_GROUP if spec.dropout else 1, 16 // spec.itemsize if spec.packed else 1)


def context_places(context: int) -> int:
    """Places of a strip before its rows of outputs, which have so many rows of context: whole tiles."""
    return -(-context // TILE) * TILE
