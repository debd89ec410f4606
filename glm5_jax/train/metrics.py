"""Where a run's numbers go: metrics.jsonl, TensorBoard, and one line on the terminal."""

import json
import math
import time
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from glm5_jax.errors import UserError
from glm5_jax.train.report import METRICS_FILE


class MetricLog:
  """Appends to `<folder>/metrics.jsonl` and `<folder>/tensorboard`.

  Lines of steps after `resumed_step` are dropped first: they belong to work that a crash undid and that
  is about to be done again.
  """

  def __init__(self, folder: Path, resumed_step: int):
    self._path = folder / METRICS_FILE
    try:
      if self._path.exists():
        kept = [line for line in self._path.read_text().splitlines() if _step_of(line) <= resumed_step]
        self._path.write_text("".join(line + "\n" for line in kept))
      self.lines = len(self._path.read_text().splitlines()) if self._path.exists() else 0
      self._file = self._path.open("a", buffering=1)
      self._board = SummaryWriter(str(folder / "tensorboard"), flush_secs=30)
    except OSError as error:
      raise self._refused(error) from error

  def write(self, step: int, values: dict[str, float]) -> None:
    """One line; values that are not finite are written as null."""
    clean = {name: float(v) if math.isfinite(v) else None for name, v in values.items()}
    try:
      self._file.write(json.dumps({"step": step, **clean}) + "\n")
      self.lines += 1
      for name, value in clean.items():
        if value is not None:
          self._board.add_scalar(name, value, step)
    except OSError as error:
      raise self._refused(error) from error

  def close(self) -> None:
    self._file.close()
    self._board.close()

  def _refused(self, error: OSError) -> UserError:
    return UserError(
      f"cannot write metrics to {self._path}: {error.strerror}; free space or give another --workdir"
    )


def _step_of(line: str) -> float:
  try:
    return json.loads(line)["step"]
  except (json.JSONDecodeError, KeyError):  # a torn last line
    return math.inf


class Stopwatch:
  """Wall-clock between two logged steps, less what was spent on evaluation and saving."""

  def __init__(self) -> None:
    self._start = time.perf_counter()
    self._paused = 0.0
    self.data_wait = 0.0

  def pause(self) -> "_Pause":
    """Context whose time does not count."""
    return _Pause(self, "_paused")

  def waiting_for_data(self) -> "_Pause":
    """Context whose time counts, and is reported as `data_wait` too."""
    return _Pause(self, "data_wait")

  def lap(self) -> tuple[float, float]:
    """(seconds, of which waiting for data) since the last lap."""
    now = time.perf_counter()
    result = (now - self._start - self._paused, self.data_wait)
    self._start, self._paused, self.data_wait = now, 0.0, 0.0
    return result


class _Pause:
  def __init__(self, watch: Stopwatch, field: str):
    self._watch, self._field = watch, field

  def __enter__(self) -> None:
    self._began = time.perf_counter()

  def __exit__(self, *_: Any) -> None:
    spent = time.perf_counter() - self._began
    setattr(self._watch, self._field, getattr(self._watch, self._field) + spent)


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
  if values["skipped"]:
    parts.append(f"skipped {values['skipped']:.0f}")
  return "  ".join(parts)


def duration(seconds: float) -> str:
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
