"""Names and texts for how tensors hold sequences: as entries of a batch, or as packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planner.lift.kernels import AXES, DOCUMENT_TILE
from ..planner.lift.module import LiftModule
from .host import SCHEDULING


@dataclass(frozen=True)
class Axis:
    """Names in kernels and host code for one axis of the scores of a batch, queries or keys.

    Attributes:
        name: the vectors along the axis, ``queries`` or ``keys``.
        start: first vector of a block.
        block: number of vectors of a block.
        length: number of vectors of a sequence.
        operand: the tensor that holds the vectors.
        head: the head of that tensor that query head h reads.
    """

    name: str
    start: str
    block: str
    length: str
    operand: str
    head: str

    @property
    def lengths(self) -> str:
        """The arguments of a kernel from which a program finds its sequence."""
        return "n_q, n_k"

    @property
    def first(self) -> str:
        """First vector of a program's sequence in a matrix of vectors."""
        return f"first_{self.operand}"

    @property
    def total(self) -> str:
        """Number of vectors of such a matrix."""
        return self.length

    @property
    def count(self) -> str:
        """The argument from which kernels compute the number of blocks of the axis."""
        return self.length

    def count_between(self, begin: str, end: str) -> str:
        """Return the same for a part of the axis that a launch computes."""
        return f"{end} - {begin}"

    def blocks(self, block: int) -> str:
        """Return the host's expression for the number of blocks."""
        return f"triton.cdiv({self.length}, {block})"

    def shape(self, heads: str) -> str:
        """Return the axes of a tensor of vectors, without the last, for comments."""
        return f"B, {heads}, {self.length}"

    def begin(self, matrix: str) -> str:
        """Return where a sequence's vectors begin in contiguous matrices, counted in vectors."""
        return f"{matrix} * {self.total} + {self.first}"

    def stride_b(self, tensor: str) -> str:
        """Return the stride of a tensor's axis of batch entries."""
        return f"{tensor}_b"

    def address(self, tensor: str, first: str = "") -> str:
        """Return where the vectors of a sequence and head begin in a tensor with strides, in
        elements.
        """
        strides = f"{self.stride_b(tensor)}, {tensor}_h, {tensor}_n"
        return f"_address(b, {first or self.first}, {self.head}, {strides})"

    def rows(self, tensor: str, numbers: str) -> str:
        """Return where the vectors with these numbers lie behind the address, a column of elements."""
        return f"{numbers}[:, None] * {tensor}_n"


@dataclass(frozen=True)
class PackedAxis(Axis):
    """The same names for packed documents.

    Attributes:
        tiles: the schedule of tiles of documents.
    """

    tiles: str

    @property
    def lengths(self) -> str:
        return f"{self.tiles}_ptr, cu_seq_q_ptr, cu_seq_k_ptr"

    @property
    def total(self) -> str:
        return f"total_{self.operand}"

    @property
    def count(self) -> str:
        return f"n_{self.tiles}"

    def count_between(self, begin: str, end: str) -> str:
        return self.count

    def blocks(self, block: int) -> str:
        return f"{self.count} * {DOCUMENT_TILE // block}"

    def shape(self, heads: str) -> str:
        return f"{self.total}, {heads}"

    def stride_b(self, tensor: str) -> str:
        return "0"


@dataclass(frozen=True)
class PagedAxis(PackedAxis):
    """The same names for keys in pages.

    Attributes:
        page_size: tokens of a page.
        vector: elements of 16 bytes, at multiples of which rows begin.
    """

    page_size: int
    vector: int

    @property
    def table(self) -> str:
        """The pages of a program's sequence."""
        return "block_table_ptr + sequence * table_width"

    def address(self, tensor: str, first: str = "") -> str:
        return f"{self.head} * {tensor}_h"

    def rows(self, tensor: str, numbers: str) -> str:
        strides = f"{tensor}_b // {self.vector} * {self.vector}, {tensor}_n"
        found = f"{self.table}, {numbers}, {self.length}, {strides}, {self.page_size}"
        return f"_page_rows(\n            {found},\n        )[:, None]"


