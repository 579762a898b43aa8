"""Render a module of the lowering "strip": one Python file with Triton kernels and host functions.

The file needs nothing else except the CUDA sources that it launches, which lie beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..planner.geometry.score import ScoreStage
from ..planner.kernel import Kernel
from ..planner.strip.module import StripModule
from ..planner.strip.stages import block_of
from ..version import __version__
from . import host, triton
from .pieces import aligned, dot_options, visible
from .seen import Seen

_TRITON = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}


def render(module: StripModule) -> str:
    """Render a module.

    Importing it needs torch and triton, and CUDA's packages if it has CUDA kernels.
    """
    return triton.rendered("strip_module.py.j2", _context(module))


def _context(module: StripModule) -> Mapping[str, Any]:
    """Return the names that the templates use."""
    spec, stages = module.spec, module.stages
    wide = spec.dtype == "fp32"
    return {
        "version": __version__,
        "module": module,
        "stages": stages,
        "spec": spec,
        "options": host.options(spec),
        "mask": module.mask,
        "pitch_multiple": module.pitch_multiple,
        "block_of": block_of,
        "target": module.target,
        "by_descriptor": module.by_descriptor,
        "cuda": module.cuda,
        "launch": partial(_launch, module),
        "together": host.together,
        "quoted": _quoted,
        "planes": partial(_planes, module),
        "dot_options": dot_options(module),
        "dtypes": {
            "element": _TRITON[spec.dtype],
            "score": "tl.float32" if wide else "tl.float16",
            "torch_score": "torch.float32" if wide else "torch.float16",
        },
        "to_log2": repr(math.log2(math.e) / module.score_scale),
        "score": ScoreStage.of(spec).scaled(module.score_scale),
        "visible": partial(visible, module.mask),
        "seen": Seen(module.mask),
        "drawn_key": f"({first} + j0)" if (first := module.first_drawn_key) else "j0",
        "aligned": partial(aligned, 16 // spec.itemsize),
        "gradients": {
            name: f"_matrices({'post_' if name.startswith('post') else ''}mix_partial, n_heads, {mixed}, "
            f"{stages.post_heads if name.startswith('post') else stages.heads})"
            for name, mixed in spec.mixed.items()
        }
        | {stage.weight: f"{stage.name}_partial.sum((0, 2))" for stage in stages.convolutions},
    }


def _planes(module: StripModule, role: str, **planes: str) -> Mapping[str, str]:
    """Return planes as the kernel of a convolution takes them, by the names of its arguments.

    CUDA kernels take pointers. Triton kernels take blocks of planes, and only the first ``keys``
    columns exist.
    """
    return planes if role in module.cuda else {name: f"{plane}[:, :, :keys]" for name, plane in planes.items()}


def _quoted(names: Iterable[str]) -> str:
    """Return names as the lines of a tuple."""
    return "\n".join(host.filled((f'"{name}"' for name in names), 8))


def _launch(module: StripModule, kernel: Kernel, indent: int, **values: str) -> str:
    """Return the launch of a kernel, in CUDA or Triton."""
    return (host.launch if kernel.role in module.cuda else triton.launch)(kernel, indent, **values)
