"""A plugin of vLLM that serves models of :mod:`mtagen.transformers`. vLLM finds it by its entry point."""

__all__ = ["register"]


def register() -> None:
    """Tell vLLM of the model and its attention. vLLM calls this in each of its processes."""
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import mtagen.transformers  # noqa: F401  # transformers then knows the configuration

    from .attention import MtaBackend

    ModelRegistry.register_model("MtaForCausalLM", "mtagen_vllm.model:MtaForCausalLM")
    if MtaBackend.get_name() not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(MtaBackend.get_name(), f"{MtaBackend.__module__}.{MtaBackend.__qualname__}")
