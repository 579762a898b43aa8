"""Render a module of the lowering "strip": one Python file with Triton kernels and host functions.

The file needs nothing else except the CUDA sources that it launches, which lie beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..planner.cache import Cache
from ..planner.geometry.pairs import PairCondition
from ..planner.geometry.score import ScoreFunction, ScoreStage, views_of
from ..planner.kernel import Kernel
from ..planner.strip import kernels
from ..planner.strip.documents import PART, RECORD, TILE
from ..planner.strip.module import StripModule
from ..planner.strip.stages import PROBABILITY_SCALE, SCORE_SCALE, block_of
from ..spec import EXPRESSIONS, Spec
from ..version import __version__
from . import host, triton
from .expressions import triton_view
from .masks import masks_of
from .parameters import ProductSums, RowSums, learned, parts_call, tables
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
    spec, stages, mask = module.spec, module.stages, module.mask
    of_scores, of_convolved, of_logits = (ScoreStage.of(spec, place) for place in EXPRESSIONS)
    pairs = PairCondition.of(spec)
    wide = spec.dtype == "fp32"
    unseen = "unseen" if spec.packed else "key0"
    return {
        "version": __version__,
        "module": module,
        "stages": stages,
        "spec": spec,
        "options": host.options(spec),
        "mask": mask,
        "cache": Cache.of(spec),
        "masks": masks_of(mask, pairs),
        "pairs": pairs,
        # The argument of `_between` for what a condition needs of a row
        "of_pairs": ", pairs" if pairs.is_checked else "",
        "limits": module.limits,
        "pitch_multiple": module.limits.pitch_multiple,
        # Constants of all modules
        "SCORE_SCALE": SCORE_SCALE,
        "PROBABILITY_SCALE": PROBABILITY_SCALE,
        "PROGRAMS": kernels.PROGRAMS,
        "SPLIT": kernels.SPLIT,
        "SECTION": kernels.SECTION,
        "TILE": TILE,
        "RECORD": RECORD,
        "PART": PART,
        # How kernels are printed and launched
        "page_tile": partial(_page_tile, spec),
        "legend": _legend(module),
        "block_of": block_of,
        "target": module.target,
        "by_descriptor": module.by_descriptor,
        "cuda": module.cuda,
        "launch": partial(_launch, module),
        "launch_cuda": host.launch,
        "allocate": host.allocate,
        "together": host.together,
        "filled": host.filled,
        "quoted": _quoted,
        "by_recipe": partial(_by_recipe, module),
        "launching": partial(_launching, module),
        "planes": partial(_planes, module),
        "dot_options": dot_options(module),
        "dtypes": {
            "element": _TRITON[spec.dtype],
            "score": "tl.float32" if wide else "tl.float16",
            "torch_score": "torch.float32" if wide else "torch.float16",
        },
        "to_log2": repr(math.log2(math.e) / SCORE_SCALE),
        "score": of_logits.scaled(SCORE_SCALE).function,
        # The functions before the convolution and before the mixing; None for the identity
        "of_scores": _function(of_scores),
        "of_convolved": _function(of_convolved),
        "parts_of": partial(_parts_of, spec),
        # Whether what the functions of scores of rows need of a head depends on the document of a row
        "parts_of_rows": bool(of_convolved.views + of_logits.views) and spec.packed,
        "view_address": partial(triton_view, packed=spec.packed),
        "views": views_of(spec),
        "learned": tuple(learned(spec)),
        "tables": partial(tables, spec),
        # Sums for gradients of parameters, in the kernels of rows and of products
        "sums": RowSums(
            of_convolved.sums + of_logits.sums,
            spec.packed,
            "tokens",
            kernels.PROGRAMS,
            stages.heads,
            block_of(stages.heads),
        ),
        "product_sums": ProductSums(of_scores.sums, spec.packed, "tokens"),
        # Results of the backward pass's launches: gradients, and sums from which the host makes the other gradients
        "gradients": [
            *("dq", "dk", "dv"),
            *(f"d_{name}" for name in (*spec.weight_names, *spec.ranks)),
        ],
        "partials": [
            *(f"{one.name}_partial" for one in (*of_convolved.sums, *of_logits.sums, *of_scores.sums)),
            *(["minus_dot"] if spec.sink else []),
        ],
        "visible": partial(visible, mask),
        "seen": Seen(mask),
        # The argument of a decode step's kernels for the number of keys of the cache
        "cached_keys": "n_k" if mask.hides_earlier else "keys",
        # The key of the sequence for dropout's draws: key 0 of the planes need not be key 0 of the sequence.
        "drawn_key": f"({unseen} + j0)" if mask.hides_earlier else "j0",
        # What functions of scores add to positions and keys, which count from key 0 of the planes
        "moved": f" + {unseen}" if stages.places_keys else "",
        "moved_products": f" + {unseen}" if stages.products_place_keys else "",
        "aligned": partial(aligned, 16 // spec.itemsize),
    }


def _function(stage: ScoreStage) -> ScoreFunction | None:
    """Return the function of scores that planes hold scaled; None for the identity."""
    return None if stage.is_identity else stage.scaled(SCORE_SCALE).function


def _parts_of(spec: Spec, place: str, head: str, tokens: tuple[str, str, str]) -> str:
    """Return a kernel's call that computes what the function of scores at a place needs of a head.

    Args:
        spec: the request.
        place: the option that describes the function.
        head: the heads of queries.
        tokens: ``tokens`` of the template that says where rows lie.
    """
    return parts_call(ScoreStage.of(spec, place), head, *tokens, "tokens", "n_heads")


def _page_tile(spec: Spec, name: str, at: Sequence[str], block: Sequence[str]) -> str:
    """Return the call that loads a tile of keys or values of a packed document from pages; empty if there are none.

    Keys count from the first one of their document.
    """
    if not (spec.packed and spec.page_size and name == "y"):
        return ""
    _, head, row, _ = at
    rows, width = block
    where = f"y_ptr, {head} * y_h, block_table_ptr + document * table_width"
    extents = f"{row} + tl.arange(0, {rows}), y_rows, y_b, y_n, y_width, {spec.page_size}, {width}"
    return f"_load_pages(\n            {where},\n            {extents},\n        )"


def _legend(module: StripModule) -> Iterator[str]:
    """Yield the lines of the source's comment that explain its numbers."""
    mask = module.mask
    if module.spec.packed:
        yield f"Mask {mask.name}. The rows of a document have consecutive places from a multiple of {TILE} on;"
        yield f"a tile of {TILE} places is in one document. A strip is `count` places from `place0` on. Outputs of the"
        yield "first `skip` places belong to another strip, and the first `valid` places have scores but no"
        yield "probabilities. Row r of the strip is query first + r of its tile's document, at position first + r +"
        yield "off; the document's rows are top <= r < bottom. key0 is the first key that these rows see. j counts from"
        yield "key0, and there are `keys` keys, or none if the tile has no rows. `pitch` elements lead from row to row."
        return
    yield f"Mask {mask.name}; query i sits at position i + off."
    yield "A strip has queries first .. first + count - 1. The first `skip` rows are context. The first `valid`"
    yield "rows have scores but no probabilities. There are keys 0 .. keys - 1, and `pitch` elements from row to row."
    if mask.hides_earlier:
        yield "The keys of a strip are those that its rows see; j, and with it `off`, counts from the first key."


