"""What users find under ``mtagen``: names, types of calls, weights to begin with."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import mtagen
from mtagen import AttentionOp, InputError
from mtagen.dtypes import TORCH_DTYPES, DTypeLike


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTAGEN_CACHE_DIR", str(tmp_path))


def test_submodules_are_imported_when_they_are_named() -> None:
    code = (
        "import sys, mtagen\n"
        "assert not {'torch', 'transformers', 'sympy'} & {*sys.modules}\n"
        "mtagen.accuracy.compare, mtagen.nn.Cache, mtagen.distributed.ContextParallel\n"
        "assert 'transformers' not in sys.modules\n"
        "mtagen.transformers.MtaConfig"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr


def test_an_import_of_all_names_does_without_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None\nfrom mtagen import *\naccuracy.compare"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr


def test_the_ops_old_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"mtagen\.AttentionOp.*mtagen\.nn\.MultiTokenAttention"):
        assert mtagen.MultiTokenAttention is AttentionOp
    assert "MultiTokenAttention" not in dir(mtagen)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python keeps overloads from 3.11 on")
@pytest.mark.parametrize("name", ["__call__", "varlen", "decode"])
def test_types_of_calls_follow_return_lse(name: str) -> None:
    overloads = typing.get_overloads(getattr(AttentionOp, name))
    signatures = [inspect.signature(one) for one in overloads]
    assert {one.parameters["return_lse"].annotation: one.return_annotation for one in signatures} == {
        "Literal[False]": "Tensor",
        "Literal[True]": "tuple[Tensor, Tensor]",
        "bool": "Tensor | tuple[Tensor, Tensor]",
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python keeps overloads from 3.11 on")
@pytest.mark.parametrize("name", ["__call__", "varlen", "decode"])
def test_overloads_take_what_the_method_takes(name: str) -> None:
    method = getattr(AttentionOp, name)
    taken = inspect.signature(method).parameters
    overloads = typing.get_overloads(method)
    assert overloads
    for one in overloads:
        parameters = dict(inspect.signature(one).parameters)
        kind = parameters.pop("options").annotation.removeprefix("Unpack[").removesuffix("]")
        options = getattr(sys.modules[AttentionOp.__module__], kind)
        assert {*parameters, *options.__annotations__, *options.__optional_keys__} == {*taken}
        assert options.__required_keys__ == {
            key for key in options.__annotations__ if taken[key].default is inspect.Parameter.empty
        }


@pytest.mark.parametrize("dtype", [name for kind in get_args(DTypeLike) for name in get_args(kind)])
def test_build_takes_each_name_of_a_dtype(dtype: Any) -> None:
    (found,) = mtagen.build(None, 16, target="cpu", dtype=dtype).dtypes
    assert found in TORCH_DTYPES.values()


STAGES: dict[str, dict[str, Any]] = {
    "none": {"kernel": None},
    "convolution": {"kernel": (3, 4)},
    "all": {"kernel": (6, 11), "mixed_heads": 2, "post_kernel": (2, 4), "post_mixed_heads": 4, "key_padding": "left"},
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("holder", [dict, torch.nn.ParameterDict])
def test_identity_weights_make_plain_attention(stages: dict[str, Any], holder: Any) -> None:
    op = mtagen.build(head_dim=16, **stages)
    q, k, v = torch.randn(3, 2, 4, 21, 16, dtype=torch.float64)
    weights = holder(op.identity_weights(4, dtype=torch.float64))
    assert {name: tuple(x.shape) for name, x in weights.items()} == op.plan.spec.weights(4)
    torch.testing.assert_close(op(q, k, v, **weights), scaled_dot_product_attention(q, k, v, is_causal=True))


def test_identity_weights_own_their_memory() -> None:
    weights = mtagen.build(None, 16, mixed_heads=2).identity_weights(4, device="cpu")
    weights["head_weight"][0, 0, 0] = 5
    assert weights["head_weight"][1, 0, 0] == 1
    assert weights["head_weight"].dtype == torch.float32


@pytest.mark.parametrize("heads", [0, -2, 2.0, True, 3])
def test_identity_weights_of_heads_that_cannot_be(heads: Any) -> None:
    with pytest.raises(InputError, match="heads: got "):
        mtagen.build(None, 16, mixed_heads=2).identity_weights(heads)
