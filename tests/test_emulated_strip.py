"""The CUDA kernels of the lowering "strip", one by one, on a CPU that plays the GPU, against their formulas.

Planes hold small multiples of 1/8, and weights too. Their products and sums are exact, so results of convolutions and
mixtures are exact except for the last rounding. Before a kernel starts, planes hold NaN beyond their keys, and at keys
that it does not read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emulator import MMA_TARGETS, emulated, needs_compiler
from torch import Tensor
from torch.nn import functional

from mtagen.dtypes import TORCH_DTYPES
from mtagen.planner.passes import PASSES
from mtagen.planner.sizes import (
    B0,
    B1,
    COUNT,
    GROUP,
    HEAD_PARTS,
    KEYS,
    KV_HEADS,
    N_HEADS,
    N_NEW,
    SLOTS,
    SPLITS,
    TOGETHER,
)
from mtagen.planner.strip.hidden import HiddenKeys
from mtagen.planner.strip.kernels import PROGRAMS, SECTION
from mtagen.planner.strip.limits import Limits
from mtagen.planner.strip.passes import StripPass
from mtagen.planner.strip.planes import PlaneConvolution, PlaneKernel
from mtagen.planner.strip.products import ROLES, ProductKernel, WarpgroupProduct
from mtagen.planner.strip.source import Form, StripSource
from mtagen.planner.strip.stages import PROBABILITY_SCALE, SCORE_SCALE, Convolution, Stages
from mtagen.planner.strip.steps import StepKernel
from mtagen.planner.strip.values import ValuesKernel
from mtagen.spec import HEAD_DIMS, Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]

FLOOR = 1e-7  # of errors: fp16 underflows
C_TYPES = {"int": torch.int32, "float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Strip(NamedTuple):
    """A strip of some sequences, whose first is ``b0`` of those of a call.

    Attributes:
        heads: of each sequence.
        count: rows.
        keys: keys.
        first: the query of the first row.
        off: from a query to its position.
        skip: rows before the first row of outputs.
        valid: rows before the first one whose scores have all of their context.
        sequences: of the strip.
        b0: the first of them.
        lengths: of a decode step, keys in use of each sequence, at whose end its rows are, whatever ``off`` is.
        before: of a decode step in a window, how many keys of each sequence come before those.
    """

    heads: int
    count: int
    keys: int
    first: int = 0
    off: int = 0
    skip: int = 0
    valid: int = 0
    sequences: int = 1
    b0: int = 0
    lengths: tuple[int, ...] = ()
    before: tuple[int, ...] = ()

    @property
    def n_k(self) -> int:
        """Keys of the cache."""
        return self.keys + max(self.before, default=0)

    def of_sequence(self, i: int) -> slice:
        """Those keys of the cache that the planes of sequence i have."""
        key0 = self.before[i] if self.before else 0
        return slice(key0, key0 + self.keys)

    @property
    def is_full(self) -> bool:
        """Whether it is a decode step of sequences that fill the cache. Kernels get no lengths of it."""
        ends = {n + key0 for n, key0 in zip(self.lengths, self.before or [0] * len(self.lengths), strict=True)}
        return ends == {self.n_k}

    @property
    def slots(self) -> int:
        """Planes, one for each head of each sequence."""
        return self.sequences * self.heads

    @property
    def used(self) -> Tensor:
        """(slots, 1, keys): whether a sequence has a key."""
        limits = torch.tensor(self.lengths or [self.keys] * self.sequences)[:, None, None]
        return (torch.arange(self.keys) < limits).repeat_interleave(self.heads, 0)

    def seen(self, spec: Spec) -> Tensor:
        """(slots, rows, keys): whether a row sees a key."""
        limits = torch.tensor(self.lengths or [self.keys] * self.sequences).clamp(max=self.keys)[:, None, None]
        first = limits - self.count if self.lengths else self.first + self.off
        positions = first + torch.arange(self.count)[:, None]
        j = torch.arange(self.keys)
        seen = j < limits
        if spec.right is not None:
            seen = seen & (j <= positions + spec.right)
        if spec.left is not None:
            seen = seen & (j >= positions - spec.left)
        if self.lengths:
            seen = seen & (positions >= 0)
        return seen.expand(self.sequences, -1, -1).repeat_interleave(self.heads, 0)


def source_of(spec: Spec, role: str, target: str = "sm_90a") -> StripSource:
    """The CUDA kernel of a role."""
    for name in PASSES:
        if role in (made := StripPass(spec, target, name, "cuda").cuda):
            return made[role]
    raise KeyError(role)


def makes(spec: Spec, role: str, target: str) -> bool:
    """Whether a CUDA kernel has a role."""
    return any(role in StripPass(spec, target, name, "cuda").cuda for name in PASSES)


def in_form(form: Form, patch: pytest.MonkeyPatch) -> list[str]:
    """From here on, kernels that may have this form have it; their roles."""
    planned, roles = source_of, []

    def formed(spec: Spec, role: str, target: str = "sm_90a") -> StripSource:
        source = planned(spec, role, target)
        if form not in source.forms:
            return source
        assert source.form != form
        roles.append(role)
        return replace(source, form=form)

    patch.setitem(globals(), "source_of", formed)
    return roles


def run(
    source: StripSource, strip: Strip, folder: Path, seed: int = 0, *, checked: bool = False, **values: Any
) -> None:
    """Launch a kernel as the host code does.

    Args:
        source: the kernel.
        strip: the strip.
        folder: where it is compiled.
        seed: see :class:`emulator.EmulatedKernel`.
        checked: see :class:`emulator.EmulatedKernel`.
        values: tensors, and numbers that the strip does not tell, by names of arguments.
    """
    kernel = source.kernel
    sizes = {
        SLOTS: strip.slots,
        COUNT: strip.count,
        KEYS: strip.keys,
        N_HEADS: strip.heads,
        B0: strip.b0,
        B1: strip.b0 + strip.sequences,
    }
    if "group" in values:
        sizes |= {GROUP: values["group"], KV_HEADS: strip.heads // values["group"]}
    if "together" in values:
        sizes |= {TOGETHER: values["together"], HEAD_PARTS: values["head_parts"]}
    if "split" in values:
        sizes |= {N_NEW: values["n_new"], SPLITS: -(-strip.keys // values["split"])}
    grid = tuple(int(size.subs(sizes)) for size in kernel.grid)
    named = strip._asdict() | {"n_heads": strip.heads, "pitch": pitch_of(source.spec, strip)} | values
    if strip.lengths:
        lengths = torch.tensor(strip.lengths) + torch.tensor(strip.before or 0)
        named["has_seqlens"] = int(not strip.is_full)
        lengths = torch.full_like(lengths, -1) if strip.is_full else lengths  # which nobody reads
        named["seqlens"] = torch.cat([torch.full((strip.b0,), -1), lengths]).int()
        named["n_k"] = strip.n_k
    given = [named[argument.name] for argument in kernel.arguments]
    for argument, value in zip(kernel.arguments, given, strict=True):
        if argument.pointer:  # of the type that the kernel takes it for
            named_types = {"Element": source.spec.dtype, "Score": "fp16", "Source": "fp16"}
            if isinstance(source, (PlaneConvolution, StepKernel)):
                named_types |= {"Source": source.source}
            if isinstance(source, (PlaneConvolution, StepKernel, ProductKernel)):
                named_types |= {"Result": source.result}
            assert value.dtype == C_TYPES[named_types.get(argument.type, argument.type)], argument.name
    launched = emulated(source, folder, seed, checked=checked)[source.role]
    launched(grid, *(x.data_ptr() if isinstance(x, Tensor) else x for x in given))


def pitch_of(spec: Spec, strip: Strip) -> int:
    """Elements from a row of a plane to the next."""
    multiple = Limits.of(spec).pitch_multiple
    return -(-strip.keys // multiple) * multiple


def planes(values: Tensor, dtype: torch.dtype, spec: Spec, strip: Strip) -> Tensor:
    """Planes (slots, rows, pitch) that hold these values (slots, rows, keys), and NaN beyond."""
    made = torch.full((strip.slots, strip.count, pitch_of(spec, strip)), torch.nan, dtype=dtype)
    made[:, :, : strip.keys] = values
    return made


def read_keys(hidden: HiddenKeys, spec: Spec, strip: Strip) -> Tensor:
    """(slots, rows, keys): which keys kernels read of each row, those that it sees and hidden ones."""
    if hidden.all or not hidden.tile:
        return strip.seen(spec).expand(-1, strip.count, -1) | hidden.all
    size, around = hidden.tile, (hidden.rows_around, hidden.keys_around)
    whole = strip._replace(count=-(-strip.count // size) * size)
    tiles = functional.max_pool2d(whole.seen(spec).expand(-1, whole.count, -1).float(), size, ceil_mode=True)
    read = tiles.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, : strip.count, : strip.keys]
    return functional.max_pool2d(read, [2 * n + 1 for n in around], 1, around).bool()


def empty(dtype: torch.dtype, spec: Spec, strip: Strip) -> Tensor:
    """Planes of results, which are NaN as yet."""
    return planes(torch.tensor(torch.nan), dtype, spec, strip)


def eighths(*shape: int, seed: int = 0, largest: int = 16) -> Tensor:
    """Multiples of 1/8 from -largest / 8 to largest / 8, which bf16 and fp16 hold."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=random).double() / 8


