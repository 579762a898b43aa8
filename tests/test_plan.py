"""Plans: round trip, names, limits of every target; the lift's geometry and loop bounds by brute force."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import sympy
from numpy.typing import NDArray

from mtagen import TARGETS, Plan, PlanError, Spec, Target, plan
from mtagen.codegen.printers import python_code
from mtagen.planner.choice import COST_MODEL, PlannedPass
from mtagen.planner.geometry.loops import Loop
from mtagen.planner.lift.module import LiftModule
from mtagen.planner.lift.operands import T, lift
from mtagen.planner.lift.passes import LiftPass
from mtagen.planner.lift.tiling import TENSOR_ROLES, VECTOR_ROLES, resources, table_key
from mtagen.planner.names import kernel_name
from mtagen.planner.passes import PASSES

Array = NDArray[np.float64]

SPECS = [
    Spec((6, 11), 64),
    Spec((1, 1), 128),
    Spec((5, 2), 80, value_head_dim=128, dtype="fp16"),
    Spec((16, 17), 64, causal=False, key_padding="left"),
    Spec((3, 3), 16, mask="output", key_padding="right", dtype="fp32"),
]


def name_of(spec: Spec) -> str:
    return plan(spec, "cpu").suffix


# The plan as a value.


@pytest.mark.parametrize("target", ["sm_90a", "gfx942", "cpu"])
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_round_trip(spec: Spec, target: str) -> None:
    made = plan(spec, target)
    again = Plan.from_json(made.to_json())
    assert again == made
    assert hash(again) == hash(made)
    assert again.to_json() == made.to_json()


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_two_plans_of_one_spec_are_equal(spec: Spec) -> None:
    assert plan(spec, "sm_90a") == plan(spec, "sm_90a")
    assert str(plan(spec, "sm_90a")) == str(plan(spec, "sm_90a"))
    assert len({plan(spec, target) for target in TARGETS}) == len(TARGETS)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_alternatives_differ_in_one_decision(backend: str) -> None:
    """Those of the spec whose measured tile is none that the register model proposes, too."""
    for one in plan(Spec((6, 11), 64), "sm_90a", backend).passes:
        decisions = one.plan.decisions()
        assert decisions
        for key, fields in decisions.items():
            rivals = one.plan.alternatives(key)
            assert one.plan in rivals
            assert len({str(rival.decisions()) for rival in rivals}) == len(rivals)
            costs = [rival.decision_cost(key) for rival in rivals]
            assert costs == sorted(costs)
            assert min(costs) > 0
            for rival in rivals:
                assert {**rival.decisions(), key: fields} == decisions
                assert one.plan.decided(key, rival.decisions()[key]) == rival
                assert rival.decided(key, fields) == one.plan


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_cost_of_a_pass_is_that_of_its_decisions(backend: str) -> None:
    for one in plan(Spec((3, 3), 64), "sm_90a", backend).passes:
        assert one.plan.cost == pytest.approx(sum(map(one.plan.decision_cost, one.plan.decisions())))


@pytest.mark.parametrize("backend", ["cuda", "triton", "torch"])
def test_decisions_that_there_are_not_are_refused(backend: str) -> None:
    """A table or a stored plan may be older than the planner."""
    made = plan(Spec((6, 11), 64), "sm_90a", backend)
    for one in made.passes:
        for ask in (one.plan.alternatives, one.plan.decision_cost, lambda key, one=one: one.plan.decided(key, {})):
            message = f"decision: got 'colour'; is no decision of the {one.plan.pass_name} pass by {backend}"
            with pytest.raises(PlanError, match=message):
                ask("colour")
        for key, fields in one.plan.decisions().items():
            for wrong in ({**fields, "colour": 3}, {}):
                with pytest.raises(PlanError, match=re.escape(f"{key}: got ")):
                    one.plan.decided(key, wrong)
                stored = made.to_dict()
                stored["passes"][one.plan.pass_name]["decisions"][key]["fields"] = wrong
                with pytest.raises(PlanError, match=re.escape(f"{key}: got ")):
                    Plan.from_dict(stored)


def test_a_pass_may_be_replaced() -> None:
    made = plan(Spec((6, 11), 64), "sm_90a", "cuda")
    (key,) = made["forward"].decisions()
    other = made["forward"].alternatives(key)[-1]
    assert other != made["forward"]
    changed = made.replaced(other)
    assert (changed["forward"], changed["backward"], changed["decode"]) == (other, made["backward"], made["decode"])
    assert changed.replaced(made["forward"]) == made
    assert Plan.from_json(changed.to_json()) == changed


def test_text_shows_what_was_decided() -> None:
    made = plan(Spec((6, 11), 64, key_padding="left", dtype="fp16"), "sm_80", "triton")
    text = str(made)
    for piece in (
        made.name,
        "6 x 11",
        "10 keys left, 0 right",
        "causal, source",
        "fp16",
        "sm_80",
        "asked for",
    ):
        assert piece in text
    # rows: cq - 1 above, and its transpose below; keys: 10 on the left, and its transpose on the right
    assert re.search(r"forward halo +rows 5 \+ 0, keys 10 \+ 0", text)
    assert re.search(r"backward halo +rows 5 \+ 5, keys 10 \+ 10", text)
    assert re.search(r"lifted +keys, 6 terms of 11 taps", text)
    assert re.search(r"band +5 diagonals selected, summed from terms on 15", text)
    assert re.search(r"workspace +at most about 1280 MiB", text)
    for one in made.passes:
        for key, fields in one.plan.decisions().items():
            decided = " ".join(f"{name}={value}" for name, value in fields.items())
            assert re.search(rf"{key} +{decided} \({dict(one.sources)[key]}\)", text)
    for lifted in made.lift.values():
        for role, tile in lifted.tiles:
            shape = f"{tile.block_m} x {tile.block_n}" if tile.block_n else f"{tile.block_m} vectors"
            assert re.search(rf"\b{role} tile +{shape}, {tile.num_warps} warps", text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scores": "tanh(s)"}, "strip: scores changes scores before the convolution"),
        ({"mixed_heads": 2}, "strip: fused kernels have no stage but"),
        ({"visible": "j // 8 <= i // 8", "causal": False}, ""),
        ({"logits": "tanh(s)"}, ""),
    ],
    ids=str,
)
def test_text_says_why_strips_are_taken(options: dict[str, Any], reason: str) -> None:
    rows = {(section, name): text for section, name, text in plan(Spec((6, 11), 64, **options), "sm_90a").table()}
    lowering = rows.get(("choice", "lowering"), "")
    assert bool(lowering) == bool(reason)
    assert lowering.startswith(reason)
    for place in {"scores", "logits"} & options.keys():
        assert rows["request", place] == options[place]


def test_text_says_why_triton_takes_strips() -> None:
    text = str(plan(Spec((6, 11), 64, causal=False, visible="j // 8 <= i // 8"), "sm_90a", "triton"))
    assert "strip: visible is no window" in text


def test_text_of_the_torch_backend_has_no_tiles() -> None:
    text = str(plan(Spec((6, 11), 64), "cpu"))
    assert "torch: the CPU runs tiled PyTorch ops" in text
    assert "warps" not in text


def test_names() -> None:
    spec = Spec((6, 11), 128)
    assert plan(spec, "sm_90a").name == "mta_cq6_ck11_d128_bf16_causal_sm90a"
    assert kernel_name("lift", "fwd", spec, "sm_90a") == "mta_lift_fwd_cq6_ck11_d128_bf16_causal_sm90a"


def test_kernels_of_the_lowerings_are_told_apart() -> None:
    """A profiler shows names only."""
    names = [
        {kernel.name for name in PASSES for kernel in plan(Spec((6, 11), 128), "sm_90a", backend)[name].kernels}
        for backend in ("cuda", "triton")
    ]
    assert all(len(each) > 5 for each in names)
    assert not names[0] & names[1]
    assert all(name.startswith("mta_tile_") for name in names[0])
    assert all(name.startswith("mta_lift_") for name in names[1])


def test_names_tell_variants_apart() -> None:
    variants = itertools.product(
        [(6, 11), (11, 6)],
        [64, 128],
        [64, 128],
        [True, False],
        ["both", "left", "right"],
        ["source", "output"],
        ["bf16", "fp16"],
    )
    plans = [Plan(Spec(*fields), target, ()) for fields in variants for target in ("sm_80", "sm_90a")]
    assert len({made.name for made in plans}) == len(plans)
    assert all(made.name.isidentifier() for made in plans)


# Limits.


@pytest.mark.parametrize("kernel", [(1, 1), (6, 11), (16, 17)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_fits_the_target_or_says_what_does_not(
    target: Target, head_dim: int, dtype: str, kernel: tuple[int, int]
) -> None:
    spec = Spec(kernel, head_dim, dtype=dtype)
    made = plan_or_refusal(spec, target)
    if isinstance(made, str):
        assert dtype == "fp32"  # what is refused is too large for a chip with little memory; half of it is not
        assert f"no tile fits {target.name}" in made
        limits = {
            "bytes of shared memory": target.shared_per_block,
            "registers per thread": target.registers_per_thread,
        }
        excesses = re.findall(r"(\d+) (bytes of shared memory|registers per thread), (\d+) over (\d+)", made)
        assert excesses
        for need, what, over, limit in excesses:
            assert int(limit) == limits[what] == int(need) - int(over)
        return
    strip_multiple = LiftModule.of(made.lift.values()).strip_multiple
    roles = set()
    for one in made.passes:
        for role, tile in made.lift[one.plan.pass_name].tiles:
            roles.add(role)
            assert_fits(made.lift[one.plan.pass_name], role, source_of(one, role))
            assert all(is_power_of_2(size) for size in (tile.block_m, tile.block_n or 1, tile.num_warps))
            if role in TENSOR_ROLES:
                assert strip_multiple % tile.block_m == 0
    band = {"band_terms", "band", "band_gather"} if made.lift["forward"].lift.bands else set()
    optional = {"band_terms", "band", "band_gather", "bias"}
    assert roles >= {"forward", "scores", "decode", *VECTOR_ROLES} - optional | band


def plan_or_refusal(spec: Spec, target: Target) -> Plan | str:
    try:
        return plan(spec, target, "triton")
    except PlanError as error:
        return str(error)


def source_of(one: PlannedPass, role: str) -> str:
    """Where a tile comes from; those of kernels that move vectors follow a rule."""
    assert isinstance(one.plan, LiftPass)
    return "" if role in VECTOR_ROLES else dict(one.sources)[table_key(role, one.plan.spec, one.plan.lift)]


def assert_fits(made: LiftPass, role: str, source: str) -> None:
    target = TARGETS[made.target]
    need = resources(role, made.tile(role), made.spec, made.lift, target)
    assert need.shared <= target.shared_per_block
    # The register model estimates what a compiler will do: it rules on candidates, not on what was compiled
    # and timed, nor on the kernels that move vectors, whose tiles follow a rule.
    if source == COST_MODEL:
        assert need.registers <= target.registers_per_thread


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


# The lift against the convolution that it replaces.

GEOMETRIES = [
    Spec(kernel, 16, causal=causal, key_padding=key_padding, mask=mask)
    for kernel in ((1, 1), (1, 3), (3, 1), (2, 5), (5, 2), (4, 3), (3, 4))
    for key_padding in ("both", "left", "right")
    for causal, mask in ((True, "source"), (True, "output"), (False, "source"))
]
WINDOWED = [
    Spec(kernel, 16, causal=causal, window=window)
    for kernel in ((1, 1), (2, 5), (5, 2))
    for causal, window in ((True, (4, -1)), (False, (3, -1)), (False, (-1, 2)), (False, (2, 3)), (False, (0, 0)))
]


def at(x: Array, positions: Array) -> Array:
    """Rows of x, zero where there is none."""
    inside = (positions >= 0) & (positions < len(x))
    return np.where(inside[:, None], x[np.clip(positions, 0, len(x) - 1)], 0.0)


@pytest.mark.parametrize(("n_q", "n_k"), [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("spec", [spec for spec in GEOMETRIES if not spec.causal], ids=name_of)
def test_terms_sum_to_the_convolution(spec: Spec, n_q: int, n_k: int) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((n_q, 3)), rng.standard_normal((n_k, 3))
    weight = rng.standard_normal(spec.kernel)

    scores = np.pad(q @ k.T, ((spec.cq - 1, 0), (spec.pad_left, spec.pad_right)))
    expected = sum(
        weight[u, v] * scores[u : u + n_q, v : v + n_k] for u, v in itertools.product(*map(range, spec.kernel))
    )

    geometry = lift(spec)
    taps_of = weight if geometry.lifts_keys else weight.T  # [term, tap]
    source, other = (k, q) if geometry.lifts_keys else (q, k)
    mixed = np.zeros((n_q, n_k))
    assert (geometry.terms, geometry.taps) == taps_of.shape == (min(spec.kernel), max(spec.kernel))
    for t in range(geometry.terms):
        x = np.arange(len(source))
        lifted = sum(taps_of[t, s] * at(source, x + s - geometry.pad) for s in range(geometry.taps))
        left, right = (other, lifted) if geometry.lifts_keys else (lifted, other)
        rows = np.arange(n_q) + int(geometry.row_shift.subs(T, t))
        keys = np.arange(n_k) + int(geometry.key_shift.subs(T, t))
        mixed += at(left, rows) @ at(right, keys).T
    np.testing.assert_allclose(mixed, expected, atol=1e-12)


@pytest.mark.parametrize("spec", GEOMETRIES, ids=name_of)
def test_gradient_reads_are_the_transpose_of_the_terms(spec: Spec) -> None:
    """Term t adds left[i + row_shift] . right[j + key_shift] to C[i, j]: left[i] reads g at i - row_shift."""
    geometry = lift(spec)
    assert {c.owner for c in geometry.contractions} == {"rows", "keys"}
    for contraction in geometry.contractions:
        lifted = (contraction.owner == "keys") == geometry.lifts_keys
        assert contraction.sums_terms != lifted
        shifts = (geometry.row_shift, geometry.key_shift) if not lifted else (0, 0)
        assert (contraction.g_row_shift + shifts[0], contraction.g_key_shift + shifts[1]) == (0, 0)
    reach_back = max(int((-geometry.row_shift).subs(T, t)) for t in range(geometry.terms))
    assert geometry.carried_rows == reach_back


def compiled(loop: Loop) -> Callable[..., tuple[int, int, int, int]]:
    code = compile(f"({', '.join(map(python_code, loop))},)", "<loop>", "eval")
    return lambda **values: eval(code, dict(values))


def at_term(shift: sympy.Expr, terms: int) -> list[int]:
    return [int(sympy.sympify(shift).subs(T, t)) for t in range(terms)]


def blocks(n_owned: int, size: int, aligned: bool) -> Iterator[tuple[int, range]]:
    for start in range(0, n_owned, size if aligned else 1):
        yield start, range(start, min(start + size, n_owned))


def spec_sees(spec: Spec, position: int, key: int) -> bool:
    after = key - position
    return (spec.left is None or after >= -spec.left) and (spec.right is None or after <= spec.right)


@pytest.mark.parametrize("index", [0, 1], ids=["lifted", "shifted"])
@pytest.mark.parametrize("spec", [*GEOMETRIES, *WINDOWED], ids=name_of)
def test_contractions_visit_what_they_need(spec: Spec, index: int) -> None:
    """Every allowed score whose gradient is read lies in a visited tile; interior tiles read no others.

    What is not allowed was never written: read unmasked, it would be garbage. Owners of rows may start
    anywhere, for strips do not start at multiples of their blocks.
    """
    geometry = lift(spec)
    contraction = geometry.contractions[index]
    row_shifts = set(at_term(contraction.g_row_shift, geometry.terms))
    key_shifts = set(at_term(contraction.g_key_shift, geometry.terms))
    positions_at = compiled(contraction.loop)
    by_rows = contraction.owner == "rows"
    for n_q, n_k, (m, n) in itertools.product((1, 5, 12), (1, 6, 11), ((1, 1), (4, 2), (2, 4), (8, 8))):
        off = n_k - n_q
        owned, streamed, size, step = (n_q, n_k, m, n) if by_rows else (n_k, n_q, n, m)
        for start, block in blocks(owned, size, aligned=not by_rows):
            begin, interior_begin, interior_end, end = positions_at(
                n_q=n_q, n_k=n_k, off=off, i0=start, j0=start, BLOCK_M=m, BLOCK_N=n
            )
            for stream in range(streamed):
                tile = stream - stream % step
                for own in block:
                    i, j = (own, stream) if by_rows else (stream, own)
                    for row, key in itertools.product((i + s for s in row_shifts), (j + s for s in key_shifts)):
                        if not (0 <= row < n_q and 0 <= key < n_k):
                            continue  # reads as zero
                        if spec_sees(spec, row + off, key):
                            assert begin <= tile < end
                        else:
                            assert not interior_begin <= tile < interior_end
                assert begin <= max(begin, interior_begin) <= max(begin, interior_end) <= max(begin, end)


def test_passes_that_round_scores_differently_are_refused() -> None:
    """A plan of another version may have them, and the backward pass would read unmixed outputs that nobody made."""
    spec = Spec((6, 11), 64, post_mixed_heads=2)
    stored, other = (plan(spec, "sm_90a", backend).to_dict() for backend in ("cuda", "triton"))
    assert Plan.from_dict(stored).unmixed_columns == 128
    stored["passes"]["forward"] = other["passes"]["forward"]
    with pytest.raises(PlanError, match="the forward and the backward pass do not round scores alike"):
        Plan.from_dict(stored)
