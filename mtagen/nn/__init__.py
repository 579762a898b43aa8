"""Layers made of mtagen's ops: multi-token attention with its projections, as the authors of the paper build it."""

from .cache import Cache
from .layer import MultiTokenAttention
from .rope import FrequencyScaling

__all__ = ["Cache", "FrequencyScaling", "MultiTokenAttention"]
