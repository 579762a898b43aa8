import heapq


def _chunks(blocks: int, keys: int, slots: int, least: int) -> int:
    """The number of chunks into which keys of each block of rows are divided.

    Args:
        blocks: number of blocks.
        keys: keys that a block sees at most.
        slots: number of blocks from which on keys are not divided.
        least: number of keys of a chunk.
    """
    return max(1, min(-(-slots // blocks), keys // least))


def _balanced_chunks(lines: list[int], bundles: int, multiprocessors: int, most: int, start: int) -> int:
    """The number of chunks into which keys of each block of rows are divided, which takes the least time.

    Each multiprocessor computes one chunk at a time. Chunks of the largest blocks come first.

    Args:
        lines: for each block, the number of parts of equal size of its keys. A chunk is some of them.
        bundles: number of blocks of each of these sizes.
        multiprocessors: number of multiprocessors.
        most: most chunks of a block.
        start: time to start a chunk, in units of a line's time.
    """
    sizes = sorted(lines, reverse=True)
    rounds = 8  # with more chunks than so many for each multiprocessor, no multiprocessor waits long for another
    enough = -(-rounds * multiprocessors // (len(sizes) * bundles))

    def time(chunks: int) -> int:
        free = [0] * multiprocessors  # when each multiprocessor has computed its chunks so far
        for size in sizes:
            for _ in range(chunks * bundles):
                heapq.heapreplace(free, free[0] + -(-size // chunks) + start)
        return max(free)

    return min(range(1, max(1, min(most, sizes[0], enough)) + 1), key=time)
