"""Draw the picture at the head of the README: scores, the window that a convolution reads, heads mixed, softmax.

python docs/overview.py    writes docs/pictures/overview.svg

Which scores are hidden is the planner's mask, and which a window holds its stencil. Shades are values: the pipeline is
computed on made-up scores, by its formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from pictures import FOLDER, sees

from mtagen import Spec
from mtagen.planner.geometry.mask import Mask
from mtagen.planner.geometry.stencil import Stencil

PICTURE = FOLDER / "overview.svg"
SPEC = Spec(kernel=(6, 11), head_dim=64, mixed_heads=4)
MASK, STENCIL = Mask.of(SPEC), Stencil.forward(SPEC.cq, *SPEC.padding(SPEC.ck))
N = 14  # queries and keys
OUT = 11, 7  # the query and the key of the score whose window is shown
OTHERS = 0.12  # of the score of each other head in a mixed one
SHARPNESS = 8  # of the softmax: what scores are multiplied by

CELL = 12  # pixels
SIDE, GAP, LEFT, TOP = N * CELL, 74, 34, 52
WIDTH, HEIGHT = 2 * LEFT + 4 * SIDE + 3 * GAP, TOP + SIDE + 68
STYLE = """\
text { font: 13px system-ui, "DejaVu Sans", sans-serif; text-anchor: middle }
.name { font-weight: 600 } .small { font-size: 11px } .zero { font-size: 9px }
.grid, .window { fill: none } .window { stroke-width: 2 } .line { opacity: 0.6 }
"""
COLOURS = """\
text, .dot {{ fill: {text} }} .line {{ stroke: {text} }} .back {{ fill: {back} }} .grid {{ stroke: {faint} }}
.cell {{ fill: {blue} }} .window, .ray {{ stroke: {orange} }} .zero {{ fill: {orange} }}
"""
LIGHT = COLOURS.format(text="#1f2328", back="#ffffff", faint="#d1d9e0", blue="#0072b2", orange="#d55e00")
DARK = COLOURS.format(text="#e6edf3", back="#0d1117", faint="#3d444d", blue="#56b4e9", orange="#f0883e")

Plane = dict[tuple[int, int], float]  # the scores that are not hidden, by query and key


def window(i: int, j: int) -> list[tuple[int, int]]:
    """The queries and keys whose scores enter the convolved score of query ``i`` and key ``j``."""
    (first_row, last_row), (first_col, last_col) = (map(int, ends) for ends in (STENCIL.rows, STENCIL.cols))
    return [(i + r, j + c) for r in range(first_row, last_row + 1) for c in range(first_col, last_col + 1)]


def plane(value: Callable[[int, int], float]) -> Plane:
    return {(i, j): value(i, j) for i in range(N) for j in range(N) if sees(MASK, i, j)}


def made_up(head: int) -> Plane:
    """Scores from 0 to 1 that look random and are the same everywhere."""
    return plane(lambda i, j: math.sin(12.9898 * i + 78.233 * j + 37.719 * head) * 4375.8545 % 1)


def convolved(scores: Plane) -> Plane:
    """Weights fall off from the score's own place; hidden scores count as zeros."""

    def value(i: int, j: int) -> float:
        weights = {(r, c): math.exp(-((i - r) ** 2 + (j - c) ** 2) / 2) for r, c in window(i, j)}
        return sum(weight * scores.get(at, 0) for at, weight in weights.items()) / sum(weights.values())

    return plane(value)


def mixed(heads: list[Plane]) -> Plane:
    """The first head's scores and a part of each other's."""
    own, *others = heads
    return {at: own[at] + OTHERS * sum(other[at] for other in others) for at in own}


def softmax(scores: Plane) -> Plane:
    """Of each row, as shares of its largest probability."""
    largest = [max(scores[i, j] for j in range(N) if sees(MASK, i, j)) for i in range(N)]
    return {(i, j): math.exp(SHARPNESS * (score - largest[i])) for (i, j), score in scores.items()}


