"""The table of targets."""

import itertools
from dataclasses import replace

import cuda.core
import pytest
import torch

from mtagen import Spec, plan
from mtagen.codegen import emit
from mtagen.codegen.cuda import render
from mtagen.errors import SpecError
from mtagen.planner.passes import PASSES
from mtagen.planner.targets import RESERVED_SHARED, TARGETS, get_target, target_for_capability
from mtagen.planner.tile.candidates import candidates
from mtagen.runtime.load import arch_for
from mtagen.runtime.loader import load_module
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
    kib = {name: target.shared_per_block // 1024 for name, target in TARGETS.items()}
    cuda = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_120": 99}
    assert kib == {**cuda, "gfx942": 64, "generic": 48}
    assert {name for name, target in TARGETS.items() if "mma" in target.matrix} == set(cuda)
    assert {name for name, target in TARGETS.items() if "wgmma" in target.matrix} == {"sm_90a"}
    assert all(TARGETS[name].sm == name for name in cuda)


# Copies of the H200's row.
COPIES = {
    "another name": ({"name": "sm_100a"}, "name: got 'sm_100a'; .*; legal: sm_90a"),
    "another architecture": ({"arch": 100}, "matrix: got 'wgmma'; architecture 100 does not have it; .* 90 alone"),
    "both": ({"name": "sm_100a", "arch": 100}, "matrix: got 'wgmma'; architecture 100"),
    "any name": ({"name": "hopper_next", "arch": 100}, "matrix: got 'wgmma'; architecture 100"),
    "not specific": ({"matrix": ("mma",)}, "name: got 'sm_90a'; .*; legal: sm_90$"),
    "no family": ({"matrix": ("tcgen05",)}, "matrix: got 'tcgen05'; is no family"),
}


@pytest.mark.parametrize(("changed", "message"), COPIES.values(), ids=COPIES)
def test_what_one_architecture_alone_has_stays_there(changed, message):
    with pytest.raises(SpecError, match=message):
        replace(TARGETS["sm_90a"], **changed)


STAGES = list(itertools.product((False, True), repeat=4))


@pytest.mark.parametrize("stages", STAGES, ids=str)
@pytest.mark.parametrize("target", ["sm_86", "sm_89", "sm_120"])
def test_100_kb_of_shared_memory_are_enough(target, stages):
    """For every pass of every pipeline, on each backend."""
    before, mixed, after, mixed_after = stages
    for kernel, head_dim, causal in itertools.product([(6, 11), (3, 3)], [64, 128], [True, False]):
        spec = Spec(
            kernel if before else None,
            head_dim,
            mixed_heads=16 if mixed else None,
            post_kernel=kernel if after else None,
            post_mixed_heads=16 if mixed_after else None,
            causal=causal,
        )
        for backend in ("triton", "cuda", "auto"):
            made = plan(spec, target, backend)
            for name in PASSES:
                shared = [kernel.shared for kernel in made[name].kernels]
                assert shared
                assert max(shared) <= get_target(target).shared_per_block <= 100 * 1024


def test_resident_warps_and_ctas_share_a_multiprocessor():
    hopper = TARGETS["sm_90a"]
    assert [hopper.registers_of(warps) for warps in (4, 8, 12, 16)] == [255, 255, 168, 128]
    assert [hopper.shared_of(ctas) for ctas in (1, 2)] == [227 * 1024, 113 * 1024]
    for target in TARGETS.values():
        for count in range(1, 9):
            assert target.registers_of(4 * count) * target.warp_size * 4 * count <= target.registers_per_multiprocessor
            assert (target.shared_of(count) + RESERVED_SHARED) * count <= target.shared_per_multiprocessor


def test_which_targets_have_tensor_descriptors():
    assert {name for name, target in TARGETS.items() if target.tensor_descriptors} == {"sm_90a", "sm_120"}


def test_a_row_without_it_is_planned_without_it(monkeypatch):
    """Whatever else it has of the H200."""
    portable = replace(TARGETS["sm_90a"], name="sm_100", arch=100, matrix=("mma",))
    monkeypatch.setitem(TARGETS, "sm_100", portable)
    assert portable.mma_flop_per_cycle == portable.tensor_flop_per_cycle
    for name in PASSES:
        for candidate in candidates(name, Spec((6, 11), 64), portable):
            assert "wgmma.mma_async" not in render(candidate)
    assert "wgmma.mma_async" in render(candidates("forward", Spec((6, 11), 64), TARGETS["sm_90a"])[0])


def test_unknown_name_lists_the_legal_ones():
    with pytest.raises(SpecError, match=r"target: got 'sm_42'.*sm_80.*generic"):
        get_target("sm_42")


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        *(((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")),
        *(((8, 7), "sm_80"), ((8, 8), "sm_86"), ((10, 0), "sm_80"), ((10, 3), "sm_80"), ((10, 7), "sm_89")),
        *(((11, 0), "sm_80"), ((12, 1), "sm_120"), ((13, 0), "sm_120"), ((99, 9), "sm_120")),
        *(((7, 5), "generic"), ((7, 0), "generic")),
    ],
)
def test_capability_finds_its_row(capability, name):
    assert target_for_capability(capability).name == name


# What a block may take, in KiB (CUDA C++ Programming Guide).
SHARED = {(8, 6): 99, (8, 7): 163, (8, 8): 99, (8, 9): 99, (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 1): 99}


@pytest.mark.parametrize("capability", [*SHARED, (10, 7), (14, 2)])
def test_other_gpus_get_kernels_that_run_there(capability):
    target = target_for_capability(capability)
    assert target.matrix == ("mma",)
    assert target.shared_per_block <= 1024 * SHARED.get(capability, 99)
    major, minor = capability
    assert arch_for(target.name, capability) == f"sm_{major}{minor}"
    assert plan(Spec((6, 11), 128), target, "cuda").backend == "cuda"


@pytest.mark.parametrize(
    ("target", "capability", "arch"),
    [("sm_90a", (9, 0), "sm_90a"), ("sm_90a", (10, 0), "sm_90a"), ("sm_80", (10, 0), "sm_100")],
)
def test_emitted_modules_compile_for_the_gpu(target, capability, arch, tmp_path, monkeypatch):
    """What one architecture alone has is compiled for no other: there the driver says that it cannot load it."""

    class Program:
        def __init__(self, source, language, options):
            self.code = options.arch.encode()

        def compile(self, kind):
            return self

    monkeypatch.setattr(cuda.core, "Program", Program)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    made = plan(Spec((2, 3), 16), target, "cuda")
    (host,) = (path for path in emit(made, tmp_path) if path.suffix == ".py")
    module = load_module(host, host.read_bytes())
    assert module.compile_source(tmp_path / module.SOURCES["forward"], module.TARGET, 0) == arch.encode()
