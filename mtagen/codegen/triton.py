"""Render a Triton module: one self-contained Python file with kernels and host functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jinja2
import sympy

from ..planner.cache import Cache
from ..planner.geometry.pairs import PairCondition
from ..planner.geometry.score import ScoreStage
from ..planner.geometry.sequence import SEQUENCE
from ..planner.kernel import Argument, Kernel
from ..planner.lift.kernels import AXES
from ..planner.lift.module import LiftModule
from ..planner.lift.tiling import reads_by_descriptor
from ..planner.splits import split_keys
from ..planner.targets import get_target
from ..spec import UNSEEING
from ..version import __version__
from .backward import finish, product
from .expressions import triton_condition, triton_expression, triton_place, triton_view
from .host import WIDTH, codes, filled, grouped, options
from .layout import Batch, layout_of
from .library import linked_python
from .masks import masks_of
from .parameters import LiftSums, differentiated, learned, parts_call, tables
from .pieces import (
    aligned,
    all_of,
    band_entry,
    comparison,
    counted_mask,
    diagonal_key,
    dot_options,
    exists,
    loop_source,
    operands,
    scored_key,
    scored_row,
    shifted,
    tap,
    unrolled,
    visible,
    visible_of,
    weight_entry,
    weight_index,
    width_mask,
    window_start,
)
from .printers import python_code, triton_code, triton_host_code
from .templates import environment, spaced

_NUMBERS = ("int32", "float")  # types of arguments
# Prefixes of lines that begin a definition.
_DEFINITIONS = ("@triton.jit", "@_without_gradients", "def ", "class ", "LIMITS = ", "RECIPES: ")
_S, _U, _V = sympy.symbols("s u v", integer=True)  # taps of the convolution: within a term, along rows, along keys


def render(module: LiftModule) -> str:
    """Render a module. Importing it needs torch and triton only."""
    return rendered("module.py.j2", _context(module))


def rendered(template: str, context: Mapping[str, Any]) -> str:
    """Return a rendered template, with blank lines as a formatter sets them."""
    return spaced(_environment().get_template(template).render(context), _DEFINITIONS)


def _signature(kernel: Kernel) -> str:
    """Return a kernel's decorator and first lines.

    The decorator excludes numbers and null pointers that change from call to call from
    specialisation, so that they cause no recompilation.
    """
    varying = [name for x in kernel.arguments for name in _varying(x)]
    decorator = f"@triton.jit(do_not_specialize={_names(varying)})" if varying else "@triton.jit"
    parameters = [(_kind(x), text) for x in kernel.arguments for text in _parameters(x)]
    parameters += [("constant", f"{name}: tl.constexpr = {value}") for name, value in kernel.constants]
    return "\n".join([decorator, f"def {kernel.name}(", *grouped(parameters, 4), "):"])


def _parameters(argument: Argument) -> list[str]:
    """Return the parameters of a kernel that an argument becomes."""
    name = argument.name
    match argument.type:
        case "descriptor":
            return [f"{name}_desc"]
        case "tiles":
            return [f"{name}_ptr", *(f"{name}_{axis}: tl.int64" for axis in argument.axes), *_extents(name)]
        case "matrices":
            return [f"{name}_ptr", *(f"{name}_{axis}: tl.int64" for axis in argument.axes)]
        case "int64":
            return [f"{name}: tl.int64"]
    return [name]


def _varying(argument: Argument) -> list[str]:
    """Return the parameters of an argument whose values change from call to call."""
    if argument.type in ("tiles", "matrices"):
        strides = [f"{argument.name}_{axis}" for axis in argument.axes]
        return strides if argument.type == "matrices" else [*strides, *_extents(argument.name)]
    return [argument.name] if argument.optional or argument.type in (*_NUMBERS, "int64") else []


def _extents(name: str) -> tuple[str, str]:
    """Return the names of the extents of a tensor that is read by tiles."""
    return f"{name}_rows", f"{name}_width"


def _kind(argument: Argument) -> str:
    """Return the kind of an argument: arguments of one kind, numbers or tensors, share lines."""
    return "number" if argument.type in _NUMBERS else "tensor"


def _names(names: list[str]) -> str:
    """Return a list of names as source, a long one on lines of its own."""
    quoted = [f'"{name}"' for name in names]
    line = f"[{', '.join(quoted)}]"
    return line if len(line) < WIDTH - 40 else "\n".join(["[", *filled(quoted, 4), "]"])


def launch(kernel: Kernel, indent: int, call: str = "", **values: str) -> str:
    """Return the launch of a kernel.

    Args:
        kernel: the kernel.
        indent: columns of indentation.
        call: the host's :class:`Call` (``templates/host/recipes.py``), if it launches the kernel.
        values: the host's expressions, where they differ from the argument's name, by the
            argument's name or by the tensor that its name begins with.

    Raises:
        ValueError: a value is for no argument of the kernel.
    """
    texts: list[tuple[str, str]] = []
    known, strided, constants = set(), set(), dict(kernel.constants)
    for argument in kernel.arguments:
        tensor, _, part = argument.name.rpartition("_")
        name = argument.name
        if name not in values and (part == "ptr" or argument.type == "int64"):
            name = tensor
        known.add(name)
        text = values.get(name, name)
        if argument.type == "descriptor":
            assert argument.block
            rows, width = (constants[extent] for extent in argument.block)
            texts.append((_kind(argument), f"_tiles({text}, {rows}, {width})"))
        elif argument.type == "tiles":
            texts.append((_kind(argument), f"*_tiles({text})"))
        elif argument.type == "matrices":
            texts.append((_kind(argument), f"{text}, *{text}.stride()[:{len(argument.axes)}]"))
        elif argument.type == "int64" and name == tensor:  # a stride of the tensor
            if tensor not in strided:
                strided.add(tensor)
                axes = sum(other.name.startswith(f"{tensor}_") and other.type == "int64" for other in kernel.arguments)
                texts.append((_kind(argument), f"*{text}.stride()[:{axes}]"))
        else:
            texts.append((_kind(argument), text))
    if unknown := values.keys() - known:
        raise ValueError(f"{kernel.name} has no argument {sorted(unknown)}")
    options = [f"num_warps={kernel.threads // 32}", f"num_stages={kernel.stages}", "enable_fp_fusion=True"]
    texts += [("option", option) for option in options]
    space = " " * indent
    sizes = ", ".join(map(triton_host_code, kernel.grid)) + ("," if len(kernel.grid) == 1 else "")
    head = [f"{space}{kernel.name}[grid]("]
    if call:
        head = [f"{space}{call}.launch(", f"{space}    {kernel.name},", f"{space}    grid,"]
    return "\n".join([f"{space}grid = ({sizes})", *head, *grouped(texts, indent + 4), f"{space})"])


def _context(module: LiftModule) -> Mapping[str, Any]:
    """Return the names that the templates use."""
    spec, lift = module.spec, module.lift
    row_tensor, key_tensor = operands(lift)
    d_mask = width_mask("d", spec.head_dim, module.block_d)
    layout = layout_of(module)
    queries, keys, stage = layout.queries, layout.keys, ScoreStage.of(spec)
    pairs, before = PairCondition.of(spec), ScoreStage.of(spec, "scores")
    lifting = [name for name in ("forward", "backward") if module.has(name)]
    return {
        "version": __version__,
        "module": module,
        "spec": spec,
        "lift": lift,
        "bands": lift.bands,
        "mask": lift.mask,
        "cache": Cache.of(spec),
        "sequence": SEQUENCE,
        # Numbers of the request
        "cq": spec.cq,
        "ck": spec.ck,
        "pad_left": spec.pad_left,
        "pad_right": spec.pad_right,
        "head_dim": spec.head_dim,
        "value_head_dim": spec.value_head_dim,
        # Parameters of host functions besides tensors and the scale
        "options": options(spec),
        # The lifted operand
        "lifts": bool(lifting),
        "passes": " and ".join(lifting).capitalize(),
        "lifted": keys if lift.lifts_keys else queries,
        "queries": queries,
        "keys": keys,
        "row_tensor": row_tensor,
        "key_tensor": key_tensor,
        "weights": f"({spec.cq} * {spec.ck})",
        "weight_index": partial(weight_index, spec, lift),
        "weight_entry": weight_entry(lift),
        "u_shift": _U - (spec.cq - 1),
        "v_shift": _V - spec.pad_left,
        "s_shift": _S - lift.pad,
        "band_entry": band_entry,
        # How tensors hold sequences
        "layout": layout,
        "matrix": layout.matrix,
        "page_tile": layout.page_tile,
        # Loads and masks
        "by_descriptor": reads_by_descriptor(spec, get_target(module.target)),
        "aligned": partial(aligned, module.vector),
        "d_mask": d_mask,
        "e_mask": width_mask("e", spec.value_head_dim, module.block_dv),
        "within": lambda condition: f"({condition}){d_mask}" if d_mask else condition,
        "dot_options": dot_options(module),
        "fp32_dot_options": dot_options(module, "fp32"),
        "score": stage.scaled(math.log2(math.e)).function,  # kernels hold scores in units of log2
        "score_parts": partial(_score_parts, stage, layout),
        # The function before the convolution, of which the lowering "lift" makes a bias
        "before": before.function,
        "parts_of_scores": partial(_parts_of_scores, before),
        "before_sums": LiftSums(before.sums, spec.packed, keys.total, queries.total, f"{spec.cq * spec.ck}"),
        "view_address": partial(triton_view, packed=spec.packed),
        "learned": "".join(f", {name}" for name in learned(spec)),
        "tables": partial(tables, spec),
        "differentiated": ", ".join(differentiated(spec)),
        "learned_gradients": "".join(f", d{name}" for name in differentiated(spec)),
        "sums": LiftSums(stage.sums, spec.packed, keys.total, queries.total),
        "legend": _legend(module),
        "visible": partial(visible, lift.mask),
        "visible_of": partial(visible_of, lift.mask),
        "exists": partial(exists, lift.mask),
        "masks": masks_of(lift.mask, pairs, layout),
        "pairs": pairs,
        "starts_first": lambda why: f"  # the longest first: {why}" if lift.mask.favours_later_rows else "",
        "counted_mask": counted_mask,
        "tap": tap,
        "diagonal_key": diagonal_key,
        "scored_key": scored_key,
        "scored_row": scored_row,
        "window_start": window_start,
        # Decode
        "hides_some": " or ".join(comparison(edge.hides) for edge in module.decode.edges),
        "seen_by_all": all_of([edge.sees for edge in module.decode.edges]),
        "checks": "" if lift.mask.bounds_keys else " & (j < length)[None, :] & (last >= 0)[:, None]",
        "split_keys": triton_host_code(split_keys(lift.mask)),
        # The backward pass
        "g_layout": layout.gradient,
        "contractions": [product(module, layout, x) for x in lift.contractions] if module.has("backward") else [],
        "finishes": [finish(module, layout, owner) for owner in ("rows", "keys")] if module.has("backward") else [],
    }


def _score_parts(stage: ScoreStage, layout: Batch, head: str, step: bool = False) -> str:
    """Return a kernel's call that computes what the function of scores needs of a head.

    Args:
        stage: the function.
        layout: how tensors hold sequences.
        head: the head of queries.
        step: whether the kernel is one of a decode step.
    """
    if step:
        return parts_call(stage, head, "b", "0", "n_max", "n_max", "kv_heads * group")
    entry = "b" if layout.has_entries else "sequence"
    return parts_call(stage, head, entry, layout.keys.first, "n_k", layout.keys.total, "n_heads")


def _parts_of_scores(stage: ScoreStage, head: str, step: bool = False) -> str:
    """Return the same for the function before the convolution, which reads parameters of heads only.

    Args:
        stage: the function.
        head: the head of queries.
        step: whether the kernel is one of a decode step.
    """
    tokens, n_heads = ("n_max", "kv_heads * group") if step else ("n_k", "n_heads")
    return parts_call(stage, head, "0", "0", tokens, tokens, n_heads)


def _legend(module: LiftModule) -> Mapping[str, Any]:
    """Return what the legend's formulas say about the mask."""
    mask = module.lift.mask
    seen = f" where {visible(mask, 'i + off', 'j')}" if mask.hides else ""
    if mask.is_tabulated:
        seen = " where first_keys[i] <= j <= last_keys[i]"
    key = shifted("j", _V - module.spec.pad_left)
    return {
        "seen": seen,
        "zeroed": f"{seen}, else 0" if mask.zeroes_scores else "",
        "counted": f" of the terms with {visible(mask, 'i + off', key)}" if mask.zeroes_terms else "",
        "has_tiles": mask.hides or module.has("forward"),
    }


@cache
def _environment() -> jinja2.Environment:
    """Return the environment of Triton's templates, with the names that are the same for all
    modules.
    """
    templates = environment("triton")
    # A macro of whole lines is called on a line of its own, whose end is the end of the macro's last line.
    templates.finalize = lambda value: value.rstrip("\n") if isinstance(value, str) else value
    templates.filters |= {"triton": triton_code, "expression": triton_expression, "plus": shifted}
    templates.filters |= {"place": triton_place, "condition": triton_condition}
    templates.filters |= {"codes": codes, "host": python_code, "suffixed": "{}_ptr".format}
    templates.globals |= {
        "unrolled": unrolled,
        "signature": _signature,
        "launch": launch,
        "linked": linked_python,
        "axes": AXES,
        "UNSEEING": UNSEEING,
        "matrix": None,  # overridden by the lowering "lift"
        "page_tile": lambda name, at, block: "",  # likewise
        "loop_source": loop_source,
        "log2e": repr(math.log2(math.e)),
        "ln2": repr(math.log(2.0)),
    }
    return templates
