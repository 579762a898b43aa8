"""The multi-token attention layer: projections, rotary embedding, the op, norm and gate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..dtypes import DTypeLike, dtype_name
from ..errors import InputError, SpecError, explain
from ..op import build
from ..ops.attention import AttentionOp, autocast, autocast_dtype
from ..ops.checks import check_boundaries
from ..planner import Backend
from ..runtime.triton_package import triton_is_installed
from ..spec import FACTORS, MAX_NEW_TOKENS, OPTIONS, Argument, Expression, KeyPadding, Mask, as_int, options_of
from .cache import Cache, EngineCache
from .checks import GateKind, as_count, check_count, check_divisor, check_input, check_options
from .kernel_choice import is_fused
from .parts import Gate, HeadMixer, HeadNorm, ScoreParameters, TokenMixing, set_parameter
from .rope import FrequencyScaling, document_positions, rotate, rotation
from .stages import Stages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import ContextParallel


# The op's factors of mixings that depend on tokens -> the part of the layer that makes them
_TOKEN_MIXINGS = {name: name.replace("factors", "mixing") for name in FACTORS}


class MultiTokenAttention(nn.Module):
    """Multi-token attention with its projections: parameters, order and results are those of the
    authors' layer.

    For a token's vector x of ``dim`` elements, with q of H heads and k, v of Hkv heads, each of D
    elements:

        q, k, v = rope(wq x), rope(wk x), wv x
        o = dropout(mix(conv(softmax(mix(conv(q k^T / sqrt(D))))))) v
        out = wo gate(norm(o))

    The layer is that of Golovneva et al., "Multi-Token Attention", arXiv 2504.00927, and of their
    code (facebookresearch/RAM, ``projects/mta``), whose state dicts load as they are. By
    default the layer has one stage, the (6, 11) convolution before the softmax.
    :func:`mtagen.reference` defines the second line. The parameters are listed below. A stage that
    is left out has none.

    =======================================  ===================================================================
    ``wq.weight``, ``wo.weight``             (H D, dim), (dim, H D)
    ``wk.weight``, ``wv.weight``             (Hkv D, dim)
    ``mta_kernel``, ``mta_kernel_after_sm``  (H, 1, cq, ck): convolutions before and after the softmax
    ``wpsm.weight``                          (H, H), [out, in]: heads mixed before the softmax; in groups of m < H,
                                             which the authors' layer does not have, (H/m, m, m), [group, out, in]
    ``wposm.weight``                         (H, H), [out, in]: all heads mixed after the softmax
    ``head_kernel``                          (H/m, m, m), [group, in, out]: heads mixed after the softmax in groups
                                             of m < H
    ``query_mixing``, ``key_mixing``,        what each query and each key adds to these matrices, before and after
    ``post_query_mixing``,                   the softmax (:class:`mtagen.nn.parts.TokenMixing`); the authors' layer
    ``post_key_mixing``                      does not have them
    ``subln.weight``                         (D,): the norm's scale
    ``gate.weight``, ``gate.bias``           (1, D), (1,), or (D, D), (D,)
    =======================================  ===================================================================

    The authors' layer stores the matrix that mixes all heads after the softmax as ``wposm.weight``
    or, transposed, as ``head_kernel`` of one group. This layer stores ``wposm.weight`` and loads
    both.

    Initially every stage is the identity: a convolution has a 1 at the tap of the score itself, and
    mixings and scales are the identity. Projections and the gate start like ``torch.nn.Linear``,
    but the gate's bias is 0.

    Args:
        dim: elements of a token's vector.
        n_heads: H, heads of queries.
        n_kv_heads: Hkv, heads of keys and values, a divisor of H; default H.
        head_dim: D, 16..256 in multiples of 8; default dim / H.
        kernel: ``(cq, ck)``, extents of the convolution before the softmax over queries and keys;
            default (6, 11); None for no convolution.
        mixed_heads: m, a divisor of H: before the softmax heads are mixed in groups of m; default
            no mixing.
        post_kernel: extents of the convolution after the softmax; default no convolution.
        post_mixed_heads: as ``mixed_heads``, after the softmax.
        dynamic_ranks: ``(rank_q, rank_k)``, 0..4 each: makes the mixing before the softmax depend on the
            query's and the key's token, by matrices of these ranks and a diagonal, as in DCMHA (arXiv
            2405.08553); 0 leaves the query or the key out. It needs ``mixed_heads``. Such a layer takes
            batches, without ``cu_seqlens``, and its own caches. Default neither.
        post_dynamic_ranks: as ``dynamic_ranks``, for ``post_mixed_heads``.
        key_padding: padding of the keys in both convolutions: ``both``, ``left`` or ``right``.
        group_norm: whether each head's output is normalised.
        depth_rescale: the layer's index, from 0 on: the norm scales its result by a factor that
            depends on this index (:class:`mtagen.nn.parts.HeadNorm`). It needs ``group_norm=True``;
            default no factor.
        gate: ``scalar``: a head's output is multiplied by one sigmoid; ``channel``: each element of
            a head's output has a sigmoid of its own; default no gate.
        rope_theta: base of the rotary embedding, default 100000; None for no rotary embedding, in
            which case positions are not used.
        frequency_scaling: scaling of the rotary embedding's frequencies, as in Llama 3.1
            (:class:`mtagen.nn.FrequencyScaling`); default none.
        dropout: probability that an attention probability, after all stages, is dropped in training.
        window: ``(left, right)``: number of keys before and after its own position that a query
            sees; -1 is no limit.
        scores, convolved, logits: what the first convolution, the mixing and the softmax take,
            expressions in the score s such as ``50 * tanh(s / 50)`` (:mod:`mtagen.expressions`);
            default s.
        visible: which keys a query sees, besides ``causal`` and ``window``, a condition without
            parameters such as ``i // 64 == j // 64``; default all.
        parameters: the tensors that expressions read and their axes, as in :func:`mtagen.build`,
            of heads and tables only: ``{"slopes": "h", "table": "h,65"}``. The layer holds them as
            ``score_parameters``, zeros at first.
        sink: adds a learned logit per head to the softmax's denominator. The layer holds them as
            ``sink``, 0 at first.
        causal: whether later keys are hidden from a query.
        mask: ``source`` (as in the authors' code) or ``output``, for both convolutions; see
            :class:`mtagen.Spec`.
        context_parallel: the ranks over which the tokens of each sequence are spread, a group or a mesh of one
            dimension (:class:`mtagen.distributed.ContextParallel`, balanced): x are the tokens that this rank holds.
        backend: as in :func:`mtagen.build`.
        compute_dtype: dtype of q, k and v, for which kernels are built. Under autocast or a
            mixed-precision policy it differs from the parameters' dtype. On a GPU the default is
            ``dtype`` if that has 16 bits, else bf16. The CPU backend compiles nothing and takes any
            dtype, so ``layer.float()`` and the like are legal.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        op: the built op; ``print(layer.op.plan)`` describes its kernels.
        n_local_heads, n_local_kv_heads: number of heads on this rank. It is the number of all heads
            unless heads are spread over ranks (:class:`mtagen.nn.tensor_parallel.HeadParallel`).
        context_parallel: spreads the op over ranks, and cuts tokens for the layer (``shard``); None
            without ranks.

    Raises:
        InputError: ``context_parallel`` is neither a group nor a mesh of one dimension, or ranks cannot share
            the op.
        SpecError: an argument is not legal.
        PlanError: this machine's target has no plan of the stages; the message names the limit.
        BackendError: the backend cannot be used here.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        kernel: tuple[int, int] | None = (6, 11),
        mixed_heads: int | None = None,
        post_kernel: tuple[int, int] | None = None,
        post_mixed_heads: int | None = None,
        dynamic_ranks: tuple[int, int] | None = None,
        post_dynamic_ranks: tuple[int, int] | None = None,
        key_padding: KeyPadding = "both",
        group_norm: bool = False,
        depth_rescale: int | None = None,
        gate: GateKind | None = None,
        rope_theta: float | None = 100000.0,
        frequency_scaling: FrequencyScaling | None = None,
        dropout: float = 0.0,
        window: tuple[int, int] = (-1, -1),
        scores: Expression | None = None,
        convolved: Expression | None = None,
        logits: Expression | None = None,
        visible: Expression | None = None,
        parameters: Mapping[str, str] | None = None,
        sink: bool = False,
        causal: bool = True,
        mask: Mask = "source",
        context_parallel: ProcessGroup | DeviceMesh | None = None,
        backend: Backend = "auto",
        compute_dtype: DTypeLike | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        arguments = {**locals()}  # only the arguments are local so far
        super().__init__()
        dim, n_heads = check_count("dim", dim), check_count("n_heads", n_heads)
        self.dim, self.n_heads = dim, n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else check_divisor("n_kv_heads", n_kv_heads, n_heads)
        self.n_local_heads, self.n_local_kv_heads = self.n_heads, self.n_kv_heads
        if head_dim is None and dim % n_heads:
            raise SpecError(
                explain("dim", dim, f"is no multiple of n_heads = {n_heads}", "a multiple, or head_dim=...")
            )
        self.head_dim = dim // n_heads if head_dim is None else head_dim
        if mixed_heads is not None:
            mixed_heads = check_divisor("mixed_heads", mixed_heads, n_heads)
        if post_mixed_heads is not None:
            post_mixed_heads = check_divisor("post_mixed_heads", post_mixed_heads, n_heads)
        check_options(group_norm, depth_rescale, gate, rope_theta, frequency_scaling, dropout)
        self.rope_theta, self.frequency_scaling, self.dropout = rope_theta, frequency_scaling, dropout
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self._build_options: dict[str, Any] = {
            **{name: arguments[name] for name in OPTIONS if name in arguments},
            "head_dim": self.head_dim,
            "mixed_heads": mixed_heads,
            "post_mixed_heads": post_mixed_heads,
            "backend": backend,
            "dtype": None if compute_dtype is None else dtype_name("compute_dtype", compute_dtype),
            "dropout": dropout > 0,
        }
        self.op = build_for(dtype, self._build_options)
        self._build_options |= options_of(self.op.plan.spec)  # which can be pickled
        self.context_parallel: ContextParallel | None = None
        if context_parallel is not None:
            if dropout > 0:
                rule = "dropout is not supported where ranks share a sequence"
                raise SpecError(explain("dropout", dropout, rule, "0, or context_parallel=None"))
            from ..distributed import ContextParallel  # some builds of torch lack torch.distributed

            self.context_parallel = ContextParallel(self.op, context_parallel)

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        wide, narrow = n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.wq = nn.Linear(dim, wide, bias=False, **made)
        self.wk = nn.Linear(dim, narrow, bias=False, **made)
        self.wv = nn.Linear(dim, narrow, bias=False, **made)
        self.wo = nn.Linear(wide, dim, bias=False, **made)
        self.mta_kernel = self._kernel(kernel, made)
        self.mta_kernel_after_sm = self._kernel(post_kernel, made)
        self.wpsm = None if mixed_heads is None else HeadMixer(n_heads, mixed_heads, **made)
        self.wposm = HeadMixer(n_heads, n_heads, **made) if post_mixed_heads == n_heads else None
        self.head_kernel: nn.Parameter | None = None
        if post_mixed_heads is not None and post_mixed_heads < n_heads:
            shape = n_heads // post_mixed_heads, post_mixed_heads, post_mixed_heads
            self.head_kernel = nn.Parameter(torch.empty(shape, **made))
        spec = self.op.plan.spec
        for name, attribute in _TOKEN_MIXINGS.items():
            group = spec.mixed_heads if FACTORS[name][0] == "dynamic_ranks" else spec.post_mixed_heads
            part = TokenMixing(dim, n_heads, group or 0, spec.ranks[name], **made) if name in spec.ranks else None
            setattr(self, attribute, part)
        self.subln = HeadNorm(self.head_dim, depth_rescale, **made) if group_norm else None
        self.gate = None if gate is None else Gate(self.head_dim, 1 if gate == "scalar" else self.head_dim, **made)
        self.sink = nn.Parameter(torch.empty(n_heads, **made)) if sink else None
        self.score_parameters = ScoreParameters(
            {x.name: torch.empty(x.extents({"H": n_heads}), **made) for x in self._score_parameters()}
        )
        self.stages = Stages(self)
        self.reset_stages()
        if torch.cuda.is_available() and triton_is_installed():
            from .row_kernels import compile_for

            parts = {"norm": group_norm, "gate": gate == "scalar"}
            compile_for(self.head_dim, self.op.dtypes[0] if len(self.op.dtypes) == 1 else dtype, dtype, **parts)
        self.register_load_state_dict_pre_hook(_accept_head_kernel)  # type: ignore[no-untyped-call]

    def _score_parameters(self) -> list[Argument]:
        """Return the parameters of expressions that the layer holds.

        Raises:
            SpecError: one counts batch entries or tokens, or the mask reads it.
        """
        held = [x for x in self.op.plan.spec.learned_arguments if x.role == "parameters"]
        if masks := self.op.plan.spec.mask_parameters:
            legal = "a condition without parameters, or mtagen.build"
            raise SpecError(
                explain("parameters", sorted(masks), "visible reads them, and a layer holds no integers", legal)
            )
        for argument in held:
            if {"B", "Nk"} & {*argument.shape}:
                rule = "counts batch entries or tokens, which a layer does not hold"
                legal = "axes h and numbers, or the op itself"
                raise SpecError(explain(f"parameters[{argument.name!r}]", argument.shape, rule, legal))
        return held

    def _kernel(self, extents: tuple[int, int] | None, made: dict[str, Any]) -> nn.Parameter | None:
        return None if extents is None else nn.Parameter(torch.empty(self.n_heads, 1, *extents, **made))

    def reset_parameters(self) -> None:
        """Initialise all parameters, sharded ones too, e.g. after ``to_empty`` of a meta layer."""
        for part in self.children():
            if part not in (self.score_parameters, self.stages):
                part.reset_parameters()  # type: ignore[operator]
        self.reset_stages()

    def reset_stages(self) -> None:
        """Set the layer's own parameters, those of the stages, to the identity."""
        own = {
            "weight": self.mta_kernel,
            "post_weight": self.mta_kernel_after_sm,
            "post_head_weight": self.head_kernel,
        }
        for name, parameter in own.items():
            if parameter is not None:
                weights = self.op.identity_weights(self.n_heads, device=parameter.device, dtype=parameter.dtype)
                set_parameter(parameter, weights[name].view(parameter.shape))
        for parameter in (self.sink, *self.score_parameters.values()):
            if parameter is not None:
                set_parameter(parameter, torch.zeros(parameter.shape, device=parameter.device, dtype=parameter.dtype))

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Cache | EngineCache | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Attend among the tokens of each sequence or document, or to the tokens in a cache.

        Args:
            x: ``(B, N, dim)``; packed documents are ``(total, dim)`` or ``(1, total, dim)``.
            positions: ``(N,)`` or ``(B, N)`` integers for the rotary embedding; for packed
                documents ``(total,)`` or ``(1, total)``. By default they count from 0 in each
                sequence or document, and with a cache from the number of tokens that it holds. They
                have no effect on the keys that a query sees.
            cu_seqlens: ``(documents + 1,)`` int32 on x's device: where each of the packed documents
                begins, and where the last document ends. Rows after that end get zeros from
                attention. Each document is a sequence of its own, for the convolutions too
                (``op.varlen``).
            max_seqlen: tokens of the longest document, or more; default total. Memory may grow with it.
            cache: a cache from :meth:`new_cache`. x are the next tokens of each entry; the call
                adds their keys, values and last queries to the cache. Or the cache of an engine,
                which needs ``positions`` for the rotary embedding.
            length: for a context-parallel layer, number of tokens of the whole sequence, or of all
                documents; default x's times the number of ranks. ``positions`` belong to x's
                tokens, by default their places in the whole sequence; ``cu_seqlens`` and
                ``max_seqlen`` describe the whole.

        Returns:
            The layer's output in the shape of ``x``.

        Raises:
            InputError: an argument does not fit; the cache is unchanged.
            BackendError: ``x`` is on a device that the op was not built for.
        """
        check_input(x, self.dim, positions, cu_seqlens, max_seqlen)
        self._check_no_documents(cu_seqlens)
        if length is not None and self.context_parallel is None:
            rule = "is for layers whose ranks share a sequence"
            raise InputError(explain("length", length, rule, "None, or a layer with context_parallel=..."))
        if cu_seqlens is not None:
            spread = self.context_parallel
            total = x.shape[-2] if spread is None else spread.length(x.shape[-2], length)
            longest = total if max_seqlen is None else max_seqlen
            check_boundaries(("cu_seqlens", cu_seqlens), ("max_seqlen", longest), total, x.device)
        if cache is not None:
            self._check_cache(x, positions, cu_seqlens, cache)
        (rows,) = autocast(x if cu_seqlens is None else x.reshape(-1, self.dim))  # once for all projections
        q, k, v = (project(rows).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        if self.rope_theta is not None:
            at = self._positions(rows, cu_seqlens, cache, length) if positions is None else positions
            at = at if cu_seqlens is None else at.reshape(-1)
            angles = rotation(at, self.head_dim, self.rope_theta, self.frequency_scaling, q.dtype)
            q, k = rotate(angles, q, k)
        q, k, v = autocast(q, k, v)  # modules in the place of projections may leave it to their caller
        if q.dtype not in self.op.dtypes:
            rule, legal = (
                "the layer's kernels were built for another dtype",
                f"torch.autocast, or a layer with compute_dtype={q.dtype}",
            )
            raise InputError(explain("dtype of queries", q.dtype, rule, legal))
        factors = self._factors(rows, q.dtype)
        if cache is not None:
            more = {"factors": factors} if factors else {}  # caches of engines take none
            out = cache.compute(self.op, self.stages(), q, k, v, **more)
        elif factors:
            out = self._attend_by_heads(q, k, v, **self._options(), **factors)
        elif self.context_parallel is not None:
            out = self._attend_over_ranks(self.context_parallel, q, k, v, cu_seqlens, max_seqlen, length)
        else:
            out = self._attend(q, k, v, cu_seqlens, max_seqlen)
        if self.subln is not None:
            out = self.subln(out)
        if self.gate is not None:
            out = self.gate(out)
        result: Tensor = self.wo(out.reshape(*x.shape[:-1], self.n_local_heads * self.head_dim))
        return result

    def _positions(
        self, rows: Tensor, cu_seqlens: Tensor | None, cache: Cache | EngineCache | None, length: int | None
    ) -> Tensor:
        """Return the default positions of the tokens of a call."""
        count = rows.shape[-2]
        if isinstance(cache, Cache):
            return cache.positions(count)
        spread = self.context_parallel
        count = count if spread is None else spread.length(count, length)
        whole = torch.arange(count, device=rows.device) if cu_seqlens is None else document_positions(cu_seqlens, count)
        return whole if spread is None else spread.shard(whole, 0)

    def _projected(self) -> Tensor:
        """Return a tensor with the device and dtype of the keys that the layer computes without
        autocast.

        A module that replaces ``wk`` may have no ``weight``, or one of integers.
        """
        held = itertools.chain(self.wk.parameters(), self.parameters())
        return next((x for x in held if x.is_floating_point()), torch.empty(0))

    def _factors(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the factors ``(B, H, N, 2 R + 1)`` of the mixings that depend on tokens ``(B, N, dim)``, by name."""
        parts = ((name, getattr(self, attribute)) for name, attribute in _TOKEN_MIXINGS.items())
        return {name: part(x).to(dtype).transpose(-3, -2) for name, part in parts if part is not None}

    def _options(self) -> dict[str, Any]:
        """Return the arguments of a call of the op besides q, k and v."""
        options: dict[str, Any] = self.stages()
        return options | {"dropout_p": self.dropout if self.training else 0}

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
        """Compute outputs in the shape of q: ``(B, N, H, D)``, or ``(total, H, D)`` for packed
        documents.
        """
        options = self._options()
        out: Any
        if cu_seqlens is None:
            return self._attend_by_heads(q, k, v, **options)
        longest = q.shape[0] if max_seqlen is None else max_seqlen
        out = self.op.varlen(q, k, v, cu_seq_q=cu_seqlens, cu_seq_k=cu_seqlens, max_q=longest, max_k=longest, **options)
        return out  # type: ignore[no-any-return]

    def _attend_by_heads(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Compute outputs ``(B, N, H, D)`` by a call of the op with these options, of tensors of that shape."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.rope_theta is not None and is_fused():
            # Code that rotates them writes them by heads at no cost. Strips would copy them before products.
            q, k = q.contiguous(), k.contiguous()
        return self.op(q, k, v, **options).transpose(1, 2)  # type: ignore[no-any-return]

    def _attend_over_ranks(
        self,
        spread: ContextParallel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        length: int | None,
    ) -> Tensor:
        """Compute the outputs of the tokens that this rank holds, which attend to those of all
        ranks.
        """
        options = self.stages() | {"length": length}
        out: Any
        if cu_seqlens is None:
            out = spread(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
            return out.transpose(1, 2)  # type: ignore[no-any-return]
        out = spread.varlen(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **options)
        return out  # type: ignore[no-any-return]

    def new_cache(
        self,
        batch: int,
        max_len: int,
        *,
        spare: int = 0,
        like: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Cache:
        """Make an empty cache for generation. Calls of the layer fill it with a prompt, then with
        new tokens.

        However the tokens are divided into calls, the outputs equal those of one call with all
        tokens. Calls with a cache need gradients and dropout off, and a layer whose queries see no
        later keys. All entries of a call get the same number of tokens. For entries of different
        lengths, take the prompts one by one and join their caches (:meth:`Cache.cat`).

        Args:
            batch: B, number of sequences.
            max_len: upper limit of the tokens of a sequence.
            spare: how many of the last tokens may be taken back (:meth:`Cache.remove`), as
                speculative decoding does.
            like: ``(..., N, dim)``, tokens of the first call. If their device or dtype is not that of the
                parameters, which may be offloaded or quantised, the layer projects a key from them: the
                cache then has the key's device and dtype by default.
            device: device of the cache, default that of the parameters.
            dtype: dtype of keys, values and queries; default autocast's dtype where it is on, else
                the parameters'.

        Raises:
            InputError: an argument does not fit, or queries see later keys.
        """
        self._check_has_all_tokens()
        for name, count in (("batch", batch), ("max_len", max_len)):
            if as_count(count) is None:
                raise InputError(explain(name, count, "must be a positive int", "1, 2, ..."))
        extra = as_int(spare)
        if extra is None or extra < 0:
            raise InputError(explain("spare", spare, "must be a number of tokens", "0, 1, 2, ..."))
        spec = self.op.plan.spec
        if spec.right != 0:
            rule = "a token's output depends on later tokens, which a cache cannot know"
            raise InputError(explain("causal", False, rule, "causal=True, or calls without a cache"))
        keys = self._projected()
        if like is not None and (keys.device, keys.dtype) != (like.device, like.dtype):
            keys = self.wk(like[..., :1, :])
        device = keys.device if device is None else torch.device(device)
        if dtype is None:
            dtype = autocast_dtype(device.type) or keys.dtype
        heads = self.n_local_heads, self.n_local_kv_heads
        return Cache.for_op(self.op, batch, *heads, max_len, spare=extra, device=device, dtype=dtype)

    def _check_cache(
        self, x: Tensor, positions: Tensor | None, cu_seqlens: Tensor | None, cache: Cache | EngineCache
    ) -> None:
        """Check a call with a cache.

        Raises:
            InputError: the cache fits neither the layer nor the call.
        """
        if not isinstance(cache, (Cache, EngineCache)):
            raise InputError(explain("cache", type(cache).__name__, "must be a cache", "layer.new_cache(...)"))
        self._check_has_all_tokens()
        if cu_seqlens is not None:
            raise InputError(
                explain("cache", "together with cu_seqlens", "packed documents cannot use a cache", "one of them")
            )
        if torch.is_grad_enabled():
            rule = "generation computes no gradients"
            raise InputError(explain("cache", "gradients enabled", rule, "torch.no_grad() or torch.inference_mode()"))
        if self.training and self.dropout:
            rule = "generation does not apply dropout"
            raise InputError(explain("cache", "a layer in training mode, with dropout", rule, "layer.eval()"))
        if isinstance(cache, EngineCache):
            if self.op.plan.spec.ranks:
                rule = "an engine's cache does not hold the keys' factors of mixings that depend on tokens"
                raise InputError(explain("cache", type(cache).__name__, rule, "layer.new_cache(...), or no cache"))
            if positions is None and self.rope_theta is not None:
                rule = "a layer does not know the positions of an engine's tokens"
                raise InputError(explain("positions", positions, rule, "(B, N) integers"))
            return
        batch, heads, held, head_dim = cache.queries.shape
        context = held - cache.spare
        mine = (len(x), self.n_local_heads, self.n_local_kv_heads, self.op.plan.spec.context, self.head_dim)
        if (batch, heads, cache.keys.shape[1], context, head_dim) != mine:
            got = tuple(cache.keys.shape), tuple(cache.queries.shape)
            legal = f"layer.new_cache({len(x)}, max_len) of this layer"
            raise InputError(explain("cache", got, "its keys and queries do not fit x or the layer", legal))
        if cache.keys.device != x.device:
            legal = f"new_cache(..., device={x.device}), or new_cache(..., like=x)"
            raise InputError(explain("cache.keys.device", cache.keys.device, "must be x's device", legal))
        used = cache.read_longest() if x.shape[1] > MAX_NEW_TOKENS else cache.longest or 0
        if not 1 <= x.shape[1] <= cache.max_len - used:
            rule = f"the cache holds {used} of {cache.max_len} tokens"
            raise InputError(explain("tokens", x.shape[1], rule, f"1..{cache.max_len - used}"))

    def _check_no_documents(self, cu_seqlens: Tensor | None) -> None:
        """Check that a layer whose mixings depend on tokens gets no packed documents.

        Raises:
            InputError: it does.
        """
        if cu_seqlens is not None and self.op.plan.spec.ranks:
            rule = "packed documents are not supported with dynamic_ranks and post_dynamic_ranks"
            raise InputError(explain("cu_seqlens", tuple(cu_seqlens.shape), rule, "None, and a batch"))

    def _check_has_all_tokens(self) -> None:
        """Check that the layer has all tokens of a sequence, as a cache needs.

        Raises:
            InputError: tokens are spread over ranks.
        """
        if self.context_parallel is not None:
            rule = "generation needs a layer with all tokens of a sequence"
            raise InputError(
                explain(
                    "cache",
                    "a layer with context_parallel",
                    rule,
                    "a layer without context_parallel that loads the same state dict",
                )
            )

    def extra_repr(self) -> str:
        """Return the layer's options that its submodules do not show."""
        heads = f"{self.dim}, {self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}"
        stages = ", ".join(f"{name}={x}" for name, x in self.op.plan.spec.weights(self.n_heads).items())
        angles = f"rope_theta={self.rope_theta}"
        if self.frequency_scaling is not None:
            angles += f", frequency_scaling={self.frequency_scaling}"
        return f"{heads}, {stages or 'plain'}, {angles}, dropout={self.dropout}"

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Weights of other :class:`Stages` become the layer's own."""
        if name == "stages" and isinstance(value, Stages) and value.layer is not self:
            value.give(self)
            value = Stages(self)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the op, whose kernels are loaded in this process only."""
        return {name: value for name, value in self.__dict__.items() if name != "op"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state and build the op again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.op = build_for(self._projected().dtype, self._build_options)


def build_for(dtype: torch.dtype, options: Mapping[str, Any]) -> AttentionOp:
    """Build the op of a layer whose projections have this dtype.

    If nothing is compiled, the op takes every dtype, so that the layer can be cast.

    Args:
        dtype: dtype of the projections.
        options: arguments of :func:`mtagen.build`; a ``dtype`` other than None takes precedence.
    """
    if options["dtype"] is None and dtype in (torch.bfloat16, torch.float16):
        op = build(**{**options, "dtype": dtype})
        if op.plan.backend != "torch":
            return op
    return build(**options)


def _accept_head_kernel(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load a ``head_kernel`` of one group, [1, in, out], as ``wposm.weight``, [out, in]."""
    kernel = state_dict.get(f"{prefix}head_kernel")
    if isinstance(layer.wposm, HeadMixer) and kernel is not None and kernel.shape == (1, *layer.wposm.weight.shape):
        del state_dict[f"{prefix}head_kernel"]
        state_dict[f"{prefix}wposm.weight"] = kernel[0].T.contiguous()
