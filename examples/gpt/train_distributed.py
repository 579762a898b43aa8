"""Train the decoder over several processes: ``torchrun --nproc-per-node 2 -m examples.gpt.train_distributed --help``.

Ranks are a mesh of ``data`` by ``context``. Each group of ``context`` ranks spreads its sequences over them
(:class:`mtagen.distributed.ContextParallel`), groups have different sequences, and FSDP shards parameters, gradients
and the optimizer's state over all ranks. Batches, and so the losses but for rounding, are those of one process,
whatever the mesh is. A rank that fails ends the job: torchrun stops the others.
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

from mtagen.errors import InputError
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

VARIANTS = "mta", "talking-heads"  # those that mtagen computes
METADATA = ".metadata"  # a checkpoint's file that PyTorch writes last, and unpickles


class DistributedRun(Run):
    """A run of several processes, each of which makes one in the same folder; the first one writes the log.

    Checkpoints are in ``checkpoints``, a folder for each step, in the format of torch.distributed.checkpoint: another
    number of ranks can go on from them. To read one executes what its pickles say (``SECURITY.md``), so resume only
    from checkpoints of runs that you trust.

    Args:
        settings: what to train; ``batch`` and ``length`` are of all ranks together.
        folder: as of :class:`Run`, on a file system that all ranks share.
        text: as of :class:`Run`.
        context: ranks that share a sequence, a divisor of their number.
        resume: as of :class:`Run`.
        compiled: whether ``torch.compile`` compiles each layer, whose parameters FSDP gathers before it.

    Raises:
        InputError: as of :class:`Run`; or the batch cannot be shared among the groups of ranks, or a sequence not cut
            into equal chunks.
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
            raise InputError(f"{ranks} ranks are no groups of {context}")
        groups = ranks // context
        if settings.batch % groups or settings.length % (2 * context):
            got = f"batch {settings.batch}, length {settings.length}"
            rule = f"its sequences are shared by {groups} and each is cut into {2 * context} equal chunks"
            raise InputError(f"{got}: {rule}")
        self.mesh = init_device_mesh(DEVICE.type, (groups, context), mesh_dim_names=("data", "context"))
        self.quiet = dist.get_rank() > 0
        super().__init__(settings, folder, text, device, resume=resume, compiled=compiled)

    def _make_model(self) -> Decoder:
        """The same on all ranks, then sharded."""
        settings = self.settings
        vocabulary, context = self.data.vocabulary, self.mesh["context"]
        model = make_decoder(SIZES[settings.size], settings.variant, vocabulary, context_parallel=context)
        spread = next(part.context_parallel for part in model.modules() if isinstance(part, MultiTokenAttention))
        assert spread is not None
        self.spread = spread  # any layer's: all cut sequences alike
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
        """The last one that is complete."""
        complete = (path.parent for path in self.folder.glob(f"checkpoints/*/{METADATA}"))
        return max((path for path in complete if path.name.isdecimal()), default=None)

    def _load(self, checkpoint: Path) -> None:
        self.step = int(checkpoint.name)
        state = self._progress()
        self._read(checkpoint, state)  # before tensors, whose sizes follow from the settings
        check_settings(checkpoint, state["settings"], self.identity)
        self.generator.set_state(state["generator"])
        self.watch.seconds = state["seconds"]
        if self.step:
            state = self._tensors()
            self._read(checkpoint, state)
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def _read(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Read what a state names."""
        try:
            load(state, checkpoint_id=checkpoint)
        except CheckpointException as errors:
            raise unreadable(checkpoint, next(iter(errors.failures.values()))[0]) from errors

    def _write(self) -> Path:
        """Write a checkpoint beside its place, each rank its shards, rename it, and remove those before.

        That of step 0 has no tensors: they follow from the seed, and to read the optimizer's state would take a step.
        """
        checkpoint = self.folder / f"checkpoints/{self.step:08}"
        unfinished = checkpoint.with_name(checkpoint.name + UNFINISHED)
        if not self.quiet:
            remove(unfinished)
        dist.barrier()
        save(self._progress() | (self._tensors() if self.step else {}), checkpoint_id=unfinished)  # on the disk
        if not self.quiet:
            sync_folder(unfinished)
            remove(checkpoint)  # is not complete, or the run would have gone on from it
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
        """The mean loss of this rank's part of a batch. FSDP takes the mean of the ranks' gradients."""
        groups, group = self.mesh["data"].size(), self.mesh["data"].get_local_rank()
        mine = tokens[group::groups].to(self.device)
        logits = self.model(self.spread.shard(mine[:, :-1], 1))
        return F.cross_entropy(logits.flatten(0, 1).float(), self.spread.shard(mine[:, 1:], 1).flatten())

    def reported(self, loss: Tensor) -> float:
        """The mean over ranks."""
        loss = loss.clone()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        return loss.item() / dist.get_world_size()

    def stops(self, interrupt: Interrupt) -> bool:
        """Whether Ctrl-C has reached a rank, so that all stop after the same step."""
        asked = torch.tensor(int(interrupt.asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX)  # of the CPU, which does not wait for GPUs
        return bool(asked)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, if it is there, so that what a kill leaves of it is not taken for a complete one."""
    (checkpoint / METADATA).unlink(missing_ok=True)
    if checkpoint.exists():
        shutil.rmtree(checkpoint)


@record
def main(
    folder: Annotated[Path, typer.Argument(help="For checkpoints and the log, on a file system that all ranks share.")],
    size: SizeOption = Settings.size,
    variant: Annotated[str, typer.Option(help="Of its attention.", metavar="|".join(VARIANTS))] = Settings.variant,
    text: TextOption = TEXT,
    steps: StepsOption = Settings.steps,
    batch: BatchOption = Settings.batch,
    length: LengthOption = Settings.length,
    lr: LrOption = Settings.lr,
    warmup: WarmupOption = Settings.warmup,
    seed: SeedOption = Settings.seed,
    context: Annotated[int | None, typer.Option(min=1, help="Ranks that share a sequence.", show_default="all")] = None,
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
        except Interrupted:  # on all ranks after the same step
            dist.destroy_process_group()
            raise
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
