"""Stages in the attention of other models: each family generates the same tokens with stages that are the identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from mtagen.transformers import retrofit  # noqa: E402
from mtagen.transformers.families import FAMILIES  # noqa: E402
from mtagen.transformers.stages import Stages  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 60
STAGES: dict[str, Any] = {"kernel": (3, 5), "mixed_heads": 4, "post_kernel": (2, 3), "post_mixed_heads": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# Models by the model types of transformers, with options that reach every part of their attention.
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 7},
    "gpt_oss": {**MIXED, **EXPERTS, "rope_parameters": YARN},
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "mixtral": {**EXPERTS, "sliding_window": 5},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {"attention_bias": True},
    "olmo3": MIXED,
    "phi": {
        "qk_layernorm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "phi3": {"sliding_window": 5, "partial_rotary_factor": 0.5},
    "qwen2": {**MIXED, "use_sliding_window": True},
    "qwen3": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def made(family: str = "llama", automatic: Any = None, **options: Any) -> Any:
    """A model of a family whose biases, norms and sinks are no constants."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | MODELS[family] | options)
    model = (automatic or transformers.AutoModelForCausalLM).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def randomise(model: Any) -> Any:
    """Stages that pass on what they get would hide what they reach."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Stages):
                for parameter in module.parameters():
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def generate(model: Any, x: Tensor, **options: Any) -> Tensor:
    return model.generate(x, **{"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options)


def close(left: Tensor, right: Tensor) -> None:
    """As fp32 rounds what is summed in another order, in a model of several layers."""
    scale = right.abs().max().item()
    torch.testing.assert_close(left, right, rtol=0, atol=3e-5 * max(scale, 1))


def test_every_family_is_tried() -> None:
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_before(family: str) -> None:
    """And others from another prompt, and with stages that change something."""
    theirs, x = made(family), tokens(3, 11)
    ours = retrofit(theirs, **STAGES)
    assert isinstance(ours, type(theirs))
    expected = generate(theirs, x)
    assert len({tuple(row.tolist()) for row in expected[:, 11:]}) == 3
    assert torch.equal(generate(ours, x), expected)
    with torch.no_grad():
        close(ours(x).logits, theirs(x).logits)
    assert not torch.equal(generate(randomise(ours), x), expected)
