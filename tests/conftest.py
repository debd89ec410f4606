"""What the tests share: a compilation cache, commands and fake devices in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent

# Read when jax is first imported, here and in the processes that tests start. The numbers that tests
# compare with are a CPU's.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# The same examples in every run: a commit is not to fail for what its author never saw.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def command() -> Run:
  """`command("train", "--config=…", timeout=60)` runs `python -m launch.train` from the project's root.

  The caller judges returncode, stdout and stderr.
  """

  def run(name: str, *arguments: str, timeout: float = 300, **environment: str):
    return subprocess.run(
      [sys.executable, "-m", f"launch.{name}", *map(str, arguments)],
      cwd=ROOT,
      env={**os.environ, **environment},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=timeout,
    )

  return run


@pytest.fixture
def on_devices() -> Callable[..., str]:
  """`on_devices(code, count=8)` runs Python source on `count` fake CPU devices and returns what it printed.

  The number of devices is fixed when jax starts, hence a process of its own.
  """

  def run(code: str, count: int = 8, timeout: float = 300) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    done = subprocess.run(
      [sys.executable, "-c", code],
      cwd=ROOT,
      env={**os.environ, "XLA_FLAGS": flags},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

  return run
