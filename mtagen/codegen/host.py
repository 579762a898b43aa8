"""Lines of host code: allocations and launches, printed from buffers and kernels."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence

from ..planner.kernel import Buffer, Kernel
from ..planner.targets import GRID_YZ
from ..planner.tile.sections import Sections
from ..spec import Spec
from .printers import python_code

WIDTH = 120  # of lines
_CODES = {"pointer": "P", "int": "i", "long long": "q", "float": "f"}  # kinds of arguments -> codes of struct


def filled(items: Iterable[str], indent: int) -> list[str]:
    """Items, each followed by a comma, on as many lines as they need; none is broken."""
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
    """Items (kind, text) as lines: as :func:`filled`, but those of another kind start a line of their own."""
    return [
        line
        for _, group in itertools.groupby(items, key=lambda item: item[0])
        for line in filled((text for _, text in group), indent)
    ]


def options(spec: Spec) -> str:
    """The parameters of host functions that only some specs have, after the scale."""
    packed = ("cu_seq_q", "cu_seq_k", "max_q", "max_k") if spec.packed else ()
    dropout = ("seed", "dropout_p") if spec.dropout else ()
    return "".join(f", {name}" for name in (*packed, *dropout))


def codes(kernel: Kernel) -> str:
    """The types of a CUDA kernel's arguments, in the codes of :mod:`struct`."""
    return "".join(_CODES[argument.kind] for argument in kernel.arguments)


def allocate(buffers: Sequence[Buffer], indent: int = 4, like: str = "q") -> str:
    """Assignments that allocate buffers on the device of the tensor ``like``."""
    lines = []
    for buffer in buffers:
        # Extents are arguments of their own: PyTorch takes longer to read a tuple.
        sizes = f"*{buffer.like}.shape" if buffer.like else ", ".join(map(python_code, buffer.shape))
        if buffer.option:
            sizes = f"{sizes} if {buffer.option} else 0"
        dtype = {"fp32": ", dtype=torch.float32", "int32": ", dtype=torch.int32"}.get(buffer.dtype, "")
        made = "new_zeros" if buffer.zeroed else "new_empty"
        lines.append(f"{' ' * indent}{buffer.name} = {like}.{made}({sizes}{dtype})")
    return "\n".join(lines)


def launch(kernel: Kernel, indent: int, role: str = "", **values: str) -> str:
    """A launch of a CUDA kernel.

    Args:
        kernel: what is launched.
        indent: columns before it.
        role: source of the role, where it is chosen at run time.
        values: what the host calls an argument, where that is something else.

    Raises:
        ValueError: a value is for no argument of the kernel.
    """
    texts: list[tuple[str, str]] = []  # what kind of argument, and what is passed
    known, strided = set(), set()
    for argument in kernel.arguments:
        tensor, stride, _ = argument.name.partition("_stride_")
        name = tensor if stride else argument.name
        host = values.get(name, name)
        known.add(name)
        if argument.pointer:
            null = f"0 if {host} is None else " if argument.optional else ""
            texts.append(("pointer", f"{null}{host}.data_ptr()"))
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
    lines = [f"{space}kernels[{name}](", f"{space}    ({grid}{comma}),", *grouped(texts, indent + 4), f"{space})"]
    return "\n".join(lines)


def together(sections: Sections) -> str:
    """How many heads' CTAs run beside each other: an expression, by ``templates/host/sections.py``."""
    heads, streamed, tiles = map(python_code, (sections.heads, sections.streamed, sections.tiles))
    option = f", {sections.option}" if sections.option else ""
    return f"_together({heads}, {sections.few}, {streamed}, {sections.long}, {tiles}, {GRID_YZ}{option})"
