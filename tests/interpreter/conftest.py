"""Triton's interpreter without the work that changes no result, which takes a third of its time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True, scope="session")
def lean_interpreter() -> Iterator[None]:
    """The interpreter computes what it always computes, but three things once or not at all.

    - It replaces the functions of ``triton.language`` at every call of a function by a kernel. Here they are replaced
      once, in both modules that kernels and Triton's own library see.
    - It computes whether sums and products of integers overflow, for an assertion that it makes with
      ``debug=True`` alone.
    - It builds the table of NumPy's dtypes for every dtype that it looks up.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    dtype_of_numbers = functools.cache(interpreter._get_np_dtype)

    def dtype_of(dtype: tl.dtype) -> np.dtype:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else dtype_of_numbers(dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", dtype_of)
        yield
        language.restore()
