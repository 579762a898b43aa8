"""Functions of scores before the convolution and before the mixture of heads, which strips compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import problems
import pytest
import torch
from emulator import load_emulated
from host_functions import retiled
from torch import Tensor

from mtagen import Plan, PlanError, Spec, plan
from mtagen.codegen import render
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import AttentionOp, assemble
from mtagen.planner.choice import PlannedPass
from mtagen.planner.lift import passes as lift
from mtagen.planner.strip import kernels
from mtagen.planner.strip.passes import LOWERINGS
from mtagen.planner.tables import Shape
from mtagen.planner.targets import get_target
from mtagen.planner.tile import candidates as tile
from mtagen.runtime.load import load_host

pytestmark = pytest.mark.usefixtures("memory_starts_as_nan")

CAP = "3 * tanh(s / 3)"
ALL_STAGES = {"kernel": (3, 4), "mixed_heads": 2, "post_kernel": (2, 3), "post_mixed_heads": 4}
EVERYWHERE = {"scores": "s - (i - j) / 8 + 1", "convolved": CAP, "logits": problems.LOGITS}
# Expressions that read parameters, by what an entry of them counts, and the parameters.
READING: dict[str, tuple[str, dict[str, str]]] = {
    "heads": ("tanh(s * t[h])", {"t": "h"}),
    "a table": ("s + table[h, max(0, min(5, i - j + 2))]", {"table": "h,6"}),
    "keys": ("s + u[b, h, j]", {"u": "b,h,j"}),
    "keys of all heads": ("s * u[b, j]", {"u": "b,j"}),
    "rows": ("s * u[b, h, i] + 1", {"u": "b,h,i"}),
    "pairs": ("s + pair[b, i, j]", {"pair": "b,i,j"}),
    "batch entries": ("s * t[b] + u[b, h]", {"t": "b", "u": "b,h"}),
}
# It reads the first four of these kinds. By output, a convolution counts keys up to two after the query.
SEVERAL = "s * t[h] + table[h, max(0, min(5, i - j + 2))] + u[b, h, i] - u[b, h, j]"
PARAMETERS = {"t": "h", "table": "h,6", "u": "b,h,j"}
CASES: dict[str, dict[str, Any]] = {
    "constants at three places": {
        **ALL_STAGES,
        "scores": "s * t[h]",
        "convolved": "s + u[b, h, i]",
        "logits": "s + table[h, max(0, min(5, i - j + 2))] - u[b, h, j] + w[h]",
        "parameters": {**PARAMETERS, "w": "h"},
        "constants": ("t", "u"),
    },
    "a cap before the convolution": {"kernel": (6, 11), "scores": CAP},
    "a bias before the convolution": {"kernel": (3, 4), "scores": "s - (i - j) / 8"},
    "a bias before the convolution, by output": {"kernel": (3, 4), "scores": "s - (i - j) / 8 + 1", "mask": "output"},
    "one more before the convolution": {"kernel": (3, 4), "scores": "s + 1"},
    "one more before the convolution, full": {"kernel": (3, 4), "scores": "s + 1", "causal": False},
    "one more before the convolution, in a window": {
        "kernel": (3, 4),
        "scores": "s + 1",
        "causal": False,
        "window": (9, 5),
    },
    "no score before the convolution": {"kernel": (3, 4), "scores": "h - j / 16", "mixed_heads": 2},
    "a cap before the mixture": {"kernel": None, "mixed_heads": 2, "convolved": CAP},
    "one more before the mixture": {"kernel": (3, 4), "mixed_heads": 4, "convolved": "exp(s / 4) + 1"},
    "no score before the mixture": {"kernel": None, "mixed_heads": 2, "convolved": "h - j / 16"},
    "everywhere": ALL_STAGES | EVERYWHERE,
    "everywhere, full": ALL_STAGES | EVERYWHERE | {"causal": False},
    "parameters before the convolution, full": {
        "kernel": (3, 4),
        "scores": SEVERAL,
        "parameters": PARAMETERS,
        "causal": False,
    },
    "parameters before the convolution, by output": {
        "kernel": (3, 4),
        "scores": SEVERAL,
        "parameters": PARAMETERS,
        "mask": "output",
    },
    "hidden slopes before the convolution": {"kernel": (3, 4), "scores": problems.DEFINED_WHERE_VISIBLE},
    "hidden slopes before the mixture": {
        "kernel": (3, 4),
        "mixed_heads": 2,
        "post_kernel": (2, 5),
        "convolved": problems.DEFINED_WHERE_VISIBLE,
    },
}
# Planes begin with the first key that a window shows.
IN_A_WINDOW: dict[str, dict[str, Any]] = {
    "before the convolution": {"kernel": (3, 4), "scores": problems.OF_PLACES},
    "before the mixture": {"kernel": None, "mixed_heads": 2, "convolved": problems.OF_PLACES},
    "everywhere": ALL_STAGES
    | {"scores": SEVERAL, "convolved": SEVERAL, "logits": "s + u[b, h, j]", "parameters": PARAMETERS, "sink": True},
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def made(backend: str, folder: Path, workspace_bytes: int = 2**30, **options: Any) -> Plan:
    planned = plan(Spec(head_dim=16, dtype="fp16", **options), "sm_90a", backend)
    if planned.lift:  # its kernels are those of test_bias.py
        names = (made.plan.pass_name for made in planned.passes)
        strips = (LOWERINGS[backend].candidates(name, planned.spec, get_target("sm_90a"))[0] for name in names)
        passes = (PlannedPass(made, "the lowering that is tested", ()) for made in strips)
        planned = replace(planned, passes=tuple(passes))
    planned = retiled(planned, workspace_bytes=workspace_bytes)
    assert len(planned.strip) == (2 if planned.spec.packed else 3)
    load_emulated(planned, folder)
    return planned


def gradients(op: AttentionOp, problem: problems.Problem) -> Tensor:
    """All gradients of parameters, in a row."""
    inputs = problem.inputs
    parameters = {name: inputs.named[name].clone().requires_grad_() for name in inputs.axes}
    named = inputs.named | parameters
    out = op(*(named[name] for name in "qkv"), **inputs.options(named))
    grads = torch.autograd.grad(out, [*parameters.values()], problem.grad_out)
    return torch.cat([grad.flatten() for grad in grads])


def op_of(planned: Plan) -> AttentionOp:
    return assemble(planned, torch_on_cpu=False)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_training(backend: str, options: dict[str, Any], folder: Path) -> None:
    """Gradients come through the log-sum-exp, too."""
    op = op_of(made(backend, folder, **options))
    several_chunks = [Sizes(1, 4, 1, 13, 140)] if backend == "triton" else []  # in which the emulator takes long
    for sizes in (Sizes(2, 4, 2, 17, 17), *several_chunks):
        assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, sizes))


@pytest.mark.parametrize(("kernel", "window"), [((3, 4), (-1, -1)), ((3, 9), (-1, 4))], ids=str)
def test_keys_that_do_not_exist(kernel: tuple[int, int], window: tuple[int, int], folder: Path) -> None:
    """Kernels without tensor descriptors read rows of planes to the end of a vector."""
    spec = Spec(kernel, head_dim=16, dtype="fp16", causal=False, window=window, scores="s + 1")
    op = op_of(plan(spec, "generic", "triton"))
    for n_k in (17, 21):
        assert not problems.failures(op, spec, problems.random(spec, Sizes(1, 2, 2, 19, n_k)))


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("case", [name for name in CASES if "full" in name or "hidden" in name or "cap" in name])
def test_decode(backend: str, case: str, folder: Path) -> None:
    """Queries before the sequence and keys after it hold NaN."""
    op = op_of(made(backend, folder, **CASES[case]))
    problem = problems.random(op.plan.spec, Sizes(3, 4, 2, 1, 140), new_tokens=3)
    assert not problems.decode_failures(op, op.plan.spec, problem, (140, 30, 2), None)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("options", IN_A_WINDOW.values(), ids=IN_A_WINDOW)
def test_places_in_a_window(backend: str, options: dict[str, Any], folder: Path) -> None:
    """Positions and keys count from the sequence's first key, wherever strips and splits begin."""
    op = op_of(made(backend, folder, 2**10, window=(21, -1), **options))
    assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, Sizes(1, 4, 2, 131, 139)))
    problem = problems.random(op.plan.spec, Sizes(2, 4, 2, 1, 140), new_tokens=2)
    assert not problems.decode_failures(op, op.plan.spec, problem, (140, 90), 2)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("options", IN_A_WINDOW.values(), ids=IN_A_WINDOW)
