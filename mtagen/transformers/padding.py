"""Find the documents of a batch from the masks, positions and boundaries that transformers passes.

A convolution must neither read padding nor reach across it. So documents (runs of tokens of a row
without padding) are packed one after another, for which the op has kernels, and the results are put
back into their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, explain
from ..nn import MultiTokenAttention
from ..ops.attention import AttentionOp
from ..ops.checks import check_boundaries


@dataclass(frozen=True, eq=False)
class Packing:
    """The documents of a batch.

    Attributes:
        tokens: ``(total,)``, indices of the tokens in the flattened batch; None if there is no
            padding.
        cu_seqlens: ``(documents + 1,)`` int32, where each document begins among the tokens, and
            total.
        max_seqlen: tokens of the longest document, or more.
    """

    tokens: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int

    def attend(self, attention: MultiTokenAttention, x: Tensor, positions: Tensor | None) -> Tensor:
        """Attend within each document.

        Args:
            attention: the layer.
            x: ``(B, N, dim)``.
            positions: ``(1, N)`` or ``(B, N)``, or None to count from 0 in each document.

        Returns:
            ``(B, N, dim)``, zeros in the place of padding.
        """
        at = None if positions is None else self.pack(positions.expand(x.shape[:2]))
        boundaries = {"cu_seqlens": self.cu_seqlens.to(x.device), "max_seqlen": self.max_seqlen}
        return self.unpack(attention(self.pack(x), positions=at, **boundaries), x.shape[:2])

    def compute(self, op: AttentionOp, options: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute outputs ``(B, N, H, D)`` within each document, zeros in the place of padding.

        Args:
            op: the op of the layer.
            options: the weights of the op's stages and other arguments by name.
            q: ``(B, N, H, D)``.
            k: ``(B, N, Hkv, D)``.
            v: ``(B, N, Hkv, D)``.
        """
        cu_seqlens = self.cu_seqlens.to(q.device)
        given: dict[str, Any] = {"cu_seq_q": cu_seqlens, "cu_seq_k": cu_seqlens, **options}
        q_rows, k_rows, v_rows = (self.pack(x) for x in (q, k, v))
        out: Any = op.varlen(q_rows, k_rows, v_rows, max_q=self.max_seqlen, max_k=self.max_seqlen, **given)
        return self.unpack(out, q.shape[:2])

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows ``(total, ...)`` of the tokens of ``x``, ``(B, N, ...)``."""
        rows = x.flatten(0, 1)
        return rows if self.tokens is None else rows[self.tokens.to(x.device)]  # layers may be on several devices

    def unpack(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Put the rows of tokens back into their places in a batch of ``shape``, ``(B, N)``, with zeros elsewhere."""
        batch, count = shape
        if self.tokens is not None:
            places = self.tokens.to(rows.device)
            rows = rows.new_zeros(batch * count, *rows.shape[1:]).index_copy(0, places, rows)
        return rows.view(batch, count, *rows.shape[1:])


def find_documents(
    shape: tuple[int, int],
    device: torch.device,
    mask: Tensor | None,
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
) -> Packing | None:
    """Find the documents of a batch without cached tokens.

    A document begins at a row's first token, where positions do not increase by one, and where
    ``seq_idx`` changes. The CPU waits for the GPU if any argument is given, because the shapes of
    packed tensors depend on their values.

    Args:
        shape: ``(B, N)``.
        device: device of the batch.
        mask: ``(B, N)``, 1 for a token, 0 for padding, or None.
        position_ids: ``(1, N)`` or ``(B, N)``, or None.
        seq_idx: ``(B, N)``, the number of each token's document, or None.

    Returns:
        The documents; None if each row is one document without padding.

    Raises:
        InputError: an argument does not fit, a row has tokens on both sides of padding, or the call is exported.
    """
    if mask is None and position_ids is None and seq_idx is None:
        return None
    _check_not_exported("attention_mask, position_ids, seq_idx")
    real, is_binary = _real_tokens(mask, shape, device)
    begins = real & ~_shifted(real)
    holes = (begins.sum(1) > 1).any()
    inner = real & _shifted(real)
    if position_ids is not None:
        begins = begins | (inner & _differs(position_ids.expand(shape), 1))
    if seq_idx is not None:
        if tuple(seq_idx.shape) != shape:
            raise InputError(explain("seq_idx.shape", tuple(seq_idx.shape), "must be one for each token", shape))
        begins = begins | (inner & _differs(seq_idx, 0))
    binary, has_holes, is_full, is_split = torch.stack([is_binary, holes, real.all(), begins[:, 1:].any()]).tolist()
    _check_values(binary)
    if has_holes:
        rule = "padding separates tokens of a row, so their distance is unknown"
        raise InputError(explain("attention_mask", "padding between tokens", rule, "padding on the left or right"))
    if is_full and not is_split:
        return None
    flat = begins.flatten()
    tokens = None if is_full else real.flatten().nonzero().squeeze(1)
    starts = (flat if tokens is None else flat[tokens]).nonzero().squeeze(1)
    total = flat.numel() if tokens is None else len(tokens)
    if total == 0:
        raise InputError(explain("attention_mask", "padding alone", "the batch has no token", "at least one token"))
    cu_seqlens = torch.cat([starts, starts.new_tensor([total])])
    return Packing(tokens, cu_seqlens.to(torch.int32), int(cu_seqlens.diff().max()))


