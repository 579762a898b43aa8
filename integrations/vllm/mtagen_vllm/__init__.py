"""A plugin of vLLM that serves models of :mod:`mtagen.transformers`. vLLM finds it by its entry point."""

__all__ = ["BACKEND", "register"]

BACKEND = "MTAGEN"  # its name in vLLM


def register() -> None:
    """Tell vLLM of the model and its attention, which it imports when it needs them.

    vLLM calls this in each of its processes.
    """
    from vllm import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import mtagen.transformers  # noqa: F401  # transformers then knows the configuration

    ModelRegistry.register_model("MtaForCausalLM", "mtagen_vllm.model:MtaForCausalLM")
    if BACKEND not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(BACKEND, "mtagen_vllm.attention.MtaBackend")
