"""The torch dtypes behind a spec's dtype names (the spec itself knows nothing of torch)."""

from typing import Literal, TypeAlias

import torch

from .errors import SpecError, explain
from .spec import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# Dtypes of all tensor arguments, integers included.
ARGUMENT_DTYPES: dict[str, torch.dtype] = dict(TORCH_DTYPES.items(), int32=torch.int32, int64=torch.int64)
# How users may name a dtype: by the spec's name, by torch's name, or as a dtype of torch.
DTypeLike: TypeAlias = torch.dtype | DType | Literal["bfloat16", "float16", "float32", "float64"]


def dtype_name(argument: str, dtype: DTypeLike) -> DType:
    """The spec's name of a dtype.

    Args:
        argument: what the caller calls it.
        dtype: as it was given.

    Raises:
        SpecError: it is not supported.
    """
    names: dict[object, DType] = {}
    for name, torch_dtype in TORCH_DTYPES.items():
        names |= dict.fromkeys((name, str(torch_dtype).removeprefix("torch."), torch_dtype), name)
    if not isinstance(dtype, (str, torch.dtype)) or dtype not in names:
        legal = f"{', '.join(TORCH_DTYPES)}, or what torch calls them, such as torch.bfloat16 or 'bfloat16'"
        raise SpecError(explain(argument, dtype, "is not supported", legal))
    return names[dtype]
