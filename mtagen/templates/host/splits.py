def _splits(owners: int, n_max: int, slots: int, min_keys: int, max_waves: int) -> int:
    """Splits of the keys of each owner: enough to fill 1, 2, ... waves of the GPU's slots.

    The fewest are taken that keep nearly as many slots busy as any of them.
    """
    splits = [max(1, min(waves * slots // owners, n_max // min_keys)) for waves in range(1, max_waves + 1)]
    busy = [owners * count / (-(-owners * count // slots) * slots) for count in splits]
    return next(count for count, share in zip(splits, busy, strict=True) if share >= 0.9 * max(busy))
