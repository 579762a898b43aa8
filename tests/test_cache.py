"""The on-disk cache under damage, competition, kills and unwritable disks; the loader of rendered modules."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from mtagen.errors import SpecError
from mtagen.runtime import cache as cache_module
from mtagen.runtime.cache import MANIFEST, Cache, Entry, cache_key
from mtagen.runtime.loader import load_module
from mtagen.version import __version__

NAME, ARCH, KEY = "mta_fwd", "sm_90a", cache_key("source", {"flags": 1})
FILES = {"kernel.py": b"X = 1\n" * 50, "kernel.cubin": bytes(range(256))}
PATIENCE = 20  # seconds for another process to reach a point


class Builder:
    """A `build` that counts its calls."""

    def __init__(self, files: Mapping[str, bytes] = FILES) -> None:
        self.files, self.calls = files, 0

    def __call__(self) -> Mapping[str, bytes]:
        self.calls += 1
        return self.files


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())
    monkeypatch.setattr(cache_module, "_private", {})


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def get(cache: Cache, build: Callable[[], Mapping[str, bytes]]) -> Entry:
    return cache.get_or_build(NAME, ARCH, KEY, build)


# Keys


def test_key_is_stable() -> None:
    serialised = b'bytes 3:srcjson 6:"flag"json 23:{"a":true,"b":[1,null]}'
    expected = hashlib.sha256(serialised).hexdigest()
    assert cache_key(b"src", "flag", {"b": [1, None], "a": True}) == expected
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1})


def test_different_parts_give_different_keys() -> None:
    part_lists: list[tuple[Any, ...]] = [
        (),
        ("",),
        (b"",),
        ("", ""),
        ("ab",),
        (b"ab",),
        ("a", "b"),
        (["a", "b"],),
        ("a,b",),
    ]
    part_lists += [(1,), ("1",), (1.0,), (True,), (None,), ("null",), (b"1",), ({"a": 1},), ([["a", 1]],)]
    assert len({cache_key(*parts) for parts in part_lists}) == len(part_lists)


@pytest.mark.parametrize(("part", "error"), [(object(), TypeError), (float("nan"), ValueError)])
def test_key_refuses_what_json_cannot_say(part: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        cache_key(part)  # type: ignore[arg-type]


# Build and load


def test_build_once_then_load(cache: Cache) -> None:
    build = Builder()
    built = cache.get_or_build(NAME, ARCH, KEY, build, metadata={"plan": (64, 64)})
    loaded = get(cache, build)
    assert build.calls == 1
    assert loaded == built
    assert loaded.path == cache.root / __version__ / ARCH / f"{NAME}-{KEY[:16]}"
    assert {file.name: file.read_bytes() for file in loaded.path.iterdir() if file.name != MANIFEST} == FILES
    assert loaded.size == sum(map(len, FILES.values()))
    assert loaded.metadata == {"plan": [64, 64]}
    assert list(cache.entries()) == [loaded]


def test_valid_entry_needs_no_lock(cache: Cache) -> None:
    lock = f"{get(cache, Builder()).path}.lock"
    with FileLock(lock):
        assert get(cache, Builder()).files == FILES


def test_keys_that_share_a_prefix_are_told_apart(cache: Cache) -> None:
    get(cache, Builder())
    twin = KEY[:16] + "0" * 48
    assert cache.get_or_build(NAME, ARCH, twin, Builder({"kernel.py": b"twin"})).files == {"kernel.py": b"twin"}


def test_failed_build_leaves_nothing(cache: Cache) -> None:
    def fail() -> Mapping[str, bytes]:
        raise OSError("the compiler is missing")

    with pytest.raises(OSError, match="the compiler is missing"):
        get(cache, fail)
    assert list(cache.entries()) == []
    assert get(cache, Builder()).files == FILES


@pytest.mark.parametrize("bad", ["../up", "a/b", "", ".hidden", MANIFEST])
def test_illegal_names_are_refused(cache: Cache, bad: str) -> None:
    with pytest.raises(SpecError, match="file: got"):
        get(cache, Builder({bad: b""}))
    with pytest.raises(SpecError, match="name: got"):
        cache.get_or_build(bad, ARCH, KEY, Builder())


# Damage


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def noise(file: Path) -> None:
    size, times = file.stat().st_size, (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(os.urandom(size))
    os.utime(file, ns=times)  # only the content gives it away


def flip(file: Path) -> None:
    # In the manifest: one digit of the creation time, so that it still parses.
    file.write_bytes(file.read_bytes().replace(b'"created": 1', b'"created": 2').replace(b"X = 1", b"X = 2"))


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, noise, flip, empty, Path.unlink])
@pytest.mark.parametrize("file", ["kernel.py", MANIFEST])
def test_damaged_entry_is_rebuilt(cache: Cache, file: str, damage: Callable[[Path], None]) -> None:
    build = Builder()
    entry = get(cache, build)
    damage(entry.path / file)
    assert list(cache.entries()) == []
    assert get(cache, build).files == FILES
    assert build.calls == 2
    assert get(cache, build).files == FILES
    assert build.calls == 2


def test_manifest_of_another_shape_is_rebuilt(cache: Cache) -> None:
    entry = get(cache, Builder())
    manifests: list[Any] = [[], None, {"sha256": 1}, {"entry": {}, "sha256": cache_key({})}]
    for manifest in manifests:
        (entry.path / MANIFEST).write_text(json.dumps(manifest))
        build = Builder()
        get(cache, build)
        assert build.calls == 1


# Competition and kills


CHILD = """
    import sys, time
    from pathlib import Path
    from mtagen.runtime import cache
    scratch, name, arch, key, mode = Path(sys.argv[1]), *sys.argv[2:]

    def wait():
        (scratch / "inside").touch()
        while not (scratch / "go").exists():
            time.sleep(0.01)

    def build():
        with (scratch / "log").open("a") as log:
            log.write("built\\n")
        if mode == "build":
            wait()
        return {"kernel.py": b"from a child"}

    if mode == "publish":
        write = cache._write
        cache._write = lambda path, content: wait() if path.name == cache.MANIFEST else write(path, content)
    (scratch / "started").touch()
    print(cache.Cache(scratch / "cache").get_or_build(name, arch, key, build).files["kernel.py"].decode())
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    children = []

    def start(mode: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), NAME, ARCH, KEY, mode]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield start
    for process in children:
        process.kill()
        process.communicate()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} did not appear"
        time.sleep(0.01)


