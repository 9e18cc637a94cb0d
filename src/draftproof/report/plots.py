"""Small inline SVG charts: no script, no network, no font of their own.

Colours and line styles come from the page's style sheet through classes (`tone-0`, `tone-1`, ...), so that a
chart follows the light and the dark scheme. Every string is escaped. Coordinates are those of a 420 x 250
view box, which a page scales to the width it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 22, 46
"""Room for the tick labels and the axis labels, in view box units."""


@dataclass(frozen=True)
class Series:
    """One line of a chart, or one bar of each group."""

    name: str
    points: tuple[tuple[float, float], ...]
    """(x, y); for bars x is the index of the group."""


@dataclass(frozen=True)
class Chart:
    """A drawn chart with what a page needs around it."""

    title: str
    svg: Markup
    legend: tuple[str, ...]
    """Series names; the i-th is drawn in tone i."""
    x_label: str
    rows: tuple[tuple[str, ...], ...]
    """The numbers as text, one row an x: for those who do not see the picture."""


def line_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, mark: tuple[float, str] | None = None) -> Chart:
    """Lines over a common x axis; `mark` is an x with a word, drawn as a dashed vertical line."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    frame = _Frame.around(xs, ys)
    parts = [frame.axes(x_label, y_label)]
    if mark is not None:
        x, word = frame.x(mark[0]), escape(mark[1])
        anchor = "end" if x > WIDTH * 0.7 else "start"
        shift = -5 if anchor == "end" else 5
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="note" x="{x + shift:.1f}" y="{HEIGHT - BOTTOM - 7}" text-anchor="{anchor}">{word}</text>')
    for tone, line in enumerate(series):
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        if len(line.points) > 1:
            parts.append(f'<polyline class="line tone-{tone}" points="{path}"/>')
        if len(line.points) <= 12:
            parts += [f'<circle class="dot tone-{tone}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>' for x, y in line.points]
    return Chart(title, _svg(title, parts), tuple(line.name for line in series), x_label, _rows(series))


def bar_chart(
    title: str, groups: Sequence[str], series: Sequence[Series], *, x_label: str, y_label: str, top: float | None = None
) -> Chart:
    """Groups of bars side by side, each with its value above it; y starts at 0 and ends at `top` or above the highest."""
    ys = [y for bar in series for _, y in bar.points]
    frame = _Frame.around([-0.5, len(groups) - 0.5], [0.0, top if top is not None else max(ys, default=1.0)])
    parts = [frame.axes(x_label, y_label, x_ticks=[(float(i), name) for i, name in enumerate(groups)])]
    slot = 0.74 / max(len(series), 1)
    width = frame.x(slot) - frame.x(0.0)
    for tone, bar in enumerate(series):
        for x, y in bar.points:
            left = frame.x(x - 0.37 + tone * slot)
            height = frame.y(0.0) - frame.y(y)
            parts.append(
                f'<rect class="bar tone-{tone}" x="{left + 1:.1f}" y="{frame.y(y):.1f}" '
                f'width="{max(width - 2, 1):.1f}" height="{max(height, 0):.1f}"/>'
            )
            if width >= 24:
                parts.append(
                    f'<text class="note" x="{left + width / 2:.1f}" y="{frame.y(y) - 4:.1f}" text-anchor="middle">{_plain(y)}</text>'
                )
    return Chart(title, _svg(title, parts), tuple(bar.name for bar in series), x_label, _rows(series, groups))


def thin(points: Sequence[tuple[float, float]], most: int = 200) -> tuple[tuple[float, float], ...]:
    """At most `most` points: neighbours are averaged, so that a long, noisy curve stays small and readable."""
    if len(points) <= most:
        return tuple(points)
    size = math.ceil(len(points) / most)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((group[-1][0], sum(y for _, y in group) / len(group)) for group in groups)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover `low` to `high`, about `count` of them."""
    if not high > low:
        low, high = (low - 0.5, low + 0.5)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


@dataclass(frozen=True)
class _Frame:
    """Data coordinates to view box coordinates."""

    x_ticks: list[float]
    y_ticks: list[float]
    x_low: float
    x_high: float

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> _Frame:
        x_low, x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
        if x_low == x_high:
            x_low, x_high = x_low - 0.5, x_high + 0.5
        inside = [x for x in ticks(x_low, x_high) if x_low <= x <= x_high]
        return cls(inside, ticks(min(ys), max(ys)) if ys else [0.0, 1.0], x_low, x_high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, y_label: str, x_ticks: Sequence[tuple[float, str]] | None = None) -> str:
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{_plain(value)}</text>')
        for value, name in x_ticks if x_ticks is not None else [(x, _plain(x)) for x in self.x_ticks]:
            parts.append(
                f'<text class="tick" x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{escape(name)}</text>'
            )
        base = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        parts.append(f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x_label)}</text>')
        parts.append(f'<text class="label" x="2" y="11">{escape(y_label)}</text>')
        return "".join(parts)


def _svg(title: str, parts: Sequence[str]) -> Markup:
    name = escape(title)
    return Markup(  # noqa: S704  every string in `parts` went through escape
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}"><title>{name}</title>{"".join(parts)}</svg>'
    )


def _rows(series: Sequence[Series], groups: Sequence[str] | None = None, most: int = 24) -> tuple[tuple[str, ...], ...]:
    """One row for each x of any series, evenly thinned to about `most`."""
    xs = sorted({x for line in series for x, _ in line.points})
    kept = xs[:: max(1, math.ceil(len(xs) / most))]
    if xs and kept[-1] != xs[-1]:
        kept.append(xs[-1])
    values = [dict(line.points) for line in series]
    return tuple((groups[int(x)] if groups is not None else _plain(x), *(_plain(v[x]) if x in v else "" for v in values)) for x in kept)


def _plain(value: float) -> str:
    """Short, without an exponent where it can be helped: 0.25, 1,200, 3."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.1g}"
    return f"{value:.3f}".rstrip("0").rstrip(".")
