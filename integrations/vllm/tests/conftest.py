"""Models, prompts, and engines of vLLM in this process, on the CPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {  # before vLLM is imported
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from mtagen.transformers import MtaConfig, MtaForCausalLM

NEW = 10  # tokens of each answer
END = 96
EVERYTHING: dict[str, Any] = {
    "kernel": (6, 11),
    "post_kernel": (4, 5),
    "mixed_heads": 2,
    "post_mixed_heads": 4,
    "group_norm": True,
    "gate": "scalar",
}


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, END, (count,), generator=generator).tolist()


SHARED = tokens(70, 0)
PROMPTS = [tokens(count, count) for count in (5, 40, 90, 1)] + [SHARED + tokens(n, n) for n in (3, 9, 30)]


class Served:
    """A checkpoint, and the tokens that ``generate`` gives to each prompt.

    Args:
        folder: where the checkpoint is written.
        options: options of the model besides or instead of all stages.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": END + 1, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": END}
        model = MtaForCausalLM(MtaConfig(**sizes, **heads, **EVERYTHING | options)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # so that tokens depend on all stages
                if any(part in name for part in ("mta_kernel", "wpsm", "wposm", "head_kernel", "sink", "slopes")):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                elif parameter.ndim > 1:
                    parameter.mul_(6)
            self.answers = [self._answer(model, prompt) for prompt in PROMPTS]
        model.save_pretrained(folder)
        self.folder = folder

    @staticmethod
    def _answer(model: MtaForCausalLM, prompt: list[int]) -> list[int]:
        found = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        return found[0, len(prompt) :].tolist()

    def equal(self, outputs: list[Any]) -> int:
        """Return how many requests got the tokens of ``generate``."""
        got = [list(output.outputs[0].token_ids) for output in outputs]
        return sum(map(list.__eq__, got, self.answers))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A model with all stages."""
    return Served(tmp_path_factory.mktemp("checkpoint"))


@contextmanager
def engine(served: Served, **options: Any) -> Iterator[LLM]:
    """Make an engine of a checkpoint, whose steps mix chunks of prompts and single tokens."""
    small = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 96, "block_size": 16}
    fixed = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    try:
        llm = LLM(str(served.folder), **fixed | small | options)
        yield llm
        llm.llm_engine.engine_core.shutdown()
        del llm
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
        # Another engine looks at the attributes of all modules, and fails at those of this one, which drafts import.
        sys.modules.pop("llvmlite.binding.ffi", None)


@pytest.fixture(scope="session")
def llm(served: Served) -> Iterator[LLM]:
    """An engine without drafts."""
    with engine(served) as made:
        yield made


def generate(llm: LLM) -> list[Any]:
    """Return the outputs of greedy search, which begins without any shared page."""
    assert llm.reset_prefix_cache()
    return again(llm)


def again(llm: LLM) -> list[Any]:
    """Return the outputs of greedy search."""
    options = SamplingParams(max_tokens=NEW, temperature=0, detokenize=False, stop_token_ids=[END])
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], options, use_tqdm=False)
