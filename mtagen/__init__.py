"""mtagen: a compiler for multi-token (convolutional) attention kernels (arXiv 2504.00927).

op = mtagen.build(kernel=(6, 11), head_dim=128)
out = op(q, k, v, weight)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from . import distributed, nn
    from .dropout import draw_seed, dropout_mask
    from .errors import BackendError, InputError, MtagenError, PlanError, SpecError
    from .naive import reference
    from .op import build
    from .ops.attention import MultiTokenAttention
    from .planner import TARGETS, Plan, Target, plan
    from .spec import Spec

# Names are imported on first use: the command line answers --help without loading torch and triton.
_HOMES = {
    "BackendError": "errors",
    "InputError": "errors",
    "MtagenError": "errors",
    "MultiTokenAttention": "ops.attention",
    "Plan": "planner",
    "PlanError": "errors",
    "Spec": "spec",
    "SpecError": "errors",
    "TARGETS": "planner",
    "Target": "planner",
    "build": "op",
    "draw_seed": "dropout",
    "dropout_mask": "dropout",
    "plan": "planner",
    "reference": "naive",
}

__all__ = [
    "TARGETS",
    "BackendError",
    "InputError",
    "MtagenError",
    "MultiTokenAttention",
    "Plan",
    "PlanError",
    "Spec",
    "SpecError",
    "Target",
    "__version__",
    "build",
    "distributed",
    "draw_seed",
    "dropout_mask",
    "nn",
    "plan",
    "reference",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # lists names that have not been imported yet, too


def __getattr__(name: str) -> object:
    if name in ("distributed", "nn"):
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
