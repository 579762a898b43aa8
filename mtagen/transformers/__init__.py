"""Models for transformers with multi-token attention: a decoder of its own, and stages in the attention of others.

Importing this package registers them: ``AutoConfig``, ``AutoModel`` and the classes for language models,
classification and question answering then know the model type ``mtagen``, whose attention is
:class:`mtagen.nn.MultiTokenAttention`, and the types of retrofitted models, such as ``mtagen_llama``. It needs the
extra ``mtagen[transformers]``; nothing else of mtagen imports transformers.
"""

from ..errors import explain

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
except ModuleNotFoundError as error:
    _rule, _legal = "mtagen.transformers needs this package", "pip install 'mtagen[transformers]'"
    raise ModuleNotFoundError(explain("import", error.name, _rule, _legal), name=error.name) from error

from .adapters import lora_options
from .cache import MtaCache
from .configuration import MtaConfig
from .modeling import (
    MtaForCausalLM,
    MtaForQuestionAnswering,
    MtaForSequenceClassification,
    MtaForTokenClassification,
    MtaModel,
    MtaPreTrainedModel,
)
from .retrofit import retrofit

AutoConfig.register(MtaConfig.model_type, MtaConfig)
AutoModel.register(MtaConfig, MtaModel)
AutoModelForCausalLM.register(MtaConfig, MtaForCausalLM)
AutoModelForQuestionAnswering.register(MtaConfig, MtaForQuestionAnswering)
AutoModelForSequenceClassification.register(MtaConfig, MtaForSequenceClassification)
AutoModelForTokenClassification.register(MtaConfig, MtaForTokenClassification)

__all__ = [
    "MtaCache",
    "MtaConfig",
    "MtaForCausalLM",
    "MtaForQuestionAnswering",
    "MtaForSequenceClassification",
    "MtaForTokenClassification",
    "MtaModel",
    "MtaPreTrainedModel",
    "lora_options",
    "retrofit",
]
