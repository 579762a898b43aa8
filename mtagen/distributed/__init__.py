"""Training over several processes of torch.distributed."""

from .context_parallel import ContextParallel
from .prediction import Prediction, Rates, predict

__all__ = ["ContextParallel", "Prediction", "Rates", "predict"]
