"""Programs that train with mtagen, to be run from the repository's root: ``python -m examples.NAME``."""
