"""The fuzzer: it finds faults that are planted, prints them smaller, and finds none in some seconds on each backend."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from emulator import needs_compiler
from fuzz import ops
from fuzz.__main__ import main
from fuzz.case import BACKENDS, Case, draw
from fuzz.shrink import shrink
from torch import Tensor

SEED = 40
SECONDS = {"cpu": 10, "interpreter": 10, "emulator": 10}  # all that continuous integration spends


@pytest.mark.parametrize("backend", [pytest.param(x, marks=needs_compiler if x == "emulator" else ()) for x in SECONDS])
def test_random_calls_are_right(backend: str, folder: Path) -> None:
    """What is printed on a failure has the seed, and commands that try the case, and a smaller one, again."""
    command = [sys.executable, "-m", "tests.fuzz", "--backend", backend, "--seed", str(SEED)]
    command += ["--seconds", str(SECONDS[backend]), "--folder", str(folder / "fuzz")]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout[-8000:]}{run.stderr[-2000:]}"
    assert re.match(r"[1-9]\d* cases, 0 wrong", run.stdout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_case_follows_from_its_seed_and_number(backend: str) -> None:
    cases = [draw(backend, SEED, index) for index in range(100)]
    assert cases == [draw(backend, SEED, index) for index in range(100)]
    assert [Case.parse(str(case)) for case in cases] == cases


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_and_numbers_change_all_data(backend: str) -> None:
    assert len({draw(backend, seed, index).data for seed in (SEED, SEED + 1) for index in range(100)}) == 200


def test_emulated_cases_share_ops() -> None:
    """A compiler takes longer for kernels than they take for many calls."""
    ops = {(case.spec, case.maker, case.call) for case in (draw("emulator", SEED, index) for index in range(80))}
    assert len(ops) == 2


# Planted faults: each calls an op and spoils what it returns.


def with_larger_gradients(call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The gradient of the keys is 10 % too large if there are at least five."""
    if k.shape[-2] >= 5:
        k = 1.1 * k - 0.1 * k.detach()
    return call(q, k, v, **options)


def reading_hidden_keys(
    decodes: bool, call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Any:
    """Results depend on all keys as soon as one is infinity or NaN, in decode or in other calls."""
    result = call(q, k, v, **options)
    if ("num_splits" in options) != decodes:
        return result
    nothing = 0 * k.sum()
    return (result[0] + nothing, result[1]) if isinstance(result, tuple) else result + nothing


def with_larger_sums(call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The log-sum-exp is too large."""
    result = call(q, k, v, **options)
    return (result[0], result[1] + 1e-3) if isinstance(result, tuple) else result


class Wrong:
    """An op with a fault."""

    def __init__(self, op: Any, fault: Callable[..., Any]) -> None:
        self._op, self._fault = op, fault

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        return self._fault(self._op, *tensors, **options)

    def varlen(self, *tensors: Any, **options: Any) -> Any:
        return self._fault(self._op.varlen, *tensors, **options)

    def decode(self, *tensors: Any, **options: Any) -> Any:
        return self._fault(self._op.decode, *tensors, **options)


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {  # and what the fuzzer prints
    "gradient": (with_larger_gradients, "dk: "),
    "hidden": (partial(reading_hidden_keys, False), "hidden "),
    "capacity": (partial(reading_hidden_keys, True), "out: inf > "),
    "lse": (with_larger_sums, "lse: "),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("fault", "shown"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(
    fault: Callable[..., Any], shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ops.mtagen.build
    with monkeypatch.context() as patch:
        patch.setattr(ops.mtagen, "build", lambda **options: Wrong(build(**options), fault))
        assert main(["--cases", "300", "--seed", str(SEED)]) == 1
        printed = capsys.readouterr().out
        assert shown in printed
        commands = re.findall(r"python -m tests\.fuzz (.*)", printed)
        assert len(commands) == 2  # the case, and a smaller one
        for command in commands:
            assert main([*shlex.split(command), "--shrink", "0"]) == 1
            assert shown in capsys.readouterr().out
    for command in commands:
        assert main(shlex.split(command)) == 0


def test_a_failing_case_shrinks() -> None:
    """To the smallest one that fails alike, and not to one that fails otherwise."""
    case = Case.parse(
        '{"backend": "cpu", "maker": "torch", "kernel": [6, 11], "post_kernel": [3, 3], "mixed_heads": 2, "heads": 4,'
        ' "head_dim": 64, "window": [9, 5], "causal": false, "lengths": [[40, 40], [17, 31], [5, 5]], "call": "varlen"}'
    )

    def kinds(case: Case) -> set[str]:
        long = max(n_k for _, n_k in case.lengths) > 4
        return {"wide"} if case.kernel and case.kernel[1] > 2 and long and case.mixed_heads else {"plain"}

    smallest = Case("cpu", "torch", kernel=(1, 3), mixed_heads=2, heads=2, lengths=((0, 5),), call="varlen")
    assert shrink(case, kinds, 60) == smallest
    assert shrink(case, kinds, 0) == case
