"""The lowering "lift" (Triton): convolved scores are sums of dot products with filtered keys or
queries.
"""
