"""Which step folders are complete, and what their files' errors mean to a user."""

import contextlib
import errno
import gc
import logging
import pathlib
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from glm5_jax.errors import UserError

T = TypeVar("T")
COMMIT_FILE = "commit_success.txt"  # orbax writes it last, just before the rename
SIBLINGS_SECONDS = 0.5  # for reads and writes still in flight when one of them has failed
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _not_from_orbax(record: logging.LogRecord) -> bool:
  _, error, trace = record.exc_info or (None, None, None)
  files = [frame.filename for frame in traceback.extract_tb(trace)]
  # What failed in tensorstore has no frames; a write names orbax's temporary folder, a read what it opened.
  names = (record.pathname, str(error), *files)
  return not any(mark in name for name in names for mark in ("orbax", "tensorstore_spec"))


# Orbax narrates every phase of a save, logs the traceback of errors that it also raises, and leaves
# futures behind whose errors asyncio logs.
for _logger in ("absl", "asyncio"):
  logging.getLogger(_logger).addFilter(_not_from_orbax)


def _without_late_siblings(report: Callable[[Any], Any]) -> Callable[[Any], Any]:
  def hook(unraisable: Any) -> None:
    late = unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"
    if not late:
      report(unraisable)

  return hook


# When one of orbax's writes fails, that is raised; its siblings, whenever they end, find the event loop that
# they should report to closed, and their threads would print so.
sys.unraisablehook = _without_late_siblings(sys.unraisablehook)
# And those that had not begun are never awaited.
warnings.filterwarnings("ignore", r"coroutine 'async_(de)?serialize.* was never awaited", RuntimeWarning)


def complete_steps(folder: pathlib.Path) -> list[int]:
  """Steps whose save finished, ascending. Anything else in the folder is not a checkpoint."""
  if not folder.is_dir():
    return []
  steps = [p for p in folder.iterdir() if p.name.isdecimal() and (p / COMMIT_FILE).is_file()]
  return sorted(int(p.name) for p in steps)


def set_torn_steps_aside(folder: pathlib.Path) -> None:
  """Renames numbered folders without the mark (an interrupted copy), since their number may be saved yet."""
  if jax.process_index() != 0:
    return
  for path in folder.iterdir():
    if path.is_dir() and path.name.isdecimal() and not (path / COMMIT_FILE).is_file():
      aside = path.with_suffix(".torn")
      shutil.rmtree(aside, ignore_errors=True)
      path.rename(aside)


def remove_leftovers(folder: pathlib.Path) -> None:
  """Removes what unfinished saves left. Only for the run that writes there, while nothing is being saved."""
  if jax.process_index() == 0:
    for leftover in folder.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(leftover, ignore_errors=True)


def read_or_damaged(path: pathlib.Path, read: Callable[[], T]) -> T:
  """`read()`, turning what orbax raises on unreadable files of step folder `path` into one UserError.

  When one of orbax's reads fails, its siblings outlive their event loop and print tracebacks as they end.
  They are silenced, waited for and collected here, for which no reference to the first error may remain.
  """
  hooks = sys.excepthook, sys.unraisablehook
  sys.excepthook, sys.unraisablehook = lambda *_: None, lambda _: None
  try:
    try:
      return read()
    except Exception as error:
      # Orbax wraps failing reads in a plain Exception. Out of memory, for one, passes through.
      if not isinstance(error, OSError | ValueError | KeyError) and type(error) is not Exception:
        raise
      reason = (str(error).splitlines() or [type(error).__name__])[0].split(". See")[0][:160]
    time.sleep(SIBLINGS_SECONDS)
    gc.collect()
  finally:
    sys.excepthook, sys.unraisablehook = hooks
  others = [step for step in complete_steps(path.parent) if str(step) != path.name]
  remedy = f"move it away to use step {others[-1]}" if others else "no other step is in that folder"
  raise UserError(f"checkpoint {path} is damaged ({reason}); {remedy}")


@contextlib.contextmanager
def disk_errors(folder: pathlib.Path, doing: str) -> Iterator[None]:
  """Turns a full or read-only disk into one UserError; every other error passes through."""
  try:
    yield
  except Exception as error:
    reason = _disk_reason(error)
    if reason is None:
      raise
    latest = max(complete_steps(folder), default=None)
    kept = "no step is complete there" if latest is None else f"step {latest} is complete and kept"
    raise UserError(
      f"{doing} ({folder}) failed: {reason}; {kept}; free space or give another folder"
    ) from error


def _disk_reason(error: BaseException | None) -> str | None:
  """What the disk refused, looking through chained errors and tensorstore's text; None: not the disk."""
  while error is not None:
    if isinstance(error, OSError) and error.errno is not None:
      return "no space left on the disk" if error.errno in _NO_SPACE else str(error.strerror)
    if any(text in str(error) for text in ("No space left", "File too large", "Disk quota")):
      return "no space left on the disk"
    error = error.__cause__ or error.__context__
  return None
