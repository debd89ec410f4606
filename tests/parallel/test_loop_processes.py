"""A run in two processes: its numbers are one process's, a signal to one stops both, one process goes on."""

import signal
import time

import numpy as np
import pytest

from glm5_jax.data.pipeline import make_train_iterator
from glm5_jax.train.checkpoint_files import complete_steps
from glm5_jax.train.loop import train
from tests.parallel.processes import Group
from tests.train.small_run import PLAIN, Lines, as_flags, entries, small_run, write_data

DEADLINE = 400  # seconds
TOLERANCE = 1e-5


@pytest.fixture
def pair(tmp_path):
  """`pair(arguments of the first, of the second)` starts launch.train twice, with four devices each."""
  with Group(tmp_path) as group:

    def start(*arguments):
      environment = {"JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
      for i, own in enumerate(arguments):
        group.start(["-m", "launch.train", *own], i, **environment)
      return group

    yield start


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  return write_data(tmp_path_factory.mktemp("training"))


def run_of(data, **fields):
  """Each process reads a shard of its own."""
  return small_run(data, **{"train.steps": 12, "train.batch_size": 8, "data.shards": 2, **fields})


def of_steps(workdir):
  """(loss, tokens) or (bits per byte, bytes) of each line of metrics.jsonl."""
  names = (("loss", "tokens"), ("heldout_bpb", "heldout_bytes"))
  return [[entry[name] for pair in names for name in pair if name in entry] for entry in entries(workdir)]


@pytest.mark.slow
def test_two_processes_stopped_and_resumed_by_one(data, tmp_path, pair):
  workdir = tmp_path / "run"
  two = run_of(data, **{"mesh.data": 1, "mesh.fsdp": 4, "mesh.expert": 2})
  processes = pair(*[[*as_flags(two), f"--workdir={workdir}"]] * 2)
  processes.workers[0].wait_for("step 2/12  loss", DEADLINE)
  processes.workers[1].process.send_signal(signal.SIGTERM)
  assert processes.codes(DEADLINE) == [0, 0], processes.said_wrong()
  step = complete_steps(workdir / "checkpoints")[-1]
  assert 2 <= step < 12
  said = processes.workers[0].said()
  assert "8 rows of 32 tokens on 8 × cpu in 2 processes (fsdp 4 × expert 2), peak" in said
  assert f"stopped by SIGTERM and saved at step {step}; the same command goes on" in said
  assert not any(word in processes.workers[1].said() for word in ("step", "rows of", "stopped"))

  lines = Lines()
  assert train(run_of(data), workdir, lines)
  assert lines.lines[0].startswith(f"resuming from step {step} in {workdir}; mesh.data 1 → -1")
  assert train(run_of(data), tmp_path / "alone", Lines())
  expected = of_steps(tmp_path / "alone")
  found = of_steps(workdir)
  assert len(found) == len(expected) == 12 + 4
  for mine, theirs in zip(found, expected, strict=True):
    assert mine == pytest.approx(theirs, rel=TOLERANCE)


def test_what_one_process_refuses_both_refuse(data, tmp_path, pair):
  first = [*as_flags(run_of(data)), f"--workdir={tmp_path / 'run'}"]
  processes = pair(first, [*first, f"--config.data.folder={tmp_path / 'nowhere'}"])
  assert processes.codes(DEADLINE) == [2, 2]
  first, second = processes.said_wrong()
  refused = f"data.folder {tmp_path / 'nowhere'} does not exist"
  assert first.startswith(f"error: process 1: {refused}") and second.startswith(f"error: {refused}")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_killed_process_ends_the_other_and_one_alone_goes_on(data, tmp_path, pair):
  """Both hold slots of the same rows, so both read all of them."""
  workdir = tmp_path / "run"
  shared = run_of(data, **PLAIN, **{"mesh.data": 1, "mesh.context": 8, "train.checkpoint_every": 1})
  processes = pair(*[[*as_flags(shared), f"--workdir={workdir}"]] * 2)
  processes.workers[0].wait_for("step 3/12  loss", DEADLINE)
  processes.workers[1].kill()
  began = time.monotonic()
  assert processes.codes(DEADLINE) == [3, -signal.SIGKILL], processes.said_wrong()
  assert time.monotonic() - began < 60
  assert processes.said_wrong()[0].splitlines()[-1].startswith("error: process 0 of 2 ends: ")
  assert complete_steps(workdir / "checkpoints")[-1] >= 2
  assert train(run_of(data, **PLAIN), workdir, Lines())
  assert train(run_of(data, **PLAIN), tmp_path / "alone", Lines())
  for mine, theirs in zip(of_steps(workdir), of_steps(tmp_path / "alone"), strict=True):
    assert mine == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.slow
def test_both_stop_at_too_many_steps_that_are_not_finite_and_keep_all_rows(data, tmp_path, pair):
  run = run_of(data, **PLAIN, **{"optim.peak_lr": 1e30, "optim.max_nonfinite": 2})
  processes = pair(*[[*as_flags(run), f"--workdir={tmp_path / 'run'}"]] * 2)
  assert processes.codes(DEADLINE) == [2, 2], processes.said_wrong()
  for said in processes.said_wrong():
    assert said.startswith("error: loss or gradient not finite in 2 steps in a row") and said.count("\n") == 1
  batch = np.load(tmp_path / "run" / "nonfinite_batch.npz")
  rows = make_train_iterator(run.data, 8)
  wanted = [rows.next_batch() for _ in range(int(batch["step"]))][-1]
  rows.close()
  for name, array in vars(wanted).items():
    np.testing.assert_array_equal(batch[name], array)
