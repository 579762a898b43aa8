"""Plans of the passes of the lowering "lift": their kernels, and a tile for each kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from ...errors import PlanError, explain
from ...spec import Spec
from ..kernel import Kernel
from ..passes import Fields, PassPlan, check_convolves_only, check_learned, describe
from ..splits import SplitRule, split_rule
from ..targets import Target, get_target
from .bias import bias
from .decode import DECODE_ROLES, Decode, decode_geometry
from .kernels import DOCUMENT_TILE, pass_kernels
from .operands import Lift, lift
from .tiling import (
    TENSOR_ROLES,
    VECTOR_ROLES,
    Tile,
    check_measured,
    cost,
    proposals,
    resident_ctas,
    resources,
    table_key,
)

MAX_TERMS = 16  # upper limit, because the kernel that lifts holds one vector per term
# Upper limit of the workspace for gradients of scores: eight heads of N = 8192, or two of N = 16384. All kernels are
# launched once for as many heads as fit.
WORKSPACE_BYTES = 5 * 2**28
HEADS_PER_SECTION = 8


@dataclass(frozen=True)
class LiftPass(PassPlan):
    """One pass made of Triton kernels.

    Attributes:
        spec: the request.
        target: name of the target.
        pass_name: ``forward``, ``backward`` or ``decode``.
        tiles: (role, tile) of each kernel.
        workspace_bytes: upper limit of the backward pass's workspace for the gradient of the scores
            and the lifted operand. One chunk of rows of one key head is allocated even if it needs
            more.
        heads_per_section: heads whose blocks the forward kernel interleaves, the longest first.
    """

    spec: Spec
    target: str
    pass_name: str
    tiles: tuple[tuple[str, Tile], ...]
    workspace_bytes: int = WORKSPACE_BYTES
    heads_per_section: int = HEADS_PER_SECTION

    lowering = "lift"
    backend = "triton"

    @cached_property
    def lift(self) -> Lift:
        """Geometry of the lowering."""
        return lift(self.spec)

    @cached_property
    def decode(self) -> Decode:
        """Geometry of decode."""
        return decode_geometry(self.spec)

    def tile(self, role: str) -> Tile:
        """Return the tile of one kernel."""
        return dict(self.tiles)[role]

    @property
    def cost(self) -> float:
        return sum(self.decision_cost(key) for key in self.decisions())

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return pass_kernels(self.pass_name, self.spec, self.target, self.lift, dict(self.tiles), self.heads_per_section)

    # ---- Decisions: a tile for each kernel that multiplies matrices. Tiles of other kernels follow a rule.

    @cached_property
    def _roles(self) -> Mapping[str, str]:
        """Roles by the key of their decision."""
        roles = (role for role, _ in self.tiles if role not in VECTOR_ROLES)
        return {table_key(role, self.spec, self.lift): role for role in roles}

    def decisions(self) -> Mapping[str, Fields]:
        return {key: asdict(self.tile(role)) for key, role in self._roles.items()}

    def role(self, key: str) -> str:
        """Return the role of the kernel that a decision is about.

        Raises:
            PlanError: the decision is none of this pass.
        """
        self.check_key(key)
        return self._roles[key]

    def alternatives(self, key: str) -> Sequence[LiftPass]:
        tiles = proposals(self.role(key), self.spec, self.lift, get_target(self.target))
        plans = [self.decided(key, asdict(tile)) for tile in tiles]
        if self in plans:
            return plans
        return sorted([self, *plans], key=lambda plan: plan.decision_cost(key))  # this plan's tile was only measured

    def decided(self, key: str, fields: Fields) -> LiftPass:
        chosen = self.role(key)
        if fields.keys() != Tile.__dataclass_fields__.keys():
            raise PlanError(explain(key, describe(fields), "is no tile", tuple(Tile.__dataclass_fields__)))
        new_tile = Tile(**fields)
        check_measured(chosen, new_tile, self.spec, self.lift, get_target(self.target))
        return replace(self, tiles=tuple((role, new_tile if role == chosen else tile) for role, tile in self.tiles))

    def decision_cost(self, key: str) -> float:
        role = self.role(key)
        return cost(role, self.tile(role), self.spec, self.lift, get_target(self.target))

    def split_rule(self, role: str) -> SplitRule:
        """Return the rule for the number of splits of a decode kernel."""
        tile, target = self.tile(role), get_target(self.target)
        resident = resident_ctas(resources(role, tile, self.spec, self.lift, target), tile, target)
        return split_rule(resident, tile.block_n, target.multiprocessors)

    def rows_of_table(self) -> Iterator[tuple[str, str, str]]:
        spec, geometry, section = self.spec, self.lift, self.pass_name
        operand = "keys" if geometry.lifts_keys else "queries"
        if section != "decode":
            yield section, "lifted", f"{operand}, {geometry.terms} terms of {geometry.taps} taps"
            for band in geometry.bands:
                yield (
                    section,
                    f"band{band.suffix}",
                    f"{band.width} diagonals selected, summed from terms on {band.reach}",
                )
            if not geometry.bands:
                yield section, "band", "0 diagonals selected"
            if geometry.bias:
                entries = f"{geometry.bias.entries} entries a head"
                yield section, "bias", f"{entries}, the convolution of what scores adds by distance"
        if spec.packed:
            yield section, "documents", f"scheduled in tiles of {DOCUMENT_TILE}, read by pointers"
        if section == "backward":
            yield section, "workspace", f"at most about {self.workspace_bytes // 2**20} MiB, sums besides"
        loops = {"forward": geometry.forward, "scores": geometry.scores}
        loops |= {contraction.role: contraction.loop for contraction in geometry.contractions}
        for role, _ in self.tiles:
            if role in loops:
                loop = loops[role]
                begin, inner_begin, inner_end, end = loop
                yield section, f"{role} loop", f"[{begin}, {end}), {loop.middle} [{inner_begin}, {inner_end})"
        for role, tile in self.tiles:
            shape = f"{tile.block_m} x {tile.block_n}" if tile.block_n else f"{tile.block_m} vectors"
            text = f"{shape}, {tile.num_warps} warps"
            if role in TENSOR_ROLES + DECODE_ROLES:
                need = resources(role, tile, spec, geometry, get_target(self.target))
                text += f", {tile.num_stages} stages of {tile.pipeline}"
                text += f", {need.shared // 1024} KiB shared, ~{need.registers} registers"
            yield section, f"{role} tile", text


def candidates(pass_name: str, spec: Spec, target: Target) -> Sequence[LiftPass]:
    """Return the plan of a pass with the cheapest tile of each kernel. ``alternatives`` returns
    other plans.

    Raises:
        PlanError: a kernel does not fit the target; the message names the limit.
    """
    check_convolves_only(spec, "triton")
    before = ("scores",) * (bias(spec) is not None)
    check_learned(spec, "lift", (*before, "visible", "pairs", "parameters", "sink"))
    if spec.dtype not in target.dtypes:
        raise PlanError(explain("dtype", spec.dtype, f"{target.name} has no kernels for this dtype", target.dtypes))
    geometry = lift(spec)
    if geometry.terms > MAX_TERMS:
        rule = f"min(cq, ck) is {geometry.terms}, {geometry.terms - MAX_TERMS} over the limit"
        legal = f"min(cq, ck) <= {MAX_TERMS} for triton, any for backend='torch'"
        raise PlanError(explain("kernel", spec.kernel, rule, legal))
    tiles = tuple((role, proposals(role, spec, geometry, target)[0]) for role in _roles(pass_name, spec, geometry))
    return [LiftPass(spec, target.name, pass_name, tiles)]


def from_fields(pass_name: str, spec: Spec, target: str, decisions: Mapping[str, Fields]) -> LiftPass:
    """Return the plan with these decisions.

    Raises:
        PlanError: as :func:`candidates`.
    """
    (plan,) = candidates(pass_name, spec, get_target(target))
    for key, fields in decisions.items():
        plan = plan.decided(key, fields)
    return plan


def flop_per_score(pass_name: str, spec: Spec) -> int:
    """Return the flop per (row, key) pair of a training pass, 2 per multiply-add.

    Each term is a product.
    """
    d, dv, terms = spec.head_dim, spec.value_head_dim, lift(spec).terms
    return {"forward": 2 * (terms * d + dv), "backward": 2 * (3 * terms * d + 2 * dv)}[pass_name]


def _roles(pass_name: str, spec: Spec, geometry: Lift) -> tuple[str, ...]:
    """Return the roles of a pass that have a tile of their own."""
    operands = ("lift", *(("band_terms", "band") if geometry.bands else ()), *(("bias",) if geometry.bias else ()))
    if pass_name == "forward":
        return (*operands, "forward")
    if pass_name == "backward":
        contractions = (contraction.role for contraction in geometry.contractions)
        gather = ("band_gather",) if geometry.bands else ()
        return (*operands, "rows", "scores", *gather, *contractions, "finish")
    return (*decode_geometry(spec).roles, "combine")
