"""Which calls of registered ops may go past PyTorch's dispatcher: those that it would only pass on."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..config import Config

_OTHERS = frozenset((int, float, str))  # types of ordinary arguments that are no tensors


@cache
def is_on() -> bool:
    """Return whether calls may go past the dispatcher, as the environment says at the first call."""
    return Config.from_env().shortcuts


def is_passed_on(arguments: Iterable[Any]) -> bool:
    """Return whether the dispatcher would only pass the call on.

    It would if all arguments are ordinary and no mode, transform, tracer or profiler watches ops.
    ``MTAGEN_SHORTCUTS=0`` says no to all calls.
    """
    if not is_on():
        return False
    if _thread_state() not in _ordinary_states() or torch._C._len_torch_function_stack():
        return False
    ordinary, keys_of = _ordinary_keys(torch.cuda.is_initialized()), torch._C._dispatch_keys  # type: ignore[no-untyped-call]
    for x in arguments:  # a loop is faster than all() of a generator
        if x is None:  # as most arguments are
            continue
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if keys_of(x).raw_repr() not in ordinary:
                return False
        elif kind not in _OTHERS:
            return False
    return not torch._C._autograd._profiler_enabled()


def _thread_state() -> tuple[int, int]:
    """Return the dispatch keys that modes of this thread add to all tensors, and those they take
    away.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


@cache
def _ordinary_states() -> frozenset[tuple[int, int]]:
    """Return the thread states in which a call is ordinary.

    They are the state of a new thread, which no mode has changed yet, that of inference mode, and
    both of them in a backward pass.
    """
    with ThreadPoolExecutor(1) as thread:
        states = [thread.submit(torch.inference_mode(mode)(_thread_state)).result() for mode in (False, True)]
    try:  # PyTorch with named tensors (2.11 still has them) excludes their key in backward passes.
        named = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Named")).raw_repr()
    except RuntimeError:
        named = 0
    return frozenset((included, excluded | key) for included, excluded in states for key in (0, named))


@cache
def _ordinary_keys(on_gpus: bool) -> frozenset[int]:
    """Return the dispatch keys of plain dense tensors, made in inference mode or not.

    Args:
        on_gpus: whether to include tensors on GPUs. Making one starts CUDA, which a forked process
            cannot do.
    """
    devices = ("cpu", "cuda") if on_gpus else ("cpu",)
    samples = [torch.inference_mode(mode)(torch.empty)(0, device=x) for x in devices for mode in (False, True)]
    return frozenset(torch._C._dispatch_keys(x).raw_repr() for x in samples)
