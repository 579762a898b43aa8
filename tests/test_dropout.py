"""Dropout: which probabilities are kept, and what the op makes of the others; on the CPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mtagen
from mtagen import InputError
from mtagen.check import failures
from mtagen.dropout import Dropout
from mtagen.measure.cases import Sizes
from mtagen.ops.attention import AttentionOp

PIPELINES: dict[str, dict[str, Any]] = {
    "everything": {"kernel": (3, 4), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2},
    "a window, masked by output": {"kernel": (3, 4), "post_kernel": (2, 3), "window": (9, 3), "mask": "output"},
}
BEFORE: dict[str, dict[str, Any]] = {
    "none": {"kernel": None},
    "convolution": {"kernel": (3, 4)},
    "mixing": {"kernel": None, "mixed_heads": 2},
    "both": {"kernel": (2, 5), "mixed_heads": 4},
}
AFTER: dict[str, dict[str, Any]] = {
    "none": {},
    "convolution": {"post_kernel": (2, 3)},
    "mixing": {"post_mixed_heads": 4},
    "both": {"post_kernel": (3, 2), "post_mixed_heads": 2},
}
EVERY_PIPELINE = {
    f"{before} before, {after} after": BEFORE[before] | AFTER[after]
    for before, after in itertools.product(BEFORE, AFTER)
}


def built(dropout: bool = True, **stages: Any) -> AttentionOp:
    return mtagen.build(head_dim=16, backend="torch", dropout=dropout, **stages)


def tensors(op: AttentionOp, nq: int = 21, nk: int = 23) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (2, 4, nq, 16), "k": (2, 2, nk, 16), "v": (2, 2, nk, 16), **op.plan.spec.weights(4)}
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def train(op: Any, **options: Any) -> list[Tensor]:
    """Out and all gradients."""
    leaves = tensors(op) if isinstance(op, AttentionOp) else options.pop("leaves")
    out = op(**leaves, **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves.values()])]


# Which are kept.


def test_words_are_those_of_philox() -> None:
    """Random123's known answer of philox4x32-7: a counter of zeros, a key of zeros."""
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    shared = [word >> 8 * byte + 7 & 1 for byte in (3, 2, 1, 0) for word in words[:2]]
    lower = int("".join(map(str, shared)), base=2)
    bytes_of_keys = [(j % 8 // 2, 2 * (j % 2) + j // 8) for j in range(16)]
    numbers = [(words[word] >> 8 * byte & 127) * 2**8 + lower for word, byte in bytes_of_keys]
    seed = torch.zeros(2, dtype=torch.int64)
    for limit in (limit for number in numbers for limit in (number, number + 1)):
        kept = Dropout(seed, limit / 2**15).keep(range(1), range(1), range(16))[0, 0]
        assert kept.tolist() == [number >= limit for number in numbers]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_mean_of_the_mask(p: float) -> None:
    torch.manual_seed(0)
    mask = mtagen.dropout_mask(mtagen.draw_seed("cpu"), p, 2, 3, 401, 403)
    sigma = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(mask.double().mean().item() - (1 - p)) < 4 * sigma


def test_parts_of_the_mask() -> None:
    """What is kept depends on the place of an entry alone."""
    seed = torch.tensor([2**63 - 7, -(2**62) + 5])
    mask = mtagen.dropout_mask(seed, 0.4, 3, 2, 40, 50).flatten(0, 1)
    for keys in (range(50), range(3, 19), range(16, 17), range(5, 5)):
        part = Dropout(seed, 0.4).keep(range(2, 5), range(7, 31), keys)
        assert torch.equal(part, mask[2:5, 7:31, keys.start : keys.stop])
    assert torch.equal(mtagen.dropout_mask(seed, 0.4, 2, 2, 9, 11).flatten(0, 1), mask[:4, :9, :11])


def test_seeds_differ_in_every_word() -> None:
    base = mtagen.dropout_mask(torch.zeros(2, dtype=torch.int64), 0.5, 1, 1, 64, 64)
    for seed in ((1, 0), (2**32, 0), (0, 1), (0, 2**32)):
        other = mtagen.dropout_mask(torch.tensor(seed), 0.5, 1, 1, 64, 64)
        assert 0.4 < (base == other).double().mean().item() < 0.6


def test_nothing_and_nearly_everything() -> None:
    seed = mtagen.draw_seed("cpu")
    assert mtagen.dropout_mask(seed, 0.0, 1, 2, 30, 30).all()
    assert mtagen.dropout_mask(seed, 1 - 2**-15, 1, 2, 30, 30).float().mean() < 0.01


# What the op makes of them.


@pytest.mark.parametrize("stages", EVERY_PIPELINE.values(), ids=EVERY_PIPELINE)
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_equals_reference(stages: dict[str, Any], packed: bool) -> None:
    op = mtagen.build(head_dim=16, backend="torch", dtype="fp32", dropout=True, packed=packed, **stages)
    spec = mtagen.Spec(**op.plan.spec.to_dict() | {"dropout": True, "packed": packed})
    assert not failures(op, spec, torch.device("cpu"), (Sizes(2, 4, 2, 67, 71), Sizes(2, 4, 4, 20, 5)))


def test_many_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtagen.cpu.pipeline.STRIP_SCORES", 800)
    op = built(**PIPELINES["a window, masked by output"], dtype="fp32")
    spec = mtagen.Spec(**op.plan.spec.to_dict() | {"dropout": True})
    assert not failures(op, spec, torch.device("cpu"), (Sizes(2, 4, 2, 67, 71),))


def test_seeds_are_torch_generators() -> None:
    op = built(kernel=(2, 3))
    torch.manual_seed(5)
    first, second = train(op, dropout_p=0.3), train(op, dropout_p=0.3)
    assert not torch.equal(first[0], second[0])
    torch.manual_seed(5)
    assert all(map(torch.equal, train(op, dropout_p=0.3), first))
    torch.manual_seed(5)
    seed = mtagen.draw_seed("cpu")
    assert all(map(torch.equal, train(op, dropout_p=0.3, dropout_seed=seed), first))


def test_without_dropout_nothing_is_drawn() -> None:
    op, plain = built(kernel=(2, 3)), built(dropout=False, kernel=(2, 3))
    state = torch.get_rng_state()
    assert all(map(torch.equal, train(op, dropout_p=0.0), train(plain)))
    assert torch.equal(state, torch.get_rng_state())


def test_checkpoint_drops_the_same() -> None:
    op = built(**PIPELINES["everything"])
    leaves = tensors(op)

    def recomputed(**leaves: Tensor) -> Tensor:
        result: Tensor = checkpoint(
            lambda *given: op(**dict(zip(leaves, given, strict=True)), dropout_p=0.4),
            *leaves.values(),
            use_reentrant=False,
        )
        return result

    torch.manual_seed(2)
    expected = train(op, dropout_p=0.4)
    torch.manual_seed(2)
    assert all(map(torch.equal, train(recomputed, leaves=leaves), expected))


def test_compile_draws_anew() -> None:
    op = built(kernel=(2, 3))
    leaves = tensors(op)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **x: op(**x, dropout_p=0.4), fullgraph=True, backend="aot_eager")
    torch.manual_seed(2)
    first = train(compiled, leaves=leaves)
    assert not torch.equal(train(compiled, leaves=leaves)[0], first[0])
    torch.manual_seed(2)
    for ours, expected in zip(first, train(op, dropout_p=0.4), strict=True):
        torch.testing.assert_close(ours, expected)


# Bad input.


def test_an_op_without_dropout_refuses_it() -> None:
    op = built(dropout=False, kernel=(2, 3))
    with pytest.raises(InputError, match=r"built without dropout.*dropout=True"):
        op(**tensors(op), dropout_p=0.1)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan, True, "0.1", None, 1 - 2**-20])
def test_probabilities_out_of_range(p: Any) -> None:
    op = built(kernel=(2, 3))
    with pytest.raises(InputError, match=r"dropout_p.*0 <= dropout_p < 1"):
        op(**tensors(op), dropout_p=p)
    with pytest.raises(InputError, match="dropout_p"):
        mtagen.dropout_mask(mtagen.draw_seed("cpu"), p, 1, 1, 1, 1)


@pytest.mark.parametrize(
    "seed", [3, torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64, device="meta")]
)
def test_seeds_of_wrong_kinds(seed: Any) -> None:
    op = built(kernel=(2, 3))
    with pytest.raises(InputError, match=r"dropout_seed.*draw_seed"):
        op(**tensors(op), dropout_p=0.1, dropout_seed=seed)
