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
    """The number of chunks of keys of blocks of rows that see about as many keys each: that with the least time.

    Args:
        blocks: number of blocks, whose chunks run one after another on each multiprocessor.
        lines: parts of equal size into which the keys of a block are divided; a chunk is some of them.
        multiprocessors: of the GPU.
        most: most chunks of a block.
        start: parts in whose time a chunk starts.
    """

    def time(chunks: int) -> int:
        return -(-blocks * chunks // multiprocessors) * (-(-lines // chunks) + start)

    return min(range(1, max(1, min(most, lines)) + 1), key=time)
