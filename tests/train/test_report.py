"""The report page and the loss plot, from metrics as interrupted and resumed runs leave them."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5_jax.config import RunConfig
from glm5_jax.errors import UserError
from glm5_jax.train.charts import Line, line_chart, nice_ticks
from glm5_jax.train.report import (
  POINTS,
  Report,
  Sample,
  plot_loss,
  read_metrics,
  series,
  smooth,
  write_report,
)

VOID = {"meta", "path", "circle", "br"}


class Page(HTMLParser):
  """Collects the text of each element and fails on tags that do not pair."""

  def __init__(self, text: str):
    super().__init__()
    self.open: list[str] = []
    self.text = ""
    self.tags: list[tuple[str, dict]] = []
    self.feed(text)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    if tag not in VOID:
      assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def write_metrics(folder, steps=60, tail=""):
  lines = []
  for step in range(10, 10 * steps + 1, 10):
    entry = {"step": step, "time": float(step), "loss": 9.0, "lm_loss": 2 + 6 / step, "tokens_per_s": 4000.0}
    if step % 100 == 0:
      entry["heldout_bpb"] = 1.5 + 50 / step
    lines.append(json.dumps(entry))
  path = folder / "metrics.jsonl"
  path.write_text("\n".join(lines) + "\n" + tail)
  return path


def a_report(**changes) -> Report:
  values = {
    "title": "a <small> run",
    "config": RunConfig(name="x"),
    "heldout_bpb": 1.583,
    "baselines": {"order-2 Markov": 2.655, "gzip -9": 1.792},
    "accuracy": (0.461, 0.312),
    "accept_length": 1.834,
    "samples": [Sample("def f(", "x): <b>&amp;</b>\x1b\n")],
    "facts": {"training time": "5 min"},
  }
  return Report(**(values | changes))


def test_page_says_everything_and_loads_nothing(tmp_path):
  write_metrics(tmp_path)
  path = write_report(tmp_path, a_report())
  source = path.read_text()
  page = Page(source)
  said = ("a <small> run", "1.583", "2.655", "1.792", "−40 %", "46.1%", "MTP depth 1", "1.83", "4,000")
  for wanted in (*said, "def f(x): <b>&amp;</b>\\x1b", "training time5 min", "peak_lr0.0002"):
    assert wanted in page.text, wanted
  assert not re.search(r"https?:|url\(|@import", source)
  assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
  assert not any(tag == "script" for tag, _ in page.tags)
  assert not list(tmp_path.glob("*.tmp"))


def test_parts_without_numbers_are_left_out(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
  page = Page(
    write_report(tmp_path, a_report(accuracy=(), accept_length=None, samples=(), baselines={})).read_text()
  )
  for absent in ("Sample", "accuracy", "decoding step", "Learning", "tokens/s", "nan"):
    assert absent not in page.text, absent
  assert "1.583" in page.text


def test_curves_are_drawn_where_the_numbers_are(tmp_path):
  write_metrics(tmp_path, steps=1000)
  source = write_report(tmp_path, a_report()).read_text()
  loss, heldout = re.findall(r"<svg.*?</svg>", source)
  assert "step 10,000: 2.001" in loss  # the last point survives the thinning
  assert loss.count("<title>") == POINTS
  assert heldout.count("<title>") == 100
  assert "order-2 Markov 2.655" in heldout and "order-2" not in loss


def test_a_curve_that_falls_goes_down_the_page():
  svg = line_chart([Line("loss", [(0, 8.0), (50, 4.0), (100, 2.0)])], "step", "loss", {"level": 6.0})
  points = [tuple(map(float, p.split())) for p in re.search(r'line main" d="M([^"]*)"', svg)[1].split("L")]
  assert [x for x, _ in points] == sorted(x for x, _ in points)
  (_, top), (_, middle), (_, bottom) = points
  assert bottom - middle == pytest.approx((middle - top) / 2, abs=0.2)
  assert float(re.search(r'level" d="M\d+ ([\d.]+)H', svg)[1]) == pytest.approx((top + middle) / 2, abs=0.2)


@given(low=st.floats(-1e4, 1e4), span=st.floats(1e-3, 1e4))
def test_ticks_are_round_few_and_enclose(low, span):
  ticks = nice_ticks(low, low + span)
  step = ticks[1] - ticks[0]
  assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= low + span - 1e-6 * step
  assert 2 <= len(ticks) <= 8
  mantissa = step / 10 ** math.floor(math.log10(step * (1 + 1e-6)))
  assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-3


def test_ticks_of_a_constant_are_distinct():
  assert len(set(nice_ticks(3.0, 3.0))) >= 2
  assert len(set(nice_ticks(0.0, 0.0))) >= 2


def test_a_resumed_run_counts_each_step_once(tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines = [
    {"step": 1, "loss": 5.0},
    {"step": 2, "loss": 4.0},
    {"step": 2, "loss": 4.5},
    {"step": 3, "loss": 3.0},
  ]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
  assert series(read_metrics(path), "loss") == [(1, 5.0), (2, 4.5), (3, 3.0)]


@pytest.mark.parametrize(
  "text,message",
  [(None, "does not exist"), ("", "holds no step"), ('{"step": 1}\nxx\n{"step": 2}\n', "line 2 is not JSON")],
)
def test_unusable_metrics_are_named(tmp_path, text, message):
  path = tmp_path / "metrics.jsonl"
  if text is not None:
    path.write_text(text)
  with pytest.raises(UserError, match=message):
    read_metrics(path)


def test_smoothing_keeps_a_straight_line_and_calms_noise():
  line = [(step, 10.0 - 0.1 * step) for step in range(100)]
  assert [step for step, _ in smooth(line)] == list(range(100))
  assert [value for _, value in smooth(line)] == pytest.approx([value for _, value in line])
  noisy = smooth([(step, float(step % 2)) for step in range(200)])
  assert all(abs(value - 0.5) < 0.11 for _, value in noisy[5:-5])


def test_loss_plot_is_a_picture(tmp_path):
  one, two = tmp_path / "one.png", tmp_path / "two.png"
  plot_loss(write_metrics(tmp_path, steps=5), one)
  plot_loss(write_metrics(tmp_path, steps=60), two, {"gzip -9": 1.8})
  widths = [int.from_bytes(path.read_bytes()[16:20], "big") for path in (one, two)]
  assert one.read_bytes()[:8] == two.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
  assert widths[1] == 2 * widths[0] > 600  # the second panel needs held-out numbers
