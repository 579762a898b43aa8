"""Which backend serves which pass, and which of a backend's candidates.

``triton`` is the lowering "lift" (:mod:`.lift`), ``cuda`` the lowering "tile" (:mod:`.tile`), ``torch`` tiled
PyTorch ops. Where both kinds of kernels can do a pass, ``auto`` takes the one that is expected to be faster, and CUDA
where they are close: measured, where a table (:mod:`.tables`) has the shape, else scaled from the nearest measured
shape by planned work. Of the tiles of a Triton kernel and the variants of a CUDA pass, a table's is taken, else the
cheapest by the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

from ..errors import PlanError, explain
from ..spec import Spec
from .kernel import Kernel
from .lift.decode import decode_geometry
from .lift.operands import lift
from .lift.tiling import VECTOR_ROLES, Tile, proposals, table_key
from .tables import Shape, Table, variant_key
from .targets import Target
from .tile.backward import backward_candidates
from .tile.band import band
from .tile.decode import decode_candidates
from .tile.forward import forward_candidates

BACKENDS = ("auto", "cuda", "triton", "torch")
GENERATED = ("cuda", "triton")
PASSES = ("forward", "backward", "decode")
MAX_TERMS = 16  # the lifted prologue holds one vector per term
COST_MODEL = "cost model"
# CUDA's time over Triton's up to which auto takes CUDA: its calls take less than half of the CPU's time
# (benchmarks/NOTES.md, "Backends"), which a busy GPU hides and short sequences do not.
CUDA_UP_TO = 1.15
INSTALL = {"cuda": "pip install 'mtagen[cuda]'", "triton": "pip install triton"}


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
        variant: what tells the plan from other candidates for the same request, in words.
        cost: modelled multiprocessor cycles per score; of decode, per key.

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
    @property
    def variant(self) -> str: ...
    @property
    def cost(self) -> float: ...
    def rows_of_table(self) -> Iterable[tuple[str, str, str]]: ...


_CANDIDATES: Mapping[str, Callable[[Spec, Target], Iterable[FusedPass]]] = {
    "forward": forward_candidates,
    "backward": backward_candidates,
    "decode": decode_candidates,
}


@cache
def fused_candidates(pass_name: str, spec: Spec, target: Target) -> tuple[FusedPass, ...]:
    """The CUDA plans of one pass that fit the target, the cheapest by the cost model first.

    Raises:
        PlanError: none fits; the message names the limit.
    """
    return tuple(sorted(_CANDIDATES[pass_name](spec, target), key=lambda candidate: candidate.cost))


def fused_pass(pass_name: str, spec: Spec, target: Target, variant: str | None = None) -> FusedPass:
    """The CUDA plan of one pass, by default the cheapest.

    Raises:
        PlanError: none fits, or none is the variant; the message names the limit.
    """
    candidates = fused_candidates(pass_name, spec, target)
    for candidate in candidates:
        if variant in (None, candidate.variant):
            return candidate
    legal = [candidate.variant for candidate in candidates]
    raise PlanError(explain(f"{pass_name} variant", variant, f"is no candidate on {target.name}", legal))


def choose_variant(pass_name: str, spec: Spec, target: Target, tables: Sequence[Table]) -> tuple[str, str]:
    """The variant of a CUDA pass, and where the choice comes from.

    Raises:
        PlanError: none fits; the message names the limit.
    """
    cheapest, *others = (plan.variant for plan in fused_candidates(pass_name, spec, target))
    for table in tables:
        measured = table.variants.get(variant_key(pass_name, spec))
        if measured in (cheapest, *others):
            return str(measured), table.source
    return cheapest, COST_MODEL if others else "the only one"


def triton_tiles(spec: Spec, target: Target, tables: Sequence[Table]) -> tuple[tuple[str, Tile, str], ...]:
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
    chosen = []
    for role in roles:
        key = table_key(role, spec, geometry)
        measured = [(table.tiles[key], table.source) for table in tables if key in table.tiles]
        rule = "rule" if role in VECTOR_ROLES else COST_MODEL
        tile, source = measured[0] if measured else (proposals(role, spec, geometry, target)[0], rule)
        chosen.append((role, tile, source))
    return tuple(chosen)


def choose_backends(
    spec: Spec, target: Target, available: Collection[str], tables: Sequence[Table]
) -> tuple[Choice, ...]:
    """What ``auto`` means on a GPU, pass by pass.

    Raises:
        PlanError: no available backend can do a pass; the message is Triton's if that is one of them.
    """
    triton = _refusal("triton", available, lambda: triton_tiles(spec, target, tables))
    return tuple(_choose(pass_name, spec, target, available, triton, tables) for pass_name in PASSES)


def _choose(
    pass_name: str,
    spec: Spec,
    target: Target,
    available: Collection[str],
    triton: PlanError | None,
    tables: Sequence[Table],
) -> Choice:
    cuda = _refusal("cuda", available, lambda: fused_pass(pass_name, spec, target))
    if cuda and triton:
        raise triton if "triton" in available else cuda
    if cuda:
        return Choice(pass_name, "triton", f"not cuda: {cuda}")
    if triton:
        return Choice(pass_name, "cuda", f"not triton: {triton}")
    ratio, source = cuda_over_triton(pass_name, spec, tables)
    if ratio <= CUDA_UP_TO:
        return Choice(pass_name, "cuda", f"{ratio:.2f} of triton's time, {source}")
    return Choice(pass_name, "triton", f"cuda takes {ratio:.2f} of its time, {source}")


def _refusal(backend: str, available: Collection[str], attempt: Callable[[], object]) -> PlanError | None:
    """Why ``backend`` cannot do it, if so."""
    if backend not in available:
        return PlanError(explain("backend", backend, "is not installed", INSTALL[backend]))
    try:
        attempt()
    except PlanError as error:
        return error
    return None


def cuda_over_triton(pass_name: str, spec: Spec, tables: Sequence[Table]) -> tuple[float, str]:
    """Expected time of CUDA's kernels over Triton's, and where the figure comes from.

    A measured shape stands for itself; another's ratio is that of the nearest one, scaled by how the ratio of planned
    work changes from there to here. Without measurements it is the ratio of planned work.
    """
    here = Shape.of(spec)
    measured: dict[Shape, float] = {}
    for table in tables:
        shapes = table.cuda_over_triton.get(pass_name, {})
        if here in shapes:
            return shapes[here], table.source
        measured = {**shapes, **measured}
    work = _work_ratio(pass_name, spec.kernel, spec.head_dim, spec.value_head_dim)
    if not measured:
        return work, "by planned work"
    nearest = min(measured, key=lambda shape: (shape.causal != here.causal, _distance(shape[:3], here[:3]), shape))
    cq, ck, d, _ = nearest
    ratio = measured[nearest] * work / _work_ratio(pass_name, (cq, ck), d, d)
    return ratio, f"scaled from {nearest}"


def _work_ratio(pass_name: str, kernel: tuple[int, int], d: int, dv: int) -> float:
    """Flop of CUDA's kernels over Triton's; decode's time is that of reading keys and values, whoever does it."""
    if pass_name == "decode":
        return 1.0
    spec = Spec(kernel, d, dv)
    return flops_per_score("cuda", spec)[pass_name] / flops_per_score("triton", spec)[pass_name]


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))


def flops_per_score(backend: str, spec: Spec) -> dict[str, int]:
    """Flop per (row, key) pair of the forward and the backward pass: 2 per multiply-add.

    Triton multiplies each of the lift's terms. CUDA convolves with mma's of 16 x 8 x 16 for 16 x 8 scores, 32 flop a
    score: scores in the forward pass; in the backward pass scores, their gradients, and for the weight's.
    """
    d, dv = spec.head_dim, spec.value_head_dim
    if backend == "cuda":
        taps = band(spec.cq, spec.ck)
        scores, gradients = 32 * taps.mma_of_scores, 2 * 32 * taps.mma_per_tile
        return {"forward": 2 * (d + dv) + scores, "backward": 2 * (3 * d + 2 * dv) + scores + gradients}
    terms = lift(spec).terms
    return {"forward": 2 * (terms * d + dv), "backward": 2 * (3 * terms * d + 2 * dv)}
