"""A fuzzer: random calls of ops against ``mtagen.reference`` in float64. ``python -m tests.fuzz --help`` says how."""
