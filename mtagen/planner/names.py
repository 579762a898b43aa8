"""Names of kernels and generated modules."""

from __future__ import annotations

from ..spec import EXPRESSIONS, Spec
from .geometry.mask import Mask
from .geometry.score import ScoreStage


def suffix(spec: Spec, target: str) -> str:
    """Return the part of kernel names that tells plans apart, e.g.

    ``cq6_ck11_d128_bf16_causal_sm90a``.
    """
    parts = [f"cq{spec.cq}", f"ck{spec.ck}", f"d{spec.head_dim}"]
    parts += [f"dv{spec.value_head_dim}"] * (spec.value_head_dim != spec.head_dim)
    parts += [spec.dtype, Mask.of(spec).name, *(ScoreStage.of(spec, place).name for place in EXPRESSIONS)]
    parts += [f"pad{spec.key_padding}"] * (spec.key_padding != "both")
    parts += [f"mask{spec.mask}"] * (spec.mask != "source")
    parts += ["sink"] * spec.sink + ["packed"] * spec.packed + ["dropout"] * spec.dropout
    parts += [f"page{spec.page_size}"] * (spec.page_size is not None)
    return "_".join(filter(None, [*parts, other_stages(spec), target.replace("_", "")]))


def other_stages(spec: Spec) -> str:
    """Return the other stages than a convolution before the softmax, e.g.

    ``mix16_post_cq6_ck11_postmix16``.
    """
    parts = [f"mix{spec.mixed_heads}"] * (spec.mixed_heads is not None)
    parts += ["dynamic{}_{}".format(*ranks) for ranks in (spec.dynamic_ranks,) if ranks]
    parts += ["post_cq{}_ck{}".format(*kernel) for kernel in (spec.post_kernel,) if kernel]
    parts += [f"postmix{spec.post_mixed_heads}"] * (spec.post_mixed_heads is not None)
    parts += ["postdynamic{}_{}".format(*ranks) for ranks in (spec.post_dynamic_ranks,) if ranks]
    return "_".join(parts)


def kernel_name(lowering: str, role: str, spec: Spec, target: str) -> str:
    """Return the name of one kernel, e.g. ``mta_tile_fwd_cq6_ck11_d128_bf16_causal_sm90a``."""
    return f"mta_{lowering}_{role}_{suffix(spec, target)}"