def assert_planes(given: Tensor, expected: Tensor, strip: Strip, where: Tensor | bool = True) -> None:
    """Exactly these values (slots, rows, keys), rounded to what planes hold; or only ``where`` they matter."""
    ours, rounded = given[:, :, : strip.keys], expected.to(given.dtype)
    wrong = ((ours != rounded) & where).nonzero()
    assert not len(wrong), f"{len(wrong)} wrong, first at {wrong[0].tolist()}: {ours[tuple(wrong[0])]}"


# Convolutions of planes.


def before(kernel: tuple[int, int], **options: Any) -> Spec:
    """A request that convolves before the softmax."""
    return Spec(kernel, 64, mixed_heads=2, **options)


def after(kernel: tuple[int, int], **options: Any) -> Spec:
    """One that convolves after it."""
    return Spec(None, 64, post_kernel=kernel, **options)


CONVOLUTIONS = {
    "(6, 11)": before((6, 11)),
    "(6, 11), full": before((6, 11), causal=False, dtype="fp16"),
    "(3, 3), left": before((3, 3), key_padding="left", dtype="fp16"),
    "(16, 16), right": before((16, 16), key_padding="right"),
    "(1, 5)": before((1, 5)),
    "(5, 1), full": before((5, 1), causal=False),
    "(6, 11) after": after((6, 11), key_padding="right"),
    "(3, 3) after, then mixed": after((3, 3), post_mixed_heads=2),
    "(2, 8) after, full": after((2, 8), causal=False, key_padding="left", dtype="fp16"),
    "(6, 11), a window": before((6, 11), window=(150, -1)),
    "(3, 3), a window on both sides": before((3, 3), causal=False, window=(40, 30)),
    "(6, 11) after, a window without an end": after((6, 11), causal=False, window=(20, -1), dtype="fp16"),
}
STRIPS = (
    Strip(1, 1, 1),
    Strip(2, 131, 650, first=30, off=500, skip=12, valid=7, sequences=2, b0=1),  # tiles of rows, walks along keys
    Strip(2, 70, 150, first=3, off=-45, skip=3),  # when causal, 42 rows see nothing
    Strip(3, 64, 128, first=64, off=0),  # a whole tile
    Strip(1, 150, 460, first=127, skip=5),  # many keys that no row sees
)
every_convolution = pytest.mark.parametrize("spec", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
RACES = pytest.mark.parametrize("spec", [CONVOLUTIONS["(6, 11)"], CONVOLUTIONS["(16, 16), right"]], ids=str)
SMALL = Strip(2, 150, 420, first=4, off=330)  # a CTA has more tiles than room for them


class Case:
    """A convolution of the planes of a strip with a weight for each head, by autograd in fp64: the request's last."""

    def __init__(self, spec: Spec, strip: Strip, stage: Convolution | None = None) -> None:
        self.spec, self.strip = spec, strip
        self.stage = stage = stage or Stages(spec).convolutions[-1]
        self.weight = eighths(strip.heads, stage.cq, stage.ck, seed=1, largest=8)
        self.used = strip.used
        self.x = eighths(strip.slots, strip.count, strip.keys, seed=2) * self.used
        self.seen = strip.seen(spec)
        self.dy = eighths(strip.slots, strip.count, strip.keys, seed=3) * self.seen
        x, weights = self.x.clone().requires_grad_(), self.weight.repeat(strip.sequences, 1, 1).requires_grad_()
        window = functional.pad(x, (stage.pad_left, stage.pad_right, stage.cq - 1, 0))
        y = functional.conv2d(window[None], weights[:, None], groups=strip.slots)[0]
        self.dx, self.dweights = torch.autograd.grad(y, (x, weights), self.dy)
        self.y = y.detach()

    def source(self, part: str) -> PlaneKernel | StepKernel:
        """The kernel of a part."""
        decode = f"decode_{self.stage.name}"
        made = source_of(self.spec, decode if self.strip.lengths else f"{self.stage.name}{part and '_'}{part}")
        assert isinstance(made, StepKernel if self.strip.lengths else PlaneKernel)
        return made

    def run(self, part: str, folder: Path, seed: int = 0, *, checked: bool = False, **values: Tensor) -> None:
        """Run the kernel of a part."""
        weight = {self.stage.weight: self.weight.float()}
        run(self.source(part), self.strip, folder, seed, checked=checked, **weight, **values)

    def plane(self, values: Tensor, dtype: str) -> Tensor:
        """A plane of the strip."""
        return planes(values, TORCH_DTYPES[dtype], self.spec, self.strip)

    def read_by(self, part: str, values: Tensor, dtype: str) -> Tensor:
        """A plane of the strip, of NaN where the kernel of a part reads no values."""
        read = read_keys(self.source(part).reads_hidden, self.spec, self.strip)
        return self.plane(values.where(self.used & read, torch.nan), dtype)

    def counts(self, part: str) -> Tensor:
        """Which results of the kernel of a part others read."""
        return read_keys(self.source(part).cleared[0], self.spec, self.strip)

    def convolve(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """What the kernel makes of x."""
        out = empty(TORCH_DTYPES[self.source("").result], self.spec, self.strip)
        self.run("", folder, seed, checked=checked, x=self.read_by("", self.x, "fp16"), out=out)
        return out

    def adjoint(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """What it makes of the gradient of the results."""
        dx = empty(TORCH_DTYPES[self.spec.dtype], self.spec, self.strip)
        self.run("adjoint", folder, seed, checked=checked, dy=self.read_by("adjoint", self.dy, self.spec.dtype), dx=dx)
        return dx

    def gradient(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """Sums (sequences of the call, heads, chunks of keys, cq, ck), which start as ones."""
        chunks = -(-self.strip.keys // self.source("gradient").tile_keys) + 2  # of the call's keys, some come later
        sequences = self.strip.b0 + self.strip.sequences + 1
        partial = torch.ones(sequences, self.strip.heads, chunks, self.stage.cq, self.stage.ck)
        x, dy = (self.read_by("gradient", z, t) for z, t in ((self.x, "fp16"), (self.dy, self.spec.dtype)))
        self.run("gradient", folder, seed, checked=checked, x=x, dy=dy, partial=partial, all_chunks=chunks)
        return partial


@every_convolution
def test_convolution(spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(STRIPS):
        case = Case(spec, strip)
        expected = case.stage.factor * case.y * case.seen
        if case.stage.final:
            expected[:, : strip.skip] = 0
        assert_planes(case.convolve(folder, seed), expected, strip, case.counts(""))


@every_convolution
def test_adjoint(spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(STRIPS):
        case = Case(spec, strip)
        assert_planes(case.adjoint(folder, seed), case.dx * case.seen, strip, case.counts("adjoint"))


def assert_left_alone(plane: Tensor, kernel: StripSource, spec: Spec, strip: Strip) -> None:
    """In the first row, keys that no kernel reads hold what they held, from the tile after the next on."""
    (last,) = read_keys(kernel.cleared[0], spec, strip)[0, 0].nonzero().amax(0)
    first = (int(last) // 128 + 2) * 128
    assert first < strip.keys
    assert plane[:, 0, first : strip.keys].ne(0).all()  # bits of NaN in another dtype are a number


def test_keys_that_no_kernel_reads(folder: Path) -> None:
    strip = STRIPS[-1]._replace(keys=700)
    for name in ("(6, 11)", "(6, 11) after"):
        case = Case(CONVOLUTIONS[name], strip)
        assert_left_alone(case.convolve(folder), case.source(""), case.spec, strip)
        assert_left_alone(case.adjoint(folder), case.source("adjoint"), case.spec, strip)
    for target in PRODUCT_TARGETS:
        role, spec = PRODUCTS["scores of 64"]
        plane, _, _ = product(role, spec, target, strip, folder)
        assert_left_alone(plane, source_of(spec, role, target), spec, strip)
    for heads, spec in (ROWS["a convolution after"], ROWS["all stages"]):
        rows = Rows(spec, strip._replace(heads=heads))
        assert_left_alone(rows.softmax(folder)[0], rows.source("softmax"), spec, rows.strip)
        made = rows.softmax_backward(folder)["dx"]
        assert_left_alone(made, rows.source("softmax_backward"), spec, rows.strip)


@every_convolution
def test_gradient_of_the_weight(spec: Spec, folder: Path) -> None:
    """Each sum is of its own slot and tile of keys, and is added to what was there."""
    for seed, strip in enumerate(STRIPS):
        case = Case(spec, strip)
        sums = case.gradient(folder, seed).double() - 1
        own = sums[strip.b0 : strip.b0 + strip.sequences]
        made = own.sum(2).view(strip.slots, case.stage.cq, case.stage.ck)
        assert torch.equal(made, case.dweights / case.stage.scale)
        assert not sums[: strip.b0].any()
        assert not sums[strip.b0 + strip.sequences :].any()
        assert not sums[:, :, -2:].any()


def steps(spec: Spec, heads: int, sizes: Iterable[tuple[int, int]] = ((1, 1), (2, 300), (8, 650))) -> Iterator[Strip]:
    """Decode steps of some new tokens over a cache of some keys, of which sequences use some, all, none, or few.

    Planes have those keys that rows see, in a window from the first that the first row sees on.
    """
    for new_tokens, n_k in sizes:
        count = spec.context + new_tokens
        lengths = [*map(abs, (n_k - 7, n_k + 5, 0, count - 1))]
        skip, valid = spec.context, spec.context - Stages(spec).post_context
        before, keys = [0] * len(lengths), n_k
        if spec.left is not None:
            before, keys = [max(0, min(n, n_k) - count - spec.left) for n in lengths], min(n_k, count + spec.left)
        own = [n - key0 for n, key0 in zip(lengths, before, strict=True)]
        yield Strip(heads, count, keys, 0, 0, skip, valid, len(own), 1, tuple(own), tuple(before))


def full_step(spec: Spec, heads: int) -> Strip:
    """A decode step of sequences that fill the cache, which a window's planes hold the end of."""
    count, n_k = spec.context + 2, spec.context + 70
    keys = n_k if spec.left is None else count + spec.left
    skip, valid = spec.context, spec.context - Stages(spec).post_context
    return Strip(heads, count, keys, 0, 0, skip, valid, 2, 1, (keys, keys), (n_k - keys,) * 2)


STEPS = CONVOLUTIONS | {
    "both": Spec((6, 11), 64, post_kernel=(6, 11), post_mixed_heads=2),
    "both, other sizes, full": Spec((2, 9), 64, mixed_heads=2, post_kernel=(16, 3), causal=False),
    "both, rows after": Spec((1, 1), 64, post_kernel=(2, 17), key_padding="left", dtype="fp16"),
}


@pytest.mark.parametrize("spec", STEPS.values(), ids=STEPS)
def test_convolution_of_a_decode_step(spec: Spec, folder: Path) -> None:
    """Later kernels look at no results past the end of a sequence, nor before the rows that they need."""
    sizes = ((1, 1), (2, 300), (8, 650), (1, 2100))
    for seed, (strip, stage) in enumerate(itertools.product(steps(spec, 2, sizes), Stages(spec).convolutions)):
        case = Case(spec, strip, stage)
        needed = torch.arange(strip.count)[:, None] >= (strip.skip if case.stage.final else strip.valid)
        expected = case.stage.factor * case.y * case.seen
        where = case.used & needed & (spec.causal | case.seen)  # rows before a sequence, too, are looked at by none
        assert_planes(case.convolve(folder, seed), expected, strip, where)


@pytest.mark.parametrize("spec", [after((1, 1)), CONVOLUTIONS["(6, 11)"], CONVOLUTIONS["(2, 8) after, full"]], ids=str)
def test_rows_of_a_decode_step_that_hold_no_numbers(spec: Spec, folder: Path) -> None:
    """A row that sees a key of NaN changes no bit of rows that it has no tap for."""
    case = Case(spec, Strip(2, spec.context + 8, 300, skip=spec.context, valid=spec.context, lengths=(300,)))
    expected, x = case.convolve(folder), case.x
    for row in range(spec.context, case.strip.count):
        case.x = x.clone()
        case.x[:, row] = torch.nan
        rows = torch.arange(spec.context, case.strip.count)
        rows = rows[(rows < row) | (rows >= row + case.stage.cq)]
        assert torch.equal(case.convolve(folder)[:, rows, :300], expected[:, rows, :300])


@pytest.mark.parametrize("spec", [CONVOLUTIONS["(6, 11)"], CONVOLUTIONS["(3, 3), left"]], ids=str)
def test_the_order_of_warps_changes_nothing_in_planes(spec: Spec, folder: Path) -> None:
    case = Case(spec, SMALL)
    for part in (case.convolve, case.adjoint, case.gradient):
        first, *others = (part(folder, seed)[..., : SMALL.keys] for seed in range(4))
        assert all(torch.equal(first, other) for other in others)


@RACES
def test_no_races_in_planes(spec: Spec, folder: Path) -> None:
    """Of two accesses to shared memory, one of them a write, a barrier comes between."""
    case = Case(spec, SMALL)
    for seed, part in enumerate((case.convolve, case.adjoint, case.gradient)):
        part(folder, seed, checked=True)


@pytest.mark.parametrize("form", [Form(8, keys=64, walk=256), Form(4, keys=64, walk=512), Form(8, keys=128, walk=1024)])
def test_convolutions_of_other_forms(form: Form, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    roles, spec = in_form(form, monkeypatch), CONVOLUTIONS["(6, 11)"]
    test_convolution(spec, folder)
    test_adjoint(spec, folder)
    test_no_races_in_planes(spec, folder)
    assert {*roles} == {"convolution", "convolution_adjoint"}


def test_gradients_of_weights_of_another_form(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    roles, spec = in_form(Form(4, keys=128), monkeypatch), CONVOLUTIONS["(6, 11)"]
    test_gradient_of_the_weight(spec, folder)
    test_no_races_in_planes(spec, folder)
    assert {*roles} == {"convolution_gradient"}


@RACES
def test_no_races_in_steps(spec: Spec, folder: Path) -> None:
    """And the order of warps changes nothing. A CTA has more tiles than slabs."""
    (step,) = steps(spec, 1, [(2, 2100)])
    case = Case(spec, step)
    first, *others = (case.convolve(folder, seed, checked=True).nan_to_num() for seed in range(3))
    assert all(torch.equal(first, other) for other in others)


# Products of rows.

PRODUCTS = {
    "scores of 64": ("scores", before((3, 3))),
    "scores of 256, full": ("scores", Spec((3, 3), 256, mixed_heads=2, causal=False)),
    "scores of 80": ("scores", Spec((3, 3), 80, mixed_heads=2, dtype="fp16")),
    "gradients of shares, of 128": ("grad_shares", Spec((3, 3), 64, 128, post_kernel=(6, 3))),
    "gradients of shares, of 16, full": ("grad_shares", Spec(None, 64, 16, post_kernel=(1, 3), causal=False)),
    "scores that nothing convolves": ("scores", Spec(None, 96, mixed_heads=2)),
    "gradients of shares that are mixed": ("grad_shares", Spec((3, 3), 64, mixed_heads=2, post_mixed_heads=2)),
    "scores of a step of 64": ("decode_scores", before((3, 3))),
    "scores of a step of 192, full": ("decode_scores", Spec((16, 3), 192, post_kernel=(9, 1), causal=False)),
    "scores of 64 in a window": ("scores", before((3, 3), window=(150, -1))),
    "scores of 64 in a window that nothing convolves": ("scores", Spec(None, 64, mixed_heads=2, window=(150, -1))),
    "gradients of shares, of 64, in a window on both sides": (
        "grad_shares",
        after((6, 3), causal=False, window=(40, 30)),
    ),
    "scores of a step of 64 in a window": ("decode_scores", before((3, 3), window=(150, -1))),
    "scores of a step of 64 in a window on both sides": ("decode_scores", after((3, 3), causal=False, window=(40, 9))),
}

PRODUCT_TARGETS = ("sm_90a", "sm_80")  # with products of warpgroups, and without
every_product = pytest.mark.parametrize(
    ("role", "spec", "target"),
    [
        pytest.param(role, spec, target, id=f"{name}-{target}")
        for name, (role, spec) in PRODUCTS.items()
        for target in PRODUCT_TARGETS
        if target == "sm_90a"
        or role != "grad_shares"
        or Stages(spec).masks_probability_gradients  # else cuBLAS makes it
    ],
)


def product(
    role: str, spec: Spec, target: str, strip: Strip, folder: Path, seed: int = 0, *, checked: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What a kernel makes of rows of queries and of keys of half as many heads, what it should, and where that counts.

    Hidden results count where a convolution reads them.
    """
    source = source_of(spec, role, target)
    assert isinstance(source, ProductKernel)
    assert isinstance(source, WarpgroupProduct) == (target == "sm_90a" and not source.decodes)
    group, batch = 2 if strip.heads % 2 == 0 else 1, strip.b0 + strip.sequences
    n_q, n_k = strip.first + strip.count + 3, strip.n_k + 9

    def rows(heads: int, n: int) -> Tensor:  # strided, and NaN at first
        return torch.full((batch, n, heads, source.width + 8), torch.nan).to(TORCH_DTYPES[spec.dtype]).transpose(1, 2)

    x, y = rows(strip.heads, n_q)[..., : source.width], rows(strip.heads // group, n_k)[..., : source.width]
    own_x = x[strip.b0 :, :, strip.first : strip.first + strip.count]
    own_x.copy_(eighths(*own_x.shape, seed=1))
    own_y = eighths(strip.sequences, strip.heads // group, strip.keys, source.width, seed=2)
    for i, length in enumerate(strip.lengths):  # before a sequence, and behind it
        own_x[i, :, : max(0, strip.count - length)] = torch.nan
        own_y[i, :, length:] = torch.nan
    for i, one in enumerate(own_y):
        y[strip.b0 + i, :, strip.of_sequence(i)] = one.to(y.dtype)
    products = (own_x.double() @ own_y.double().repeat_interleave(group, 1).mT).flatten(0, 1)
    seen = strip.seen(spec)
    expected = (products * SCORE_SCALE).where(seen, 0)
    if source.skips:
        expected[:, : strip.skip] = 0
    plane = empty(TORCH_DTYPES[source.result], spec, strip)
    strides = {f"{name}_stride_{axis}": z.stride(i) for name, z in (("x", x), ("y", y)) for i, axis in enumerate("bhn")}
    factor = SCORE_SCALE
    run(source, strip, folder, seed, checked=checked, x=x, y=y, plane=plane, group=group, factor=factor, **strides)
    return plane, expected, seen | (source.zeroes & read_keys(source.cleared[0], spec, strip))


@every_product
def test_product(role: str, spec: Spec, target: str, folder: Path) -> None:
    for seed, strip in enumerate(steps(spec, 2) if role.startswith("decode") else STRIPS):
        plane, expected, counts = product(role, spec, target, strip, folder, seed)
        assert_planes(plane, expected, strip, counts)


@pytest.mark.parametrize("target", PRODUCT_TARGETS)
def test_products_of_other_forms(target: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    role, spec = PRODUCTS["scores of 64"]
    _, *others = source_of(spec, role, target).variants
    assert others
    for other in others:
        with monkeypatch.context() as patch:
            roles = in_form(other.form, patch)
            test_product(role, spec, target, folder)
            assert {*roles} == {role}


@pytest.mark.parametrize("target", PRODUCT_TARGETS)
@pytest.mark.parametrize("name", ["scores of 64", "scores of 256, full", "scores of a step of 64"])
def test_no_races_in_products(name: str, target: str, folder: Path) -> None:
    role, spec = PRODUCTS[name]
    for seed in range(2):
        (step,) = steps(spec, 2, [(2, 300)])
        product(role, spec, target, step if role.startswith("decode") else SMALL, folder, seed, checked=True)


@pytest.mark.sweep
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("target", MMA_TARGETS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_products_of_every_head_dim(head_dim: int, target: str, role: str, folder: Path) -> None:
    spec = Spec((3, 3), head_dim, post_kernel=(6, 3))
    if not makes(spec, role, target):
        pytest.skip("another kernel's")
    test_product(role, spec, target, folder)


# Products of shares with values.

VALUES = {
    "of 64": (2, 1, Spec(None, 64, mixed_heads=2, post_mixed_heads=2)),
    "of 128, grouped": (8, 2, after((3, 3), value_head_dim=128)),
    "of 80, grouped": (3, 1, after((2, 5), value_head_dim=80, dtype="fp16")),
    "of 16, full": (1, 1, after((1, 3), value_head_dim=16, causal=False)),
    "of 256": (1, 1, after((2, 2), value_head_dim=256)),
    "of 64, in a window": (2, 1, after((2, 2), window=(150, -1))),
}


def values(
    heads: int,
    kv_heads: int,
    spec: Spec,
    strip: Strip,
    split: int,
    folder: Path,
    seed: int = 0,
    target: str = "sm_90a",
    *,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sums (parts, sequences of the call, heads, new tokens, dv) that the kernel makes, NaN at first, and its own ones
    as they should be: outputs, if there is one part."""
    source, dtype = source_of(spec, "decode_values", target), TORCH_DTYPES[spec.dtype]
    n_new = strip.count - strip.skip
    dv, batch, parts = spec.value_head_dim, strip.b0 + strip.sequences + 1, -(-strip.keys // split)
    shares = eighths(strip.slots, strip.count, strip.keys, seed=1).where(strip.used, torch.nan)
    shares[:, : strip.skip] = torch.nan  # whatever is before the new tokens
    v = torch.full((batch, strip.n_k, kv_heads, dv + 8), torch.nan, dtype=dtype).transpose(1, 2)[..., :dv]  # strided
    own = eighths(strip.sequences, kv_heads, strip.keys, dv, seed=2)
    for i, length in enumerate(strip.lengths):
        own[i, :, length:] = torch.nan
        v[strip.b0 + i, :, strip.of_sequence(i)] = own[i].to(dtype)
    partial = torch.full((parts, batch, heads, n_new, dv), torch.nan)
    out = torch.full_like(partial[:1], torch.nan, dtype=dtype)
    numbers = {"group": heads // kv_heads, "n_new": n_new, "batch": batch, "split": split}
    numbers |= {f"v_stride_{axis}": v.stride(i) for i, axis in enumerate("bhn")}
    plane = planes(shares, dtype, spec, strip)
    run(source, strip, folder, seed, checked=checked, plane=plane, v=v, partial=partial, out=out, **numbers)
    a = shares[:, strip.skip :].view(strip.sequences, heads, n_new, -1).nan_to_num()
    b = own.nan_to_num().repeat_interleave(heads // kv_heads, 1)
    pieces = zip(a.split(split, -1), b.split(split, -2), strict=True)
    sums = torch.stack([x @ y for x, y in pieces])
    made, unused = (out, partial) if parts == 1 else (partial, out)
    assert unused.isnan().all()
    return made, sums.to(made.dtype).double()


@pytest.mark.parametrize(("heads", "kv_heads", "spec"), VALUES.values(), ids=VALUES)
def test_values(heads: int, kv_heads: int, spec: Spec, folder: Path) -> None:
    """Sums of multiples of 1/64 are exact. Other sequences' are left alone."""
    for seed, (strip, split) in enumerate(itertools.product(steps(spec, heads), (64, 320, 1024))):
        partial, expected = values(heads, kv_heads, spec, strip, split, folder, seed)
        assert torch.equal(partial[:, strip.b0 : -1].double(), expected)
        assert partial[:, : strip.b0].isnan().all()
        assert partial[:, -1].isnan().all()


@pytest.mark.sweep
@pytest.mark.parametrize("target", MMA_TARGETS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_values_of_every_head_dim(head_dim: int, target: str, folder: Path) -> None:
    spec = Spec((3, 3), head_dim, post_kernel=(6, 3))
    if not makes(spec, "decode_values", target):
        pytest.skip("another kernel's")
    (step,) = steps(spec, 2, [(3, 650)])
    partial, expected = values(2, 1, spec, step, 320, folder, target=target)
    assert torch.equal(partial[:, step.b0 : -1].double(), expected)


@pytest.mark.parametrize(("name", "target", "depth"), [("of 128, grouped", "sm_90a", 4), ("of 256", "sm_86", 2)])
def test_no_races_in_values(name: str, target: str, depth: int, folder: Path) -> None:
    """And the order of warps changes nothing. A warp has more blocks than its ring holds."""
    heads, kv_heads, spec = VALUES[name]
    source = source_of(spec, "decode_values", target)
    assert isinstance(source, ValuesKernel)
    assert source.depth == depth
    (step,) = steps(spec, heads, [(3, 650)])
    for seed in range(3):
        partial, expected = values(heads, kv_heads, spec, step, 640, folder, seed, target, checked=True)
        assert torch.equal(partial[:, step.b0 : -1].double(), expected)


# Mixtures of heads and the softmax.

ROWS = {
    "16 heads mix, before and after": (16, Spec(None, 128, mixed_heads=16, post_mixed_heads=16)),
    "two bundles of 10": (20, Spec(None, 64, mixed_heads=10, post_mixed_heads=10, dtype="fp16")),
    "pairs of 10 heads": (10, Spec(None, 64, mixed_heads=2, post_mixed_heads=2)),
    "groups of 3 before, full": (9, Spec((3, 3), 64, mixed_heads=3, causal=False)),
    "groups of 4 after": (20, Spec((3, 3), 64, 128, post_mixed_heads=4, dtype="fp16")),
    "a convolution after": (18, after((3, 3))),
    "all stages": (12, Spec((3, 3), 64, mixed_heads=2, post_kernel=(2, 5), post_mixed_heads=4)),
    "all stages, other groups, full": (
        20,
        Spec((3, 3), 64, mixed_heads=4, post_kernel=(2, 5), post_mixed_heads=10, causal=False, dtype="fp16"),
    ),
    "pairs of 10 heads in a window": (10, Spec(None, 64, mixed_heads=2, post_mixed_heads=2, window=(100, -1))),
    "all stages, a window on both sides": (
        12,
        Spec((3, 3), 64, mixed_heads=2, post_kernel=(2, 5), post_mixed_heads=4, causal=False, window=(70, 9)),
    ),
    "a mixture after, a long window": (4, Spec(None, 64, post_kernel=(2, 5), post_mixed_heads=4, window=(2300, -1))),
}
every_mixture = pytest.mark.parametrize(("heads", "spec"), ROWS.values(), ids=ROWS)
GARBAGE = math.nan  # in places that a kernel must not read, or must read as zero


class Rows:
    """The rows of a strip of scores, and what is made of them, in fp64 by formula.

    Attributes:
        scores: (slots, rows, keys), as are the others.
        seen: which of them their rows see, none before ``valid``.
        mixed: those that the softmax takes.
        probabilities: its results, zero where hidden.
        lse: (slots, rows).
    """

    def __init__(self, spec: Spec, strip: Strip) -> None:
        self.spec, self.strip, self.stages = spec, strip, Stages(spec)
        # In a decode step, log-sum-exps of new tokens only
        self.n_q = strip.count - strip.skip if strip.lengths else strip.first + strip.count + 3
        shape = (strip.slots, strip.count, strip.keys)
        self.seen = strip.seen(spec) & (torch.arange(strip.count) >= strip.valid)[:, None]
        self.weights = {
            name: eighths(strip.heads // m, m, m, seed=10 + i, largest=8)
            for i, (name, m) in enumerate(spec.mixed.items())
        }
        self.scores = eighths(*shape, seed=4, largest=32).where(self.seen, GARBAGE)
        self.mixed = self.mix("head_weight", self.scores) + self.added()
        self.lse = torch.logsumexp(self.mixed.masked_fill(~self.seen, -torch.inf), -1)
        self.probabilities = (self.mixed - self.lse[..., None]).exp().where(self.seen, 0)

    def mix(self, name: str, x: Tensor, *, transposed: bool = False, absolute: bool = False) -> Tensor:
        """Values of planes, mixed by a weight; as they are where there is none."""
        if name not in self.weights:
            return x
        weight = self.weights[name].abs() if absolute else self.weights[name]
        grouped = x.view(self.strip.sequences, *weight.shape[:2], *x.shape[1:])
        made = torch.einsum("gio,sgirj->sgorj" if transposed else "goi,sgirj->sgorj", weight, grouped)
        return made.reshape(x.shape)

    def added(self) -> Tensor:
        """Terms that are added to mixed scores before the softmax."""
        return torch.zeros(())

    def source(self, role: str) -> StripSource:
        """The kernel of a role."""
        return source_of(self.spec, f"decode_{role}" if self.strip.lengths else role)

    def counts(self, role: str, i: int = 0) -> Tensor:
        """Which results of a kernel others read, of its i-th plane."""
        return read_keys(self.source(role).cleared[i], self.spec, self.strip)

    def read_of(self, role: str, made: Tensor, i: int = 0) -> Tensor:
        """The results that others read, of the i-th plane of the kernel of a role, and zeros elsewhere."""
        return made[:, :, : self.strip.keys].where(self.counts(role, i), 0)

    def run(self, role: str, folder: Path, seed: int = 0, *, checked: bool = False, **tensors: Any) -> None:
        """Run the kernel of a role."""
        weights = {name: x.float() for name, x in self.weights.items()}
        run(self.source(role), self.strip, folder, seed, checked=checked, n_q=self.n_q, **(weights | tensors))

    def plane(self, values: Tensor, dtype: str) -> Tensor:
        """A plane of the strip."""
        return planes(values, TORCH_DTYPES[dtype], self.spec, self.strip)

    def score_plane(self) -> Tensor:
        """What the product or the convolution has made."""
        return self.plane(self.scores * SCORE_SCALE, "fp16")

    def statistics(self, rows: Tensor) -> Tensor:
        """(sequences of the call, heads, queries) of rows (slots, rows), and NaN elsewhere."""
        made = torch.full((self.strip.b0 + self.strip.sequences + 1, self.strip.heads, self.n_q), torch.nan)
        self.own(made).copy_(rows.view(self.strip.sequences, self.strip.heads, -1))
        return made

    def own(self, statistics: Tensor) -> Tensor:
        """The strip's part of these."""
        b0, first = self.strip.b0, self.strip.first
        return statistics[b0 : b0 + self.strip.sequences, :, first : first + self.strip.count]

    def partial(self, heads: int) -> Tensor:
        """Partial sums of bundles, which start as ones."""
        bundles = -(-self.strip.heads // heads)
        return torch.ones((self.strip.b0 + self.strip.sequences + 1) * bundles, PROGRAMS, 16, 16)

    def softmax(self, folder: Path, seed: int = 0, *, checked: bool = False) -> tuple[Tensor, Tensor]:
        """Its results, which take the place of the scores, and the log-sum-exp."""
        x = self.score_plane()
        lse = torch.full((self.strip.b0 + self.strip.sequences + 1, self.strip.heads, self.n_q), torch.nan)
        out = x.view(TORCH_DTYPES["fp16" if self.stages.post_is_separate else self.spec.dtype])
        sums = torch.full((self.strip.slots, self.strip.count, -(-self.strip.keys // SECTION)), torch.inf)
        if self.strip.lengths:
            self.run("statistics", folder, seed, checked=checked, x=x, sums=sums)
        self.run("softmax", folder, seed, checked=checked, x=x, out=out, lse=lse, sums=sums)
        return out, lse

    def softmax_backward(self, folder: Path, seed: int = 0, *, checked: bool = False) -> dict[str, Tensor]:
        """Its results by names of arguments; dx takes the place of the scores."""
        x, g = self.score_plane(), self.plane(self.g, self.spec.dtype)
        made = {"dx": x.view(TORCH_DTYPES[self.spec.dtype])}
        if not self.stages.post_is_separate:
            made["shares"] = empty(TORCH_DTYPES[self.spec.dtype], self.spec, self.strip)
        if self.stages.mix:
            made["mix_partial"] = self.partial(self.stages.heads)
        if self.stages.fused_post_mix:
            made["post_mix_partial"] = self.partial(self.stages.heads)
        statistics = {"lse": self.statistics(self.lse), "grad_lse": self.statistics(self.grad_lse)}
        self.run("softmax_backward", folder, seed, checked=checked, x=x, g=g, **statistics, **made)
        return made

    @cached_property
    def g(self) -> Tensor:
        """The gradient of what the softmax's kernel makes, such that all of it counts."""
        return eighths(*self.seen.shape, seed=5).where(self.seen, GARBAGE)

    @cached_property
    def grad_lse(self) -> Tensor:
        """The gradient of the log-sum-exp of the rows."""
        return eighths(*self.lse.shape, seed=6)

    def assert_sums(self, partial: Tensor, y: Tensor, x: Tensor, terms: Tensor, heads: int) -> None:
        """Each program has y x^T of its rows, over the keys, of the heads of its bundle, besides the ones of before."""
        bundles, strip = -(-self.strip.heads // heads), self.strip
        sums = (partial.double() - 1).view(-1, bundles, *partial.shape[1:])
        own = sums[strip.b0 : strip.b0 + strip.sequences]
        assert not sums[: strip.b0].any()
        assert not sums[strip.b0 + strip.sequences :].any()
        assert not own[:, :, strip.count :].any()  # programs without a row
        for bundle in range(bundles):
            begin, end = bundle * heads, min((bundle + 1) * heads, strip.heads)
            size = end - begin

            def outer(a: Tensor, b: Tensor, begin: int = begin, end: int = end) -> Tensor:
                a, b = (z.view(strip.sequences, strip.heads, *z.shape[1:])[:, begin:end] for z in (a, b))
                by_rows = torch.einsum("sorj,sirj->sroi", a, b)
                programs = by_rows.new_zeros(len(a), PROGRAMS, *by_rows.shape[2:])
                return programs.index_add(1, torch.arange(strip.count) % PROGRAMS, by_rows)

            assert_close(own[:, bundle, :, :size, :size], outer(y, x), outer(terms, x.abs()), self.spec.dtype)


def assert_close(given: Tensor, expected: Tensor, terms: Tensor, dtype: str) -> None:
    """Within two roundings to ``dtype`` of the terms that a result is the sum of."""
    allowed = torch.finfo(TORCH_DTYPES[dtype]).eps * terms + FLOOR
    error = (given.double() - expected).abs()
    assert (error <= allowed).all(), f"{error.max():.3g}: {error.sub(allowed).argmax()} of {tuple(error.shape)}"


def row_strips(heads: int) -> tuple[Strip, ...]:
    return (
        Strip(heads, 1, 1),
        Strip(heads, 5, 300, first=2, off=200, skip=3, valid=1, sequences=2, b0=1),
        Strip(heads, 4, 70, first=1, off=-3),  # when causal, 2 rows see nothing
    )


def assert_softmax(rows: Rows, folder: Path, seed: int = 0) -> None:
    """Shares or probabilities, and the log-sum-exp of the strip's own rows, where nothing else is written."""
    strip, separate = rows.strip, rows.stages.post_is_separate
    out, lse = rows.softmax(folder, seed)
    p, name = rows.probabilities * (PROBABILITY_SCALE if separate else 1), "" if separate else "post_head_weight"
    expected, terms = rows.mix(name, p), rows.mix(name, p, absolute=True)
    needed = strip.valid if strip.lengths else 0  # the first row that is
    kept, dtype = rows.read_of("softmax", out).where(strip.used, 0), "fp16" if separate else rows.spec.dtype
    assert_close(kept[:, needed:], expected[:, needed:], terms[:, needed:], dtype)
    own, outputs = rows.own(lse).reshape(strip.slots, -1), strip.count - strip.skip
    torch.testing.assert_close(own[:, -outputs:].double(), rows.lse[:, strip.skip :], atol=1e-5, rtol=1e-6)
    assert own[:, :-outputs].isnan().all()  # a strip before has these, and a decode step none
    assert lse.isnan().sum() == lse.numel() - strip.slots * outputs


def assert_softmax_backward(rows: Rows, folder: Path, seed: int = 0) -> None:
    """The gradient of scores, shares again, and sums of the gradients of matrices."""
    strip, spec, stages, p, seen = rows.strip, rows.spec, rows.stages, rows.probabilities, rows.seen
    after_it = "post_head_weight" if stages.fused_post_mix else ""
    g = rows.g.where(seen, 0)
    dp, dp_terms = (rows.mix(after_it, x, transposed=True, absolute=x is not g) for x in (g, g.abs()))
    grad_lse = rows.grad_lse[..., None] * (torch.arange(strip.count) >= strip.skip)[:, None]
    dc = p * (dp - (p * dp).sum(-1, keepdim=True) + grad_lse)
    dc_terms = p * (dp_terms + (p * dp_terms).sum(-1, keepdim=True) + grad_lse.abs())
    made = rows.softmax_backward(folder, seed)
    dx = rows.mix("head_weight", dc, transposed=True)
    dx_terms = 2 * rows.mix("head_weight", dc_terms, transposed=True, absolute=True)
    assert_close(rows.read_of("softmax_backward", made["dx"]), dx, dx_terms, spec.dtype)
    if "shares" in made:
        shares, terms = (rows.mix(after_it, p, absolute=absolute) for absolute in (False, True))
        assert_close(rows.read_of("softmax_backward", made["shares"], 1), shares, terms, spec.dtype)
    if stages.mix:
        rows.assert_sums(made["mix_partial"], dc, rows.scores.where(seen, 0), dc_terms, stages.heads)
    if stages.fused_post_mix:
        rows.assert_sums(made["post_mix_partial"], g, p, g.abs(), stages.heads)


class RowsOfConstants(Rows):
    """Rows whose logits add a constant of each head and key, and subtract a slope times the distance."""

    FIRST_KEY = 3  # of a document among all keys

    def __init__(self, spec: Spec, strip: Strip) -> None:
        self.tokens = strip.keys + 7
        self.slopes = torch.rand(strip.heads, generator=torch.Generator().manual_seed(7))
        entries = (1 if spec.packed else strip.b0 + strip.sequences, strip.heads, self.tokens)
        self.gates = torch.rand(entries, generator=torch.Generator().manual_seed(8))
        super().__init__(spec, strip)

    def added(self) -> Tensor:
        strip = self.strip
        begin, b0 = (self.FIRST_KEY, 0) if self.spec.packed else (0, strip.b0)
        distances = strip.first + strip.off + torch.arange(strip.count)[:, None] - torch.arange(strip.keys)
        gates = self.gates[b0 : b0 + strip.sequences, :, begin : begin + strip.keys].double()
        added = gates[:, :, None] - self.slopes.double()[:, None, None] * distances / 16
        return added.reshape(strip.slots, strip.count, strip.keys)

    def run(self, role: str, folder: Path, seed: int = 0, *, checked: bool = False, **tensors: Any) -> None:
        constants = {"parameter_slopes": self.slopes, "parameter_gates": self.gates, "tokens": self.tokens}
        if (
            self.spec.packed
        ):  # a document: its number, its row, its number of queries, its first query, the same of keys
            strip = self.strip
            record = (0, 0, strip.count, strip.first, strip.keys, self.FIRST_KEY)
            constants |= {"documents": torch.tensor(record, dtype=torch.int32), "place0": 0}
        super().run(role, folder, seed, checked=checked, **(constants | tensors))


OF_CONSTANTS: dict[str, Any] = {
    "logits": "s - slopes[h] * (i - j) / 16 + gates[b, h, j]",
    "parameters": {"slopes": "h", "gates": "b,h,j"},
    "constants": ("slopes", "gates"),
}


@every_mixture
def test_softmax(heads: int, spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(row_strips(heads)):
        assert_softmax(Rows(spec, strip), folder, seed)


@pytest.mark.parametrize("name", ["all stages", "all stages, a window on both sides"])
def test_rows_of_several_tiles(name: str, folder: Path) -> None:
    """Other kernels read different hidden keys of the rows of each tile."""
    heads, spec = ROWS[name]
    strip = Strip(heads, 150, 460, first=127, skip=5, valid=4)
    assert_softmax(Rows(spec, strip), folder)
    assert_softmax_backward(Rows(spec, strip), folder)
    assert_post_mix_backward(Mixed(spec, strip), folder)


@every_mixture
def test_softmax_backward(heads: int, spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(row_strips(heads)):
        assert_softmax_backward(Rows(spec, strip), folder, seed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{"mixed_heads": 4, "post_mixed_heads": 4}, {"post_kernel": (2, 3)}], ids=str)
def test_softmax_of_constants(options: dict[str, Any], packed: bool, folder: Path) -> None:
    """CUDA's backward kernel has no sums of parameters' gradients. It reads constants."""
    spec = Spec(None, 64, packed=packed, **options, **OF_CONSTANTS)
    with pytest.raises(KeyError):
        source_of(replace(spec, constants=("slopes",)), "softmax_backward")
    strips = (Strip(8, 5, 300, first=2, off=293),) if packed else row_strips(8)
    for seed, strip in enumerate(strips):
        assert_softmax(RowsOfConstants(spec, strip), folder, seed)
        assert_softmax_backward(RowsOfConstants(spec, strip), folder, seed)


def test_softmax_backward_after_another_rounding(folder: Path) -> None:
    """Where outputs may be mixed instead of shares, another kernel's logarithms of sums are a little off."""
    heads, spec = ROWS["groups of 4 after"]
    assert Stages(spec).mixes_after_alone
    for seed, strip in enumerate(row_strips(heads)):
        rows = Rows(spec, strip)
        rows.lse += 0.02 * torch.rand(rows.lse.shape, generator=torch.Generator().manual_seed(seed))
        assert_softmax_backward(rows, folder, seed)


@every_mixture
def test_softmax_of_a_decode_step(heads: int, spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(steps(spec, heads)):
        assert_softmax(Rows(spec, strip), folder, seed)


@pytest.mark.parametrize("name", ["all stages, other groups, full", "a mixture after, a long window"])
def test_sections_of_a_row_in_a_decode_step(name: str, folder: Path) -> None:
    """CTAs merge the sums of sections, of which a sequence may have few or none."""
    heads, spec = ROWS[name]
    for seed, strip in enumerate(steps(spec, heads, [(2, 2 * SECTION + 100)])):
        assert -(-strip.keys // SECTION) > 1
        assert_softmax(Rows(spec, strip), folder, seed)


def test_merged_sums_of_many_sections(folder: Path) -> None:
    """A lane takes every eighth section."""
    spec = Spec(None, 64, mixed_heads=2, post_mixed_heads=2)
    (strip,) = steps(spec, 2, [(1, 9 * SECTION + 70)])
    assert_softmax(Rows(spec, strip), folder)


def test_other_sections_change_no_bit(folder: Path) -> None:
    """Planes may have room for more sections than a sequence has."""
    heads, spec = ROWS["pairs of 10 heads"]
    made = []
    for keys in (70, SECTION + 70, 10 * SECTION):
        rows = Rows(spec, Strip(heads, 1, keys, lengths=(70,), off=69))
        rows.scores[:, :, :70] = eighths(heads, 1, 70, seed=9)
        made.append([x[..., :70] for x in rows.softmax(folder)])
    for other in made[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(other, made[0], strict=True))


@pytest.mark.parametrize("name", ["pairs of 10 heads", "groups of 3 before, full", "a mixture after, a long window"])
def test_long_rows(name: str, folder: Path) -> None:
    """Each warp takes more blocks than it has room for at once."""
    heads, spec = ROWS[name]
    for seed in range(2):
        rows = Rows(spec, Strip(heads, 2, 5000, off=4990))
        assert_softmax(rows, folder, seed)
        assert_softmax_backward(rows, folder, seed)


def test_more_rows_than_programs(folder: Path) -> None:
    """Programs of the backward pass sum gradients of matrices over several rows."""
    spec = Spec(None, 64, mixed_heads=2, post_mixed_heads=2, causal=False)
    assert_softmax_backward(Rows(spec, Strip(2, PROGRAMS + 9, 10)), folder)


@pytest.mark.parametrize(("heads", "spec"), [x for x in ROWS.values() if Stages(x[1]).post_is_separate], ids=str)
def test_probabilities(heads: int, spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(row_strips(heads)):
        rows = Rows(spec, strip)
        out = empty(torch.float16, spec, strip)
        rows.run("probabilities", folder, seed, x=rows.score_plane(), lse=rows.statistics(rows.lse), out=out)
        expected = PROBABILITY_SCALE * rows.probabilities
        assert_close(rows.read_of("probabilities", out), expected, expected, "fp16")


class Mixed(Rows):
    """The rows of the mixture after a convolution, whose results are exact."""

    def __init__(self, spec: Spec, strip: Strip) -> None:
        super().__init__(spec, strip._replace(valid=strip.skip))
        self.x = eighths(*self.seen.shape, seed=7).where(self.seen, 0)
        self.dy = eighths(*self.seen.shape, seed=8).where(self.seen, 0)

    def post_mix(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """Its results, in the place of x."""
        x = self.plane(self.x.where(self.seen, GARBAGE), "fp16")
        out = x.view(TORCH_DTYPES[self.spec.dtype])
        self.run("post_mix", folder, seed, checked=checked, x=x, out=out)
        return out

    def post_mix_backward(self, folder: Path, seed: int = 0, *, checked: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The same, the gradient of x, and sums of the matrices' gradients."""
        x, dy = (self.plane(z.where(self.seen, GARBAGE), t) for z, t in ((self.x, "fp16"), (self.dy, self.spec.dtype)))
        out, partial = x.view(TORCH_DTYPES[self.spec.dtype]), self.partial(self.stages.post_heads)
        self.run("post_mix_backward", folder, seed, checked=checked, x=x, dy=dy, out=out, partial=partial)
        return out, dy, partial


separate = [x for x in ROWS.values() if Stages(x[1]).separate_post_mix]


@pytest.mark.parametrize(("heads", "spec"), separate, ids=str)
def test_post_mix(heads: int, spec: Spec, folder: Path) -> None:
    walks = steps(spec, heads, [(2, 2500)])  # several CTAs share a row
    for seed, strip in enumerate((*row_strips(heads), *steps(spec, heads), *walks)):
        rows = Mixed(spec, strip)
        expected = rows.mix("post_head_weight", rows.x) / PROBABILITY_SCALE
        needed = not strip.lengths or (torch.arange(strip.count)[:, None] >= strip.skip) & strip.used
        assert_planes(rows.post_mix(folder, seed), expected, strip, needed & rows.counts("post_mix"))


@pytest.mark.parametrize("window", [(-1, -1), (40, -1)])
def test_step_of_sequences_that_fill_the_cache(window: tuple[int, int], folder: Path) -> None:
    """Kernels get no lengths of them."""
    spec = Spec((3, 3), 64, mixed_heads=2, post_kernel=(2, 5), post_mixed_heads=2, window=window)
    strip = full_step(spec, 2)
    assert strip.is_full
    assert_planes(*product("decode_scores", spec, "sm_90a", strip, folder)[:2], strip, strip.seen(spec))
    for case in (Case(spec, strip, stage) for stage in Stages(spec).convolutions):
        needed = torch.arange(strip.count)[:, None] >= (strip.skip if case.stage.final else strip.valid)
        assert_planes(case.convolve(folder), case.stage.factor * case.y * case.seen, strip, needed)
    assert_softmax(Rows(spec, strip), folder)
    rows = Mixed(spec, strip)
    needed = torch.arange(strip.count)[:, None] >= strip.skip
    assert_planes(rows.post_mix(folder), rows.mix("post_head_weight", rows.x) / PROBABILITY_SCALE, strip, needed)
    for split in (64, 1024):
        sums, expected = values(2, 1, spec, strip, split, folder)
        assert torch.equal(sums[:, strip.b0 : -1].double(), expected)


@pytest.mark.parametrize(("heads", "spec"), separate, ids=str)
def test_post_mix_backward(heads: int, spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(row_strips(heads)):
        assert_post_mix_backward(Mixed(spec, strip), folder, seed)


def assert_post_mix_backward(rows: Mixed, folder: Path, seed: int = 0) -> None:
    """Shares, the gradient of what is mixed, and sums of the matrices' gradients."""
    out, dx, partial = rows.post_mix_backward(folder, seed)
    shares, gradients = (rows.counts("post_mix_backward", i) for i in range(2))
    assert_planes(out, rows.mix("post_head_weight", rows.x) / PROBABILITY_SCALE, rows.strip, shares)
    assert_planes(dx, rows.mix("post_head_weight", rows.dy, transposed=True), rows.strip, gradients)
    nothing = torch.zeros_like(rows.dy)  # sums are exact
    rows.assert_sums(partial, rows.dy, rows.x / PROBABILITY_SCALE, nothing, rows.stages.post_heads)


def everything(heads: int, spec: Spec, folder: Path, seed: int, *, checked: bool = False) -> list[Tensor]:
    """The results of all kernels of rows."""
    strip = Strip(heads, 2, 3700, first=2, off=3600, skip=1)  # a warp has more blocks than room for them
    rows, mixed = Rows(spec, strip), Mixed(spec, strip)
    made = [*rows.softmax(folder, seed, checked=checked)]
    made += rows.softmax_backward(folder, seed, checked=checked).values()
    if rows.stages.separate_post_mix:
        made += [mixed.post_mix(folder, seed, checked=checked), *mixed.post_mix_backward(folder, seed, checked=checked)]
    return made


@pytest.mark.parametrize("name", ["16 heads mix, before and after", "all stages"])
def test_the_order_of_warps_changes_nothing_in_rows(name: str, folder: Path) -> None:
    heads, spec = ROWS[name]
    first, *others = (everything(heads, spec, folder, seed) for seed in range(4))
    for other in others:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["16 heads mix, before and after", "all stages"])
def test_no_races_in_rows(name: str, folder: Path) -> None:
    heads, spec = ROWS[name]
    for seed in range(2):
        everything(heads, spec, folder, seed, checked=True)


@pytest.mark.parametrize("form", [Form(4, 3), Form(12, 1), Form(16, 1)])
@pytest.mark.parametrize("name", ["16 heads mix, before and after", "all stages"])
def test_rows_of_other_forms(name: str, form: Form, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    roles, (heads, spec) = in_form(form, monkeypatch), ROWS[name]
    test_softmax(heads, spec, folder)
    test_softmax_backward(heads, spec, folder)
    if Stages(spec).separate_post_mix:
        test_probabilities(heads, spec, folder)
        test_post_mix(heads, spec, folder)
        test_post_mix_backward(heads, spec, folder)
    test_no_races_in_rows(name, folder)
    assert {*roles} >= {"softmax", "softmax_backward"}
