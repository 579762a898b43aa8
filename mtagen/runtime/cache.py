"""The content-addressed on-disk cache of rendered and compiled kernels.

An entry is a directory ``<root>/<mtagen version>/<arch>/<name>-<first 16 hex digits of the key>`` of plain
files and a ``manifest.json`` with their digests. It is written to a temporary sibling, manifest last, and
published by one rename; every load verifies every digest, so that a torn or damaged entry is rebuilt, never
used. File times play no part. A lock that dies with its process keeps two processes from building one entry;
a valid entry is read without it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from filelock import FileLock, Timeout

from ..config import Config
from ..errors import SpecError, explain
from ..version import __version__

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None

MANIFEST = "manifest.json"
# Tells backup tools of a cache directory (https://bford.info/cachedir), and `Cache.clear` that it is ours.
TAG = "CACHEDIR.TAG"
TAG_CONTENT = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by mtagen.\n"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_KEY = re.compile(r"[0-9a-f]{64}")
_OWNED = re.compile(rf"(?P<entry>{_NAME.pattern}-[0-9a-f]{{16}})(\.[0-9a-f]{{32}}\.tmp|\.lock)?")

_warned: set[str] = set()
_private: dict[tuple[Path, str], Entry] = {}  # entries that could not be published, by intended path and key


@dataclass(frozen=True)
class Entry:
    """A verified entry. Its content is held in memory, so that it outlives a clearing of the cache.

    Args:
        path: its directory.
        name: readable kernel name.
        arch: target architecture.
        key: sha256 key, 64 hex digits.
        version: the mtagen version that made it.
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
        """Bytes in its files, the manifest not counted."""
        return sum(map(len, self.files.values()))


