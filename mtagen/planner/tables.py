"""Measured decisions: which tiles and variants are the fastest on a GPU, and CUDA's time over Triton's.

A table for a target ships with the package (``tables/<target>.json``); ``mtagen tune`` makes one on the user's machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..spec import Spec
from .lift.tiling import Tile

SHIPPED, TUNED = "measured", "tuned here"


class Shape(NamedTuple):
    """What the choice of a backend depends on."""

    cq: int
    ck: int
    head_dim: int
    causal: bool

    @classmethod
    def of(cls, spec: Spec) -> Shape:
        """The shape of a request."""
        return cls(spec.cq, spec.ck, spec.head_dim, spec.causal)

    def __str__(self) -> str:
        return f"({self.cq}, {self.ck}), head dim {self.head_dim}, {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class Table:
    """What was measured on one device.

    Attributes:
        source: what a plan says of decisions that come from here.
        tiles: Triton's tiles, by :func:`mtagen.planner.lift.tiling.table_key`.
        variants: of the CUDA passes, by :func:`variant_key`.
        cuda_over_triton: pass -> shape -> time of CUDA's kernels over Triton's.
    """

    source: str
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    cuda_over_triton: Mapping[str, Mapping[Shape, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` inverts it."""
        return {
            "tiles": {key: asdict(tile) for key, tile in sorted(self.tiles.items())},
            "variants": dict(sorted(self.variants.items())),
            "cuda_over_triton": {
                pass_name: {_write(shape): ratio for shape, ratio in sorted(shapes.items())}
                for pass_name, shapes in sorted(self.cuda_over_triton.items())
            },
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], source: str) -> Table:
        """Inverse of :meth:`to_dict`; what else ``fields`` holds, such as the device, is for readers."""
        ratios = {
            pass_name: {_read(shape): ratio for shape, ratio in shapes.items()}
            for pass_name, shapes in fields["cuda_over_triton"].items()
        }
        tiles = {key: Tile(**tile) for key, tile in fields["tiles"].items()}
        return cls(source, tiles, fields["variants"], ratios)

    def updated(self, newer: Table) -> Table:
        """This table, with ``newer``'s decisions where both have one."""
        passes = {*self.cuda_over_triton, *newer.cuda_over_triton}
        ratios = {
            name: {**self.cuda_over_triton.get(name, {}), **newer.cuda_over_triton.get(name, {})} for name in passes
        }
        return Table(self.source, {**self.tiles, **newer.tiles}, {**self.variants, **newer.variants}, ratios)


@cache
def shipped(target: str) -> Table:
    """The table that comes with the package; empty if there is none for ``target``."""
    path = files(__package__) / "tables" / f"{target}.json"
    return Table.from_dict(json.loads(path.read_text()), SHIPPED) if path.is_file() else Table(SHIPPED)


def variant_key(pass_name: str, spec: Spec) -> str:
    """What the choice of a CUDA pass's variant depends on."""
    return f"{pass_name} cq{spec.cq} ck{spec.ck} d{spec.head_dim} dv{spec.value_head_dim} {spec.dtype}"


def _write(shape: Shape) -> str:
    return f"{shape.cq},{shape.ck},{shape.head_dim},{'causal' if shape.causal else 'full'}"


def _read(text: str) -> Shape:
    cq, ck, head_dim, mask = text.split(",")
    return Shape(int(cq), int(ck), int(head_dim), mask == "causal")
