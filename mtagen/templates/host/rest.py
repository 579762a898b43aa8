def _with_rest(
    cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, total_q: int, total_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two documents behind the last one: the keys that remain, without queries, and such queries without keys.

    So kernels write zeros there, and log-sum-exps of -inf. Nothing waits for the GPU, and no other row is written.

    Args:
        cu_seq_q: (documents + 1,) int32, where the queries of each document begin, and where the last one ends.
        cu_seq_k: likewise of keys.
        total_q: rows of the packed tensor of queries.
        total_k: likewise of keys.
    """
    rest_q, rest_k = cu_seq_q.new_full((1,), total_q), cu_seq_k.new_full((2,), total_k)
    return torch.cat((cu_seq_q, cu_seq_q[-1:], rest_q)), torch.cat((cu_seq_k, rest_k))
