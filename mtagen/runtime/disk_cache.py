"""The content-addressed on-disk cache of rendered and compiled kernels.

An entry is a directory ``<root>/<mtagen version>/<arch>/<name>-<first 16 hex digits of the key>`` of plain
files and a ``manifest.json`` with their digests. It is written to a temporary sibling, manifest last, and
published by one rename; every load verifies every file, so that a torn or damaged entry is rebuilt, never
used. File times play no part. A lock that dies with its process keeps two processes from building one entry;
a valid entry is read without it.

Whoever can write an entry decides what its reader runs. So an entry is valid only if its sources are byte for byte
those that the caller has just rendered, and if this user or root owns its folder and files and nobody else may write
them. The root and the folders between are held to the same rule: in others, nothing is read, written or removed. The
folders above the root need no check, because whoever can replace the root can only put files of their own there.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from filelock import FileLock, Timeout

from ..config import Config
from ..errors import SpecError, explain
from ..version import __version__

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

MANIFEST = "manifest.json"
# Marks a cache directory for backup tools (https://bford.info/cachedir), and as mtagen's for `Cache.clear`.
TAG = "CACHEDIR.TAG"
TAG_CONTENT = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by mtagen.\n"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_KEY = re.compile(r"[0-9a-f]{64}")
_ENTRY_NAME = re.compile(rf"(?P<entry>{_NAME.pattern}-[0-9a-f]{{16}})(\.[0-9a-f]{{32}}\.tmp|\.lock)?")

_LATEST = 2.0**37  # a Unix time that dates can still represent
# Whatever the umask, only the owner may write the files and folders of the cache.
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# No link is followed, and a pipe that stands where a file should be does not block. Windows has neither flag.
_READ_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_warned: set[str] = set()
_private: dict[tuple[Path, str], Entry] = {}  # entries that could not be published, by intended path and key


class UntrustedError(PermissionError):
    """Error: a folder or file of the cache is a link, or another user owns it or may write it."""


@dataclass(frozen=True)
class Entry:
    """A verified entry. Its content is held in memory, so that it outlives a clearing of the cache.

    Args:
        path: its directory.
        name: readable kernel name.
        arch: target architecture.
        key: sha256 key, 64 hex digits.
        version: the mtagen version that wrote the entry.
        created: Unix time of its creation, in seconds.
        metadata: free JSON fields given at its creation.
        files: content by file name.
    """

    path: Path
    name: str
    arch: str
    key: str
    version: str
    created: float
    metadata: Mapping[str, Json]
    files: Mapping[str, bytes]

    @property
    def size(self) -> int:
        """Bytes in the entry's files, without the manifest."""
        return sum(map(len, self.files.values()))


def cache_key(*parts: bytes | Json) -> str:
    """Return the sha256, as 64 hex digits, of an unambiguous serialisation of the parts: bytes, or
    any JSON value.

    Raises:
        TypeError: a part is neither bytes nor JSON-able.
        ValueError: a part holds NaN or an infinity.
    """
    digest = hashlib.sha256()
    for part in parts:
        kind, payload = (b"bytes", part) if isinstance(part, bytes) else (b"json", _canonical(part))
        digest.update(b"%s %d:%s" % (kind, len(payload), payload))
    return digest.hexdigest()


