"""Processes that make up a gloo group, started once and then asked to run functions together."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)  # with NCCL the first call compiles its kernels


class Ranks:
    """Processes that run a function of a module together, in groups of any of these sizes.

    Args:
        sizes: the groups' sizes. The smaller ones leave out the first processes, so that a process's rank in a group is
            not that in the job.
        store: a file that does not exist, through which the processes meet.
        backend: ``gloo``, or ``nccl`` for a GPU each.
    """

    def __init__(self, sizes: tuple[int, ...], store: Path, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self._world = max(sizes)
        self._pipes, self._processes = [], []
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, sizes, str(store), backend, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(group, *arguments)`` returns on each rank of the group of this size."""
        pipes = self._pipes[self._world - size :]
        for pipe in pipes:
            pipe.send((size, function, arguments))
        answers = []
        for pipe in pipes:
            if not pipe.poll(2 * TIMEOUT.total_seconds()):
                self._kill()  # or the next run would take the late answer for its own
                raise TimeoutError("a process does not answer")
            answers.append(pipe.recv())
        failed = [trace for trace, _ in answers if trace]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it was killed
                pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def _serve(rank: int, sizes: tuple[int, ...], store: str, backend: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    world = max(sizes)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=TIMEOUT)
    groups = {size: dist.new_group(list(range(world - size, world))) for size in sizes}
    while (request := pipe.recv()) is not None:
        size, function, arguments = request
        try:
            pipe.send(("", function(groups[size], *arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