def test_places_in_documents(backend: str, options: dict[str, Any], folder: Path) -> None:
    """Positions and keys count from the document's first key."""
    planned = made(backend, folder, 2**10, window=(21, -1), packed=True, **options)
    sources = render(planned)
    host = {name: getattr(load_host(planned, sources, name), name) for name in sources.hosts}
    spec = replace(planned.spec, packed=False)
    assert not documents.failures(host, spec, ((9, 4), (140, 170), (5, 60)), 4, 2)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("parameters", [{"t": "h"}, {"table": "h,4"}, {"u": "b,h,j"}], ids=str)
def test_parameters_of_logits(backend: str, parameters: dict[str, str], folder: Path) -> None:
    """Functions at the other places leave the parameters of logits, and their gradients, as they are."""
    logits = {"t": "s * t[h]", "table": "s + table[h, min(3, abs(i - j))]", "u": "s + u[b, h, j]"}
    (name,) = parameters
    options = ALL_STAGES | EVERYWHERE | {"logits": logits[name], "parameters": parameters, "sink": True}
    op = op_of(made(backend, folder, **options))
    sizes = Sizes(2, 4, 2, 17, 33)
    assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, sizes))


@pytest.mark.parametrize(
    ("place", "stages"), [("scores", {"kernel": (2, 3)}), ("convolved", {"kernel": None, "mixed_heads": 2})]
)
@pytest.mark.parametrize(("text", "parameters"), READING.values(), ids=READING)
def test_parameters(place: str, stages: dict[str, Any], text: str, parameters: dict[str, str], folder: Path) -> None:
    op = op_of(made("triton", folder, **stages, **{place: text}, parameters=parameters))
    assert not problems.failures_through_lse(op, op.plan.spec, problems.random(op.plan.spec, Sizes(2, 2, 1, 9, 17)))


