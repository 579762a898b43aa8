"""Tests in ``interpreter/`` need TRITON_INTERPRET=1 before triton is imported; ``test_interpreter.py`` runs them so."""

import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2
import pytest
import torch
from poison import memory_starts_as_nan
from quick import FILES, is_quick
from swept import SWEPT

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]


def pytest_configure() -> None:
    """Parallel workers have a thread each: more would wait for each other's cores longer than they compute."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        # NumPy's, and those of processes that tests start; torch.compile starts processes of its own otherwise.
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether to leave a file alone: the quick tier imports only files that have some of its tests."""
    if config.option.markexpr != "quick" or collection_path.is_dir():
        return None
    return None if _below_tests(collection_path) in FILES else True


def _below_tests(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).as_posix()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the quick tier and the sweep, and put the longest tests first, so that parallel workers end together."""
    names = defaultdict(set)
    for item in items:
        file = _below_tests(item.path)
        names[file].add(item.name)
        if item.name in SWEPT.get(file, ()):
            item.add_marker(pytest.mark.sweep)
        if is_quick(item.nodeid.removeprefix("tests/")):
            item.add_marker("quick")
    if not any("::" in argument for argument in config.args):
        missing = {file: SWEPT[file] - found for file, found in names.items() if SWEPT.get(file, set()) - found}
        assert not missing, f"tests of the sweep that do not exist: {missing}"
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where emulated kernels are compiled, once for all tests of all parallel workers."""
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if parallel else base) / "kernels"
    made.mkdir(exist_ok=True)
    return made


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of many small tensors: on a busy machine threads wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="memory_starts_as_nan")
def _memory_starts_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_starts_as_nan(monkeypatch)


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> "Counter[str]":
    """How often each template was rendered since the test began, by its name."""
    counts: Counter[str] = Counter()
    render = jinja2.Template.render

    def counting(self: jinja2.Template, *arguments: object, **values: object) -> str:
        counts[self.name or ""] += 1
        return render(self, *arguments, **values)

    monkeypatch.setattr(jinja2.Template, "render", counting)
    return counts


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What CUDA's compiler has said since the test began, of ``compile_cubin`` as it is."""
    import cuda.core

    written = io.StringIO()

    class Program(cuda.core.Program):
        def compile(self, target_type: str) -> object:
            return super().compile(target_type, logs=written)

    monkeypatch.setattr(cuda.core, "Program", Program)
    return lambda: written.getvalue().replace("\0", "").strip()
