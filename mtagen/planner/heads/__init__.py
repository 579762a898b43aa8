"""The lowering "heads": CUDA kernels that mix heads on the chip, without planes of scores."""
