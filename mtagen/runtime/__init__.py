"""From source text to a loaded kernel: the on-disk cache, the compilers and the launchers."""
