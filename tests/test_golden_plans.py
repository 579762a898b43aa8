"""The plans that ``auto`` chooses on every target are those in ``golden_plans.txt``."""

from __future__ import annotations

from golden_plans import COMMAND, FILE, difference, table


def test_plans_are_those_agreed_on() -> None:
    changed = difference(FILE.read_text(encoding="utf-8"), table())
    assert not changed, changed


def test_a_difference_shows_what_changed_and_how_to_agree() -> None:
    one, other = "a forward sm_80: cuda\n", "a forward sm_80: triton\n"
    assert difference(one, one) == ""
    shown = difference(f"{one}b\n", f"{other}b\n").splitlines()
    assert shown[-3:] == [f"-{one.strip()}", f"+{other.strip()}", f"If that is meant: {COMMAND}"]
