"""Where a run's numbers go: metrics.jsonl, TensorBoard, and one line on the terminal."""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from glm5_jax.train.checkpoint import SUBFOLDER
from glm5_jax.train.checkpoint_files import disk_errors
from glm5_jax.train.report import METRICS_FILE


class MetricLog:
  """Appends to `<folder>/metrics.jsonl` and `<folder>/tensorboard`.

  Lines of steps after `resumed_step` are dropped first: they belong to work that a crash undid and that
  is about to be done again.

  Args:
    folder: the run's; None writes nothing (every process but the first).
    resumed_step: steps done so far, 0 for a new run.

  Raises:
    UserError: here, in `write` or in `close`, when the disk is full or refuses.
  """

  def __init__(self, folder: Path | None, resumed_step: int):
    self._folder = folder
    if folder is None:
      return
    with self._disk_errors():
      _drop_steps_after(folder / METRICS_FILE, resumed_step)
      (folder / "tensorboard").mkdir(exist_ok=True)
      # tensorboardX's SummaryWriter leaves the writing to a thread, whose errors nobody would see.
      self._events = event_file_writer.EventsWriter(
        str(folder / "tensorboard" / "events"), f".{resumed_step}.{os.getpid()}"
      )
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # TensorBoard drops what is undone
      self._event(resumed_step + 1, session_log=start)
      self._file = (folder / METRICS_FILE).open("a", buffering=1, encoding="utf-8")

  def write(self, step: int, values: dict[str, float]) -> None:
    """One line, flushed; values that are not finite are written as null, and left out of TensorBoard."""
    if self._folder is None:
      return
    clean = {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
    with self._disk_errors():
      self._file.write(json.dumps({"step": step, **clean}) + "\n")
      for name, value in clean.items():
        if value is not None:
          self._event(step, summary=summary.scalar(name, value))
      self._events.flush()

  def close(self) -> None:
    if self._folder is not None:
      with self._disk_errors():
        self._file.close()
        self._events.close()

  def _event(self, step: int, **content) -> None:
    self._events.write_event(event_pb2.Event(step=step, wall_time=time.time(), **content))

  def _disk_errors(self) -> contextlib.AbstractContextManager[None]:
    assert self._folder is not None
    return disk_errors(self._folder / SUBFOLDER, f"writing metrics to {self._folder}")


def _drop_steps_after(path: Path, step: int) -> None:
  """Rewrites the file without the lines after `step` and without a torn one, whole or not at all."""
  if not path.exists():
    return
  lines = path.read_text(encoding="utf-8").splitlines()
  kept = [line for line in lines if _read(line).get("step", math.inf) <= step]
  if len(kept) < len(lines):
    replace_file(path, "".join(line + "\n" for line in kept).encode())


def replace_file(path: Path, content: bytes) -> None:
  """Writes the whole file, or leaves the old one when the process dies or OSError (a full disk) is raised."""
  partial = path.with_name(path.name + ".partial")
  try:
    partial.write_bytes(content)
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def _read(line: str) -> dict:
  try:
    return json.loads(line)
  except json.JSONDecodeError:  # torn by a crash
    return {}


def logged_steps(folder: Path, name: str) -> set[int]:
  """Steps for which metrics.jsonl has the metric `name`."""
  path = folder / METRICS_FILE
  if not path.exists():
    return set()
  entries = map(_read, path.read_text(encoding="utf-8").splitlines())
  return {entry["step"] for entry in entries if name in entry}


class Stopwatch:
  """Wall-clock between two laps, less what is spent in `pause` and `exclude`."""

  def __init__(self) -> None:
    self._start = time.perf_counter()
    self._excluded = 0.0
    self.data_wait = 0.0  # seconds of this lap in which nothing ran for want of data

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """What runs inside does not count."""
    began = time.perf_counter()
    try:
      yield
    finally:
      self.exclude(time.perf_counter() - began)

  def exclude(self, seconds: float) -> None:
    self._excluded += seconds

  def lap(self) -> tuple[float, float]:
    """(seconds, of which waiting for data) since the last lap."""
    now = time.perf_counter()
    result = (max(now - self._start - self._excluded, 1e-9), self.data_wait)
    self._start, self._excluded, self.data_wait = now, 0.0, 0.0
    return result


def progress_line(step: int, steps: int, values: dict[str, float], eta_s: float) -> str:
  """What the terminal shows at a logged step."""
  parts = [f"step {step}/{steps}", f"loss {values['loss']:.3f}", f"lm {values['lm_loss']:.3f}"]
  mtp = [f"{values[name]:.2f}" for name in sorted(values) if name.startswith("mtp_loss_")]
  if mtp:
    parts.append("mtp " + " ".join(mtp))
  parts += [
    f"grad {values['grad_norm']:.2f}",
    f"lr {values['learning_rate']:.1e}",
    f"load {values['router_load_violation']:.2f}",
    f"{values['tokens_per_s']:,.0f} tok/s",
    f"mfu {values['mfu']:.0%}",
    f"{duration(eta_s)} left",
  ]
  if values["data_wait"] >= 0.05:
    parts.append(f"waiting for data {values['data_wait']:.0%}")
  if values["skipped"]:
    parts.append(f"skipped {values['skipped']:.0f}")
  return "  ".join(parts)


def duration(seconds: float) -> str:
  """In words of at most two units: "59s", "2m05s", "3h07m", "4d02h"."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days:
    return f"{days}d{hours:02d}h"
  if hours:
    return f"{hours}h{minutes:02d}m"
  return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
