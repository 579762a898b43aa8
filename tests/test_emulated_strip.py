"""The CUDA kernels of the lowering "strip", one by one, on a CPU that plays the GPU, against their formulas.

Planes hold small multiples of 1/8, and weights too: products and sums of them are exact, so that what convolutions and
mixtures give is exact but for the last rounding. Beyond their keys, planes hold NaN before a kernel starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import emulator
import pytest
import torch
from emulator import emulated, needs_compiler
from torch import Tensor
from torch.nn import functional

from mtagen.dtypes import TORCH_DTYPES
from mtagen.planner.strip.module import StripModule
from mtagen.planner.strip.passes import StripPass
from mtagen.planner.strip.planes import PlaneKernel
from mtagen.planner.strip.sizes import B0, B1, COUNT, KEYS, N_HEADS, SLOTS
from mtagen.planner.strip.source import StripSource
from mtagen.planner.strip.stages import Convolution, Stages
from mtagen.spec import Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]

C_TYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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

    @property
    def slots(self) -> int:
        """Planes, one for each head of each sequence."""
        return self.sequences * self.heads

    def seen(self, spec: Spec) -> Tensor:
        """(rows, keys): whether a row sees a key."""
        positions = self.first + self.off + torch.arange(self.count)
        if not spec.causal:
            return torch.ones(self.count, self.keys, dtype=torch.bool)
        return torch.arange(self.keys) <= positions[:, None]


def source_of(spec: Spec, role: str, target: str = "sm_90a") -> StripSource:
    """The CUDA kernel of a role."""
    for name in ("forward", "backward"):
        if role in (made := StripPass(spec, target, name, "cuda").cuda):
            return made[role]
    raise KeyError(role)


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
    grid = tuple(int(size.subs(sizes)) for size in kernel.grid)
    named = strip._asdict() | {"n_heads": strip.heads, "pitch": pitch_of(source.spec, strip)} | values
    given = [named[argument.name] for argument in kernel.arguments]
    for argument, value in zip(kernel.arguments, given, strict=True):
        if argument.pointer:  # of the type that the kernel takes it for
            type_of = {"Element": source.spec.dtype, "Score": "fp16"} | {
                name: getattr(source, name.lower(), "") for name in ("Source", "Result")
            }
            assert value.dtype == C_TYPES[type_of.get(argument.type, argument.type)], argument.name
            assert value.is_contiguous()
    launched = emulated(source, folder, seed, checked=checked)[source.role]
    launched(grid, *(x.data_ptr() if isinstance(x, Tensor) else x for x in given))


def pitch_of(spec: Spec, strip: Strip) -> int:
    """Elements from a row of a plane to the next."""
    multiple = StripModule.of([StripPass(spec, "sm_90a", "forward")]).pitch_multiple
    return -(-strip.keys // multiple) * multiple


def planes(values: Tensor, dtype: torch.dtype, spec: Spec, strip: Strip) -> Tensor:
    """Planes (slots, rows, pitch) that hold these values (slots, rows, keys), and NaN beyond."""
    made = torch.full((strip.slots, strip.count, pitch_of(spec, strip)), torch.nan, dtype=dtype)
    made[:, :, : strip.keys] = values
    return made


def empty(dtype: torch.dtype, spec: Spec, strip: Strip) -> Tensor:
    """Planes of results, which are NaN as yet."""
    return planes(torch.tensor(torch.nan), dtype, spec, strip)


def eighths(*shape: int, seed: int = 0, largest: int = 16) -> Tensor:
    """Multiples of 1/8 from -largest / 8 to largest / 8, which bf16 and fp16 hold."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=random).double() / 8


