"""The CUDA kernels that multiply planes by rows, on a CPU that plays the GPU, against their formulas.

All numbers are small multiples of 1/8, so only the last rounding of a sum is not exact. Planes hold NaN behind their
keys, where kernels read no key, and in rows that have no part. Tensors hold NaN in rows and keys of other strips.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulator import needs_compiler
from test_emulated_strip import Strip, eighths, planes, read_keys, run, source_of
from torch import Tensor

from mtagen.dtypes import TORCH_DTYPES
from mtagen.planner.strip.contractions import ROLES, ContractionKernel
from mtagen.spec import Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]

ALL = [role for roles in ROLES.values() for role in roles]
STAGES = {"mixed_heads": 2, "post_kernel": (2, 5), "post_mixed_heads": 4}
SPECS = {
    "all stages": Spec((3, 3), 64, **STAGES),
    "all stages, full": Spec((3, 3), 64, **STAGES, causal=False, dtype="fp16"),
    "all stages, a window on both sides": Spec((3, 3), 64, **STAGES, causal=False, window=(70, 9)),
    "mixing": Spec(None, 64, mixed_heads=16, post_mixed_heads=16),
    "mixing, a window": Spec(None, 64, mixed_heads=16, post_mixed_heads=16, window=(100, -1), dtype="fp16"),
    "gradients of hidden scores": Spec((6, 3), 64, mixed_heads=4, mask="output"),
    "128 columns": Spec((3, 3), 128, **STAGES),
    "128 columns, mixing": Spec(None, 128, mixed_heads=16, post_mixed_heads=16, dtype="fp16"),
}
STRIPS = (
    (1, Strip(1, 1, 1)),
    (2, Strip(4, 131, 650, first=30, off=500, skip=12, sequences=2, b0=1)),  # more tiles than room for them
    (1, Strip(2, 70, 150, first=3, off=-45, skip=3)),  # when causal, 42 rows see nothing
    (3, Strip(3, 64, 128, first=64, off=0)),  # a whole tile
    (1, Strip(1, 150, 460, first=127, skip=5)),  # many keys that no row sees
)


class Contraction:
    """A product of the planes of a strip with rows, in float64.

    Attributes:
        source: the kernel.
        x: (slots, rows, keys).
        y: (sequences of the call, heads, rows or keys, columns), on the whole.
        total: (sequences, heads, rows or keys, columns): the products of the strip.
    """

    def __init__(self, spec: Spec, role: str, group: int, strip: Strip) -> None:
        source = source_of(spec, role)
        assert isinstance(source, ContractionKernel)
        self.source, self.group, self.strip, self.key0 = source, group, strip, 5 if source.over_rows else 0
        seen = strip.seen(spec)
        for _ in range(source.reach):  # rows after a row may see more
            seen = seen | torch.nn.functional.pad(seen, (0, 0, 0, 1))[:, 1:]
        self.x = eighths(strip.slots, strip.count, strip.keys, seed=1) * seen
        kv_heads, sequences = strip.heads // group, strip.sequences
        of_queries = strip.heads, strip.count
        of_keys = kv_heads, strip.keys
        rows = eighths(sequences, *(of_queries if source.over_rows else of_keys), source.width, seed=2)
        x = self.x.view(sequences, kv_heads, group, strip.count, strip.keys)
        y = rows.view(sequences, kv_heads, -1, *rows.shape[-2:])
        if source.over_rows:
            top = strip.skip if source.skips else 0
            self.total = torch.einsum("bhgrj,bhgrd->bhjd", x[..., top:, :], y[..., top:, :])
        else:
            self.total = torch.einsum("bhgrj,bhojd->bhgrd", x, y).flatten(1, 2)
        self.x = self.x.where(read_keys(source.reads_hidden, spec, strip), torch.nan)
        if source.skips:
            self.x[:, : strip.skip] = torch.nan
        first, places = (strip.first, strip.count) if source.over_rows else (0, strip.keys)
        dtype = TORCH_DTYPES[spec.dtype]
        shape = strip.b0 + sequences + 1, first + places + 9, rows.shape[1], source.width + 8
        self.y = torch.full(shape, torch.nan, dtype=dtype).transpose(1, 2)[..., : source.width]
        self.y[strip.b0 : -1, :, first : first + places] = rows.to(dtype)

    @property
    def first(self) -> int:
        """The first row of the results that the strip has."""
        return self.key0 if self.source.over_rows else self.strip.first

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Results (sequences of the call, heads, rows, columns) of NaN."""
        batch, (_, heads, rows, columns) = self.strip.b0 + self.strip.sequences + 1, self.total.shape
        return torch.full((batch, heads, self.first + rows + 4, columns), torch.nan, dtype=dtype)

    def own(self, x: Tensor) -> Tensor:
        """The results of the strip."""
        b0, rows = self.strip.b0, self.total.shape[2]
        return x[b0 : b0 + self.strip.sequences, :, self.first : self.first + rows]

    def run(
        self, folder: Path, seed: int = 0, summed: int = 2**30, complete: int = 0, *, checked: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Results and sums of the kernel, and sums before."""
        spec, strip = self.source.spec, self.strip
        out, sums = self.empty(TORCH_DTYPES[spec.dtype]), self.empty(torch.float32)
        sums[:, :, summed:] = eighths(*sums[:, :, summed:].shape, seed=3).float()
        before = sums.clone()
        numbers = {"group": self.group, "key0": self.key0, "factor": 0.5, "places": out.shape[2]}
        numbers |= {f"y_stride_{axis}": self.y.stride(i) for i, axis in enumerate("bhn")}
        numbers |= {f"out_stride_{axis}": out.stride(i) for i, axis in enumerate("bhn")}
        plane = planes(self.x, TORCH_DTYPES[spec.dtype], spec, strip)
        given = {"plane": plane, "y": self.y, "out": out, "sums": sums, "summed": summed, "complete": complete}
        run(self.source, strip, folder, seed, checked=checked, **given, **numbers)
        return out, sums, before


every_role = pytest.mark.parametrize("role", ALL)


def is_written(x: Tensor, made: Contraction) -> Tensor:
    """Whether the kernel may write a place: one of the strip's."""
    own = torch.zeros(x.shape, dtype=torch.bool)
    made.own(own)[:, :, made.strip.skip if made.source.role == "outputs" and made.source.skips else 0 :] = True
    return own


@every_role
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_products(spec: Spec, role: str, folder: Path) -> None:
    """Rows of other strips and sequences are left alone."""
    for seed, (group, strip) in enumerate(STRIPS):
        made = Contraction(spec, role, group, strip)
        out, _, _ = made.run(folder, seed)
        expected = made.empty(out.dtype)
        made.own(expected)[:] = (made.total / 2).to(out.dtype)
        written = is_written(out, made)
        assert torch.equal(out[written], expected[written])
        assert out[~written].isnan().all()


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("grad_values", "mixing"),
        ("grad_keys", "all stages"),
        ("grad_queries", "all stages, full"),
        ("grad_values", "all stages, a window on both sides"),
    ],
)
def test_sums_of_strips(role: str, name: str, folder: Path) -> None:
    """A result is added to what strips before left, and stored as a sum if a later strip adds to it."""
    group, strip = STRIPS[1]
    made = Contraction(SPECS[name], role, group, strip)
    for summed, complete in ((made.first + 60, made.first + 90), (made.first + 90, made.first + 60), (0, 2**30)):
        out, sums, before = made.run(folder, 0, summed, complete)
        expected = made.empty(torch.float32)
        made.own(expected)[:] = made.total / 2
        expected[:, :, summed:] += before[:, :, summed:]
        written = is_written(out, made)
        is_sum = written & (torch.arange(out.shape[2]) < complete)[:, None]
        assert torch.equal(sums[is_sum], expected[is_sum])
        assert torch.equal(out[written & ~is_sum], expected[written & ~is_sum].to(out.dtype))
        assert out[~written | is_sum].isnan().all()
        assert torch.equal(sums[~is_sum].nan_to_num(), before[~is_sum].nan_to_num())


@every_role
def test_no_races(role: str, folder: Path) -> None:
    """And the order of warps changes nothing."""
    group, strip = STRIPS[1]
    made = Contraction(SPECS["all stages"], role, group, strip)
    first, *others = (made.run(folder, seed, checked=True)[0] for seed in range(3))
    assert all(torch.equal(first.nan_to_num(), other.nan_to_num()) for other in others)
