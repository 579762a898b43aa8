"""The Triton kernels of the lowering "lift" as values: arguments, constants, grids.

Templates hold the bodies of the kernels. Sizes in grids have the names of the host code,
``templates/triton/host.j2``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
from sympy import ceiling

from ...spec import Spec
from ..cache import Cache
from ..geometry.affine import N_K, N_Q, Size
from ..geometry.score import ScoreStage, views_of
from ..kernel import Argument, Kernel, numbers
from ..names import kernel_name
from ..sizes import BATCH, GROUP, HEADS, KV_HEADS, N_HEADS, N_NEW, SPLITS, TOTAL_Q
from ..targets import get_target
from .band import Band
from .decode import decode_geometry
from .operands import Contraction, Lift
from .tiling import Tile, block_dim, resources

ALL_HEADS = sympy.Symbol("all_heads", integer=True, positive=True)
BEGIN, END, FIRST, LAST = sympy.symbols("begin end first last", integer=True, nonnegative=True)  # rows of a chunk


# Number of a tensor's axes -> their names, without the last axis, for tensors that are read by tiles.
AXES = {4: ("b", "h", "n"), 3: ("slot", "row")}
# As AXES, for tensors of packed documents; the number is that of a batch's tensor.
PACKED_AXES = {4: ("n", "h"), 3: ("slot", "row")}
# Rows or keys of a document in one entry of a schedule of packed documents. Block sizes of kernels divide it.
DOCUMENT_TILE = 128
ROW_TILES, KEY_TILES = sympy.symbols("n_row_tiles n_key_tiles", integer=True, positive=True)  # entries of a schedule


def tiled(target: str, name: str, block: tuple[str, str], axes: int = 4) -> Argument:
    """Return the argument for a tensor that is read or written by tiles of its last two axes.

    Tiles are accessed by descriptor if the target has descriptors.

    Args:
        target: name of the target.
        name: name of the tensor.
        block: the constants that are the extents of a tile.
        axes: number of the tensor's axes, 4 or 3.
    """
    if get_target(target).tensor_descriptors:
        return Argument(name, "descriptor", block=block)
    return Argument(name, "tiles", axes=AXES[axes])


def pointers(*names: str) -> tuple[Argument, ...]:
    """Return pointers to contiguous tensors."""
    return tuple(Argument(f"{name}_ptr", "memory", pointer=True) for name in names)


def strided(*names: str, axes: Sequence[str] = AXES[4]) -> tuple[Argument, ...]:
    """Return pointers to tensors (B, H, N, D), or of other axes, each with its strides except the
    last.
    """
    return tuple(
        argument
        for name in names
        for argument in (*pointers(name), *(Argument(f"{name}_{axis}", "int64") for axis in axes))
    )


def pass_kernels(
    pass_name: str, spec: Spec, target: str, geometry: Lift, tiles: Mapping[str, Tile], heads_per_section: int
) -> tuple[Kernel, ...]:
    """Return the kernels of one pass, in the order of their first launch."""
    make = _Maker(spec, target, geometry, tiles)
    if pass_name == "decode":
        return (*(make.decode(role) for role in decode_geometry(spec).roles), make.combine())
    bands = geometry.bands
    band_kernels = (make_kernel(band) for make_kernel in (make.band_terms, make.band_scores) for band in bands)
    operands = (make.lifting(), *band_kernels, *((make.bias(),) if geometry.bias else ()))
    if pass_name == "forward":
        return (*operands, make.forward(heads_per_section))
    return (
        make.rows(),
        *operands,
        make.scores(),
        *((make.bias_gather(),) if geometry.bias else ()),
        *map(make.band_gather, bands),
        *(make.contraction(contraction) for contraction in geometry.contractions),
        *map(make.band_gradient, bands),
        *(make.finish(owner) for owner in ("rows", "keys")),
        *((make.bias_gradient(),) if geometry.bias else ()),
    )


class _Maker:
    """Makes the kernels of one pass."""

    def __init__(self, spec: Spec, target: str, geometry: Lift, tiles: Mapping[str, Tile]) -> None:
        self._spec = spec
        self._target = target
        self._lift = geometry
        self._tiles = tiles
        self._d = {"D": block_dim(spec.head_dim)}
        self._dv = {"DV": block_dim(spec.value_head_dim)}
        self._bands = {f"BAND{band.suffix.upper()}": band.width for band in geometry.bands}
        self._band_scores = pointers(*(f"band_scores{band.suffix}" for band in geometry.bands))
        drawn = (*pointers("seed"), *numbers("int32", "threshold"), *numbers("float", "keep_scale"))
        self._dropout = drawn if spec.dropout else ()
        score = ScoreStage.of(spec)
        self._parameters = pointers(*(view.argument for view in score.views))
        self._sums = pointers(*(sum_of.name for sum_of in score.sums))
        self._sink = pointers("sink") if spec.sink else ()
        self._bias = pointers("bias") if geometry.bias else ()
        before = geometry.bias.stage if geometry.bias else ScoreStage.of(spec, "scores")
        self._parameters_of_scores = pointers(*(view.argument for view in before.views))
        self._sums_of_scores = pointers(*(sum_of.name for sum_of in before.sums))
        tables = {name: [table.name for table in spec.tables(name)] for name in ("forward", "backward", "decode")}
        checked = pointers(*(argument.name for argument in spec.checked_arguments))
        self._mask = (*pointers(*tables["decode"]), *checked)
        self._mask_of_rows = (*pointers(*tables["forward"]), *checked)
        self._mask_of_keys = (*self._mask, *pointers(*tables["backward"][len(tables["forward"]) :]))
        self._reads_pages = spec.packed and spec.page_size is not None
        self._pages = Cache.of(spec).triton_arguments if self._reads_pages else ()

    def lifting(self) -> Kernel:
        lifts_pages = self._reads_pages and self._lift.lifts_keys
        source = strided("src") if lifts_pages else self._strided("src")
        tensors = (*source, *(self._pages if lifts_pages else ()), *pointers("weight", "lifted"))
        owner = "keys" if self._lift.lifts_keys else "rows"
        heads = numbers("int32", "head0", "n_heads", "group")
        sizes = (*heads, *self._lengths(owner), *numbers("float", "factor"))
        block = self._tiles["lift"].block_m
        grid = self._blocks(owner, block, N_K if self._lift.lifts_keys else N_Q) * HEADS
        return self._make("operand", "lift", tensors + sizes, grid, {"BLOCK": block, **self._d})

    def band_terms(self, band: Band) -> Kernel:
        tile = self._tiles["band_terms"]
        diagonals = tile.block_n - tile.block_m + 1  # diagonals of all of a program's rows in its window of keys
        arguments = (
            self._tiled("q", ("BLOCK", "D")),
            self._tiled("k", ("WINDOW", "D")),
            *self._pages,
            *pointers("terms"),
            *numbers("int32", "n_heads", "group"),
            *self._lengths("rows"),
        )
        sizes = {"WINDOW": tile.block_n, "DIAGONALS": diagonals, "REACH": band.reach}
        constants = {"BLOCK": tile.block_m, **sizes, **self._d}
        grid = self._row_blocks("band_terms") * ALL_HEADS * -(-band.reach // diagonals)
        return self._make(f"band_terms{band.suffix}", "band_terms", arguments, grid, constants)

    def band_scores(self, band: Band) -> Kernel:
        arguments = (
            *pointers("terms", "weight", "scores"),
            *numbers("int32", "n_heads"),
            *self._lengths("rows"),
            *numbers("float", "factor"),
        )
        constants = {"BLOCK": self._tiles["band"].block_m, **_extents(band)}
        grid = self._row_blocks("band") * HEADS
        return self._make(f"band_scores{band.suffix}", "band", arguments, grid, constants)

    def bias(self) -> Kernel:
        tensors = (*pointers("weight"), *self._parameters_of_scores, *pointers("bias"))
        arguments = tensors + numbers("int32", "n_heads", "n_q", "n_k")
        block = self._tiles["bias"].block_m
        return self._make("bias", "bias", arguments, self._bias_blocks * N_HEADS, {"BLOCK": block})

    def bias_gather(self) -> Kernel:
        arguments = (
            *pointers("g"),
            *(Argument(f"g_{axis}", "int64") for axis in ("slot", "row", "key")),
            *pointers("bias_grad"),
            *numbers("int32", "head0", "n_q", "n_k", "strip_begin", "strip_end"),
        )
        constants = {"BLOCK": self._tiles["bias"].block_m, "ROWS": 16}
        return self._make("bwd_bias_gather", "bias", arguments, self._bias_blocks * HEADS, constants)

    def bias_gradient(self) -> Kernel:
        tensors = (*pointers("bias_grad", "weight"), *self._parameters_of_scores, *pointers("bias_partial"))
        arguments = (*tensors, *self._sums_of_scores, *numbers("int32", "n_heads", "n_q", "n_k"))
        grid = ALL_HEADS * (self._spec.cq * self._spec.ck)
        return self._make("bwd_bias", "bias", arguments, grid, {"BLOCK": self._tiles["bias"].block_m})

    @property
    def _bias_blocks(self) -> Size:
        """Number of blocks of entries of the bias of a head."""
        assert self._lift.bias, "kernels of the bias are made only where there is one"
        return ceiling(self._lift.bias.entries / self._tiles["bias"].block_m)

    def forward(self, heads_per_section: int) -> Kernel:
        tile = self._tiles["forward"]
        arguments = (
            *self._operands(),
            self._tiled("v", ("BLOCK_N", "DV")),
            *self._pages,
            *self._band_scores,
            *self._bias,
            self._tiled("out", ("BLOCK_M", "DV")),
            *pointers("lse"),
            *self._sink,
            *self._parameters,
            *self._mask_of_rows,
            *numbers("int32", "n_heads", "group"),
            *self._lengths("rows"),
        )
        arguments += self._dropout
        constants = {**_blocks(tile), **self._d, **self._dv, "HEADS": heads_per_section, **self._bands}
        grid = self._row_blocks("forward") * ALL_HEADS
        return self._make("fwd", "forward", arguments, grid, constants)

    def rows(self) -> Kernel:
        arguments = (
            *pointers("out"),
            *self._strided("grad"),
            *pointers("lse", "grad_lse", "row_lse", "row_dot"),
            *numbers("int32", "n_heads", "n_q"),
        )
        constants = {"BLOCK": self._tiles["rows"].block_m, **self._dv}
        rows = TOTAL_Q if self._spec.packed else N_Q  # blocks of rows ignore the boundaries of documents here
        grid = ceiling(rows / self._tiles["rows"].block_m) * ALL_HEADS
        return self._make("bwd_rows", "rows", arguments, grid, constants)

    def scores(self) -> Kernel:
        tile = self._tiles["scores"]
        arguments = (
            *self._operands(),
            self._tiled("v", ("BLOCK_N", "DV")),
            self._tiled("grad", ("BLOCK_M", "DV")),
            self._g(),
            *self._band_scores,
            *self._bias,
            *pointers("row_lse", "row_dot", "dv"),
            *self._parameters,
            *self._sums,
            *self._mask_of_keys,
            *numbers("int32", "head0", "n_heads", "group"),
            *self._lengths("keys"),
            *numbers("int32", "strip_begin", "strip_end"),
        )
        arguments += self._dropout
        constants = {**_blocks(tile), **self._d, **self._dv, **self._bands}
        grid = self._blocks("keys", tile.block_n, N_K) * HEADS
        return self._make("bwd_scores", "scores", arguments, grid, constants)

    def band_gather(self, band: Band) -> Kernel:
        arguments = (
            *pointers("g"),
            *(Argument(f"g_{axis}", "int64") for axis in ("slot", "row", "key")),
            *pointers("band_g"),
            *numbers("int32", "head0"),
            *self._lengths("rows"),
            *numbers("int32", "strip_begin", "strip_end"),
        )
        block = self._tiles["band_gather"].block_m
        constants = {"BLOCK": block, "BAND": band.width, "BAND_POW2": _power_of_2(band.width)}
        grid = self._blocks("rows", block, END - BEGIN) * HEADS
        return self._make(f"bwd_band_gather{band.suffix}", "band_gather", arguments, grid, constants)

    def contraction(self, contraction: Contraction) -> Kernel:
        tile, rows = self._tiles[contraction.role], contraction.owner == "rows"
        arguments = (
            self._g(),
            self._operands()[rows],
            *pointers("grad"),
            *(self._mask_of_rows if rows else self._mask_of_keys),
            *numbers("int32", "head0", "n_heads", "group"),
            *self._lengths(contraction.owner),
            *numbers("int32", "strip_begin", *(("row_begin", "row_end") if rows else ("strip_end",))),
        )
        grid_terms = 1 if contraction.sums_terms else self._lift.terms
        terms = {"GRID_TERMS": grid_terms, "LOOP_TERMS": self._lift.terms // grid_terms}
        block, length = (tile.block_m, LAST - FIRST) if rows else (tile.block_n, N_K)
        blocks = self._blocks(contraction.owner, block, length)
        constants = {**_blocks(tile), **self._d, **terms}
        role = contraction.role
        return self._make(f"bwd_{role}", role, arguments, blocks * HEADS * grid_terms, constants)

    def band_gradient(self, band: Band) -> Kernel:
        arguments = (
            *pointers("terms", "band_g", "weight", "terms_grad", "partial"),
            *numbers("int32", "head0", "all_heads", "n_heads"),
            *self._lengths("rows"),
            *numbers("float", "scale"),
        )
        constants = {"BLOCK": self._tiles["band"].block_m, **_extents(band)}
        return self._make(f"bwd_band{band.suffix}", "band", arguments, self._row_blocks("band") * HEADS, constants)

    def finish(self, owner: str) -> Kernel:
        rows = owner == "rows"
        lifted = rows != self._lift.lifts_keys
        arguments = (
            *pointers("grad"),
            *((*pointers("weight", "partial"), *self._strided("x")) if lifted else ()),
            *pointers(*(f"terms_grad{band.suffix}" for band in self._lift.bands)),
            *(self._strided("other") if self._lift.bands else ()),
            *pointers("out"),
            *numbers("int32", "head0", "all_heads", "n_heads", "group"),
            *self._lengths(owner),
            *numbers("float", "scale"),
        )
        block = self._tiles["finish"].block_m
        reach = {f"REACH{band.suffix.upper()}": band.reach for band in self._lift.bands}
        constants = {"BLOCK": block, **self._d, **reach}
        heads = HEADS if rows else sympy.floor(HEADS / GROUP)
        grid = self._blocks(owner, block, N_Q if rows else N_K) * heads
        return self._make("bwd_dq" if rows else "bwd_dk", "finish", arguments, grid, constants)

    def decode(self, role: str) -> Kernel:
        tile = self._tiles[role]
        arguments = (
            *strided("q", "k", "v"),
            *pointers("weight"),
            Argument("seqlens_ptr", "memory", pointer=True, optional=True),
            *Cache.of(self._spec).triton_arguments,
            *pointers("partial", "partial_lse"),
            *pointers(*(view.argument for view in views_of(self._spec))),
            *self._mask,
            *numbers("int32", "has_seqlens", "kv_heads", "group", "n_new", "n_max", "num_splits"),
            *numbers("float", "factor"),
        )
        taps = {"TAPS": decode_geometry(self._spec).taps}
        constants = {"PAIRS": tile.block_m, "BLOCK_N": tile.block_n, **taps, **self._d, **self._dv}
        grid = BATCH * KV_HEADS * ceiling(GROUP * N_NEW / tile.block_m) * SPLITS
        return self._make(role, role, arguments, grid, constants)

    def combine(self) -> Kernel:
        tensors = (*pointers("partial", "partial_lse", "out", "lse"), *self._sink)
        arguments = tensors + numbers("int32", "num_splits", *(("n_heads", "n_new") if self._sink else ()))
        constants = {"BLOCK": self._tiles["combine"].block_m, **self._dv}
        return self._make("decode_combine", "combine", arguments, BATCH * N_HEADS * N_NEW, constants)

    def _operands(self) -> tuple[Argument, Argument]:
        """Return the operands of scores, q and k. The lifted one has an axis of slots and terms."""
        lifts_keys = self._lift.lifts_keys
        q = self._tiled("q", ("BLOCK_M", "D"), 4 if lifts_keys else 3)
        return q, self._tiled("k", ("BLOCK_N", "D"), 3 if lifts_keys else 4)

    def _g(self) -> Argument:
        """Return the argument for the gradient of the scores in the workspace."""
        return self._tiled("g", ("BLOCK_M", "BLOCK_N") if self._lift.lifts_keys else ("BLOCK_N", "BLOCK_M"), 3)

    def _row_blocks(self, role: str) -> Size:
        return self._blocks("rows", self._tiles[role].block_m, N_Q)

    def _blocks(self, owner: str, block: int, length: Size) -> Size:
        """Return the number of blocks of ``rows`` or ``keys`` in ``length``, or in a schedule of
        documents.
        """
        if not self._spec.packed:
            return ceiling(length / block)
        return DOCUMENT_TILE // block * (ROW_TILES if owner == "rows" else KEY_TILES)

    def _lengths(self, owner: str) -> tuple[Argument, ...]:
        """Return the arguments for the lengths of a program's sequence, or for its packed document."""
        if not self._spec.packed:
            return numbers("int32", "n_q", "n_k")
        tiles = {"rows": "row_tiles", "keys": "key_tiles"}[owner]
        return (*pointers(tiles, "cu_seq_q", "cu_seq_k"), *numbers("int32", f"n_{tiles}", "total_q", "total_k"))

    def _strided(self, *names: str) -> tuple[Argument, ...]:
        """Return pointers to tensors, each with its strides."""
        return strided(*names, axes=PACKED_AXES[4] if self._spec.packed else AXES[4])

    def _tiled(self, name: str, block: tuple[str, str], axes: int = 4) -> Argument:
        """Return the argument for a tensor that is accessed by tiles.

        If the tensor holds packed documents, each document is a matrix of it. Pages have all axes.
        """
        if self._reads_pages and name in ("k", "v") and axes == 4:
            return Argument(name, "matrices", axes=AXES[4])
        if self._spec.packed:
            return Argument(name, "matrices", axes=PACKED_AXES[axes])
        return tiled(self._target, name, block, axes)

    def _make(
        self, name: str, tile_role: str, arguments: tuple[Argument, ...], grid: Size, constants: Mapping[str, int]
    ) -> Kernel:
        """Return a kernel with the tile of ``tile_role``."""
        tile = self._tiles[tile_role]
        need = resources(tile_role, tile, self._spec, self._lift, get_target(self._target))
        return Kernel(
            role=name,
            name=kernel_name("lift", name, self._spec, self._target),
            arguments=arguments,
            grid=(grid,),
            threads=32 * tile.num_warps,
            shared=need.shared,
            registers=need.registers,
            constants=tuple(constants.items()),
            # Kernels that pipeline the loop over terms do not pipeline the loop over tiles.
            stages=1 if tile.pipeline == "terms" else tile.num_stages,
        )


def _blocks(tile: Tile) -> dict[str, int]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}


def _extents(band: Band) -> dict[str, int]:
    """Return the diagonals of a band and of its terms, and both padded for products."""
    padded = {"BAND_POW2": max(16, _power_of_2(band.width)), "REACH_POW2": max(16, _power_of_2(band.reach))}
    return {"BAND": band.width, "REACH": band.reach, **padded}


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
