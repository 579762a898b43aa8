"""Functions of host code for packed documents."""

import torch


def _with_rest(
    cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, total_q: int, total_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two documents behind the last: one with the remaining keys, one with the remaining queries.

    So kernels write zeros there, and log-sum-exps of -inf. Nothing waits for the GPU, and no other row is written.

    Args:
        cu_seq_q: (documents + 1,) int32, the first query of each document, and the end of the last document.
        cu_seq_k: likewise for keys.
        total_q: rows of the packed tensor of queries.
        total_k: rows of the packed tensor of keys.
    """
    rest_q, rest_k = cu_seq_q.new_full((1,), total_q), cu_seq_k.new_full((2,), total_k)
    return torch.cat((cu_seq_q, cu_seq_q[-1:], rest_q)), torch.cat((cu_seq_k, rest_k))


def _most_tiles(length: int, documents: int, tile: int, layers: int = 1) -> int:
    """An upper limit of the tiles of documents, because nothing waits for the GPU to count them.

    Args:
        length: rows of the packed tensor.
        documents: their number.
        tile: rows of a tile; a document begins with a new tile.
        layers: the limit is a multiple of this.
    """
    return -(-(length // tile + documents) // layers) * layers


def _schedule(cu_seq: torch.Tensor, tile: int, count: int, order: str) -> torch.Tensor:
    """Tiles of packed documents, in the order in which CTAs take them, so that CTAs finish evenly.

    Args:
        cu_seq: (documents + 1,) int32, the first row of each document, and the end of the last document.
        tile: rows of a tile; a document begins with a new tile.
        count: at least the number of tiles.
        order: the tiles that come first: "later" or "earlier" tiles of their document, or tiles of the "longest"
            document.

    Returns:
        (count, 2) int32: a document, and the number of a tile in it. After the last tile, the document is -1.
    """
    tiles = (cu_seq.diff() + (tile - 1)) // tile
    ends = tiles.cumsum(0)
    place = torch.arange(count, device=cu_seq.device)
    document = torch.searchsorted(ends, place, right=True)
    exists = document < len(tiles)
    document = document.clamp(max=len(tiles) - 1)
    number = place - (ends - tiles)[document]
    work = {"later": number + 1, "earlier": tiles[document] - number, "longest": tiles[document]}[order]
    taken = torch.where(exists, work, 0).argsort(descending=True, stable=True)
    return torch.stack((torch.where(exists, document, -1), number), 1)[taken].to(torch.int32)


def _with_tiles(
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    total_q: int,
    total_k: int | None,
    tile: int,
    rows: tuple[int, str] | None,
    keys: tuple[int, str] | None,
    carried: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Add documents behind the last one, and schedule tiles of all documents.

    mtagen replaces this function by one that launches a single kernel. Nothing waits for the GPU.

    Args:
        cu_seq_q: (documents + 1,) int32, the first query of each document, and the end of the last document.
        cu_seq_k: likewise for keys.
        total_q: rows of the packed tensor of queries.
        total_k: rows of the packed tensor of keys; None if keys lie in pages. Then the remaining queries become one
            document without keys, and else `_with_rest` adds two documents.
        tile: rows or keys of a tile.
        rows: number and order of the tiles of rows, see `_schedule`; None if nobody reads them.
        keys: likewise for tiles of keys.
        carried: more rows for which each document has tiles.

    Returns:
        cu_seq_q and cu_seq_k with the added documents; the tiles of rows, and of keys, or None.
    """
    if total_k is None:
        cu_seq_q = torch.cat((cu_seq_q, cu_seq_q.new_full((1,), total_q)))
        cu_seq_k = torch.cat((cu_seq_k, cu_seq_k[-1:]))
    else:
        cu_seq_q, cu_seq_k = _with_rest(cu_seq_q, cu_seq_k, total_q, total_k)
    ends = cu_seq_q
    if carried:
        more = torch.arange(0, carried * len(cu_seq_q), carried, dtype=torch.int32, device=cu_seq_q.device)
        ends = cu_seq_q + more
    row_tiles = None if rows is None else _schedule(ends, tile, *rows)
    key_tiles = None if keys is None else _schedule(cu_seq_k, tile, *keys)
    return cu_seq_q, cu_seq_k, row_tiles, key_tiles


def _sizes(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    tile: int,
    carried: int,
    row_order: str,
    key_order: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int, int, int]:
    """The sizes of packed documents, as kernels take them.

    Args:
        q: (total_q, H, D).
        k: (total_k, Hkv, D).
        cu_seq_q: (documents + 1,) int32, the first query of each document, and the end of the last document.
        cu_seq_k: likewise for keys.
        tile: rows or keys of a tile.
        carried: rows of the gradient of the scores that dq[i] needs after row i. Blocks of dq lag by as many rows, so
            that a document has tiles for as many more rows.
        row_order: order of the tiles of rows, see `_schedule`.
        key_order: likewise for tiles of keys; None if the pass reads none.

    Returns:
        cu_seq_q and cu_seq_k, with the rows behind the last document as documents; the tiles of rows, and of keys; the
        number of either; the rows and the keys of all documents.
    """
    total_q, total_k = len(q), len(k)
    documents = len(cu_seq_q) + 1  # with the two of the rest
    n_row_tiles = _most_tiles(total_q + carried * documents, documents, tile)
    n_key_tiles = _most_tiles(total_k, documents, tile) if key_order else 0
    rows, keys = (n_row_tiles, row_order), (n_key_tiles, key_order) if key_order else None
    tensors = _with_tiles(cu_seq_q, cu_seq_k, total_q, total_k, tile, rows, keys, carried)
    return *tensors, n_row_tiles, n_key_tiles, total_q, total_k


def _sizes_of_pages(
    q: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_k: int,
    tile: int,
    row_order: str,
    key_order: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int, int, int, torch.Tensor, int]:
    """The sizes of packed queries whose keys lie in pages, as kernels take them.

    Args:
        q: (total_q, H, D).
        block_table: (documents, width) int32, the pages of each document in order.
        cu_seq_q: (documents + 1,) int32, the first query of each document, and the end of the last document.
        cu_seq_k: likewise for keys, as if they lay one after the other.
        max_k: at least the keys of the longest document.
        tile: rows or keys of a tile.
        row_order: order of the tiles of rows, see `_schedule`.
        key_order: likewise for tiles of keys; None if the pass reads none.

    Returns:
        cu_seq_q and cu_seq_k, with the queries behind the last document as a document without keys; the tiles of rows,
        and of keys; the number of either; the rows of all documents, and the most keys; the table and its width.
    """
    given, width = block_table.shape
    total_q, total_k = len(q), given * max_k
    documents = given + 1  # with the rest
    n_row_tiles = _most_tiles(total_q, documents, tile)
    n_key_tiles = _most_tiles(total_k, documents, tile) if key_order else 0
    rows, keys = (n_row_tiles, row_order), (n_key_tiles, key_order) if key_order else None
    tensors = _with_tiles(cu_seq_q, cu_seq_k, total_q, None, tile, rows, keys)
    return *tensors, n_row_tiles, n_key_tiles, total_q, total_k, block_table, width
