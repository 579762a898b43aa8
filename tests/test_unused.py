"""No emitted source has code that nothing uses, over all specs of :mod:`tests.compare_code`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from itertools import chain

import pytest

from mtagen.codegen import render
from tests.compare_code import CASES

PUBLIC = {"forward", "backward", "decode", "load"}  # what a module is for


def unused_in_cuda(source: str) -> set[str]:
    """The functions, constants, structs and aliases of a CUDA source that are named only where they are defined."""
    code = re.sub(r"//.*|^#.*", "", source, flags=re.MULTILINE)
    functions = re.findall(r"^DEVICE [^(]*?(\w+)(?:<\w+>)?\(", code, re.MULTILINE)
    types = re.findall(r"^(?:struct|using) (\w+)", code, re.MULTILINE)
    constants = [
        name for line in re.findall(r"^constexpr .*", code, re.MULTILINE) for name in re.findall(r"(\w+) = ", line)
    ]
    defined, named = Counter(chain(functions, types, constants)), Counter(re.findall(r"\w+", code))
    assert functions
    assert constants
    return {name for name, definitions in defined.items() if named[name] == definitions}


def unused_in_python(source: str) -> set[str]:
    """The definitions and imports of a module that no other statement of it reads, and assignments in vain."""
    tree = ast.parse(source)
    statements = [(names := defined(node), read(node) - names) for node in tree.body]
    unused = {name for names, _ in statements for name in names if not any(name in used for _, used in statements)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
            assigned = {target.id for node in nodes for target in node.targets if isinstance(target, ast.Name)}
            unused |= {f"{function.name}: {name}" for name in assigned - read(function)}
    return unused - PUBLIC


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def read(node: ast.AST) -> set[str]:
    """The names that code reads."""
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}


@pytest.mark.parametrize("name", CASES)
def test_sources_use_all_that_they_define(name: str) -> None:
    for file, text in render(CASES[name].plan).files.items():
        assert (unused_in_python if file.endswith(".py") else unused_in_cuda)(text) == set(), file


def test_unused_cuda_is_found() -> None:
    source = """
constexpr int A = 1, B = 2, C = A;
using Real = float;
struct Pair {};
template <class T>
DEVICE void f(T x);
template <>
DEVICE void f<int>(int x) {}
DEVICE Real g() { return B; }  // not f, C or Pair
"""
    assert unused_in_cuda(source) == {"C", "Pair", "f", "g"}


def test_unused_python_is_found() -> None:
    source = """
import math
import torch.nn as nn
LIMIT: int = 3
def _f(x: nn) -> None:
    y = LIMIT  # not math
    z = x
    return _f(z)
def forward():
    return 1
"""
    assert unused_in_python(source) == {"math", "_f", "_f: y"}
