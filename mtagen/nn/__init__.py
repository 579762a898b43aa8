"""Layers made of mtagen's ops: multi-token attention with its projections, as the authors of the paper build it."""

from .cache import Cache
from .layer import MultiTokenAttention

__all__ = ["Cache", "MultiTokenAttention"]
