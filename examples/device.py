"""The ``--device`` option of the examples."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import torch
import typer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def present(name: str | torch.device) -> torch.device:
    """Return the device of a name, such as ``cpu`` or ``cuda:1``.

    Raises:
        typer.BadParameter: this machine has no such device.
    """
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    here = ["cpu", *(["cuda", *gpus] if gpus else [])]
    if str(name) not in here:
        raise typer.BadParameter(f"{name} is none of {', '.join(here)}")
    return torch.device(name)


_Option = typer.Option("--device", parser=present, metavar="NAME", help="Device to run on: cpu, cuda or cuda:N.")
DeviceOption: TypeAlias = Annotated[torch.device, _Option]
