"""What a run asks of its machine: time to save when a signal comes, a folder to itself, a trace."""

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint import SUBFOLDER
from glm5_jax.train.checkpoint_files import disk_errors

_STDERR = 2


class StopSignals:
  """While entered, SIGTERM and SIGINT set `requested`; a second SIGINT raises KeyboardInterrupt.

  Only the main thread can take signals: entered in another one, `requested` stays False.
  """

  def __init__(self) -> None:
    self.requested = False
    self.name = ""  # of the first signal
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, _frame: Any) -> None:
    if self.requested and number == signal.SIGINT:
      raise KeyboardInterrupt
    if not self.requested:
      self.requested, self.name = True, signal.Signals(number).name
      # print may be what the signal interrupted, and cannot be entered twice.
      os.write(_STDERR, f"{self.name}: saving after the step at hand; Ctrl-C stops at once\n".encode())


@contextlib.contextmanager
def only_one_in(workdir: Path) -> Iterator[None]:
  """Holds the folder's lock, which the system takes back however the process ends."""
  with disk_errors(workdir / SUBFOLDER, f"opening {workdir}"):
    workdir.mkdir(parents=True, exist_ok=True)
    file = (workdir / "lock").open("w")
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UserError(
        f"{workdir} is in use by another run; wait for its end or give another --workdir"
      ) from None
    yield


class ProfileWindow:
  """Traces the steps named by train.profile_steps, "first:last", the last one left out."""

  def __init__(self, steps: str, folder: Path):
    first, _, last = steps.partition(":")
    self._steps = range(int(first), int(last)) if steps else range(0)
    self._folder = folder
    self._running = False

  def __enter__(self) -> "ProfileWindow":
    return self

  def __exit__(self, *_: object) -> None:
    if self._running:
      jax.profiler.stop_trace()

  def before(self, step: int) -> None:
    """Before `step` (0-based) is dispatched; a run that was resumed inside the window traces the rest."""
    if step in self._steps and not self._running:
      jax.profiler.start_trace(str(self._folder))
      self._running = True

  def after(self, steps_done: int) -> None:
    """Once a step is computed."""
    if self._running and steps_done not in self._steps:
      self._running = False
      jax.profiler.stop_trace()
