"""Which backend serves which pass.

``triton`` is the lowering "lift" (:mod:`.lift`), ``cuda`` the lowering "tile" (:mod:`.fused`), ``torch`` tiled PyTorch
ops. Where both kinds of kernels can do a pass, ``auto`` takes the one that is expected to be faster: measured, where
``tables/<target>_backends.json`` has the shape, else scaled from the nearest measured shape by planned work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple, Protocol

from ..errors import PlanError, explain
from ..spec import Spec
from .decode import decode_geometry
from .fused.backward import fused_backward
from .fused.band import band
from .fused.decode import fused_decode
from .fused.forward import fused_forward
from .fused.kernel import Kernel
from .lift import lift
from .targets import Target
from .tiling import VECTOR_ROLES, Tile, choose

BACKENDS = ("auto", "cuda", "triton", "torch")
GENERATED = ("cuda", "triton")
PASSES = ("forward", "backward", "decode")
MAX_TERMS = 16  # the lifted prologue holds one vector per term
_INSTALL = {"cuda": "pip install 'mtagen[cuda]'", "triton": "pip install triton"}


class Choice(NamedTuple):
    """What computes one pass, and why."""

    pass_name: str
    backend: str
    reason: str


class FusedPass(Protocol):
    """What the plans of the fused passes have in common.

    Attributes:
        spec: the request.
        target: name of the target.
        name: name of the source file.
        template: the template that prints the plan.
        kernels: the pass's kernels.

    ``rows_of_table()`` gives facts for the plan's table, as (section, name, value).
    """

    @property
    def spec(self) -> Spec: ...
    @property
    def target(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def template(self) -> str: ...
    @property
    def kernels(self) -> tuple[Kernel, ...]: ...
    def rows_of_table(self) -> Iterable[tuple[str, str, str]]: ...


_FUSED: Mapping[str, Callable[[Spec, Target], FusedPass]] = {
    "forward": fused_forward,
    "backward": fused_backward,
    "decode": fused_decode,
}


@cache
def fused_pass(pass_name: str, spec: Spec, target: Target) -> FusedPass:
    """The CUDA plan of one pass.

    Raises:
        PlanError: it does not fit; the message names the limit.
    """
    return _FUSED[pass_name](spec, target)


def triton_tiles(spec: Spec, target: Target) -> tuple[tuple[str, Tile, str], ...]:
    """(role, tile, source of the choice) of every Triton kernel.

    Raises:
        PlanError: one does not fit; the message names the limit.
    """
    if spec.dtype not in target.dtypes:
        raise PlanError(explain("dtype", spec.dtype, f"{target.name} has no kernels for it", target.dtypes))
    geometry = lift(spec)
    if geometry.terms > MAX_TERMS:
        raise PlanError(
            explain(
                "kernel",
                spec.kernel,
                f"min(cq, ck) is {geometry.terms}, {geometry.terms - MAX_TERMS} over the limit",
                f"min(cq, ck) <= {MAX_TERMS} for triton, any for backend='torch'",
            )
        )
    contractions = (contraction.role for contraction in geometry.contractions)
    roles = ("forward", "scores", *contractions, *decode_geometry(spec).roles, *VECTOR_ROLES)
    return tuple((role, *choose(role, spec, geometry, target)) for role in roles)


def choose_backends(spec: Spec, target: Target, available: Collection[str]) -> tuple[Choice, ...]:
    """What ``auto`` means on a GPU, pass by pass.

    Raises:
        PlanError: no available backend can do a pass; the message is Triton's if that is one of them.
    """
    triton = _refusal("triton", available, lambda: triton_tiles(spec, target))
    return tuple(_choose(pass_name, spec, target, available, triton) for pass_name in PASSES)


def _choose(pass_name: str, spec: Spec, target: Target, available: Collection[str], triton: PlanError | None) -> Choice:
    cuda = _refusal("cuda", available, lambda: fused_pass(pass_name, spec, target))
    if cuda and triton:
        raise triton if "triton" in available else cuda
    if cuda:
        return Choice(pass_name, "triton", f"not cuda: {cuda}")
    if triton:
        return Choice(pass_name, "cuda", f"not triton: {triton}")
    ratio, source = cuda_over_triton(pass_name, spec, target)
    if ratio <= 1:
        return Choice(pass_name, "cuda", f"{ratio:.2f} of triton's time, {source}")
    return Choice(pass_name, "triton", f"cuda takes {ratio:.2f} of its time, {source}")


def _refusal(backend: str, available: Collection[str], attempt: Callable[[], object]) -> PlanError | None:
    """Why ``backend`` cannot do it, if so."""
    if backend not in available:
        return PlanError(explain("backend", backend, "is not installed", _INSTALL[backend]))
    try:
        attempt()
    except PlanError as error:
        return error
    return None


def cuda_over_triton(pass_name: str, spec: Spec, target: Target) -> tuple[float, str]:
    """Expected time of CUDA's kernels over Triton's, and where the figure comes from.

    A measured shape stands for itself; another's ratio is that of the nearest one, scaled by how the ratio of planned
    work changes from there to here. Without measurements it is the ratio of planned work.
    """
    measured = _table(target.name).get(pass_name, {})
    work = _work_ratio(pass_name, spec.kernel, spec.head_dim, spec.value_head_dim)
    if not measured:
        return work, "by planned work"
    here = (*spec.kernel, spec.head_dim)
    nearest = min(measured, key=lambda shape: (_distance(shape, here), shape))
    if nearest == here:
        return measured[here], "measured"
    cq, ck, d = nearest
    ratio = measured[nearest] * work / _work_ratio(pass_name, (cq, ck), d, d)
    return ratio, f"scaled from ({cq}, {ck}), head dim {d}"


def _work_ratio(pass_name: str, kernel: tuple[int, int], d: int, dv: int) -> float:
    """Flop of CUDA's kernels over Triton's; decode's time is that of reading keys and values, whoever does it."""
    if pass_name == "decode":
        return 1.0
    spec = Spec(kernel, d, dv)
    return flops_per_score("cuda", spec)[pass_name] / flops_per_score("triton", spec)[pass_name]


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))


@cache
def _table(target: str) -> Mapping[str, Mapping[tuple[int, ...], float]]:
    """Pass -> (cq, ck, head_dim) -> measured time of CUDA's kernels over Triton's."""
    path = files(__package__) / "tables" / f"{target}_backends.json"
    if not path.is_file():
        return {}
    ratios = json.loads(path.read_text())["cuda_over_triton"]
    return {
        pass_name: {tuple(map(int, shape.split(","))): ratio for shape, ratio in shapes.items()}
        for pass_name, shapes in ratios.items()
    }


def flops_per_score(backend: str, spec: Spec) -> dict[str, int]:
    """Flop per (row, key) pair of the forward and the backward pass, from DESIGN §2 and §3: 2 per multiply-add.

    Triton multiplies each of the lift's terms. CUDA convolves with mma's of 16 x 8 x 16 for 16 x 8 scores, 32 flop a
    score, in the forward pass once, in the backward pass three times: scores, their gradients, the weight's.
    """
    d, dv = spec.head_dim, spec.value_head_dim
    if backend == "cuda":
        convolution = 32 * band(spec.cq, spec.ck).mma_per_tile
        return {"forward": 2 * (d + dv) + convolution, "backward": 2 * (3 * d + 2 * dv) + 3 * convolution}
    terms = lift(spec).terms
    return {"forward": 2 * (terms * d + dv), "backward": 2 * (3 * terms * d + 2 * dv)}
