"""Decoders of transformers whose attention is :class:`mtagen.nn.MultiTokenAttention`.

Importing this package registers them: ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM`` then know the model
type ``mtagen``. It needs the extra ``mtagen[transformers]``; nothing else of mtagen imports transformers.
"""

from importlib.util import find_spec

from ..errors import explain

if find_spec("transformers") is None:
    _rule, _legal = "mtagen.transformers is made of its classes", "pip install 'mtagen[transformers]'"
    raise ModuleNotFoundError(explain("transformers", None, _rule, _legal), name="transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import MtaCache
from .configuration import MtaConfig
from .modeling import MtaForCausalLM, MtaModel, MtaPreTrainedModel
from .retrofit import retrofit

AutoConfig.register(MtaConfig.model_type, MtaConfig)
AutoModel.register(MtaConfig, MtaModel)
AutoModelForCausalLM.register(MtaConfig, MtaForCausalLM)

__all__ = ["MtaCache", "MtaConfig", "MtaForCausalLM", "MtaModel", "MtaPreTrainedModel", "retrofit"]
