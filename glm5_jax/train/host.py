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
from jax.sharding import Mesh

from glm5_jax.errors import UserError
from glm5_jax.parallel.distributed import gather_json
from glm5_jax.train.checkpoint import SUBFOLDER
from glm5_jax.train.checkpoint_files import disk_errors
from glm5_jax.train.placement import largest

_STDERR = 2


class StopSignals:
  """While entered, SIGTERM and SIGINT ask the run to stop; a second SIGINT raises KeyboardInterrupt.

  Only the main thread can take signals: entered in another one, none is seen.
  """

  def __init__(self) -> None:
    self._received = 0  # this process's first signal
    self._agreed = 0  # the one that all processes know of
    self._previous: dict[int, Any] = {}

  def requested(self, mesh: Mesh | None) -> bool:
    """Whether this process or another one of the run got a signal. All have to ask together."""
    self._agreed = self._agreed or largest(self._received, mesh)
    return self._agreed != 0

  @property
  def name(self) -> str:
    """Of the signal for which `requested` is true."""
    return signal.Signals(self._agreed).name

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, _frame: Any) -> None:
    if self._received and number == signal.SIGINT:
      raise KeyboardInterrupt
    if not self._received:
      self._received = number
      # print may be what the signal interrupted, and cannot be entered twice.
      name = signal.Signals(number).name
      os.write(_STDERR, f"{name}: saving after the step at hand; Ctrl-C stops at once\n".encode())


@contextlib.contextmanager
def refused_together() -> Iterator[None]:
  """What one process refuses inside, all refuse at its end; inside, they may not wait for each other.

  Raises:
    UserError: this process's own, or that of the first process that has one.
  """
  mine: UserError | None = None
  try:
    yield
  except UserError as error:
    mine = error
  said = gather_json(None if mine is None else str(mine))
  if mine is not None:
    raise mine
  for process, message in enumerate(said):
    if message is not None:
      raise UserError(f"process {process}: {message}")


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
