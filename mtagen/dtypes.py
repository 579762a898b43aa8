"""The torch dtypes behind a spec's dtype names (the spec itself knows nothing of torch)."""

from typing import Literal, TypeAlias

import torch

from .spec import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# How users may name a dtype: by the spec's name, by torch's name, or as a dtype of torch.
DTypeLike: TypeAlias = torch.dtype | DType | Literal["bfloat16", "float16", "float32", "float64"]
