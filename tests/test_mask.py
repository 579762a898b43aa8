"""Masks and sequences as values, against every pair of a small problem."""

import itertools
import operator
from dataclasses import replace

import pytest
import sympy

from mtagen.planner.geometry.affine import N_K, N_Q
from mtagen.planner.geometry.mask import Mask
from mtagen.planner.geometry.score import GRADIENT, SCORE, ScoreStage
from mtagen.planner.geometry.sequence import SEQUENCE, Sequence
from mtagen.spec import KEY_PADDINGS, MASKS, Spec

FULL, CAUSAL = Mask(None, None), Mask(None, 0)
LIMITED = [FULL, CAUSAL, Mask(None, 3), Mask(0, None), Mask(5, None), Mask(0, 0), Mask(4, 0), Mask(0, 2), Mask(3, 6)]
SEQUENCES = [Sequence(1, 1), Sequence(9, 9), Sequence(4, 11), Sequence(11, 4)]
OPERATORS = {"<": operator.lt, ">": operator.gt, ">=": operator.ge}


def name_of(value):
    return value.name if isinstance(value, Mask) else f"{value.n_q}x{value.n_k}"


def sees(mask, position, key):
    """The rule itself: which keys, of any number of them, the query at a position sees."""
    after = key - position
    return (mask.left is None or after >= -mask.left) and (mask.right is None or after <= mask.right)


def positions(sequence):
    return [i + sequence.offset for i in range(sequence.n_q)]


def holds(comparison, values=None):
    left, right = (sympy.sympify(side).subs(values or {}) for side in (comparison.left, comparison.right))
    return bool(OPERATORS[comparison.operator](left, right))


def test_two_spellings_of_a_mask_are_one_spec():
    causal, sliding = Spec((3, 4), 64), Spec((3, 4), 64, window=(5, -1))
    for spec in (Spec((3, 4), 64, causal=False, window=(-1, 0)), Spec((3, 4), 64, window=(-1, 7))):
        assert (spec, hash(spec), spec.to_dict()) == (causal, hash(causal), causal.to_dict())
    assert Spec((3, 4), 64, causal=False, window=(5, 0)) == Spec((3, 4), 64, window=(5, 0)) == sliding
    assert replace(sliding, causal=False) == Spec((3, 4), 64, causal=False, window=(5, -1)) != sliding
    assert Spec.from_dict({**sliding.to_dict(), "causal": False, "window": [5, 0]}) == sliding


@pytest.mark.parametrize("sequence", SEQUENCES, ids=name_of)
@pytest.mark.parametrize("mask", LIMITED, ids=name_of)
def test_a_pair_is_hidden(mask, sequence):
    """A key is hidden from a query, or it does not exist; symbols take their values later."""
    p, j = sympy.symbols("p j", integer=True)
    rule = mask.hidden((p, p), (j, j))
    for position, key in itertools.product(positions(sequence), range(sequence.n_k + 5)):
        values = {p: position, j: key, N_K: sequence.n_k}
        hidden = any(holds(comparison, values) for comparison in rule)
        assert hidden == (key >= sequence.n_k or not sees(mask, position, key))
        now = mask.hidden((position, position), (key, key), n_k=sequence.n_k)
        assert hidden == any(map(holds, now))


@pytest.mark.parametrize("sequence", SEQUENCES, ids=name_of)
@pytest.mark.parametrize("mask", LIMITED, ids=name_of)
def test_some_pair_of_a_tile_is_hidden(mask, sequence):
    """Tiles may be larger than windows, and reach past the last query and the last key."""
    for first, rows, begin, keys in itertools.product(positions(sequence), (1, 3, 8), range(sequence.n_k), (1, 2, 7)):
        pairs = itertools.product(range(first, first + rows), range(begin, begin + keys))
        expected = any(key >= sequence.n_k or not sees(mask, position, key) for position, key in pairs)
        comparisons = mask.hidden((first, first + rows - 1), (begin, begin + keys - 1), n_k=sequence.n_k)
        assert any(map(holds, comparisons)) == expected


@pytest.mark.parametrize("mask", LIMITED, ids=name_of)
def test_nothing_is_compared_that_cannot_hide(mask):
    """Under a causal mask no query sees past the last key, which is at the last position."""
    comparisons = mask.hidden((N_Q, N_Q), (N_K, N_K))
    assert len(comparisons) == mask.hides_later + mask.hides_earlier + (not mask.bounds_keys)
    assert mask.bounds_keys == (mask.right == 0)


@pytest.mark.parametrize("mask", LIMITED, ids=name_of)
def test_ends_of_what_is_seen(mask):
    many = range(-40, 40)
    for place in range(-3, 4):
        keys = [key for key in many if sees(mask, place, key)]
        rows = [position for position in many if sees(mask, position, place)]
        assert mask.first_key(place) == (None if keys[0] == many[0] else keys[0])
        assert mask.last_key(place) == (None if keys[-1] == many[-1] else keys[-1])
        assert mask.first_position(place) == (None if rows[0] == many[0] else rows[0])
        assert mask.last_position(place) == (None if rows[-1] == many[-1] else rows[-1])
    assert mask.hides_earlier == (mask.first_key(0) is not None)
    assert mask.hides_later == (mask.last_key(0) is not None)
    assert mask.hides == any(not sees(mask, 0, key) for key in many)


