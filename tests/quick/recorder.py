"""A plugin of pytest that records which modules and templates of mtagen its process touches.

``__main__`` loads it into every process of a run, each of which writes a file of paths into the folder ``TOUCHED``.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parents[2] / "mtagen"
CODEGEN = str(PACKAGE / "codegen")
TEMPLATES = str(PACKAGE / "templates")
IMPORTED = " (imported)"

_touched: set[str] = set()


def _trace(frame: FrameType, event: str, argument: object) -> None:
    """Record a call. Its lines are not traced, because None is returned."""
    code = frame.f_code
    _touched.add(code.co_filename + IMPORTED if code.co_name == "<module>" else code.co_filename)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and str(arguments[0]).startswith(TEMPLATES) and _is_rendering():
        _touched.add(str(arguments[0]))


def _is_rendering() -> bool:
    """Whether a module of ``mtagen.codegen`` is being executed, as when it or Jinja reads a template."""
    frame: FrameType | None = sys._getframe(2)
    while frame and not frame.f_code.co_filename.startswith(CODEGEN):
        frame = frame.f_back
    return frame is not None


def pytest_configure() -> None:
    sys.addaudithook(_audit)
    threading.settrace(_trace)
    sys.settrace(_trace)


def pytest_sessionfinish() -> None:
    sys.settrace(None)
    threading.settrace(None)
    names = [path.removeprefix(f"{PACKAGE}/") for path in sorted(_touched) if path.startswith(f"{PACKAGE}/")]
    Path(os.environ["TOUCHED"], f"{os.getpid()}.txt").write_text("\n".join(names))