@dataclass(frozen=True)
class Gradient:
    """The layout of g, the gradient of the scores, in the workspace, as texts of source code.

    The axis that is read at shifted positions comes first, because the last axis must stay aligned.

    Attributes:
        rows_first: whether g is (slots, rows of a chunk, keys), else (slots, keys, rows of a
            chunk).
        carried_rows: rows of the chunk before that are kept in front of a chunk's rows, if rows
            come first.
    """

    rows_first: bool
    carried_rows: int

    @property
    def _carried(self) -> str:
        return f"{self.carried_rows} + " if self.carried_rows else ""

    @property
    def keys(self) -> str:
        """Number of keys of the workspace."""
        return "n_k"

    @property
    def shape(self) -> str:
        """Shape of the workspace."""
        return f"slots, {self._carried}strip, pitch" if self.rows_first else f"slots, {self.keys}, strip"

    @property
    def name(self) -> str:
        """The host's name for the part of the workspace that a chunk of rows uses."""
        return "g_strip"

    @property
    def parts(self) -> Sequence[tuple[str, str]]:
        """The host's parts of the workspace for a chunk, as names and values."""
        used = f": {self._carried}end - begin, :n_k" if self.rows_first else ":, : end - begin"
        return [(self.name, f"g[:heads, {used}]{'  # after the carried rows' if self.carried_rows else ''}")]

    def rows(self, lag: int) -> str:
        """Return the host's first row and end of the rows of a gradient that a chunk completes.

        The chunk's last ``lag`` rows wait for the next chunk.
        """
        return f"max(begin - {lag}, 0), end if end == n_q else end - {lag}" if lag else "begin, end"

    @property
    def strides(self) -> dict[str, str]:
        """Strides of slots, rows and keys, by the names of arguments."""
        row, key = (1, 2) if self.rows_first else (2, 1)
        axes = {"slot": 0, "row": row, "key": key}
        return {f"g_{name}": f"{self.name}.stride({axis})" for name, axis in axes.items()}

    @property
    def block(self) -> tuple[str, str]:
        """Shape of a block of g in a kernel, in the order of memory."""
        return ("BLOCK_M", "BLOCK_N") if self.rows_first else ("BLOCK_N", "BLOCK_M")

    @property
    def transposed(self) -> str:
        """The operation that turns a block in memory order into (rows, keys), or back."""
        return "" if self.rows_first else ".trans()"

    def row(self, row: str) -> str:
        """Return where a row of the sequence lies in its chunk."""
        return f"{row} - strip_begin" + (f" + {self.carried_rows}" if self.carried_rows else "")

    def position(self, row: str, key: str) -> tuple[str, str, str]:
        """Return the index of (row, key) in the workspace."""
        return self._index(self.row(row), key)

    def _index(self, row: str, key: str) -> tuple[str, str, str]:
        return ("slot", row, key) if self.rows_first else ("slot", key, row)


@dataclass(frozen=True)
class PackedGradient(Gradient):
    """The same for packed documents: a document's rows are a matrix in the workspace."""

    @property
    def keys(self) -> str:
        return "max_k"

    @property
    def name(self) -> str:
        return "g"

    @property
    def parts(self) -> Sequence[tuple[str, str]]:
        return []

    def rows(self, lag: int) -> str:
        return "begin, end"  # the kernel knows where its document's rows begin and end

    def position(self, row: str, key: str) -> tuple[str, str, str]:
        """Return the index of (row, key) in the document's matrix."""
        return self._index(row, key)

    @property
    def matrix(self) -> str:
        """Where the document's matrix begins in the workspace."""
        begin = f"({self.carried_rows} - strip_begin)" if self.carried_rows else "-strip_begin"
        return f"slot * g_slot + {begin} * g_row" if self.rows_first else "slot * g_slot - strip_begin"


