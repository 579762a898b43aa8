"""The CUDA kernels that multiply planes by rows, on a CPU that plays the GPU, against their formulas.

All numbers are small multiples of 1/8, so only the last rounding of a sum is not exact. Planes hold NaN behind their
keys, where kernels read no key, and in rows that have no part. Tensors hold NaN in rows and keys of other strips.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emulator import needs_compiler
from test_emulated_strip import Strip, eighths, planes, read_keys, run
from torch import Tensor

from mtagen.dtypes import TORCH_DTYPES
from mtagen.planner.strip.contractions import ROLES, Contraction, ContractionKernel, contractions
from mtagen.spec import Spec

pytestmark = [needs_compiler, pytest.mark.usefixtures("one_thread")]

PRODUCTS = [role for roles in ROLES.values() for role in roles]
SCALE, KEY0 = 0.5, 5  # the factor of scores, and the first key of a strip
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
    "128 columns, gradients of hidden scores": Spec((6, 3), 128, mixed_heads=4, mask="output", window=(300, -1)),
}
STRIPS = (
    (1, Strip(1, 1, 1)),
    (2, Strip(4, 131, 650, first=30, off=500, skip=12, sequences=2, b0=1)),  # more tiles than room for them
    (1, Strip(2, 70, 150, first=3, off=-45, skip=3)),  # when causal, 42 rows see nothing
    (3, Strip(3, 64, 128, first=64, off=0)),  # a whole tile
    (1, Strip(1, 150, 460, first=127, skip=5)),  # many keys that no row sees
    (2, Strip(2, 300, 330, first=9, off=12, skip=7)),  # several blocks of rows; keys have more rows than rows have keys
)


KERNELS = {
    (name, kernel.role): kernel
    for name, spec in SPECS.items()
    for pass_name in ROLES
    for kernel in contractions(pass_name, spec, "sm_90a")
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=map(", ".join, KERNELS))


class Product:
    """A product of a plane of a strip with rows, in float64.

    Attributes:
        of: the product that the kernel makes.
        x: (slots, rows, keys).
        y: (sequences of the call, heads, rows or keys, columns), on the whole.
        total: (sequences, heads or parts of them, rows or keys, columns): the products of the strip.
    """

    def __init__(self, of: Contraction, group: int, strip: Strip, head_parts: int) -> None:
        self.of, self.strip = of, strip
        spec, width, seed = of.spec, of.spec.head_dim, [*PRODUCTS].index(of.role)
        seen = strip.seen(spec)
        for _ in range(of.reach):  # rows after a row may see more
            seen = seen | torch.nn.functional.pad(seen, (0, 0, 0, 1))[:, 1:]
        self.x = eighths(strip.slots, strip.count, strip.keys, seed=["shares", "ds"].index(of.plane)) * seen
        kv_heads, sequences = strip.heads // group, strip.sequences
        of_queries = strip.heads, strip.count
        of_keys = kv_heads, strip.keys
        rows = eighths(sequences, *(of_queries if of.over_rows else of_keys), width, seed=2 + seed)
        summed = kv_heads * head_parts if of.over_rows else kv_heads  # heads of sums
        x = self.x.view(sequences, summed, -1, strip.count, strip.keys)
        y = rows.view(sequences, summed, -1, *rows.shape[-2:])
        if of.over_rows:
            top = strip.skip if of.skips else 0
            self.total = torch.einsum("bhgrj,bhgrd->bhjd", x[..., top:, :], y[..., top:, :])
        else:
            self.total = torch.einsum("bhgrj,bhojd->bhgrd", x, y).flatten(1, 2)
        if of.scaled:
            self.total *= SCALE
        self.x = self.x.where(read_keys(of.reads_hidden, spec, strip), torch.nan)
        if of.skips:
            self.x[:, : strip.skip] = torch.nan
        first, places = (strip.first, strip.count) if of.over_rows else (0, strip.keys)
        dtype = TORCH_DTYPES[spec.dtype]
        shape = strip.b0 + sequences + 1, first + places + 9, rows.shape[1], width + 8
        self.y = torch.full(shape, torch.nan, dtype=dtype).transpose(1, 2)[..., :width]
        self.y[strip.b0 : -1, :, first : first + places] = rows.to(dtype)

    @property
    def first(self) -> int:
        """The first row of the results that the strip has."""
        return KEY0 if self.of.over_rows else self.strip.first

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Results (sequences of the call, heads, rows, columns) of NaN."""
        batch, (_, heads, rows, columns) = self.strip.b0 + self.strip.sequences + 1, self.total.shape
        return torch.full((batch, heads, self.first + rows + 4, columns), torch.nan, dtype=dtype)

    def own(self, x: Tensor) -> Tensor:
        """The results of the strip."""
        b0, rows = self.strip.b0, self.total.shape[2]
        return x[b0 : b0 + self.strip.sequences, :, self.first : self.first + rows]

    def is_written(self, x: Tensor) -> Tensor:
        """Whether the kernel may write a place: one of the strip's."""
        own = torch.zeros(x.shape, dtype=torch.bool)
        self.own(own)[:, :, self.strip.skip if self.of.role == "outputs" and self.of.skips else 0 :] = True
        return own


