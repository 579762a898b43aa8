"""A Triton kernel that adds documents behind the last one, and schedules tiles of all documents.

It depends on no spec, so nothing is generated.
"""

import triton
import triton.language as tl

TILES: tl.constexpr = tl.constexpr(64)  # of a program
_DOCUMENTS: tl.constexpr = tl.constexpr(64)  # of a step of a loop over all documents
LATER: tl.constexpr = tl.constexpr(0)
EARLIER: tl.constexpr = tl.constexpr(1)
LONGEST: tl.constexpr = tl.constexpr(2)


@triton.jit
def _begin(cu_seq_ptr, document, given, first_rest, total):
    """The first row of each document. Documents after the `given` ones begin at their end, from `first_rest` on at
    `total`.
    """
    begin = tl.load(cu_seq_ptr + tl.minimum(document, given))
    return tl.where(document >= first_rest, total, begin)


@triton.jit
def _tiles_of(cu_seq_ptr, document, documents, given, first_rest, total, tile, carried):
    """The number of tiles of each document; 0 for one that does not exist."""
    begin = _begin(cu_seq_ptr, document, given, first_rest, total)
    end = _begin(cu_seq_ptr, document + 1, given, first_rest, total)
    return tl.where(document < documents, (end - begin + carried + tile - 1) // tile, 0)


@triton.jit
def _schedule(
    added_ptr, tiles_ptr, cu_seq_ptr, documents, given, first_rest, total, tile, carried, count, order,
):  # fmt: skip
    """Store the first rows of all documents, and a program's tiles at their places in the order."""
    if tl.program_id(0) == 0:
        for first in range(0, documents + 1, _DOCUMENTS):
            document = first + tl.arange(0, _DOCUMENTS)
            begin = _begin(cu_seq_ptr, document, given, first_rest, total)
            tl.store(added_ptr + document, begin, mask=document <= documents)

    if tl.program_id(0) * TILES < count:
        place = tl.program_id(0) * TILES + tl.arange(0, TILES)  # of a tile if documents come one after the other
        own = tl.zeros_like(place)  # its document
        before = tl.zeros_like(place)  # tiles of earlier documents
        end = 0
        for first in range(0, documents, _DOCUMENTS):
            document = first + tl.arange(0, _DOCUMENTS)
            tiles = _tiles_of(cu_seq_ptr, document, documents, given, first_rest, total, tile, carried)
            is_before = (end + tl.cumsum(tiles, 0))[None, :] <= place[:, None]
            own += tl.sum((is_before & (document < documents)[None, :]).to(tl.int32), 1)
            before += tl.sum(tl.where(is_before, tiles[None, :], 0), 1)
            end += tl.sum(tiles, 0)
        exists = own < documents
        own = tl.minimum(own, documents - 1)
        own_tiles = _tiles_of(cu_seq_ptr, own, documents, given, first_rest, total, tile, carried)
        number = place - tl.where(exists, before, before - own_tiles)

        # A tile's place is the number of tiles with more work, and of earlier tiles with as much.
        by_length = order == LONGEST
        work = tl.where(order == LATER, number + 1, tl.where(by_length, own_tiles, own_tiles - number))[:, None]
        ahead = tl.where(by_length, number, 0)
        for first in range(0, documents, _DOCUMENTS):
            document = first + tl.arange(0, _DOCUMENTS)
            tiles = _tiles_of(cu_seq_ptr, document, documents, given, first_rest, total, tile, carried)[None, :]
            is_earlier = document[None, :] < own[:, None]
            of_longer = tl.where((tiles > work) | ((tiles == work) & is_earlier), tiles, 0)
            of_each = tl.maximum(tiles - work, 0) + ((tiles >= work) & is_earlier).to(tl.int32)
            ahead += tl.sum(tl.where(by_length, of_longer, of_each), 1)
        stored = tiles_ptr + 2 * tl.where(exists, ahead, place).to(tl.int64)
        tl.store(stored, tl.where(exists, own, -1), mask=place < count)
        tl.store(stored + 1, number, mask=place < count)


_POINTERS = ["added_q_ptr", "added_k_ptr", "row_tiles_ptr", "key_tiles_ptr", "cu_seq_q_ptr", "cu_seq_k_ptr"]
_SIZES = ["documents", "given", "first_rest_k", "total_q", "total_k", "tile", "carried"]
_SCHEDULES = ["n_row_tiles", "row_order", "n_key_tiles", "key_order"]


@triton.jit(do_not_specialize=_SIZES + _SCHEDULES, do_not_specialize_on_alignment=_POINTERS)
def schedule_documents(
    added_q_ptr, added_k_ptr, row_tiles_ptr, key_tiles_ptr, cu_seq_q_ptr, cu_seq_k_ptr,
    documents, given, first_rest_k, total_q, total_k, tile, carried, n_row_tiles, row_order, n_key_tiles, key_order,
):  # fmt: skip
    """Store where documents begin, with the added ones, and schedules: of rows, and in programs (_, 1) of keys.

    A program stores TILES tiles. The time grows with tiles times documents, but nothing is sorted.
    """
    if tl.program_id(1) == 0:
        _schedule(
            added_q_ptr, row_tiles_ptr, cu_seq_q_ptr,
            documents, given, documents, total_q, tile, carried, n_row_tiles, row_order,
        )  # fmt: skip
    else:
        _schedule(
            added_k_ptr, key_tiles_ptr, cu_seq_k_ptr,
            documents, given, first_rest_k, total_k, tile, 0, n_key_tiles, key_order,
        )  # fmt: skip
