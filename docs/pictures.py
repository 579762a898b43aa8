"""Draw the pictures of the mathematics from values of the planner: ``python docs/pictures.py`` writes docs/pictures.

The script asks the values that kernels are printed from: which scores are hidden, corrected, skipped, loaded and owned.
So a picture shows what a kernel does. Pictures are SVG, written here rectangle by rectangle, equal on every machine.
A test compares the files with a new drawing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

from sympy import Expr, Integer

from mtagen import Plan, Spec, plan
from mtagen.expressions import t5
from mtagen.expressions.language import KEY, POSITION, Load, read
from mtagen.expressions.parameters import read_parameters
from mtagen.planner.geometry.affine import N_K, N_Q
from mtagen.planner.geometry.loops import BLOCK_M, BLOCK_N, I0, J0, OFF, Loop, key_loop, row_loop
from mtagen.planner.geometry.mask import Mask
from mtagen.planner.geometry.stencil import Stencil
from mtagen.planner.lift.band import bands
from mtagen.planner.tile.backward import TileBackward
from mtagen.planner.tile.forward import TileForward

FOLDER = Path(__file__).parent / "pictures"
KERNEL = (6, 11)
OWN, COUNTED, SEEN, DROPPED, EDGE, HIDDEN = "#1f4e8c", "#8db8e2", "#e3edf7", "#e8743b", "#f6c79b", "#d5d5d5"
INK, LINE, PAPER = "#222222", "#ffffff", "#fbfbfb"
_COMPARE = {"<": operator.lt, ">": operator.gt, ">=": operator.ge}


class Drawing:
    """Rectangles, lines and text in pixels."""

    def __init__(self, width: float, height: float) -> None:
        self._size = width, height
        self._elements: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = LINE, thick: float = 1
    ) -> None:
        """A rectangle, with its upper left corner at (x, y)."""
        stroke = "" if (edge, thick) == (LINE, 1) else f' stroke="{edge}" stroke-width="{thick:g}"'
        self._add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{stroke}/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, edge: str = INK) -> None:
        """A dashed line."""
        dash = 'stroke-width="1" stroke-dasharray="4 3"'
        self._add(f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{edge}" {dash}/>')

    def curve(self, points: Iterable[tuple[float, float]], edge: str) -> None:
        """Lines from point to point."""
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add(f'<polyline points="{at}" fill="none" stroke="{edge}" stroke-width="1.5"/>')

    def text(self, x: float, y: float, text: str, *, size: float = 12, at: str = "start", fill: str = INK) -> None:
        """A line of text on the baseline y, which starts, has its middle or ends at x."""
        style = f'font-size="{size:g}" text-anchor="{at}" fill="{fill}" stroke="none"'
        self._add(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def legend(self, x: float, y: float, entries: Mapping[str, str]) -> None:
        """What colours mean, one below the other."""
        for row, (meaning, colour) in enumerate(entries.items()):
            self.box(x, y + 18 * row, 12, 12, colour, INK, 0.5)
            self.text(x + 18, y + 18 * row + 10, meaning, size=11)

    def _add(self, element: str) -> None:
        self._elements.append(element)

    def __str__(self) -> str:
        width, height = self._size
        box = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif">'
        paper = f'<rect width="{width:g}" height="{height:g}" rx="6" fill="{PAPER}"/>'
        return "\n".join([head, paper, f'<g stroke="{LINE}">', *self._elements, "</g></svg>\n"])


def sees(mask: Mask, position: int, key: int) -> bool:
    """Whether the query at a position sees a key, by the comparisons that kernels are printed from."""
    comparisons = mask.hidden((position, position), (key, key), n_k=None)
    return not any(_COMPARE[sign](left, right) for left, sign, right in comparisons)


def window() -> Drawing:
    """The scores that one convolved score reads next to the diagonal, by either rule of which count."""
    cell, first_key, keys, rows, at = 19, -9, 15, 8, -2  # the output row's position is 0, its key is ``at``
    drawing = Drawing(2 * (keys * cell + 60) + 10, rows * cell + 150)
    for panel, rule in enumerate(("source", "output")):
        spec = Spec(KERNEL, 64, mask=rule)
        mask, stencil = Mask.of(spec), Stencil.forward(spec.cq, spec.pad_left, spec.pad_right)
        left, top = 44 + panel * (keys * cell + 60), 44
        drawing.text(left, 20, f'mask="{rule}"', size=14)
        for position in range(2 - rows, 2):
            name = "i" if position == 0 else f"i{position:+d}".replace("-", "\N{MINUS SIGN}")
            drawing.text(left - 6, top + (position + rows - 2) * cell + 13, name, size=11, at="end")
            for key in range(first_key, first_key + keys):
                read = stencil.rows[0] <= position <= stencil.rows[1] and stencil.cols[0] <= key - at <= stencil.cols[1]
                counts = sees(mask, position if mask.zeroes_scores else 0, key)
                own = position == 0 and key == at
                seen = SEEN if sees(mask, position, key) else HIDDEN
                colour = OWN if own else seen if not read else COUNTED if counts else DROPPED
                drawing.box(left + (key - first_key) * cell, top + (position + rows - 2) * cell, cell, cell, colour)
        drawing.text(left + (at - first_key + 0.5) * cell, top - 6, "j", size=11, at="middle")
    meanings = {
        "the score of query i and key j, which the convolution replaces": OWN,
        "scores that it adds to it, 6 queries by 11 keys, each times its weight": COUNTED,
        "scores in the window that count as zero": DROPPED,
        "scores that their row sees and this window does not read": SEEN,
        "hidden by the causal mask": HIDDEN,
    }
    drawing.legend(44, 44 + rows * cell + 12, meanings)
    return drawing


def band() -> Drawing:
    """The diagonals on which scores are summed anew instead of lifted, of a causal mask and of a window."""
    cell, length = 17, 24
    drawing = Drawing(2 * (length * cell + 40) + 10, length * cell + 130)
    for panel, left_limit in enumerate((-1, 16)):
        spec = Spec(KERNEL, 64, window=(left_limit, -1))
        mask, edges = Mask.of(spec), bands(spec)
        left, top = 30 + panel * (length * cell + 40), 34
        widths = " and ".join(str(edge.width) for edge in edges)
        kind = "causal" if left_limit < 0 else f"window=({left_limit}, 0)"
        drawing.text(left, 20, f"{kind}: {widths} diagonals are summed anew", size=14)
        for position in range(length):
            for key in range(length):
                colour, number = SEEN if sees(mask, position, key) else HIDDEN, ""
                for edge in edges:
                    delta = edge.diagonal(position, key)
                    if 0 <= delta < edge.width and sees(mask, position, key):
                        colour, number = EDGE, str(delta)
                    elif edge.width <= delta < edge.first + edge.reach and sees(mask, position, key):
                        colour = COUNTED
                x, y = left + key * cell, top + position * cell
                drawing.box(x, y, cell, cell, colour)
                if number:
                    drawing.text(x + cell / 2, y + 12, number, size=9, at="middle")
    meanings = {
        "interior: the lifted score is the convolved score": SEEN,
        "the band, by delta: a score is the sum of the terms that count": EDGE,
        "more scores that are such terms": COUNTED,
        "hidden, and no part of any score": HIDDEN,
    }
    drawing.legend(30, 34 + length * cell + 12, meanings)
    return drawing


def values(loop: Loop, **sizes: int) -> tuple[int, ...]:
    """The bounds of a loop for numbers of queries and keys, blocks, and the first row or key of the owned block."""
    n_q, n_k, start = sizes["n_q"], sizes["n_k"], sizes["start"]
    numbers: dict[Expr, int] = {N_Q: n_q, N_K: n_k, OFF: n_k - n_q, I0: start, J0: start}
    numbers |= {BLOCK_M: sizes["block_m"], BLOCK_N: sizes["block_n"]}
    return tuple(int(bound.subs(numbers)) for bound in loop)


def loops() -> Drawing:
    """Which tiles CTAs skip, take as they are, and check pair by pair; and the bounds of one CTA's loop."""
    length, block, cell = 1000, 128, 30
    count = -(-length // block)
    drawing = Drawing(3 * (count * cell + 76) + 10, count * cell + 164)
    causal, windowed = Spec(KERNEL, 64), Spec(KERNEL, 64, window=(400, 0))
    width = bands(causal)[0].width
    panels = (
        ("causal, forward", causal, key_loop, 4),
        ("window=(400, 0), forward", windowed, key_loop, 5),
        ("causal, backward", causal, row_loop, 3),
    )
    sizes = {"n_q": length, "n_k": length, "block_m": block, "block_n": block}
    for panel, (title, spec, make, marked) in enumerate(panels):
        mask, by_rows = Mask.of(spec), make is key_loop
        loop = make(mask, band=width)
        left, top = 30 + panel * (count * cell + 76), 40
        drawing.text(left, 20, title, size=14)
        drawing.box(left, top, count * cell, count * cell, HIDDEN)
        for owner in range(count):
            begin, first, last, end = values(loop, start=owner * block, **sizes)
            for tile in range(count):
                at = tile * block
                colour = HIDDEN if not begin <= at < end else COUNTED if first <= at < last else EDGE
                row, column = (owner, tile) if by_rows else (tile, owner)
                drawing.box(left + column * cell, top + row * cell, cell, cell, colour)
        x, y = (left, top + marked * cell) if by_rows else (left + marked * cell, top)
        across, down = (count * cell, cell) if by_rows else (cell, count * cell)
        drawing.box(x, y, across, down, "none", INK, 2)
        begin, first, last, end = values(loop, start=marked * block, **sizes)
        axis, owned = ("keys", "rows") if by_rows else ("rows", "keys")
        drawing.text(
            left, top + count * cell + 18, f"CTA of {owned} {marked * block}..{marked * block + block - 1}:", size=11
        )
        segments = [f"{begin}..{first} edge", f"{first}..{last} interior", f"{last}..{end} edge"]
        bounds = [begin, first, last, end]
        shown = ", ".join(text for text, a, b in zip(segments, bounds, bounds[1:], strict=False) if a < b)
        drawing.text(left, top + count * cell + 34, f"{axis} {shown}", size=11)
    meanings = {
        f"interior tile of {block} x {block}: neither mask nor band": COUNTED,
        f"edge tile: each pair is checked; {width} diagonals are summed anew": EDGE,
        "skipped: no pair is seen": HIDDEN,
    }
    drawing.legend(30, 40 + count * cell + 56, meanings)
    return drawing


def tiles() -> Drawing:
    """What a CTA of the fused CUDA kernels computes and what it owns."""
    made: Plan = plan(Spec(KERNEL, 64), target="sm_90a", backend="cuda")
    forward, backward = made["forward"], made["backward"]
    assert isinstance(forward, TileForward)
    assert isinstance(backward, TileBackward)
    drawing = Drawing(860, 390)
    _draw_forward(drawing, forward, 40, 60)
    _draw_backward(drawing, backward, 460, 60)
    return drawing


def _draw_forward(drawing: Drawing, tile: TileForward, left: float, top: float) -> None:
    """Steps of a CTA: tiles of scores, and the outputs that lag behind them."""
    scale, high, steps = 1.7, 1.1, 3
    drawing.text(left, top - 40, "forward: a CTA owns rows", size=14)
    extents = f"{tile.geometry.rows} rows of scores, {tile.geometry.owned} of outputs; {tile.keys} keys a step"
    drawing.text(left, top - 24, extents, size=11)
    x, width, halo = (
        left + tile.toeplitz.carry * scale,
        tile.keys * scale,
        4 * tile.geometry.halo * high,
    )  # drawn four times as high
    height = tile.geometry.rows * high
    for step in range(steps):
        drawing.box(x + step * width, top, width, height, COUNTED if step == 1 else SEEN, INK, 0.5)
        drawing.text(x + (step + 0.5) * width, top - 6, f"keys of step {step}", size=10, at="middle")
    drawing.box(x, top, steps * width, halo, EDGE, INK, 0.5)
    drawing.text(x + 2 * width + 4, top + halo - 7, f"{tile.geometry.halo} halo rows", size=10)
    carried = x + width - tile.toeplitz.carry * scale
    drawing.box(carried, top, tile.toeplitz.carry * scale, height, DROPPED, INK, 0.5)
    begin = x + width - tile.geometry.lag * scale
    drawing.box(begin, top + halo, width, height - halo, "none", OWN, 3)
    drawing.text(begin + width / 2, top + height / 2 + 10, "outputs", size=11, at="middle", fill=OWN)
    drawing.text(begin + width / 2, top + height / 2 + 24, "of step 1", size=11, at="middle", fill=OWN)
    below = top + height
    drawing.legend(
        left,
        below + 14,
        {
            f"scores of step 1, as fp16 in a slab of {tile.toeplitz.carry} + {tile.keys} columns": COUNTED,
            f"{tile.toeplitz.carry} columns carried over from step 0": DROPPED,
            f"halo: {tile.geometry.halo} rows, drawn higher, that the CTA above computes, too": EDGE,
            f"outputs of step 1 lag its keys by {tile.geometry.lag}; each reads {tile.spec.ck} columns": OWN,
        },
    )


def _draw_backward(drawing: Drawing, tile: TileBackward, left: float, top: float) -> None:
    """Neighbouring CTAs: columns of their slabs and the keys they own."""
    scale, height = 0.9, 60
    drawing.text(left, top - 40, "backward: a CTA owns keys", size=14)
    extents = f"{tile.keys} columns of scores, {tile.geometry.owned} keys; {tile.rows} rows a step"
    drawing.text(left, top - 24, extents, size=11)
    for number in range(2):
        x, y = left + number * tile.geometry.owned * scale, top + number * (height + 8)
        drawing.box(x, y, tile.keys * scale, height, EDGE, INK, 0.5)
        drawing.box(x + tile.spec.pad_left * scale, y, tile.geometry.owned * scale, height, COUNTED, INK, 0.5)
        drawing.text(x + tile.keys * scale / 2, y + 26, f"CTA {number}", size=11, at="middle")
        drawing.text(x + tile.keys * scale / 2, y + 42, f"{tile.geometry.owned} keys owned", size=11, at="middle")
        for border in (tile.spec.pad_left, tile.spec.pad_left + tile.geometry.owned):
            drawing.line(x + border * scale, top - 8, x + border * scale, top + 2 * height + 18)
    below = top + 2 * (height + 8) + 24
    drawing.text(left, below, f"A step of {tile.rows} rows in row tiles of 16:", size=11)
    count, side = tile.geometry.row_tiles, 24
    for row in range(count + 1):
        y = below + 10 + row * side
        drawing.box(left, y, 150, side, SEEN if row == 0 else COUNTED, INK, 0.5)
        drawing.text(
            left + 75,
            y + 16,
            "last row tile before" if row == 0 else f"S, C, G: row tile {row - 1}",
            size=10,
            at="middle",
        )
        if row < count:
            drawing.box(left + 170, y, 150, side, EDGE, INK, 0.5)
            drawing.text(left + 245, y + 16, "dS of these rows", size=10, at="middle")
    end = below + 26 + (count + 1) * side
    drawing.text(left, end, f"Row i of dS reads G up to row i + {tile.spec.cq - 1}, so dS lags by a row tile.", size=11)
    drawing.text(left, end + 16, f"Neighbouring CTAs share {tile.geometry.halo} columns of dS.", size=11)


def expressions() -> Drawing:
    """Draw scores after each named expression, one panel each."""
    drawing, distances = Drawing(680, 210), range(161)
    slopes = {h: [-(2.0 ** -(h + 1)) * d for d in distances] for h in (2, 4, 6)}
    table = read_parameters({"table": "h,32"})
    (load,) = read("logits", t5(), table).atoms(Load)
    buckets = {0: [float(_at(load.indices[1], d)) for d in distances]}
    panels = (
        ("softcap(50)", "score, -150 to 150", {0: [50 * math.tanh(x / 50) for x in range(-150, 151)]}, (-60, 60)),
        ("alibi(8): heads 2, 4, 6", "i - j, 0 to 160", slopes, (-20, 0)),
        ("t5(): the entry of the table", "i - j, 0 to 160", buckets, (0, 32)),
        ("clipped(64): the entry", "i - j, 0 to 160", {0: [float(min(64, d)) for d in distances]}, (0, 66)),
    )
    for number, (title, axis, curves, (low, high)) in enumerate(panels):
        left, top, width, height = 20 + 168 * number, 36, 136, 128
        drawing.text(left, top - 14, title)
        drawing.box(left, top, width, height, PAPER, INK, 0.5)
        for values, colour in zip(curves.values(), (OWN, DROPPED, COUNTED), strict=False):
            ends = [min(max(y, low), high) for y in values]
            step = width / (len(values) - 1)
            drawing.curve(
                ((left + step * x, top + height * (high - y) / (high - low)) for x, y in enumerate(ends)), colour
            )
        drawing.text(left, top + height + 18, axis, size=11)
        drawing.text(left, top + height + 34, f"from {low} to {high}", size=11)
    return drawing


def _at(entry: Expr, distance: int) -> Expr:
    """An integer of places at a distance between the query and the key."""
    return entry.xreplace({POSITION: Integer(distance), KEY: Integer(0)})


def pictures() -> Iterator[tuple[str, Drawing]]:
    """All pictures by their names."""
    yield from (("window", window()), ("band", band()), ("loops", loops()), ("tiles", tiles()))
    yield "expressions", expressions()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in pictures():
        (FOLDER / f"{name}.svg").write_text(str(drawing), encoding="utf-8")
