"""The package's version, for names of generated sources and cache entries."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mtagen")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
