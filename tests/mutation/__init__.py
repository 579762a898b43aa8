"""One-line bugs that the tests must find: :mod:`.mutants` lists them, ``python -m tests.mutation`` tries them."""
