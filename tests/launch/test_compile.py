"""`launch.compile`: mistakes in one line, and a small model compiled for a real slice."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CONFIG = "--config=experiments/tiny.py"
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu here: pip install -e '.[tpu]'"
)


def test_a_slice_is_needed(command):
  done = command("compile", CONFIG)
  assert done.returncode == 2 and "--topology is needed" in done.stderr


def test_without_libtpu_the_extra_is_named():
  """The command in a process in which libtpu cannot be found."""
  code = """
import runpy, sys
sys.modules["libtpu"] = None
sys.argv = ["compile", "--config=experiments/tiny.py", "--topology=v5p:2x2x1"]
runpy.run_module("launch.compile", run_name="__main__")
"""
  environment = {name: value for name, value in os.environ.items() if name != "TPU_LIBRARY_PATH"}
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 2, done.stderr
  assert done.stderr == 'error: compiling for TPU needs libtpu: pip install "glm5-jax[tpu]"\n'


@needs_libtpu
@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (("--topology=v9x:2x2",), "v5p"),  # the known ones are listed
    (("--topology=v5p:2x2x1", "--config.mesh.data=2"), "config.mesh: data 2 uses 2 of the 4 devices"),
    (("--topology=v5p:2x2x1", "--rows=6"), "6 rows: should be a multiple of 4"),
    (
      (
        "--topology=v5p:2x2x1",
        "--rows=4",
        "--config.mesh.data=1",
        "--config.mesh.context=4",
        "--config.data.seq_len=100",
      ),
      "data.seq_len",
    ),
  ],
)
def test_mistakes_are_told_in_one_line(command, flags, said):
  done = command("compile", CONFIG, *flags)
  assert done.returncode == 2, done.stderr
  errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
  assert len(errors) == 1 and said in errors[0]


@needs_libtpu
@pytest.mark.slow
def test_a_small_model_on_a_slice(command, tmp_path):
  flags = "--topology=v5p:2x2x1", "--rows=4", "--config.mesh.expert=2", f"--folder={tmp_path}"
  done = command("compile", CONFIG, *flags, timeout=900)
  assert done.returncode == 0, done.stderr[-2000:]
  (report,) = tmp_path.glob("*/compile.json")
  found = json.loads(report.read_text(encoding="utf-8"))
  assert found["mesh"]["expert"] == 2 and found["mesh"]["data"] == 2
  kinds = {(exchange["kind"], "expert" in exchange["axis"]) for exchange in found["cost"]["exchanges"]}
  assert ("all-to-all", True) in kinds  # rows travel to their experts
  assert 0 < found["memory"]["needed"] < found["hbm_bytes"]
  assert report.with_suffix(".html").stat().st_size > 10_000