@pytest.mark.parametrize("mask", LIMITED, ids=name_of)
def test_keys_that_a_query_sees_begin_at_one_that_exists(mask):
    for position in range(8):
        assert mask.begin(position) == next(key for key in itertools.count() if sees(mask, position, key))


def test_names_tell_masks_apart():
    assert (FULL.name, CAUSAL.name, Mask(4, 0).name) == ("full", "causal", "left4_causal")
    assert len({mask.name for mask in LIMITED}) == len(LIMITED)
    assert all(mask.name.isidentifier() for mask in LIMITED)
    assert len({*LIMITED, Mask(3, 6), Mask(3, 6, "output")}) == len(LIMITED) + 1


@pytest.mark.parametrize("mask", LIMITED, ids=name_of)
def test_later_rows_see_more_keys(mask):
    """In the middle of a sequence that is longer than any window."""
    seen = [sum(sees(mask, position, key) for key in range(100)) for position in range(40, 60)]
    grows = all(fewer < more for fewer, more in itertools.pairwise(seen))
    assert mask.favours_later_rows == grows


@pytest.mark.parametrize(
    ("visible", "grows"),
    [("(j <= i) | (j < prefix[b])", True), ("j < prefix[b]", False), ("(j > i) | (j < prefix[b])", False)],
)
def test_later_rows_of_tables_see_more_keys(visible, grows):
    spec = Spec(None, 64, causal=False, visible=visible, parameters={"prefix": "b"})
    mask = Mask.of(spec)
    assert mask.favours_later_rows == grows
    assert ("widening" in mask.name) == grows  # kernels of another order have another name


def test_of_a_request():
    assert Mask.of(Spec((6, 11), 64)) == CAUSAL
    assert Mask.of(Spec((6, 11), 64, causal=False)) == FULL
    assert Mask.of(Spec((6, 11), 64, mask="output")) == Mask(None, 0, "output")
    assert Mask.of(Spec((1, 11), 64, mask="output")) == CAUSAL  # whose row of terms is the row of outputs
    assert Mask.of(Spec(None, 64, post_kernel=(6, 11), mask="output")) == CAUSAL  # probabilities of hidden keys are 0
    window = Spec(None, 64, post_kernel=(6, 11), mask="output", window=(9, -1))
    assert Mask.of(window) == Mask(9, 0, "output")  # but those of keys that later rows do not see are not
    assert Mask.of(replace(window, post_kernel=(1, 11))) == Mask(9, 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("terms", MASKS)
@pytest.mark.parametrize("padding", KEY_PADDINGS)
@pytest.mark.parametrize("kernel", [(1, 1), (1, 4), (3, 1), (2, 3), (4, 6)])
def test_which_terms_of_a_convolution_count(kernel, padding, terms, causal):
    """A hidden score is zero for all rows of outputs that read it, or counts for some of them only."""
    spec, n = Spec(kernel, 64, causal=causal, key_padding=padding, mask=terms), 12
    mask, counted = Mask.of(spec), {}  # of each score: whether it counts, in each row of outputs that reads it
    for i, u, j, v in itertools.product(range(n), range(spec.cq), range(n), range(spec.ck)):
        row, key = i - (spec.cq - 1) + u, j - spec.pad_left + v
        if row >= 0 and 0 <= key < n:
            judge = row if terms == "source" else i
            counted.setdefault((row, key), set()).add(not causal or key <= judge)
    assert mask.zeroes_terms == any(len(uses) == 2 for uses in counted.values())
    zeroed = all(uses == {sees(mask, *score)} for score, uses in counted.items())
    assert mask.zeroes_scores == (zeroed and any(uses == {False} for uses in counted.values()))


def test_queries_are_aligned_to_the_end_of_the_keys():
    for sequence in SEQUENCES:
        assert positions(sequence)[-1] == sequence.n_k - 1
    assert Sequence(11, 4).offset == -7
    assert SEQUENCE.offset == N_K - N_Q


def test_a_function_of_scores_that_kernels_hold_scaled() -> None:
    """If s is held as s / 64, the capped score is held as a 64th of it, too; the identity stays what it is."""
    capped = ScoreStage(CAUSAL, 50 * sympy.tanh(SCORE / 50))
    held = capped.scaled(1 / 64).modify
    assert sympy.simplify(64 * held.subs(SCORE, SCORE / 64) - capped.modify) == 0
    assert ScoreStage(CAUSAL).scaled(1 / 64) == ScoreStage(CAUSAL)


def test_gradient_of_a_function_of_scores() -> None:
    """It does not depend on the units of scores, and that of the identity is the gradient itself. 0 stays 0."""
    capped = ScoreStage(CAUSAL, 50 * sympy.tanh(SCORE / 50))
    expected = GRADIENT * (1 - sympy.tanh(SCORE / 50) ** 2)
    for stage, score in ((capped, SCORE), (capped.scaled(1 / 64), SCORE / 64)):
        condition, gradient, other = stage.modify_backward.args
        assert (condition, other) == (sympy.Ne(GRADIENT, 0), 0)
        assert sympy.simplify(gradient.subs(SCORE, score) - expected) == 0
    assert ScoreStage(CAUSAL).modify_backward == GRADIENT
    assert ScoreStage(CAUSAL, 3 * SCORE + 1).modify_backward == 3 * GRADIENT
