"""The lowering "tile" (CUDA): tiles of scores are computed and convolved on chip, by the tensor
cores.
"""
