"""The layer against one that follows the authors' code and shares no code with it, and what a module must survive."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import authors
import numpy as np
import pytest
import torch
from checkpoints import forward_calls, save_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import mtagen
from mtagen import InputError, SpecError
from mtagen.accuracy import compare
from mtagen.call import Call
from mtagen.nn import Cache, FrequencyScaling, MultiTokenAttention, rope
from mtagen.nn.parts import Gate, HeadNorm
from mtagen.ops import library

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, HEADS = 48, 4
# Machines with a GPU may have another version of PyTorch, which traces other code
TRACED_ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EVERYTHING: dict[str, Any] = {
    "kernel": (3, 5),
    "mixed_heads": HEADS,
    "post_kernel": (2, 3),
    "post_mixed_heads": HEADS,
    "group_norm": True,
    "gate": "scalar",
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"kernel": None},
    "convolution": {"kernel": (3, 5)},
    "left": {"kernel": (3, 4), "post_kernel": (2, 3), "key_padding": "left"},
    "right": {"kernel": (3, 4), "post_kernel": (2, 3), "key_padding": "right"},
    "mixing": {"kernel": None, "mixed_heads": HEADS},
    "pairs before": {"kernel": None, "mixed_heads": 2},
    "convolution after": {"kernel": None, "post_kernel": (2, 3)},
    "all mixed after": {"kernel": None, "post_mixed_heads": HEADS},
    "pairs after": {"kernel": (3, 5), "post_mixed_heads": 2},
    "norm": {"kernel": None, "group_norm": True},
    "norm, first layer": {"kernel": None, "group_norm": True, "depth_rescale": 0},
    "norm, fourth layer": {"kernel": None, "group_norm": True, "depth_rescale": 3},
    "scalar gate": {"kernel": None, "gate": "scalar"},
    "gate of channels": {"kernel": None, "gate": "channel"},
    "no positions": {"kernel": (3, 5), "rope_theta": None},
    "another theta": {"kernel": (3, 5), "rope_theta": 100.0},
    "lower frequencies": {"kernel": (3, 5), "rope_theta": 100.0, "frequency_scaling": FrequencyScaling(4.0)},
    "lower frequencies of slow pairs": {
        "kernel": (3, 5),
        "rope_theta": 100.0,
        "frequency_scaling": FrequencyScaling(4.0, 1.0, 2.0, original_max_position_embeddings=20),
    },
    "a window": {"kernel": (3, 5), "post_kernel": (2, 3), "window": (4, -1)},
    "not causal": {"kernel": (3, 5), "post_kernel": (2, 3), "causal": False},
    "causal by its window": {"kernel": (3, 5), "causal": False, "window": (4, 0)},
    "a window to both sides": {"kernel": (3, 5), "post_mixed_heads": 2, "causal": False, "window": (3, 2)},
    "everything": EVERYTHING | {"n_kv_heads": 2, "depth_rescale": 5},
    "everything else": EVERYTHING | {"n_kv_heads": 1, "gate": "channel", "post_mixed_heads": 2, "head_dim": 24},
}
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


def made(
    options: dict[str, Any], heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = torch.float64, **more: Any
) -> MultiTokenAttention:
    """The layer with the authors' parameters."""
    layer = MultiTokenAttention(dim, heads, **{"head_dim": 16} | options | more, dtype=dtype)
    layer.load_state_dict(authors.random_state(options, heads, dim), strict=True)
    return layer


def tokens(batch: int, n: int, dim: int = DIM, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, n, dim, generator=generator, dtype=torch.float64).to(dtype)


