"""Render a Triton module: one self-contained Python file with kernels and host functions."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, TypeGuard

import jinja2
import sympy

from ..planner.geometry.score import ScoreStage
from ..planner.geometry.sequence import SEQUENCE
from ..planner.kernel import Argument, Kernel
from ..planner.lift.kernels import AXES
from ..planner.lift.module import LiftModule
from ..planner.lift.tiling import reads_by_descriptor
from ..planner.splits import split_keys
from ..planner.targets import get_target
from ..version import __version__
from .backward import finish, product
from .expressions import triton_expression
from .host import WIDTH, codes, filled, grouped, options
from .layout import layout_of
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
from .templates import environment

_NUMBERS = ("int32", "float")  # types of arguments
_PURE = ("arange", "load", "minimum", "program_id", "to")  # functions that only compute
_S, _U, _V = sympy.symbols("s u v", integer=True)  # taps of the convolution: within a term, along rows, along keys


def render(module: LiftModule) -> str:
    """Render a module. Importing it needs torch and triton only."""
    text = environment_of().get_template("module.py.j2").render(_context(module))
    return tidied(text)


def tidied(text: str) -> str:
    """Drop unused code from a rendered module, and set blank lines as a formatter does."""
    return _tidy(_without_unused(_without_unused_functions(text)))


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


def launch(kernel: Kernel, indent: int, **values: str) -> str:
    """Return the launch of a kernel.

    Args:
        kernel: the kernel.
        indent: columns of indentation.
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
    lines = [f"{space}grid = ({sizes})", f"{space}{kernel.name}[grid]("]
    return "\n".join([*lines, *grouped(texts, indent + 4), f"{space})"])


def _context(module: LiftModule) -> Mapping[str, Any]:
    """Return the names that the templates use."""
    spec, lift = module.spec, module.lift
    row_tensor, key_tensor = operands(lift)
    d_mask = width_mask("d", spec.head_dim, module.block_d)
    layout = layout_of(module)
    queries, keys = layout.queries, layout.keys
    lifting = [name for name in ("forward", "backward") if module.has(name)]
    return {
        "version": __version__,
        "module": module,
        "spec": spec,
        "lift": lift,
        "bands": lift.bands,
        "mask": lift.mask,
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
        # Loads and masks
        "by_descriptor": reads_by_descriptor(spec, get_target(module.target)),
        "aligned": partial(aligned, module.vector),
        "d_mask": d_mask,
        "e_mask": width_mask("e", spec.value_head_dim, module.block_dv),
        "within": lambda condition: f"({condition}){d_mask}" if d_mask else condition,
        "dot_options": dot_options(module),
        "fp32_dot_options": dot_options(module, "fp32"),
        "score": ScoreStage.of(spec).scaled(math.log2(math.e)),  # kernels hold scores in units of log2
        "legend": _legend(module),
        "visible": partial(visible, lift.mask),
        "visible_of": partial(visible_of, lift.mask),
        "exists": partial(exists, lift.mask),
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


def _legend(module: LiftModule) -> Mapping[str, Any]:
    """Return what the legend's formulas say about the mask."""
    mask = module.lift.mask
    seen = f" where {visible(mask, 'i + off', 'j')}" if mask.hides else ""
    key = shifted("j", _V - module.spec.pad_left)
    return {
        "seen": seen,
        "zeroed": f"{seen}, else 0" if mask.zeroes_scores else "",
        "counted": f" of the terms with {visible(mask, 'i + off', key)}" if mask.zeroes_terms else "",
        "has_tiles": mask.hides or module.has("forward"),
    }


@cache
def environment_of() -> jinja2.Environment:
    """Return the environment of Triton's templates, with the names that are the same for all
    modules.
    """
    templates = environment("triton")
    # A macro of whole lines is called on a line of its own, whose end is the end of the macro's last line.
    templates.finalize = lambda value: value.rstrip("\n") if isinstance(value, str) else value
    templates.filters |= {"triton": triton_code, "expression": triton_expression, "plus": shifted}
    templates.filters |= {"codes": codes, "host": python_code}
    templates.globals |= {
        "unrolled": unrolled,
        "signature": _signature,
        "launch": launch,
        "axes": AXES,
        "matrix": None,  # overridden by the lowering "lift"
        "loop_source": loop_source,
        "log2e": repr(math.log2(math.e)),
        "ln2": repr(math.log(2.0)),
    }
    return templates


def _without_unused_functions(source: str) -> str:
    """Drop kernels that nothing launches, and functions and imports that nothing else needs.

    CUDA kernels replace the Triton kernels of some roles. Only functions whose names begin with an
    underscore are dropped, besides kernels.
    """
    nodes = [(node, _defined(node), _names_in(node)) for node in ast.parse(source).body]
    unused: set[int] = set()  # lines
    while dropped := [
        entry
        for entry in nodes
        if entry[1] and not any(entry[1] & named for node, _, named in nodes if node is not entry[0])
    ]:
        unused.update(line for node, *_ in dropped for line in _lines(node))
        nodes = [entry for entry in nodes if entry not in dropped]
    return _without_lines(source, unused)


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a module's statement defines, if it may be dropped when nothing uses
    them.
    """
    match node:
        case ast.FunctionDef(name=name, decorator_list=decorators):
            jitted = any(ast.unparse(decorator).startswith("triton.jit") for decorator in decorators)
            return {name} if jitted or name.startswith("_") else set()
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
    return set()


def _lines(node: ast.stmt) -> range:
    """Return the lines of a statement and of its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or first) + 1)


def _without_lines(source: str, lines: set[int]) -> str:
    """Return a text without some lines, which are counted from 1."""
    return "".join(line for i, line in enumerate(source.splitlines(keepends=True), 1) if i not in lines)


def _without_unused(source: str) -> str:
    """Drop plain arithmetic, such as ``h = head % n_heads``, whose name its function does not read.

    The templates define positions and offsets once for all variants; some variants need only a few.
    """
    unused: set[int] = set()  # lines
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        read = Counter(node.id for node in nodes if _is_read(node))
        assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        while dropped := [node for node in assignments if _is_unused(node, read)]:
            unused.update(node.lineno for node in dropped)
            read.subtract(part.id for node in dropped for part in ast.walk(node) if _is_read(part))
            assignments = [node for node in assignments if node not in dropped]
    return _without_lines(source, unused)


def _is_read(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _is_unused(assignment: ast.Assign, read: Mapping[str, int]) -> bool:
    """Return whether an assignment is arithmetic for a name that, by the counts ``read``, is never
    read.
    """
    match assignment.targets:
        case [ast.Name(id=name)]:
            return not read[name] and _is_arithmetic(assignment.value)
    return False


def _is_arithmetic(value: ast.expr) -> bool:
    """Return whether an expression computes numbers and has no other effect."""
    calls = [part.func for part in ast.walk(value) if isinstance(part, ast.Call)]
    return isinstance(value, (ast.BinOp, ast.Subscript, ast.Call)) and all(
        isinstance(call, ast.Attribute) and call.attr in _PURE for call in calls
    )


def _tidy(text: str) -> str:
    """Set blank lines as a formatter does: two around definitions at the left margin, at most one
    elsewhere.
    """
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\n+(?=(@triton\.jit|@torch\.no_grad|def |class |LIMITS = ))", "\n\n\n", text)
    text = re.sub(r"(@(?:triton\.jit|torch\.no_grad)(?:\([^()]*\))?)\n+(?=def )", r"\1\n", text)
    return text.strip() + "\n"
