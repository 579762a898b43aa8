"""The layer after tools for low precision and adapters, which put modules of their own in the place of its modules.

torchao's float8 training, optimum-quanto and PEFT replace every Linear. Their modules compute something near to
x W^T + b and know of nothing else that a subclass of ``torch.nn.Linear`` may compute. Tools that offload weights bring
those of any module when it is called, and no sooner.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import authors
import pytest
import torch
import torch.nn.functional as F
from test_nn import DIM, EVERYTHING, HEADS, LAYERS, made, tokens, train
from torch import Tensor, nn

from mtagen import build
from mtagen.accuracy import compare
from mtagen.nn import MultiTokenAttention

pytestmark = pytest.mark.usefixtures("one_thread")

PROJECTIONS = ("wq", "wk", "wv", "wo")


class Doubled(nn.Module):
    """Stands for a Linear: computes with twice its weight, and counts its calls. It has no ``weight``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.matrix, self.shift = linear.weight, linear.bias
        self.scale = nn.Buffer(torch.tensor(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.linear(x, self.matrix * self.scale, self.shift)


def replaced(module: nn.Module) -> nn.Module:
    """A copy in which every Linear, of whatever subclass, has been replaced."""
    module = copy.deepcopy(module)
    for name, part in [*module.named_modules()]:
        if isinstance(part, nn.Linear):
            module.set_submodule(name, Doubled(part))
    return module


def doubled(options: dict[str, Any]) -> MultiTokenAttention:
    """The layer of a state dict in which the projections are twice what they are."""
    state = authors.random_state(options, HEADS, DIM)
    for name in PROJECTIONS:
        state[f"{name}.weight"] *= 2
    layer = made(options)
    layer.load_state_dict(state)
    return layer


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_projections_alone_are_replaced(options: dict[str, Any]) -> None:
    """Each is called, with its gradient; mixtures, norm and gate stay what they are."""
    layer = replaced(made(options))
    results, expected = train(layer, tokens(2, 13)), train(doubled(options), tokens(2, 13))
    assert {name for name, part in layer.named_modules() if isinstance(part, Doubled)} == {*PROJECTIONS}
    assert all(layer.get_submodule(name).calls == 1 for name in PROJECTIONS)
    for name in PROJECTIONS:
        expected[f"{name}.matrix"] = 2 * expected.pop(f"{name}.weight")
    torch.testing.assert_close(results, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_generation(dtype: torch.dtype) -> None:
    """The cache does not ask modules for weights that they do not have."""
    options, x = LAYERS["everything"], tokens(2, 13, dtype=dtype)
    layer = replaced(made(options, dtype=dtype))
    cache = layer.new_cache(2, 13)
    assert cache.keys.dtype == dtype
    with torch.no_grad():
        parts = [layer(part, cache=cache) for part in x.split([9, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), doubled(options).to(dtype)(x))


class Called(nn.Module):
    """Stands for any module: it can only be called, and counts its calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.call, self.calls = module, 0

    def forward(self, *arguments: Tensor) -> Any:
        self.calls += 1
        return self.call(*arguments)


@pytest.mark.parametrize("options", [EVERYTHING, EVERYTHING | {"post_mixed_heads": 2}], ids=["all mixed", "pairs"])
def test_modules_are_called(options: dict[str, Any]) -> None:
    """No weight of a module is read without a call of the module, in training and in generation."""
    x, biases = tokens(2, 13), {"scores": "s - slopes[h] * (i - j)", "parameters": {"slopes": "h"}, "sink": True}
    torch.manual_seed(0)
    plain = MultiTokenAttention(DIM, HEADS, **options, **biases, head_dim=16, dtype=torch.float64)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    layer = copy.deepcopy(plain)
    for name, part in [*layer.named_children()]:
        layer.set_submodule(name, Called(part))
    results, expected = train(layer, x), train(plain, x)
    assert results.keys() == {re.sub(r"^(\w+)\.", r"\1.call.", name) for name in expected}
    torch.testing.assert_close([*results.values()], [*expected.values()])
    assert all(part.calls == 1 for part in layer.children())
    with torch.no_grad():
        cache = layer.new_cache(2, 13, like=x)
        parts = [layer(part, cache=cache) for part in x.split([9, 4], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), plain(x))


class LikeItsInput(nn.Module):
    """Stands for a Linear of bitsandbytes: its result has the input's dtype, under autocast too."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).to(x.dtype)


def test_projections_that_ignore_autocast() -> None:
    """The layer casts queries, keys and values, as PyTorch's attention does; ``compute_dtype`` is that of a GPU."""
    torch.manual_seed(0)
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, compute_dtype=torch.bfloat16)
    exact, x = copy.deepcopy(layer).double(), tokens(2, 13, dtype=torch.float32)
    exact.op = build(kernel=(6, 11), head_dim=16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = layer(x)
        for name in PROJECTIONS[:3]:
            layer.set_submodule(name, LikeItsInput(layer.get_submodule(name)))
        assert layer.wq(x).dtype == torch.float32
        cache = layer.new_cache(2, 13)
        parts = [layer(part, cache=cache) for part in x.split([9, 4], 1)]
        found = layer(x)
    with torch.no_grad():
        for one in (found, torch.cat(parts, 1)):
            judged = compare(one, rounded, exact(x.double()))
            assert judged.ok, judged


class Integers(nn.Module):
    """Stands for a Linear: its weight is of 8 bits, with a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale)


def test_cache_of_keys_from_integers() -> None:
    """It has the dtype of keys, whatever that of weights."""
    layer = made(LAYERS["convolution"], dtype=torch.bfloat16)
    layer.wk, layer.mta_kernel = Integers(layer.wk), nn.Parameter(layer.mta_kernel.float())
    x, cache = tokens(2, 5, dtype=torch.bfloat16), layer.new_cache(2, 5)
    with torch.no_grad():
        assert layer(x, cache=cache).dtype == cache.keys.dtype == torch.bfloat16


def with_8_bits(_: nn.Module, arguments: tuple[Tensor]) -> Tensor:
    """The input of a Linear as PyTorch's dynamic quantization rounds it."""
    return torch.quantize_per_tensor_dynamic(arguments[0], torch.quint8, reduce_range=True).dequantize()


@pytest.mark.filterwarnings("ignore")  # PyTorch's own quantization is deprecated in favour of torchao
@pytest.mark.parametrize("options", [{"kernel": None}, EVERYTHING], ids=["plain", "everything"])
def test_dynamic_quantization(options: dict[str, Any]) -> None:
    """int8 for four Linears, and for nothing else. What stands for them has no parameters."""
    layer, rounded = (made(options, dtype=torch.float32) for _ in range(2))
    quantized = torch.ao.quantization.quantize_dynamic(layer)
    for name in PROJECTIONS:
        assert not isinstance(quantized.get_submodule(name), nn.Linear)
        linear = rounded.get_submodule(name)
        linear.weight.data = quantized.get_submodule(name).weight().dequantize()
        linear.register_forward_pre_hook(with_8_bits)
    x, cache = tokens(2, 13, dtype=torch.float32), quantized.new_cache(2, 13)
    with torch.no_grad():
        judged = compare(quantized(x), rounded(x), layer.double()(x.double()))
        assert judged.ok, judged
        assert torch.equal(quantized(x, cache=cache), quantized(x))
