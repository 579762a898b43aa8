"""Programs that train with mtagen. Run them from the root of the repository: ``python -m examples.NAME``."""