def rect(kind: str, x: float, y: float, width: float, height: float, more: str = "") -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{more}/>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def text(x: float, y: float, words: str, kind: str = "small") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def corner(place: int, i: int, j: int) -> tuple[float, float]:
    """The upper left corner of a cell of the matrix at a place, which counts from the left."""
    return LEFT + place * (SIDE + GAP) + j * CELL, TOP + i * CELL


def matrix(place: int, values: Plane, name: str, what: str) -> Iterable[str]:
    """A matrix, the darker the greater a value, on two more that stand for other heads."""
    x, y = corner(place, 0, 0)
    for behind in (8, 4, 0):
        yield rect("back", x + behind, y - behind, SIDE, SIDE)
        yield rect("grid", x + behind, y - behind, SIDE, SIDE)
    low, high = min(values.values()), max(values.values())
    for (i, j), value in values.items():
        opacity = 0.08 + 0.92 * (value - low) / (high - low)
        yield rect("cell", *corner(place, i, j), CELL, CELL, f' fill-opacity="{opacity:.2f}"')
    yield text(x + SIDE / 2, y + SIDE + 24, name, "name")
    yield text(x + SIDE / 2, y + SIDE + 42, what)


def convolution() -> Iterable[str]:
    """The window on the scores, zeros where they are hidden, and rays to what it makes."""
    cells = window(*OUT)
    (x, y), (last_x, last_y) = corner(0, *cells[0]), corner(0, *cells[-1])
    width, height = last_x + CELL - x, last_y + CELL - y
    out_x, out_y = corner(1, *OUT)
    yield line("ray", x + width, y, out_x, out_y)
    yield line("ray", x + width, y + height, out_x, out_y + CELL)
    yield rect("window", x, y, width, height)
    yield rect("window", out_x, out_y, CELL, CELL)
    for cell in (cell for cell in cells if not sees(MASK, *cell)):
        zero_x, zero_y = corner(0, *cell)
        yield text(zero_x + CELL / 2, zero_y + CELL - 3, "0", "zero")


def mixture(heads: int) -> Iterable[str]:
    """Each head of a group on each, between the second and the third matrix."""
    left, height = corner(1, 0, N)[0], TOP + SIDE / 2
    first, last = left + 24, left + GAP - 14
    ys = [height + 18 * (head - (heads - 1) / 2) for head in range(heads)]
    for y in ys:
        for other in ys:
            yield line("line", first, y, last, other)
    for y in ys:
        for x in (first, last):
            yield f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="3"/>'
    yield text((first + last) / 2, ys[0] - 16, "mix heads")


def arrow(place: int, label: str) -> Iterable[str]:
    """From a matrix to the next."""
    x, y = corner(place, 0, N)[0], TOP + SIDE / 2
    yield line("line", x + 18, y, x + GAP - 14, y)
    yield f'<path class="dot" d="M{x + GAP - 10:g} {y:g}l-8 -4v8z"/>'
    yield text(x + GAP / 2 + 2, y - 10, label)


def picture() -> str:
    """The SVG."""
    heads = [made_up(head) for head in range(SPEC.mixed_heads or 1)]
    after = [convolved(scores) for scores in heads]
    together = mixed(after)
    x, y = corner(0, 0, 0)
    shapes = [
        rect("back", 0, 0, WIDTH, HEIGHT, ' rx="6"'),
        *matrix(0, heads[0], "scores", "q kᵀ of each head, causal"),
        *matrix(1, after[0], "convolved", f"{SPEC.cq} queries × {SPEC.ck} keys each"),
        *matrix(2, together, "mixed", "over the heads of a group"),
        *matrix(3, softmax(together), "probabilities", "they multiply the values"),
        *convolution(),
        *mixture(len(heads)),
        *arrow(2, "softmax"),
        text(x + SIDE / 2, y - 16, "keys →"),
        f'<text class="small" transform="translate({x - 10:g} {y + SIDE / 2:g}) rotate(-90)">← queries</text>',
    ]
    title = f"Each score becomes a weighted sum of {SPEC.cq} x {SPEC.ck} scores before the softmax; heads are mixed."
    style = f"{STYLE}{LIGHT}@media (prefers-color-scheme: dark) {{\n{DARK}}}\n"
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>\n{style}</style>", *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
