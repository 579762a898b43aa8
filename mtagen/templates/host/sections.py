def _together(heads: int, few: int, streamed: int, long: int) -> int:
    """Heads whose CTAs run beside each other: a few of those that stream long sequences, so that L2 keeps these.

    Args:
        heads: heads through the batch.
        few: heads of a section of long sequences.
        streamed: rows of a sequence that a CTA streams.
        long: rows of a long sequence.
    """
    sectioned = streamed >= long and heads % few == 0 and heads // few <= 65535  # sections that a grid may have
    return few if sectioned else heads
