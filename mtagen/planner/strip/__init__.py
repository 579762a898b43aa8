"""The lowering "strip": kernels stream over whole rows of scores of all heads, in a bounded
workspace.
"""
