"""The Triton kernels of the lowering "strip" as values: arguments, constants, grids.

Templates hold the bodies of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sympy import Min, ceiling

from ...errors import PlanError, explain
from ...spec import EXPRESSIONS, MAX_NEW_TOKENS, Spec
from ..cache import Cache
from ..geometry.affine import N_K, N_Q, Size
from ..geometry.mask import Mask
from ..geometry.pairs import PairCondition
from ..geometry.score import ScoreStage, views_of
from ..kernel import Argument, Kernel, numbers
from ..lift.kernels import AXES, pointers, strided, tiled
from ..lift.tiling import block_dim
from ..names import kernel_name
from ..sizes import B0, B1, BATCH, COUNT, GROUP, HEADS, KEYS, KV_HEADS, N_HEADS, N_NEW, SLOTS, SPLITS
from ..targets import get_target
from .documents import PART, TILE
from .gradient_sums import ROLE, GradientSum, gradient_sums, sizes_of
from .sequence import by_descriptor, step_numbers
from .stages import Convolution, Stages, TokenMixture, block_of

# Keys of a block of a mixing whose matrices depend on tokens, if 16 heads mix: fewer where factors of a high rank, and
# the sums of their gradients, take registers. Rows of a program, over which the backward pass sums those gradients.
TOKEN_KEYS, FEW_TOKEN_KEYS, LOW_RANK = 64, 32, 2
TOKEN_ROWS, GRADIENT_TOKEN_ROWS = 64, 128
MAX_TOKEN_HEADS = 32  # of a group; a query's matrix and its gradient are as large as a tile of more heads
PROGRAMS = 512  # programs per bundle in the backward pass, each with partial sums of gradients of matrices
# Tiles of products: rows, keys, stages and warps. The first tile that fits shared memory is taken.
PRODUCT_TILES = (
    *((128, 64, stages, 4) for stages in (4, 3, 2)),
    *((64, 64, stages, 4) for stages in (3, 2)),
    *((rows, 64, 1, 4) for rows in (128, 64, 32)),
    (32, 32, 1, 4),
)
NARROW_PRODUCT_TILES = ((128, 128, 3, 8), *PRODUCT_TILES)  # tiles for head dims up to 64
DECODE_PRODUCT_TILES = ((128, 4), (128, 3), (128, 2), (128, 1), (64, 2), (64, 1), (32, 1))  # keys and stages
PRODUCT_CHUNK = 512  # keys of a program
LOADING_ROWS = 64  # most rows of a product whose function loads entries of parameters, which takes registers
SUM_CHUNK = 4096  # keys of a program that has partial sums of gradients of parameters
CONVOLUTION_ROWS, CONVOLUTION_CHUNK = 128, 512
CONVOLUTION_KEYS = (32, 16)  # keys of a convolution's tile; the first that fits shared memory is taken
GRADIENT_ROWS, GRADIENT_KEYS = 64, 64  # tile of the gradient of a convolution's weight
GRADIENT_STAGES = (3, 2, 1)  # stages of that gradient; the first that fits shared memory is taken
GRADIENT_CHUNK = 2048  # keys of a program of that gradient
SPLIT = 1024  # keys of a split in decode
SECTION = 2048  # keys of a section of a row in decode, which has few rows: a multiple of every block of keys
MERGED_SECTIONS = 32  # sections whose sums a program merges at once
OUTPUT_ROWS = 32  # rows of a block of outputs that are mixed, or of values
VALUE_ROWS, VALUE_KEYS = 16, 64  # tile of the product of a decode step's probabilities with values
SUMMED_PARTS, SUMMED_COLUMNS = 32, 64  # tile of the parts of a row of a decode step's outputs
# Keys of a tile of rows of 16 heads, and of kernels that hold gradients, or entries of parameters, of a tile.
ROW_KEYS, NARROW_ROW_KEYS = 256, 128

# Tiles of products of planes with rows of packed documents: rows (or keys) of the result, of the sum, stages, warps.
CONTRACTION_TILES = (
    *((128, 64, stages, 8) for stages in (4, 3, 2)),
    *((64, 64, stages, 4) for stages in (2, 1)),
    (64, 32, 1, 4),
    (32, 32, 1, 4),
)
# Sums over rows are added to those of the strips before, which takes registers.
ROW_CONTRACTION_TILES = ((64, 64, 4, 4), *CONTRACTION_TILES[3:])

_STRIP = ("count", "keys", "off", "first", "skip", "pitch")
_PACKED_STRIP = ("count", "keys", "place0", "skip", "pitch")
# Roles of kernels that decide which keys a row sees; others read planes, where hidden elements are zeros.
_READ_MASK = frozenset(
    (
        *("scores", "grad_shares", "convolution", "post_convolution"),
        *("convolution_adjoint", "post_convolution_adjoint"),
        *("softmax", "post_mix", "probabilities", "post_mix_backward", "softmax_backward", "mix", "mix_backward"),
        "statistics",
        *("mix_matrices_backward", "post_mix_matrices_backward"),
    )
)
DECODE_OUTPUTS = "decode_outputs"  # role of the kernel that adds up parts of outputs
SUMS = frozenset((ROLE, DECODE_OUTPUTS))  # roles of kernels that only add up parts, which are always Triton's
_KEEP_SCALE = numbers("float", "keep_scale")  # factor of probabilities that dropout keeps


def strip_kernels(pass_name: str, spec: Spec, target: str) -> tuple[Kernel, ...]:
    """Return the kernels of a pass."""
    maker = _Maker(spec, target)
    return tuple({"forward": maker.forward, "backward": maker.backward, "decode": maker.decode}[pass_name]())


def around_fused(pass_name: str, spec: Spec, target: str) -> tuple[Kernel, ...]:
    """Return the kernels that place values side by side for fused kernels and mix their products of
    unmixed probabilities, or make the gradients of both.
    """
    return tuple(_Maker(spec, target).around_fused(pass_name))


class _Maker:
    def __init__(self, spec: Spec, target: str) -> None:
        self._spec, self._target, self._stages = spec, target, Stages(spec)
        self._by_descriptor = by_descriptor(spec, target)
        self._of_scores, *of_rows = (ScoreStage.of(spec, place) for place in EXPRESSIONS)
        self._row_sums = tuple(x.name for stage in of_rows for x in stage.sums)
        self._rows_load_entries = any(stage.function.loads_entries for stage in of_rows)
        self._pairs = PairCondition.of(spec)
        self._sink = ("sink",) if spec.sink else ()
        self._parameters = tuple(view.argument for view in views_of(spec, *EXPRESSIONS[1:]))
        self._pages = Cache.of(spec).triton_arguments if spec.packed else ()
        self._tokens = ("tokens",) if self._parameters else ()

    def forward(self) -> Iterator[Kernel]:
        stages = self._stages
        yield from map(self._matrices, stages.token_mixes)
        yield self._product("scores", self._spec.head_dim, more=self._pages)
        if stages.convolution:
            yield self._convolution(stages.convolution)
        if stages.token_mix:
            yield self._token_mix(stages.token_mix)
        yield self._rows(
            "softmax",
            ("x", "lse", "out", *self._weights(), *self._sink, *self._parameters),
            stages.heads,
            COUNT,
            numbers("int32", "n_q", "valid", *self._tokens),
        )
        if stages.post_convolution:
            yield self._convolution(stages.post_convolution)
        if stages.token_post_mix:
            yield self._token_mix(stages.token_post_mix)
        elif stages.separate_post_mix:
            yield self._rows("post_mix", ("x", "out", "post_head_weight"), stages.post_heads, COUNT)
        if self._spec.packed:
            yield self._contraction("outputs", self._spec.value_head_dim)

    def decode(self) -> Iterator[Kernel]:
        """Yield the kernels of a decode step.

        They are the forward kernels for a few rows of sequences with different lengths, a product with
        values, and the sum of the parts of its results. Several programs divide a row into sections of
        keys, so the softmax first sums the sections: one kernel stores the logarithms of their sums, and
        another merges them.
        """
        stages, spec = self._stages, self._spec
        lengths, rows = (*pointers("seqlens"), *step_numbers(spec)), decode_rows(spec)
        cache = Cache.of(spec).triton_arguments
        yield from map(self._matrices, stages.token_mixes)
        yield self._product("decode_scores", spec.head_dim, rows, (*lengths, *cache))
        for stage in stages.convolutions:
            yield self._convolution(stage, "decode_", rows, (*lengths, *numbers("int32", "b0")))
        if stages.token_mix:
            yield self._token_mix(stages.token_mix, "decode_", lengths)
        more = (*numbers("int32", "valid", *self._tokens), *lengths)
        tensors = ("x", "sums", *self._mix(), *self._parameters)
        yield self._rows("decode_statistics", tensors, stages.heads, COUNT, more)
        tensors = ("x", "sums", "lse", "out", *self._weights(), *self._sink, *self._parameters)
        yield self._rows("decode_softmax", tensors, stages.heads, COUNT, more)
        if stages.token_post_mix:
            yield self._token_mix(stages.token_post_mix, "decode_", lengths)
        elif stages.separate_post_mix:
            tensors = ("x", "out", "post_head_weight")
            yield self._rows("decode_post_mix", tensors, stages.post_heads, COUNT, lengths)
        yield self._make(
            "decode_values",
            (
                *pointers("plane"),
                *strided("v"),
                *pointers("partial", "out", "seqlens"),
                *step_numbers(spec),
                *cache,
                *numbers("int32", "count", "keys", "pitch", "n_heads", "group", "b0", "n_new", "batch", "split"),
            ),
            ((B1 - B0) * KV_HEADS * ceiling(GROUP * N_NEW / VALUE_ROWS) * SPLITS,),
            {"BLOCK_R": VALUE_ROWS, "BLOCK_N": VALUE_KEYS, "DV": block_dim(spec.value_head_dim)},
        )
        yield self._make(
            DECODE_OUTPUTS,
            (*pointers("partial", "out"), *numbers("int32", "splits")),
            (BATCH * N_HEADS * N_NEW * ceiling(spec.value_head_dim / SUMMED_COLUMNS),),
            {"PARTS": SUMMED_PARTS, "BLOCK": SUMMED_COLUMNS},
            stages=1,
        )

    def around_fused(self, pass_name: str) -> Iterator[Kernel]:
        assert self._stages.post_mix
        mixed = self._stages.post_mix.heads
        constants = {"MIXED": mixed, "BLOCK_R": OUTPUT_ROWS, "DV": block_dim(self._spec.value_head_dim)}
        of_rows, row_blocks = numbers("int32", "n_q", "n_heads"), ceiling(N_Q / OUTPUT_ROWS) * BATCH
        of_keys, key_blocks = numbers("int32", "n_k", "n_heads", "group"), ceiling(N_K / OUTPUT_ROWS) * BATCH
        groups = row_blocks * ceiling(HEADS / mixed)
        yield self._make("side_by_side", (*strided("v"), *pointers("out"), *of_keys), (key_blocks * HEADS,), constants)
        if pass_name == "forward":
            tensors = pointers("x", "post_head_weight", "out")
            yield self._make("mixed_outputs", (*tensors, *of_rows), (groups,), constants)
            return
        tensors = (*pointers("x", "post_head_weight"), *strided("grad_out"), *pointers("dx", "partial"))
        yield self._make("mixed_outputs_backward", (*tensors, *of_rows), (groups,), constants)
        tensors = pointers("x", "out")
        yield self._make("side_by_side_backward", (*tensors, *of_keys), (key_blocks * KV_HEADS,), constants)

    def backward(self) -> Iterator[Kernel]:
        stages, spec = self._stages, self._spec
        yield from map(self._matrices, stages.token_mixes)
        yield self._product("scores", spec.head_dim)
        if stages.convolution:
            yield self._convolution(stages.convolution)
        if stages.token_mix:
            yield self._token_mix(stages.token_mix)
        if stages.has_gradient_product:
            yield self._product("grad_shares", spec.value_head_dim)
        valid = numbers("int32", "n_q", "valid", *self._tokens)
        if stages.post_is_separate:
            tensors = ("x", "lse", "out", *self._mix(), *self._parameters)
            yield self._rows("probabilities", tensors, stages.heads, COUNT, valid)
        if stages.token_post_mix:
            yield from self._token_mix_backward(stages.token_post_mix)
        elif stages.separate_post_mix:
            names = ("x", "dy", "out", "post_head_weight", "partial")
            yield self._rows("post_mix_backward", names, stages.post_heads, Min(PROGRAMS, COUNT), (), programs=True)
        if stages.post_convolution:
            yield self._convolution(stages.post_convolution)
            yield from self._adjoints(stages.post_convolution)
        probabilities = () if stages.post_is_separate else ("shares",)
        partials = (
            *(("mix_partial",) if stages.mix else ()),
            *(("post_mix_partial",) if stages.fused_post_mix else ()),
            *(f"{name}_partial" for name in self._row_sums),
            *(("minus_dot",) if spec.sink else ()),
        )
        weights = (*self._weights(), *(self._sink if stages.normalizes_again else ()), *self._parameters)
        names = ("x", "g", "lse", "grad_lse", "dx", *probabilities, *weights, *partials)
        yield self._rows("softmax_backward", names, stages.heads, Min(PROGRAMS, COUNT), valid, programs=True)
        if stages.token_mix:
            yield from self._token_mix_backward(stages.token_mix)
        if stages.convolution:
            yield from self._adjoints(stages.convolution)
        if stages.has_scores_backward:
            yield self._product("scores_backward", spec.head_dim)
        if spec.packed:
            yield self._contraction("grad_values", spec.value_head_dim, over_rows=True)
            yield self._contraction("grad_queries", spec.head_dim)
            yield self._contraction("grad_keys", spec.head_dim, over_rows=True)
        if sums := gradient_sums(stages, PROGRAMS):
            yield self._gradient_sums(sums)

    def _gradient_sums(self, sums: tuple[GradientSum, ...]) -> Kernel:
        tensors = (name for one in sums for name in (one.partial, one.result))
        programs = sum(one.programs for one in sums)
        arguments = (*pointers(*tensors), *numbers("int32", *sizes_of(sums)))
        return self._make(ROLE, arguments, (programs,), {}, stages=1)

    def _adjoints(self, stage: Convolution) -> Iterator[Kernel]:
        spec = self._spec
        sums = {"BLOCK_M": GRADIENT_ROWS, "BLOCK_N": GRADIENT_KEYS, "WINDOW": stage.window(GRADIENT_KEYS)}
        yield self._make(
            f"{stage.name}_adjoint",
            (self._windows("dy"), *pointers(stage.weight, "dx"), *self._strip("n_heads")),
            (self._tiles(CONVOLUTION_ROWS, CONVOLUTION_CHUNK),),
            self._convolution_tile(stage, CONVOLUTION_ROWS),
            warps=8,
            stages=1,
        )
        yield self._make(
            f"{stage.name}_gradient",
            (
                self._windows("x"),
                self._tiled("dy", ("BLOCK_M", "BLOCK_N"), 3),
                *pointers("partial"),
                *self._strip("n_heads", *(() if spec.packed else ("b0",)), "all_chunks"),
            ),
            (ceiling(KEYS / GRADIENT_CHUNK) * SLOTS * stage.cq * (ceiling(COUNT / PART) if spec.packed else 1),),
            {**sums, "CHUNK": GRADIENT_CHUNK},
            stages=self._gradient_stages(stage),
        )

    def _convolution_tile(self, stage: Convolution, rows: int) -> Mapping[str, int]:
        """Return the tile of a convolution.

        The filter's band matrices, which in fp32 are split in two, are in shared memory beside the
        window that they multiply. A filter for which no tile fits gets the first tile.
        """
        spec, target = self._spec, get_target(self._target)
        windows, parts = 2 if self._by_descriptor else 1, 2 if spec.dtype == "fp32" else 1

        def need(keys: int) -> int:
            return spec.itemsize * stage.window(keys) * (parts * stage.cq * keys + windows * rows)

        fitting = (keys for keys in CONVOLUTION_KEYS if need(keys) <= target.shared_per_block)
        keys = next(fitting, CONVOLUTION_KEYS[0])
        return {"BLOCK_M": rows, "BLOCK_N": keys, "WINDOW": stage.window(keys), "CHUNK": CONVOLUTION_CHUNK}

    def _gradient_stages(self, stage: Convolution) -> int:
        """Return the number of stages of the kernel for the gradient of a convolution's weight."""
        target = get_target(self._target)
        tiles = self._spec.itemsize * GRADIENT_ROWS * (GRADIENT_KEYS + stage.window(GRADIENT_KEYS))
        more = 1 if self._by_descriptor else -1  # copies of the multiplied tiles, besides those in flight
        fitting = (stages for stages in GRADIENT_STAGES if max(1, stages + more) * tiles <= target.shared_per_block)
        return next(fitting, GRADIENT_STAGES[-1])

    def _product(self, role: str, width: int, decode_rows: int = 0, more: tuple[Argument, ...] = ()) -> Kernel:
        if decode_rows:
            tiles = [(decode_rows, *tile, 4) for tile in DECODE_PRODUCT_TILES]
        else:
            tiles = [*(NARROW_PRODUCT_TILES if width <= 64 else PRODUCT_TILES)]
            if role != "grad_shares" and self._of_scores.function.loads_entries:
                tiles = [tile for tile in tiles if tile[0] <= LOADING_ROWS]
        rows, keys, stages, warps = self._fitting(width, tiles, reads_plane=role == "scores_backward")
        chunk = SUM_CHUNK if role == "scores_backward" and self._of_scores.sums else PRODUCT_CHUNK
        return self._make(
            role,
            (
                self._tiled("x", ("BLOCK_M", "D")),
                self._tiled("y", ("BLOCK_N", "D")),
                self._tiled("plane", ("BLOCK_M", "BLOCK_N"), 3),
                *more,
                *self._strip("n_heads", "group", "b0"),
                *numbers("float", "factor"),
                *self._first_key(role),
                *self._dropout(role),
                *self._learned(role),
            ),
            (self._tiles(rows, chunk),),
            {"BLOCK_M": rows, "BLOCK_N": keys, "CHUNK": chunk, "D": block_dim(width)},
            warps=warps,
            stages=stages,
        )

    def _learned(self, role: str) -> tuple[Argument, ...]:
        """Return the parameters that the kernel of a product reads, and its sums of their gradients."""
        if role == "grad_shares" or not self._of_scores.views:
            return ()
        sums = self._of_scores.sums if role == "scores_backward" else ()
        kinds = {x.kind for x in sums}
        sizes = {"n_q": {"row"}, "row_blocks": {"head", "key", "table"}, "key_chunks": {"head", "row", "table"}}
        return (
            *pointers(*(view.argument for view in self._of_scores.views), *(f"{x.name}_partial" for x in sums)),
            *numbers("int32", "tokens", *(name for name, of in sizes.items() if kinds & of)),
        )

    def _windows(self, plane: str) -> Argument:
        """Return the argument for a plane that is read in windows."""
        return self._tiled(plane, ("BLOCK_M", "WINDOW"), 3)

    def _tiled(self, name: str, block: tuple[str, str], axes: int = 4) -> Argument:
        """Return the argument for a tensor that is accessed by tiles of its last two axes."""
        if self._by_descriptor:
            return tiled(self._target, name, block, axes)
        return Argument(name, "tiles", axes=AXES[axes])

    def _strip(self, *more: str) -> tuple[Argument, ...]:
        """Return the arguments that describe the strip, and other numbers."""
        if self._spec.packed:
            return (*pointers("documents"), *numbers("int32", *_PACKED_STRIP, *more))
        return numbers("int32", *_STRIP, *more)

    def _fitting(
        self, width: int, tiles: Sequence[tuple[int, int, int, int]], *, reads_plane: bool
    ) -> tuple[int, int, int, int]:
        """Return the first tile whose operands and products fit shared memory.

        Args:
            width: number of elements of a row.
            tiles: rows, keys, stages and warps of each tile.
            reads_plane: whether tiles of the plane are operands, too.

        Raises:
            PlanError: no tile fits.
        """
        spec, limit, d = self._spec, get_target(self._target).shared_per_block, block_dim(width)
        needs = [
            spec.itemsize * (rows * d + stages * keys * (d + rows * reads_plane) + rows * keys)
            for rows, keys, stages, _ in tiles
        ]
        for tile, need in zip(tiles, needs, strict=True):
            if need <= limit:
                return tile
        rule = f"{self._target} has {limit} bytes of shared memory, a product of {spec.dtype} rows needs {min(needs)}"
        raise PlanError(explain("head dim", width, rule, "a smaller one, or backend='torch'"))

    def _contraction(self, role: str, width: int, *, over_rows: bool = False) -> Kernel:
        """Return the product of a plane with rows of packed documents: a sum over keys, or over
        rows of the plane.

        Raises:
            PlanError: no tile fits shared memory.
        """
        spec, limit, d = self._spec, get_target(self._target).shared_per_block, block_dim(width)
        needs = {
            tile: spec.itemsize * tile[2] * tile[1] * (tile[0] + d)  # both operands
            for tile in (ROW_CONTRACTION_TILES if over_rows else CONTRACTION_TILES)
        }
        fitting = [tile for tile, need in needs.items() if need <= limit]
        if not fitting:
            rule = f"{self._target} has {limit} bytes of shared memory, a product of {spec.dtype} planes needs "
            raise PlanError(explain("head dim", width, f"{rule}{min(needs.values())}", "a smaller one"))
        block, summed, stages, warps = fitting[0]
        blocks = {"BLOCK_M": summed, "BLOCK_N": block} if over_rows else {"BLOCK_M": block, "BLOCK_N": summed}
        tiles = ceiling(COUNT / TILE)
        tile_programs = ceiling(ceiling(KEYS / block) / tiles)  # enough that all tiles have one for each block
        grid = tiles * tile_programs * KV_HEADS if over_rows else ceiling(COUNT / block) * SLOTS
        return self._make(
            role,
            (
                self._tiled("x", ("BLOCK_M", "BLOCK_N"), 3),
                self._tiled("y", ("BLOCK_M" if over_rows else "BLOCK_N", "D")),
                *self._pages,
                *strided("out"),
                *self._strip("n_heads", "group", "b0"),
                *numbers("float", "factor"),
            ),
            (grid,),
            blocks | {"D": d},
            warps=warps,
            stages=stages,
        )

    def _convolution(
        self, stage: Convolution, prefix: str = "", rows: int = CONVOLUTION_ROWS, more: tuple[Argument, ...] = ()
    ) -> Kernel:
        return self._make(
            f"{prefix}{stage.name}",
            (
                self._windows("x"),
                *pointers(stage.weight, "out"),
                *more,
                *self._strip("n_heads"),
                *self._dropout(stage.name, *numbers("int32", "b0"), *_KEEP_SCALE),
            ),
            (self._tiles(rows, CONVOLUTION_CHUNK),),
            self._convolution_tile(stage, rows),
            warps=4 if prefix else 8,
            stages=1,
        )

    def _token_mix(self, stage: TokenMixture, prefix: str = "", more: tuple[Argument, ...] = ()) -> Kernel:
        return self._of_tokens(f"{prefix}{stage.role}", stage, ("x", "out", "matrices"), TOKEN_ROWS, more)

    def _token_mix_backward(self, stage: TokenMixture) -> Iterator[Kernel]:
        planes = ("x", "dy", "adjoints", *(("out", "matrices") if stage.final else ()))
        partials = ("matrix_parts", *(("key_partial",) if stage.rank else ()))
        role = f"{stage.role}_backward"
        yield self._of_tokens(role, stage, (*planes, *partials), GRADIENT_TOKEN_ROWS)
        factors = ("query_factors", "d_query_factors") if stage.query_rank else ()
        yield self._make(
            f"{stage.role}_matrices_backward",
            (
                *pointers("matrix_parts", *factors, "partial"),
                *self._strip("n_heads", "b0", "n_q", "block_keys"),
            ),
            (Min(PROGRAMS, COUNT) * bundles(stage.heads),),
            {"HEADS": stage.heads, "BLOCK_H": block_of(stage.heads), "PROGRAMS": PROGRAMS},
            warps=1,
        )

    def _matrices(self, stage: TokenMixture) -> Kernel:
        """Return the kernel that adds the matrices of queries to the weight."""
        factors = ("query_factors",) if stage.query_rank else ()
        return self._make(
            f"{stage.role}_matrices",
            (*pointers("weight", *factors, "out"), *numbers("int32", "n_q", "n_heads")),
            (N_Q * BATCH * ceiling(N_HEADS / stage.heads),),
            {"HEADS": stage.heads, "BLOCK_H": block_of(stage.heads)},
            warps=1,
        )

    def _of_tokens(
        self,
        role: str,
        stage: TokenMixture,
        tensors: tuple[str, ...],
        rows: int,
        more: tuple[Argument, ...] = (),
    ) -> Kernel:
        """Return a kernel of a mixing whose matrices depend on tokens: a program owns a block of keys and some rows.

        Raises:
            PlanError: a group has too many heads.
        """
        if stage.heads > MAX_TOKEN_HEADS:
            rule = f"kernels mix at most {MAX_TOKEN_HEADS} heads by matrices that depend on tokens"
            raise PlanError(explain("heads of a group", stage.heads, rule, "a smaller group, or backend='torch'"))
        keys = TOKEN_KEYS if stage.rank <= LOW_RANK and self._spec.dtype != "fp32" else FEW_TOKEN_KEYS
        block_keys = row_keys(stage.heads, keys)
        tensors = (*tensors, *(("key_factors",) if stage.rank else ()))
        given = {argument.name for argument in more}
        numbers_of_tensors = numbers("int32", *(name for name in ("n_q", "n_k") if name not in given))
        key0 = () if more else numbers("int32", "key0")
        chunks = numbers("int32", "all_chunks") if "key_partial" in tensors else ()
        dropout = tuple(x for x in self._dropout(role, *_KEEP_SCALE) if x not in key0)
        return self._make(
            role,
            (*pointers(*tensors), *self._strip("n_heads", "b0"), *numbers_of_tensors, *chunks, *more, *key0, *dropout),
            (ceiling(KEYS / block_keys) * ceiling(COUNT / rows) * bundles(stage.heads),),
            {"HEADS": stage.heads, "BLOCK_H": block_of(stage.heads), "BLOCK_N": block_keys, "ROWS": rows},
            warps=keys // 16,
        )

    def _rows(
        self,
        role: str,
        tensors: tuple[str, ...],
        heads: int,
        rows: Size,
        more: tuple[Argument, ...] = (),
        *,
        programs: bool = False,
    ) -> Kernel:
        block = block_of(heads)
        holds_more = programs or (self._rows_load_entries and "post_mix" not in role)
        constants = {
            "HEADS": heads,
            "BLOCK_H": block,
            "BLOCK_N": row_keys(heads, NARROW_ROW_KEYS if holds_more else ROW_KEYS),
        }
        constants |= {"PROGRAMS": PROGRAMS} if programs else {}
        if role.startswith("decode_"):
            rows *= ceiling(KEYS / SECTION)
            constants |= {"SECTION": SECTION}
        constants |= {"MERGED": MERGED_SECTIONS} if role == "decode_softmax" else {}
        dropout = self._dropout(role, *_KEEP_SCALE)
        arguments = (*pointers(*tensors), *self._strip("n_heads", "b0"), *more, *self._first_key(role), *dropout)
        return self._make(role, arguments, (rows * bundles(heads),), constants)

    def _first_key(self, role: str) -> tuple[Argument, ...]:
        """Return the argument for the first key of planes, if the kernel's function of scores needs it.

        Kernels for packed documents and decode steps compute it themselves.
        """
        known = self._spec.packed or role.startswith("decode_") or role in self._stages.dropping
        if role in ("scores", "scores_backward"):
            needs = self._stages.products_place_keys
        else:
            needs = self._stages.places_keys and role in ("softmax", "probabilities", "softmax_backward")
        return numbers("int32", "key0") if needs and not known else ()

    def _dropout(self, role: str, *more: Argument) -> tuple[Argument, ...]:
        """Return the arguments of a kernel that applies dropout: the seed, other numbers for draws,
        and ``more``.
        """
        if role not in self._stages.dropping:
            return ()
        return (*pointers("seed"), *numbers("int32", *dropout_numbers(self._spec)), *more)

    def _make(
        self,
        role: str,
        arguments: tuple[Argument, ...],
        grid: tuple[Size, ...],
        constants: Mapping[str, int],
        *,
        warps: int = 4,
        stages: int = 3,
    ) -> Kernel:
        name = kernel_name("strip", role, self._spec, self._target)
        arguments = self._with_tables(role, arguments)
        registers = get_target(self._target).registers_per_thread
        return Kernel(role, name, arguments, grid, 32 * warps, 0, registers, tuple(constants.items()), stages)

    def _with_tables(self, role: str, arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
        """Return a kernel's arguments and, if it asks which keys a row sees, those of the mask."""
        tables = (*self._spec.tables("decode"), *self._spec.checked_arguments)
        if not tables or role.removeprefix("decode_") not in _READ_MASK:
            return arguments
        given = {argument.name for argument in arguments}
        places: tuple[str, ...] = (
            () if self._spec.packed else ("b0",) if role.startswith("decode_") else ("b0", "n_q", "key0")
        )
        places += ("tokens",) if self._pairs.reads_tokens else ()
        more = numbers("int32", *(name for name in places if name not in given))
        return (*arguments, *pointers(*(table.name for table in tables)), *more)

    def _tiles(self, rows: int, keys: int) -> Size:
        return ceiling(COUNT / rows) * ceiling(KEYS / keys) * SLOTS

    def _mix(self) -> tuple[str, ...]:
        return ("head_weight",) if self._stages.mix else ()

    def _weights(self) -> tuple[str, ...]:
        return (*self._mix(), *(("post_head_weight",) if self._stages.fused_post_mix else ()))


def bundles(heads: int) -> Size:
    """Return the number of bundles of heads that mix with each other, over all sequences of a
    strip.
    """
    return (B1 - B0) * ceiling(N_HEADS / heads)


def dropout_numbers(spec: Spec) -> tuple[str, ...]:
    """Return the names of numbers that draws depend on besides the seed and the place in a plane.

    With a window, planes hold the keys from key0 on. With packed documents kernels compute key0
    themselves.
    """
    return ("threshold", "key0") if Mask.of(spec).hides_earlier and not spec.packed else ("threshold",)


def decode_rows(spec: Spec) -> int:
    """Return the number of rows of a decode step, padded as on chip."""
    return max(16, 1 << (spec.context + MAX_NEW_TOKENS - 1).bit_length())


def row_keys(heads: int, keys: int = ROW_KEYS) -> int:
    """Return the keys of a tile of rows of ``heads`` heads, if a tile of 16 heads has ``keys``."""
    return keys * 16 // block_of(heads)
