"""The lowering "lift": convolved scores are sums of dot products with filtered keys or queries. For Triton."""
