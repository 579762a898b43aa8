"""``torch.export``: programs give the bits of eager calls for all batch sizes and lengths.

tests/test_trainers.py compiles one ahead of time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

import mtagen
from mtagen import BackendError, InputError
from mtagen.nn import MultiTokenAttention
from mtagen.ops import library

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {
    "n_kv_heads": 2,
    "head_dim": 16,
    "kernel": (3, 5),
    "mixed_heads": 4,
    "post_kernel": (2, 3),
    "post_mixed_heads": 2,
    "gate": "scalar",
    "group_norm": True,
    "logits": "s - slopes[h] * (i - j)",
    "parameters": {"slopes": "h"},
    "sink": True,
}
SIZES = ((2, 9), (1, 1), (3, 40), (5, 2))  # the first is traced
LENGTHS = ((3, 4, 5), (11,), (2, 0, 7, 1, 9))
ROWS = {0: Dim("batch"), 1: Dim("length")}
both_tracers = pytest.mark.parametrize("strict", [False, True], ids=["by the dispatcher", "by dynamo"])


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for x in module.parameters():
            x += 0.3 * torch.randn(x.shape, generator=generator)


@pytest.fixture
def layer() -> MultiTokenAttention:
    torch.manual_seed(0)
    layer = MultiTokenAttention(32, 4, **OPTIONS).eval()
    randomise(layer)
    return layer


def program_of(layer: MultiTokenAttention, strict: bool = False) -> ExportedProgram:
    return export(layer, (torch.randn(*SIZES[0], 32),), dynamic_shapes={"x": ROWS}, strict=strict)


def boundaries(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@both_tracers
def test_layer(layer: MultiTokenAttention, strict: bool) -> None:
    run = program_of(layer, strict).module()
    for size in SIZES:
        x = torch.randn(*size, 32)
        assert torch.equal(run(x), layer(x))


class OfDocuments(nn.Module):
    def __init__(self, layer: MultiTokenAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.layer(x, cu_seqlens=cu_seqlens)


@both_tracers
def test_packed_documents(layer: MultiTokenAttention, strict: bool) -> None:
    module = OfDocuments(layer)
    shapes = {"x": {0: Dim("tokens")}, "cu_seqlens": {0: Dim("boundaries")}}
    run = export(module, (torch.randn(9, 32), boundaries(3, 6)), dynamic_shapes=shapes, strict=strict).module()
    for lengths in LENGTHS:
        x, cu_seqlens = torch.randn(sum(lengths), 32), boundaries(*lengths)
        assert torch.equal(run(x, cu_seqlens), module(x, cu_seqlens))


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.op = mtagen.build(kernel=(3, 5), head_dim=16, post_kernel=(2, 3))
        self.weights = nn.ParameterDict({name: torch.randn(x.shape) for name, x in self.op.identity_weights(4).items()})

    def forward(self, q_tail: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return self.op.decode(q_tail, keys, values, **self.weights, cache_seqlens=lengths)


@both_tracers
def test_decode(strict: bool) -> None:
    def inputs(batch: int, room: int) -> tuple[Tensor, ...]:
        keys, values = torch.randn(2, batch, 2, room, 16)
        return torch.randn(batch, 4, 4, 16), keys, values, torch.randint(1, room + 1, (batch,)).int()

    torch.manual_seed(0)
    module, batch, room = Decoding(), Dim("batch"), Dim("room")
    shapes = ({0: batch}, {0: batch, 2: room}, {0: batch, 2: room}, {0: batch})
    run = export(module, inputs(*SIZES[0]), dynamic_shapes=shapes, strict=strict).module()
    for size in SIZES:
        given = inputs(*size)
        assert torch.equal(run(*given), module(*given))


def test_a_program_whose_op_was_not_built(layer: MultiTokenAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    program = program_of(layer)
    monkeypatch.setattr(library, "_executors", {})
    with pytest.raises(BackendError, match=r"no op of this key was built.*call mtagen\.build\(\.\.\.\)"):
        program.module()(torch.randn(3, 40, 32))


def config() -> Any:
    transformers = pytest.importorskip("mtagen.transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return transformers.MtaConfig(**sizes, num_attention_heads=2, kernel=(3, 5), post_mixed_heads=2)


@torch.no_grad()
def test_language_model() -> None:
    """Without gradients, where eager calls return a cache by default."""
    from mtagen.transformers import MtaForCausalLM

    torch.manual_seed(0)
    model = MtaForCausalLM(config()).eval()
    randomise(model)
    x = torch.randint(50, SIZES[0])
    run = export(model, (), {"input_ids": x}, dynamic_shapes={"input_ids": ROWS}).module()
    for size in SIZES:
        x = torch.randint(50, size)
        assert torch.equal(run(input_ids=x).logits, model(x).logits)


def test_documents_of_a_decoder() -> None:
    from mtagen.transformers import MtaModel

    torch.manual_seed(0)
    model = MtaModel(config())
    randomise(model)
    documents, length = Dim("boundaries"), Dim("length")
    shapes = {"input_ids": {1: length}, "cu_seq_lens_q": {0: documents}, "cu_seq_lens_k": {0: documents}}

    def given(*lengths: int) -> dict[str, Tensor]:
        x, cu_seqlens = torch.randint(50, (1, sum(lengths))), boundaries(*lengths)
        return {"input_ids": x, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens.clone()}

    run = export(model, (), given(3, 6), dynamic_shapes=shapes).module()
    for lengths in LENGTHS:
        batch = given(*lengths)
        assert torch.equal(run(**batch).last_hidden_state, model(**batch).last_hidden_state)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("use_cache", [None, True])
@torch.no_grad()
def test_values_that_programs_cannot_read(name: str, use_cache: bool | None) -> None:
    from mtagen.transformers import MtaModel

    model, x = MtaModel(config()), torch.ones(2, 9, dtype=torch.int64)
    with pytest.raises(InputError, match=f"{name}.*: got 'one of them in torch.export'; .*legal: None, or cu_seq_lens"):
        export(model, (x,), {name: x, "use_cache": use_cache})
