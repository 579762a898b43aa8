"""The on-disk cache under damage, forgery, competition, kills and unwritable disks; the loader of rendered modules."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import shutil
import stat
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

from mtagen import Spec, plan
from mtagen.codegen import render
from mtagen.errors import SpecError
from mtagen.runtime import disk_cache as cache_module
from mtagen.runtime import nvrtc
from mtagen.runtime.disk_cache import MANIFEST, TAG, TAG_CONTENT, Cache, Entry, UntrustedError, cache_key
from mtagen.runtime.load import load_host
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


@pytest.mark.parametrize("text", ['{"a":' * 100_000 + "1" + "}" * 100_000, "[" * 100_000, '{"entry": ' + "9" * 10_000])
def test_manifest_beyond_the_limits_of_its_reader_is_rebuilt(cache: Cache, text: str) -> None:
    entry = get(cache, Builder())
    (entry.path / MANIFEST).write_text(text)
    assert list(cache.entries()) == []
    assert get(cache, Builder()).files == FILES
    assert list(cache.entries())


def forge(entry: Entry, files: Mapping[str, bytes] = FILES, **fields: Any) -> None:
    """Replace what an entry holds, with digests that fit, as whoever may write the cache can."""
    for name, content in files.items():
        (entry.path / name).write_bytes(content)
        (entry.path / name).chmod(0o644)  # whatever the umask
    manifest = json.loads((entry.path / MANIFEST).read_text())
    digests = {name: cache_module._digest(content) for name, content in files.items()}
    manifest["entry"] |= {"files": digests} | fields
    manifest["sha256"] = cache_key(manifest["entry"])
    (entry.path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "another"},
        {"name": 1},
        {"arch": "sm_80"},
        {"version": "0.0"},
        {"created": 1e300},
        {"created": "now"},
        {"key": "0" * 64},
    ],
    ids=str,
)
def test_an_entry_is_what_its_path_says(cache: Cache, fields: Mapping[str, Any]) -> None:
    forge(get(cache, Builder()))
    assert list(cache.entries())
    forge(get(cache, Builder()), **fields)
    assert list(cache.entries()) == []
    assert get(cache, Builder()).name == NAME


# What another user may have written


def get_with_sources(cache: Cache, build: Callable[[], Mapping[str, bytes]] = dict) -> Entry:
    return cache.get_or_build(NAME, ARCH, KEY, build, sources={"kernel.py": b"rendered"})


@pytest.mark.parametrize(
    "files", [{"kernel.py": b"forged"}, {"other.py": b"rendered"}, {"kernel.py": b"rendered", "kernel.cubin": b""}]
)
def test_entry_with_other_sources_is_rebuilt(cache: Cache, files: Mapping[str, bytes]) -> None:
    entry = get_with_sources(cache)
    assert get_with_sources(cache, pytest.fail) == entry
    forge(entry, files)
    build = Builder({})
    held = get_with_sources(cache, build)
    if files.items() >= entry.files.items():
        assert (held.files, build.calls) == (files, 0)
    else:
        assert (held.files, build.calls) == (entry.files, 1)
        assert (entry.path / "kernel.py").read_bytes() == b"rendered"
    assert cache.find(NAME, ARCH, KEY, {"kernel.py": b"another"}) is None


def test_a_module_is_made_of_what_was_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of what the entry holds, nor does Triton take its kernels from there."""
    pytest.importorskip("triton")
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    made = plan(Spec((2, 3), 16), "sm_90a", "triton")
    sources = render(made)
    load_host(made, sources, "forward")
    (entry,) = Cache().entries()
    (name,) = sources.files
    forged = f"open({str(tmp_path / 'ran')!r}, 'w')\n" + sources.files[name].replace("tl.sum", "tl.max")
    forge(entry, {name: forged.encode()})
    for module in [module for module in sys.modules if module.startswith("mtagen_mta")]:
        monkeypatch.delitem(sys.modules, module)

    module = load_host(made, sources, "forward")
    (tmp_path / entry.path / name).write_text(forged)
    kernel = next(value for value in vars(module).values() if type(value).__name__.endswith("JITFunction"))
    assert not (tmp_path / "ran").exists()
    assert inspect.getsource(kernel.fn) in sources.files[name]
    assert inspect.getsource(module) == sources.files[name]


