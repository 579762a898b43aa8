"""Small models whose attention has what published models have, on a CPU: each learns to repeat its prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtagen.expressions import softcap, t5

pytest.importorskip("transformers")
from mtagen.transformers import MtaConfig, MtaForCausalLM

VOCABULARY, HALF = 8, 4
STYLES: dict[str, dict[str, Any]] = {
    "Gemma 2: soft-caps, a window in every other layer": {
        "logits": softcap(50.0),
        "layer_overrides": {0: {"window": (4, 0)}},
    },
    "T5: a learned bias by distance, no rotation": {
        "logits": t5(8, 16),
        "parameters": {"table": "h,8"},
        "rope_theta": None,
    },
    "gpt-oss: sinks, and a window in every other layer": {
        "sink": True,
        "layer_overrides": {0: {"window": (4, 0)}},
    },
    "all, after a convolution": {"kernel": (2, 3), "logits": t5(8, 16), "parameters": {"table": "h,8"}, "sink": True},
}


@pytest.mark.parametrize("options", STYLES.values(), ids=STYLES)
def test_learns(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MtaConfig(vocab_size=VOCABULARY, **sizes, **{"kernel": None, **options})
    model = MtaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    losses = []
    for _ in range(70):
        prompt = torch.randint(VOCABULARY, (32, HALF))
        tokens = torch.cat([prompt, prompt], 1)
        labels = tokens.masked_fill(torch.arange(2 * HALF) < HALF, -100)
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses[-1]
    learned = [x for name, x in model.named_parameters() if name.endswith("sink") or "score_parameters" in name]
    assert len(learned) == 2 * (("sink" in options) + ("parameters" in options))
    assert all(x.any() for x in learned)  # they begin as zeros
    generated = model.generate(prompt[:2], max_new_tokens=3, do_sample=False)
    again = MtaForCausalLM(MtaConfig.from_dict(config.to_dict()))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.generate(prompt[:2], max_new_tokens=3, do_sample=False), generated)
