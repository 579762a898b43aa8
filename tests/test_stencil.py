"""Footprints and the causal band against enumeration of the convolution's terms."""

import itertools

import numpy as np
import pytest
import sympy

from mtagen.errors import PlanError
from mtagen.planner.geometry.stencil import Stencil, pipeline_stencil
from mtagen.planner.lift.band import DELTA, U, bands
from mtagen.planner.lift.band import F as DIAGONAL
from mtagen.spec import KEY_PADDINGS, MASKS, Spec

KERNELS = [(1, 1), (1, 4), (3, 1), (2, 2), (3, 5), (6, 11), (4, 2)]
SPECS = [
    Spec(kernel, 64, causal=causal, key_padding=padding, mask=mask)
    for kernel, causal, padding, mask in itertools.product(KERNELS, (True, False), KEY_PADDINGS, MASKS)
]


def spec_id(spec):
    return f"{spec.cq}x{spec.ck}-{spec.key_padding}-{spec.mask}-{'causal' if spec.causal else 'full'}"


def stencil_of(spec):
    return Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)


def reads(spec, i, j):
    """The scores that output (i, j) reads, from the definition of C."""
    return {(i - (spec.cq - 1) + u, j - spec.pad_left + v) for u in range(spec.cq) for v in range(spec.ck)}


def read_for_gradient(spec, i, j):
    """The scores needed to recompute every output that reads (i, j)."""
    span = max(spec.kernel)
    near = itertools.product(range(i - span, i + span + 1), range(j - span, j + span + 1))
    return set().union(*(reads(spec, *output) for output in near if (i, j) in reads(spec, *output)))


def box(stencil, i, j):
    (top, bottom), (left, right) = stencil.rows, stencil.cols
    return set(itertools.product(range(i + top, i + bottom + 1), range(j + left, j + right + 1)))


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_footprints_are_the_scores_read(spec):
    forward = stencil_of(spec)
    assert box(forward, 7, -3) == reads(spec, 7, -3)
    assert box(forward.then(forward.adjoint()), 7, -3) == read_for_gradient(spec, 7, -3)


