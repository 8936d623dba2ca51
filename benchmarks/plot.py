"""A plot of lines as SVG: logarithmic to the right, linear upwards, a legend; nothing but text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 860, 470
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 600, 50, 420
_COLOURS = ("#1b6ca8", "#c1440e", "#2e7d32", "#6a1b9a", "#5d4037")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the plot.

    :ivar points: x above 0, and y; in the order of x.
    :ivar group: lines of one group have one colour.
    """

    title: str
    points: Sequence[tuple[float, float]]
    group: str
    dashed: bool = False


def draw(title: str, subtitle: str, lines: Sequence[Line]) -> str:
    """The plot as the text of an SVG file.

    :param subtitle: what it was measured on.
    """
    scale = _Scale([point for line in lines for point in line.points])
    groups = list(dict.fromkeys(line.group for line in lines))
    colours = {group: _COLOURS[number % len(_COLOURS)] for number, group in enumerate(groups)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 22, title, size=15),
        _text(_LEFT, 40, subtitle, size=11),
        *_axes(scale),
    ]
    for number, line in enumerate(lines):
        parts += _line(scale, line, colours[line.group], _TOP + 16 + 22 * number)
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """From values to places in the picture; whole decades to the right, from zero upwards."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        xs = [x for x, _ in points] or [1.0]
        self.first = math.floor(math.log10(min(xs)))
        self.last = max(self.first + 1, math.ceil(math.log10(max(xs))))
        highest = max([y for _, y in points], default=0.0) or 1.0
        self.step = _round_step(highest / 6)
        self.top = self.step * math.ceil(highest / self.step)

    def x(self, value: float) -> float:
        """Where a value is, from the left."""
        return _LEFT + (math.log10(value) - self.first) / (self.last - self.first) * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        """Where a value is, from the top; what is below zero, an artefact of noise, is drawn at zero."""
        return _BOTTOM - max(0.0, value) / self.top * (_BOTTOM - _TOP)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, ..."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _axes(scale: _Scale) -> Iterator[str]:
    for exponent in range(scale.first, scale.last + 1):
        x = scale.x(10.0**exponent)
        yield f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="#ddd"/>'
        yield _text(x, _BOTTOM + 18, f"{10**exponent:,}", anchor="middle")
    for number in range(round(scale.top / scale.step) + 1):
        y = scale.y(number * scale.step)
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#ddd"/>'
        yield _text(_LEFT - 6, y + 4, f"{number * scale.step:g}", anchor="end")


def _line(scale: _Scale, line: Line, colour: str, legend: int) -> Iterator[str]:
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    style = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}'
    places = [(scale.x(x), scale.y(y)) for x, y in line.points]
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" {style}/>'
    for x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
    yield f'<path d="M{_RIGHT + 14} {legend}h28" {style}/>'
    yield _text(_RIGHT + 48, legend + 4, line.title)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#222">{escape(text)}</text>'