class Result(NamedTuple):
    """A product, with the results of a kernel.

    Attributes:
        product: the product.
        out: the results.
        sums, before: the sums after and before the launch.
    """

    product: Product
    out: Tensor
    sums: Tensor
    before: Tensor


def launch(
    kernel: ContractionKernel,
    group: int,
    strip: Strip,
    folder: Path,
    seed: int = 0,
    summed: int = 2**30,
    complete: int = 0,
    head_parts: int = 1,
    *,
    checked: bool = False,
) -> list[Result]:
    """The results of a kernel, if places from `summed` on have sums, and those before `complete` get sums.

    Both are counted from the strip's first result.
    """
    results: list[Result] = []
    heads = strip.slots // group
    together = (heads, max(1, heads // 2), 1)[seed % 3]  # heads of a section
    given: dict[str, Any] = {
        "group": group,
        "key0": KEY0,
        "scale": SCALE,
        "together": together,
        "head_parts": head_parts,
    }
    dtype = TORCH_DTYPES[kernel.spec.dtype]
    for product in [Product(of, group, strip, head_parts) for of in kernel.products]:
        of, begin = product.of, product.first
        out, sums = product.empty(dtype), product.empty(torch.float32)
        earlier = sums[:, :, begin + summed :]
        earlier[:] = eighths(*earlier.shape, seed=9)
        results.append(Result(product, out, sums, sums.clone()))
        given |= {of.plane: planes(product.x, dtype, of.spec, strip), of.y: product.y, of.out: out}
        given |= {of.sums: sums} if of.sums else {}
        given |= dict(zip(of.places, (out.shape[2], begin + summed, begin + complete), strict=True))
        for name in (of.y, of.out):
            given |= {f"{name}_stride_{axis}": given[name].stride(i) for i, axis in enumerate("bhn")}
    run(kernel, strip, folder, seed, checked=checked, **given)
    return results


@every_kernel
def test_products(kernel: ContractionKernel, folder: Path) -> None:
    """Rows of other strips and sequences are left alone."""
    for seed, (group, strip) in enumerate(STRIPS):
        for product, out, _, _ in launch(kernel, group, strip, folder, seed):
            expected = product.empty(out.dtype)
            product.own(expected)[:] = product.total.to(out.dtype)
            written = product.is_written(out)
            assert torch.equal(out[written], expected[written])
            assert out[~written].isnan().all()


@pytest.mark.parametrize(
    "kernel",
    [
        KERNELS["mixing", "grad_inputs"],
        KERNELS["all stages", "grad_queries_and_keys"],
        KERNELS["all stages, full", "grad_queries_and_keys"],
        KERNELS["all stages, a window on both sides", "grad_values"],
        KERNELS["128 columns", "grad_queries_and_keys"],
        KERNELS["gradients of hidden scores", "grad_inputs"],
    ],
    ids=lambda kernel: kernel.name,
)
def test_sums_of_strips(kernel: ContractionKernel, folder: Path) -> None:
    """A result is added to what strips before left, and stored as a sum if a later strip adds to it."""
    group, strip = STRIPS[1]
    for summed, complete, head_parts in ((60, 90, 1), (90, 60, 1), (0, 2**30, 1), (60, 2**30, 2)):
        for product, out, sums, before in launch(kernel, group, strip, folder, 0, summed, complete, head_parts):
            if not product.of.sums:
                continue
            expected, begin = product.empty(torch.float32), product.first
            product.own(expected)[:] = product.total
            expected[:, :, begin + summed :] += before[:, :, begin + summed :]
            written = product.is_written(out)
            is_sum = written & (torch.arange(out.shape[2]) < begin + complete)[:, None]
            assert torch.equal(sums[is_sum], expected[is_sum])
            assert torch.equal(out[written & ~is_sum], expected[written & ~is_sum].to(out.dtype))
            assert out[~written | is_sum].isnan().all()
            assert torch.equal(sums[~is_sum].nan_to_num(), before[~is_sum].nan_to_num())


@pytest.mark.parametrize(
    "kernel",
    [kernel for (name, _), kernel in KERNELS.items() if name in ("all stages", "mixing", "128 columns")],
    ids=lambda kernel: kernel.name,
)
def test_no_races(kernel: ContractionKernel, folder: Path) -> None:
    """And the order of warps changes nothing."""
    group, strip = STRIPS[1]
    first, *others = (launch(kernel, group, strip, folder, seed, checked=True) for seed in range(3))
    for other in others:
        for one, again in zip(first, other, strict=True):
            assert torch.equal(one.out.nan_to_num(), again.out.nan_to_num())