def test_a_cubin_is_of_the_source_that_was_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda source, arch, name: b"cubin of " + source.encode())
    made = nvrtc.cached_cubin("source", "sm_80", "mta_any")
    (entry,) = Cache().entries()
    forge(entry, {"mta_any.cu": b"another source", "mta_any.cubin": b"forged"})
    assert nvrtc.cached_cubin("source", "sm_80", "mta_any") == made == b"cubin of source"


def status(mode: int = stat.S_IFDIR | 0o755, user: int | None = None) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, os.geteuid() if user is None else user, 0, 0, 0, 0, 0))


def test_who_is_trusted() -> None:
    for mode in (0o700, 0o755, 0o500, 0o1755):
        for user in (None, 0):
            assert cache_module._distrust(status(stat.S_IFDIR | mode, user)) is None
    user = os.geteuid() + 1
    assert f"belongs to user {user}" in (cache_module._distrust(status(user=user)) or "")
    for mode in (0o775, 0o757, 0o720, 0o1777):
        assert f"(mode {mode:o})" in (cache_module._distrust(status(stat.S_IFREG | mode)) or "")
    assert cache_module._distrust(status(stat.S_IFLNK | 0o755)) == "is a link"


def writable_by_group(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def writable_by_others(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(path, 4242, -1)


def linked(path: Path) -> None:
    path.rename(path.with_name(f"real-{path.name}"))
    path.symlink_to(path.with_name(f"real-{path.name}"), target_is_directory=path.is_dir())


AT_FAULT = [writable_by_group, writable_by_others, of_another_user, linked]


def contents(folder: Path) -> set[tuple[Path, float]]:
    return {(path, path.lstat().st_mtime) for path in folder.rglob("*")}


@pytest.mark.parametrize("fault", AT_FAULT)
@pytest.mark.parametrize("above", [0, 1, 2], ids=["arch", "version", "root"])
def test_folder_that_others_may_write_is_left_alone(cache: Cache, above: int, fault: Callable[[Path], None]) -> None:
    folder = get(cache, Builder()).path.parents[above]
    fault(folder)
    before = contents(cache.root.parent)
    if (fault, above) == (linked, 2):  # the root may be a link, to another disk for one
        assert get(cache, pytest.fail).files == FILES
        return
    build = Builder({**FILES, "new": b""})
    entry, messages = get_twice_with_warnings(cache, build)
    assert entry.files == build.files
    (message,) = messages
    assert f"does not trust the kernel cache {cache.root} ({folder} " in message
    assert "set MTAGEN_CACHE_DIR to a folder of your own" in message
    cache_module._warned.clear()
    with pytest.warns(RuntimeWarning, match="does not trust"):
        assert cache.find("absent", ARCH, KEY) is None
    if fault is not linked:  # a link is no folder of ours
        for use in (lambda: list(cache.entries()), cache.clear):
            with pytest.raises(UntrustedError, match=str(folder)):
                use()
    assert contents(cache.root.parent) == before


@pytest.mark.parametrize("fault", AT_FAULT)
@pytest.mark.parametrize("file", ["", MANIFEST, "kernel.py"])
def test_entry_that_others_may_write_is_rebuilt(cache: Cache, file: str, fault: Callable[[Path], None]) -> None:
    entry = get(cache, Builder())
    fault(entry.path / file)
    assert list(cache.entries()) == []
    build = Builder()
    assert get(cache, build).files == FILES
    assert build.calls == 1
    assert get(cache, pytest.fail).files == FILES
    assert not entry.path.is_symlink()
    assert {path.name for path in entry.path.iterdir()} == {*FILES, MANIFEST}


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_nobody_else_may_write_what_the_cache_makes(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        cache = Cache(tmp_path / "missing" / "cache")
        get(cache, Builder())
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.suffix != ".lock"]
    assert len(made) == 2 + 2 + 1 + 4  # the root and the one above, a folder for version and arch, the tag, the entry
    assert not any(path.stat().st_mode & (0o022 | mask) for path in made)
    assert get(cache, pytest.fail).files == FILES


@pytest.mark.parametrize("name", ["../secret", "absolute", ".hidden", "folder/secret"])
def test_manifest_names_no_file_outside_the_entry(cache: Cache, name: str) -> None:
    entry = get(cache, Builder())
    secret = entry.path.parent / "secret"
    name = str(secret) if name == "absolute" else name
    (entry.path / "folder").mkdir()
    forge(entry, {**FILES, name: b"secret"})
    build = Builder()
    assert cache.find(NAME, ARCH, KEY) is None
    assert get(cache, build).files == FILES
    assert build.calls == 1


def test_a_pipe_in_an_entry_does_not_block(cache: Cache) -> None:
    entry = get(cache, Builder())
    for name in (MANIFEST, "kernel.py"):
        (entry.path / name).unlink()
        os.mkfifo(entry.path / name, 0o600)
        assert get(cache, Builder()).files == FILES


@pytest.mark.parametrize("what", ["file", "link to a folder", "link to nothing"])
def test_what_stands_in_an_entrys_place_is_replaced(cache: Cache, tmp_path: Path, what: str) -> None:
    path = get(cache, Builder()).path
    kept = tmp_path / "kept"
    for remake in (lambda: get(cache, Builder()).path, lambda: cache.clear()[0]):
        shutil.rmtree(path, ignore_errors=True)
        if what == "file":
            path.write_text("no entry")
        else:
            path.symlink_to(kept)
        if what == "link to a folder":
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            (kept / "thesis.txt").touch()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert remake() in (path, 1)
        assert not path.is_symlink()
        assert not path.is_file()
        assert (kept / "thesis.txt").exists() == (what == "link to a folder")


def test_a_file_in_a_folders_place_is_named(cache: Cache) -> None:
    cache_module._make_folder(cache.root)
    (cache.root / __version__).touch(0o644)
    _, messages = get_twice_with_warnings(cache, Builder())
    assert len(messages) == 1
    assert str(cache.root / __version__) in messages[0]


# Competition and kills


CHILD = """
    import sys, time
    from pathlib import Path
    from mtagen.runtime import disk_cache as cache
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
    cache_module._make_folder(arch_dir)
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


@pytest.mark.parametrize("tag", ["absent", "foreign", "link", "folder", "linked version", "linked arch"])
def test_clear_touches_only_folders_that_carry_the_tag(cache: Cache, tmp_path: Path, tag: str) -> None:
    entry = get(cache, Builder())
    version = cache.root / __version__
    file = version / TAG
    if tag == "linked version":
        version.rename(tmp_path / "elsewhere")
        version.symlink_to(tmp_path / "elsewhere")
    elif tag == "linked arch":
        entry.path.parent.rename(tmp_path / "elsewhere")
        entry.path.parent.symlink_to(tmp_path / "elsewhere")
    else:
        file.unlink()
    if tag == "foreign":
        file.write_bytes(TAG_CONTENT.replace(b"mtagen", b"another program"))
    if tag == "link":
        (tmp_path / "tag").write_bytes(TAG_CONTENT)
        file.symlink_to(tmp_path / "tag")
    if tag == "folder":
        file.mkdir()
    assert cache.clear() == (0, 0)
    assert (entry.path / "kernel.py").read_bytes() == FILES["kernel.py"]


def test_a_tag_is_not_written_through_a_link(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("keep")
    cache_module._make_folder(cache.root / __version__)
    (cache.root / __version__ / TAG).symlink_to(tmp_path / "thesis.txt")
    get(cache, Builder())
    assert (tmp_path / "thesis.txt").read_text() == "keep"
    assert cache.clear()[0] == 1


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
