"""Writes the tutorial as a notebook: ``python docs/notebook.py`` makes docs/tutorial.ipynb of docs/tutorial.md.

A block of python becomes a cell of code, and the text between two blocks a cell of Markdown. Blocks with a title are
for machines with a GPU: they stay in the text, so that the notebook runs from top to bottom on a CPU.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE, NOTEBOOK = FOLDER / "tutorial.md", FOLDER / "tutorial.ipynb"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def notebook(page: str) -> str:
    """The text of a notebook with the cells of a page."""
    parts = enumerate(_BLOCK.split(page))  # text and code in turn
    cells = [_cell(i, text.strip("\n")) for i, text in parts if text.strip()]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, text: str) -> dict[str, Any]:
    """A cell in the format that Jupyter writes."""
    cell = {"id": f"part-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
    if number % 2:
        return {"cell_type": "code", "execution_count": None, "outputs": [], **cell}
    return {"cell_type": "markdown", **cell}


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
