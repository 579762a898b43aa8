"""The division of the backward pass of "lift" into launches."""


def _workspace(
    places: int,
    keys: int,
    vectors: int,
    heads: int,
    group: int,
    *,
    itemsize: int,
    vector_bytes: int,
    multiple: int,
    limit: int,
) -> tuple[int, int, int]:
    """The unit of work of backward: (heads of keys, rows of a chunk, elements from one row of g to the next).

    g, the lifted vectors and their gradient fit `limit` bytes, or have one head of keys and the shortest chunk.

    Args:
        places: rows of g of a head.
        keys: largest number of keys of a row of g.
        vectors: number of vectors of a head of the operand that is lifted.
        heads: number of heads of keys, through the batch.
        group: number of heads of queries for each head of keys.
        itemsize: bytes of an element of g; rows of g begin at multiples of 16 bytes.
        vector_bytes: bytes of all terms of a lifted vector and of their gradients.
        multiple: number of which the rows of a chunk are a multiple.
        limit: bytes.
    """
    vector = 16 // itemsize
    pitch = -(-keys // vector) * vector
    row_bytes = group * pitch * itemsize
    all_rows = -(-places // multiple) * multiple
    strip = min(all_rows, max(limit // row_bytes // multiple, 1) * multiple)
    fitting = max(1, limit // (strip * row_bytes + group * vectors * vector_bytes))
    chunks = -(-heads // fitting)
    return -(-heads // chunks), strip, pitch