def test_gradients_of_parameters_of_several_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sums over blocks of rows, chunks of keys, and rows before the first key, always in the same order."""
    monkeypatch.setattr(kernels, "SUM_CHUNK", 128)
    options = {"kernel": (2, 3), "scores": SEVERAL, "parameters": PARAMETERS, "causal": False}
    op = op_of(made("triton", folder, **options))
    for sizes in (Sizes(1, 2, 1, 140, 150), Sizes(1, 2, 1, 9, 3)):
        problem = problems.random(op.plan.spec, sizes)
        assert not problems.failures_through_lse(op, op.plan.spec, problem)
        assert torch.equal(*(gradients(op, problem) for _ in range(2)))


@pytest.mark.parametrize("lowering", [lift, tile], ids=["lift", "tile"])
def test_fused_kernels_refuse(lowering: Any) -> None:
    """Filtered queries or keys have no scores to apply a function to."""
    with pytest.raises(PlanError, match=r"scores: got .* has no kernels for it"):
        lowering.candidates("forward", Spec((3, 4), 64, scores=CAP), get_target("sm_90a"))


def test_kernels_of_cuda() -> None:
    """Triton's kernels apply the functions, and CUDA's are all others."""
    spec = Spec(head_dim=64, **ALL_STAGES)
    roles = {}
    for place in ("scores", "convolved", "logits"):
        planned = plan(replace(spec, **{place: CAP}), "sm_90a", "cuda")
        passes = planned.strip.values()
        roles[place] = {kernel.role for one in passes for kernel in one.kernels if kernel.role not in one.cuda}
    assert roles["scores"] - roles["logits"] == {"scores", "scores_backward", "decode_scores"}
    rows = {"softmax", "probabilities", "softmax_backward", "decode_statistics", "decode_softmax"}
    assert roles["convolved"] - roles["logits"] == rows


def test_a_slope_of_1_needs_no_kernel() -> None:
    for scores, needs in (("s - (i - j) / 8 + sqrt(h)", False), ("2 * s + j", True), (CAP, True)):
        backward = plan(Spec((3, 4), 64, scores=scores), "sm_90a", "triton")["backward"]
        assert ("scores_backward" in {kernel.role for kernel in backward.kernels}) == needs


def test_names_tell_places_apart() -> None:
    spec = Spec(head_dim=64, **ALL_STAGES)
    places = [{}, {"scores": CAP}, {"convolved": CAP}, {"logits": CAP}, EVERYWHERE]
    names = {plan(replace(spec, **at), "sm_90a", "triton")["forward"].kernels[0].name for at in places}
    assert len(names) == len(places)
    shapes = {Shape.of(replace(spec, **at)) for at in places}  # of logits, every lowering has the function
    assert len(shapes) == len(places) - 1
