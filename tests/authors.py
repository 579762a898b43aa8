"""The layer of the authors' code (facebookresearch/RAM, ``projects/mta``), step by step on whole scores.

It shares no code with ``mtagen.nn``. Options are those of :class:`mtagen.nn.MultiTokenAttention`; ``head_dim`` is 16 by
default.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtagen.accuracy import GRADIENT_FACTOR, OUTPUT_FACTOR, compare
from mtagen.nn import FrequencyScaling


def head_dim(options: dict[str, Any]) -> int:
    return options.get("head_dim", 16)


def random_state(options: dict[str, Any], heads: int, dim: int) -> dict[str, Tensor]:
    """Random parameters with the names and shapes of the authors' layer, float64."""
    d, kv_heads = head_dim(options), options.get("n_kv_heads", heads)
    shapes: dict[str, tuple[int, ...]] = {
        "wq.weight": (heads * d, dim),
        "wk.weight": (kv_heads * d, dim),
        "wv.weight": (kv_heads * d, dim),
        "wo.weight": (dim, heads * d),
    }
    if options["kernel"]:
        shapes["mta_kernel"] = (heads, 1, *options["kernel"])
    if options.get("mixed_heads") == heads:
        shapes["wpsm.weight"] = (heads, heads)
    elif m := options.get("mixed_heads"):
        shapes["wpsm.weight"] = (heads // m, m, m)
    if options.get("post_kernel"):
        shapes["mta_kernel_after_sm"] = (heads, 1, *options["post_kernel"])
    if options.get("post_mixed_heads") == heads:
        shapes["wposm.weight"] = (heads, heads)
    elif m := options.get("post_mixed_heads"):
        shapes["head_kernel"] = (heads // m, m, m)
    if options.get("group_norm"):
        shapes["subln.weight"] = (d,)
    if options.get("gate"):
        outputs = 1 if options["gate"] == "scalar" else d
        shapes |= {"gate.weight": (outputs, d), "gate.bias": (outputs,)}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / math.prod(shape[1:]) ** 0.5
        for name, shape in shapes.items()
    }


def lowered(frequency: float, scaling: FrequencyScaling) -> float:
    """One frequency scaled, as Llama 3.1 does by its wavelength; their layer has no such option."""
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    if low is None or high is None or length is None:
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / scaling.factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def turned(x: Tensor, positions: Tensor, theta: float, scaling: FrequencyScaling | None) -> Tensor:
    """Interleaved rotary embedding of (B, heads, N, D), by complex numbers."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    exponents = torch.arange(0, x.shape[-1], 2, dtype=wide.dtype, device=x.device) / x.shape[-1]
    frequencies = 1 / theta**exponents
    if scaling is not None:
        frequencies = frequencies.new_tensor([lowered(x, scaling) for x in frequencies.tolist()])
    angles = positions.to(wide.dtype)[..., None] * frequencies
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    if angles.ndim == 3:
        angles = angles[:, None]
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x.dtype)


def convolved(scores: Tensor, kernel: Tensor, hidden: Tensor, key_padding: str) -> Tensor:
    cq, ck = kernel.shape[2:]
    sides = {"both": (ck // 2, ck // 2), "left": (ck - 1, 0), "right": (0, ck - 1)}[key_padding]
    padded = F.pad(torch.where(hidden, 0.0, scores), (*sides, cq - 1, 0))
    return F.conv2d(padded, kernel.to(scores.dtype), groups=scores.shape[1])


def layer(
    state: dict[str, Tensor],
    x: Tensor,
    options: dict[str, Any],
    *,
    positions: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Out (B, N, dim) of x (B, N, dim) with these parameters; ``kept`` are the shares that dropout keeps."""
    d, n = head_dim(options), x.shape[1]
    heads, places = len(state["wq.weight"]) // d, torch.arange(n, device=x.device)
    q, k, v = (F.linear(x, state[f"w{name}.weight"]).unflatten(-1, (-1, d)).transpose(1, 2) for name in "qkv")
    theta = options.get("rope_theta", 100000.0)
    if theta is not None:
        positions = places if positions is None else positions
        q, k = (turned(y, positions, theta, options.get("frequency_scaling")) for y in (q, k))
    k, v = (y.repeat_interleave(heads // y.shape[1], 1) for y in (k, v))
    scores = q @ k.mT * d**-0.5
    ahead = places - places[:, None]
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("causal", True) else right
    hidden = ((ahead < -left) & (left >= 0)) | ((ahead > right) & (right >= 0))
    if "mta_kernel" in state:
        scores = convolved(scores, state["mta_kernel"], hidden, options.get("key_padding", "both"))
    if "wpsm.weight" in state:
        matrices = state["wpsm.weight"]
        scores = torch.einsum("oh,bhqk->boqk", torch.block_diag(*matrices.reshape(-1, *matrices.shape[-2:])), scores)
    masked = scores + torch.where(hidden, -torch.inf, 0.0)
    shares = masked.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(q.dtype)
    if "mta_kernel_after_sm" in state:
        shares = convolved(shares, state["mta_kernel_after_sm"], hidden, options.get("key_padding", "both"))
        shares = torch.where(hidden, 0.0, shares)
    if "head_kernel" in state:
        groups = shares.unflatten(1, state["head_kernel"].shape[:2])
        shares = torch.einsum("bgcqk,gco->bgoqk", groups, state["head_kernel"]).flatten(1, 2)
    if "wposm.weight" in state:
        shares = torch.einsum("oh,bhqk->boqk", state["wposm.weight"], shares)
    if kept is not None:
        shares = shares * kept / (1 - options["dropout"])
    out = shares.to(v.dtype) @ v
    if "subln.weight" in state:
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        out = (wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-5)).to(out.dtype) * state["subln.weight"]
        if options.get("depth_rescale") is not None:
            out = out * (1 - (0.8 - 0.6 * math.exp(-0.3 * options["depth_rescale"])))
    if "gate.weight" in state:
        out = out * torch.sigmoid(F.linear(out, state["gate.weight"], state["gate.bias"]))
    return F.linear(out.transpose(1, 2).flatten(2), state["wo.weight"])


def train(state: dict[str, Tensor], x: Tensor, options: dict[str, Any], **arguments: Any) -> dict[str, Tensor]:
    """Out and the gradients of x and of all parameters."""
    leaves = {"x": x.clone().requires_grad_()} | {name: y.clone().requires_grad_() for name, y in state.items()}
    parameters = {name: leaves[name] for name in state}
    out = layer(parameters, leaves["x"], options, **arguments)
    grads = torch.autograd.grad(out.square().sum(), [*leaves.values()])
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def failures(ours: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> list[str]:
    """Results of ``ours``, as :func:`train` returns them, that break the accuracy rule, a line each.

    A scalar gate has one bias, of which eager's error is often small by luck: it is judged together with the weight.
    """
    ours, eager, exact = (_with_gate_as_one(results) for results in (ours, eager, exact))
    judged = {
        name: compare(ours[name], eager[name], exact[name], factor=OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR)
        for name in ours
    }
    return [f"{name}: {x.error:.3g} > {x.allowed:.3g}" for name, x in judged.items() if not x.ok]


def _with_gate_as_one(results: dict[str, Tensor]) -> dict[str, Tensor]:
    gate = [x.flatten() for name, x in results.items() if name.startswith("gate.")]
    others = {name: x for name, x in results.items() if not name.startswith("gate.")}
    return others | {"gate": torch.cat(gate)} if gate else others
