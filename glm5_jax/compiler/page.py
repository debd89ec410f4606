"""A report as one HTML file: nothing external, follows the reader's light or dark setting."""

import html
from collections.abc import Iterable, Sequence

from glm5_jax.compiler.cost import TOP
from glm5_jax.compiler.explain import short_path
from glm5_jax.compiler.report import Report, heading, headline, memory_rows
from glm5_jax.compiler.text import si, size

# (name, value, its text, what the mouse is told)
Row = tuple[str, float, str, str]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --faint: #667080; --paper: #fff; --track: #e9ecf1;
  --bar: #2f6fde; --warn: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ef; --faint: #98a2b3; --paper: #14181f; --track: #262d38;
    --bar: #6ea1ff; --warn: #fb923c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p, li { color: var(--faint); } p { margin: 0 0 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.5rem; margin: 1rem 0; }
dt { color: var(--faint); } dd { margin: 0; font-variant-numeric: tabular-nums; }
.bars { display: grid; grid-template-columns: minmax(0, 3fr) minmax(4rem, 2fr) max-content; gap: .3rem .8rem;
  align-items: center; }
.name { overflow-wrap: anywhere; font-size: .88rem; line-height: 1.3; }
.track { background: var(--track); border-radius: 3px; height: .8rem; overflow: hidden; }
.bar { background: var(--bar); height: 100%; } .bar.warn { background: var(--warn); }
.value { text-align: right; font-variant-numeric: tabular-nums; font-size: .88rem; white-space: nowrap; }
"""


def html_page(report: Report) -> str:
  """The whole page."""
  generation = report.topology.generation
  facts = "".join(
    f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in headline(report)
  )
  memory = [("needed", report.memory.needed), *memory_rows(report)]
  sections = [
    f"<h1>{html.escape(report.title)}</h1><p>{html.escape(heading(report))}</p><dl>{facts}</dl>",
    _section(
      "Memory of a device",
      f"The bars are shares of the {size(generation.usable_hbm_bytes)} that a program may have.",
      [(name, count, size(count), "") for name, count in memory],
      generation.usable_hbm_bytes,
    ),
    _section(
      "Largest buffers at the fullest moment",
      "Buffers that share a place count once.",
      [
        (f"{b.kind} {b.shape} {short_path(b.op_name)}", b.bytes, size(b.bytes), b.op_name)
        for b in report.buffers[:TOP]
      ],
    ),
    _section(
      "Largest operations",
      f"Estimated cycles of all executions, of {si(report.cycles)} in all.",
      [
        (
          f"{op.executions:,} × {op.kind} {short_path(op.op_name or op.name)}",
          op.cycles,
          si(op.cycles),
          op.op_name,
        )
        for op in report.cost.largest_ops
      ],
    ),
    _section(
      "Cycles by kind of instruction",
      "",
      [(kind, count, si(count), "") for kind, count in list(report.cost.cycles_by_kind.items())[:TOP]],
    ),
    _section(
      "Collectives",
      "Bytes that a device sends in one run of the program, each byte by the shortest way around a ring.",
      [
        (
          f"{e.executions:,} × {e.kind} over {e.axis}",
          e.wire_bytes,
          size(e.wire_bytes),
          f"arrays of {size(e.bytes)}",
        )
        for e in report.cost.exchanges
      ],
    ),
    _section(
      "Without the compiler's estimate",
      "Priced at matrix-unit time where their FLOPs are known.",
      [
        (
          f"{u.executions:,} × {u.kind} {u.name} {short_path(u.op_name)}",
          u.cycles or 0,
          "unpriced" if u.cycles is None else f"{si(u.cycles)} cycles",
          u.shape,
        )
        for u in report.cost.unpriced[:TOP]
      ],
    ),
    "<h2>What the estimate leaves out</h2><ul>"
    + "".join(f"<li>{html.escape(note)}</li>" for note in report.caveats())
    + "</ul>",
  ]
  title = html.escape(f"{report.title}, {report.topology}")
  return (
    f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
  )


def _section(title: str, text: str, rows: Sequence[Row], top: float | None = None) -> str:
  if not rows:
    return ""
  paragraph = f"<p>{html.escape(text)}</p>" if text else ""
  return f'<h2>{html.escape(title)}</h2>{paragraph}<div class="bars">{_bars(rows, top)}</div>'


def _bars(rows: Iterable[Row], top: float | None) -> str:
  """Horizontal bars against `top`, or the largest of them; those that overflow are marked."""
  rows = list(rows)
  full = top or max(value for _, value, _, _ in rows) or 1
  cells = []
  for name, value, text, hint in rows:
    kind = "bar warn" if value > full else "bar"
    width = min(100.0, 100 * value / full)
    cells.append(
      f'<div class="name" title="{html.escape(hint)}">{html.escape(name)}</div>'
      f'<div class="track"><div class="{kind}" style="width:{width:.1f}%"></div></div>'
      f'<div class="value">{html.escape(text)}</div>'
    )
  return "".join(cells)
