"""Checks what distributions hold: ``python .ci/contents.py FOLDER``.

A source distribution has the files that git tracks, so that its tests run; a wheel has those of the package alone.
Either has its metadata besides.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

MADE = ("PKG-INFO", "setup.cfg")  # by setuptools, at the root of a source distribution


def main(folder: Path) -> int:
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name}
    with tarfile.open(sdist) as archive:
        members = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    sources = {name for name in members if ".egg-info/" not in name and name not in MADE}
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {name for name in tracked if name.startswith("mtagen/")}
    return differences(sdist.name, sources, tracked) + differences(wheel.name, installed, package)


def differences(name: str, held: set[str], expected: set[str]) -> int:
    """How many files a distribution lacks, or has too many; prints each."""
    for one in sorted(expected - held):
        print(f"{name} lacks {one}")
    for one in sorted(held - expected):
        print(f"{name} has {one}, which does not belong there")
    return len(expected ^ held)


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]))))
