"""The folder of a training run: checkpoints and a log. A kill at any moment leaves a folder to resume from.

A file is written under another name and then renamed. Its path therefore holds either the previous file or the new
file, and both are complete. A log is appended to, so a kill can tear only its last line.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeAlias

import torch
import typer

import mtagen
from mtagen.errors import InputError, MtagenError, explain

LOG, CHECKPOINT = "log.jsonl", "checkpoint.pt"
UNFINISHED = ".new"  # suffix of a file or folder that is not complete yet

Entry: TypeAlias = dict[str, Any]


def publish(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name in its folder, then rename it.

    Args:
        path: the path of the file. A file at this path stays until the new file is complete and on the disk.
        write: writes the content to the file that it gets.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the content does
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def publish_bytes(path: Path, content: bytes) -> None:
    """Publish a file with this content."""
    publish(path, lambda file: file.write(content))


def publish_json(path: Path, value: Any) -> None:
    """Publish a report as indented JSON."""
    publish_bytes(path, f"{json.dumps(value, indent=1)}\n".encode())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk. Windows cannot sync a folder, so return at once there."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    descriptor = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def environment(device: torch.device) -> dict[str, str | None]:
    """Return the device, the versions and the commit, for a log whose figures depend on them."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "triton": version("triton") if find_spec("triton") else None,
        "mtagen": mtagen.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the commit of this checkout, or None if git does not know it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Stopwatch:
    """A stopwatch that counts the seconds in which a device works on steps.

    Each start and stop waits until the device has finished the work that it was given.

    Args:
        device: the device.

    Attributes:
        seconds: the seconds counted until the watch was last stopped.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Start counting from :attr:`seconds`."""
        self._started = self._now()

    def stop(self) -> float:
        """Stop counting, and return :attr:`seconds`."""
        if self._started is not None:
            self.seconds += self._now() - self._started
            self._started = None
        return self.seconds

    @contextmanager
    def paused(self) -> Iterator[float]:
        """Stop in a ``with`` block, whose target is :attr:`seconds`. A running watch starts again after the block."""
        was_going = self._started is not None
        yield self.stop()
        if was_going:
            self.start()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def default_interval(steps: int) -> int:
    """Return the default number of steps between checkpoints: a tenth of the run's ``steps``, at most 1000."""
    return max(1, min(1000, steps // 10))


def read_checkpoint(path: Path, *names: str) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Nothing in the file is executed.

    Args:
        path: the file.
        names: the keys that the checkpoint must hold.

    Raises:
        InputError: the file cannot be read, or lacks one of the keys.
    """
    try:
        if not path.stat().st_size:
            raise EOFError("the file is empty")
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch.load does not compare checksums
                raise zipfile.BadZipFile(f"the checksum of {damaged} is another")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the class of the error depends on where the damage is
        raise unreadable(path, error) from error
    if not isinstance(state, dict) or not state.keys() >= set(names):
        holds = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise InputError(
            explain(str(path), holds, "is no checkpoint of this program", f"a checkpoint with {', '.join(names)}")
        )
    return state


def unreadable(checkpoint: Path, error: BaseException) -> InputError:
    """Return the error that names a damaged checkpoint."""
    remedy = (
        "an undamaged copy; if the folder has an earlier checkpoint, remove this one; or a new run in another folder"
    )
    return InputError(explain(str(checkpoint), error, "cannot be read as a checkpoint", remedy))


def check_settings(checkpoint: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Check that a checkpoint comes from a run with this run's settings.

    Args:
        checkpoint: the path of the checkpoint, for the error.
        theirs: the settings in the checkpoint.
        ours: the settings of this run.

    Raises:
        InputError: a setting differs.
    """
    others = [name for name, value in ours.items() if theirs.get(name) != value]
    if others:
        got, saved = ({name: settings.get(name) for name in others} for settings in (ours, theirs))
        rule = f"{checkpoint} was written by a run with other settings"
        raise InputError(explain("settings", got, rule, f"{saved}, or another folder"))


class Log:
    """A file with a line of JSON for each entry.

    Args:
        path: the file.
        count: the field that holds the number of steps before an entry. An entry without this field was made before the
            first step.
        writes: whether this process writes the file. Other processes read only the entries from before they started.
    """

    def __init__(self, path: Path, count: str, writes: bool = True) -> None:
        self.path, self.count, self.writes = path, count, writes

    def check_start(self, checkpoint: Path | None, resume: bool) -> None:
        """Check that a run may start in the log's folder.

        Args:
            checkpoint: the folder's checkpoint, or None if the folder has none.
            resume: whether the run shall continue from the checkpoint.

        Raises:
            InputError: the folder has a run, and ``resume`` is not set; or the folder has a log and no checkpoint.
        """
        folder = str(self.path.parent)
        if not resume and (self.path.exists() or checkpoint):
            found = "log" if self.path.exists() else "checkpoint"
            raise InputError(
                explain("folder", folder, f"has a {found} of another run", "--resume to continue it, or another folder")
            )
        if self.path.exists() and not checkpoint:
            remedy = f"another folder, or this one after moving {self.path.name} away"
            raise InputError(explain("folder", folder, "has a log and no checkpoint to resume from", remedy))

    def entries(self) -> list[Entry]:
        """Return all entries. If a kill has torn the last line, leave the line out and print a message.

        Raises:
            InputError: the log does not exist, or a line other than the last is no entry.
        """
        if not self.path.exists():
            raise InputError(explain("log", str(self.path), "does not exist", f"a {LOG} that training wrote"))
        *lines, last = self.path.read_bytes().split(b"\n")
        entries = [self._entry(line, number) for number, line in enumerate(lines, 1)]
        if last:
            try:
                entries.append(self._entry(last, len(lines) + 1))
            except InputError:
                if self.writes:
                    typer.echo(f"{self.path}: line {len(lines) + 1} is incomplete, and was left out", err=True)
        return entries

    def _entry(self, line: bytes, number: int) -> Entry:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get(self.count, 0), int):
            place = f"{self.path}, line {number}"
            raise InputError(
                explain(place, line.decode(errors="replace"), "is no entry of a log", "a JSON object, or no such line")
            )
        return entry

    def continue_at(self, steps: int, first: Sequence[Entry] = ()) -> list[Entry]:
        """Drop the entries after a checkpoint, or begin the log of a run that has made no step.

        Args:
            steps: the number of steps in the checkpoint.
            first: the entries that a new log begins with.

        Returns:
            The entries that the log has now.

        Raises:
            InputError: steps were made and the log does not exist, or the log is damaged.
        """
        entries = self.entries() if self.path.exists() else []
        if steps and not (entries if first else self.path.exists()):
            folder = str(self.path.parent)
            raise InputError(
                explain(
                    "folder",
                    folder,
                    "has a checkpoint and no log",
                    f"another folder, or this one with its {self.path.name} restored",
                )
            )
        kept = [entry for entry in entries or first if entry.get(self.count, 0) <= steps]
        if self.writes:
            publish(self.path, lambda file: file.writelines(map(_line, kept)))
        return kept

    def append(self, entry: Entry) -> None:
        """Add an entry."""
        if self.writes:
            with self.path.open("ab") as file:
                file.write(_line(entry))

    def sync(self) -> None:
        """Wait until all entries are on the disk. Call this before writing a checkpoint that relies on the entries."""
        if self.writes and self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())


