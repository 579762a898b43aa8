"""Models that train with mtagen's layer."""
