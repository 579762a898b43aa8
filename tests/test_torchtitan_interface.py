"""The override for torchtitan against the part of torchtitan's interface that it uses, where torchtitan is missing.

tests/test_torchtitan.py has torchtitan itself, if it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mtagen

pytestmark = pytest.mark.usefixtures("one_thread")


class Module(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        param_init: dict[str, Any] | None = None


class VarlenAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)


class GQAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        dim: int
        head_dim: int | None = None
        inner_attention: Any


class VarlenMetadata(NamedTuple):
    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int
    cu_seq_q_host: tuple[int, ...] | None = None


def derive(source: Any, target: type, **deltas: Any) -> Any:
    shared = {field.name for field in fields(source)} & {field.name for field in fields(target)}
    return target(**{name: getattr(source, name) for name in shared} | deltas)


def override(**options: Any) -> Callable[[Any], Any]:
    assert options["target"] is GQAttention.Config
    assert options["exact"]  # attention that extends it has more than the override knows
    return lambda function: function


INTERFACE: dict[str, dict[str, Any]] = {
    "torchtitan": {},
    "torchtitan.config": {"derive": derive, "override": override},
    "torchtitan.models": {},
    "torchtitan.models.common": {},
    "torchtitan.models.common.attention": {
        "GQAttention": GQAttention,
        "VarlenAttention": VarlenAttention,
        "VarlenMetadata": VarlenMetadata,
    },
    "torchtitan.protocols": {},
    "torchtitan.protocols.module": {"Module": Module},
}


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """mtagen.torchtitan with the interface."""
    for name, values in INTERFACE.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mtagen.torchtitan", raising=False)
    import mtagen.torchtitan

    yield mtagen.torchtitan
    del sys.modules["mtagen.torchtitan"], mtagen.torchtitan


def inner(titan: Any, config: Any = None, **stages: Any) -> Any:
    layer = GQAttention.Config(n_heads=4, dim=64, inner_attention=config or VarlenAttention.Config())
    return titan.InnerAttention(titan.multi_token_attention(layer, **stages).inner_attention)


def test_batches_and_documents(titan: Any) -> None:
    module = inner(titan, kernel=[3, 5], post_mixed_heads=2)
    assert {name: tuple(x.shape) for name, x in module.named_parameters()} == {
        "weight": (4, 3, 5),
        "post_head_weight": (2, 2, 2),
    }
    q, (k, v) = torch.randn(2, 10, 4, 16), torch.randn(2, 2, 10, 2, 16)
    plain = nn.functional.scaled_dot_product_attention
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = plain(*heads_first, is_causal=True, enable_gqa=True, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(module(q, k, v, scale=0.3, enable_gqa=True), expected)

    with torch.no_grad():
        for x in module.parameters():
            x += 0.3 * torch.randn(x.shape)
    begins = torch.tensor([0, 4, 10, 14, 20], dtype=torch.int32)
    out = module(q, k, v, attention_masks=VarlenMetadata(begins, begins, 6, 6))
    for part in (slice(0, 4), slice(4, 10)):
        torch.testing.assert_close(out[:, part], module(*(x[:, part] for x in (q, k, v))))
    assert (out[:, 4:] - module(q, k, v)[:, 4:]).abs().max() > 1e-2
    module.reset_parameters()
    torch.testing.assert_close(module(q, k, v, scale=0.3), expected)


@pytest.mark.parametrize(("window", "sides"), [((-1, 0), (None, 0)), ((4, 0), (4, 0)), ((-1, -1), (None, None))])
def test_window(titan: Any, window: tuple[int, int], sides: tuple[int | None, int | None]) -> None:
    spec = inner(titan, VarlenAttention.Config(window_size=window), kernel=[2, 3]).op.plan.spec
    assert (spec.left, spec.right) == sides


def test_what_is_refused(titan: Any) -> None:
    module, q = inner(titan, kernel=[3, 5]), torch.randn(1, 9, 4, 16)
    with pytest.raises(mtagen.InputError, match=r"out_transform: got .*; a function of outputs .* is not supported"):
        module(q, q, q, out_transform=lambda out, lse: out)
    with pytest.raises(mtagen.InputError, match="attention_masks: got 'dict'; must tell where documents begin"):
        module(q, q, q, attention_masks={})
    with pytest.raises(mtagen.InputError, match="weight"):  # a part of the heads, as tensor parallelism would pass
        module(q[:, :, :2], q[:, :, :2], q[:, :, :2])


def test_without_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("torchtitan.", "mtagen.torchtitan"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ModuleNotFoundError, match=r"import: got 'torchtitan.*'; .*; legal: pip install torchtitan"):
        import mtagen.torchtitan  # noqa: F401