def train(layer: MultiTokenAttention, x: Tensor, function: Any = None, **arguments: Any) -> dict[str, Tensor]:
    """Out and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = (layer if function is None else function)(x, **arguments)
    out.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad} | grads


@every_layer
def test_is_the_authors_layer(options: dict[str, Any]) -> None:
    state, x = authors.random_state(options, HEADS, DIM), tokens(2, 13)
    torch.testing.assert_close(train(made(options), x), authors.train(state, x, options), check_stride=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["everything", "everything else"])
def test_accurate(name: str, dtype: torch.dtype) -> None:
    options = LAYERS[name]
    state = {name: y.to(dtype) for name, y in authors.random_state(options, HEADS, DIM).items()}
    x = tokens(2, 40, dtype=dtype)
    layer = MultiTokenAttention(DIM, HEADS, **{"head_dim": 16} | options, dtype=dtype)
    layer.load_state_dict(state)
    eager = authors.train(state, x, options)
    exact = authors.train({name: y.double() for name, y in state.items()}, x.double(), options)
    assert not authors.failures(train(layer, x), eager, exact)


def test_norm_rounds_as_the_authors() -> None:
    """In 16 bits what is normed is rounded before it is scaled."""
    norm = HeadNorm(16, depth=None, dtype=torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = tokens(4, 50, 16, torch.bfloat16)
    wide = x.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16() * norm.weight
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)], ids=str)
def test_no_tokens(shape: tuple[int, ...]) -> None:
    """Nothing to attend to is no error: of a batch that is divided, one part may be empty."""
    x, packed = torch.zeros(*shape, DIM, dtype=torch.float64), len(shape) == 1
    given = {"cu_seqlens": torch.zeros(3, dtype=torch.int32)} if packed else {}
    found = train(made(LAYERS["everything"]), x, **given)
    assert found["out"].shape == found["x"].shape == x.shape
    assert all((grad == 0).all() for grad in found.values())


# State dicts.


@every_layer
def test_names_and_shapes_of_parameters(options: dict[str, Any]) -> None:
    layer = MultiTokenAttention(DIM, HEADS, **{"head_dim": 16} | options)
    shapes = {name: x.shape for name, x in authors.random_state(options, HEADS, DIM).items()}
    assert {name: x.shape for name, x in layer.state_dict().items()} == shapes
    assert not [*layer.buffers()]


@pytest.mark.parametrize("assign", [False, True])
def test_head_kernel_of_all_heads(assign: bool) -> None:
    """The transpose of the linear layer, below whatever prefix, by a copy whose original is gone."""
    options = LAYERS["all mixed after"]
    state = authors.random_state(options, HEADS, DIM)
    other = dict(state)
    other["head_kernel"] = other.pop("wposm.weight").T[None]
    model = torch.nn.ModuleDict({"attention": MultiTokenAttention(DIM, HEADS, **options, head_dim=16).double()})
    model = copy.deepcopy(model)
    gc.collect()
    theirs = {f"attention.{name}": x for name, x in other.items()}
    model.load_state_dict(theirs, assign=assign)
    assert "attention.head_kernel" in theirs
    assert all(torch.equal(x, state[name]) for name, x in model["attention"].state_dict().items())


@pytest.mark.parametrize(
    ("mixed", "other"),
    [(None, "head_kernel"), (None, "wposm.weight"), (2, "wposm.weight"), (HEADS, "head_kernel")],
)
def test_state_of_another_layer_is_refused(mixed: int | None, other: str) -> None:
    """Groups of another size are not what the layer mixes."""
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, kernel=None, post_mixed_heads=mixed)
    mixing = {"head_kernel": torch.ones(2, 2, 2), "wposm.weight": torch.eye(HEADS)}
    state = authors.random_state({"kernel": None}, HEADS, DIM) | {other: mixing[other]}
    with pytest.raises(RuntimeError, match=f'Unexpected key.*"{other}"'):
        layer.load_state_dict(state)


# Initial values.


@pytest.mark.parametrize("key_padding", ["both", "left", "right"])
@pytest.mark.parametrize("group", [2, HEADS])
@pytest.mark.parametrize("ck", [4, 5])
def test_stages_pass_on_initially(key_padding: str, group: int, ck: int) -> None:
    stages = {"kernel": (3, ck), "mixed_heads": group, "post_kernel": (2, ck), "post_mixed_heads": group}
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, **stages, key_padding=key_padding, dtype=torch.float64)
    plain = MultiTokenAttention(DIM, HEADS, head_dim=16, kernel=None, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = tokens(2, 11)
    torch.testing.assert_close(layer(x), plain(x))


def test_initial_values_are_the_authors() -> None:
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, **EVERYTHING | {"kernel": (6, 11)})
    expected = torch.zeros(HEADS, 1, 6, 11)
    expected[:, :, -1, 5] = 1
    assert torch.equal(layer.mta_kernel, expected)
    assert torch.equal(layer.wpsm.weight, torch.eye(HEADS))
    assert torch.equal(layer.wposm.weight, torch.eye(HEADS))
    assert layer.subln.weight.eq(1).all()
    assert not layer.gate.bias.any()


def test_meta_device() -> None:
    options = EVERYTHING | {"head_dim": 16}
    layer = MultiTokenAttention(DIM, HEADS, **options, device="meta")
    assert layer(torch.empty(2, 7, DIM, device="meta")).shape == (2, 7, DIM)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(0)
    layer.reset_parameters()
    stages = MultiTokenAttention(DIM, HEADS, **options).state_dict()
    drawn = {f"{name}.weight" for name in ("wq", "wk", "wv", "wo", "gate")}
    for name, x in layer.state_dict().items():
        assert x.isfinite().all()
        assert name in drawn or torch.equal(x, stages[name])


# Calls.


@pytest.mark.parametrize("shape", [(13,), (1, 13), (2, 13)])
def test_positions(shape: tuple[int, ...]) -> None:
    options = LAYERS["everything"]
    x, positions = tokens(2, 13), torch.randint(0, 2000, shape, generator=torch.Generator().manual_seed(2))
    expected = authors.train(authors.random_state(options, HEADS, DIM), x, options, positions=positions)
    torch.testing.assert_close(train(made(options), x, positions=positions), expected, check_stride=False)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_rows_behind_the_last_document(name: str) -> None:
    """They change neither outputs nor gradients of documents."""
    cu_seqlens = torch.tensor([0, 7, 20], dtype=torch.int32)
    layer, x = made(LAYERS[name]), tokens(1, 20)[0]
    padded = torch.cat([x, tokens(1, 9)[0]])
    results = []
    for one in (x, padded):
        layer.zero_grad()
        leaf = one.detach().requires_grad_()
        out = layer(leaf, cu_seqlens=cu_seqlens, max_seqlen=13)[:20]
        out.square().sum().backward()
        results.append([out.detach(), leaf.grad[:20], *(p.grad for p in layer.parameters())])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("given", [False, True], ids=["their own positions", "given positions"])
@pytest.mark.parametrize("shape", [(-1, DIM), (1, -1, DIM)], ids=["(total, dim)", "(1, total, dim)"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_documents(name: str, shape: tuple[int, ...], given: bool) -> None:
    """Each is a sequence of its own."""
    options, lengths = LAYERS[name], [7, 0, 13, 1]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x, state = tokens(1, sum(lengths)), authors.random_state(options, HEADS, DIM)
    positions = torch.arange(sum(lengths)) * 3 if given else None
    at = None if positions is None else positions.view(shape[:-1])
    ours = train(made(options), x.view(shape), cu_seqlens=cu_seqlens, max_seqlen=13, positions=at)
    assert ours["out"].shape == ours["x"].shape == x.view(shape).shape
    places = [None] * len(lengths) if positions is None else positions.split(lengths)
    each = [
        authors.train(state, document, options, positions=place)
        for document, place in zip(x.split(lengths, 1), places, strict=True)
        if document.numel()
    ]
    expected = {name: sum(one[name] for one in each) for name in state}
    expected |= {name: torch.cat([one[name] for one in each], 1).view(shape) for name in ("out", "x")}
    torch.testing.assert_close(ours, expected, check_stride=False)


@pytest.mark.parametrize(("given", "expected"), [({}, 20), ({"max_seqlen": 13}, 13)], ids=str)
def test_longest_document(given: dict[str, int], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels are told: by default none is longer than all tokens."""
    calls = forward_calls(monkeypatch)
    made(LAYERS["plain"])(tokens(1, 20), cu_seqlens=torch.tensor([0, 7, 20], dtype=torch.int32), **given)
    assert [(x.max_q, x.max_k) for call in calls for x in call if isinstance(x, Call)] == [(expected, expected)]