def cache_key(*parts: bytes | Json) -> str:
    """sha256, as 64 hex digits, of an unambiguous serialisation of the parts: bytes, or any JSON value.

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
        renew: bool = False,
    ) -> Entry:
        """The entry of ``key``; built and published first when no valid one is there, or if it is to be renewed.

        A process that finds the entry being built by another waits for it, at most
        ``MTAGEN_CACHE_LOCK_TIMEOUT`` seconds. Past that, or when the cache cannot be written, the entry lives
        in a temporary directory that goes with the process, and a ``RuntimeWarning`` says so, once per cause.

        Args:
            name: readable kernel name; letters, digits and ``_.+-``.
            arch: target architecture; the same characters.
            key: made by :func:`cache_key`.
            build: makes the content, by plain file name.
            metadata: free JSON fields to keep in the manifest.
            renew: build even if a valid entry is there.

        Raises:
            SpecError: the name, the arch, the key or a file name is not legal.
            OSError: the temporary directory cannot be written either.
            Exception: whatever ``build`` raises; nothing is published then.
        """
        path = self._path(name, arch, key)
        if not renew and (entry := self.find(name, arch, key)):
            return entry

        def make() -> Entry:
            files = dict(build())
            for file in files:
                _check(_NAME, file=file)
            # Through JSON, so that an entry just built and one loaded later are equal.
            fields = json.loads(_canonical(metadata or {}))
            return Entry(path, name, arch, key, __version__, time.time(), fields, files)

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(path).acquire(Config.from_env().cache_lock_timeout)
        except OSError as error:  # filelock's Timeout is one
            return self._keep_privately(make(), error)
        with lock:
            if not renew and (entry := _load(path, key)):
                return entry
            for leftover in _staged(path):  # of a builder that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            entry = make()
            try:
                self._tag()
                _publish(entry)
            except OSError as error:
                return self._keep_privately(entry, error)
            _private.pop((path, key), None)
            return entry

    def find(self, name: str, arch: str, key: str) -> Entry | None:
        """The valid entry of ``key``, if there is one.

        Raises:
            SpecError: the name, the arch or the key is not legal.
        """
        path = self._path(name, arch, key)
        return _private.get((path, key)) or _load(path, key)  # a private one has replaced what could not be written

    def entries(self) -> Iterator[Entry]:
        """The valid entries of all mtagen versions and architectures, in order of path.

        Raises:
            OSError: the cache cannot be read.
        """
        for path in self._owned():
            if entry := _load(path):
                yield entry

    def clear(self) -> tuple[int, int]:
        """Remove the entries of all mtagen versions; gives their number and the bytes freed.

        Only what the cache made is removed, and entries that a running process is building are left to it.
        Processes that have loaded an entry keep it.

        Raises:
            OSError: the cache cannot be written.
        """
        count = freed = 0
        for path in self._owned():
            lock = _lock(path)
            with suppress(Timeout), lock.acquire(timeout=0):
                folders = [*filter(Path.is_dir, [path]), *_staged(path)]
                count += path in folders
                freed += sum(f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file())
                for folder in folders:
                    _discard(folder)
                # Safe while held: filelock does not accept a lock on an unlinked file.
                Path(lock.lock_file).unlink()
        return count, freed

    def _path(self, name: str, arch: str, key: str) -> Path:
        _check(_NAME, name=name, arch=arch)
        _check(_KEY, key=key)
        return self.root / __version__ / arch / f"{name}-{key[:16]}"

    def _owned(self) -> list[Path]:
        """Paths of all entries, whole or not, in version directories that carry our tag."""
        folders = [
            arch
            for tag in self.root.glob(f"*/{TAG}")
            if tag.read_bytes() == TAG_CONTENT
            for arch in tag.parent.iterdir()
            if arch.is_dir()
        ]
        matches = [(folder, _OWNED.fullmatch(path.name)) for folder in folders for path in folder.iterdir()]
        return sorted({folder / match["entry"] for folder, match in matches if match})

    def _tag(self) -> None:
        tag = self.root / __version__ / TAG
        if not tag.is_file() or tag.read_bytes() != TAG_CONTENT:
            tag.write_bytes(TAG_CONTENT)

    def _keep_privately(self, entry: Entry, error: OSError) -> Entry:
        cause = "waited too long for" if isinstance(error, Timeout) else "cannot write"
        if cause not in _warned:
            _warned.add(cause)
            warnings.warn(
                f"mtagen {cause} the kernel cache {self.root} ({error}); kernels that it lacks are built for "
                "this process only, in a temporary directory",
                RuntimeWarning,
                stacklevel=3,
            )
        kept = replace(entry, path=_private_root(os.getpid()) / entry.path.relative_to(self.root))
        kept.path.parent.mkdir(parents=True, exist_ok=True)
        _publish(kept)
        _private[entry.path, entry.key] = kept
        return kept


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


def _load(path: Path, key: str | None = None) -> Entry | None:
    """The entry at ``path`` if it is whole and (when given) has this key."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        fields = manifest["entry"]
        if manifest["sha256"] != cache_key(fields) or key not in (None, fields["key"]):
            return None
        files = {name: (path / name).read_bytes() for name in fields["files"]}
        if fields["files"] != _digests(files):
            return None
        return Entry(**{**fields, "path": path, "files": files})
    except (OSError, ValueError, KeyError, TypeError):  # absent, or anything but what _publish wrote
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
        "files": _digests(entry.files),
    }
    staging = _staging(entry.path)
    try:
        staging.mkdir()
        for name, content in entry.files.items():
            (staging / name).write_bytes(content)
        (staging / MANIFEST).write_text(json.dumps({"sha256": cache_key(fields), "entry": fields}, indent=2))
        if entry.path.is_dir():  # a damaged entry: a directory with files cannot be replaced in one step
            _discard(entry.path)
        staging.replace(entry.path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _discard(folder: Path) -> None:
    doomed = folder.replace(_staging(folder))  # in one step, so that no reader sees half of it
    shutil.rmtree(doomed)


def _digests(files: Mapping[str, bytes]) -> dict[str, Json]:
    return {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)} for name, content in files.items()
    }


@functools.cache
def _private_root(pid: int) -> Path:
    """A temporary directory removed at exit; a forked process, having another pid, gets its own."""
    root = Path(tempfile.mkdtemp(prefix="mtagen-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
