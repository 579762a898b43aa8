"""The backend of PyTorch ops: conv-attention by tiles of scores, in O(N) memory, for the CPU and any other device."""