def test_dropout() -> None:
    """In training mode what ``mtagen.dropout_mask`` names is dropped, of documents as well; else nothing."""
    options = LAYERS["everything"] | {"dropout": 0.25}
    state, x, layer = authors.random_state(options, HEADS, DIM), tokens(2, 13), made(options)
    torch.manual_seed(5)
    kept = mtagen.dropout_mask(mtagen.draw_seed("cpu"), 0.25, 2, HEADS, 13, 13)
    torch.manual_seed(5)
    torch.testing.assert_close(train(layer, x), authors.train(state, x, options, kept=kept), check_stride=False)
    torch.manual_seed(5)
    packed = layer(x.reshape(-1, DIM), cu_seqlens=torch.tensor([0, 13, 26], dtype=torch.int32), max_seqlen=13)
    torch.testing.assert_close(packed.view(x.shape), authors.layer(state, x, options, kept=kept))
    torch.testing.assert_close(layer.eval()(x), authors.layer(state, x, options))


# Generation.

PUBLISHED: dict[str, tuple[int, int]] = {"300M": (16, 16), "550M": (10, 16), "830M": (16, 24), "1B": (16, 32)}  # H, D
MIXED: dict[str, Any] = {"kernel": None, "group_norm": True, "gate": "scalar"}  # all heads, before and after
CONVOLVED: dict[str, Any] = MIXED | {"kernel": (6, 11), "post_kernel": (6, 11)}
SCHEDULES = {
    "at once": [40],
    "a prompt, then token by token": [23, *[1] * 17],
    "token by token": [1] * 40,
    "several at once": [8, 3, 2, 8, 7, 4, 8],
    "a prompt in parts": [3, 17, 9, 10, 1],
}


def generate(layer: MultiTokenAttention, x: Tensor, schedule: list[int], cache: Cache | None = None) -> Tensor:
    """The outputs of so many tokens at a time."""
    cache = layer.new_cache(len(x), sum(schedule) + 3) if cache is None else cache
    with torch.no_grad():
        return torch.cat([layer(part, cache=cache) for part in x.split(schedule, 1)], 1)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("layer", ["without convolutions", "with convolutions"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_generation_of_published_configurations(name: str, layer: str, schedule: list[int]) -> None:
    """However tokens are divided into calls, outputs keep the accuracy rule that those of one call keep."""
    heads, d = PUBLISHED[name]
    options = (CONVOLVED if layer == "with convolutions" else MIXED) | {
        "mixed_heads": heads,
        "post_mixed_heads": heads,
        "head_dim": d,
    }
    state = {name: y.float() for name, y in authors.random_state(options, heads, DIM).items()}
    x = tokens(2, 40, dtype=torch.float32)
    eager = authors.layer(state, x, options)
    exact = authors.layer({name: y.double() for name, y in state.items()}, x.double(), options)
    module = made(options, heads, dtype=torch.float32)
    for ours in (module(x), generate(module, x, schedule)):
        judged = compare(ours, eager, exact)
        assert judged.ok, judged


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "pairs after",
        "no positions",
        "a window",
        "causal by its window",
        "right",
        "everything else",
    ],
)
def test_generation(name: str, schedule: list[int]) -> None:
    layer, x = made(LAYERS[name]), tokens(2, 40)
    torch.testing.assert_close(generate(layer, x, schedule), layer(x))


def test_generation_at_given_positions() -> None:
    layer, x = made(LAYERS["everything"]), tokens(2, 20)
    positions = torch.stack([torch.arange(20) + 7, 2 * torch.arange(20)])
    cache = layer.new_cache(2, 20)
    with torch.no_grad():
        parts = [layer(x[:, part], positions=positions[:, part], cache=cache) for part in (slice(0, 15), slice(15, 20))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, positions=positions))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("mask", ["source", "output"])
