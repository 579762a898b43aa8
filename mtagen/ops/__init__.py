"""Registered torch ops, autograd, input checks and the backends they dispatch to."""