@pytest.mark.parametrize("padding", KEY_PADDINGS)
@pytest.mark.parametrize("post_kernel", [None, (1, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("kernel", [None, (2, 3), (4, 1)], ids=str)
def test_footprint_of_a_pipeline_is_the_scores_read(kernel, post_kernel, padding):
    """A convolution after the softmax reads probabilities of scores that are convolved themselves."""
    spec = Spec(kernel, 64, key_padding=padding, mixed_heads=4, post_kernel=post_kernel)
    after = Spec(post_kernel or (1, 1), 64, key_padding=padding)
    footprint = set().union(*(reads(spec, *entry) for entry in reads(after, 7, -3)))
    assert box(pipeline_stencil(spec), 7, -3) == footprint
    assert pipeline_stencil(spec).halo[0] == spec.context


@pytest.mark.parametrize("padding", KEY_PADDINGS)
@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (3, 4)])
def test_effective_counts_the_outputs_a_tile_yields(kernel, padding):
    spec, tile = Spec(kernel, 64, key_padding=padding), set(itertools.product(range(9), range(10)))
    forward = stencil_of(spec)
    for stencil, needs in [(forward, reads), (forward.then(forward.adjoint()), read_for_gradient)]:
        rows, cols = stencil.effective(9, 10)
        assert rows * cols == sum(needs(spec, i, j) <= tile for i, j in tile)
        above, _, left, _ = stencil.halo
        assert needs(spec, int(above), int(left)) <= tile


def test_symbolic_backward_footprint():
    cq, left, right, block = sympy.symbols("c_q p_L p_R B", integer=True, positive=True)
    forward = Stencil.forward(cq, left, right)
    backward = forward.then(forward.adjoint())
    assert forward.halo == (cq - 1, 0, left, right)
    assert backward.halo == (cq - 1, cq - 1, left + right, left + right)
    rows, cols = backward.effective(block, block)
    assert sympy.expand(rows - (block - 2 * (cq - 1))) == 0
    assert sympy.expand(cols - (block - 2 * (left + right))) == 0
    assert backward.adjoint() == backward


def test_blocks_cover_the_grid():
    forward = Stencil.forward(6, 5, 5)
    assert forward.effective(64, 64) == (59, 54)
    assert forward.blocks(59, 54, 64, 64) == (1, 1)
    assert forward.blocks(60, 109, 64, 64) == (2, 3)


def test_tile_smaller_than_its_halo_is_refused():
    forward = Stencil.forward(6, 5, 5)
    with pytest.raises(PlanError, match=r"tile: got \(16, 16\).*at least 11 x 21"):
        forward.then(forward.adjoint()).effective(16, 16)


WINDOWED = [
    Spec(kernel, 64, key_padding=padding, mask=mask, causal=causal, window=window)
    for kernel, padding in (((1, 4), "both"), ((3, 1), "both"), ((3, 4), "left"), ((4, 3), "right"), ((2, 5), "both"))
    for mask in MASKS
    for causal, window in ((True, (6, -1)), (False, (7, -1)), (False, (-1, 3)), (False, (5, 4)), (False, (1, 0)))
]
MASKED = [*(spec for spec in SPECS if spec.causal), *WINDOWED]


def sees(spec, i, j, off):
    after = j - i - off
    return (spec.left is None or after >= -spec.left) and (spec.right is None or after <= spec.right)


def dropped(spec, i, j, ii, jj, off):
    """The lifted sum keeps this term of C[i, j]; the mask does not."""
    return not sees(spec, {"source": ii, "output": i}[spec.mask], jj, off)


def beyond(spec, later, i, j, off):
    """How far a key lies past the last key that a row sees, or before the first."""
    after = j - i - off
    return after - spec.right if later else -spec.left - after


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("spec", [*SPECS, *WINDOWED], ids=spec_id)
def test_band_covers_exactly_the_dropped_terms(spec, later):
    """A diagonal is in the band if a term is dropped there; the terms that count there are on the band's diagonals."""
    n, off = 24, 2
    deltas, diagonals = set(), set()
    if (spec.right if later else spec.left) is not None:
        for i, j in itertools.product(range(n), range(n + off)):
            if not sees(spec, i, j, off):
                continue
            terms = [(ii, jj) for ii, jj in reads(spec, i, j) if ii >= 0 and 0 <= jj < n + off]
            masked_by = {"source": lambda ii: ii, "output": lambda _, row=i: row}[spec.mask]
            if any(beyond(spec, later, masked_by(ii), jj, off) > 0 for ii, jj in terms):
                deltas.add(-beyond(spec, later, i, j, off))
                counted = [(ii, jj) for ii, jj in terms if not dropped(spec, i, j, ii, jj, off)]
                diagonals |= {-beyond(spec, later, ii, jj, off) for ii, jj in counted}
    found = [band for band in bands(spec) if band.later == later]
    assert len(found) == bool(deltas)
    for band in found:
        assert deltas == set(range(band.width))
        assert diagonals == set(range(band.first, band.first + band.reach))


def test_band_of_the_paper_setting():
    def sizes(**options):
        return [(band.width, band.first, band.reach) for band in bands(Spec((6, 11), 128, **options))]

    assert sizes() == [(10, 0, 15)]
    assert sizes(mask="output") == [(5, -5, 15)]
    assert sizes(mask="output", key_padding="left") == []
    assert sizes(causal=False) == []
    assert sizes(window=(100, -1)) == [(10, 0, 15), (5, 0, 15)]
    assert sizes(window=(7, -1)) == [(8, 0, 8), (5, 0, 8)]
    assert bands(Spec((6, 11), 128))[0].tap == U + DELTA - DIAGONAL


@pytest.mark.parametrize(("n_q", "n_k"), [(9, 9), (5, 13), (13, 8)])
@pytest.mark.parametrize("spec", MASKED, ids=spec_id)
def test_scores_of_bands_are_those_of_visible_terms_and_others_are_lifted(spec, n_q, n_k):
    """C = Ct but on bands, where it is the sum of terms on each band's diagonals 0 <= f < ``reach``."""
    rng, off = np.random.default_rng(0), n_k - n_q
    scores, weight = rng.standard_normal((n_q, n_k)), rng.standard_normal(spec.kernel)
    holds = {"<=": lambda left, right: left <= right, ">=": lambda left, right: left >= right}

    def term(band, i, f):
        key = int(band.key(i + off, band.first + f))
        assert int(band.position(key, band.first + f)) == i + off
        return scores[i, key] if 0 <= i < n_q and 0 <= key < n_k else 0.0

    for i, j in itertools.product(range(n_q), range(n_k)):
        if not sees(spec, i, j, off):
            continue
        exact = lifted = 0.0
        banded = {band: 0.0 for band in bands(spec) if int(band.diagonal(i + off, j)) < band.width}
        for u, v in itertools.product(range(spec.cq), range(spec.ck)):
            ii, jj = i - (spec.cq - 1) + u, j - spec.pad_left + v
            if 0 <= ii < n_q and 0 <= jj < n_k:
                lifted += weight[u, v] * scores[ii, jj]
                exact += 0.0 if dropped(spec, i, j, ii, jj, off) else weight[u, v] * scores[ii, jj]
        for band, u in itertools.product(banded, range(spec.cq)):
            for f in range(band.reach):
                at = {U: u, DIAGONAL: f, DELTA: int(band.diagonal(i + off, j))}
                v = int(band.tap.subs(at))
                counts = all(holds[operator](left.subs(at), right.subs(at)) for left, operator, right in band.counted)
                if counts and 0 <= v < spec.ck:
                    banded[band] += weight[u, v] * term(band, i - (spec.cq - 1) + u, f)
        for value in banded.values() or [lifted]:
            assert exact == pytest.approx(value, abs=1e-12)