def test_generation_reads_nothing_but_what_was_written(mask: str, schedule: list[int]) -> None:
    layer, x = made(LAYERS["everything"], mask=mask), tokens(2, 40)
    cache = layer.new_cache(2, 50)
    for buffer in (cache.keys, cache.values, cache.queries):
        buffer.fill_(torch.nan)
    torch.testing.assert_close(generate(layer, x, schedule, cache), layer(x))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_entries_of_different_lengths(name: str) -> None:
    """Prompts are taken one by one and continued together; entries may leave, and come twice."""
    layer, x = made(LAYERS[name]), tokens(3, 40)
    lengths = (17, 2, 9)
    caches = [layer.new_cache(1, 40) for _ in lengths]
    for entry, (n, cache) in enumerate(zip(lengths, caches, strict=True)):
        generate(layer, x[entry : entry + 1, :n], [n], cache)
    cache = Cache.cat(caches)
    assert (cache.ragged, cache.longest, cache.lengths.tolist()) == (True, 17, [17, 2, 9])
    expected = layer(x).detach()

    def continued(cache: Cache, entries: list[int], done: int, schedule: list[int]) -> None:
        """The next tokens of these entries, after so many that followed their prompts."""
        new = [slice(lengths[b] + done, lengths[b] + done + sum(schedule)) for b in entries]
        given, outputs = (
            torch.stack([y[b, part] for b, part in zip(entries, new, strict=True)]) for y in (x, expected)
        )
        torch.testing.assert_close(generate(layer, given, schedule, cache), outputs)

    continued(cache, [0, 1, 2], 0, [1, 3, 11])  # eleven are decoded in two steps
    assert cache.longest == 32
    chosen = cache.select(torch.tensor([2, 1, 2]))
    assert chosen.read_longest() == 24
    continued(chosen, [2, 1, 2], 15, [1, 10])  # they still differ in length
    continued(cache, [0, 1, 2], 15, [2])  # not changed


def test_caches_of_equal_lengths_stay_so() -> None:
    layer = made(LAYERS["plain"])
    one = layer.new_cache(1, 8)
    generate(layer, tokens(1, 3), [3], one)
    both = Cache.cat([one, one])
    assert (both.ragged, both.longest, both.max_len) == (False, 3, 8)
    assert both.select(torch.tensor([1])).longest == 3
    generate(layer, tokens(1, 2), [2], one)
    different = Cache.cat([both, one])
    assert different.ragged
    assert not different.select(torch.tensor([2])).ragged  # there is no other length
    with pytest.raises(InputError, match=r"caches: .*max_len"):
        Cache.cat([one, layer.new_cache(1, 9)])
    with pytest.raises(InputError, match="must be those of one layer, in one dtype"):
        Cache.cat([one, layer.new_cache(1, 8, dtype=torch.bfloat16)])
    with pytest.raises(InputError, match="must be several caches"):
        Cache.cat(one)  # type: ignore[arg-type]
    assert torch.equal(both.select([1, 0]).keys, both.select(torch.tensor([1, 0])).keys)
    for entries, rule in (
        (torch.tensor(1), "must be numbers of entries"),
        (torch.tensor([2]), "the cache has 2 entries"),
    ):
        with pytest.raises(InputError, match=rule):
            both.select(entries)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 11), st.integers(0, 4)), min_size=1, max_size=6), st.integers(0, 2**16))
def test_tokens_taken_back(steps: list[tuple[int, int]], seed: int) -> None:
    """After each call some of the last tokens are taken back: outputs are those of the tokens that stayed."""
    layer, spare = made(LAYERS["everything"]), 4
    cache = layer.new_cache(2, 80, spare=spare)
    for buffer in (cache.keys, cache.values, cache.queries):
        buffer.fill_(torch.nan)
    torch.manual_seed(seed)
    kept = tokens(2, 0)
    for count, removed in steps:
        kept = torch.cat([kept, torch.randn(2, count, kept.shape[-1], dtype=kept.dtype)], 1)
        out = generate(layer, kept[:, -count:], [count], cache)
        torch.testing.assert_close(out, layer(kept)[:, -count:])
        removed = min(removed, cache.removable, kept.shape[1] - 1)
        cache.remove(removed)
        kept = kept[:, : kept.shape[1] - removed]
        assert cache.longest == kept.shape[1] == cache.lengths[0]


def test_tokens_that_cannot_be_taken_back() -> None:
    layer = made(LAYERS["everything"])
    cache = layer.new_cache(1, 20, spare=3)
    with pytest.raises(InputError, match=r"count: got 1; the cache holds queries for taking back at most 0 tokens"):
        cache.remove(1)
    generate(layer, tokens(1, 9), [9], cache)
    for wrong in (4, -1, True, 1.0):
        with pytest.raises(InputError, match=r"count: got .* at most 3 tokens; legal: 0\.\.3"):
            cache.remove(wrong)
    cache.remove(2)
    with pytest.raises(InputError, match=r"at most 1 token"):
        cache.remove(2)
    with pytest.raises(InputError, match=r"spare: got -1"):
        layer.new_cache(1, 20, spare=-1)
    with pytest.raises(InputError, match=r"caches: .*spare"):
        Cache.cat([cache, layer.new_cache(1, 20)])


def test_tokens_of_compiled_steps_are_taken_back() -> None:
    """Steps that only the GPU counts: what is held is known all the same."""
    torch._dynamo.reset()
    layer, x = made(LAYERS["everything"]), tokens(2, 30)
    step = torch.compile(lambda x, cache: layer(x, cache=cache), fullgraph=True, backend="eager")
    cache = layer.new_cache(2, 40, spare=3)
    with torch.no_grad():
        step(x[:, :1], cache)
        assert (cache.longest, cache.removable) == (None, 1)
        for n in range(1, 9):
            step(x[:, n : n + 1], cache)
        cache.remove(3)
        assert cache.removable == 0
        step(x[:, 6:7], cache)
        with pytest.raises(InputError, match="at most 1 token"):
            cache.remove(2)
        torch.testing.assert_close(layer(x[:, 7:20], cache=cache), layer(x[:, :20])[:, 7:])


