"""Mixings whose matrices depend on tokens: the reference, the torch backend, the layer of DCMHA, bad arguments."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

import mtagen
from mtagen import InputError, SpecError, plan
from mtagen.check import failures
from mtagen.cli import app
from mtagen.codegen import emit
from mtagen.cpu import pipeline
from mtagen.measure.cases import Sizes
from mtagen.nn import MultiTokenAttention
from mtagen.nn.tensor_parallel import check_heads
from mtagen.spec import FACTORS, Spec

pytestmark = pytest.mark.usefixtures("one_thread")

F64, DIM = torch.float64, 16
BOTH: dict[str, Any] = {"kernel": None, "mixed_heads": 4, "post_mixed_heads": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "before": {"kernel": None, "mixed_heads": 4, "dynamic_ranks": (2, 1)},
    "after, queries alone": {"kernel": None, "post_mixed_heads": 2, "post_dynamic_ranks": (3, 0)},
    "both, keys alone before": {**BOTH, "dynamic_ranks": (0, 2), "post_dynamic_ranks": (2, 2)},
    "with convolutions": {
        "kernel": (2, 3),
        "mixed_heads": 2,
        "post_kernel": (3, 2),
        "post_mixed_heads": 4,
        "dynamic_ranks": (1, 1),
        "post_dynamic_ranks": (1, 2),
    },
    "window, sink, expressions": {
        **BOTH,
        "dynamic_ranks": (1, 2),
        "post_dynamic_ranks": (2, 1),
        "window": (3, 1),
        "causal": False,
        "convolved": "4 * tanh(s / 4)",
        "logits": "s - 0.1 * abs(i - j)",
        "sink": True,
    },
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def arguments(spec: Spec, nq: int, nk: int, heads: int = 4, batch: int = 2) -> dict[str, Tensor]:
    """Normal tensors by name. Those that count queries or keys are not contiguous."""
    torch.manual_seed(nq)
    sizes = {"B": batch, "H": heads, "Hkv": heads // 2, "Nq": nq, "Nk": nk}
    named = {}
    for x in spec.arguments:
        shape = x.extents(sizes)
        if "B" in x.shape:  # heads inside rows, as projections leave them
            named[x.name] = torch.randn(shape[0], shape[2], shape[1], shape[3], dtype=F64).transpose(1, 2)
        else:
            named[x.name] = torch.randn(shape, dtype=F64)
    return {name: x.requires_grad_() for name, x in named.items()}


def rules_of(spec: Spec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in mtagen.spec.RULES}


def composed(a: Tensor, static: Tensor, of_query: Tensor | None, of_key: Tensor | None) -> Tensor:
    """Mix a (H, Nq, Nk) of one group score by score, by the matrix that a query, a key and the weight make."""
    mixed = torch.zeros_like(a)
    for i in range(a.shape[1]):
        for j in range(a.shape[2]):
            matrix = static
            for token in (None if of_query is None else of_query[:, i], None if of_key is None else of_key[:, j]):
                if token is not None:
                    rank = token.shape[1] // 2
                    for r in range(rank):
                        matrix = matrix + torch.outer(token[:, rank + r], token[:, r])
                    matrix = matrix + torch.diag(token[:, -1])
            mixed[:, i, j] = matrix @ a[:, i, j]
    return mixed


@pytest.mark.parametrize("ranks", [(2, 1), (1, 0), (0, 2)])
def test_reference_makes_a_matrix_for_each_pair(ranks: tuple[int, int]) -> None:
    spec = Spec(**BOTH, head_dim=DIM, dtype="fp64", dynamic_ranks=ranks, post_dynamic_ranks=ranks[::-1])
    named = {name: x.detach() for name, x in arguments(spec, 3, 5, batch=1).items()}
    q, k, v = (named[name][0].repeat_interleave(1 if name == "q" else 2, 0) for name in "qkv")
    factors = [named[name][0] if name in named else None for name in FACTORS]
    logits = composed(q @ k.mT * DIM**-0.5, named["head_weight"][0], *factors[:2])
    logits = logits.masked_fill(torch.ones(3, 5, dtype=torch.bool).triu(3), -torch.inf)
    out = composed(logits.softmax(-1), named["post_head_weight"][0], *factors[2:]) @ v
    torch.testing.assert_close(mtagen.reference(**named)[0], out, rtol=1e-12, atol=1e-12)


@every_variant
@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (13, 17)])
def test_torch_backend(options: dict[str, Any], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of a few rows, and every gradient."""
    monkeypatch.setattr(pipeline, "STRIP_SCORES", 2 * 4 * 20)
    op = mtagen.build(**options, head_dim=DIM, dtype="fp64", backend="torch")
    spec = op.plan.spec
    named = arguments(spec, *sizes)
    out, expected = op(**named), mtagen.reference(**named, **rules_of(spec))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    grad = torch.randn_like(out)
    for name, got, want in zip(
        named, *(torch.autograd.grad(x, [*named.values()], grad) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accuracy_of_the_torch_backend(dtype: Any) -> None:
    """By the accuracy rule, decode steps on caches with NaN behind each length included."""
    stages: dict[str, Any] = {**BOTH, "dynamic_ranks": (2, 2), "post_dynamic_ranks": (2, 2)}
    for options in (stages, stages | {"kernel": (2, 3), "post_kernel": (2, 3)}):
        op = mtagen.build(**options, head_dim=DIM, dtype=dtype, backend="torch")
        assert not failures(op, op.plan.spec, torch.device("cpu"), [Sizes(2, 4, 2, 9, 13), Sizes(1, 4, 4, 1, 1)])


def test_traced_and_checked() -> None:
    """The registered ops know the shapes of factors and their gradients."""
    op = mtagen.build(
        **BOTH, head_dim=DIM, dynamic_ranks=(1, 2), post_dynamic_ranks=(0, 1), dtype="fp32", backend="torch"
    )
    named = {name: x.detach().float().requires_grad_() for name, x in arguments(op.plan.spec, 5, 6).items()}
    compiled = torch.compile(lambda **tensors: op(**tensors), backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(f(**named).square().sum(), [*named.values()]) for f in (op, compiled)]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_emitted_kernels_have_no_atomics(backend: Any, tmp_path: Path) -> None:
    """Each kernel of the plan is in a source."""
    spec = Spec(None, 64, mixed_heads=16, dynamic_ranks=(2, 2), post_mixed_heads=16, post_dynamic_ranks=(1, 0))
    made = plan(spec, "sm_90a", backend)
    text = "".join(Path(path).read_text() for path in emit(made, tmp_path))
    names = {kernel.name for one in made.strip.values() for kernel in one.kernels}
    assert len(names) > 15
    assert all(f"{name}(" in text for name in names)
    assert "atomic" not in text.replace("without atomics", "")


# ---- The layer


def dcmha(x: Tensor, weights: Mapping[str, Tensor], heads: int, ranks: tuple[int, int]) -> Tensor:
    """A causal layer with dynamically composable heads before and after the softmax, by the paper's pseudo code.

    x is (T, dim). Einsum's axes: t queries, s keys, h heads, r ranks.
    """

    def token_weights(side: str) -> tuple[Tensor, Tensor, Tensor]:
        rank = ranks["key" in side]
        hidden = F.gelu(x @ weights[f"{side}.hidden.weight"].T)
        halves = (hidden @ weights[f"{side}.{name}.weight"].T for name in ("inner", "outer"))
        first, second = (half.view(len(x), rank, heads) for half in halves)
        first = first / (first.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return first, second, torch.tanh(x @ weights[f"{side}.gates.weight"].T)

    def compose(a: Tensor, static: Tensor, side: str) -> Tensor:
        composed = torch.einsum("gh,hts->gts", static, a)
        for token, axis in (("query", "t"), ("key", "s")):
            first, second, gate = token_weights(f"{side}{token}_mixing")
            hidden = torch.einsum(f"hts,{axis}rh->rts", a, first)
            composed = composed + torch.einsum(f"rts,{axis}rh->hts", hidden, second)
            composed = composed + torch.einsum(f"hts,{axis}h->hts", a, gate)
        return composed

    q, k, v = ((x @ weights[f"{name}.weight"].T).view(len(x), heads, -1).transpose(0, 1) for name in ("wq", "wk", "wv"))
    a = compose(q @ k.mT / q.shape[-1] ** 0.5, weights["wpsm.weight"], "")
    a = a.masked_fill(torch.ones(a.shape[1:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    out = compose(a, weights["wposm.weight"], "post_") @ v
    return out.transpose(0, 1).flatten(1) @ weights["wo.weight"].T


def make_layer(**options: Any) -> MultiTokenAttention:
    stages = {"kernel": None, "mixed_heads": 4, "post_mixed_heads": 4, "rope_theta": None, "dtype": F64}
    ranks = {"dynamic_ranks": (2, 1), "post_dynamic_ranks": (2, 1)}
    return MultiTokenAttention(64, 4, **{**stages, **ranks, **options})


def randomised(layer: MultiTokenAttention) -> MultiTokenAttention:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def test_layer_is_that_of_the_paper() -> None:
    layer, x = randomised(make_layer()), torch.randn(2, 9, 64, dtype=F64)
    weights = dict(layer.named_parameters())
    out, expected = layer(x), torch.stack([dcmha(tokens, weights, 4, (2, 1)) for tokens in x])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(y.square().sum(), [*weights.values()]) for y in (out, expected)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_layer_begins_as_one_without() -> None:
    """Tokens add nothing at first, and all that makes their factors gets gradients, at once or after a step."""
    layer, x = make_layer(), torch.randn(1, 7, 64, dtype=F64)
    plain = make_layer(dynamic_ranks=None, post_dynamic_ranks=None)
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert torch.equal(layer(x), plain(x))
    layer(x).square().sum().backward()
    for part in (layer.query_mixing, layer.key_mixing, layer.post_query_mixing, layer.post_key_mixing):
        assert part.gates.weight.grad.count_nonzero()
        assert part.outer.weight.grad.count_nonzero()
    randomised(layer).reset_parameters()
    assert not layer.query_mixing.gates.weight.count_nonzero()


@pytest.mark.parametrize(
    "options", [{}, {"kernel": (2, 3), "post_kernel": (3, 2), "n_kv_heads": 2}, {"dynamic_ranks": (0, 2)}]
)
@torch.no_grad()
def test_generation_with_a_cache(options: dict[str, Any]) -> None:
    """A prompt, steps of one and of several tokens, tokens that are taken back, and a selection of entries."""
    layer, x = randomised(make_layer(rope_theta=1e4, **options)), torch.randn(2, 21, 64, dtype=F64)
    expected, cache = layer(x), layer.new_cache(2, 30, spare=3)
    outs = [layer(x[:, begin:end], cache=cache) for begin, end in ((0, 2), (2, 13), (13, 14), (14, 17))]
    cache.remove(3)
    outs[-1] = layer(x[:, 14:15], cache=cache)
    cache = cache.select(torch.tensor([1, 0])).select(torch.tensor([1, 0]))
    outs.append(layer(x[:, 15:], cache=cache))
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_language_model_generates() -> None:
    """The tokens of whole sequences, from a cache that grows; padded batches are refused."""
    transformers = pytest.importorskip("transformers")
    from mtagen.transformers import MtaConfig, MtaForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    stages = {"kernel": None, "mixed_heads": 4, "post_mixed_heads": 4, "dynamic_ranks": (1, 2)}
    config = MtaConfig(**sizes, num_attention_heads=4, **stages, post_dynamic_ranks=(2, 1))
    transformers.set_seed(0)
    model = MtaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    prompt = torch.randint(1, 40, (2, 5))
    generated = [model.generate(prompt, max_new_tokens=9, do_sample=False, use_cache=use) for use in (True, False)]
    assert torch.equal(*generated)
    with pytest.raises(InputError, match="packed documents are not supported"):
        model(prompt, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5]))


def test_copies_of_a_layer() -> None:
    layer, x = randomised(make_layer()), torch.randn(1, 5, 64, dtype=F64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


# ---- Bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic_ranks": 2}, "pair of ints"),
        ({"dynamic_ranks": (0, 0)}, "not both 0"),
        ({"dynamic_ranks": (5, 1)}, r"0\.\.4"),
        ({"dynamic_ranks": (1, 1), "mixed_heads": None}, "needs mixed_heads"),
        ({"post_dynamic_ranks": (1, 1), "post_mixed_heads": None}, "needs post_mixed_heads"),
        ({"dynamic_ranks": (1, 1), "packed": True}, "do not support packed documents"),
        ({"dynamic_ranks": (1, 1), "page_size": 16}, "do not support pages"),
    ],
)
def test_specs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Spec(**{**BOTH, "head_dim": DIM} | options)


def test_calls_are_refused() -> None:
    op = mtagen.build(**BOTH, head_dim=DIM, dynamic_ranks=(1, 2), dtype="fp32", backend="torch")
    named = {name: x.detach().float() for name, x in arguments(op.plan.spec, 5, 6).items()}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"query_factors": None}, r"query_factors: got None.*\(2, 4, 5, 3\)"),
        ({"key_factors": named["key_factors"][:, :, :5]}, r"key_factors\.shape.*\(2, 4, 6, 5\)"),
        ({"key_factors": named["key_factors"].to(torch.bfloat16)}, r"key_factors\.dtype"),
        ({"post_key_factors": named["key_factors"]}, "post_key_factors.*built without it"),
    ]
    for others, message in cases:
        with pytest.raises(InputError, match=message):
            op(**named | others)
    with pytest.raises(InputError, match="2 R \\+ 1"):
        mtagen.reference(**named | {"query_factors": named["query_factors"][..., :2]})
    with pytest.raises(SpecError, match="needs mixed_heads"):
        mtagen.reference(*(named[name] for name in "qkv"), query_factors=named["query_factors"])
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    rows = (named[name][0].transpose(0, 1).contiguous() for name in "qkv")
    weights = {name: named[name] for name in ("head_weight", "post_head_weight")}
    with pytest.raises(SpecError, match="do not support packed documents"):
        op.varlen(*rows, **weights, cu_seq_q=lengths, cu_seq_k=lengths, max_q=5, max_k=5)


def test_command_line() -> None:
    command = ["plan", "--kernel", "none", "--head-dim", "64", "--dynamic-ranks", "2", "1"]
    made = CliRunner().invoke(app, [*command, "--mixed-heads", "16", "--json"])
    assert json.loads(made.output)["spec"]["dynamic_ranks"] == [2, 1]
    assert CliRunner().invoke(app, command).exit_code == 2


def test_layers_refuse() -> None:
    layer = make_layer()
    for ranks in (1, 2):
        with pytest.raises(SpecError, match=r"dynamic_ranks.*all heads on each rank"):
            check_heads(layer, ranks)
    with pytest.raises(InputError, match="packed documents are not supported"):
        layer(torch.zeros(5, 64, dtype=F64), cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(SpecError, match="mixed_heads"):
        make_layer(mixed_heads=None)
