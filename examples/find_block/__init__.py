"""The toy task of the paper: multi-token attention and plain attention learn to find a block by two of its letters."""
