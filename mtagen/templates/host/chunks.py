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
    """The number of chunks of each block of rows with which a launch takes the least time.

    A chunk is some of the keys of its block. Each multiprocessor computes one chunk at a time. Chunks of the blocks
    with the most keys come first.

    Args:
        lines: for each block, the number of parts of equal size into which its keys are divided.
        bundles: number of blocks of each of these sizes.
        multiprocessors: number of multiprocessors.
        most: most chunks of a block.
        start: time to start a chunk, in units of a line's time.
    """
    sizes = sorted(lines, reverse=True)

    def mean(chunks: int) -> float:
        return bundles * (sum(sizes) + chunks * start * len(sizes)) / multiprocessors

    def time(chunks: int) -> int:
        free = [0] * multiprocessors  # when each multiprocessor has computed its chunks so far
        for size in sizes:
            for _ in range(chunks * bundles):
                heapq.heapreplace(free, free[0] + -(-size // chunks) + start)
        return max(free)

    best, least = 1, time(1)
    for chunks in range(2, min(most, sizes[0]) + 1):
        if mean(chunks) >= least:  # so is that of more chunks, and no launch takes less than the mean
            break
        if (taken := time(chunks)) < least:
            best, least = chunks, taken
    return best