def test_spare_queries_of_joined_and_chosen_entries() -> None:
    layer, x = made(LAYERS["everything"]), tokens(2, 30)
    caches = [layer.new_cache(1, 40, spare=4) for _ in range(2)]
    for entry, (n, cache) in enumerate(zip((9, 2), caches, strict=True)):
        generate(layer, x[entry : entry + 1, :n], [n], cache)
    both = Cache.cat(caches)
    assert (both.spare, both.removable) == (4, 2)
    both.remove(1)
    chosen = both.select(torch.tensor([1, 0]))
    assert (chosen.removable, both.with_spare(6).spare, both.with_spare(2).removable) == (1, 6, 1)
    new = torch.stack([x[1, 1:4], x[0, 8:11]])
    expected = layer(x).detach()
    out = generate(layer, new, [3], chosen.with_spare(5))
    torch.testing.assert_close(out, torch.stack([expected[1, 1:4], expected[0, 8:11]]))


def test_cache_takes_the_dtype_of_autocast() -> None:
    layer = made(LAYERS["everything"], dtype=torch.float32)
    assert layer.new_cache(2, 5).keys.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        cache = layer.new_cache(2, 5)
        assert {x.dtype for x in (cache.keys, cache.values, cache.queries)} == {torch.bfloat16}
        assert generate(layer, tokens(2, 5, dtype=torch.float32), [4, 1], cache).dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"cache\.keys\.dtype: got torch\.bfloat16; .*dtype=torch\.float32"):
        generate(layer, tokens(2, 1, dtype=torch.float32), [1], layer.new_cache(2, 5, dtype=torch.bfloat16))


# What a module must survive.


@pytest.fixture
def layer() -> MultiTokenAttention:
    return made(LAYERS["everything"] | {"dropout": 0.1}, dtype=torch.float32)


@pytest.fixture
def x() -> Tensor:
    return tokens(2, 13, dtype=torch.float32)


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def seeded(layer: MultiTokenAttention, x: Tensor, function: Any = None, **arguments: Any) -> dict[str, Tensor]:
    """As :func:`train`; every call drops the same."""
    torch.manual_seed(0)
    return train(layer, x, function, **arguments)


def test_compile(layer: MultiTokenAttention) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (13, 21, 30):  # the second length makes it dynamic
        x = tokens(2, n, dtype=torch.float32)
        torch.testing.assert_close(seeded(layer, x, compiled), seeded(layer, x))
    assert counter.frame_count == 2


def test_compile_with_documents(layer: MultiTokenAttention) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 4], [3, 9, 1]):
        x = tokens(1, sum(lengths), dtype=torch.float32)[0]
        documents = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), "max_seqlen": max(lengths)}
        torch.testing.assert_close(seeded(layer, x, compiled, **documents), seeded(layer, x, **documents))


def test_compile_of_generation(layer: MultiTokenAttention) -> None:
    """Steps take no length from the CPU: they are compiled once after an eager call, and once for all others."""
    torch._dynamo.reset()
    layer.eval()
    counter = EagerAndRecordGraphs()
    step = torch.compile(lambda x, cache: layer(x, cache=cache), fullgraph=True, backend=counter)
    x, cache = tokens(2, 30, dtype=torch.float32), layer.new_cache(2, 32)
    with torch.no_grad():
        outs = [layer(x[:, :20], cache=cache), *(step(x[:, n : n + 1], cache) for n in range(20, 30))]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x))
    assert len(counter.graphs) == 2
    placeholders = [node for graph in counter.graphs for node in graph.graph.nodes if node.op == "placeholder"]
    assert all(isinstance(node.meta["example_value"], Tensor) for node in placeholders)
    assert cache.longest is None
    with torch.no_grad(), pytest.raises(InputError, match="the cache holds 30 of 32"):
        layer(x[:, :9], cache=cache)
    assert cache.read_longest() == 30


def test_rotation_of_compiled_calls() -> None:
    """Eager calls rotate by complex products, and in the same direction."""
    torch._dynamo.reset()
    angles = rope.rotation(torch.arange(9)[None], 16, 100.0, None, torch.float64)
    vectors = tokens(2, 9, 4 * 16).unflatten(-1, (4, 16)), tokens(2, 9, 16).unsqueeze(2)
    torch.testing.assert_close(
        torch.compile(rope.rotate, backend="eager")(angles, *vectors), rope.rotate(angles, *vectors)
    )


