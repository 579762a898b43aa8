"""The paper's toy task: multi-token attention and plain attention learn to find a block by two of its letters."""
