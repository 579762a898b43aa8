"""The torch dtypes behind a spec's dtype names (the spec itself knows nothing of torch)."""

import torch

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
