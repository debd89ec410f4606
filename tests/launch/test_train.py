"""launch.train as its users meet it: signals, kills, a full disk, exit codes, one line for each mistake."""

import os
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from glm5_jax.train.checkpoint_files import complete_steps
from glm5_jax.train.loop import train
from tests.conftest import ROOT
from tests.train.small_run import PLAIN, Lines, as_flags, contents, metrics, saved, small_run


def plain_run(data, **fields):
  return small_run(data, **(PLAIN | fields))


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "undisturbed"
  assert train(plain_run(data), workdir, Lines())
  return workdir


def assert_same_run(workdir, other):
  assert saved(workdir) == saved(other)
  assert metrics(workdir) == metrics(other)


def assert_refused(done, *said):
  """Exit code 2 and one line on stderr with every one of `said`."""
  assert done.returncode == 2, done.stdout + done.stderr
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
  assert all(text in lines[0] for text in said), lines[0]


def test_sigterm_saves_and_the_same_command_goes_on(data, undisturbed, tmp_path, command):
  arguments = [*as_flags(plain_run(data)), f"--workdir={tmp_path}"]
  started = [sys.executable, "-m", "launch.train", *arguments]
  with subprocess.Popen(
    started, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  ) as process:
    assert "parameters" in process.stdout.readline()  # now the step is compiled
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=300)
  assert process.returncode == 0, errors
  assert errors == "SIGTERM: saving after the step at hand; Ctrl-C stops at once\n"
  step = complete_steps(tmp_path / "checkpoints")[-1]
  assert step < 6
  assert said.splitlines()[-1] == f"stopped by SIGTERM and saved at step {step}; the same command goes on"

  resumed = command("train", *arguments)
  assert resumed.returncode == 0 and resumed.stderr == "", resumed.stderr
  assert resumed.stdout.startswith(f"resuming from step {step} in {tmp_path}\n")
  assert_same_run(tmp_path, undisturbed)

  before = contents(tmp_path)
  again = command("train", *arguments)
  assert again.returncode == 0 and again.stderr == ""
  assert again.stdout.endswith("step 6 of 6 is reached already; raise train.steps to go on\n")
  assert contents(tmp_path) == before


@pytest.mark.slow
def test_killed_then_a_full_disk_then_done(data, undisturbed, tmp_path, command):
  """The process dies between two checkpoints; its successor cannot save; the third one can."""
  run = plain_run(data, **{"train.eval_every": 9})
  flags = as_flags(run)
  killed = subprocess.run(
    [
      *(sys.executable, "-c"),
      f"""
import os, signal, time
from glm5_jax.config import RunConfig
from glm5_jax.train.checkpoint_files import complete_steps
from glm5_jax.train.loop import train
workdir = {str(tmp_path)!r}

def report(line):
  if line.startswith("step 3/6"):
    while not os.path.exists(workdir + "/checkpoints/2/commit_success.txt"):
      time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

train(RunConfig.from_json({run.to_json()!r}), workdir, report)
""",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert [entry["step"] for entry in metrics(tmp_path)] == [1, 2, 3]

  line = shlex.join([sys.executable, "-m", "launch.train", *flags, f"--workdir={tmp_path}"])
  # No file grows beyond 40 kB. Nor would what the compilation cache writes.
  full = subprocess.run(
    ["bash", "-c", f"ulimit -f 40; exec {line}"],
    cwd=ROOT,
    env={key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert_refused(full, "saving step 4", "no space left on the disk", "step 2 is complete and kept")
  assert complete_steps(tmp_path / "checkpoints") == [2]

  done = command("train", *flags, f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert saved(tmp_path) == saved(undisturbed)
  assert metrics(tmp_path, training_only=True) == metrics(undisturbed, training_only=True)


@pytest.mark.slow
def test_a_run_that_explodes_stops_and_names_the_batch(data, tmp_path, command):
  run = plain_run(data, **{"optim.peak_lr": 1e30, "optim.max_nonfinite": 2, "train.steps": 20})
  done = command("train", *as_flags(run), f"--workdir={tmp_path}")
  batch = tmp_path / "nonfinite_batch.npz"
  assert_refused(done, "not finite in 2 steps in a row", str(batch), "optim.peak_lr")
  assert np.load(batch)["tokens"].shape == (4, 32)
  assert metrics(tmp_path)[-1]["consecutive_skips"] < 2  # the last step is not logged: it ends the run


@pytest.mark.parametrize(
  ("flag", "said"),
  [
    ("--config.optim.peek_lr=1", ("config.optim.peek_lr is no field", "config.optim.peak_lr")),
    ("--config.optim.warmup_steps=6", ("config.optim.warmup_steps=6", "less than train.steps=6")),
    ("--config.data.folder=nowhere", ("data.folder nowhere does not exist", "launch.prepare")),
    ("--config.model.vocab_size=300", ("tokenizer.model has 360 ids", "model.vocab_size to at least 360")),
    ("--config.mesh.data=4", ("config.mesh: data 4 needs 4 devices, 1 found", "JAX_NUM_CPU_DEVICES=4")),
    ("--config.mesh.fsdp=4", ("fsdp 4 needs a multiple of 4 devices, 1 found", "JAX_NUM_CPU_DEVICES=4")),
    ("--config.model.hidden_size=32", ("model.hidden_size was 64 and is now 32", "start in another folder")),
  ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_lost(data, undisturbed, command, flag, said):
  before = contents(undisturbed)
  done = command("train", *as_flags(plain_run(data)), f"--workdir={undisturbed}", flag)
  assert_refused(done, *said)
  assert contents(undisturbed) == before


def test_workdir_is_required_and_must_be_a_folder(data, tmp_path, command):
  flags = as_flags(plain_run(data))
  assert_refused(command("train", *flags), "--workdir")
  (tmp_path / "file").touch()
  assert_refused(
    command("train", *flags, f"--workdir={tmp_path / 'file'}"), str(tmp_path / "file"), "File exists"
  )
