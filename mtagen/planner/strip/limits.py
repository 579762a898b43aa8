"""The numbers by which the host divides the rows of a pass into strips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ...spec import Spec
from ..geometry.mask import Mask
from .documents import TILE, begin_multiple, context_places
from .kernels import CONVOLUTION_ROWS, row_keys
from .stages import Stages

ENOUGH_ROWS = 512  # rows of a sequence from which on a strip takes rows of another sequence, too
# Upper limit of a strip's rows if a window limits keys on both sides. Each row has as many hidden keys in its planes as
# there are other rows. With half as many rows, launches for short windows are expected to take longer than kernels.
WINDOW_ROWS = 1024
# The same if blocks of rows have sums for each key, of gradients of keys' factors or of parameters.
SUMMED_ROWS = 1024
KEY_MULTIPLE = 128  # divisor of the keys of a strip: cuBLAS is slow for odd numbers of keys
_LINE = 128  # elements: least divisor of the pitch of planes


@dataclass(frozen=True)
class Limits:
    """The fields of ``Limits`` in ``templates/host/strips.py``, which says what each means.

    Packed documents are rows of one sequence there, whose context is whole tiles of places.
    """

    context: int
    enough_rows: int
    min_rows: int
    max_rows: int | None
    row_multiple: int
    left: int | None
    right: int | None
    window: int | None
    key_multiple: int
    begin_multiple: int
    pitch_multiple: int
    itemsize: int

    @classmethod
    def of(cls, spec: Spec, most_rows: int | None = None) -> Limits:
        """Return the limits of a request.

        Args:
            spec: the request.
            most_rows: upper limit of the rows of a strip that the kernels take. None is no limit.
        """
        mask, stages = Mask.of(spec), Stages(spec)
        left, right, window = mask.left, mask.right, None
        max_rows = [] if most_rows is None else [most_rows]
        if left is not None and right is not None:
            max_rows.append(WINDOW_ROWS)
            window = left + right + begin_multiple(spec) - 1 if spec.packed else None
        if any(stage.rank for stage in stages.token_mixes) or (spec.scores and spec.parameters):
            max_rows.append(SUMMED_ROWS)
        if spec.packed:
            context, row_multiple = context_places(spec.context), TILE
            min_rows = context + TILE
            left = right = None  # each document counts positions of its own
        else:  # whole tiles, of which at most half are context
            context, row_multiple = spec.context, CONVOLUTION_ROWS
            min_rows = -(-2 * max(context, 1) // row_multiple) * row_multiple
        return cls(
            context=context,
            enough_rows=ENOUGH_ROWS,
            min_rows=min_rows,
            max_rows=min(max_rows, default=None),
            row_multiple=row_multiple,
            left=left,
            right=right,
            window=window,
            key_multiple=KEY_MULTIPLE,
            begin_multiple=begin_multiple(spec),
            # Rows of planes hold whole tiles of keys.
            pitch_multiple=max(_LINE, row_keys(stages.heads), row_keys(stages.post_heads)),
            itemsize=spec.itemsize,
        )

    @property
    def fields(self) -> Mapping[str, int | None]:
        """The fields by name."""
        return asdict(self)
