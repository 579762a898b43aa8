def _splits(ctas: int, n_max: int, slots: int, min_keys: int, max_waves: int) -> int:
    """How many parts to split the keys into, so that the GPU is busy.

    Of the numbers of splits that fill 1, 2, ... waves of CTAs, the smallest is taken that keeps nearly as many of the
    waves' slots busy as any of them.

    Args:
        ctas: CTAs if the keys were not split.
        n_max: number of keys at most.
        slots: CTAs that the GPU holds at once, a wave of them.
        min_keys: keys of a split, at least.
        max_waves: waves, at most.
    """
    if max_waves * slots < 2 * ctas:  # the GPU is busy as it is
        return 1
    splits = [max(1, min(waves * slots // ctas, n_max // min_keys)) for waves in range(1, max_waves + 1)]
    busy = [ctas * count / (-(-ctas * count // slots) * slots) for count in splits]
    return next(count for count, share in zip(splits, busy, strict=True) if share >= 0.9 * max(busy))
