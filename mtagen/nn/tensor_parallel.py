"""Tensor parallelism: a ``ParallelStyle`` that spreads the layer's heads over ranks."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ..errors import SpecError, explain
from ..expressions.language import counts_heads
from ..expressions.parameters import read_parameters
from .layer import MultiTokenAttention


class HeadParallel(ParallelStyle):
    """The style by which ``parallelize_module`` spreads a layer's heads over a mesh.

    The layer is :class:`mtagen.nn.MultiTokenAttention`. Each of T ranks has H/T heads of queries
    and the Hkv/T heads of keys and values that they see: rows of ``wq``, ``wk`` and ``wv``, columns
    of ``wo``, and the convolutions, mixings, sinks and score parameters of its heads. Every rank
    has the norm, the gate and score parameters without an axis h, because heads share them; their
    gradients are summed over ranks.

    A rank can mix heads only inside the groups that it has, because it does not compute the scores
    of other heads. Spread a layer that mixes all heads by its tokens instead
    (``context_parallel``); the two can be combined.

    Parameters become DTensors; names in state dicts do not change, and FSDP may shard them further.
    A cache for generation holds the heads of its rank.

    Args:
        input_layouts: placement of the layer's input, default ``Replicate()``; after
            ``SequenceParallel``, ``Shard(1)``.
        output_layouts: placement of the layer's output, default ``Replicate()``.
        use_local_output: whether the output is a tensor of this rank instead of a DTensor.

    Raises:
        SpecError: raised when the style is applied: the heads or their groups cannot be divided
            among the ranks; the layer has dropout, whose mask depends on a head's place in the
            call, or an expression that reads h otherwise than as the index of an axis h; or the
            module is no such layer.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Spread the layer; ``parallelize_module`` calls this."""
        layer, ranks = _checked(module, device_mesh), device_mesh.size()

        def spread(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
            x = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=self.src_data_rank)
            return nn.Parameter(x, parameter.requires_grad)

        projections: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
        output = RowwiseParallel(output_layouts=self.output_layouts, use_local_output=self.use_local_output)
        parallelize_module(layer, device_mesh, {**projections, "wo": output}, src_data_rank=self.src_data_rank)
        split = per_head(layer)
        parts = (layer, layer.wpsm, layer.wposm, layer.score_parameters, layer.subln, layer.gate)
        for part in filter(None, parts):
            for name, parameter in [*part.named_parameters(recurse=False)]:
                part.register_parameter(name, spread(parameter, Shard(0) if (part, name) in split else Replicate()))
        layer.n_local_heads, layer.n_local_kv_heads = layer.n_heads // ranks, layer.n_kv_heads // ranks
        # The projections share one transfer of the input, and one of its gradient.
        inputs = PrepareModuleInput(input_layouts=self.input_layouts, desired_input_layouts=Replicate())
        return parallelize_module(layer, device_mesh, inputs)


def per_head(layer: MultiTokenAttention) -> list[tuple[nn.Module, str]]:
    """Return the parameters that a layer has for each head, by their module and name. Heads are their first axis.

    Projections are not among them, because ranks split them by styles of their own.
    """
    names = {argument.name for argument in layer.op.plan.spec.learned_arguments if "H" in argument.shape}
    held = [(layer.score_parameters, name) for name in layer.score_parameters if name in names]
    parts = [part for part in (layer, layer.wpsm, layer.wposm) if part is not None]
    return held + [(part, name) for part in parts for name, _ in part.named_parameters(recurse=False)]


def _checked(module: nn.Module, mesh: DeviceMesh) -> MultiTokenAttention:
    """Return the module after checking that it is a layer whose heads can be spread over the mesh.

    Raises:
        SpecError: the module is no such layer, or its heads cannot be spread.
    """
    if not isinstance(module, MultiTokenAttention):
        legal = "mtagen.nn.MultiTokenAttention"
        raise SpecError(
            explain("module", type(module).__name__, "must be the layer whose heads the ranks share", legal)
        )
    if mesh.ndim != 1:
        raise SpecError(
            explain("device_mesh", mesh, "heads can be spread over one dimension of a mesh only", "mesh['tp']")
        )
    check_heads(module, mesh.size())
    return module


def check_heads(layer: MultiTokenAttention, ranks: int) -> None:
    """Check that the heads of a layer can be spread over a number of ranks.

    Raises:
        SpecError: they cannot.
    """
    spec = layer.op.plan.spec
    if spec.ranks:
        got = spec.dynamic_ranks, spec.post_dynamic_ranks
        rule = "heads of a layer whose mixings depend on tokens cannot be spread over ranks"
        legal = "None, or all heads on each rank"
        raise SpecError(explain("dynamic_ranks, post_dynamic_ranks", got, rule, legal))
    if layer.n_kv_heads % ranks:
        rule = f"must be a multiple of the number of ranks, {ranks}"
        raise SpecError(explain("n_kv_heads", layer.n_kv_heads, rule, f"multiples of {ranks}"))
    for name, group in (("mixed_heads", spec.mixed_heads), ("post_mixed_heads", spec.post_mixed_heads)):
        if group is not None and (layer.n_heads // ranks) % group:
            mine = layer.n_heads // ranks
            rule = f"a rank has {mine} heads, and cannot mix them with others"
            legal = f"a divisor of {mine}, or context_parallel=..., which spreads tokens and mixes all heads"
            raise SpecError(explain(name, group, rule, legal))
    parameters = read_parameters(spec.parameters)
    for name, text in spec.expressions:
        if ranks > 1 and counts_heads(text, parameters):
            rule = "reads h, which each rank counts from its own first head"
            legal = "h as the index of an axis h of a parameter, or all heads on each rank"
            raise SpecError(explain(name, text, rule, legal))
    if layer.dropout and ranks > 1:
        rule = "dropout is not supported where ranks share the heads"
        raise SpecError(explain("dropout", layer.dropout, rule, "0, or all heads on each rank"))
