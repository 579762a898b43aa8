"""Serving 64 requests: a captured step of a 300M model, and transformers' continuous batching of 1.1B.

``python benchmarks/serving.py --help`` prints the options. Weights are random.

The step makes one token for each request, whose keys lie in pages of 64 tokens, and is replayed as a
CUDA graph; its time stands beside the sum of its kernels' times. Continuous batching makes tokens by a
Llama and by the same Llama with stages. Stages start as the identity, so both choose the same tokens,
except where rounding reorders two nearly equal logits. For Llama, whose attention takes a mask there, the engine
captures graphs only if it is asked to, so Llama is measured both ways. The first call captures graphs, so the
second one is measured, with other prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from generation import VOCABULARY, llama
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers import __version__ as transformers_version

from mtagen.environment import collect
from mtagen.measure.timing import time_call
from mtagen.nn import MultiTokenAttention
from mtagen.nn.cache import EngineCache
from mtagen.ops.attention import AttentionOp
from mtagen.serving import Rings, Step
from mtagen.transformers import MtaConfig, MtaForCausalLM, retrofit

REQUESTS, PAGE = 64, 64
SIZES_300M = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "num_attention_heads": 16}


class Requests:
    """Requests that make one token each, and where their pages are.

    Args:
        lengths: tokens of each request, the new one included.
    """

    def __init__(self, lengths: Tensor) -> None:
        used = -(-lengths.cpu() // PAGE)
        self.pages, width = int(used.sum()), int(used.max())
        order = torch.randperm(self.pages, dtype=torch.int32).split(used.tolist())
        table = torch.stack([torch.nn.functional.pad(mine, (0, width - len(mine))) for mine in order])
        self.table = table.to(lengths.device)
        self.lengths, self.longest = lengths, int(lengths.max())
        self.begins = torch.arange(len(lengths) + 1, device=lengths.device, dtype=torch.int32)
        self.step: Step | None = None  # of all layers

    def step_of(self, rings: Rings) -> Step:
        """Return the step, made by the first layer that asks."""
        if self.step is None:
            self.step = Step.of_tables(rings, self.begins, self.lengths, len(self.lengths), self.table)
        return self.step


class LayerPages(EngineCache):
    """The pages of a layer."""

    def __init__(self, requests: Requests, layer: MultiTokenAttention, dtype: torch.dtype) -> None:
        self.requests = requests
        made: dict[str, Any] = {"device": requests.lengths.device, "dtype": dtype}
        shape = requests.pages, PAGE, layer.n_kv_heads, layer.head_dim
        self.k_pages, self.v_pages = torch.randn(shape, **made), torch.randn(shape, **made)
        self.rings = Rings.for_op(layer.op, layer.n_heads, requests.pages, PAGE, **made)

    def attend(self, attention: MultiTokenAttention, x: Tensor, positions: Tensor, padding: None) -> Tensor:
        """Attend from the new tokens, as a decoder layer asks for it."""
        out: Tensor = attention(x, positions=positions, cache=self)
        return out

    def compute(self, op: AttentionOp, weights: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute outputs; see :class:`EngineCache`."""
        step, pages = self.requests.step_of(self.rings), {"k_pages": self.k_pages, "v_pages": self.v_pages}
        rows = self.rings.append(q[0], step, k=k[0], v=v[0], **pages)
        boundaries = {"block_table": self.requests.table, "cu_seq_q": None, "lengths": self.requests.lengths}
        longest = {"max_q": 1 + self.rings.context, "max_k": self.requests.longest}
        return op.paged(rows, **pages, **weights, **boundaries, **longest)[None]


