"""One readable line where C++ aborts the process: jax does so when its coordination service fails.

(jax would call a function of ours instead, but its binding cannot: std::bad_cast.)
"""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

STDERR = 2

_ABORT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_handler: Any = None  # what C calls must stay alive
_previous_handler: int | None = None  # an address; None is the system's default


def on_abort_say(stderr: int, why: Callable[[], str], code: int) -> None:
  """From now on SIGABRT writes one line to `stderr` and ends the process with `code`.

  Python's own signal handlers run between instructions of the main thread, where an aborting process never
  comes again. This one is called from C, in the thread that aborts.
  """
  global _handler, _previous_handler

  def on_abort(_number: int) -> None:
    try:
      say(stderr, why())
    finally:
      os._exit(code)

  first, handler = _handler is None, _ABORT_HANDLER(on_abort)
  previous = _set_abort_handler(ctypes.cast(handler, ctypes.c_void_p).value)
  _handler = handler
  if first:
    _previous_handler = previous


def on_abort_as_before() -> None:
  global _handler
  _set_abort_handler(_previous_handler)
  _handler = None


def _set_abort_handler(address: int | None) -> int | None:
  function = ctypes.CDLL(None).signal
  function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
  return function(signal.SIGABRT, address)


def say(stderr: int, message: str) -> None:
  os.write(stderr, f"error: {' '.join(message.split())}\n".encode())


@contextlib.contextmanager
def stderr_kept() -> Iterator[tuple[BinaryIO, int]]:
  """(a file that takes what is written to stderr, the real stderr). It follows there if all goes well."""
  sys.stderr.flush()
  stderr = os.dup(STDERR)
  with tempfile.TemporaryFile() as kept:
    os.dup2(kept.fileno(), STDERR)
    try:
      yield kept, stderr
    finally:
      sys.stderr.flush()
      os.dup2(stderr, STDERR)
      os.close(stderr)
    kept.seek(0)
    os.write(STDERR, kept.read())
