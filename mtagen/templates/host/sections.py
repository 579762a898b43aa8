def _together(heads: int, few: int, streamed: int, long: int, tiles: int, most: int, whole: bool = False) -> int:
    """Number of heads whose CTAs run concurrently: few for long sequences, so that L2 keeps the streamed rows.

    Args:
        heads: heads through the batch.
        few: heads of a section of long sequences.
        streamed: rows of a sequence that a CTA streams.
        long: rows of a long sequence.
        tiles: tiles of a head, each of which has a CTA.
        most: upper limit of a grid's tiles, and of sections.
        whole: whether there must be one section.

    Raises:
        ValueError: there are more tiles.
    """
    if tiles > most:
        raise ValueError(
            f"sequence length: got {tiles} tiles of rows; a grid of this kernel has at most {most}; "
            "legal: a shorter sequence, a left window, or backend='triton'"
        )
    sectioned = streamed >= long and heads % few == 0 and heads // few <= most and not whole
    return few if sectioned else heads
