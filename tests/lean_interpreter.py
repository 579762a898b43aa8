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

# By the id of a tensor's type: whether a number is computed in that type, too.
_COMPUTED_ALIKE: dict[int, Callable[[Any], bool]] = {
    id(tl.int32): lambda x: type(x) is int and -(2**31) <= x < 2**31,
    id(tl.int64): lambda x: type(x) is int and -(2**63) <= x < 2**63,
    id(tl.float32): lambda x: type(x) in (int, float),
}


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
    - It finds the type in which two operands are computed for every operation, and compares and casts operands that
      are alike.
    - It makes a new tensor for every constant, and one of the constant's shape for every operand that is larger.
    """
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    assert not builder.options.debug
    dtype_of_numbers = functools.cache(interpreter._get_np_dtype)
    equal_dtypes, checked_type = tl.dtype.__eq__, tl.block_type.__init__
    unwrap_constexpr = tl.core._unwrap_if_constexpr
    match, broadcast, make_constant = (
        semantic.binary_op_type_checking_impl,
        semantic.broadcast_impl_value,
        semantic.scalar_constant,
    )

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

    def operands(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:
        """Operands of a binary operation, of one type. Without pointers, mostly both have it from the start."""
        if arithmetic_check and not div_or_mod and (type(lhs) is tl.tensor or type(rhs) is tl.tensor):
            if type(lhs) is type(rhs):
                if lhs.dtype is rhs.dtype and id(lhs.dtype) in _COMPUTED_ALIKE:
                    return broadcast_operands(lhs, rhs)
            elif type(lhs) is tl.tensor:
                if _COMPUTED_ALIKE.get(id(lhs.dtype), never)(rhs):
                    return broadcast_operands(lhs, constant(rhs, lhs.dtype))
            elif _COMPUTED_ALIKE.get(id(rhs.dtype), never)(lhs):
                return broadcast_operands(constant(lhs, rhs.dtype), rhs)
        matched: tuple[tl.tensor, tl.tensor] = match(
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )
        return matched

    constants: dict[tuple[Any, ...], tl.tensor] = {}
    joint: dict[tuple[int, int], Any] = {}  # by two shapes: the shape of their results
    filled: dict[int, dict[int, tl.tensor]] = {}  # by id of a constant, then of a shape; both live on

    def constant(value: Any, dtype: tl.dtype) -> tl.tensor:
        key = type(value), value, math.copysign(1, value), dtype  # 0.0 == -0.0, 1 == True
        if key not in constants:
            constants[key] = make_constant(value, dtype)
            filled[id(constants[key])] = {}
        return constants[key]

    def broadcast_operands(a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if a.shape is b.shape:
            return a, b
        if id(b) in filled and a.type.is_block():
            return a, filled_like(a, b)
        if id(a) in filled and b.type.is_block():
            return filled_like(b, a), b
        key = id(a.shape), id(b.shape)
        if key not in joint:
            wide_a, wide_b = broadcast(a, b)
            if not (a.type.is_block() and b.type.is_block()):
                return wide_a, wide_b
            joint[key] = wide_a.type.shape
        return expanded(a, joint[key]), expanded(b, joint[key])

    def expanded(x: tl.tensor, shape: tl.tuple) -> tl.tensor:
        """A tensor, or a view of it in a larger shape."""
        if x.type.shape is shape:
            return x
        view = np.broadcast_to(x.handle.data, shape.values)
        return tl.tensor(interpreter.TensorHandle(view, x.handle.dtype.scalar), tl.block_type(x.dtype, shape))

    def filled_like(x: tl.tensor, value: tl.tensor) -> tl.tensor:
        """A constant in the shape of ``x``."""
        of_shape = filled[id(value)]
        if id(x.shape) not in of_shape:
            of_shape[id(x.shape)] = broadcast(x, value)[1]
        return of_shape[id(x.shape)]

    def never(x: Any) -> bool:
        return False

    def unwrap(x: Any) -> Any:
        return x if type(x) is tl.tensor else unwrap_constexpr(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_attr", patch_attr)
        language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", dtype_of)
        patch.setattr(tl.dtype, "__eq__", lambda a, b: a is b or equal_dtypes(a, b))
        patch.setattr(tl.block_type, "__init__", make_type)
        patch.setattr(tl.tensor, "__init__", make_tensor)
        patch.setattr(semantic, "broadcast_impl_value", broadcast_operands)
        patch.setattr(semantic, "binary_op_type_checking_impl", operands)
        patch.setattr(semantic, "scalar_constant", constant)
        patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap)
        patch.setattr(semantic, "computation_type_impl", functools.cache(semantic.computation_type_impl))
        yield
        language.restore()