def _planes(module: StripModule, role: str, **planes: str) -> Mapping[str, str]:
    """Return planes as the kernel of a convolution takes them, by the names of its arguments.

    CUDA kernels take pointers. Triton kernels take blocks of planes, and only the first ``keys``
    columns exist.
    """
    return planes if role in module.cuda else {name: f"{plane}[:, :, :keys]" for name, plane in planes.items()}


def _quoted(names: Iterable[str]) -> str:
    """Return names as the lines of a tuple."""
    return "\n".join(host.filled((f'"{name}"' for name in names), 8))


def _passed(module: StripModule, pass_name: str) -> tuple[list[str], list[str]]:
    """Return the tensors and the numbers that the function takes that launches a pass's kernels."""
    spec = module.spec
    weights = [*spec.weight_names, *learned(spec)]
    if pass_name == "decode":
        pages = (["block_table"], ["max_k"]) if spec.page_size else ([], [])
        read = [*weights, *(x.name for x in (*spec.tables(pass_name), *spec.checked_arguments)), "cache_seqlens"]
        return ["q_tail", "k_cache", "v_cache", *read, *pages[0]], ["scale", "num_splits", *pages[1]]
    fuses = module.fuses(pass_name)
    seed, dropout_p = (["seed"], ["dropout_p"]) if spec.dropout else ([], [])
    documents = (["cu_seq_q", "cu_seq_k"] if fuses else ["documents"]) if spec.packed else []
    documents += ["block_table"] if spec.packed and spec.page_size else []
    read = [*weights, *(x.name for x in (*spec.tables("forward"), *spec.checked_arguments))]
    tensors = ["q", "by_head", "v", *([] if spec.kernel else ["weight"])] if fuses else ["q", "k", "v"]
    if pass_name == "backward":
        outputs = ["unmixed"] if fuses else ["out"] if module.reads_outputs else []
        tensors, read = ["grad_out", "grad_lse", *tensors], [*read, *outputs, "lse"]
    options = ["deterministic"] if pass_name == "backward" and fuses else []
    longest = ["max_k"] if spec.packed and not fuses else []
    return [*tensors, *read, *documents, *seed], ["scale", *longest, *dropout_p, *options]


def _by_recipe(module: StripModule, pass_name: str) -> str:
    """Return the host's call of the function that launches a pass's kernels, by its recipe if there is one."""
    tensors, numbers = _passed(module, pass_name)
    if module.spec.packed and pass_name == "forward" and module.fuses(pass_name):  # it schedules the tiles of documents
        return "\n".join([f"_{pass_name}(", *host.filled(["Call(q)", *tensors, *numbers], 8), "    )"])
    lines = ["RECIPES.call(", f"        _{pass_name},", "        (", *host.filled(tensors, 12), "        ),"]
    return "\n".join([*lines, f"        ({', '.join(numbers)},),", "    )"])


def _launching(module: StripModule, pass_name: str) -> str:
    """Return the head of the function that launches a pass's kernels."""
    tensors, numbers = _passed(module, pass_name)
    return "\n".join([f"def _{pass_name}(", *host.filled(["call", *tensors, *numbers], 4), "):"])


def _launch(module: StripModule, kernel: Kernel, indent: int, **values: Any) -> str:
    """Return the launch of a kernel, in CUDA or Triton."""
    return (host.launch if kernel.role in module.cuda else triton.launch)(kernel, indent, call="call", **values)
