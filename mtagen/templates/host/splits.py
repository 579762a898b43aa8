def _splits(ctas: int, n_max: int, slots: int, min_keys: int, max_waves: int) -> int:
    """Number of parts into which to split the keys, so that the GPU is busy.

    Candidates are the numbers of splits that fill 1, 2, ... waves of CTAs. The result is the smallest that keeps nearly
    as large a part of the waves' slots busy as any of them.

    Args:
        ctas: number of CTAs without splitting.
        n_max: largest number of keys.
        slots: CTAs that the GPU holds at once, which are a wave.
        min_keys: smallest number of keys of a split.
        max_waves: largest number of waves.
    """
    if max_waves * slots < 2 * ctas:  # the GPU is busy as it is
        return 1
    splits = [max(1, min(waves * slots // ctas, n_max // min_keys)) for waves in range(1, max_waves + 1)]
    busy = [ctas * count / (-(-ctas * count // slots) * slots) for count in splits]
    return next(count for count, share in zip(splits, busy, strict=True) if share >= 0.9 * max(busy))