def given_documents(
    cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, max_length_q: int | None, total: int
) -> Packing:
    """Return the documents that FlashAttention's arguments describe, in a batch without padding.

    Args:
        cu_seq_lens_q: ``(documents + 1,)`` int32, where documents begin in the flattened batch, and
            where the last document ends.
        cu_seq_lens_k: the same, or None. Compiled and exported calls do not compare the values.
        max_length_q: tokens of the longest document; default total.
        total: number of tokens of the batch.

    Raises:
        InputError: keys have other documents than queries, or boundaries or the longest length do not fit the batch.
    """
    others = None if cu_seq_lens_k is cu_seq_lens_q or torch.compiler.is_compiling() else cu_seq_lens_k
    if others is not None and not others.equal(cu_seq_lens_q):
        raise InputError(
            explain("cu_seq_lens_k", cu_seq_lens_k, "keys and queries must have the same documents", cu_seq_lens_q)
        )
    longest = total if max_length_q is None else int(max_length_q)
    check_boundaries(("cu_seq_lens_q", cu_seq_lens_q), ("max_length_q", longest), total, cu_seq_lens_q.device)
    return Packing(None, cu_seq_lens_q, longest)


def count_padding(
    shape: tuple[int, int],
    device: torch.device,
    mask: Tensor | None,
    position_ids: Tensor | None,
    lengths: Tensor | None,
    earlier: int,
) -> list[int] | None:
    """Count the padding before the first token of each entry, among the next tokens of a cache.

    The CPU waits for the GPU once if there is a mask, or if there are positions of several tokens.

    Args:
        shape: ``(B, N)``, the shape of the next tokens.
        device: device of the batch.
        mask: ``(B, earlier + N)``, 1 for a token, 0 for padding, for all tokens from the first on;
            or None.
        position_ids: ``(1, N)`` or ``(B, N)``, or None.
        lengths: ``(B,)``, number of cached tokens of each entry; None if nothing is cached.
        earlier: number of tokens of each entry in earlier calls, padding included.

    Returns:
        The amount of padding of each entry; None if no entry has padding.

    Raises:
        InputError: an argument does not fit, padding follows a token, positions do not increase by one, or the call is
            exported.
    """
    batch, count = shape
    if mask is None and (position_ids is None or count == 1):
        return None
    _check_not_exported("attention_mask, position_ids")
    real, is_binary = _real_tokens(mask, (batch, earlier + count), device)
    late = (~real & _shifted(real)).any()
    changed = torch.zeros((), dtype=torch.bool, device=device)
    if lengths is not None and mask is not None:
        changed = (real[:, :earlier].sum(1) != lengths.to(device)).any()
    new = real[:, earlier:]
    restarts = torch.zeros_like(late)
    if position_ids is not None:
        restarts = (new & _shifted(new) & _differs(position_ids.expand(shape), 1)).any()
    flags = torch.stack([is_binary, late, changed, restarts])
    binary, has_late, has_changed, has_restarts, *padding = torch.cat([flags, (~new).sum(1)]).tolist()
    _check_values(bool(binary))
    if has_late:
        rule = "the next token would follow padding instead of the last token"
        raise InputError(explain("attention_mask", "padding after a token", rule, "with a cache, padding on the left"))
    if has_changed:
        rule, legal = (
            "the cache was filled with another mask of the earlier tokens",
            "the mask of the last call, with columns appended for new tokens",
        )
        raise InputError(explain("attention_mask", "another padding", rule, legal))
    if has_restarts:
        rule = "packed documents cannot use a cache"
        raise InputError(explain("position_ids", "positions that restart", rule, "one document in a row"))
    return padding if any(padding) else None


def check_position_ids(position_ids: Tensor | None, shape: tuple[int, int]) -> None:
    """Check the shape of positions.

    Raises:
        InputError: the positions are not one for each token.
    """
    shapes = ((1, shape[1]), shape)
    if position_ids is not None and tuple(position_ids.shape) not in shapes:
        raise InputError(explain("position_ids.shape", tuple(position_ids.shape), "must be one for each token", shapes))


def _real_tokens(mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which places hold tokens, ``shape`` bools, and whether the mask has only zeros and
    ones.

    Raises:
        InputError: the mask has another shape or dtype.
    """
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device), torch.ones((), dtype=torch.bool, device=device)
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        rule = "must be one for each token, cached tokens included; masks of scores are not supported"
        raise InputError(explain("attention_mask.shape", got, rule, shape))
    if mask.is_floating_point():
        rule = "must mark each token as real or padding; masks that are added to scores are not supported"
        raise InputError(explain("attention_mask.dtype", mask.dtype, rule, "bool, or integers 0 and 1"))
    real = mask.bool()
    return real, (mask == real).all()


def _check_not_exported(names: str) -> None:
    """Check that ``torch.export`` does not trace the call.

    Raises:
        InputError: it does, and documents would have to be found among values that it does not have.
    """
    if torch.compiler.is_exporting():
        rule = "an exported program cannot look for documents and padding in them"
        raise InputError(explain(names, "one of them in torch.export", rule, "None, or cu_seq_lens_q=..."))


def _check_values(binary: bool) -> None:
    """Check that a mask has only zeros and ones.

    Raises:
        InputError: the mask has another value.
    """
    if not binary:
        rule = "must mark each token as real or padding"
        raise InputError(explain("attention_mask", "values that are neither 0 nor 1", rule, "0 and 1"))


def _shifted(x: Tensor) -> Tensor:
    """Return each column's left neighbour, False for the first column."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _differs(x: Tensor, step: int) -> Tensor:
    """Return where a column is not its left neighbour plus ``step``; True in the first column."""
    return torch.cat([torch.ones_like(x[:, :1], dtype=torch.bool), x.diff(dim=1) != step], 1)
