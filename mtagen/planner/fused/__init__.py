"""The lowering "tile": score tiles are convolved on the tensor cores and never written to memory. For CUDA."""
