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


def _schedule(cu_seq: torch.Tensor, length: int, block: int, order: str, layers: int = 1) -> torch.Tensor:
    """Tiles of packed documents, in the order in which CTAs take them, so that CTAs finish evenly.

    Nothing waits for the GPU, so the number of tiles is an upper limit for documents of this total length.

    Args:
        cu_seq: (documents + 1,) int32, the first row of each document, and the end of the last document.
        length: rows of the packed tensor.
        block: rows of a tile; a document begins with a new tile.
        order: the tiles that come first: "later" or "earlier" tiles of their document, or tiles of the "longest"
            document.
        layers: the number of tiles is a multiple of this.

    Returns:
        (tiles, 2) int32: a document, and the number of a tile in it. After the last tile, the document is -1.
    """
    blocks = (cu_seq.diff() + (block - 1)) // block
    ends = blocks.cumsum(0)
    tile = torch.arange(-(-(length // block + len(blocks)) // layers) * layers, device=cu_seq.device)
    document = torch.searchsorted(ends, tile, right=True)
    exists = document < len(blocks)
    document = document.clamp(max=len(blocks) - 1)
    number = tile - (ends - blocks)[document]
    work = {"later": number + 1, "earlier": blocks[document] - number, "longest": blocks[document]}[order]
    taken = torch.where(exists, work, 0).argsort(descending=True, stable=True)
    return torch.stack((torch.where(exists, document, -1), number), 1)[taken].to(torch.int32)


def _sizes(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    tile: int,
    carried: int,
    row_order: str,
    key_order: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int]:
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
        key_order: likewise for tiles of keys.

    Returns:
        cu_seq_q and cu_seq_k, with the rows behind the last document as documents; the tiles of rows, and of keys; the
        number of either; the rows and the keys of all documents.
    """
    total_q, total_k = len(q), len(k)
    cu_seq_q, cu_seq_k = _with_rest(cu_seq_q, cu_seq_k, total_q, total_k)
    ends, length = cu_seq_q, total_q
    if carried:
        ends = cu_seq_q + torch.arange(0, carried * len(cu_seq_q), carried, dtype=torch.int32, device=q.device)
        length += carried * (len(cu_seq_q) - 1)
    row_tiles = _schedule(ends, length, tile, row_order)
    key_tiles = _schedule(cu_seq_k, total_k, tile, key_order)
    return cu_seq_q, cu_seq_k, row_tiles, key_tiles, len(row_tiles), len(key_tiles), total_q, total_k


def _sizes_of_pages(
    q: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_k: int,
    tile: int,
    row_order: str,
    key_order: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int, torch.Tensor, int]:
    """The sizes of packed queries whose keys lie in pages, as kernels take them.

    Args:
        q: (total_q, H, D).
        block_table: (documents, width) int32, the pages of each document in order.
        cu_seq_q: (documents + 1,) int32, the first query of each document, and the end of the last document.
        cu_seq_k: likewise for keys, as if they lay one after the other.
        max_k: at least the keys of the longest document.
        tile: rows or keys of a tile.
        row_order: order of the tiles of rows, see `_schedule`.
        key_order: likewise for tiles of keys.

    Returns:
        cu_seq_q and cu_seq_k, with the queries behind the last document as a document without keys; the tiles of rows,
        and of keys; the number of either; the rows of all documents, and the most keys; the table and its width.
    """
    documents, width = block_table.shape
    total_q, total_k = len(q), documents * max_k
    cu_seq_q = torch.cat((cu_seq_q, cu_seq_q.new_full((1,), total_q)))
    cu_seq_k = torch.cat((cu_seq_k, cu_seq_k[-1:]))
    row_tiles, key_tiles = _schedule(cu_seq_q, total_q, tile, row_order), _schedule(cu_seq_k, total_k, tile, key_order)
    lengths = len(row_tiles), len(key_tiles), total_q, total_k
    return cu_seq_q, cu_seq_k, row_tiles, key_tiles, *lengths, block_table, width
