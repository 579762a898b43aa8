"""Mixings that depend on tokens."""

from __future__ import annotations

from ..mutant import CUDA, TRITON, Mutant

EMULATED = "tests/test_emulated_tokens.py"
INTERPRETED = "tests/interpreter/test_dynamic.py"
ON_CPU = "tests/test_dynamic.py"

MUTANTS = (
    Mutant(
        "tokens-gradients-of-keys-of-the-last-strip",
        f"{TRITON}/strip_tokens.j2",
        "tl.load(memory, mask=there, other=0.0) + more",
        "more",
        "Of several strips, the last alone counts in the gradients of keys' factors.",
        (f"{INTERPRETED}::test_triton_in_strips_of_some_rows",),
    ),
    Mutant(
        "tokens-hidden-scores-count",
        f"{TRITON}/strip_tokens.j2",
        "x_here = tl.where(inside, x_here, 0.0)",
        "",
        "What planes hold at hidden keys gets into the gradients of factors.",
        (f"{INTERPRETED}::test_triton",),
    ),
    Mutant(
        "tokens-adjoints-read-hidden-rows",
        f"{TRITON}/strip_tokens.j2",
        '{{ hidden_rows("dy", "out") }}',
        "",
        "A convolution's adjoint reads gradients of rows that see no key of a block.",
        (f"{INTERPRETED}::test_triton_in_strips_of_some_rows",),
    ),
    Mutant(
        "cuda-tokens-hidden-keys-in-gradients-of-matrices",
        f"{CUDA}/token_mix.cu.j2",
        "y[n] &= shown[n >> 1], z[n] &= shown[n & 1];",
        "",
        "What planes hold at hidden keys gets into the gradients of the matrices of queries.",
        (f"{EMULATED}::test_gradients",),
    ),
    Mutant(
        "cuda-tokens-results-replace-what-is-read",
        f"{CUDA}/token_mix.cu.j2",
        "__syncthreads();\n{% endif %}\n#pragma unroll 1",
        "{% endif %}\n#pragma unroll 1",
        "A warp stores results where another still sums the gradient of a matrix.",
        (f"{EMULATED}::test_no_races",),
    ),
    Mutant(
        "cuda-tokens-sums-of-the-last-strip",
        f"{CUDA}/token_mix.cu.j2",
        "to[f] += sums.x[f][e] * SCALE",
        "to[f] = sums.x[f][e] * SCALE",
        "Of several strips, the last alone counts in the gradients of keys' factors.",
        (f"{EMULATED}::test_gradients",),
    ),
    Mutant(
        "cuda-tokens-one-matrix-for-all-heads-swapped",
        f"{CUDA}/tokens.cuh",
        "8 * (lane >> 3 & 1) + (lane & 7), lane >> 4));",
        "8 * (lane >> 4) + (lane & 7), lane >> 3 & 1));",
        "The gradient of what is mixed is multiplied by quarters of the matrix in another order.",
        (f"{EMULATED}::test_gradients",),
        "load_matrix_transposed",
    ),
    Mutant(
        "cpu-tokens-gate-of-another-head",
        "mtagen/cpu/mixing.py",
        'torch.einsum(f"gm{t}f,gmij->gmij", gate, x)',
        'torch.einsum(f"gm{t}f,gmij->gmij", gate.flip(1), x)',
        "Gates belong to other heads.",
        (f"{ON_CPU}::test_torch_backend",),
    ),
    Mutant(
        "layer-tokens-norm-over-all",
        "mtagen/nn/parts.py",
        "inner = F.rms_norm(wide, (self.group,), eps=_FACTOR_EPSILON).to(inner.dtype)",
        "",
        "The factors that sum heads are not normalised.",
        (f"{ON_CPU}::test_layer_is_that_of_the_paper",),
    ),
)
