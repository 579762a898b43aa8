"""The model: vLLM's Llama, with mtagen's layer between vLLM's projections."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from mtagen.errors import InputError, explain
from mtagen.nn import MultiTokenAttention
from mtagen.nn.tensor_parallel import check_heads, per_head
from mtagen.transformers import MtaConfig

from .attention import MtaBackend, MtaPages
from .checks import check_config, spare_of


class MtaAttention(MultiTokenAttention):
    """The attention of a decoder layer.

    Args:
        config: the model's configuration.
        hidden_size: elements of a token's vector.
        num_heads: heads of queries, on all ranks.
        quant_config: how vLLM quantises projections.
        cache_config: vLLM's options of pages.
        prefix: the module's name, with the number of the layer.

    Raises:
        InputError: queries see later keys.
        SpecError: the heads cannot be spread over the ranks.
    """

    def __init__(
        self,
        config: MtaConfig,
        hidden_size: int,
        num_heads: int,
        quant_config: QuantizationConfig | None,
        cache_config: CacheConfig | None,
        prefix: str,
        **_: Any,
    ) -> None:
        options = config.attention_options(extract_layer_index(prefix))
        super().__init__(hidden_size, num_heads, **options | {"dropout": 0.0})
        if self.op.plan.spec.right != 0:
            rule = "a token's output depends on later tokens, which vLLM does not know yet"
            raise InputError(explain("causal", config.causal, rule, "causal=True"))
        ranks = get_tensor_model_parallel_world_size()
        check_heads(self, ranks)
        self.n_local_heads, self.n_local_kv_heads = self.n_heads // ranks, self.n_kv_heads // ranks
        for part, name in per_head(self):
            held = getattr(part, name)
            mine = nn.Parameter(held.detach()[: len(held) // ranks].clone(), requires_grad=False)
            set_weight_attrs(mine, {"weight_loader": sharded_weight_loader(0)})
            part.register_parameter(name, mine)
        for name in ("wq", "wk", "wv", "wo"):
            linear = RowParallelLinear if name == "wo" else ColumnParallelLinear
            ours = getattr(self, name)
            sizes = ours.in_features, ours.out_features
            made = {"bias": False, "return_bias": False, "quant_config": quant_config, "prefix": f"{prefix}.{name}"}
            setattr(self, name, linear(*sizes, **made))
        self.pages = MtaPages(
            self.n_local_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.n_local_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.pages",
            attn_backend=MtaBackend,
            op=self.op,
            weights=self.stages,
            spare=spare_of(get_current_vllm_config()),
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]  # as vLLM calls it
        """Return the outputs of the new tokens of all requests, ``(tokens, hidden_size)``."""
        return super().forward(hidden_states[None], positions=positions[None], cache=self.pages)[0]


class MtaDecoderLayer(LlamaDecoderLayer):
    """A decoder layer: attention and a feed-forward network, each after a norm, with residuals."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: MtaConfig | None = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=MtaAttention)


class MtaForCausalLM(LlamaForCausalLM):
    """Serves checkpoints of :class:`mtagen.transformers.MtaForCausalLM`.

    Raises:
        InputError: an option of vLLM is not supported, or queries see later keys.
        SpecError: an option of the model is not legal, or its heads cannot be spread over the ranks.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_config(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=MtaDecoderLayer)
