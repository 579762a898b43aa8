"""Import of rendered Python source.

The file that a module is named after is not read and need not exist.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import re
import sys
import threading
from importlib.abc import ExecutionLoader
from pathlib import Path
from types import ModuleType

_LOCK = threading.RLock()


class _SourceLoader(ExecutionLoader):
    """Runs source held in memory. Writes no bytecode: its staleness check would rest on mtime."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_source(self, fullname: str) -> str:
        return self.source


def load_module(path: Path, source: bytes) -> ModuleType:
    """Return the module of one rendered file, executed once per process and content. Thread-safe.

    Args:
        path: the file; its folder and stem name the module, and tracebacks and ``inspect`` show it. It is not read.
        source: its content.

    Raises:
        Exception: the execution of the source raised it; the module is then discarded.
    """
    # The content, not the location, makes the name unique: Triton's own cache then survives a move of mtagen's cache.
    digest = hashlib.sha256(source).hexdigest()[:16]
    name = re.sub(r"\W", "_", f"mtagen_{path.absolute().parent.name}_{path.stem}_{digest}")
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        loader = _SourceLoader(path.absolute(), importlib.util.decode_source(source))
        # Triton gets the source of its kernels from inspect.getsource, which asks linecache, which would read the file.
        # linecache does not read a file again if its entry has no time.
        lines = loader.source.splitlines(keepends=True)
        linecache.cache[str(loader.path)] = len(source), None, lines, str(loader.path)
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before execution: inspect.getsource finds the module by name
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
