"""The package's version, for its metadata, names of generated sources and cache entries."""

__version__ = "0.2.0"
