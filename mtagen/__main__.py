"""``python -m mtagen``."""

from .cli import app

app(prog_name="mtagen")
