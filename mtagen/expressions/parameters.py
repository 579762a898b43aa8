"""Parameters of score expressions: tensors whose entries an expression reads by index."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import SpecError, explain

LARGEST_EXTENT = 4096  # of a table
_ORDER = "bh#ij"  # axes that are numbers stand where # is
_LEGAL = (
    "axes of b (batch entry), h (head), numbers from 1 to 4096, i and j (tokens) or i//64 and j//64 (blocks of 64), in "
    "this order, such as h,65"
)
_BLOCKS = re.compile(r"([ij])\s*//\s*([1-9][0-9]{0,8})")  # an axis that counts blocks of tokens
_RESERVED = frozenset(("s", "i", "j", "h", "b", "out", "q", "k", "v"))


class Parameter(NamedTuple):
    """A tensor that an expression reads.

    Attributes:
        name: its name in the expression.
        axes: what each axis counts: ``b`` batch entries, ``h`` heads of queries, ``i`` and ``j``
            tokens of a sequence, ``i//64`` and ``j//64`` blocks of 64 tokens; a number is the extent of
            an axis that indices count.
    """

    name: str
    axes: tuple[str | int, ...]

    @property
    def tokens(self) -> tuple[str | int, ...]:
        """The axes that count tokens."""
        return tuple(axis for axis in self.axes if axis in ("i", "j"))

    @property
    def blocks(self) -> tuple[int, ...]:
        """The tokens of a block of each axis that counts blocks."""
        return tuple(size for axis in self.axes if (size := block_size(axis)))

    @property
    def text(self) -> str:
        """The axes as the option ``parameters`` writes them."""
        return ",".join(map(str, self.axes))


def block_size(axis: str | int) -> int:
    """Return the tokens of a block of an axis that counts blocks, or 0 for another axis."""
    return int(axis.partition("//")[2]) if isinstance(axis, str) and "//" in axis else 0


def read_parameters(given: Any) -> tuple[Parameter, ...]:
    """Return the parameters of an op.

    Args:
        given: a mapping, or pairs, of names to axes such as ``"h,65"``.

    Raises:
        SpecError: a name or an axis is not legal, or a name is there twice.
    """
    legal_mapping = "a mapping such as {'slopes': 'h', 'table': 'h,65'}"
    try:
        pairs = [(name, axes) for name, axes in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise SpecError(explain("parameters", given, "must map names to axes", legal_mapping)) from None
    parameters = tuple(Parameter(_name(name), _axes(name, axes)) for name, axes in pairs)
    names = [parameter.name for parameter in parameters]
    if len({*names}) < len(names):
        raise SpecError(explain("parameters", names, "has a name twice", legal_mapping))
    return parameters


def _name(name: Any) -> str:
    from .language import FUNCTIONS  # imported here, because language reads parameters

    legal = f"an identifier, without a _ at its start, that is no word of the language ({', '.join(FUNCTIONS)})"
    is_identifier = isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    if not is_identifier or name in _RESERVED or name in FUNCTIONS or name.startswith("_") or len(name) > 32:
        raise SpecError(explain("parameters", name, "is no name of a parameter", legal))
    return str(name)


def _axes(name: str, text: Any) -> tuple[str | int, ...]:
    if isinstance(text, Sequence) and not isinstance(text, str):
        text = ",".join(map(str, text))
    if not isinstance(text, str):
        raise SpecError(explain(f"parameters[{name!r}]", text, "must name axes", _LEGAL))
    axes = tuple(_axis(name, text, part.strip()) for part in text.split(",")) if text.strip() else ()
    places = [_ORDER.index(axis[0] if isinstance(axis, str) else "#") for axis in axes]
    letters = [axis[0] for axis in axes if isinstance(axis, str)]
    if places != sorted(places) or len({*letters}) < len(letters):
        raise SpecError(explain(f"parameters[{name!r}]", text, "has an axis twice or in another order", _LEGAL))
    return axes


def _axis(name: str, text: str, part: str) -> str | int:
    if part in _ORDER and part != "#" and len(part) == 1:
        return part
    if blocks := _BLOCKS.fullmatch(part):
        return "//".join(blocks.groups())
    if part.isdecimal() and 1 <= int(part) <= LARGEST_EXTENT:
        return int(part)
    raise SpecError(explain(f"parameters[{name!r}]", text, f"{part!r} is no axis", _LEGAL))
