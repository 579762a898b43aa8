"""Train the decoder over several processes: ``torchrun --nproc-per-node 2 -m examples.gpt.train_distributed --help``.

Ranks form a mesh of ``data`` by ``context``. Each group of ``context`` ranks spreads its sequences over the group
(:class:`mtagen.distributed.ContextParallel`). Groups have different sequences. FSDP shards parameters, gradients and
the optimizer's state over all ranks. Batches are those of one process, whatever the mesh is. Losses are those of one
process except for rounding. A rank that fails ends the job, because torchrun stops the other ranks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mtagen.errors import InputError, explain
from mtagen.nn import MultiTokenAttention

from ..decoder import Decoder
from ..device import DEVICE
from ..runs import UNFINISHED, Interrupt, Interrupted, check_settings, one_line, sync_folder, unreadable
from .model import SIZES, make_decoder
from .train import (
    TEXT,
    BatchOption,
    CompileOption,
    LengthOption,
    LogEveryOption,
    LrOption,
    ResumeOption,
    Run,
    SaveEveryOption,
    SeedOption,
    Settings,
    SizeOption,
    StepsOption,
    TextOption,
    UntilOption,
    WarmupOption,
    check_choices,
)

VARIANTS = "mta", "talking-heads"  # the variants whose attention mtagen computes
METADATA = ".metadata"  # file of a checkpoint; PyTorch writes it last and unpickles it


class DistributedRun(Run):
    """A run of several processes. Each process makes one such run in the same folder, and rank 0 writes the log.

    Checkpoints are in ``checkpoints``, in a folder for each step, in the format of torch.distributed.checkpoint.
    Another number of ranks can resume from them. Reading a checkpoint executes what its pickles say (``SECURITY.md``),
    so resume only from checkpoints of runs that you trust.

    Args:
        settings: the settings of the run. ``batch`` and ``length`` are those of all ranks together.
        folder: see :class:`Run`. The folder is on a file system that all ranks share.
        text: see :class:`Run`.
        context: number of ranks that share a sequence, a divisor of the number of all ranks.
        resume: see :class:`Run`.
        compiled: whether ``torch.compile`` compiles each layer. FSDP gathers the parameters of a layer before the layer
            is called.

    Raises:
        InputError: see :class:`Run`; or ``context`` does not divide the number of ranks, or the groups of ranks cannot
            share the batch, or a sequence cannot be cut into equal chunks.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        text: Path = TEXT,
        *,
        context: int,
        resume: bool = False,
        compiled: bool = False,
    ) -> None:
        device = f"cuda:{os.environ['LOCAL_RANK']}" if DEVICE.type == "cuda" else "cpu"
        ranks = dist.get_world_size()
        if ranks % context:
            divisors = [count for count in range(1, ranks + 1) if ranks % count == 0]
            raise InputError(explain("context", context, f"must divide the number of ranks, {ranks}", divisors))
        groups = ranks // context
        if settings.batch % groups or settings.length % (2 * context):
            rule = f"batch must divide evenly among the groups of ranks, and length into {2 * context} equal chunks"
            legal = f"a multiple of {groups}, a multiple of {2 * context}"
            raise InputError(explain("batch, length", (settings.batch, settings.length), rule, legal))
        self.mesh = init_device_mesh(DEVICE.type, (groups, context), mesh_dim_names=("data", "context"))
        self.quiet = dist.get_rank() > 0
        super().__init__(settings, folder, text, device, resume=resume, compiled=compiled)

    def _make_model(self) -> Decoder:
        """Return the model. All ranks make the same model and then shard it."""
        settings = self.settings
        vocabulary, context = self.data.vocabulary, self.mesh["context"]
        model = make_decoder(SIZES[settings.size], settings.variant, vocabulary, context_parallel=context)
        spread = next(part.context_parallel for part in model.modules() if isinstance(part, MultiTokenAttention))
        assert spread is not None
        self.spread = spread  # of any layer, because all layers cut sequences alike
        model.to(self.device)
        on_gpu = self.device.type == "cuda"
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
        everyone = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
        for part in (*model.layers, model):
            fully_shard(part, mesh=everyone, mp_policy=precision)
        return model

    def _compile(self) -> None:
        for layer in self.model.layers:
            layer.compile(fullgraph=True)

    def _checkpoint(self) -> Path | None:
        """Return the last complete checkpoint, or None."""
        complete = (path.parent for path in self.folder.glob(f"checkpoints/*/{METADATA}"))
        return max((path for path in complete if path.name.isdecimal()), default=None)

    def _load(self, checkpoint: Path) -> None:
        self.step = int(checkpoint.name)
        state = self._progress()
        self._read(checkpoint, state)  # before the tensors, because their sizes follow from the settings
        check_settings(checkpoint, state["settings"], self.identity)
        self.generator.set_state(state["generator"])
        self.watch.seconds = state["seconds"]
        if self.step:
            state = self._tensors()
            self._read(checkpoint, state)
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def _read(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Read the entries of ``state`` from a checkpoint into ``state``."""
        try:
            load(state, checkpoint_id=checkpoint)
        except CheckpointException as errors:
            raise unreadable(checkpoint, next(iter(errors.failures.values()))[0]) from errors

    def _write(self) -> Path:
        """Write a checkpoint under another name, rename it, and remove earlier checkpoints.

        Each rank writes its shards. The checkpoint of step 0 has no tensors, because the parameters follow from the
        seed, and PyTorch would take a step of a new optimizer to read its state.
        """
        checkpoint = self.folder / f"checkpoints/{self.step:08}"
        unfinished = checkpoint.with_name(checkpoint.name + UNFINISHED)
        if not self.quiet:
            remove(unfinished)
        dist.barrier()
        # The files are on the disk when `save` returns.
        save(self._progress() | (self._tensors() if self.step else {}), checkpoint_id=unfinished)
        if not self.quiet:
            sync_folder(unfinished)
            remove(checkpoint)  # not complete, because the run would have resumed from a complete one
            unfinished.replace(checkpoint)
            sync_folder(checkpoint.parent)
            for path in checkpoint.parent.iterdir():
                if path != checkpoint and path.name.removesuffix(UNFINISHED).isdecimal():
                    remove(path)
        dist.barrier()
        return checkpoint

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _loss_of(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of this rank's part of a batch. FSDP averages the gradients of the ranks."""
        groups, group = self.mesh["data"].size(), self.mesh["data"].get_local_rank()
        mine = tokens[group::groups].to(self.device)
        logits = self.model(self.spread.shard(mine[:, :-1], 1))
        return F.cross_entropy(logits.flatten(0, 1).float(), self.spread.shard(mine[:, 1:], 1).flatten())

    def reported(self, loss: Tensor) -> float:
        """Return the mean of the loss over all ranks."""
        loss = loss.clone()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        return loss.item() / dist.get_world_size()

    def stops(self, interrupt: Interrupt) -> bool:
        """Return whether Ctrl-C has reached any rank, so that all ranks stop after the same step."""
        asked = torch.tensor(int(interrupt.asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX)  # on a CPU tensor, which does not wait for the GPUs
        return bool(asked)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint if it exists.

    The metadata goes first, so that a kill during the removal leaves no checkpoint that seems complete.
    """
    (checkpoint / METADATA).unlink(missing_ok=True)
    if checkpoint.exists():
        shutil.rmtree(checkpoint)


@record
def main(
    folder: Annotated[
        Path, typer.Argument(help="Folder for checkpoints and the log, on a file system shared by all ranks.")
    ],
    size: SizeOption = Settings.size,
    variant: Annotated[
        str, typer.Option(help="Attention of the model.", metavar="|".join(VARIANTS))
    ] = Settings.variant,
    text: TextOption = TEXT,
    steps: StepsOption = Settings.steps,
    batch: BatchOption = Settings.batch,
    length: LengthOption = Settings.length,
    lr: LrOption = Settings.lr,
    warmup: WarmupOption = Settings.warmup,
    seed: SeedOption = Settings.seed,
    context: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks that share a sequence.", show_default="all ranks")
    ] = None,
    resume: ResumeOption = False,
    compiled: CompileOption = False,
    until: UntilOption = None,
    log_every: LogEveryOption = 10,
    save_every: SaveEveryOption = None,
) -> None:
    """Train a decoder on the bytes of a text, with its sequences and its parameters spread over ranks."""
    check_choices(size, variant, VARIANTS)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    settings = Settings(size, variant, steps, batch, length, lr, warmup, seed)
    with one_line("train_distributed", quiet=dist.get_rank() > 0):
        run = DistributedRun(
            settings, folder, text, context=context or dist.get_world_size(), resume=resume, compiled=compiled
        )
        try:
            run.train(until, log_every, save_every)
        except Interrupted:  # all ranks raise this after the same step
            dist.destroy_process_group()
            raise
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
