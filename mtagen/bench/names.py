"""Names of contenders and cases in results, tables and plots, and groups of contenders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..measure.cases import Case
from .expressions import name_expression

BACKENDS = ("mtagen cuda", "mtagen triton", "mtagen torch")
OURS = (*BACKENDS, "mtagen auto")  # without contenders for special cases: other targets, deterministic
SAME_MATH = ("eager", "torch.compile", "authors", "authors compiled")
PEERS = (*SAME_MATH, "liger (post-softmax)")
FLEX = "FlexAttention"
SDPA = ("sdpa cudnn", "sdpa flash", "sdpa")  # plain attention
ONLY_ON_CPU = ("mtagen torch", "mtagen torch paged", "mtagen torch one by one", "mtagen torch padded", "sdpa")

# In the order of tables and legends. Okabe and Ito's colours, which the colour-blind can tell apart; plain attention,
# the lower bound, is dashed.
STYLES: dict[str, dict[str, Any]] = {
    "mtagen": {"color": "#0072B2", "marker": "o"},  # the fastest of OURS
    "mtagen cuda": {"color": "#0072B2", "marker": "o"},
    "mtagen cuda sm_80": {"color": "#0072B2", "marker": "^"},
    "mtagen cuda deterministic": {"color": "#0072B2", "marker": "x"},
    "mtagen cuda one by one": {"color": "#0072B2", "marker": "1"},
    "mtagen cuda padded": {"color": "#0072B2", "marker": "2"},
    "mtagen cuda paged": {"color": "#0072B2", "marker": "p"},
    "mtagen triton": {"color": "#009E73", "marker": "s"},
    "mtagen triton paged": {"color": "#009E73", "marker": "p"},
    "mtagen triton sm_80": {"color": "#009E73", "marker": "^"},
    "mtagen triton sm_89": {"color": "#009E73", "marker": "v"},
    "mtagen auto": {"color": "#56B4E9", "marker": "*"},
    "mtagen torch": {"color": "#0072B2", "marker": "o"},
    "mtagen torch paged": {"color": "#0072B2", "marker": "p"},
    "mtagen torch one by one": {"color": "#0072B2", "marker": "1"},
    "mtagen torch padded": {"color": "#0072B2", "marker": "2"},
    "eager": {"color": "#000000", "marker": "."},
    "torch.compile": {"color": "#E69F00", "marker": "."},
    "authors": {"color": "#000000", "marker": "v"},
    "authors compiled": {"color": "#E69F00", "marker": "v"},
    "liger (post-softmax)": {"color": "#CC79A7", "marker": "."},
    FLEX: {"color": "#E69F00", "marker": "D"},
    "sdpa flash": {"color": "#D55E00", "marker": "_", "linestyle": ":"},
    "sdpa cudnn": {"color": "#D55E00", "marker": "_", "linestyle": "--"},
    "sdpa": {"color": "#D55E00", "marker": "_", "linestyle": "--"},
}

_PREFIX = "mtagen "


def is_ours(name: str) -> bool:
    """Return whether a contender is one of mtagen's."""
    return name.startswith(_PREFIX)


def short_name(name: str) -> str:
    """Return the name of one of mtagen's contenders without "mtagen", for use where that is clear."""
    return name.removeprefix(_PREFIX)


def ordered(names: Iterable[str]) -> list[str]:
    """Order names, without duplicates: mtagen's contenders first, names unknown to this version
    last.
    """
    places = {name: place for place, name in enumerate(STYLES)}
    return sorted(set(names), key=lambda name: (places.get(name, len(places)), name))


def name_kernel(case: Case) -> str:
    """Return ``cq,ck``, as on the command line; for other stages those before the softmax, a bar,
    and those after. The name of an expression follows.
    """
    spec = case.spec
    before = spec.kernel, spec.mixed_heads, spec.dynamic_ranks
    after = spec.post_kernel, spec.post_mixed_heads, spec.post_dynamic_ranks
    pipeline = f"{_name_stages(*before)} | {_name_stages(*after)}"
    stages = f"{spec.cq},{spec.ck}" if spec.convolves_only else pipeline
    expression = name_expression(spec, case.sizes.heads)
    return f"{stages} {expression}" if expression else stages


def _name_stages(kernel: tuple[int, int] | None, mixed_heads: int | None, ranks: tuple[int, int] | None) -> str:
    """Return the name of the stages on one side of the softmax."""
    names = ["{},{}".format(*kernel)] if kernel else []
    names += [f"mix {mixed_heads}"] if mixed_heads else []
    names += ["tokens {},{}".format(*ranks)] if ranks else []
    return " ".join(names) or "-"


def name_size(case: Case) -> str:
    """Return the size that distinguishes a case from others of its group."""
    return f"{name_kernel(case)} B={case.sizes.batch} N={case.sizes.nk}"


def name_mask(case: Case) -> str:
    """Return "causal" if later keys are hidden, else "not causal"."""
    return "causal" if case.causal else "not causal"


def name_data(case: Case) -> str:
    """Return window, packing, pages and dropout of a case, separated by commas."""
    spec = case.spec
    names = [f"window {spec.window}"] if spec.window != (-1, -1) else []
    if spec.page_size:
        names += [f"pages of {spec.page_size}"] + ["ragged lengths"] * spec.packed
    else:
        names += ["packed"] * spec.packed
    return ", ".join(names + ["dropout"] * spec.dropout)


def name_group(case: Case) -> str:
    """Return the name of a group of cases, which share a table."""
    sizes = case.sizes
    which = f"{sizes.nq} new token{'s' * (sizes.nq > 1)}" if case.decodes else name_mask(case)
    heads = f"{sizes.heads} heads" + (f", {sizes.kv_heads} of keys" if sizes.kv_heads != sizes.heads else "")
    common = (case.pass_name, which, name_data(case), f"d = {case.spec.head_dim}", heads, case.spec.dtype)
    return ", ".join(filter(None, common))
