"""Rendered sources, cache and loader."""

from __future__ import annotations

from ..mutant import Mutant

MUTANTS = (
    Mutant(
        "digest-without-names",
        "mtagen/codegen/__init__.py",
        "for part in (name, text):",
        "for part in (text,):",
        "Plans whose kernels have other names share an entry of the cache.",
        ("tests/test_generated.py::test_every_part_of_the_sources_is_in_their_digest",),
    ),
    Mutant(
        "thread-without-context",
        "mtagen/templates/host/launcher.py",
        "driver.cuCtxSetCurrent(self._context)",
        "pass",
        "Launches from a thread that never used the device fail.",
        ("tests/test_cuda_runtime.py::test_a_thread_that_never_used_the_device_gets_its_context",),
    ),
    Mutant(
        "strides-of-32-bits",
        "mtagen/codegen/host.py",
        '"long long": "q"',
        '"long long": "i"',
        "Arguments after a stride are read from the wrong place.",
        ("tests/test_cuda_runtime.py::test_types_of_arguments",),
    ),
    Mutant(
        "decode-takes-the-largest-kernel",
        "mtagen/templates/cuda/host.py.j2",
        "if cta_heads == group:",
        "if cta_heads > group:",
        "One token of one head is decoded by the kernel for many heads.",
        ("tests/test_tile_decode.py::test_a_group_takes_the_smallest_kernel_that_holds_it",),
    ),
    Mutant(
        "link-only-what-is-named",
        "mtagen/codegen/library.py",
        "for name in names} - needed",
        "for name in names if name == defined} - needed",
        "A kernel lacks the functions that its headers' functions call.",
        ("tests/test_library.py::test_a_kernel_gets_what_it_names",),
    ),
    Mutant(
        "paragraphs-end-in-braces",
        "mtagen/codegen/library.py",
        "if line or depth:",
        "if line:",
        "A function of a header is cut at its first blank line.",
        ("tests/test_library.py::test_a_kernel_gets_what_it_names",),
    ),
)