def assert_planes(given: Tensor, expected: Tensor, strip: Strip) -> None:
    """Exactly these values (slots, rows, keys), rounded to what planes hold."""
    ours, rounded = given[:, :, : strip.keys], expected.to(given.dtype)
    wrong = (ours != rounded).nonzero()
    assert not len(wrong), f"{len(wrong)} wrong, first at {wrong[0].tolist()}: {ours[tuple(wrong[0])]}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled; those of a request share a name with those of no other."""
    return tmp_path_factory.mktemp("kernels")


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
}
STRIPS = (
    Strip(1, 1, 1),
    Strip(2, 131, 650, first=30, off=500, skip=12, valid=7, sequences=2, b0=1),  # tiles of rows, walks along keys
    Strip(2, 70, 150, first=3, off=-45, skip=3),  # when causal, 42 rows see nothing
    Strip(3, 64, 128, first=64, off=0),  # a whole tile
)
every_convolution = pytest.mark.parametrize("spec", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
RACES = pytest.mark.parametrize("spec", [CONVOLUTIONS["(6, 11)"], CONVOLUTIONS["(16, 16), right"]], ids=str)
SMALL = Strip(2, 90, 200, first=4, off=60)


class Case:
    """A convolution of the planes of a strip with a weight for each head, by autograd in fp64."""

    def __init__(self, spec: Spec, strip: Strip) -> None:
        self.spec, self.strip = spec, strip
        (stage,) = Stages(spec).convolutions
        self.stage: Convolution = stage
        self.weight = eighths(strip.heads, stage.cq, stage.ck, seed=1, largest=8)
        self.x = eighths(strip.slots, strip.count, strip.keys, seed=2)
        self.seen = strip.seen(spec)
        self.dy = eighths(strip.slots, strip.count, strip.keys, seed=3) * self.seen
        x, weights = self.x.clone().requires_grad_(), self.weight.repeat(strip.sequences, 1, 1).requires_grad_()
        window = functional.pad(x, (stage.pad_left, stage.pad_right, stage.cq - 1, 0))
        y = functional.conv2d(window[None], weights[:, None], groups=strip.slots)[0]
        self.dx, self.dweights = torch.autograd.grad(y, (x, weights), self.dy)
        self.y = y.detach()

    def source(self, part: str) -> PlaneKernel:
        """The kernel of a part."""
        made = source_of(self.spec, f"{self.stage.name}{part and '_'}{part}")
        assert isinstance(made, PlaneKernel)
        return made

    def run(self, part: str, folder: Path, seed: int = 0, *, checked: bool = False, **values: Tensor) -> None:
        """Run the kernel of a part."""
        weight = {self.stage.weight: self.weight.float()}
        run(self.source(part), self.strip, folder, seed, checked=checked, **weight, **values)

    def plane(self, values: Tensor, dtype: str) -> Tensor:
        """A plane of the strip."""
        return planes(values, TORCH_DTYPES[dtype], self.spec, self.strip)

    def convolve(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """What the kernel makes of x."""
        out = empty(TORCH_DTYPES[self.source("").result], self.spec, self.strip)
        self.run("", folder, seed, checked=checked, x=self.plane(self.x, "fp16"), out=out)
        return out

    def adjoint(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """What it makes of the gradient of the results."""
        dx = empty(TORCH_DTYPES[self.spec.dtype], self.spec, self.strip)
        self.run("adjoint", folder, seed, checked=checked, dy=self.plane(self.dy, self.spec.dtype), dx=dx)
        return dx

    def gradient(self, folder: Path, seed: int = 0, *, checked: bool = False) -> Tensor:
        """Sums (sequences of the call, heads, chunks of keys, cq, ck), which start as ones."""
        chunks = -(-self.strip.keys // self.source("gradient").tile_keys) + 2  # of the call's keys, some come later
        sequences = self.strip.b0 + self.strip.sequences + 1
        partial = torch.ones(sequences, self.strip.heads, chunks, self.stage.cq, self.stage.ck)
        x, dy = self.plane(self.x, "fp16"), self.plane(self.dy, self.spec.dtype)
        self.run("gradient", folder, seed, checked=checked, x=x, dy=dy, partial=partial, all_chunks=chunks)
        return partial


@every_convolution
def test_convolution(spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(STRIPS):
        case = Case(spec, strip)
        expected = case.stage.factor * case.y * case.seen
        if case.stage.final:
            expected[:, : strip.skip] = 0
        assert_planes(case.convolve(folder, seed), expected, strip)


@every_convolution
def test_adjoint(spec: Spec, folder: Path) -> None:
    for seed, strip in enumerate(STRIPS):
        case = Case(spec, strip)
        assert_planes(case.adjoint(folder, seed), case.dx * case.seen, strip)


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
