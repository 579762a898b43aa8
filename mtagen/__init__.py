"""mtagen: a compiler for multi-token (convolutional) attention kernels (arXiv 2504.00927).

op = mtagen.build(kernel=(6, 11), head_dim=128)
out = op(q, k, v, weight)
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from . import accuracy, distributed, nn, serving
    from . import transformers as transformers
    from .dropout import draw_seed, dropout_mask
    from .eager import reference
    from .errors import BackendError, InputError, MtagenError, PlanError, SpecError
    from .op import build
    from .ops.attention import AttentionOp
    from .planner import TARGETS, Plan, Target, plan
    from .spec import Spec

# Names are imported on first use: the command line answers --help without loading torch and triton.
_HOMES = {
    "AttentionOp": "ops.attention",
    "BackendError": "errors",
    "InputError": "errors",
    "MtagenError": "errors",
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
    "reference": "eager",  # importing a module named reference would replace the function by the module
}

_SUBMODULES = ("accuracy", "distributed", "expressions", "nn", "serving", "transformers")

# Without "transformers": ``from mtagen import *`` must not need that package.
__all__ = [
    "TARGETS",
    "AttentionOp",
    "BackendError",
    "InputError",
    "MtagenError",
    "Plan",
    "PlanError",
    "Spec",
    "SpecError",
    "Target",
    "__version__",
    "accuracy",
    "build",
    "distributed",
    "draw_seed",
    "dropout_mask",
    "expressions",
    "nn",
    "plan",
    "reference",
    "serving",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # lists names that have not been imported yet, too


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name == "MultiTokenAttention":
        warnings.warn(
            "mtagen.MultiTokenAttention is now called mtagen.AttentionOp, and the next release removes the old name; "
            "the layer is mtagen.nn.MultiTokenAttention",
            DeprecationWarning,
            stacklevel=2,
        )
        name = "AttentionOp"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
