"""Exact integer algebra of masks, stencils and blocks: the scores that count, and those that are
read.
"""