def _line(entry: Entry) -> bytes:
    return f"{json.dumps(entry)}\n".encode()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has stopped a run, and the run has saved its last step.

    Args:
        step: the number of the last step.
        checkpoint: the path of the saved checkpoint.
        resumed_by: the end of the message, which says how to continue the run.
    """

    def __init__(
        self, step: int, checkpoint: Path, resumed_by: str = "run the same command with --resume to continue"
    ) -> None:
        super().__init__(f"stopped after step {step}, saved to {checkpoint}: {resumed_by}")
        self.step, self.checkpoint = step, checkpoint


class Interrupt:
    """A context in which Ctrl-C sets :attr:`asked`, so that a loop can end its step and save it.

    A second Ctrl-C stops the program at once, as Ctrl-C usually does.

    Args:
        quiet: whether to print no message at the first Ctrl-C.

    Attributes:
        asked: whether Ctrl-C was pressed.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.asked, self._quiet, self._installed = False, quiet, False

    def __enter__(self) -> Interrupt:
        # Only the main thread may set a handler. A handler other than the default was set on purpose, so keep it.
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._ask)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self._quiet:
            # os.write bypasses Python's buffers, because the signal may have interrupted a write to them.
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop without saving it\n")


def ignore_interrupts(worker: int) -> None:
    """Make a worker of a DataLoader ignore Ctrl-C.

    Ctrl-C reaches all processes of a terminal. Only the process that the worker serves shall handle Ctrl-C.

    Args:
        worker: the number of the worker, which DataLoader passes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def one_line(program: str, quiet: bool = False) -> Iterator[None]:
    """Turn :class:`Interrupted` and errors that a user can correct into one line and an exit status.

    Args:
        program: the name of the program, which the line begins with.
        quiet: whether another process prints where Ctrl-C stopped the run.
    """
    try:
        yield
    except MtagenError as error:
        typer.echo(f"{program}: {error}", err=True)
        raise SystemExit(2) from None
    except Interrupted as stop:
        if not quiet:
            typer.echo(f"{program}: {stop}", err=True)
        raise SystemExit(128 + signal.SIGINT) from None
