"""torchtitan's Llama with the override, against the one with plain attention. torchtitan is not among the test extra,
because it needs other versions of transformers' packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder_sharding import set_gqa_inner_attention_local_map
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_varlen_attn
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from mtagen import SpecError
from mtagen.torchtitan import InnerAttention

STAGES = {"kernel": [3, 5], "post_kernel": [2, 3], "post_mixed_heads": 4}
LENGTHS = (7, 13)


def config_of(trainer: Any, stages: dict[str, Any] | None) -> Any:
    """The model's configuration after the trainer has applied its option ``override.imports``, cut to two layers."""
    model = trainer.model_spec.model
    del model.layers[2:]
    if stages is None:
        for layer in model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    else:
        overrides = OverrideConfig(imports=[("mtagen.torchtitan.multi_token_attention", stages)])
        assert len(apply_overrides(overrides, trainer)) == 2
    return model


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    model = config_of(llama3_debugmodel(), None).build()
    model.init_states()
    return model


def with_stages(plain: nn.Module, config: Any) -> nn.Module:
    """A model made on the meta device, whose parameters are those of a checkpoint in transformers' format."""
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu").init_states()
    adapter = Llama3StateDictAdapter(config, None)
    found = model.load_state_dict(adapter.from_hf(adapter.to_hf(plain.state_dict())), strict=False)
    assert not found.unexpected_keys
    assert all(".inner_attention." in name for name in found.missing_keys)
    return model


def randomised(model: nn.Module) -> nn.Module:
    for name, x in model.named_parameters():
        if "inner_attention" in name:
            x.data += 0.3 * torch.randn(x.shape)
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """Two rows, each with the same two documents, and the tokens' positions."""
    return torch.randint(2048, (2, sum(LENGTHS))), torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)


def alone(model: nn.Module, x: Tensor) -> Tensor:
    """The logits of each document alone."""
    parts = x.split(LENGTHS, 1)
    return torch.cat([model(part, positions=torch.arange(part.shape[1]).expand(2, -1)) for part in parts], 1)


@pytest.mark.parametrize("trainer", [llama3_debugmodel, llama3_debugmodel_varlen_attn])
def test_stages_start_as_the_identity(plain: nn.Module, trainer: Any) -> None:
    model, (x, positions) = with_stages(plain, config_of(trainer(), STAGES)), tokens()
    masks = model.get_attention_masks(positions=positions)
    torch.testing.assert_close(model(x, positions=positions, attention_masks=masks), alone(plain, x), rtol=0, atol=2e-5)


def test_documents_do_not_see_each_other(plain: nn.Module) -> None:
    model, (x, positions) = randomised(with_stages(plain, config_of(llama3_debugmodel(), STAGES))), tokens()
    expected = alone(model, x)
    masks = model.get_attention_masks(positions=positions)
    torch.testing.assert_close(model(x, positions=positions, attention_masks=masks), expected, rtol=0, atol=2e-5)
    assert (model(x, positions=positions) - expected).abs().max() > 1e-2  # each row is one document
    assert (alone(plain, x) - expected).abs().max() > 1e-2


def test_window_is_kept(plain: nn.Module) -> None:
    config = config_of(llama3_debugmodel_varlen_attn(), {"kernel": [3, 5]})
    config.layers[0].attention.inner_attention.window_size = (4, 0)
    inner = with_stages(plain, config).layers["0"].attention.inner_attention
    assert (inner.op.plan.spec.left, inner.op.plan.spec.right) == (4, 0)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_compiled_and_sharded(plain: nn.Module, group: None) -> None:
    config = config_of(llama3_debugmodel(), STAGES)
    model, (x, positions) = with_stages(plain, config), tokens()
    with torch.device("meta"):
        sharded = config.build()
    mesh = init_device_mesh("cpu", (1,))
    for layer in sharded.layers.values():
        layer.compile(fullgraph=True, backend="aot_eager")
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded.to_empty(device="cpu").init_states()
    stages = {name: x for name, x in sharded.named_parameters() if ".inner_attention." in name}
    expected = dict(model.named_parameters())
    assert len(stages) == 6
    assert all(torch.equal(x.full_tensor(), expected[name]) for name, x in stages.items())

    masks = model.get_attention_masks(positions=positions)
    for name, x_ in sharded.named_parameters():
        x_.data.to_local().copy_(expected[name].data)
    for one in (model, sharded):
        one(x, positions=positions, attention_masks=masks).square().mean().backward()
    for name, x_ in sharded.named_parameters():
        torch.testing.assert_close(x_.grad.full_tensor(), expected[name].grad, rtol=1e-4, atol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match="kernel: got"):
        config_of(llama3_debugmodel(), {"kernel": [0, 3]}).build()
    config = InnerAttention.Config(n_heads=2, head_dim=16, stages={"kernel": (3, 5)})
    set_gqa_inner_attention_local_map(config)  # as torchtitan does before it spreads heads
    with pytest.raises(ValueError, match="weight has no placement declared"):
        config.build().parallelize(SimpleNamespace(spmd_backend="default"))