class Batch:
    """Texts of kernels and host code for a batch, in which each entry is one sequence.

    Attributes:
        file: the file of ``templates`` with the functions that kernels call.
        host: functions that the host needs, as (file of ``templates``, names).
        queries, keys: the axes of the scores.
        has_entries: whether tiles are in a matrix of an entry b of the batch.
        numbers: axes of a tensor with a number for each query and head, for comments.
        numbers_shape: the host's shape of such a tensor.
        sizes: the host's names for the sizes that its functions share.
        all_heads: number of heads of queries, through the batch.
        places: number of rows of g for a head.
        partial: the function that allocates results of blocks.
        gradient: the layout of g.
        heads_of_values: the gradient of v, as a matrix for each head.
        sum_of_batch: turns gradients of W for all heads into those of the call's weight.
        symbols: names in kernels besides those of all kernels, and their meanings.
        notes: lines of the legend that follow the formulas.
    """

    file = "triton/batch.py"
    host: Sequence[Sequence[str]] = ()
    queries = Axis("queries", "i0", "BLOCK_M", "n_q", "q", "h")
    keys = Axis("keys", "j0", "BLOCK_N", "n_k", "k", "h // group")
    has_entries = True
    numbers = "B, H, n_q"
    numbers_shape = "q.shape[:3]"
    sizes = "n_q, n_k"
    all_heads = "len(q) * n_heads"
    notes: Sequence[str] = ()
    symbols: Sequence[tuple[str, str]] = (
        ("sequence", "number of a program's sequence in its batch entry: 0; it begins there at first_q and first_k: 0"),
    )
    places = "n_q"
    partial = "empty"
    gradient: Gradient
    heads_of_values: str
    sum_of_batch: str

    def __init__(self, module: LiftModule) -> None:
        spec, lift = module.spec, module.lift
        self.gradient = Gradient(lift.lifts_keys, lift.carried_rows)
        self.heads_of_values = f"dv.view(-1, n_k, {spec.value_head_dim})"
        self.sum_of_batch = f"view(-1, n_heads, {spec.cq}, {spec.ck}).sum(0)"

    def sizes_of_call(self, pass_name: str) -> str:
        """Return the host's values of these names in a pass."""
        return "q.shape[2], k.shape[2]"

    def matrix(self, name: str, at: Sequence[str]) -> str:
        """Return the arguments that name the matrix of a tile, and where the tile begins in it.

        Args:
            name: the tensor.
            at: where the tile begins, an index for each axis of the tensor.
        """
        *strides, stride = (f"{name}_{axis}" for axis in AXES[len(at)])
        *indices, row, column = at
        begin = " + ".join(f"{_factor(index)} * {stride}" for index, stride in zip(indices, strides, strict=True))
        return f"{begin}, {row}, {column}, {stride}, {name}_rows, {name}_width"

    def page_tile(self, name: str, at: Sequence[str], block: Sequence[str]) -> str:
        """Return the call that loads a tile of rows from pages; empty if the tensor has none.

        Args:
            name: the tensor.
            at: where the tile begins, an index for each axis of the tensor.
            block: rows and columns of the tile.
        """
        return ""


