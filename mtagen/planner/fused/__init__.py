"""Lowering B (DESIGN §3): score tiles convolved on the tensor cores and never written to memory."""
