"""Print lines of host code: allocations and launches, from buffers and kernels."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import sympy

from ..planner.kernel import Buffer, Kernel
from ..planner.targets import GRID_YZ
from ..planner.tile.sections import Sections
from ..spec import Spec
from .printers import python_code

WIDTH = 120  # columns of a line
SCHEDULING = ("_with_rest", "_most_tiles", "_schedule", "_with_tiles")  # functions of templates/host/documents.py
_CODES = {"pointer": "P", "int": "i", "long long": "q", "float": "f"}  # kinds of arguments -> codes of struct


def filled(items: Iterable[str], indent: int) -> list[str]:
    """Return items, each followed by a comma, as lines. No item is broken."""
    space = " " * indent
    whole = " ".join(f"{item},".replace(" ", "\0") for item in items)
    lines = textwrap.wrap(
        whole,
        WIDTH,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def grouped(items: Iterable[tuple[str, str]], indent: int) -> list[str]:
    """Return items (kind, text) as lines like :func:`filled`. Another kind starts another line."""
    return [
        line
        for _, group in itertools.groupby(items, key=lambda item: item[0])
        for line in filled((text for _, text in group), indent)
    ]


def options(spec: Spec) -> str:
    """Return the parameters after the scale that host functions have for packed documents and
    dropout.
    """
    packed = ("cu_seq_q", "cu_seq_k", "max_q", "max_k") if spec.packed else ()
    pages = ("block_table",) if spec.packed and spec.page_size else ()
    dropout = ("seed", "dropout_p") if spec.dropout else ()
    return "".join(f", {name}" for name in (*packed, *pages, *dropout))


class Shapes(NamedTuple):
    """Texts about the tensors of a pass, for host functions and their documentation.

    Attributes:
        queries, keys: axes of a tensor of vectors, without the last.
        numbers: axes of a tensor that has a number for each query and head.
        order: what else is said about the order of vectors.
        arguments: lines about arguments after the scale, besides those of dropout.
        rules: lines about what tensors must fulfil.
        lengths: statements that read the lengths and heads of a call.
        schedule: statements that add documents and schedule tiles of ``length`` rows or keys. Format fields are the
            ``tile``, names of the ``tiles`` of rows and of keys, and the ``schedules`` of both.
    """

    queries: str
    keys: str
    numbers: str
    rules: tuple[str, ...]
    lengths: tuple[str, ...]
    order: str = ""
    arguments: tuple[str, ...] = ()
    schedule: tuple[str, ...] = ()


_BATCH = Shapes(
    queries="B, H, Nq",
    keys="B, Hkv, Nk",
    numbers="B, H, Nq",
    rules=(
        "H is a multiple of Hkv, Nq and Nk are at least 1. Rows of q, k and v start at multiples of 16 bytes,",
        "and their last stride is 1.",
    ),
    lengths=("batch, heads, n_q, _ = q.shape", "_, kv_heads, n_k, _ = k.shape"),
)
_PACKED = Shapes(
    queries="total_q, H",
    keys="total_k, Hkv",
    numbers="H, total_q",
    order=", documents one after the other",
    arguments=(
        "cu_seq_q, cu_seq_k: (documents + 1,) int32, first query and key of each document, then the last one's end.",
        "max_q, max_k: ints, the largest numbers of queries and of keys of a document.",
    ),
    rules=(
        "H is a multiple of Hkv, and a document may have no queries or no keys. Rows behind the last document may",
        "have any value; their outputs and gradients are zeros, and their log-sum-exps -inf. Rows of q, k and v start",
        "at multiples of 16 bytes, and their last stride is 1.",
    ),
    lengths=(
        "total_q, heads, _ = q.shape",
        "total_k, kv_heads, _ = k.shape",
        "documents = len(cu_seq_q) + 1  # with two for the rows behind the last one",
    ),
    schedule=(
        "n_tiles = _most_tiles({length}, documents, {tile}, layers)",
        "cu_seq_q, cu_seq_k, {tiles} = _with_tiles(cu_seq_q, cu_seq_k, total_q, total_k, {tile}, {schedules})",
    ),
)


_PAGED = _PACKED._replace(
    keys="pages, Hkv, {size}",
    arguments=(
        "cu_seq_q: (documents + 1,) int32, first query of each document, then the last one's end.",
        "cu_seq_k: likewise for keys, as if they lay one after the other.",
        _PACKED.arguments[1],
        "block_table: (documents, width) int32, contiguous: the pages of each document in order.",
    ),
    rules=(
        "H is a multiple of Hkv, and a document may have no queries or no keys. Rows behind the last document may",
        "have any value; their outputs are zeros, and their log-sum-exps -inf. Rows of q, k and v start at multiples",
        "of 16 bytes, and their last stride is 1.",
    ),
    lengths=(
        "total_q, heads, _ = q.shape",
        "kv_heads, table_width = k.shape[1], block_table.shape[1]",
        "# The queries behind the last document become a document without keys and pages.",
        "total_k, documents = None, len(cu_seq_q)",
    ),
)


def shapes_of(spec: Spec) -> Shapes:
    """Return what is said about the tensors of a spec's passes."""
    if spec.packed and spec.page_size:
        return _PAGED._replace(keys=_PAGED.keys.format(size=spec.page_size))
    return _PACKED if spec.packed else _BATCH


