"""What a person looks at after a run: loss.png, and report.html, one page without external resources."""

import dataclasses
import html
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5_jax.config import RunConfig
from glm5_jax.errors import UserError
from glm5_jax.train.charts import Line, bars, line_chart

METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"
SMOOTH_FROM = 40  # logged steps from which the loss gets a smoothed curve over the raw one
POINTS = 200  # of a curve on the page


@dataclasses.dataclass(frozen=True)
class Sample:
  """What the model wrote after a prompt."""

  prompt: str
  text: str


@dataclasses.dataclass(frozen=True)
class Report:
  """What the page says beside the curves, which it reads from the run's metrics.

  Attributes:
    title: the run's name.
    config: shown field by field.
    heldout_bpb: bits per byte of the trained model on the held-out text.
    baselines: name → bits per byte on the same text, for example "order-2 Markov" and "gzip -9".
    accuracy: share of held-out tokens whose top-1 guess is right: the next token, then MTP depth 1, 2, ….
    accept_length: tokens a self-speculative decoding step yields on average; None without MTP.
    samples: text from the model.
    facts: label → value, as they are to be read: parameters, training time, throughput.
  """

  title: str
  config: RunConfig
  heldout_bpb: float
  baselines: Mapping[str, float]
  accuracy: Sequence[float] = ()
  accept_length: float | None = None
  samples: Sequence[Sample] = ()
  facts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The lines of a metrics file in order of step, the last one of each step.

  A resumed run logs some steps again, and a killed one can leave half a line at the end.

  Raises:
    UserError: the file is missing, holds no step, or a line other than the last is no JSON.
  """
  try:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
  except FileNotFoundError:
    raise UserError(f"{path} does not exist; a run that has logged a step has one") from None
  by_step: dict[int, dict[str, Any]] = {}
  for number, line in enumerate(lines, 1):
    try:
      entry = json.loads(line)
    except json.JSONDecodeError:
      if number == len(lines):
        break
      raise UserError(f"{path} line {number} is not JSON; remove the line") from None
    by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
  if not by_step:
    raise UserError(f"{path} holds no step; a run that has logged a step has one")
  return [by_step[step] for step in sorted(by_step)]


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
  """(step, value) of a metric where it was logged and is finite."""
  points = ((entry["step"], entry[name]) for entry in metrics if isinstance(entry.get(name), int | float))
  return [(step, value) for step, value in points if math.isfinite(value)]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """Moving average over about a twentieth of the points, as many before as after: it lags nowhere."""
  values = [value for _, value in points]
  reach = max(len(points) // 40, 1)
  out = []
  for at, (step, _) in enumerate(points):
    half = min(reach, at, len(points) - 1 - at)
    out.append((step, statistics.fmean(values[at - half : at + half + 1])))
  return out


def plot_loss(
  metrics_path: str | os.PathLike, out_png: str | os.PathLike, baselines: Mapping[str, float] | None = None
) -> None:
  """Writes a PNG: training loss, and held-out bits per byte (with `baselines`, name → bits per byte) if any.

  Raises:
    UserError: as `read_metrics`.
  """
  from matplotlib.figure import Figure  # no pyplot: nothing global, no display

  metrics = read_metrics(metrics_path)
  panels: list[tuple[str, str, dict[str, float]]] = [
    ("training loss, nats per token", _loss_name(metrics), {})
  ]
  if series(metrics, "heldout_bpb"):
    panels.append(("held-out bits per byte", "heldout_bpb", dict(baselines or {})))
  figure = Figure(figsize=(5.5 * len(panels), 3.8), dpi=120, layout="constrained")
  for axes, (title, name, levels) in zip(
    figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
  ):
    points = series(metrics, name)
    if name != "heldout_bpb" and len(points) >= SMOOTH_FROM:
      axes.plot(*zip(*points, strict=True), color="#9db7d8", linewidth=0.8)
      points = smooth(points)
    if points:
      axes.plot(
        *zip(*points, strict=True), color="#1f6fc4", linewidth=1.8, marker="o" if len(points) < 3 else None
      )
    for label, height in levels.items():
      axes.axhline(height, color="#777777", linewidth=1, linestyle="--")
      axes.annotate(
        f"{label} {height:.3f}",
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color="#555555",
        fontsize=9,
      )
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("step")
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(out_png)


def write_report(run_dir: str | os.PathLike, report: Report) -> Path:
  """Writes `run_dir`/report.html from `report` and `run_dir`/metrics.jsonl; returns its path.

  Raises:
    UserError: as `read_metrics`.
  """
  run_dir = Path(run_dir)
  metrics = read_metrics(run_dir / METRICS_FILE)
  sections = [
    _tiles(report, metrics),
    _curves(report, metrics),
    _section("Bits per byte of the held-out text", _bits(report), _BITS_NOTE),
    _section("Top-1 accuracy on the held-out text", _accuracy(report), _ACCURACY_NOTE)
    if report.accuracy
    else "",
    _section("Sample", "".join(_sample(sample) for sample in report.samples)) if report.samples else "",
    _section("Run", _table(_facts(report, metrics))),
    _section("Configuration", _configuration(report.config)),
  ]
  title = html.escape(report.title)
  page = _PAGE.format(title=title, style=_STYLE, body="\n".join(filter(None, sections)))
  path = run_dir / REPORT_FILE
  unfinished = path.with_suffix(".tmp")
  unfinished.write_text(page, encoding="utf-8")
  unfinished.replace(path)
  return path


def _loss_name(metrics: Sequence[Mapping[str, Any]]) -> str:
  """The next-token loss where it is logged apart from the sum with MTP and balance."""
  return "lm_loss" if series(metrics, "lm_loss") else "loss"


def _section(title: str, body: str, note: str = "") -> str:
  note = f'<p class="note">{html.escape(note)}</p>' if note else ""
  return f"<section><h2>{html.escape(title)}</h2>{body}{note}</section>"


_BITS_NOTE = (
  "Fewer is better. The order-2 model counts bytes of the training text after the two before them, with "
  "Witten–Bell smoothing; gzip sees the held-out text alone."
)
_ACCURACY_NOTE = "MTP depth k guesses the token k places after the next one, in the same pass."


def _tiles(report: Report, metrics: Sequence[Mapping[str, Any]]) -> str:
  """The few numbers to read first."""
  tiles = [(f"{report.heldout_bpb:.3f}", "bits per byte, held out")]
  for name, bits in report.baselines.items():
    change = 100 * (report.heldout_bpb / bits - 1)
    tiles.append((f"{change:+.0f} %".replace("-", "−"), f"bits against {name} ({bits:.3f})"))
  if report.accept_length is not None:
    tiles.append((f"{report.accept_length:.2f}", "tokens a self-speculative decoding step"))
  speed = [value for _, value in series(metrics, "tokens_per_s")]
  if speed:
    tiles.append((f"{statistics.median(speed):,.0f}", "training tokens/s"))
  cells = "".join(
    f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'
    for value, label in tiles
  )
  return f'<div class="tiles">{cells}</div>'


def _curves(report: Report, metrics: Sequence[Mapping[str, Any]]) -> str:
  name = _loss_name(metrics)
  loss = series(metrics, name)
  charts = []
  if loss:
    lines = [Line("loss", _thin(loss))]
    if len(loss) >= SMOOTH_FROM:
      lines = [Line("loss", _thin(loss), "faint"), Line("smoothed loss", _thin(smooth(loss)))]
    charts.append(("Training loss, nats per token", line_chart(lines, "step", "training loss")))
  heldout = series(metrics, "heldout_bpb")
  if heldout:
    chart = line_chart([Line("bits per byte", _thin(heldout))], "step", "bits per byte", report.baselines)
    charts.append(("Held-out bits per byte", chart))
  figures = "".join(f"<figure><figcaption>{title}</figcaption>{svg}</figure>" for title, svg in charts)
  return _section("Learning", f'<div class="charts">{figures}</div>') if charts else ""


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """At most POINTS of them, evenly chosen, the last one always among them."""
  stride = -(-len(points) // POINTS)
  return list(points[::-1][::stride][::-1])


def _bits(report: Report) -> str:
  return bars({"this model": report.heldout_bpb} | dict(report.baselines), "this model", ".3f")


def _accuracy(report: Report) -> str:
  names = ["next token", *(f"MTP depth {k}" for k in range(1, len(report.accuracy)))]
  return bars(dict(zip(names, report.accuracy, strict=True)), "", ".1%", top=1.0)


def _sample(sample: Sample) -> str:
  prompt, text = (html.escape(_visible(part)) for part in (sample.prompt, sample.text))
  return f'<pre class="sample"><span class="prompt">{prompt}</span>{text}</pre>'


def _visible(text: str) -> str:
  """Control characters as escapes: a browser would drop or misread them."""
  return "".join(c if c.isprintable() or c in "\n\t " else c.encode("unicode_escape").decode() for c in text)


def _facts(report: Report, metrics: Sequence[Mapping[str, Any]]) -> dict[str, str]:
  facts = {"steps": f"{metrics[-1]['step']:,}"}
  loss = series(metrics, _loss_name(metrics))
  if loss:
    facts["last training loss"] = f"{loss[-1][1]:.3f} nats per token"
  return facts | dict(report.facts)


def _table(rows: Mapping[str, str]) -> str:
  cells = (
    f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items()
  )
  return f"<table>{''.join(cells)}</table>"


def _configuration(config: RunConfig) -> str:
  """A folded table for each part of the config."""
  parts = []
  for name, values in dataclasses.asdict(config).items():
    if isinstance(values, dict):
      rows = {
        field: value if isinstance(value, str) else json.dumps(value) for field, value in values.items()
      }
      parts.append(f"<details><summary>{html.escape(name)}</summary>{_table(rows)}</details>")
  return "".join(parts)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { --page: #fbfbfa; --card: #fff; --ink: #1c1c1a; --soft: #62625d; --rule: #e3e3df; --accent: #1f6fc4;
  --faint: #a9c4e4; --bar: #b9b9b2; }
@media (prefers-color-scheme: dark) {
  :root { --page: #161615; --card: #1f1f1d; --ink: #f0f0ec; --soft: #a5a59d; --rule: #353531;
    --accent: #5a9fe6; --faint: #35557a; --bar: #5d5d57; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; }
h2 { font-size: 1.1rem; margin: 0 0 .75rem; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem; padding: 1rem;
  margin-top: 1rem; }
.note { color: var(--soft); font-size: .875rem; margin: .75rem 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1rem; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.5rem; line-height: 1.25; }
.tile span { color: var(--soft); font-size: .875rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; }
figcaption { color: var(--soft); font-size: .875rem; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); fill: none; }
.tick { fill: var(--soft); font-size: 12px; font-family: inherit; }
.line { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; }
.line.faint { stroke: var(--faint); stroke-width: 1; }
.level { stroke: var(--soft); stroke-dasharray: 5 4; fill: none; }
.last { fill: var(--accent); }
.hover { fill: var(--accent); fill-opacity: 0; }
.hover:hover { fill-opacity: 1; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .5rem .75rem;
  align-items: center; }
.track { height: 1.1rem; }
.bar { height: 100%; background: var(--bar); border-radius: 0 .25rem .25rem 0; }
.bar.accent { background: var(--accent); }
.barvalue, td { font-variant-numeric: tabular-nums; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .75rem;
  font: .875rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.sample:last-child { margin: 0; }
.prompt { color: var(--accent); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; font-weight: 400; padding: .3rem .5rem .3rem 0; border-top: 1px solid var(--rule);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); width: 45%; }
tr:first-child > * { border-top: 0; }
details { border-top: 1px solid var(--rule); padding: .4rem 0; }
details:first-of-type { border-top: 0; }
summary { cursor: pointer; }
"""