@pytest.mark.parametrize("device", TRACED_ON)
def test_compiled_gate(device: str) -> None:
    """Logits of one gate are sums in fp32, which a compiler fuses with the rest, instead of a product in bf16."""
    torch._dynamo.reset()
    gate = Gate(16, 1, device=device).requires_grad_(False)
    x = tokens(2, 9, 4 * 16).unflatten(-1, (4, 16)).to(device, torch.bfloat16)
    graphs = EagerAndRecordGraphs()
    with torch.autocast(device, torch.bfloat16):
        made = torch.compile(gate, fullgraph=True, backend=graphs)(x)
    exact = x.double() * torch.sigmoid(x.double() @ gate.weight.double().T + gate.bias.double())
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, exact.to(torch.bfloat16))
    (graph,) = graphs.graphs
    assert not any("linear" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("device", TRACED_ON)
def test_compiled_layers_write_queries_and_keys_by_heads(device: str) -> None:
    """Kernels and products then read rows of a head side by side."""
    torch._dynamo.reset()
    layer, graphs = made(LAYERS["everything"], dtype=torch.bfloat16, device=device), EagerAndRecordGraphs()
    torch.compile(layer, fullgraph=True, backend=graphs)(tokens(2, 9, dtype=torch.bfloat16).to(device))
    (graph,) = graphs.graphs
    (call,) = [node for node in graph.graph.nodes if "mtagen.forward" in str(node.target)]
    assert [x.meta["example_value"].is_contiguous() for x in call.args[:3]] == [True, True, False]


def test_calls_between_compiled_steps() -> None:
    """Buffers keep their addresses, and only the device counts tokens."""
    torch._dynamo.reset()
    layer, x = made(LAYERS["everything"]), tokens(2, 20)
    step = torch.compile(lambda x, cache: layer(x, cache=cache), fullgraph=True, backend="eager")
    cache = layer.new_cache(2, 24)
    with torch.no_grad():
        parts = [layer(x[:, :2], cache=cache), step(x[:, 2:3], cache)]
        addresses = [y.data_ptr() for y in (cache.keys, cache.values, cache.queries, cache.lengths)]
        for call, part in ((layer, x[:, 3:6]), (layer, x[:, 6:16]), (step, x[:, 16:17]), (layer, x[:, 17:])):
            parts.append(call(part, cache=cache))
            assert (cache.captured, cache.longest) == (True, None)
        torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    assert addresses == [y.data_ptr() for y in (cache.keys, cache.values, cache.queries, cache.lengths)]
    joined = Cache.cat([cache.select(torch.tensor([1])), cache.select(torch.tensor([0]))])
    assert (joined.ragged, joined.longest, joined.captured) == (False, 20, False)


def test_modes_of_autograd_may_change_between_steps() -> None:
    layer, x = made(LAYERS["everything"]), tokens(2, 9)
    cache = layer.new_cache(2, 12, spare=3)
    with torch.inference_mode():
        layer(x[:, :6], cache=cache)
        layer(x[:, 6:8], cache=cache)
    cache.remove(2)
    with torch.no_grad():
        torch.testing.assert_close(layer(x[:, 6:], cache=cache), layer(x)[:, 6:])


def test_compiled_prompt(layer: MultiTokenAttention) -> None:
    torch._dynamo.reset()
    layer.eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, cache = tokens(2, 30, dtype=torch.float32), layer.new_cache(2, 32)
    with torch.no_grad():
        outs = [compiled(x[:, :20], cache=cache), layer(x[:, 20:], cache=cache)]
        torch.testing.assert_close(torch.cat(outs, 1), layer(x))


def test_autocast(layer: MultiTokenAttention, x: Tensor) -> None:
    """The parameters stay in fp32, and so do their gradients."""
    layer.eval()
    options = LAYERS["everything"]
    state = authors.random_state(options, HEADS, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        ours = train(layer, x)
        eager = authors.train({name: y.float() for name, y in state.items()}, x, options)
    exact = authors.train({name: y.float().double() for name, y in state.items()}, x.double(), options)
    assert {name for name, result in ours.items() if result.dtype != torch.float32} == {"out"}
    assert ours["out"].dtype == torch.bfloat16
    assert not authors.failures(ours, eager, exact)


def test_selective_checkpoint_saves_attention(
    layer: MultiTokenAttention, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Projections are computed again, attention is not, and what is dropped is the same."""
    expected = seeded(layer, x)
    calls = forward_calls(monkeypatch)
    recomputed = partial(checkpoint, layer, use_reentrant=False, context_fn=save_forward)
    torch.testing.assert_close(seeded(layer, x, recomputed), expected, rtol=0, atol=0)
    assert len(calls) == 1


def test_copies_share_nothing_but_values(layer: MultiTokenAttention, x: Tensor) -> None:
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(seeded(copied, x), seeded(layer, x), rtol=0, atol=0)
    with torch.no_grad():
        copied.mta_kernel.zero_()
    assert layer.mta_kernel.any()


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickled_to_another_process(
    layer: MultiTokenAttention, x: Tensor, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no op has been built yet; plans, which another version may make differently, stay here."""
    expected = seeded(layer, x)
    file = io.BytesIO()
    (pickle.dump if how == "pickle" else torch.save)(layer, file)
    assert b"mtagen.planner" not in file.getvalue()
    monkeypatch.setattr(library, "_executors", {})
    file.seek(0)
    loaded = pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    torch.testing.assert_close(seeded(loaded, x), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("one_process")
def test_ddp(layer: MultiTokenAttention, x: Tensor) -> None:
    expected = seeded(layer, x)
    torch.testing.assert_close(seeded(layer, x, DistributedDataParallel(layer)), expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("group", [2, HEADS])
def test_fsdp(group: int) -> None:
    """Sharded on the meta device, made, initialised, loaded, trained in mixed precision, and saved."""
    options = LAYERS["everything"] | {"post_mixed_heads": group}
    state = {name: y.float() for name, y in authors.random_state(options, HEADS, DIM).items()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, **options, device="meta")
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    full = StateDictOptions(full_state_dict=True)
    initial = get_model_state_dict(layer, options=full)
    assert torch.equal(initial["wpsm.weight"], torch.eye(HEADS))
    assert torch.equal(initial["mta_kernel"].flatten(1).sum(1), torch.ones(HEADS))
    set_model_state_dict(layer, dict(state), options=full)
    results = train(layer, tokens(2, 13, dtype=torch.float32))
    half = {name: y.bfloat16() for name, y in state.items()}
    x = tokens(2, 13, dtype=torch.bfloat16)
    eager = authors.train(half, x, options)
    exact = authors.train({name: y.double() for name, y in half.items()}, x.double(), options)
    assert results["out"].dtype == torch.bfloat16
    gradients = {name: results[name].full_tensor() for name in state}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert not authors.failures(gradients, eager, exact)
    assert all(torch.equal(y, state[name]) for name, y in get_model_state_dict(layer, options=full).items())


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_initial_values_of_a_shard() -> None:
    """Of the second of two ranks, without a word from the first."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        layer = MultiTokenAttention(DIM, HEADS, **EVERYTHING | {"post_mixed_heads": 2}, head_dim=16, device="meta")
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        layer.to_empty(device="cpu")
        for part in (layer, layer.wpsm, layer.subln):
            part.reset_parameters()
        whole = MultiTokenAttention(DIM, HEADS, **EVERYTHING | {"post_mixed_heads": 2}, head_dim=16)
        for name in ("mta_kernel", "mta_kernel_after_sm", "head_kernel", "wpsm.weight", "subln.weight"):
            sharded, expected = layer.get_parameter(name), whole.get_parameter(name)
            assert torch.equal(sharded.to_local(), expected.chunk(2)[1]), name
    finally:
        torch.distributed.destroy_process_group()


def test_repr(layer: MultiTokenAttention) -> None:
    text = repr(layer)
    assert "48, 4, n_kv_heads=2, head_dim=16" in text
    assert "weight=(4, 3, 5)" in text


def test_names_on_the_package() -> None:
    assert mtagen.nn.MultiTokenAttention is MultiTokenAttention
    assert mtagen.nn.Cache is Cache
    assert {*mtagen.__all__} <= {*dir(mtagen)}


# Bad input.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dim": 0}, "dim: got 0; must be a positive int"),
        ({"n_heads": 2.0}, r"n_heads: got 2\.0; must be a positive int"),
        ({"dim": 50}, r"dim: got 50; is no multiple of n_heads = 4; legal: a multiple, or head_dim="),
        ({"n_kv_heads": 3}, r"n_kv_heads: got 3; must divide n_heads = 4; legal: \[1, 2, 4\]"),
        ({"mixed_heads": 3}, "mixed_heads: got 3; must divide n_heads"),
        ({"post_mixed_heads": 8}, "post_mixed_heads: got 8; must divide n_heads"),
        ({"head_dim": 12}, "head_dim: got 12"),
        ({"kernel": (6,)}, "kernel: got"),
        ({"kernel": (0, 3)}, "kernel: got"),
        ({"key_padding": "middle"}, "key_padding: got 'middle'"),
        ({"group_norm": 1}, "group_norm: got 1; must be a bool"),
        (
            {"depth_rescale": 3},
            "depth_rescale: got 3; only the group norm rescales; legal: None, or together with group",
        ),
        ({"depth_rescale": True, "group_norm": True}, "depth_rescale: got True"),
        ({"depth_rescale": -1, "group_norm": True}, "depth_rescale: got -1"),
        ({"gate": "both"}, r"gate: got 'both'; .*\('scalar', 'channel'\)"),
        ({"rope_theta": 0}, "rope_theta: got 0"),
        ({"rope_theta": "10"}, "rope_theta: got '10'"),
        ({"frequency_scaling": {"factor": 2.0}}, "frequency_scaling: got {'factor': 2.0}; must be a FrequencyScaling"),
        ({"frequency_scaling": FrequencyScaling(2.0), "rope_theta": None}, "and the layer has none"),
        ({"dropout": 1.0}, r"dropout: got 1\.0"),
        ({"window": (3,)}, "window: got"),
    ],
)
def test_illegal_options(options: dict[str, Any], match: str) -> None:
    given = {"dim": 64, "n_heads": HEADS} | options
    with pytest.raises(SpecError, match=match):
        MultiTokenAttention(given.pop("dim"), given.pop("n_heads"), **given)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ((0,), "factor: got 0; must be a positive number"),
        ((torch.inf,), "factor: got inf"),
        ((None,), "factor: got None"),
        ((True,), "factor: got True"),
        ((8.0, -1.0, 4.0, 8192), r"low_freq_factor: got -1\.0; must be a positive number"),
        ((8.0, 1.0, 4.0), r"frequency_scaling: got \(1\.0, 4\.0, None\); .* go together"),
        ((8.0, 4.0, 4.0, 8192), r"frequency_scaling: got \(4\.0, 4\.0, 8192\); .* the first below the second"),
    ],
)
def test_illegal_scaling(fields: tuple[Any, ...], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        FrequencyScaling(*fields)


def test_integers_of_any_type() -> None:
    eight, two = np.int64(8), np.int32(2)
    layer = MultiTokenAttention(eight * 16, eight, n_kv_heads=two, head_dim=eight * 2, post_mixed_heads=two)
    assert {type(x) for x in (layer.dim, layer.n_heads, layer.n_kv_heads)} == {int}
    assert layer.new_cache(two, eight).keys.shape == (2, 2, 8, 16)


CU_SEQLENS = torch.tensor([0, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"x": [1.0]}, "x: got 'list'; must be a tensor"),
        ({"x": torch.zeros(1, 5, DIM, dtype=torch.int64)}, r"x\.dtype: got torch\.int64"),
        ({"x": torch.zeros(5, DIM)}, r"x\.shape: got \(5, 48\); .*\(B, N, 48\)"),
        ({"x": torch.zeros(1, 5, 47)}, r"x\.shape: got \(1, 5, 47\)"),
        ({"x": torch.zeros(())}, r"x\.shape: got \(\)"),
        ({"x": torch.zeros(2, 5, DIM), "cu_seqlens": CU_SEQLENS}, r"x\.shape: got \(2, 5, 48\); .*\(1, total, 48\)"),
        ({"positions": torch.zeros(5)}, "positions: got .*float32.*; must be one for each token"),
        ({"positions": torch.zeros(6, dtype=torch.int64)}, r"positions: got \(\(6,\)"),
        ({"positions": 3}, "positions: got 'int'"),
        ({"cu_seqlens": CU_SEQLENS.long()}, "cu_seqlens: got .*int64.*; must hold where each document begins"),
        ({"cu_seqlens": CU_SEQLENS[None]}, "cu_seqlens: got"),
        ({"cu_seqlens": [0, 5]}, "cu_seqlens: got 'list'"),
        ({"cu_seqlens": torch.tensor([0, 6], dtype=torch.int32)}, "cu_seqlens: got .* rows, 5; legal: 5 or less"),
        ({"cu_seqlens": torch.tensor([0, 4, 3], dtype=torch.int32)}, "cu_seqlens: got .*; must not decrease"),
        ({"cu_seqlens": CU_SEQLENS, "max_seqlen": 4}, "max_seqlen: got 4; .*; legal: 5 or more"),
        ({"cu_seqlens": CU_SEQLENS, "max_seqlen": 2.0}, "max_seqlen: got 2.0; must be the length"),
        ({"max_seqlen": 5}, "max_seqlen: got 5; is for packed documents; legal: None, or together with cu_seqlens"),
        ({"cache": 3}, "cache: got 'int'; must be a cache"),
    ],
)
def test_illegal_calls(given: dict[str, Any], match: str) -> None:
    layer = made(LAYERS["convolution"], dtype=torch.float32)
    arguments = {"x": torch.zeros(1, 5, DIM)} | given
    with pytest.raises(InputError, match=match), torch.no_grad():
        layer(arguments.pop("x"), **arguments)


CASTS: dict[str, Any] = {
    "float": torch.nn.Module.float,
    "double": torch.nn.Module.double,
    "half": torch.nn.Module.half,
    "bfloat16": torch.nn.Module.bfloat16,
    "to": lambda layer: layer.to(torch.float32),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_cast(dtype: torch.dtype, cast: Any) -> None:
    """On the CPU nothing is compiled for one dtype, so that a layer computes in whichever its parameters have."""
    options = LAYERS["everything"]
    layer = cast(made(options, dtype=dtype))
    dtype = layer.wq.weight.dtype
    state, x = layer.state_dict(), tokens(2, 13, dtype=dtype)
    found, eager = train(layer, x), authors.train(state, x, options)
    assert {result.dtype for result in found.values()} == {dtype}
    exact = authors.train({name: y.double() for name, y in state.items()}, x.double(), options)
    if dtype == torch.float64:
        torch.testing.assert_close(found, exact, check_stride=False)
    else:
        assert not authors.failures(found, eager, exact)
    assert generate(layer, x, [8, 5]).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_after_a_cast(dtype: torch.dtype) -> None:
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, dtype=torch.bfloat16).float()
    with torch.autocast("cpu", dtype):
        assert layer(tokens(1, 5, dtype=torch.float32)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_kernels_are_built_for_parameters_of_16_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are kernels, a layer that is cast says what it was built for."""
    monkeypatch.setattr("mtagen.op.local_target", lambda: "sm_90a")
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, kernel=None, dtype=dtype)
    built_for = torch.bfloat16 if dtype == torch.float32 else dtype
    assert layer.op.dtypes == (built_for,)
    with pytest.raises(InputError, match=r"dtype of queries: got torch\.float64; .* compute_dtype=torch\.float64"):
        layer.double()(tokens(1, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_dtype_that_is_asked_for_is_kept(dtype: torch.dtype) -> None:
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, compute_dtype=dtype, dtype=torch.bfloat16)
    assert layer.op.dtypes == pickle.loads(pickle.dumps(layer)).op.dtypes == (dtype,)


def test_dtype_that_kernels_were_not_built_for() -> None:
    layer = MultiTokenAttention(DIM, HEADS, head_dim=16, compute_dtype=torch.bfloat16)
    x = torch.zeros(1, 5, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with pytest.raises(
        InputError, match=r"dtype of queries: got torch\.float32; .*autocast.*compute_dtype=torch\.float32"
    ):
        layer(x)


def test_illegal_use_of_a_cache() -> None:
    layer = made(LAYERS["everything"] | {"dropout": 0.1}, dtype=torch.float32)
    cache, x = layer.new_cache(1, 5), torch.zeros(1, 5, DIM)

    def refused(match: str, x: Tensor = x, cache: Cache = cache, **arguments: Any) -> None:
        with pytest.raises(InputError, match=match):
            layer(x, cache=cache, **arguments)

    refused("cache: got 'gradients enabled'; .*no_grad")
    with torch.no_grad():
        refused(r"cache: got 'a layer in training mode, with dropout'; .*layer\.eval\(\)")
        layer.eval()
        refused("cache: got 'together with cu_seqlens'", cu_seqlens=CU_SEQLENS)
        refused(r"tokens: got 6; the cache holds 0 of 5 tokens; legal: 1\.\.5", x=torch.zeros(1, 6, DIM))
        refused("tokens: got 0", x=torch.zeros(1, 0, DIM))
        refused(r"cache: got .*; legal: layer\.new_cache\(2, max_len\)", x=torch.zeros(2, 5, DIM))
        refused("cache: got .*do not fit", cache=made(LAYERS["plain"]).new_cache(1, 5))
        refused(r"cache\.keys\.device: got device\(type='meta'\)", cache=layer.new_cache(1, 5, device="meta"))
        assert (cache.longest, cache.lengths.tolist()) == (0, [0])
        layer(x, cache=cache)
        refused("tokens: got 1; the cache holds 5 of 5 tokens", x=x[:, :1])


def test_illegal_caches() -> None:
    layer = made(LAYERS["convolution"])
    with pytest.raises(InputError, match="batch: got 0; must be a positive int"):
        layer.new_cache(0, 5)
    with pytest.raises(InputError, match=r"max_len: got 1\.5"):
        layer.new_cache(1, 1.5)
    for name in ("not causal", "a window to both sides"):
        with pytest.raises(InputError, match="depends on later tokens"):
            made(LAYERS[name]).new_cache(1, 5)
