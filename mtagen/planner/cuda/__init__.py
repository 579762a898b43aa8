"""Parts that the CUDA kernels of all lowerings share: convolutions on tensor cores, shared memory, limits."""
