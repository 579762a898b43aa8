"""The folder of a training run: checkpoints and a log, which a kill at any moment leaves fit to resume from.

A file is written beside its place and then renamed. Its place therefore holds the file before or the new file, and
either is whole. A log is appended to, so that a kill can tear its last line and no other.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeAlias

import torch
import typer

from mtagen.errors import InputError, MtagenError, explain

LOG, CHECKPOINT = "log.jsonl", "checkpoint.pt"
UNFINISHED = ".new"  # added to the name of what is not whole yet

Entry: TypeAlias = dict[str, Any]


def publish(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place, then rename it.

    Args:
        path: the place. A file that is there stays until the new one is whole and on the disk.
        write: writes the content.
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


def publish_json(path: Path, value: Any) -> None:
    """Publish a report as indented JSON."""
    publish(path, lambda file: file.write(f"{json.dumps(value, indent=1)}\n".encode()))


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can say so."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    descriptor = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def default_interval(steps: int) -> int:
    """Return how many steps lie between checkpoints by default: a tenth of the run's, 1000 at most."""
    return max(1, min(1000, steps // 10))


def read_checkpoint(path: Path, *names: str) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Nothing in the file is executed.

    Args:
        path: the file.
        names: what the checkpoint must hold.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    try:
        if not path.stat().st_size:
            raise EOFError("the file is empty")
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():  # torch.load does not compare checksums
                raise zipfile.BadZipFile(f"the checksum of {damaged} is another")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its class depends on where the damage is
        raise unreadable(path, error) from error
    if not isinstance(state, dict) or not state.keys() >= set(names):
        holds = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise InputError(explain(str(path), holds, "is no checkpoint of this program", f"one with {', '.join(names)}"))
    return state


def unreadable(checkpoint: Path, error: BaseException) -> InputError:
    """Return the error that says which checkpoint is damaged."""
    remedy = "a whole copy in its place, its removal if an earlier checkpoint is beside it, or a new run elsewhere"
    return InputError(explain(str(checkpoint), error, "cannot be read as a checkpoint", remedy))


def check_settings(checkpoint: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Check that a checkpoint is of a run with our settings.

    Raises:
        InputError: a setting differs.
    """
    others = [name for name, value in ours.items() if theirs.get(name) != value]
    if others:
        got, legal = ({name: settings.get(name) for name in others} for settings in (theirs, ours))
        raise InputError(explain(str(checkpoint), got, "is of a run with other settings", legal))


class Log:
    """A file with a line of JSON for each entry.

    Args:
        path: the file.
        count: the field that says after how many steps an entry was made. An entry without it was made after none.
        writes: whether this process writes the file. Others only read what it held when they started.
    """

    def __init__(self, path: Path, count: str, writes: bool = True) -> None:
        self.path, self.count, self.writes = path, count, writes

    def check_start(self, checkpoint: Path | None, resume: bool) -> None:
        """Check that a run may start in the log's folder.

        Args:
            checkpoint: the folder's, if there is one.
            resume: whether the run is to go on from the checkpoint.

        Raises:
            InputError: the folder has another run, which is not to be resumed, or which has a log and no checkpoint.
        """
        folder = str(self.path.parent)
        if not resume and (self.path.exists() or checkpoint):
            found = "log" if self.path.exists() else "checkpoint"
            raise InputError(explain("folder", folder, f"has a {found} of another run", "--resume, or another folder"))
        if self.path.exists() and not checkpoint:
            remedy = f"{self.path.name} moved away to begin anew, or another folder"
            raise InputError(explain("folder", folder, "has a log and no checkpoint to resume from", remedy))

    def entries(self) -> list[Entry]:
        """Return all entries. A last line that a kill has torn is left out, and a message says so.

        Raises:
            InputError: there is no log, or another line is no entry.
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
                    typer.echo(f"{self.path}: line {len(lines) + 1} is torn, and was left out", err=True)
        return entries

    def _entry(self, line: bytes, number: int) -> Entry:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get(self.count, 0), int):
            place = f"{self.path}, line {number}"
            raise InputError(explain(place, line.decode(errors="replace"), "is no entry of a log", "the line removed"))
        return entry

    def continue_at(self, steps: int, first: Sequence[Entry] = ()) -> list[Entry]:
        """Drop what was logged after a checkpoint, or begin the log of a run that has made no step.

        Args:
            steps: of the checkpoint.
            first: entries that the log begins with.

        Returns:
            The entries that the log has now.

        Raises:
            InputError: there is no log though steps were made, or it is damaged.
        """
        entries = self.entries() if self.path.exists() else []
        if steps and not (entries if first else self.path.exists()):
            folder = str(self.path.parent)
            raise InputError(explain("folder", folder, "has a checkpoint and no log", f"{self.path.name} put back"))
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
        """Wait until all entries are on the disk, as they must be before a checkpoint that counts on them."""
        if self.writes and self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())


def _line(entry: Entry) -> bytes:
    return f"{json.dumps(entry)}\n".encode()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has stopped a run, which has saved its last step.

    Args:
        step: that step.
        checkpoint: where it was saved.
        resumed_by: what goes on from there.
    """

    def __init__(self, step: int, checkpoint: Path, resumed_by: str = "the same command with --resume goes on") -> None:
        super().__init__(f"stopped after step {step}, saved to {checkpoint}: {resumed_by}")
        self.step, self.checkpoint = step, checkpoint


class Interrupt:
    """While it is entered, Ctrl-C sets :attr:`asked`, so that a loop can end its step and save it.

    A second Ctrl-C stops at once, as it does elsewhere.

    Args:
        quiet: whether no message says that the first Ctrl-C was heard.

    Attributes:
        asked: whether Ctrl-C was pressed.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.asked, self._quiet, self._installed = False, quiet, False

    def __enter__(self) -> Interrupt:
        # Only the main thread may handle signals, and whoever handles this one otherwise, or ignores it, means to.
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
        if not self._quiet:  # past Python's buffers, which this may have interrupted
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop without saving it\n")


def ignore_interrupts(worker: int) -> None:
    """Leave Ctrl-C, which reaches all processes of a terminal, to the process that a DataLoader's workers serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def one_line(program: str, quiet: bool = False) -> Iterator[None]:
    """Turn errors that a user can mend, and Ctrl-C after its checkpoint, into one line and an exit status.

    Args:
        program: its name, which the line begins with.
        quiet: whether another process says where Ctrl-C stopped the run.
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
