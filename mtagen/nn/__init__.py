"""The multi-token attention layer with its projections, as the authors of the paper build it."""

from .cache import Cache
from .layer import MultiTokenAttention
from .rope import FrequencyScaling

__all__ = ["Cache", "FrequencyScaling", "MultiTokenAttention"]
