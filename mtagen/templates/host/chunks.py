def _chunks(blocks: int, keys: int, slots: int, least: int) -> int:
    """The number of chunks into which keys of each block of rows are divided.

    Args:
        blocks: number of blocks.
        keys: keys that a block sees at most.
        slots: number of blocks from which on keys are not divided.
        least: number of keys of a chunk.
    """
    return max(1, min(-(-slots // blocks), keys // least))


def _balanced_chunks(blocks: int, lines: int, multiprocessors: int, most: int, start: int) -> int:
    """The number of chunks into which keys of each block of rows are divided, which takes the least time.

    The blocks see about as many keys each.

    Args:
        blocks: number of blocks.
        lines: number of parts of equal size of a block's keys. A chunk is some of them.
        multiprocessors: number of multiprocessors, each of which computes one chunk at a time.
        most: most chunks of a block.
        start: time to start a chunk, in units of a line's time.
    """

    def time(chunks: int) -> int:
        return -(-blocks * chunks // multiprocessors) * (-(-lines // chunks) + start)

    return min(range(1, max(1, min(most, lines)) + 1), key=time)
