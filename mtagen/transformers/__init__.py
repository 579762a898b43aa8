"""Decoders for transformers whose attention is :class:`mtagen.nn.MultiTokenAttention`.

Importing this package registers them: ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM`` then know the model
type ``mtagen``. It needs the extra ``mtagen[transformers]``; nothing else of mtagen imports transformers.
"""

from ..errors import explain

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ModuleNotFoundError as error:
    _rule, _legal = "mtagen.transformers needs this package", "pip install 'mtagen[transformers]'"
    raise ModuleNotFoundError(explain("import", error.name, _rule, _legal), name=error.name) from error

from .adapters import lora_options
from .cache import MtaCache
from .configuration import MtaConfig
from .modeling import MtaForCausalLM, MtaModel, MtaPreTrainedModel
from .retrofit import retrofit

AutoConfig.register(MtaConfig.model_type, MtaConfig)
AutoModel.register(MtaConfig, MtaModel)
AutoModelForCausalLM.register(MtaConfig, MtaForCausalLM)

__all__ = ["MtaCache", "MtaConfig", "MtaForCausalLM", "MtaModel", "MtaPreTrainedModel", "lora_options", "retrofit"]