def test_two_processes_build_once(tmp_path: Path, child: Callable[[str], subprocess.Popen[str]]) -> None:
    first = child("build")
    wait_for(tmp_path / "inside")
    (tmp_path / "started").unlink()
    second = child("build")
    wait_for(tmp_path / "started")
    time.sleep(0.2)  # until it waits at the lock; were it late, it would load, and the test hold all the same
    assert second.poll() is None
    (tmp_path / "go").touch()
    assert [p.communicate(timeout=PATIENCE)[0].strip() for p in (first, second)] == ["from a child"] * 2
    assert (tmp_path / "log").read_text() == "built\n"


@pytest.mark.parametrize("mode", ["build", "publish"])
def test_killed_builder_is_succeeded_at_once(
    tmp_path: Path, cache: Cache, child: Callable[[str], subprocess.Popen[str]], mode: str
) -> None:
    victim = child(mode)
    wait_for(tmp_path / "inside")
    victim.kill()
    victim.wait()
    start = time.monotonic()
    assert get(cache, Builder()).files == FILES
    assert time.monotonic() - start < 2
    assert [path.suffix for path in (cache.root / __version__ / ARCH).iterdir() if path.is_dir()] == [""]


def test_threads_build_once(cache: Cache) -> None:
    build = Builder()
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(lambda _: get(cache, build), range(16)))
    assert build.calls == 1
    assert all(entry.files == FILES for entry in entries)


# Unwritable caches


