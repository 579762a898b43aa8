"""Triton's interpreter without the work that changes no result, which takes most of its time."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def lean_interpreter() -> Iterator[None]:
    """The interpreter computes what it always computes, but some things once or not at all.

    - It replaces the functions of ``triton.language`` at every call of a function by a kernel. Here they are replaced
      once, in both modules that kernels and Triton's own library see, and by functions that do no more than they must.
    - It computes whether sums and products of integers overflow, for an assertion that it makes with
      ``debug=True`` alone.
    - It builds the table of NumPy's dtypes for every dtype that it looks up.
    - It checks and wraps the sizes of a shape for every type and every tensor that has the shape, and compares the
      sizes of operands that have the same shape.
    - It finds the type in which two operands are computed for every operation.
    """
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    assert not builder.options.debug
    dtype_of_numbers = functools.cache(interpreter._get_np_dtype)
    equal_dtypes, checked_type, broadcast = tl.dtype.__eq__, tl.block_type.__init__, semantic.broadcast_impl_value

    def dtype_of(dtype: tl.dtype) -> np.dtype:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else dtype_of_numbers(dtype.scalar)

    def patch_attr(owner: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        function = inspect.unwrap(member)
        scope.set_attr(owner, name, lambda *args, **options: function(*args, **options | {"_semantic": semantic}))

    @functools.cache
    def shape_of_types(*sizes: int) -> tuple[tl.tuple, int, str]:
        """Sizes as the types of tensors have them, their product, and how they are printed."""
        made = tl.block_type.__new__(tl.block_type)
        checked_type(made, tl.int32, [*sizes])
        return made.shape, made.numel, str(made.shape)

    @functools.cache
    def shape_of_tensors(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
        """Sizes as tensors have them, and their product."""
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def make_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, printed = shape_of_types(*(getattr(size, "value", size) for size in shape))
        self.name = f"<{printed}, {element_ty}>"

    def make_tensor(self: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of_tensors(*(type.shape.values if type.is_block() else ()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_attr", patch_attr)
        language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", dtype_of)
        patch.setattr(tl.dtype, "__eq__", lambda a, b: a is b or equal_dtypes(a, b))
        patch.setattr(tl.block_type, "__init__", make_type)
        patch.setattr(tl.tensor, "__init__", make_tensor)
        patch.setattr(semantic, "broadcast_impl_value", lambda a, b: (a, b) if a.shape is b.shape else broadcast(a, b))
        patch.setattr(semantic, "computation_type_impl", functools.cache(semantic.computation_type_impl))
        yield
        language.restore()