class CacheShapes(NamedTuple):
    """Texts about the keys and values of a decode step, for host functions and their documentation.

    Attributes:
        axes: axes of keys and of values, without the last.
        options: parameters after the scale.
        arguments: lines about these parameters.
        lengths: statements that read the heads of keys, and the most keys of a sequence under the name ``keys``.
        splits: the number of splits, from the ``planned`` one and the most ``keys`` that are split.
    """

    axes: str
    options: str
    arguments: tuple[str, ...]
    lengths: tuple[str, ...]
    splits: str


MOST_KEYS = 2048  # that a split of sequences in pages reads: the longest would keep the GPU waiting
_SPLITS = "num_splits: parts into which the keys are split; None means as planned."
_ENTRIES = CacheShapes(
    axes="B, Hkv, N",
    options="cache_seqlens=None, num_splits=None",
    arguments=(
        "cache_seqlens: (B,) int32, contiguous: keys in use of each entry, new ones included; None means all N.",
        _SPLITS,
    ),
    lengths=("_, kv_heads, {keys}, _ = k_cache.shape",),
    splits="{planned}",
)


def _pages(size: int, most_keys: int) -> CacheShapes:
    """Return what is said about pages of ``size`` keys, of which a split computes at most ``most_keys``."""
    return CacheShapes(
        axes=f"pages, Hkv, {size}",
        options="cache_seqlens, num_splits, block_table, max_k",
        arguments=(
            "cache_seqlens: (B,) int32, contiguous: number of each sequence's keys, new keys included.",
            _SPLITS,
            "block_table: (B, width) int32, contiguous: the pages of each sequence in order.",
            "max_k: at least the most keys of a sequence, and at most those of `width` pages.",
        ),
        lengths=("kv_heads, {keys}, table_width = k_cache.shape[1], max_k, block_table.shape[1]",),
        splits=f"max({{planned}}, -(-{{keys}} // {most_keys}))",
    )


def cache_shapes_of(spec: Spec) -> CacheShapes:
    """Return what is said about the keys and values of a spec's decode steps."""
    # A split reads ck - 1 keys more than it computes.
    return _pages(spec.page_size, MOST_KEYS - (spec.ck - 1)) if spec.page_size else _ENTRIES


def codes(kernel: Kernel) -> str:
    """Return the types of a CUDA kernel's arguments, in the codes of :mod:`struct`."""
    return "".join(_CODES[argument.kind] for argument in kernel.arguments)


