"""The environment variables that mtagen reads. No other module reads the environment."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import SpecError, explain

LOCK_TIMEOUT = 600.0  # seconds


class Setting(NamedTuple):
    """One row of ``mtagen show-config``, all text."""

    name: str
    value: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Config:
    """The settings in force, read by :meth:`from_env` and explained by :meth:`describe`."""

    cache_dir: Path
    cache_lock_timeout: float
    check_values: bool
    shortcuts: bool
    triton_interpret: bool

    @classmethod
    def from_env(cls) -> Config:
        """Read the configuration from the environment; an empty variable counts as unset.

        Raises:
            SpecError: ``MTAGEN_CACHE_LOCK_TIMEOUT`` is not a number of seconds >= 0; no cache directory is set and no
                home directory is known.
        """
        return cls(
            cache_dir=_cache_dir(),
            cache_lock_timeout=_seconds("MTAGEN_CACHE_LOCK_TIMEOUT", LOCK_TIMEOUT),
            check_values=_flag("MTAGEN_CHECK_VALUES"),
            shortcuts=_flag("MTAGEN_SHORTCUTS", default="1"),
            triton_interpret=_flag("TRITON_INTERPRET"),
        )

    def describe(self) -> list[Setting]:
        """Return a row for each variable: name, value in force, default and meaning."""
        return [
            Setting(
                "MTAGEN_CACHE_DIR",
                str(self.cache_dir),
                "$XDG_CACHE_HOME/mtagen, else ~/.cache/mtagen",
                "root of the on-disk kernel cache",
            ),
            Setting(
                "MTAGEN_CACHE_LOCK_TIMEOUT",
                f"{self.cache_lock_timeout:g}",
                f"{LOCK_TIMEOUT:g}",
                "seconds to wait for a process that builds the same kernel, before building it privately",
            ),
            Setting(
                "MTAGEN_CHECK_VALUES",
                str(int(self.check_values)),
                "0",
                "1: calls on a GPU wait for it, and check tables of pages, lengths and boundaries as on the CPU",
            ),
            Setting(
                "MTAGEN_SHORTCUTS",
                str(int(self.shortcuts)),
                "1",
                "0: every call goes through PyTorch's dispatcher, and tuning times passes instead of single kernels",
            ),
            Setting(
                "TRITON_INTERPRET",
                str(int(self.triton_interpret)),
                "0",
                "Triton's own switch, read when it is imported: run its kernels in the CPU interpreter",
            ),
        ]


def _cache_dir() -> Path:
    if configured := os.environ.get("MTAGEN_CACHE_DIR"):
        try:
            return Path(configured).expanduser().absolute()
        except RuntimeError:
            rule = "begins with a home directory that is unknown"
            raise SpecError(explain("MTAGEN_CACHE_DIR", configured, rule, "an absolute path")) from None
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    return (xdg if xdg.is_absolute() else _home() / ".cache") / "mtagen"


def _home() -> Path:
    with suppress(RuntimeError):  # raised if HOME is unset and passwd has no such user, as in many containers
        if (home := Path.home()).is_absolute():
            return home
    rule = "is not set, and the home directory, the default place of the cache, is unknown"
    raise SpecError(explain("MTAGEN_CACHE_DIR", None, rule, "an absolute path there, or in HOME"))


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:  # NaN fails as well
        raise SpecError(explain(name, text, "must be a number of seconds", ">= 0"))
    return value


def _flag(name: str, default: str = "") -> bool:
    # The spellings Triton itself accepts.
    return (os.environ.get(name) or default).lower() in ("1", "true", "yes", "on", "y")
