"""Processes that run one program together and meet through a coordinator on the loopback interface."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT


def free_address() -> str:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"


class Worker:
  """One process of a group, its output in files so that no pipe fills up."""

  def __init__(self, folder: Path, process_id: int, arguments: Sequence[str], environment: dict[str, str]):
    self.out, self.err = folder / f"{process_id}.out", folder / f"{process_id}.err"
    with self.out.open("w") as out, self.err.open("w") as err:
      self.process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
      )

  def wait(self, timeout: float) -> int:
    """Its exit code."""
    try:
      return self.process.wait(timeout)
    except subprocess.TimeoutExpired:
      self.kill()
      pytest.fail(f"still alive after {timeout} s:\n{self.said_wrong()}")

  def wait_for(self, word: str, timeout: float = 60) -> None:
    """Until it has printed `word`."""
    deadline = time.monotonic() + timeout
    while word not in self.said():
      assert self.process.poll() is None, self.said_wrong()
      assert time.monotonic() < deadline, f"{word} never came: {self.said_wrong()}"
      time.sleep(0.05)

  def said(self) -> str:
    """All of it: gloo's threads chat on the same stream, and may break their own lines and ours."""
    return self.out.read_text()

  def said_wrong(self) -> str:
    return self.err.read_text()

  def kill(self) -> None:
    if self.process.poll() is None:
      self.process.kill()
      self.process.wait()


class Group:
  """The processes of one test; the end of the `with` statement ends those that are still alive."""

  def __init__(self, folder: Path):
    self.workers: list[Worker] = []
    self._folder = folder
    self._address = free_address()

  def start(
    self, arguments: Sequence[str], process_id: int, processes: int = 2, address: str = "", **environment: str
  ) -> Worker:
    """Python with `arguments`, as one of `processes` that meet at `address`, by default the group's."""
    meeting = f"--coordinator={address or self._address}", f"--processes={processes}"
    together = [*arguments, *meeting, f"--process_id={process_id}"]
    self.workers.append(Worker(self._folder, process_id, together, environment))
    return self.workers[-1]

  def codes(self, timeout: float) -> list[int]:
    return [worker.wait(timeout) for worker in self.workers]

  def said_wrong(self) -> list[str]:
    return [worker.said_wrong() for worker in self.workers]

  def __enter__(self) -> "Group":
    return self

  def __exit__(self, *_: object) -> None:
    for worker in self.workers:
      worker.kill()
