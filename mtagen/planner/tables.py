"""Tables of measured decisions: the fastest candidates on a GPU, and CUDA's time over Triton's.

A table for a target ships with the package (``tables/<target>.json``); ``mtagen tune`` makes one on the user's machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..spec import Spec
from .geometry.mask import Mask
from .names import other_stages
from .passes import Fields

SHIPPED, TUNED = "measured", "tuned here"


class Shape(NamedTuple):
    """The properties of a request that the choice of a backend depends on."""

    cq: int
    ck: int
    head_dim: int
    mask: str
    stages: str = ""  # functions of scores before logits, and stages other than a convolution before the softmax
    value_head_dim: int = 0  # 0 means the same as head_dim

    @classmethod
    def of(cls, spec: Spec) -> Shape:
        """Return the shape of a request."""
        other = spec.value_head_dim if spec.value_head_dim != spec.head_dim else 0
        functions = [place for place in ("scores", "convolved") if getattr(spec, place)]
        stages = "_".join(filter(None, [*functions, other_stages(spec)]))
        return cls(spec.cq, spec.ck, spec.head_dim, Mask.of(spec).name, stages, other)

    def __str__(self) -> str:
        values = f" (values {self.value_head_dim})" if self.value_head_dim else ""
        stages = f", {self.stages}" if self.stages else ""
        return f"({self.cq}, {self.ck}), head dim {self.head_dim}{values}, {self.mask}{stages}"


@dataclass(frozen=True)
class Table:
    """Decisions and ratios that were measured on one device.

    Attributes:
        source: the name by which plans cite the table, ``SHIPPED`` or ``TUNED``.
        decisions: fields by key, see :class:`mtagen.planner.passes.PassPlan`.
        cuda_over_triton: pass -> shape -> time of CUDA's kernels over Triton's.
    """

    source: str
    decisions: Mapping[str, Fields] = field(default_factory=dict)
    cuda_over_triton: Mapping[str, Mapping[Shape, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; :meth:`from_dict` inverts it."""
        return {
            "decisions": {key: dict(fields) for key, fields in sorted(self.decisions.items())},
            "cuda_over_triton": {
                pass_name: {_write(shape): ratio for shape, ratio in sorted(shapes.items())}
                for pass_name, shapes in sorted(self.cuda_over_triton.items())
            },
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], source: str) -> Table:
        """Return the table that :meth:`to_dict` made ``fields`` from.

        Other entries, e.g. the device, are ignored.
        """
        ratios = {
            pass_name: {_read(shape): ratio for shape, ratio in shapes.items()}
            for pass_name, shapes in fields["cuda_over_triton"].items()
        }
        return cls(source, fields["decisions"], ratios)

    def updated(self, newer: Table) -> Table:
        """Return this table with the entries of ``newer``, which replace those of this one."""
        passes = {*self.cuda_over_triton, *newer.cuda_over_triton}
        ratios = {
            name: {**self.cuda_over_triton.get(name, {}), **newer.cuda_over_triton.get(name, {})} for name in passes
        }
        return Table(self.source, {**self.decisions, **newer.decisions}, ratios)


@cache
def shipped(target: str) -> Table:
    """Return the table that comes with the package; empty if there is none for ``target``."""
    path = files(__package__) / "tables" / f"{target}.json"
    return Table.from_dict(json.loads(path.read_text()), SHIPPED) if path.is_file() else Table(SHIPPED)


def _write(shape: Shape) -> str:
    head_dims = f"{shape.head_dim}:{shape.value_head_dim}" if shape.value_head_dim else str(shape.head_dim)
    return ",".join(filter(None, (str(shape.cq), str(shape.ck), head_dims, shape.mask, shape.stages)))


def _read(text: str) -> Shape:
    cq, ck, head_dims, mask, *stages = text.split(",")
    head_dim, *value_head_dim = map(int, head_dims.split(":"))
    return Shape(int(cq), int(ck), head_dim, mask, "".join(stages), sum(value_head_dim))
