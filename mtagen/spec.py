"""The specification of an operator: a frozen, validated value.

Knows nothing of torch, planning or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from .errors import SpecError, check_choice, explain

MAX_KERNEL = 64  # per axis; the lifted kernels have their own, tighter limit on min(cq, ck)
HEAD_DIMS = range(16, 257, 8)
DType: TypeAlias = Literal["bf16", "fp16", "fp32", "fp64"]
DTYPES: dict[DType, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}  # name -> bytes per element
KeyPadding: TypeAlias = Literal["both", "left", "right"]
KEY_PADDINGS: tuple[KeyPadding, ...] = get_args(KeyPadding)
Mask: TypeAlias = Literal["source", "output"]
MASKS: tuple[Mask, ...] = get_args(Mask)
Expression: TypeAlias = str | Callable[..., Any]  # a text, or a function of symbols, of mtagen.expressions
MAX_NEW_TOKENS = 8  # queries of one decode step
MAX_MIXED_HEADS = 64  # heads of one mixed group
MAX_RANK = 4  # of the matrix that a token adds to a mixing
DROPOUT_GROUP = 16  # keys that share one draw of random numbers in dropout
# The weight of each stage -> the option that builds the stage, in the order in which the stages are applied.
STAGES = {
    "weight": "kernel",
    "head_weight": "mixed_heads",
    "post_weight": "post_kernel",
    "post_head_weight": "post_mixed_heads",
}
WEIGHTS = tuple(STAGES)
# The factors of mixings that depend on tokens -> the option that builds the mixing, and which rank of it they have.
FACTORS = {
    "query_factors": ("dynamic_ranks", 0),
    "key_factors": ("dynamic_ranks", 1),
    "post_query_factors": ("post_dynamic_ranks", 0),
    "post_key_factors": ("post_dynamic_ranks", 1),
}
KEY_FACTORS = tuple(name for name, (_, token) in FACTORS.items() if token)
EXPRESSIONS = ("scores", "convolved", "logits")  # the functions of scores, in the order in which they are applied
# Arguments of registered ops for the parameters of expressions, in the order of the option ``parameters``.
PARAMETER_SLOTS = tuple(f"parameter{n}" for n in range(8))
Role: TypeAlias = Literal[
    "queries",
    "keys",
    "values",
    "filters",
    "mixtures",
    "factors",
    "sinks",
    "parameters",
    "tables",
    "boundaries",
    "lengths",
    "seed",
    "pages",
]


class Argument(NamedTuple):
    """A tensor that an op takes.

    Attributes:
        name: its name in calls.
        role: what the op does with it: ``filters`` convolve, ``mixtures`` mix heads, ``factors`` make
            a mixing depend on tokens, ``sinks`` are logits without values, ``parameters`` are read
            by expressions, ``tables`` tell kernels which keys each query sees, ``boundaries`` say
            where packed documents begin, ``lengths`` how many keys of a cache are in use, ``pages``
            where keys lie.
        shape: its extents: numbers, and symbols such as ``B`` or ``H``, which are equal in all
            tensors of a call. ``H/4`` is a quarter of ``H``, and ``ceil(Nk/64)`` is rounded up.
        dtypes: the dtypes that it may have; ``q`` is that of the queries.
        differentiable: whether the op has a gradient of it.
    """

    name: str
    role: Role
    shape: tuple[int | str, ...]
    dtypes: tuple[str, ...] = ("q",)
    differentiable: bool = True

    @property
    def counts_pairs(self) -> bool:
        """Whether it has an entry for each pair of tokens, and none for queries before the first key."""
        return self.shape.count("Nk") > 1

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape in numbers, given the symbols' values."""
        return tuple(x if isinstance(x, int) else _extent(x, sizes) for x in self.shape)


