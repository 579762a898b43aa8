"""The lowering "strip": whole rows of scores of all heads, in planes of a bounded workspace, in Triton kernels."""