def allocate(buffers: Sequence[Buffer], indent: int = 4, like: str = "q", call: str = "") -> str:
    """Return assignments that allocate buffers on the device of the tensor ``like``.

    A scratch buffer becomes the address of its memory. If the host's ``call`` allocates
    (``templates/host/recipes.py``), all buffers become tensors.
    """
    space = " " * indent
    if call:
        return "\n".join(f"{space}{buffer.name} = {_allocated(buffer, like, call)}" for buffer in buffers)
    lines = []
    for buffer in buffers:
        if buffer.scratch:
            continue
        # Each extent is an argument, because PyTorch takes longer to read a tuple.
        sizes = f"*{buffer.like}.shape" if buffer.like else ", ".join(map(python_code, buffer.shape))
        dtype = {"fp32": ", dtype=torch.float32", "int32": ", dtype=torch.int32"}.get(buffer.dtype, "")
        method = "new_zeros" if buffer.zeroed else "new_empty"
        value = f"{like}.{method}({sizes}{dtype})"
        lines.append(f"{space}{buffer.name} = {value}{f' if {buffer.needs} else None' if buffer.needs else ''}")
    scratch = [buffer for buffer in buffers if buffer.scratch]
    if not scratch:
        return "\n".join(lines)
    lines.append(f"{space}# One allocation, whose parts begin at multiples of 512 bytes, as memory of PyTorch does")
    end = ""
    for buffer in scratch:
        start, size = end, f"{buffer.like}.numel()" if buffer.like else python_code(sympy.Mul(*buffer.shape))
        end = f"{buffer.name}_end"
        lines.append(f"{space}{end} = {f'{start} + ' if start else ''}-(-({size}) // 128) * 128")
    first = scratch[0].name
    lines.append(f"{space}workspace = {like}.new_empty({end}, dtype=torch.float32)")
    lines.append(f"{space}{first} = workspace.data_ptr()")
    for before, buffer in itertools.pairwise(scratch):
        lines.append(f"{space}{buffer.name} = {first} + 4 * {before.name}_end")
    return "\n".join(lines)


def _allocated(buffer: Buffer, like: str, call: str) -> str:
    """Return the expression of a buffer that the host's ``call`` allocates."""
    shape = f"{buffer.like}.shape" if buffer.like else f"({', '.join(map(python_code, buffer.shape))},)"
    dtype = {"fp32": "torch.float32", "int32": "torch.int32"}.get(buffer.dtype, f"{like}.dtype")
    condition = f" if {buffer.needs} else None" if buffer.needs else ""
    if buffer.scratch:
        return f'{call}.workspace("{buffer.name}", {shape}, {dtype}){condition}'
    return f"{call}.{'zeros' if buffer.zeroed else 'result'}({shape}, {dtype}){condition}"


def launch(
    kernel: Kernel, indent: int, role: str = "", call: str = "", buffers: Sequence[Buffer] = (), **values: str
) -> str:
    """Return the launch of a CUDA kernel.

    Args:
        kernel: the kernel.
        indent: columns of indentation.
        role: an expression for the kernel's role, if it is chosen at run time.
        call: the host's :class:`Call` (``templates/host/recipes.py``), if it launches the kernel.
        buffers: what :func:`allocate` has allocated.
        values: the host's expressions for arguments, where they differ from the argument's name.

    Raises:
        ValueError: a value is for no argument of the kernel.
    """
    texts: list[tuple[str, str]] = []  # the kind of each argument, and the expression that is passed
    addresses = {buffer.name for buffer in buffers if buffer.scratch}
    known, strided = set(), set()
    for argument in kernel.arguments:
        tensor, stride, _ = argument.name.partition("_stride_")
        name = tensor if stride else argument.name
        host = values.get(name, name)
        known.add(name)
        if argument.pointer:
            null = f"0 if {host} is None else " if argument.optional else ""
            texts.append(("pointer", host if call or host in addresses else f"{null}{host}.data_ptr()"))
        elif not stride:
            texts.append(("number", host))
        elif name not in strided:  # all of a tensor at once
            strided.add(name)
            axes = sum(other.name.startswith(f"{name}_stride_") for other in kernel.arguments)
            texts.append(("stride", f"*{host}.stride()[:{axes}]"))
    if unknown := values.keys() - known:
        raise ValueError(f"{kernel.name} has no argument {sorted(unknown)}")
    grid = ", ".join(python_code(size) for size in kernel.grid)
    space, comma = " " * indent, "," if len(kernel.grid) == 1 else ""
    name = role or f'"{kernel.role}"'
    head = [f"{space}{call}.launch(", f"{space}    kernels[{name}]," if call else f"{space}kernels[{name}]("]
    lines = [*head[not call :], f"{space}    ({grid}{comma}),", *grouped(texts, indent + 4), f"{space})"]
    return "\n".join(lines)


def together(sections: Sections) -> str:
    """Return the expression for how many heads' CTAs run side by side
    (``templates/host/sections.py``).
    """
    heads, streamed, tiles = map(python_code, (sections.heads, sections.streamed, sections.tiles))
    option = f", {sections.option}" if sections.option else ""
    return f"_together({heads}, {sections.few}, {streamed}, {sections.long}, {tiles}, {GRID_YZ}{option})"
