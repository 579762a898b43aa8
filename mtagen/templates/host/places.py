import torch


def _documents(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, places: int, tile: int) -> torch.Tensor:
    """The document of each tile of padded rows: document b begins with tile cu_seq_q[b] // tile + b.

    Rows are padded so that each document begins at a tile boundary. Nothing waits for the GPU.

    Args:
        cu_seq_q: (documents + 1,) int32, the first query of each document, and the end of the last document.
        cu_seq_k: likewise for keys.
        places: number of padded rows (slots) of all documents, a multiple of `tile`.
        tile: rows of a tile.

    Returns:
        (tiles, 6) int32: the document; its row at the tile's begin, maybe past its last row; the number of its queries,
        and the first query; the number of its keys, and the first key.
    """
    begins = cu_seq_q[:-1] // tile + torch.arange(len(cu_seq_q) - 1, device=cu_seq_q.device)
    tiles = torch.arange(places // tile, device=cu_seq_q.device)
    document = torch.searchsorted(begins, tiles, right=True) - 1
    row = (tiles - begins[document]) * tile
    queries, keys = ((cu_seq.diff()[document], cu_seq[document]) for cu_seq in (cu_seq_q, cu_seq_k))
    return torch.stack((document, row, *queries, *keys), 1).to(torch.int32)
