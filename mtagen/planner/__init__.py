"""From a spec and a target to a plan: stencils, tile geometry, resources, cost.

Pure: no torch, no GPU, no files written.
"""
