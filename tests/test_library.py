"""Linking: a kernel gets what it names of the headers that it includes, and what that names in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

import mtagen
from mtagen.codegen import library

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
    linked = library.link(f'// A kernel.\n#include "first.cuh"\n\nx = {named};\n')
    assert paragraphs(linked) == ["// A kernel.", *LINKED[named], f"x = {named};"]


def test_a_header_is_where_it_is_first_included() -> None:
    linked = library.link('#include "second.cuh"\nx = once + halves;\n#include "first.cuh"\n#include "second.cuh"\n')
    assert paragraphs(linked) == [SECOND, STEP, *TWICE, HALVES, "x = once + halves;", *ONCE]


def test_sources_without_headers_stay() -> None:
    source = "// A kernel.\n\n#include <cuda_fp16.h>\nx = 1;"
    assert library.link(source) == source


@pytest.mark.parametrize("path", sorted(CUDA.glob("*.cuh")), ids=lambda path: path.name)
def test_paragraphs_of_headers_define_names(path: Path) -> None:
    """All but system headers: nothing else would be in every kernel."""
    header = library.parsed(path.read_text())
    others = [part.text for part in header.paragraphs if not part.defines]
    assert not [text for text in others if not text.startswith("#include <")]