class Packed(Batch):
    """The same texts for packed documents."""

    file = "triton/packed.py"
    host: Sequence[Sequence[str]] = (("host/documents.py", *SCHEDULING, "_sizes"),)
    queries = PackedAxis("queries", "i0", "BLOCK_M", "n_q", "q", "h", "row_tiles")
    keys = PackedAxis("keys", "j0", "BLOCK_N", "n_k", "k", "h // group", "key_tiles")
    has_entries = False
    numbers = "H, total_q"
    numbers_shape = "q.shape[1::-1]"
    sizes = "cu_seq_q, cu_seq_k, row_tiles, key_tiles, n_row_tiles, n_key_tiles, total_q, total_k"
    all_heads = "n_heads"
    notes = (
        "Tensors hold documents one after the other, (total_q, H, D) and (total_k, Hkv, D): a batch of one entry. Each",
        "document is a separate sequence, and the formulas are for one document; in memory, axes of n_q and n_k have",
        "lengths total_q and total_k.",
    )
    symbols = (
        ("sequence", "number of a program's document; its first query and key are first_q and first_k of the tensors"),
        ("tiles", "the documents of programs, see `_schedule`; a tile has blocks of a kernel's BLOCK rows or keys"),
    )
    places = f"n_row_tiles * {DOCUMENT_TILE}  # each document's rows begin at a new tile"
    partial = "zeros"  # some blocks belong to no document and write nothing

    def __init__(self, module: LiftModule) -> None:
        spec, lift = module.spec, module.lift
        self._spec = spec
        self._lift = lift
        self._packed = self.gradient = PackedGradient(lift.lifts_keys, lift.carried_rows)
        self.heads_of_values = "dv.transpose(0, 1)"
        self.sum_of_batch = f"view(n_heads, {spec.cq}, {spec.ck})"

    def sizes_of_call(self, pass_name: str) -> str:
        tile, carried = DOCUMENT_TILE, self._lift.carried_rows
        return f"_sizes(q, k, cu_seq_q, cu_seq_k, {tile}, {carried}, {self._orders(pass_name)})"

    def _orders(self, pass_name: str) -> str:
        """Return the orders of the tiles of rows and of keys; a forward pass reads those of keys to lift keys."""
        rows, keys = ("later", "earlier") if self._lift.mask.favours_later_rows else ("longest", "longest")
        return f'"{rows}", "{keys}"' if pass_name == "backward" or self._lift.lifts_keys else f'"{rows}", None'

    def matrix(self, name: str, at: Sequence[str]) -> str:
        """Return the arguments that name the matrix of a document, and where a tile begins in it.

        Args:
            name: the tensor.
            at: where the tile begins, an index for each axis that the tensor would have for a batch.
        """
        slot, row, column = at[-3:]
        if name == "g":
            lengths = ("n_q", "n_k") if self.gradient.rows_first else ("n_k", "n_q")
            return ", ".join([self._packed.matrix, row, column, "g_row", *lengths])
        axis = self.keys if name in ("k", "v") else self.queries
        width = self._spec.head_dim if name in ("q", "k") else self._spec.value_head_dim
        stride = f"{name}_{'n' if len(at) == 4 else 'row'}"
        matrix = f"{slot} * {name}_h" if len(at) == 4 else f"({slot}) * {name}_slot"
        return f"{axis.first} * {stride} + {matrix}, {row}, {column}, {stride}, {axis.length}, {width}"


class Paged(Packed):
    """The same texts for packed queries whose keys and values lie in pages."""

    host = (("host/documents.py", *SCHEDULING, "_sizes_of_pages"),)
    sizes = f"{Packed.sizes}, block_table, table_width"
    notes = (
        "Queries are packed, (total_q, H, D): a batch of one entry. Each document is a separate sequence, and the",
        "formulas are for one document. Its keys and values lie in pages that a table lists. Lifted keys lie one",
        "document after the other, with room for total_k.",
    )

    def __init__(self, module: LiftModule) -> None:
        super().__init__(module)
        assert module.spec.page_size, "keys lie in pages"
        size, vector = module.spec.page_size, module.vector
        self._pages = PagedAxis("keys", "j0", "BLOCK_N", "n_k", "k", "h // group", "key_tiles", size, vector)
        self.keys = self._pages

    def sizes_of_call(self, pass_name: str) -> str:
        tiles = f"{DOCUMENT_TILE}, {self._orders(pass_name)}"
        return f"_sizes_of_pages(q, block_table, cu_seq_q, cu_seq_k, max_k, {tiles})"

    def page_tile(self, name: str, at: Sequence[str], block: Sequence[str]) -> str:
        if name not in ("k", "v") or len(at) != 4:
            return ""
        _, head, row, _ = at
        rows, width = block
        numbers = f"{row} + tl.arange(0, {rows})"
        size = self._spec.head_dim if name == "k" else self._spec.value_head_dim
        where = f"{name}_ptr, {head} * {name}_h, {self._pages.table}"
        extents = f"{numbers}, n_k, {name}_b, {name}_n, {size}, {self._spec.page_size}, {width}"
        return f"_load_pages(\n            {where},\n            {extents},\n        )"


def layout_of(module: LiftModule) -> Batch:
    """Return the texts for how the tensors of a module hold sequences."""
    return {"Batch": Batch, "Packed": Packed, "Paged": Paged}[module.sequence](module)


def _factor(index: str) -> str:
    return f"({index})" if " " in index else index
