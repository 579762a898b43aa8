"""The plan: every decision about one operator on one target, as a value."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..errors import PlanError, SpecError, check_choice, explain
from ..spec import Spec
from .backends import (
    BACKENDS,
    GENERATED,
    PASSES,
    Choice,
    FusedPass,
    choose_backends,
    choose_variant,
    flops_per_score,
    fused_pass,
    triton_tiles,
)
from .geometry.stencil import Stencil
from .lift.decode import DECODE_ROLES, Decode, decode_geometry
from .lift.operands import Lift, lift
from .lift.tiling import TENSOR_ROLES, Tile, block_dim, resident_ctas, resources
from .names import kernel_name, suffix
from .splits import SplitRule, split_rule
from .tables import Table, shipped
from .targets import TARGETS, Target, get_target

_WORKSPACE_BYTES = 5 * 2**28  # eight heads of N = 8192, two of 16384: each chunk of heads launches all kernels anew


@dataclass(frozen=True)
class Plan:
    """How one spec is computed on one target. Comparable, hashable, printable; JSON round trip.

    Attributes:
        spec: what was asked for.
        target: name of the target planned for.
        choices: (pass, backend, reason) of forward, backward and decode. Backends: ``cuda`` and ``triton`` (generated
            kernels), ``torch`` (tiled PyTorch ops, any device, all passes).
        tiles: (role, tile, source of the choice) of each Triton kernel; empty if Triton serves no pass.
        variants: (pass, variant, source of the choice) of each pass that CUDA serves.
        workspace_bytes: what Triton's backward pass may take for the gradient of the scores and what is lifted; or for
            one strip of one head of keys if that is more.
        heads_per_wave: heads whose blocks Triton's forward kernel interleaves, the longest first.
    """

    spec: Spec
    target: str
    choices: tuple[Choice, ...]
    tiles: tuple[tuple[str, Tile, str], ...] = ()
    variants: tuple[tuple[str, str, str], ...] = ()
    workspace_bytes: int = _WORKSPACE_BYTES
    heads_per_wave: int = 8

    @property
    def backend(self) -> str:
        """The backend of all passes, or several such as ``cuda+triton``."""
        used = {choice.backend for choice in self.choices}
        return "+".join(backend for backend in BACKENDS if backend in used)

    @property
    def reason(self) -> str:
        """Why this backend; pass by pass if that differs."""
        reasons = {choice.reason for choice in self.choices}
        return reasons.pop() if len(reasons) == 1 else "; ".join(f"{c.pass_name}: {c.reason}" for c in self.choices)

    def served_by(self, backend: str) -> tuple[str, ...]:
        """The passes that ``backend`` computes."""
        return tuple(choice.pass_name for choice in self.choices if choice.backend == backend)

    @cached_property
    def fused(self) -> Mapping[str, FusedPass]:
        """The plans of the passes that CUDA computes, by pass."""
        return {
            name: fused_pass(name, self.spec, get_target(self.target), variant) for name, variant, _ in self.variants
        }

    @cached_property
    def lift(self) -> Lift:
        """Geometry of the lowering."""
        return lift(self.spec)

    @cached_property
    def decode(self) -> Decode:
        """Geometry of decode."""
        return decode_geometry(self.spec)

    def split_rule(self, role: str) -> SplitRule:
        """How many splits a decode kernel makes."""
        tile, target = self.tile(role), get_target(self.target)
        resident = resident_ctas(resources(role, tile, self.spec, self.lift), tile, target)
        return split_rule(resident, tile.block_n, target.multiprocessors)

    @property
    def suffix(self) -> str:
        """The part of kernel names that tells plans apart, e.g. ``cq6_ck11_d128_bf16_causal_sm90a``."""
        return suffix(self.spec, self.target)

    @property
    def name(self) -> str:
        """Name of the generated module."""
        return f"mta_{self.suffix}"

    def kernel_name(self, role: str) -> str:
        """Name of one Triton kernel, e.g. ``mta_fwd_cq6_ck11_d128_bf16_causal_sm90a``."""
        return kernel_name(role, self.spec, self.target)

    def tile(self, role: str) -> Tile:
        """The tile of one Triton kernel."""
        return next(tile for name, tile, _ in self.tiles if name == role)

    @property
    def block_d(self) -> int:
        """Head dim on chip."""
        return block_dim(self.spec.head_dim)

    @property
    def block_dv(self) -> int:
        """Value head dim on chip."""
        return block_dim(self.spec.value_head_dim)

    @property
    def vector(self) -> int:
        """Elements in 16 bytes: rows must start at multiples of it."""
        return 16 // self.spec.itemsize

    @property
    def strip_multiple(self) -> int:
        """Rows of a backward strip are a multiple of this, so that no tile crosses from one strip into the next."""
        return max(128, *(tile.block_m for role, tile, _ in self.tiles if role in TENSOR_ROLES))

    def flops_per_score(self) -> dict[str, int]:
        """Multiply-add flop per (row, key) pair of each training pass, and of attention without convolution."""
        flop = {
            choice.pass_name: flops_per_score(choice.backend, self.spec)[choice.pass_name]
            for choice in self.choices
            if choice.pass_name != "decode"
        }
        return flop | {"plain attention forward": 2 * (self.spec.head_dim + self.spec.value_head_dim)}

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` inverts it."""
        return {
            "spec": self.spec.to_dict(),
            "target": self.target,
            "passes": {name: {"backend": backend, "reason": reason} for name, backend, reason in self.choices},
            "tiles": {role: {**asdict(tile), "source": source} for role, tile, source in self.tiles},
            "variants": {name: {"variant": variant, "source": source} for name, variant, source in self.variants},
            "workspace_bytes": self.workspace_bytes,
            "heads_per_wave": self.heads_per_wave,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_dict`."""
        tiles = tuple(
            (role, Tile(**{name: value for name, value in tile.items() if name != "source"}), tile["source"])
            for role, tile in fields["tiles"].items()
        )
        variants = tuple((name, one["variant"], one["source"]) for name, one in fields["variants"].items())
        choices = tuple(Choice(name, **choice) for name, choice in fields["passes"].items())
        others = {name: fields[name] for name in ("target", "workspace_bytes", "heads_per_wave")}
        return cls(spec=Spec.from_dict(fields["spec"]), choices=choices, tiles=tiles, variants=variants, **others)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))

    def table(self) -> list[tuple[str, str, str]]:
        """What was decided and why, as (section, name, value) rows."""
        spec = self.spec
        rows = [
            ("request", "kernel (cq, ck)", f"{spec.cq} x {spec.ck}"),
            ("request", "head dims", f"{spec.head_dim} (values {spec.value_head_dim})"),
            ("request", "mask", f"{'causal' if spec.causal else 'full'}, {spec.mask}"),
            ("request", "key padding", f"{spec.key_padding}: {spec.pad_left} left, {spec.pad_right} right"),
            ("request", "dtype", spec.dtype),
            ("choice", "target", self.target),
        ]
        if len({choice[1:] for choice in self.choices}) == 1:
            rows.append(("choice", "backend", f"{self.backend}: {self.reason}"))
        else:
            rows += [("choice", f"{name} backend", f"{backend}: {reason}") for name, backend, reason in self.choices]
        forward = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
        backward = forward.then(forward.adjoint())
        for name, stencil in (("forward", forward), ("backward", backward)):
            above, below, left, right = stencil.halo
            rows.append(("stencil", f"{name} halo", f"rows {above} + {below}, keys {left} + {right}"))
        rows += [("cost", f"flop per score, {name}", str(flop)) for name, flop in self.flops_per_score().items()]
        for name, variant, source in self.variants:
            rows += [(name, "variant", f"{variant} ({source})"), *self.fused[name].rows_of_table()]
        if self.tiles:
            rows += self._triton_rows()
        return rows

    def _triton_rows(self) -> list[tuple[str, str, str]]:
        """The lift, its loops and its tiles."""
        spec, geometry = self.spec, self.lift
        rows = [
            (
                "lowering",
                "lift",
                f"{'keys' if geometry.lifts_keys else 'queries'}, {geometry.terms} terms of {geometry.taps} taps",
            ),
            ("lowering", "band", f"{geometry.band_width} diagonals corrected, {geometry.reach} needed"),
            ("lowering", "backward workspace", f"at most about {self.workspace_bytes // 2**20} MiB, sums besides"),
        ]
        bounds = {"forward": geometry.forward, "scores": geometry.scores}
        bounds |= {contraction.role: contraction.bounds for contraction in geometry.contractions}
        for role, (begin, interior_begin, interior_end, end) in bounds.items():
            text = f"[{begin}, {end}), interior [{interior_begin}, {interior_end})"
            rows.append(("loop", role, text))
        for role, tile, source in self.tiles:
            shape = f"{tile.block_m} x {tile.block_n}" if tile.block_n else f"{tile.block_m} vectors"
            text = f"{shape}, {tile.num_warps} warps"
            if role in TENSOR_ROLES + DECODE_ROLES:
                need = resources(role, tile, spec, geometry)
                text += f", {tile.num_stages} stages of {tile.pipeline}"
                text += f", {need.shared // 1024} KiB shared, ~{need.registers} registers"
            rows.append(("tile", role, f"{text} ({source})"))
        return rows

    def __str__(self) -> str:
        rows = self.table()
        width = max(len(name) for _, name, _ in rows)
        lines, section = [self.name], ""
        for head, name, value in rows:
            lines += [] if head == section else [f"  {head}"]
            lines.append(f"    {name:<{width}}  {value}")
            section = head
        return "\n".join(lines)


def plan(
    spec: Spec,
    target: str | Target = "sm_90a",
    backend: str = "auto",
    available: Collection[str] = GENERATED,
    tables: Sequence[Table] | None = None,
) -> Plan:
    """Decide everything about ``spec`` on ``target``.

    Args:
        spec: the request.
        target: a target, its name, or ``"cpu"``.
        backend: ``cuda``, ``triton``, ``torch``, or ``auto``: on GPUs the generated kernels expected to be faster, pass
            by pass; on the CPU tiled PyTorch ops.
        available: the backends that ``auto`` may choose from on GPUs.
        tables: measured decisions, the first that has one is followed; by default the target's table in the package.

    Raises:
        SpecError: an argument is of a wrong type; unknown target or backend.
        PlanError: the backend cannot do this spec on this target; the message names the limit.
    """
    _check_arguments(spec, target, backend, available, tables)
    if target == "cpu":
        if backend in GENERATED:
            raise PlanError(explain("backend", backend, "compiles for GPUs only", "backend='torch', or a GPU target"))
        reason = "the CPU runs tiled PyTorch ops" if backend == "auto" else "asked for"
        return Plan(spec, "cpu", tuple(Choice(name, "torch", reason) for name in PASSES))
    target = target if isinstance(target, Target) else get_target(target)
    tables = (shipped(target.name),) if tables is None else tables
    if backend == "auto":
        choices = choose_backends(spec, target, available, tables)
    else:
        choices = tuple(Choice(name, backend, "asked for") for name in PASSES)
    variants = tuple(
        (name, *choose_variant(name, spec, target, tables)) for name, served_by, _ in choices if served_by == "cuda"
    )
    by_triton = any(choice.backend == "triton" for choice in choices)
    return Plan(spec, target.name, choices, triton_tiles(spec, target, tables) if by_triton else (), variants)


def _check_arguments(spec: object, target: object, backend: object, available: object, tables: object) -> None:
    """Refuse what :func:`plan` cannot take, before anything asks it a question that it cannot answer."""
    if not isinstance(spec, Spec):
        raise SpecError(explain("spec", spec, "must be a Spec", "such as mtagen.Spec(kernel=(6, 11), head_dim=64)"))
    if not isinstance(target, (str, Target)):
        raise SpecError(explain("target", target, "must be a target or its name", ("cpu", *TARGETS)))
    check_choice("backend", backend, BACKENDS, "is not built")
    if not isinstance(available, (tuple, list, set, frozenset)) or not all(
        isinstance(one, str) and one in GENERATED for one in available
    ):
        raise SpecError(explain("available", available, "must hold backends that generate kernels", GENERATED))
    if not (tables is None or (isinstance(tables, (tuple, list)) and all(isinstance(one, Table) for one in tables))):
        raise SpecError(
            explain("tables", tables, "must be a tuple or list of tables, or None", "mtagen.planner.tables.Table")
        )
