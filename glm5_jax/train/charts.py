"""Small charts as SVG and HTML text: nothing external, colours from the page's CSS, so dark mode works."""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 420, 260  # of a chart's own units; small enough that its letters stay legible on a phone
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 40
TICKS = 5


@dataclasses.dataclass(frozen=True)
class Line:
  """A curve. `style` is a class of the page's CSS: "main" or "faint"."""

  name: str
  points: Sequence[tuple[float, float]]
  style: str = "main"


def nice_ticks(low: float, high: float, count: int = TICKS) -> list[float]:
  """About `count` round numbers, 1, 2 or 5 times a power of ten apart, that enclose low … high."""
  if high <= low:
    high = low + (abs(low) or 1.0)
  raw = (high - low) / count
  magnitude = 10.0 ** math.floor(math.log10(raw))
  step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
  first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
  return [round(i * step, 10) for i in range(first, last + 1)]


def line_chart(
  lines: Sequence[Line],
  x_label: str,
  y_label: str,
  levels: Mapping[str, float] | None = None,
  x_from_zero=True,
) -> str:
  """An SVG of curves over steps, with dashed horizontal `levels` (name → height) to compare with.

  Points must be finite; at least one is needed. A point shows its numbers when the mouse rests on it.
  """
  levels = levels or {}
  xs = [x for line in lines for x, _ in line.points] + ([0.0] if x_from_zero else [])
  ys = [y for line in lines for _, y in line.points] + list(levels.values())
  x_ticks, y_ticks = nice_ticks(min(xs), max(xs)), nice_ticks(min(ys), max(ys))
  x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
  x_ticks = [tick for tick in x_ticks if x_low <= tick <= x_high]
  y_low, y_high = y_ticks[0], y_ticks[-1]

  def at(x: float, y: float) -> tuple[float, float]:
    across = (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
    up = (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
    return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

  parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(y_label)}">']
  for tick in y_ticks:
    _, y = at(x_low, tick)
    parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
  for tick in x_ticks:
    x, _ = at(tick, y_low)
    parts.append(
      f'<text class="tick" x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:,g}</text>'
    )
  middle = (LEFT + WIDTH - RIGHT) / 2
  parts.append(
    f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>'
  )
  above = -math.inf  # where the previous, higher level was drawn
  for name, height in sorted(levels.items(), key=lambda level: -level[1]):
    x, y = at(x_high, height)
    baseline = y - 5 if y - above > 18 else y + 13  # under its line where two levels are close
    above = y
    parts.append(f'<path class="level" d="M{LEFT} {y}H{x}"/>')
    label = html.escape(f"{name} {height:.3f}")
    parts.append(f'<text class="tick" x="{x}" y="{baseline}" text-anchor="end">{label}</text>')
  parts += [_curve(line, at) for line in lines]
  return "".join([*parts, "</svg>"])


def _curve(line: Line, at) -> str:
  places = [at(x, y) for x, y in line.points]
  path = "M" + "L".join(f"{x} {y}" for x, y in places)
  parts = [f'<path class="line {line.style}" d="{path}"/>']
  if line.style == "main":
    for (x, y), (step, value) in zip(places, line.points, strict=True):
      title = html.escape(f"{line.name}, step {step:,g}: {value:.4g}")
      parts.append(f'<circle class="hover" cx="{x}" cy="{y}" r="5"><title>{title}</title></circle>')
    x, y = places[-1]
    parts.append(f'<circle class="last" cx="{x}" cy="{y}" r="3.5"/>')
  return "".join(parts)


def bars(values: Mapping[str, float], highlight: str, form: str, top: float | None = None) -> str:
  """Horizontal bars, one a name; `highlight` names those in the accent colour, `form` formats the numbers."""
  top = top or max(values.values())
  rows = []
  for name, value in values.items():
    kind = "bar accent" if name.startswith(highlight) else "bar"
    rows.append(
      f'<div class="barname">{html.escape(name)}</div>'
      f'<div class="track"><div class="{kind}" style="width:{100 * value / top:.1f}%"></div></div>'
      f'<div class="barvalue">{value:{form}}</div>'
    )
  return f'<div class="bars">{"".join(rows)}</div>'
