"""Copies of queries, keys and values for kernels that read no pages."""

from __future__ import annotations

import torch

from ..call import Call, Step, document_of


def with_earlier_zeros(call: Call) -> Call:
    """Return a call on pages whose queries before a request's start are zeros."""
    assert call.documents is not None, "requests are documents"
    cu_seq_q, cu_seq_k, *_ = call.documents
    if len(cu_seq_q) == 1:  # all rows are padding
        return call
    row = torch.arange(len(call.q), device=call.q.device, dtype=torch.int32)
    request = document_of(cu_seq_q, row)
    before = cu_seq_k.diff()[request] < cu_seq_q[1:][request] - row
    return call._replace(q=call.q.masked_fill(before[:, None, None], 0))


def copied(call: Call) -> Call:
    """Return a call with keys and values copied from their pages to packed documents.

    On a GPU the copies have room for ``max_k`` keys of each request, so that their shape does not depend
    on lengths, and a CUDA graph can be replayed with others.
    """
    assert call.documents is not None, "requests are documents"
    assert call.block_table is not None, "the call has pages"
    cu_seq_k, size = call.documents.cu_seq_k, call.k.shape[2]
    total = int(cu_seq_k[-1]) if call.q.is_cpu else (len(cu_seq_k) - 1) * call.max_k
    rows = torch.arange(total, device=call.q.device, dtype=torch.int32)
    request, exists = document_of(cu_seq_k, rows), rows < cu_seq_k[-1]
    place = torch.where(exists, rows - cu_seq_k[request], 0)
    page = torch.where(exists, call.block_table[request, place // size], 0)  # rows behind the last are padding
    k, v = (x[page, :, place % size] for x in (call.k, call.v))
    return call._replace(k=k, v=v, block_table=None)


def without_pages(step: Step) -> Step:
    """Return a step of decoding with keys and values copied from their pages to caches (B, Hkv, max_k, D)."""
    assert step.block_table is not None, "the step has pages"
    assert step.cache_seqlens is not None, "a step with pages has lengths"
    place = torch.arange(step.max_k, device=step.k_cache.device)
    size = step.k_cache.shape[2]
    page = torch.where(place < step.cache_seqlens[:, None], step.block_table[:, place // size], 0)
    k, v = (x[page, :, place % size].transpose(1, 2) for x in (step.k_cache, step.v_cache))
    return step._replace(k_cache=k, v_cache=v, block_table=None, max_k=0)
