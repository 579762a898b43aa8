"""No emitted source has code that nothing uses, over all specs of :mod:`compare_code`."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

import pytest

from mtagen.codegen import render
from tests.compare_code import CASES


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


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.backend == "cuda"])
def test_cuda_sources_use_all_that_they_define(name: str) -> None:
    kernels = render(CASES[name].plan).kernels
    assert kernels
    assert {role: unused for role, source in kernels.items() if (unused := unused_in_cuda(source))} == {}


def test_unused_code_is_found() -> None:
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
