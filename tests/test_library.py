"""Linking: a source gets what it names of its library, and what that names in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

import mtagen
from mtagen.codegen import library
from mtagen.codegen.templates import spaced

CUDA = Path(mtagen.__file__).parent / "templates/cuda"
HEADERS = {
    "first.cuh": """#pragma once

#include "second.cuh"

// ---- Sums

// Adds once.
DEVICE int once(int x) { return x + twice(STEP); }

// ---- Others

struct Other : Base {
  int x;

  DEVICE int own() const { return x; }
};
""",
    "second.cuh": """#pragma once
#include <cuda_fp16.h>

constexpr int STEP = 1, FIRST = STEP == 1;

template <class T>
DEVICE T twice(T x);

// Not as halves does.
template <>
DEVICE int twice<int>(int x) {
  for (int i = 0; i < 2; ++i) x += x;

  return x;
}

DEVICE int halves(int x) { return x / 2; }
""",
}
SECOND = "#include <cuda_fp16.h>"
STEP = "constexpr int STEP = 1, FIRST = STEP == 1;"
TWICE = [
    "template <class T>\nDEVICE T twice(T x);",
    "// Not as halves does.\ntemplate <>\nDEVICE int twice<int>(int x) {\n  for (int i = 0; i < 2; ++i) x += x;",
    "  return x;\n}",
]
ONCE = ["// ---- Sums", "// Adds once.\nDEVICE int once(int x) { return x + twice(STEP); }"]
OTHER = ["// ---- Others", "struct Other : Base {\n  int x;", "  DEVICE int own() const { return x; }\n};"]
HALVES = "DEVICE int halves(int x) { return x / 2; }"


LINKED = {  # by what a kernel names
    "once": [SECOND, STEP, *TWICE, *ONCE],
    "FIRST": [SECOND, STEP],
    "halves": [SECOND, HALVES],
    "Other": [SECOND, *OTHER],
    "twice + halves": [SECOND, *TWICE, HALVES],
    "x; // once": [SECOND],
    "nonce": [SECOND],
}


@pytest.fixture(autouse=True)
def _headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_header", lambda name: library.parsed(HEADERS[name]))


def paragraphs(source: str) -> list[str]:
    return [part.strip("\n") for part in source.split("\n\n") if part.strip("\n")]


@pytest.mark.parametrize("named", LINKED)
def test_a_kernel_gets_what_it_names(named: str) -> None:
    """With what that names, all definitions of a name, and the comments before them, in the headers' order."""
    linked = library.linked_cuda(f'// A kernel.\n#include "first.cuh"\n\nx = {named};\n')
    assert paragraphs(linked) == ["// A kernel.", *LINKED[named], f"x = {named};"]


def test_a_header_is_where_it_is_first_included() -> None:
    linked = library.linked_cuda(
        '#include "second.cuh"\nx = once + halves;\n#include "first.cuh"\n#include "second.cuh"\n'
    )
    assert paragraphs(linked) == [SECOND, STEP, *TWICE, HALVES, "x = once + halves;", *ONCE]


def test_sources_without_headers_stay() -> None:
    source = "// A kernel.\n\n#include <cuda_fp16.h>\nx = 1;"
    assert library.linked_cuda(source) == source


@pytest.mark.parametrize("path", sorted(CUDA.glob("*.cuh")), ids=lambda path: path.name)
def test_paragraphs_of_headers_define_names(path: Path) -> None:
    """All but system headers: nothing else would be in every kernel."""
    header = library.parsed(path.read_text())
    others = [part.text for part in header.paragraphs if not part.defines]
    assert not [text for text in others if not text.startswith("#include <")]


PYTHON = """from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch


class Pair(NamedTuple):
    first: int


LIMIT: int = 3


@torch.no_grad()
def _swapped(pair: Pair) -> Pair:
    \"\"\"Not _unused.\"\"\"
    return Pair(LIMIT)


# Pairs.
def _pairs() -> Iterator[Pair]:
    yield Pair(1)
"""
LINKED_PYTHON = {
    "Pair(1)": ["NamedTuple", "Pair"],
    "LIMIT = 3": [],
    "np.zeros(LIMIT)": ["np", "LIMIT"],
    "def f():\n    return _pairs()": ["Iterator", "NamedTuple", "Pair", "_pairs"],
    "_swapped": ["NamedTuple", "torch", "Pair", "LIMIT", "_swapped"],
}


@pytest.mark.parametrize("code", LINKED_PYTHON)
def test_a_module_gets_what_it_reads(code: str) -> None:
    """With what that reads, in the library's order."""
    defined = [name for part in library._definitions(library.linked_python(PYTHON, code)) for name in part.defines]
    assert defined == LINKED_PYTHON[code]


def test_lines_before_a_definition_go_with_it() -> None:
    comment = PYTHON[PYTHON.index("# Pairs.") :].rstrip()
    assert library.linked_python(PYTHON, "_pairs()").endswith(f"\n\n\n{comment}")


def test_a_library_only_defines() -> None:
    with pytest.raises(ValueError, match="f\\(\\)"):
        library.linked_python("def f():\n    pass\n\n\nf()\n", "f()")


def test_blank_lines() -> None:
    """One where there are some, two before a definition, none at the ends."""
    assert spaced("\n\na\n\n\n\nb\nc\n\ndef f():\n\n    x\n\n", ("def ",)) == "a\n\nb\nc\n\n\ndef f():\n\n    x\n"
