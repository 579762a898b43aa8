"""Renders a Triton module of the lowering "strip": one self-contained Python file, kernels and host functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..planner.strip.module import StripModule
from ..planner.strip.stages import block_of
from ..version import __version__
from .pieces import aligned, dot_options, last_key, sees
from .triton import environment_of, tidied

_TRITON = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}


def render(module: StripModule) -> str:
    """Source of a module; importing it needs torch and triton only."""
    return tidied(environment_of().get_template("strip_module.py.j2").render(_context(module)))


def _context(module: StripModule) -> Mapping[str, Any]:
    """What templates ask."""
    spec, stages = module.spec, module.stages
    wide = spec.dtype == "fp32"
    return {
        "version": __version__,
        "module": module,
        "stages": stages,
        "spec": spec,
        "mask": module.mask,
        "pitch_multiple": module.pitch_multiple,
        "block_of": block_of,
        "product_tiles": partial(_product_tiles, module),
        "window": partial(_tiles_of_plane, module, "WINDOW"),
        "results": partial(_tiles_of_plane, module, "BLOCK_N"),
        "dot_options": dot_options(module),
        "dtypes": {
            "element": _TRITON[spec.dtype],
            "score": "tl.float32" if wide else "tl.float16",
            "torch_score": "torch.float32" if wide else "torch.float16",
        },
        "to_log2": repr(math.log2(math.e) / module.score_scale),
        "sees": partial(sees, module.mask),
        "aligned": partial(aligned, 16 // spec.itemsize),
        "last_key": partial(last_key, module.mask),
        "gradients": {
            name: f"_matrices({'post_' if name.startswith('post') else ''}mix_partial, n_heads, {mixed}, "
            f"{stages.post_heads if name.startswith('post') else stages.heads})"
            for name, mixed in spec.mixed.items()
        }
        | {stage.weight: f"{stage.name}_partial.sum((0, 2))" for stage in stages.convolutions},
    }


def _product_tiles(module: StripModule, role: str, x: str, y: str, plane: str) -> Mapping[str, str]:
    """The descriptors that a product of rows takes."""
    tile = dict(module.kernel(role).constants)
    rows, keys, width = tile["BLOCK_M"], tile["BLOCK_N"], tile["D"]
    return {
        "x_desc": f"_tiles({x}, {rows}, {width})",
        "y_desc": f"_tiles({y}, {keys}, {width})",
        "plane_desc": f"_tiles({plane}, {rows}, {keys})",
    }


def _tiles_of_plane(module: StripModule, width: str, role: str, plane: str) -> str:
    """A descriptor of tiles that a kernel reads of a plane, of whose rows only the first keys exist."""
    tile = dict(module.kernel(role).constants)
    return f"_tiles({plane}[:, :, :keys], {tile['BLOCK_M']}, {tile[width]})"