class Cache:
    """The cache below ``root``; ``None`` means the configured directory (see :mod:`mtagen.config`)."""

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = Config.from_env().cache_dir if root is None else Path(root).absolute()

    def get_or_build(
        self,
        name: str,
        arch: str,
        key: str,
        build: Callable[[], Mapping[str, bytes]],
        metadata: Mapping[str, Json] | None = None,
        *,
        sources: Mapping[str, bytes] = MappingProxyType({}),
        renew: bool = False,
    ) -> Entry:
        """Return the entry of ``key``; build and publish it first if there is no valid entry or
        ``renew`` is set.

        A process that finds the entry being built by another waits for it, at most
        ``MTAGEN_CACHE_LOCK_TIMEOUT`` seconds. Past that, or when the cache cannot be written or trusted, the entry
        lives in a temporary directory that goes with the process, and a ``RuntimeWarning`` says so, once per cause.

        Args:
            name: readable kernel name; letters, digits and ``_.+-``.
            arch: target architecture; the same characters.
            key: a result of :func:`cache_key`.
            build: returns the content that ``sources`` lack, by plain file name.
            metadata: free JSON fields to keep in the manifest.
            sources: the part of the content that the caller has, by plain file name. An entry that holds anything
                else in these files is rebuilt.
            renew: build even if a valid entry is there.

        Raises:
            SpecError: the name, the arch, the key or a file name is not legal.
            OSError: the temporary directory cannot be written either.
            Exception: whatever ``build`` raises; nothing is published then.
        """
        path = self._path(name, arch, key)
        if not renew and (entry := self.find(name, arch, key, sources)):
            return entry

        def build_entry() -> Entry:
            files = {**sources, **build()}
            for file in files:
                _check(_NAME, file=file)
            # Through JSON, so that an entry just built and one loaded later are equal.
            fields = json.loads(_canonical(metadata or {}))
            return Entry(path, name, arch, key, __version__, time.time(), fields, files)

        try:
            for folder in self._above(path):
                _make_folder(folder)
                self._check_trusted(folder)
            lock = _lock(path).acquire(Config.from_env().cache_lock_timeout)
        except OSError as error:  # filelock's Timeout is one
            return self._keep_privately(build_entry(), error)
        with lock:
            if not renew and (entry := _load(path, key, sources)):
                return entry
            for leftover in _staged(path):  # from a process that was killed while it built the entry
                with suppress(OSError):
                    _remove(leftover)
            entry = build_entry()
            try:
                self._tag()
                _publish(entry)
            except OSError as error:
                return self._keep_privately(entry, error)
            _private.pop((path, key), None)
            return entry

    def find(self, name: str, arch: str, key: str, sources: Mapping[str, bytes] = MappingProxyType({})) -> Entry | None:
        """Return the valid entry of ``key``, if any; as for :meth:`get_or_build`, it must hold the
        ``sources``.

        A ``RuntimeWarning`` says, once, that the cache is not trusted.

        Raises:
            SpecError: the name, the arch or the key is not legal.
        """
        path = self._path(name, arch, key)
        if entry := _private.get((path, key)):  # it stands in for an entry that could not be written
            return entry
        try:
            self._check_trusted(*self._above(path))
        except UntrustedError as error:
            self._warn(error)
            return None
        return _load(path, key, sources)

    def entries(self) -> Iterator[Entry]:
        """Yield the valid entries of all mtagen versions and architectures, in order of path.

        Raises:
            OSError: the cache cannot be read, or is not to be trusted.
        """
        for path in self._entry_paths():
            if entry := _load(path):
                yield entry

    def clear(self) -> tuple[int, int]:
        """Remove the entries of all mtagen versions; return their number and the bytes freed.

        Only entries are removed, in folders that carry the cache's tag; no link is followed.
        Entries that a running process is building are left to it. Processes that have loaded an
        entry keep it.

        Raises:
            OSError: the cache cannot be written, or is not to be trusted.
        """
        count = freed = 0
        for path in self._entry_paths():
            lock = _lock(path)
            with suppress(Timeout), lock.acquire(timeout=0):
                doomed = [*filter(os.path.lexists, [path]), *_staged(path)]
                count += path in doomed
                freed += sum(map(_size, doomed))
                for folder in doomed:
                    _discard(folder)
                # Safe while held: filelock does not accept a lock on an unlinked file.
                Path(lock.lock_file).unlink()
        return count, freed

    def _path(self, name: str, arch: str, key: str) -> Path:
        _check(_NAME, name=name, arch=arch)
        _check(_KEY, key=key)
        return self.root / __version__ / arch / f"{name}-{key[:16]}"

    def _entry_paths(self) -> list[Path]:
        """Return the paths of all entries, whole or not, in version directories that carry mtagen's
        tag.

        Raises:
            OSError: a folder cannot be read, or is not to be trusted.
        """
        if not self.root.is_dir():
            return []
        versions = [version for version in _folders(self.root) if _is_tagged(version)]
        archs = [arch for version in versions for arch in _folders(version)]
        files = [file for arch in archs for file in arch.iterdir()]
        paths = {file.parent / match["entry"] for file in files if (match := _ENTRY_NAME.fullmatch(file.name))}
        self._check_trusted(self.root, *sorted({folder for path in paths for folder in self._above(path)}))
        return sorted(paths)

    def _above(self, path: Path) -> tuple[Path, Path, Path]:
        """Return the folders of the cache that contain the entry at ``path``."""
        return self.root, path.parent.parent, path.parent

    def _check_trusted(self, *folders: Path) -> None:
        """Check the folders that exist. The root may be a link; then the check is of the link's
        target.

        Raises:
            UntrustedError: a folder is not trusted.
        """
        for folder in folders:
            try:
                status = folder.stat() if folder == self.root else folder.lstat()
            except OSError:  # the folder is absent or cannot be used; the error of its use says why
                continue
            if fault := _distrust(status):
                raise UntrustedError(
                    f"{folder} {fault}, so others could replace the code that runs; if it is yours, run "
                    f"'chmod -R go-w {self.root}', else set MTAGEN_CACHE_DIR to a folder of your own"
                )

    def _tag(self) -> None:
        folder = self.root / __version__
        if not _is_tagged(folder):
            staging = _staging(folder / TAG)
            _write(staging, TAG_CONTENT)
            staging.replace(folder / TAG)  # a link of this name is replaced, not followed

    def _warn(self, error: OSError) -> None:
        known = {Timeout: "waited too long for", UntrustedError: "does not trust"}
        cause = known.get(type(error), "cannot write")
        if cause not in _warned:
            _warned.add(cause)
            warnings.warn(
                f"mtagen {cause} the kernel cache {self.root} ({error}); kernels that are not read from it are built "
                "for this process only, in a temporary directory",
                RuntimeWarning,
                stacklevel=4,
            )

    def _keep_privately(self, entry: Entry, error: OSError) -> Entry:
        self._warn(error)
        private = replace(entry, path=_private_root(os.getpid()) / entry.path.relative_to(self.root))
        _make_folder(private.path.parent)
        _publish(private)
        _private[entry.path, entry.key] = private
        return private


