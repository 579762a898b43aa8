"""A fuzzer that compares random calls of ops with ``mtagen.reference``; see ``python -m tests.fuzz --help``."""
