"""The lowering "tile": tiles of scores are made and convolved on chip, by the tensor cores. For CUDA."""
