"""Which scores count, which a convolution reads, and what tiles of them need: exact integer algebra."""