def decode_step(sizes: Mapping[str, int], longest: int, device: str) -> tuple[int, Callable[[], Tensor]]:
    """Return a model's number of parameters, and a function that makes a token for each request."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = MtaConfig(vocab_size=VOCABULARY, **sizes, kernel=(6, 11))
    model = MtaForCausalLM(config).to(device, dtype).eval()
    lengths = torch.linspace(100, longest, REQUESTS, device=device).to(torch.int32)
    requests = Requests(lengths)
    caches = [LayerPages(requests, layer.self_attn, dtype) for layer in model.model.layers]
    tokens, positions = torch.randint(VOCABULARY, (1, REQUESTS), device=device), (lengths - 1)[None]

    def step() -> Tensor:
        requests.step = None
        x = model.model.embed_tokens(tokens)
        for layer, cache in zip(model.model.layers, caches, strict=True):
            x = layer(x, positions, cache=cache)
        return model.lm_head(model.model.norm(x)).argmax(-1)

    return sum(x.numel() for x in model.parameters()), step


def captured_step(longest: int) -> dict[str, float]:
    """Return milliseconds of a step of the 300M model as a graph, and those of its kernels."""
    parameters, step = decode_step(SIZES_300M, longest, "cuda")
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph_ms, replays = time_call(graph.replay, torch.device("cuda")).median, 10
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    kernels = [event.time_range.elapsed_us() for event in seen.events() if event.device_type == DeviceType.CUDA]
    kernels_ms = sum(kernels) / 1000 / replays
    ratio, launches = graph_ms / kernels_ms, len(kernels) / replays
    sums = {"graph_ms": graph_ms, "kernels_ms": kernels_ms, "ratio": ratio}
    return {"parameters": parameters, "kernels": launches, **sums}


def batched(model: Any, prompt: int, new: int, graphs: bool | None) -> Callable[[int], tuple[list[list[int]], float]]:
    """Return a function of a seed, which answers random prompts: the new tokens, and how many a second."""
    blocks = REQUESTS * (-(-(2 * prompt + new) // 256) + 1)
    config = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=4096, use_cuda_graph=graphs)
    options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def answer(seed: int) -> tuple[list[list[int]], float]:
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(prompt // 2, 2 * prompt, (REQUESTS,), generator=generator).tolist()
        prompts = [torch.randint(1, VOCABULARY, (count,), generator=generator).tolist() for count in counts]
        begin = time.perf_counter()
        outputs = model.generate_batch(prompts, options, config, persistent_manager=True)
        seconds = time.perf_counter() - begin
        made = [output.generated_tokens for output in outputs.values()]
        assert [*map(len, made)] == [new] * REQUESTS, "the engine has answered all requests"
        return made, sum(map(len, made)) / seconds

    return answer


def continuous_batching(dim: int, layers: int, prompt: int, new: int) -> list[dict[str, Any]]:
    """Return tokens per second of a Llama and of its retrofit in transformers' continuous batching."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs, results, expected = llama(dim, layers, device), [], []
    # The engine captures graphs by itself only where attention takes no mask, as Llama's does unless told otherwise.
    for name, graphs in (("Llama", None), ("Llama, with graphs", True), ("with (6, 11)", None)):
        model = theirs if name.startswith("Llama") else retrofit(theirs, kernel=(6, 11))
        answer = batched(model, prompt, new, graphs)
        answer(0)
        tokens, rate = answer(1)
        expected = expected or tokens
        same = sum(a == b for x, y in zip(tokens, expected, strict=True) for a, b in zip(x, y, strict=True))
        results.append({"model": name, "tokens_per_s": rate, "same": same / sum(map(len, expected))})
        print(results[-1], flush=True)
        model.destroy_cached_continuous_batching_manager()
    return results


def main(
    json_file: Annotated[Path, typer.Option("--json", help="The figures are written to this file.")],
    commit: Annotated[str, typer.Option(help="The commit of this tree, for the file.")] = "",
    longest: Annotated[int, typer.Option(help="Keys of the step's longest request; the shortest has 100.")] = 4000,
    dim: Annotated[int, typer.Option(help="Elements of a token's vector in the engine; the default is 1.1B.")] = 2048,
    layers: Annotated[int, typer.Option(help="Number of layers in the engine.")] = 16,
    prompt: Annotated[int, typer.Option(help="Mean tokens of a prompt, about.")] = 256,
    new: Annotated[int, typer.Option(help="New tokens of each request.")] = 128,
) -> None:
    """Measure both, and print and write the figures. The step needs a GPU, and is left out without one."""
    settings = {"requests": REQUESTS, "longest": longest, "dim": dim, "layers": layers, "prompt": prompt, "new": new}
    made: dict[str, Any] = {"commit": commit or None, "environment": collect(), "transformers": transformers_version}
    made |= {"settings": settings}
    with torch.inference_mode():
        made["step"] = captured_step(longest) if torch.cuda.is_available() else None
    print(made["step"], flush=True)
    made["continuous_batching"] = continuous_batching(dim, layers, prompt, new)
    json_file.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
