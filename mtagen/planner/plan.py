"""The plan: every decision about one operator on one target, as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..errors import PlanError, SpecError, explain
from ..spec import Spec
from .decode import DECODE_ROLES, Decode, SplitRule, decode_geometry, split_rule
from .lift import Lift, lift
from .stencil import Stencil
from .targets import Target, get_target
from .tiling import TENSOR_ROLES, VECTOR_ROLES, Tile, block_dim, choose, resident_ctas, resources

BACKENDS = ("auto", "triton", "torch")
MAX_TERMS = 16  # the lifted prologue holds one vector per term
_WORKSPACE_BYTES = 2**30


@dataclass(frozen=True)
class Plan:
    """How one spec is computed on one target. Comparable, hashable, printable; JSON round trip.

    Attributes:
        spec: what was asked for.
        target: name of the target planned for.
        backend: ``triton`` (generated kernels) or ``torch`` (tiled PyTorch ops, any device).
        reason: why this backend.
        tiles: (role, tile, source of the choice) of each kernel; empty for the torch backend.
        workspace_bytes: bound on the backward pass's workspace for the gradient of the scores.
        heads_per_wave: heads whose blocks the forward kernel interleaves, the longest first.
    """

    spec: Spec
    target: str
    backend: str
    reason: str
    tiles: tuple[tuple[str, Tile, str], ...] = ()
    workspace_bytes: int = _WORKSPACE_BYTES
    heads_per_wave: int = 8

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
        spec = self.spec
        parts = [f"cq{spec.cq}", f"ck{spec.ck}", f"d{spec.head_dim}"]
        parts += [f"dv{spec.value_head_dim}"] * (spec.value_head_dim != spec.head_dim)
        parts += [spec.dtype, "causal" if spec.causal else "full"]
        parts += [f"pad{spec.key_padding}"] * (spec.key_padding != "both")
        parts += [f"mask{spec.mask}"] * (spec.mask != "source")
        return "_".join([*parts, self.target.replace("_", "")])

    @property
    def name(self) -> str:
        """Name of the generated module."""
        return f"mta_{self.suffix}"

    def kernel_name(self, role: str) -> str:
        """Name of one kernel, e.g. ``mta_fwd_cq6_ck11_d128_bf16_causal_sm90a``."""
        return f"mta_{role}_{self.suffix}"

    def tile(self, role: str) -> Tile:
        """The tile of one kernel."""
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
        """Multiply-add flop per (row, key) pair of each pass, from DESIGN §2: 2 per multiply-add."""
        d, dv, terms = self.spec.head_dim, self.spec.value_head_dim, self.lift.terms
        return {
            "forward": 2 * (terms * d + dv),
            "backward": 2 * (terms * d + 2 * dv) + 2 * terms * d + 2 * terms * d,
            "plain attention forward": 2 * (d + dv),
        }

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_dict` inverts it."""
        return {
            "spec": self.spec.to_dict(),
            "target": self.target,
            "backend": self.backend,
            "reason": self.reason,
            "tiles": {role: {**asdict(tile), "source": source} for role, tile, source in self.tiles},
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
        return cls(**{**fields, "spec": Spec.from_dict(fields["spec"]), "tiles": tiles})

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of :meth:`to_json`."""
        return cls.from_dict(json.loads(text))

    def table(self) -> list[tuple[str, str, str]]:
        """What was decided and why, as (section, name, value) rows."""
        spec, geometry = self.spec, self.lift
        rows = [
            ("request", "kernel (cq, ck)", f"{spec.cq} x {spec.ck}"),
            ("request", "head dims", f"{spec.head_dim} (values {spec.value_head_dim})"),
            ("request", "mask", f"{'causal' if spec.causal else 'full'}, {spec.mask}"),
            ("request", "key padding", f"{spec.key_padding}: {spec.pad_left} left, {spec.pad_right} right"),
            ("request", "dtype", spec.dtype),
            ("choice", "target", self.target),
            ("choice", "backend", f"{self.backend}: {self.reason}"),
        ]
        forward = Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
        backward = forward.then(forward.adjoint())
        for name, stencil in (("forward", forward), ("backward", backward)):
            above, below, left, right = stencil.halo
            tile_rows, tile_keys = stencil.effective(128, 128)
            text = (
                f"rows {above} + {below}, keys {left} + {right}; {tile_rows} x {tile_keys} outputs of a 128 x 128 tile"
            )
            rows.append(("stencil", f"{name} halo", text))
        rows += [("cost", f"flop per score, {name}", str(flop)) for name, flop in self.flops_per_score().items()]
        if self.backend != "triton":
            return rows
        rows += [
            (
                "lowering",
                "lift",
                f"{'keys' if geometry.lifts_keys else 'queries'}, {geometry.terms} terms of {geometry.taps} taps",
            ),
            ("lowering", "band", f"{geometry.band_width} diagonals corrected, {geometry.reach} needed"),
            ("lowering", "backward workspace", f"at most about {self.workspace_bytes // 2**20} MiB"),
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


def plan(spec: Spec, target: str | Target = "sm_90a", backend: str = "auto") -> Plan:
    """Decide everything about ``spec`` on ``target``.

    Args:
        spec: the request.
        target: a target, its name, or ``"cpu"``.
        backend: ``triton``, ``torch``, or ``auto`` (Triton on GPUs, tiled PyTorch ops on the CPU).

    Raises:
        SpecError: unknown target or backend.
        PlanError: the backend cannot do this spec on this target; the message names the limit.
    """
    if backend not in BACKENDS:
        raise SpecError(explain("backend", backend, "is not built", BACKENDS))
    if target == "cpu":
        if backend == "triton":
            raise PlanError(explain("backend", backend, "compiles for GPUs only", "backend='torch', or a GPU target"))
        return Plan(spec, "cpu", "torch", "the CPU runs tiled PyTorch ops" if backend == "auto" else "asked for")
    target = get_target(target) if isinstance(target, str) else target
    if backend == "torch":
        return Plan(spec, target.name, "torch", "asked for")
    reason = "asked for" if backend == "triton" else "the generated kernels are the fastest backend on a GPU"
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
    roles = (
        "forward",
        "scores",
        *(c.role for c in geometry.contractions),
        *decode_geometry(spec).roles,
        *VECTOR_ROLES,
    )
    tiles = tuple((role, *choose(role, spec, geometry, target)) for role in roles)
    return Plan(spec, target.name, "triton", reason, tiles)