def _canonical(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _check(pattern: re.Pattern[str], **values: str) -> None:
    for name, value in values.items():
        if not pattern.fullmatch(value) or value == MANIFEST:
            raise SpecError(explain(name, value, "is not a legal part of a cache entry", pattern.pattern))


def _lock(path: Path) -> FileLock:
    return FileLock(f"{path}.lock")


def _staging(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def _staged(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}.*.tmp"))


def _distrust(status: os.stat_result) -> str | None:
    """Return, in words, why another user could change a file or folder of the cache;

    None if nobody could.
    """
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if sys.platform == "win32":  # access control lists are no part of the status
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"may be written by others than its owner (mode {stat.S_IMODE(status.st_mode):03o})"
    return None


def _read(path: Path) -> bytes:
    """Return the content of a trusted regular file that is no link.

    The check is of the open file, so that nobody can exchange the file between the check and the
    reading.

    Raises:
        OSError: the path is anything else, or cannot be read.
    """
    # Path.open takes no opener.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _READ_FLAGS)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        if fault := _distrust(status):
            raise UntrustedError(f"{path} {fault}")
        return file.read()


def _write(path: Path, content: bytes) -> None:
    """Write a new file; it must not exist."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, _FILE_MODE)) as file:
        file.write(content)


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents."""
    for missing in reversed([*takewhile(lambda x: not x.exists(), (folder, *folder.parents))]):
        missing.mkdir(_FOLDER_MODE, exist_ok=True)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


def _is_tagged(folder: Path) -> bool:
    tag = folder / TAG
    return tag.is_file() and not tag.is_symlink() and tag.read_bytes() == TAG_CONTENT


def _load(path: Path, key: str | None = None, sources: Mapping[str, bytes] = MappingProxyType({})) -> Entry | None:
    """Return the entry at ``path`` if it is whole and trusted, holds these sources and (when given)
    has this key.
    """
    try:
        if _distrust(path.lstat()):
            return None
        manifest = json.loads(_read(path / MANIFEST))
        fields = manifest["entry"]
        if manifest["sha256"] != cache_key(fields) or key not in (None, fields["key"]):
            return None
        if path.parts[-3:] != (fields["version"], fields["arch"], fields["name"] + "-" + fields["key"][:16]):
            return None
        if not (0 <= fields["created"] < _LATEST and all(map(_NAME.fullmatch, fields["files"]))):
            return None
        files = {name: _read(path / name) for name in fields["files"]}
        if not sources.items() <= files.items():
            return None
        unknown = {name: content for name, content in files.items() if name not in sources}
        if any(fields["files"][name] != _digest(content) for name, content in unknown.items()):
            return None
        return Entry(**{**fields, "path": path, "files": files})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # absent, or not written by _publish
        return None


def _publish(entry: Entry) -> None:
    """Write the entry beside its path, then move it there. The caller holds the entry's lock."""
    fields: dict[str, Json] = {
        "name": entry.name,
        "arch": entry.arch,
        "key": entry.key,
        "version": entry.version,
        "created": entry.created,
        "metadata": entry.metadata,
        "files": {name: _digest(content) for name, content in entry.files.items()},
    }
    staging = _staging(entry.path)
    try:
        staging.mkdir(_FOLDER_MODE)
        for name, content in entry.files.items():
            _write(staging / name, content)
        manifest = {"sha256": cache_key(fields), "entry": fields}
        _write(staging / MANIFEST, json.dumps(manifest, indent=2).encode())
        # At the path may be a damaged entry or anything else; folders with files, files and links are not replaced in
        # one step.
        if os.path.lexists(entry.path):
            _discard(entry.path)
        staging.replace(entry.path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _discard(path: Path) -> None:
    _remove(path.replace(_staging(path)))  # moved in one step, so that no reader sees half of it


def _remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _size(path: Path) -> int:
    """Return the bytes of a file, of all files below a folder, or of a link itself."""
    files = [path, *path.rglob("*")] if not path.is_symlink() else [path]
    return sum(status.st_size for status in map(os.lstat, files) if not stat.S_ISDIR(status.st_mode))


def _digest(content: bytes) -> dict[str, Json]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


@functools.cache
def _private_root(pid: int) -> Path:
    """Return a temporary directory that is removed at exit; a forked process, with another pid,
    gets its own.
    """
    root = Path(tempfile.mkdtemp(prefix="mtagen-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