def get_twice_with_warnings(cache: Cache, build: Builder) -> tuple[Entry, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entry = get(cache, build)
        assert get(cache, build) == entry
        other = cache.get_or_build("other", ARCH, KEY, Builder())
    assert other.files == FILES
    assert build.calls == 1
    assert (entry.path / "kernel.py").read_bytes() == FILES["kernel.py"]
    assert cache.root not in entry.path.parents
    return entry, [str(warning.message) for warning in caught]


def test_unwritable_root_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    _, messages = get_twice_with_warnings(cache, Builder())
    assert len(messages) == 1
    assert f"cannot write the kernel cache {cache.root}" in messages[0]
    assert list(cache.entries()) == []
    assert cache.clear() == (0, 0)


def test_full_disk_warns_once(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    write = cache_module._write

    def full(path: Path, content: bytes) -> None:
        if cache.root in path.parents and path.name == "kernel.cubin":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(cache_module, "_write", full)
    _, messages = get_twice_with_warnings(cache, Builder())
    assert len(messages) == 1
    assert "No space left on device" in messages[0]
    assert not any(path.is_dir() for path in (cache.root / __version__ / ARCH).iterdir())


def test_what_could_not_be_renewed_on_disk_is_found(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_build(NAME, ARCH, KEY, Builder({"table": b"old"}))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_tag", lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.warns(RuntimeWarning, match="No space left"):
            cache.get_or_build(NAME, ARCH, KEY, Builder({"table": b"new"}), renew=True)
    assert cache.find(NAME, ARCH, KEY).files == {"table": b"new"}
    cache.get_or_build(NAME, ARCH, KEY, Builder({"table": b"newest"}), renew=True)
    assert cache.find(NAME, ARCH, KEY).files == {"table": b"newest"}


def test_lock_timeout_builds_privately(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_LOCK_TIMEOUT", "0.1")
    arch_dir = cache.root / __version__ / ARCH
    arch_dir.mkdir(parents=True)
    with FileLock(arch_dir / f"{NAME}-{KEY[:16]}.lock"):
        _, messages = get_twice_with_warnings(cache, Builder())
    assert len(messages) == 1
    assert "waited too long for the kernel cache" in messages[0]


def test_private_directory_goes_with_the_process(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    command = textwrap.dedent(CHILD).replace('.files["kernel.py"].decode()', ".path")
    arguments = [sys.executable, "-W", "ignore", "-c", command, str(tmp_path), NAME, ARCH, KEY, "private"]
    path = Path(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip())
    assert path.name.startswith(NAME)
    assert not any(parent.exists() for parent in (path, *path.parents[:3]))


# Clearing


def test_clear_removes_entries_and_only_those(cache: Cache) -> None:
    entry = get(cache, Builder())
    damaged = cache.get_or_build("damaged", ARCH, KEY, Builder())
    (damaged.path / MANIFEST).unlink()
    leftover = entry.path.with_name(f"{entry.path.name}.{'0' * 32}.tmp")
    shutil.copytree(entry.path, leftover)
    foreign = [
        cache.root / "thesis.txt",
        cache.root / __version__ / "thesis.txt",
        entry.path.parent / "thesis.txt",
        entry.path.parent / "folder" / "thesis.txt",
        cache.root / "not-tagged" / ARCH / entry.path.name / MANIFEST,
    ]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("keep")
    removed, freed = cache.clear()
    assert removed == 2
    assert freed > 2 * entry.size
    assert all(file.read_text() == "keep" for file in foreign)
    assert sorted(path.name for path in entry.path.parent.iterdir()) == ["folder", "thesis.txt"]
    assert cache.clear() == (0, 0)
    assert get(cache, Builder()).files == FILES


def test_clear_of_an_absent_cache(tmp_path: Path) -> None:
    assert Cache(tmp_path / "nowhere").clear() == (0, 0)


def test_clear_spares_an_entry_being_built(cache: Cache) -> None:
    def build() -> Mapping[str, bytes]:
        assert cache.clear()[0] == 1
        return FILES

    cache.get_or_build("other", ARCH, KEY, Builder())
    entry = get(cache, build)
    assert list(cache.entries()) == [entry]


# Modules

SOURCE = b"def scale(x):\n    return 2 * x\n"


def test_module_and_its_source_outlive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mta_fwd-0123" / "kernel.py"
    file.parent.mkdir()
    file.write_bytes(SOURCE)
    module = load_module(file, SOURCE)
    assert module.scale(2) == 4
    assert module.__file__ == str(file)
    assert module.__name__.startswith("mtagen_mta_fwd_0123_kernel_")
    assert list(file.parent.iterdir()) == [file]  # no bytecode
    file.unlink()
    assert inspect.getsource(module.scale) == SOURCE.decode()


def test_module_is_loaded_once_per_content(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    with ThreadPoolExecutor(8) as pool:
        modules = set(pool.map(lambda _: load_module(file, SOURCE), range(16)))
    assert len(modules) == 1
    assert load_module(file, SOURCE.replace(b"2", b"3")).scale(2) == 6


def test_failing_module_is_not_kept(tmp_path: Path) -> None:
    before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_module(tmp_path / "kernel.py", b"1 / 0")
    assert set(sys.modules) == before


def test_triton_finds_the_source(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    source = b"import triton\n\n@triton.jit\ndef kernel(x):\n    pass\n"
    kernel = load_module(tmp_path / "entry" / "kernel.py", source).kernel
    assert "def kernel(x):" in inspect.getsource(kernel.fn)