def _extent(symbol: str, sizes: Mapping[str, int]) -> int:
    name, _, divisor = symbol.removeprefix("ceil(").removesuffix(")").partition("/")
    size, parts = sizes[name], int(divisor or 1)  # torch.compile's sizes may be symbols, which have no divmod
    return -(-size // parts) if symbol.startswith("ceil(") else size // parts


# Queries, keys and values of a batch, of packed documents, and of a step of decoding, whose Nq counts the earlier
# queries that the new ones depend on.
BATCH = (
    Argument("q", "queries", ("B", "H", "Nq", "D")),
    Argument("k", "keys", ("B", "Hkv", "Nk", "D")),
    Argument("v", "values", ("B", "Hkv", "Nk", "DV")),
)
PACKED = (
    Argument("q", "queries", ("total_q", "H", "D")),
    Argument("k", "keys", ("total_k", "Hkv", "D")),
    Argument("v", "values", ("total_k", "Hkv", "DV")),
)
STEP = tuple(
    argument._replace(name=name, differentiable=False)
    for argument, name in zip(BATCH, ("q_tail", "k_cache", "v_cache"), strict=True)
)
BOUNDARIES = tuple(
    Argument(name, "boundaries", ("documents + 1",), ("int32",), False) for name in ("cu_seq_q", "cu_seq_k")
)
INTEGERS = ("int32", "int64")  # dtypes of parameters from which a call computes a mask's bounds
CHECKED_INTEGERS = ("int32",)  # and of those that kernels read to check each pair of a query and a key
SINK = Argument("sink", "sinks", ("H",), ("fp32", "q"))
SEED = Argument("dropout_seed", "seed", (2,), ("int64",), False)
UNSEEING = 2**30, -1  # the first and the last key, in tables, of a query that sees none
# Kernels read a mask that is no window from these tables: the first and the last key of each query; and for each key
# j the first row that sees a key >= j, and the end of the rows that see a key <= j.
TABLES = (
    Argument("first_keys", "tables", ("B", "Nq"), ("int32",), False),
    Argument("last_keys", "tables", ("B", "Nq"), ("int32",), False),
    Argument("first_rows", "tables", ("B", "Nk"), ("int32",), False),
    Argument("end_rows", "tables", ("B", "Nk"), ("int32",), False),
)
# Of masks by which each query sees two runs of keys: the first and the last key between them; and for each key j the
# first row from which on all rows have keys >= j between their runs, and the end of the rows that all have keys <= j.
GAP_TABLES = (
    Argument("first_hidden", "tables", ("B", "Nq"), ("int32",), False),
    Argument("last_hidden", "tables", ("B", "Nq"), ("int32",), False),
    Argument("first_hidden_rows", "tables", ("B", "Nk"), ("int32",), False),
    Argument("end_hidden_rows", "tables", ("B", "Nk"), ("int32",), False),
)
BLOCK_TABLE = Argument("block_table", "pages", ("B", "width"), ("int32",), False)  # of the pages of each sequence
LENGTHS = Argument("cache_seqlens", "lengths", ("B",), ("int32",), False)


@dataclass(frozen=True)
class Spec:
    """One multi-token attention operator: a pipeline of stages over scores (head, query, key).

    The scores are scale * q k^T. They are convolved (with zeros where masked), mixed over heads,
    masked, and turned into attention probabilities by a softmax. The probabilities are convolved,
    masked and mixed over heads again, and then multiplied by v. Each of the four stages may be left
    out; without any the operator is plain attention.

    Args:
        kernel: ``(cq, ck)``, extent of the convolution before the softmax over queries and over keys; ``None`` for no
            convolution.
        head_dim: size D of a query or key vector, 16..256 in multiples of 8.
        value_head_dim: size DV of a value vector; ``None`` means ``head_dim``.
        causal: query i (aligned to the end of the keys) sees keys ``j <= i + Nk - Nq`` only. The
            same as a window that ends at 0, see ``window``.
        key_padding: where the key axis is padded: ``both`` (pL = (ck-1)//2), ``left`` (pL = ck-1), ``right`` (pL = 0).
        mask: which scores a convolution counts as zero, where not every query sees every key.
            ``source``: scores (i', j') whose own query i' does not see key j' (when causal j' > i'
            + off with off = Nk - Nq, as in the MTA authors' code). ``output``: scores (i', j')
            whose key j' is hidden from the query i of the result (j' > i + off, as in the paper's
            formula).
        dtype: element type of q, k, v and out: ``bf16``, ``fp16``, ``fp32`` (and ``fp64`` for the torch backend).
        mixed_heads: m: before the softmax, scores are mixed in groups of m consecutive heads,
            1..64; ``None`` for no mixing.
        post_kernel: extent of the convolution after the softmax; ``None`` for no convolution.
        post_mixed_heads: the same as ``mixed_heads``, after the softmax.
        dynamic_ranks: ``(rank_q, rank_k)``, 0..4 each: the matrix that mixes the heads before the softmax is the
            sum of the op's weight and of a matrix for each query and one for each key, of these ranks and a
            diagonal. 0 leaves the query's or the key's matrix out; ``None`` leaves out both. It needs
            ``mixed_heads``, and a batch.
        post_dynamic_ranks: the same as ``dynamic_ranks``, for ``post_mixed_heads``.
        window: ``(left, right)``, as FlashAttention defines it: query i sees keys ``i + Nk - Nq -
            left <= j <= i + Nk - Nq + right`` only; -1 is no limit. ``causal`` makes ``right`` 0.
            Fields are normalised so that equal masks are equal fields: where ``right`` is 0,
            ``causal`` is True and the window's second number is -1. :attr:`left` and :attr:`right`
            give the limits in force.
        scores: what the first convolution takes, an expression in s, the scaled score. Hidden
            scores are 0 to the convolution, whatever the expression is there.
        convolved: what is mixed over heads, an expression in s, the score after the convolution.
        logits: what the softmax takes, an expression in s, the score after convolution and mixing:
            ``50 * tanh(s / 50)``. Expressions are texts, or functions of symbols;
            :mod:`mtagen.expressions` describes the language. The fields are texts in canonical
            form; None for s itself. Without a convolution ``scores`` joins ``convolved``, and
            without mixing ``convolved`` joins ``logits``, so that equal operators are equal.
        parameters: the tensors that expressions and ``visible`` read, and the axes of each:
            ``{"table": "h,65"}``. The field is pairs of name and axes.
        constants: names of the parameters that need no gradient. The backward pass does not compute their gradients.
            Parameters of ``visible`` are integers and never have gradients, so the field leaves them out.
        visible: which keys a query sees within causality and window, a condition in i, j, b and parameters of
            integers: ``(j <= i) | (j < prefix[b])``. A text or a function; the field is a text in
            canonical form, or None if the window says the same.
        sink: adds a learned logit per head to the softmax's denominator; each call passes ``sink``,
            shape (H,).
        packed: whether q, k and v hold packed documents, each a sequence of its own, instead of a
            batch.
        dropout: whether attention probabilities are dropped (after all stages), with a probability
            that each call gives.
        page_size: tokens of a page, a power of two, if keys and values lie in pages: those of decode
            steps, or with ``packed`` those of forward passes. None if they do not.

    Raises:
        SpecError: a field is out of range.
    """

    kernel: tuple[int, int] | None
    head_dim: int
    value_head_dim: int = None  # type: ignore[assignment]  # filled in from head_dim
    causal: bool = True
    key_padding: KeyPadding = "both"
    mask: Mask = "source"
    dtype: DType = "bf16"
    mixed_heads: int | None = None
    post_kernel: tuple[int, int] | None = None
    post_mixed_heads: int | None = None
    dynamic_ranks: tuple[int, int] | None = None
    post_dynamic_ranks: tuple[int, int] | None = None
    window: tuple[int, int] = (-1, -1)
    scores: str | None = None
    convolved: str | None = None
    logits: str | None = None
    visible: str | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    constants: tuple[str, ...] = ()
    sink: bool = False
    packed: bool = False
    dropout: bool = False
    page_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("kernel", "post_kernel"):
            object.__setattr__(self, name, _extents(name, getattr(self, name)))
        for name in ("mixed_heads", "post_mixed_heads"):
            given = getattr(self, name)
            heads = as_int(given)
            if given is not None and not (heads is not None and 1 <= heads <= MAX_MIXED_HEADS):
                raise SpecError(explain(name, given, "must be a number of heads", f"1..{MAX_MIXED_HEADS}, or None"))
            object.__setattr__(self, name, heads)
        for name in ("dynamic_ranks", "post_dynamic_ranks"):
            object.__setattr__(self, name, self._ranks(name, getattr(self, name)))
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for name in ("head_dim", "value_head_dim"):
            value = as_int(getattr(self, name))
            if value is None or value not in HEAD_DIMS:
                rule = "is not supported"
                raise SpecError(explain(name, getattr(self, name), rule, "multiples of 8 from 16 to 256"))
            object.__setattr__(self, name, value)
        for name in ("causal", "sink", "packed", "dropout"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(explain(name, getattr(self, name), "must be a bool", (True, False)))
        page = as_int(self.page_size)
        if self.page_size is not None and (page is None or page < 1 or page & (page - 1)):
            raise SpecError(explain("page_size", self.page_size, "must be a power of two", "16, 32, 64, ... or None"))
        for name, legal in (("key_padding", KEY_PADDINGS), ("mask", MASKS), ("dtype", tuple(DTYPES))):
            check_choice(name, getattr(self, name), legal)
        left, right = _window(self.window)
        if self.causal or right == 0:
            object.__setattr__(self, "causal", True)
            right = -1
        object.__setattr__(self, "window", (left, right))
        if self.parameters or any(getattr(self, name) is not None for name in (*EXPRESSIONS, "visible")):
            self._normalise_expressions()
        else:
            object.__setattr__(self, "parameters", ())
        object.__setattr__(self, "constants", self._constants())

    def _constants(self) -> tuple[str, ...]:
        """Return the parameters of expressions that have no gradient, sorted.

        Raises:
            SpecError: ``constants`` is not a tuple or list, or names something that is no parameter.
        """
        given, known = self.constants, [name for name, _ in self.parameters]
        if not isinstance(given, (tuple, list)) or any(name not in known for name in given):
            legal = f"names among {known}" if known else "(), because there are no parameters"
            raise SpecError(explain("constants", given, "must be a tuple or list of names of parameters", legal))
        if not given:
            return ()  # torch.compile traces mtagen.reference, and cannot enter the lock of a cached property
        return tuple(sorted({*given} - self.mask_parameters))

    def _ranks(self, name: str, given: Any) -> tuple[int, int] | None:
        """Return the ranks of a mixing's dynamic part after checking them.

        Raises:
            SpecError: they are no ranks, or the spec has no such mixing, packed documents or pages.
        """
        if given is None:
            return None
        ranks = _pair(given)
        if ranks is None or not all(0 <= rank <= MAX_RANK for rank in ranks) or not any(ranks):
            rule, legal = "must be a pair of ints (rank_q, rank_k)", f"0..{MAX_RANK} each, not both 0; or None"
            raise SpecError(explain(name, given, rule, legal))
        mixing = name.replace("dynamic_ranks", "mixed_heads")
        if getattr(self, mixing) is None:
            raise SpecError(explain(name, given, f"needs {mixing}, whose matrices it adds to", f"{mixing}=16, or None"))
        for option, what in (("packed", "packed documents"), ("page_size", "pages")):
            if getattr(self, option):
                rule = f"mixings that depend on tokens do not support {what}"
                raise SpecError(explain(name, given, rule, "None, or calls and decode steps of batches"))
        return ranks

    def _normalise_expressions(self) -> None:
        """Replace expressions by canonical texts, each at the first place that computes the same."""
        # Imported here, because sympy takes longer to load than this module.
        from .expressions.bounds import normalised_visible
        from .expressions.places import normalised

        masks = normalised_visible(self.visible, self.parameters, self.left, self.right)
        self._set_mask(masks.text, masks.left, masks.right)
        distances = self.left, self.right, self.cq - 1 if self.mask == "output" else 0
        fields = normalised(
            {name: getattr(self, name) for name in EXPRESSIONS},
            self.parameters,
            distances,
            convolves=self.kernel is not None,
            mixes=self.mixed_heads is not None,
            read_by_mask=masks.parameters,
        )
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if len(self.parameters) > len(PARAMETER_SLOTS):
            names = [name for name, _ in self.parameters]
            raise SpecError(explain("parameters", names, "are too many", f"at most {len(PARAMETER_SLOTS)}"))

    def _set_mask(self, visible: str | None, left: int | None, right: int | None) -> None:
        """Set the fields of the mask. Equal masks have equal fields.

        Raises:
            SpecError: the mask cannot be one of ``mask="output"``.
        """
        if visible is not None and self.mask == "output" and self.context:
            rule = 'mask="output" is not defined for it with a convolution over queries'
            raise SpecError(explain("visible", visible, rule, 'mask="source"'))
        object.__setattr__(self, "visible", visible)
        object.__setattr__(self, "causal", right == 0)
        object.__setattr__(self, "window", (-1 if left is None else left, -1 if right in (None, 0) else right))

    @property
    def cq(self) -> int:
        """Extent over queries of the convolution before the softmax; row W[cq-1] multiplies the current query."""
        return self.kernel[0] if self.kernel else 1

    @property
    def ck(self) -> int:
        """Extent over keys of the convolution before the softmax; column W[:, pad_left] multiplies the current key."""
        return self.kernel[1] if self.kernel else 1

    @property
    def pad_left(self) -> int:
        """Number pL of keys to the left of j that enter C[i, j]."""
        return self.padding(self.ck)[0]

    @property
    def pad_right(self) -> int:
        """Number pR = ck - 1 - pL of keys to the right of j that enter C[i, j]."""
        return self.padding(self.ck)[1]

    def padding(self, ck: int) -> tuple[int, int]:
        """Return how many keys left and right of j a convolution of width ``ck`` reads."""
        left = {"both": (ck - 1) // 2, "left": ck - 1, "right": 0}[self.key_padding]
        return left, ck - 1 - left

    @cached_property
    def context(self) -> int:
        """Number of earlier queries that a row of the output depends on."""
        return self.cq - 1 + (self.post_kernel[0] - 1 if self.post_kernel else 0)

    @property
    def convolves_only(self) -> bool:
        """Whether the operator has no stage except, maybe, a convolution before the softmax."""
        return self.mixed_heads is None and self.post_kernel is None and self.post_mixed_heads is None

    @property
    def is_fusible(self) -> bool:
        """Whether one kernel may compute a pass.

        That needs an op without ``scores``, without mixing and without stages after the softmax.
        """
        return self.convolves_only and self.scores is None

    @property
    def is_liftable(self) -> bool:
        """Whether lifted vectors may compute a pass.

        That needs a fusible op. If it has a convolution, its mask must be a window.
        """
        convolves = self.cq * self.ck > 1
        return self.is_fusible and not (convolves and self.visible)

    @cached_property
    def mixed(self) -> dict[str, int]:
        """Heads per mixed group, by the name of the weight that mixes them."""
        groups = {"head_weight": self.mixed_heads, "post_head_weight": self.post_mixed_heads}
        return {name: heads for name, heads in groups.items() if heads}

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Ranks of the factors that the op takes, by their names."""
        given = {name: (getattr(self, option) or (0, 0))[token] for name, (option, token) in FACTORS.items()}
        return {name: rank for name, rank in given.items() if rank}

    @cached_property
    def kernels(self) -> dict[str, tuple[int, int]]:
        """Extents (cq, ck) of each convolution, by the name of its weight."""
        kernels = {"weight": self.kernel, "post_weight": self.post_kernel}
        return {name: kernel for name, kernel in kernels.items() if kernel}

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The tensors that a call takes, in its order."""
        given = (*(PACKED if self.packed else BATCH), *self.weight_arguments.values(), *self.learned_arguments)
        others = (*BOUNDARIES,) * self.packed + (SEED,) * self.dropout + self._table
        return self._with_head_dims(given + others)

    @cached_property
    def decode_arguments(self) -> tuple[Argument, ...]:
        """The tensors that a step of decoding takes, in its order."""
        learned = (argument._replace(differentiable=False) for argument in self.learned_arguments)
        return self._with_head_dims((*STEP, *self.weight_arguments.values(), *learned, LENGTHS, *self._table))

    @property
    def _table(self) -> tuple[Argument, ...]:
        return (BLOCK_TABLE,) if self.page_size else ()

    @cached_property
    def weight_arguments(self) -> dict[str, Argument]:
        """The weights that the op takes, by name, in the order of ``WEIGHTS``."""
        described = {}
        for name, (group, extents) in self._weight_extents.items():
            role: Role = "mixtures" if name in self.mixed else "filters"
            shape = "H" if group == 1 else f"H/{group}", *extents
            described[name] = Argument(name, role, shape, ("fp32", "q"))
        return described

    @cached_property
    def learned_arguments(self) -> tuple[Argument, ...]:
        """The factors, the sink and the parameters that the op takes. Parameters of the mask are integers."""
        described = (_parameter_argument(*pair, self.packed) for pair in self.parameters)
        masks, checked, constants = self.mask_parameters, self.checked_parameters, self.constants
        return (
            self.factor_arguments
            + (SINK,) * self.sink
            + tuple(
                x._replace(dtypes=CHECKED_INTEGERS if x.name in checked else INTEGERS, differentiable=False)
                if x.name in masks
                else x._replace(differentiable=x.name not in constants)
                for x in described
            )
        )

    @cached_property
    def have_gradients(self) -> tuple[bool, ...]:
        """Whether the op has a gradient of q, of k, of v, of each weight and of each of ``learned_arguments``."""
        before = 3 + len(self.weight_names)
        return (True,) * before + tuple(argument.differentiable for argument in self.learned_arguments)

    @cached_property
    def factor_arguments(self) -> tuple[Argument, ...]:
        """The factors that the op takes, in the order of ``FACTORS``."""
        tokens = ("Nq", "Nk")
        return tuple(
            Argument(name, "factors", ("B", "H", tokens[FACTORS[name][1]], 2 * rank + 1), ("fp32", "q"))
            for name, rank in self.ranks.items()
        )

    @cached_property
    def mask_parameters(self) -> frozenset[str]:
        """The parameters that ``visible`` reads."""
        if self.visible is None:
            return frozenset()
        from .expressions.bounds import parameters_in  # imported here, because it loads sympy

        return parameters_in(self.visible, self.parameters)

    @cached_property
    def checked_parameters(self) -> frozenset[str]:
        """The parameters that kernels read for each pair of a query and a key, because bounds do not say all."""
        if self.visible is None:
            return frozenset()
        from .expressions.bounds import loaded, seen_by  # imported here, because it loads sympy

        return loaded(seen_by(self.visible, self.parameters).checked)

    @cached_property
    def table_parameters(self) -> tuple[str, ...]:
        """The parameters from which the tables of the mask are computed, in the order of a call."""
        if self.visible is None:
            return ()
        from .expressions.bounds import parameters_of_bounds  # imported here, because it loads sympy

        read = parameters_of_bounds(self.visible, self.parameters, with_gaps=self.has_gap)
        return tuple(name for name, _ in self.parameters if name in read)

    @cached_property
    def has_gap(self) -> bool:
        """Whether kernels skip the keys between two runs of keys that a query sees. Only fused kernels do."""
        if self.visible is None or not self.is_fusible:
            return False
        from .expressions.bounds import seen_by  # imported here, because it loads sympy

        return bool(seen_by(self.visible, self.parameters).gaps)

    def tables(self, pass_name: str) -> tuple[Argument, ...]:
        """Return the tables of the mask that kernels of a pass take; none if the mask is a window.

        Those of keys come last. Only fused kernels of backward passes own keys, and look for the rows
        that see them. So the backward pass of a fusible op has them, by whichever lowering.
        """
        if self.visible is None:
            return ()
        owns_keys = pass_name == "backward" and self.is_fusible
        hidden = GAP_TABLES if self.has_gap and pass_name != "decode" else ()
        taken = (*TABLES[:2], *hidden[:2], *((*TABLES[2:], *hidden[2:]) if owns_keys else ()))
        totals = {"Nq": ("total_q",), "Nk": ("total_k",)}
        return tuple(x._replace(shape=totals[str(x.shape[1])]) for x in taken) if self.packed else taken

    @cached_property
    def checked_arguments(self) -> tuple[Argument, ...]:
        """The parameters that kernels read to check pairs, as they take them: after the mask's tables."""
        checked = (x for x in self.learned_arguments if x.name in self.checked_parameters)
        return tuple(x._replace(name=parameter_name(x.name)) for x in checked)

    @cached_property
    def packed_learned_arguments(self) -> tuple[Argument, ...]:
        """The sink and the parameters of expressions that the op takes with packed documents.

        Raises:
            SpecError: packed documents cannot have a parameter.
        """
        return replace(self, packed=True).learned_arguments

    @property
    def expressions(self) -> tuple[tuple[str, str], ...]:
        """The names and texts of the functions of scores, in the order in which they are applied."""
        return tuple((name, text) for name in EXPRESSIONS if (text := getattr(self, name)) is not None)

    @cached_property
    def _weight_extents(self) -> dict[str, tuple[int, tuple[int, int]]]:
        """Heads that share a filter or matrix of each weight, and the extents of that filter or matrix."""
        filters = {name: (1, kernel) for name, kernel in self.kernels.items()}
        described = filters | {name: (m, (m, m)) for name, m in self.mixed.items()}
        return {name: described[name] for name in WEIGHTS if name in described}

    def _with_head_dims(self, arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
        dims = {"D": self.head_dim, "DV": self.value_head_dim}
        return tuple(x._replace(shape=tuple(dims.get(str(size), size) for size in x.shape)) for x in arguments)

    @cached_property
    def weight_names(self) -> tuple[str, ...]:
        """Names of the weights that the op takes, in the order of ``WEIGHTS``."""
        return tuple(self._weight_extents)

    def weights(self, heads: int) -> dict[str, tuple[int, ...]]:
        """Return the weights' shapes by name, in the order of ``WEIGHTS``, for H = ``heads``."""
        return {name: self.weight_shape(name, heads) for name in self.weight_names}

    def weight_shape(self, name: str, heads: int) -> tuple[int, ...]:
        """Return the shape of the weight ``name`` for q with ``heads`` heads."""
        group, extents = self._weight_extents[name]
        return heads // group, *extents

    @property
    def left(self) -> int | None:
        """Number of keys before its own position that a query sees; None for all."""
        return self.window[0] if self.window[0] >= 0 else None

    @property
    def right(self) -> int | None:
        """Number of keys after its own position that a query sees; None for all."""
        if self.causal:
            return 0
        return self.window[1] if self.window[1] >= 0 else None

    @property
    def itemsize(self) -> int:
        """Bytes per element of q, k, v and out."""
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict; ``Spec.from_dict`` inverts it."""
        return {name: _listed(x) for name, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Spec:
        """Return the spec that :meth:`to_dict` made ``fields`` from."""
        return cls(**fields)


# Fields that mtagen.build takes as options: a built op serves batches, packed documents and pages, with dropout and
# without.
OPTIONS = tuple(name for name in Spec.__dataclass_fields__ if name not in ("packed", "dropout", "page_size"))


def options_of(spec: Spec) -> dict[str, Any]:
    """Return arguments of ``mtagen.build`` with which ops of a request are built again, for any dtype.

    Expressions are texts there, which can be pickled, whatever was given.
    """
    return {name: getattr(spec, name) for name in OPTIONS if name != "dtype"}


# Options that mtagen.reference takes: it sees the stages and sizes in its tensors.
_IN_TENSORS = (
    *STAGES.values(),
    *dict.fromkeys(option for option, _ in FACTORS.values()),
    *("parameters", "constants", "sink", "head_dim", "value_head_dim", "dtype"),
)
RULES = tuple(name for name in OPTIONS if name not in _IN_TENSORS)


def _extents(name: str, kernel: Any) -> tuple[int, int] | None:
    """Return the extents (cq, ck) of a convolution after checking them."""
    if kernel is None:
        return None
    extents = _pair(kernel)
    if extents is None:
        rule, legal = "must be a pair of ints (cq, ck)", f"1..{MAX_KERNEL} each, or None for no convolution"
        raise SpecError(explain(name, kernel, rule, legal))
    if not all(1 <= c <= MAX_KERNEL for c in extents):
        raise SpecError(explain(name, kernel, "cq and ck are out of range", f"1..{MAX_KERNEL} each"))
    return extents


def _window(window: Any) -> tuple[int, int]:
    """Return the window (left, right) after checking it."""
    keys = _pair(window)
    if keys is None or not all(-1 <= n < 2**30 for n in keys):
        legal = "keys before and after a query's own, 0..2**30-1 each, or -1 for all"
        raise SpecError(explain("window", window, "must be a pair of ints (left, right)", legal))
    return keys


def _parameter_argument(name: str, axes: str, packed: bool) -> Argument:
    """Return the description of a parameter. Tokens of packed documents come first, as those of keys do."""
    symbols = {"b": "documents" if packed else "B", "h": "H", "i": "Nk", "j": "Nk"}
    symbols |= {axis: f"ceil(Nk/{axis[3:]})" for axis in axes.split(",") if "//" in axis}
    if packed and "//" in axes:
        rule = "counts blocks of tokens, and packed documents begin anywhere"
        raise SpecError(explain(f"parameters[{name!r}]", axes, rule, "axes b and j, or a batch"))
    shape: list[int | str] = [symbols.get(axis) or int(axis) for axis in axes.split(",") if axes]
    if packed and "Nk" in shape:
        if shape.count("Nk") > 1 or "documents" not in shape:
            two = "has two axes of tokens, but tokens of packed documents have one"
            shared = "has an axis of tokens but not axis b, so all packed documents would share it"
            rule = two if shape.count("Nk") > 1 else shared
            raise SpecError(explain(f"parameters[{name!r}]", axes, rule, "axes b and j, or without i and j"))
        shape = ["total_k", *(extent for extent in shape if extent not in ("Nk", "documents"))]
    return Argument(name, "parameters", tuple(shape), ("fp32", "q"))


def parameter_name(name: str) -> str:
    """Return the name of a parameter in host functions and kernels."""
    return f"parameter_{name}"


def _listed(value: Any) -> Any:
    """Return a value of a field as JSON holds it."""
    return [_listed(x) for x in value] if isinstance(value, tuple) else value


def _pair(value: Any) -> tuple[int, int] | None:
    """Return two ints, or None if the value is not a pair of integers."""
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        return None
    first, second = map(as_int, value)
    return None if first is None or second is None else (first, second)


def as_int(value: object) -> int | None:
    """Return an integer of any type, such as NumPy's, as an int; None for other values and for a bool."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
