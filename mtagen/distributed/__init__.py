"""Training over several processes of torch.distributed."""

from .context_parallel import ContextParallel

__all__ = ["ContextParallel"]
