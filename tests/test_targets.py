"""The table of targets."""

import pytest

from mtagen.errors import SpecError
from mtagen.planner.targets import TARGETS, get_target, target_for_capability
from mtagen.spec import DTYPES


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_rows_are_consistent(target):
    assert get_target(target.name) is target
    assert target.backend in ("cuda", "hip")
    assert isinstance(target.arch, int) == (target.backend == "cuda")
    assert target.warp_size == {"cuda": 32, "hip": 64}[target.backend]
    assert 48 * 1024 <= target.shared_per_block <= target.shared_per_multiprocessor
    assert target.registers_per_multiprocessor % (target.warp_size * 256) == 0
    assert target.dram_gbps < target.l2_gbps
    assert set(target.dtypes) <= set(DTYPES)


def test_table_has_the_promised_rows():
    assert set(TARGETS) == {"sm_80", "sm_89", "sm_90a", "gfx942", "generic"}
    kib = {name: target.shared_per_block // 1024 for name, target in TARGETS.items()}
    assert kib == {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "gfx942": 64, "generic": 48}
    assert [name for name, target in TARGETS.items() if target.wgmma] == ["sm_90a"]


def test_unknown_name_lists_the_legal_ones():
    with pytest.raises(SpecError, match=r"target: got 'sm_42'.*sm_80.*generic"):
        get_target("sm_42")


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((8, 6), "generic"), ((12, 0), "generic")],
)
def test_capability_finds_its_row(capability, name):
    assert target_for_capability(capability).name == name
