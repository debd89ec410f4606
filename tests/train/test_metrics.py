"""metrics.jsonl, TensorBoard's events, the clock and the progress line."""

import json
import math
import resource
import struct

import pytest
from tensorboardX.proto import event_pb2

from glm5_jax.errors import UserError
from glm5_jax.train import metrics
from glm5_jax.train.metrics import (
  MetricLog,
  Stopwatch,
  duration,
  logged_steps,
  progress_line,
  replace_file,
)


def log(folder, resumed_step, *written):
  log = MetricLog(folder, resumed_step)
  for step, values in written:
    log.write(step, values)
  log.close()


def lines(folder):
  return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(path):
  """The records of an event file: length (8 bytes), its checksum (4), the event, its checksum (4)."""
  data, found = path.read_bytes(), []
  while data:
    (length,) = struct.unpack("<Q", data[:8])
    found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  return found


def scalars(folder):
  """(step, name, value) of every scalar, files in the order of their making."""
  files = sorted((folder / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
  found = [(event.step, value) for path in files for event in events(path) for value in event.summary.value]
  return [(step, value.tag, value.simple_value) for step, value in found]


def test_numbers_go_to_both_files(tmp_path):
  log(tmp_path, 0, (5, {"loss": 2.5, "skipped": 0}), (5, {"heldout_bpb": 1.25}))
  assert lines(tmp_path) == [{"step": 5, "loss": 2.5, "skipped": 0.0}, {"step": 5, "heldout_bpb": 1.25}]
  assert scalars(tmp_path) == [(5, "loss", 2.5), (5, "skipped", 0.0), (5, "heldout_bpb", 1.25)]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
  """A process that is killed cannot flush."""
  log = MetricLog(tmp_path, 0)
  log.write(1, {"loss": 2.0})
  assert lines(tmp_path) == [{"step": 1, "loss": 2.0}] and scalars(tmp_path) == [(1, "loss", 2.0)]
  log.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not_become_null(tmp_path, value):
  log(tmp_path, 0, (1, {"loss": value, "lm_loss": 1.0}))
  assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "lm_loss": 1.0}\n'
  assert scalars(tmp_path) == [(1, "lm_loss", 1.0)]


def test_resuming_drops_what_is_done_again(tmp_path):
  log(tmp_path, 0, (1, {"loss": 3.0}), (2, {"loss": 2.0}), (2, {"heldout_bpb": 1.0}), (3, {"loss": 1.0}))
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "lo')  # torn by a crash
  log(tmp_path, 2, (3, {"loss": 1.5}))
  assert [(line["step"], line.get("loss")) for line in lines(tmp_path)] == [
    (1, 3),
    (2, 2),
    (2, None),
    (3, 1.5),
  ]
  newest = max((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
  starts = [event for event in events(newest) if event.session_log.status == event_pb2.SessionLog.START]
  assert [event.step for event in starts] == [3]  # TensorBoard forgets steps from here on of earlier files


def test_new_run_forgets_one_that_never_saved(tmp_path):
  log(tmp_path, 0, (1, {"loss": 3.0}))
  log(tmp_path, 0, (1, {"loss": 4.0}))
  assert lines(tmp_path) == [{"step": 1, "loss": 4.0}]
  assert len(list((tmp_path / "tensorboard").iterdir())) >= 1


def test_logged_steps(tmp_path):
  assert logged_steps(tmp_path, "loss") == set()
  log(tmp_path, 0, (1, {"loss": 3.0}), (2, {"loss": math.nan}), (2, {"heldout_bpb": 1.0}))
  assert logged_steps(tmp_path, "loss") == {1, 2}
  assert logged_steps(tmp_path, "heldout_bpb") == {2}


def test_other_processes_write_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  log(None, 0, (1, {"loss": 3.0}))
  assert list(tmp_path.iterdir()) == []


@pytest.fixture
def file_size():
  """file_size(n): files cannot grow beyond n bytes, as on a full disk; taken back after the test."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the event file cannot flush
def test_full_disk_is_one_line(tmp_path, file_size):
  (tmp_path / "checkpoints" / "7").mkdir(parents=True)
  (tmp_path / "checkpoints" / "7" / "commit_success.txt").touch()
  log = MetricLog(tmp_path, 0)
  log.write(1, {"loss": 2.0})
  file_size(40)
  with pytest.raises(UserError) as caught:
    log.write(2, {"loss": 1.0})
  file_size(resource.RLIM_INFINITY)
  message = str(caught.value)
  assert str(tmp_path) in message and "no space left on the disk; step 7 is complete and kept" in message
  log.close()


def test_full_disk_leaves_the_old_file(tmp_path, file_size):
  path = tmp_path / "config.json"
  replace_file(path, b"old")
  file_size(2)
  with pytest.raises(OSError):
    replace_file(path, b"new")
  file_size(resource.RLIM_INFINITY)
  assert [(found.name, found.read_bytes()) for found in tmp_path.iterdir()] == [("config.json", b"old")]
  replace_file(path, b"new")
  assert path.read_bytes() == b"new"


def test_unwritable_folder_is_one_line(tmp_path):
  (tmp_path / "tensorboard").touch()
  with pytest.raises(UserError, match="File exists"):
    MetricLog(tmp_path, 0)


# Time


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands until `clock.now` is moved."""

  class Clock:
    now = 100.0

    def perf_counter(self):
      return self.now

  clock = Clock()
  monkeypatch.setattr(metrics, "time", clock)
  return clock


def test_stopwatch_leaves_out_pauses_and_starts_each_lap_anew(clock):
  watch = Stopwatch()
  clock.now += 4
  with watch.pause():
    clock.now += 100
  watch.data_wait += 1.5
  watch.exclude(1)
  assert watch.lap() == (3.0, 1.5)
  clock.now += 2
  assert watch.lap() == (2.0, 0.0)


def test_stopwatch_pause_ends_with_an_error_too(clock):
  watch = Stopwatch()
  with pytest.raises(RuntimeError), watch.pause():
    clock.now += 5
    raise RuntimeError
  clock.now += 1
  assert watch.lap() == (1.0, 0.0)


@pytest.mark.parametrize(
  ("seconds", "said"),
  [
    (0, "0s"), (0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (125, "2m05s"), (3599.6, "1h00m"),
    (11220, "3h07m"), (86399, "23h59m"), (86400, "1d00h"), (100 * 86400 + 7200, "100d02h"),
  ],
)  # fmt: skip
def test_duration(seconds, said):
  assert duration(seconds) == said


VALUES = {
  "loss": 2.3456, "lm_loss": 2.0, "mtp_loss_2": 3.21, "mtp_loss_1": 3.0, "grad_norm": 0.5,
  "learning_rate": 2e-4, "router_load_violation": 1.25, "tokens_per_s": 12345.6, "mfu": 0.42,
  "data_wait": 0.01, "skipped": 0.0,
}  # fmt: skip


def test_progress_line():
  assert progress_line(10, 300, VALUES, 130.0) == (
    "step 10/300  loss 2.346  lm 2.000  mtp 3.00 3.21  grad 0.50  lr 2.0e-04  load 1.25  12,346 tok/s  "
    "mfu 42%  2m10s left"
  )


def test_progress_line_tells_of_skips_and_waiting_and_leaves_out_absent_depths():
  values = {name: v for name, v in VALUES.items() if "mtp" not in name}
  said = progress_line(10, 300, values | {"skipped": 3.0, "data_wait": 0.3, "loss": math.nan}, 0.0)
  assert "mtp" not in said and "loss nan" in said
  assert said.endswith("0s left  waiting for data 30%  skipped 3")
