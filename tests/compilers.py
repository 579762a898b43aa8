"""What tests know of the compilers that are installed."""

from __future__ import annotations

import triton

# Bytes of stack that Triton's kernels may use besides: tests have the bounds of the newest compiler. By 3.6 most use
# none, and gradients of keys up to 464 bytes.
OLD_COMPILER_STACK = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 512
