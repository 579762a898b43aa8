"""The tag of a cache's folder: ours says that we may clear the folder, another program's that we may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtagen.runtime.disk_cache import TAG, TAG_CONTENT, Cache, cache_key
from mtagen.version import __version__

SIGNATURE, OURS = TAG_CONTENT.splitlines(keepends=True)  # the first line is that of all programs
FOREIGN = {
    "another program's": SIGNATURE + b"# Made by another program.\n",
    "no program's": SIGNATURE,
    "one that says more": TAG_CONTENT + b"# And by another program.\n",
    "one that says less": TAG_CONTENT[:-1],
    "empty": b"",
}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def entry(cache: Cache) -> Path:
    return cache.get_or_build("mta_fwd", "sm_90a", cache_key("source"), lambda: {"kernel.py": b"X = 1\n"}).path


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_with_another_tag_is_left_alone(cache: Cache, content: bytes) -> None:
    """Even where all in it is called as entries are."""
    ours = entry(cache)
    theirs = cache.root / "1.0" / ours.parent.name / ours.name / "kernel.py"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"theirs")
    (cache.root / "1.0" / TAG).write_bytes(content)
    assert [one.path for one in cache.entries()] == [ours]
    assert cache.clear()[0] == 1
    assert not ours.exists()
    assert theirs.read_bytes() == b"theirs"


def test_a_folder_of_another_version_is_ours(cache: Cache) -> None:
    ours = entry(cache)
    older = cache.root / "0.0.1"
    (cache.root / __version__).rename(older)
    assert (older / TAG).read_bytes() == TAG_CONTENT
    assert cache.clear()[0] == 1
    assert not (older / ours.relative_to(cache.root / __version__)).exists()


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_tag_that_was_changed_is_written_anew(cache: Cache, content: bytes) -> None:
    """In the folder of our own version, with the next entry."""
    tag = cache.root / __version__ / TAG
    tag.parent.mkdir(parents=True)
    tag.write_bytes(content)
    entry(cache)
    assert tag.read_bytes() == TAG_CONTENT
    assert cache.clear()[0] == 1
