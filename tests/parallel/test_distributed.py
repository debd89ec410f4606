"""Real processes on this machine that meet through a coordinator on the loopback interface."""

import socket
import textwrap
import time

import pytest

from glm5_jax.data.prepare import PrepareConfig, prepare
from glm5_jax.errors import UserError
from glm5_jax.parallel import distributed
from tests.parallel.processes import Group, Worker, free_address

EXPERIMENT = "--config=experiments/tiny.py"

# What every worker begins with; its body runs where a command would train.
PRELUDE = """
import json, os, sys, time
from launch.common import distributed_flags, run
TOGETHER = distributed_flags()

def main(_argv):
  with TOGETHER() as several:
    import jax, numpy as np
    from glm5_jax.parallel import distributed
    me = jax.process_index()
    body(jax, np, distributed, me)
    print("ended", flush=True)
"""


@pytest.fixture
def group(tmp_path):
  with Group(tmp_path) as group:
    yield group


@pytest.fixture
def workers(tmp_path, group):
  """`workers(body, count=2)` starts processes with the body of `def body(jax, np, distributed, me)`."""

  def start(body: str, *flags: str, count: int = 2, ids=None, sizes=None, address: str = "") -> list[Worker]:
    script = tmp_path / "worker.py"
    function = "def body(jax, np, distributed, me):\n" + textwrap.indent(textwrap.dedent(body), "  ")
    script.write_text(f"{PRELUDE}\n{function}\nrun(main)\n")
    for k, process_id in enumerate(range(count) if ids is None else ids):
      size = sizes[k] if sizes else count
      group.start([str(script), *flags], process_id, size, address, JAX_NUM_CPU_DEVICES="2")
    return group.workers

  return start


def last_line(worker: Worker) -> str:
  return worker.said_wrong().strip().splitlines()[-1]


def outputs(group: list[Worker], timeout: float = 90) -> list[str]:
  """What each printed, once all have ended well, without the chat of gloo."""
  for worker in group:
    assert worker.wait(timeout) == 0, worker.said_wrong()
  lines = [worker.said().splitlines(keepends=True) for worker in group]
  return ["".join(line for line in each if not line.startswith("[Gloo]")) for each in lines]


def test_sum_over_both_processes_each_feeding_its_own_rows(workers):
  group = workers("""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
    rows = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 0, 2]):
      devices = np.array(jax.devices())[order]
      sharding = NamedSharding(Mesh(devices, ("data",)), P("data"))
      mine, parts = distributed.local_parts(sharding)
      assert parts == 4 and len(mine) == 2
      local = np.concatenate([rows[2 * part : 2 * part + 2] for part in mine])
      x = distributed.global_batch({"x": local}, sharding)["x"]
      assert x.shape == (8, 3)
      total = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x.sum(0), "data"), mesh=sharding.mesh, in_specs=P("data"), out_specs=P()))(x)
      np.testing.assert_array_equal(np.asarray(total), rows.sum(0))
      whole = jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, P()))(x)
      np.testing.assert_array_equal(np.asarray(whole), rows)
      print(order, mine)
    # Processes that differ along another axis alone feed the same rows.
    sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2).T, ("data", "tensor")), P("data"))
    assert distributed.local_parts(sharding) == ([0, 1], 2)
    assert distributed.local_parts(NamedSharding(sharding.mesh, P())) == ([0], 1)
  """)
  first, second = outputs(group)
  assert first == "[0, 1, 2, 3] [0, 1]\n[0, 2, 1, 3] [0, 2]\n[3, 1, 0, 2] [1, 2]\nended\n"
  assert second == "[0, 1, 2, 3] [2, 3]\n[0, 2, 1, 3] [1, 3]\n[3, 1, 0, 2] [0, 3]\nended\n"


def test_exchange_of_values_and_a_barrier_with_a_deadline(workers):
  group = workers("""
    for _ in range(3):
      assert distributed.gather_json({"from": me, "pair": (1, 2)}) == [
        {"from": 0, "pair": [1, 2]}, {"from": 1, "pair": [1, 2]}]
    large = distributed.gather_json("x" * 300_000 + str(me))
    assert [value[-1] for value in large] == ["0", "1"]
    distributed.barrier("both here", 30)
  """)
  assert outputs(group) == ["ended\n", "ended\n"]


def test_barrier_in_vain_ends_at_its_deadline(workers):
  group = workers("""
    if me == 0:
      distributed.barrier("saving step 5", 2)
    time.sleep(300)
  """)
  assert group[0].wait(60) == distributed.LOST
  assert one_error_line(group[0]).startswith("error: saving step 5: not all 2 processes came within 2 s (")
  assert group[1].wait(20) == distributed.LOST
  assert "process 0 failed: saving step 5" in last_line(group[1])


def test_training_data_of_two_processes_is_that_of_one(workers, tmp_path):
  texts, folder = tmp_path / "texts", tmp_path / "data"
  texts.mkdir()
  for i in range(30):
    lines = (f"def function_{i}_{j}(value):\n    return value + {i * j}\n" for j in range(1 + i * 7 % 23))
    (texts / f"{i}.py").write_text("".join(lines))
  prepare(PrepareConfig(str(folder), [str(texts)], vocab_size=340, heldout=0.2), report=lambda line: None)
  group = workers(f"""
    from glm5_jax.config import DataConfig
    from glm5_jax.data.pipeline import make_train_iterator, merge_states
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    cfg = DataConfig(folder={str(folder)!r}, seq_len=24, shards=2, shuffle_window=5)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    data = make_train_iterator(cfg, 8, *distributed.local_parts(NamedSharding(mesh, P("data"))))
    alone = make_train_iterator(cfg, 8)
    replicate = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    for rows in (8, 4, 8):
      batch = distributed.global_batch(vars(data.next_batch(rows)), NamedSharding(mesh, P("data")))
      whole = vars(alone.next_batch(rows))
      for name, array in batch.items():
        np.testing.assert_array_equal(np.asarray(replicate(array)), whole[name])
    merged = merge_states(distributed.gather_json(data.get_state()))
    assert merged == json.loads(json.dumps(alone.get_state()))
    data.close(), alone.close()
  """)
  assert outputs(group) == ["ended\n", "ended\n"]


def one_error_line(worker: Worker) -> str:
  text = worker.said_wrong()
  assert text.startswith("error: ") and text.count("\n") == 1, text
  return text


def test_coordinator_that_nobody_runs_is_named_within_the_deadline(command):
  address, began = free_address(), time.monotonic()
  done = command(
    "train", EXPERIMENT, "--workdir=unused", f"--coordinator={address}", "--processes=2", "--process_id=1",
    "--coordinator_timeout=2", timeout=60,
  )  # fmt: skip
  assert done.returncode == 2
  assert done.stderr.startswith(f"error: no answer from the coordinator at {address} within 2 s")
  assert done.stderr.count("\n") == 1
  assert time.monotonic() - began < 30


def test_coordinator_that_accepts_and_never_answers_is_named(workers):
  with socket.create_server(("127.0.0.1", 0)) as silent:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    [worker] = workers("pass", "--coordinator_timeout=2", ids=[1], address=address)
    assert worker.wait(60) == 2
  assert f"did not meet at the coordinator {address} within 2 s" in one_error_line(worker)


@pytest.mark.slow
def test_process_that_waits_alone_gives_up(workers):
  [worker] = workers("pass", "--coordinator_timeout=2", ids=[0])
  assert worker.wait(60) == 2
  assert "process 0 of 2: the processes did not meet" in one_error_line(worker)


def test_processes_that_disagree_on_their_number_are_refused(workers):
  first, second = workers("time.sleep(60)", ids=[0, 1], sizes=[2, 3])
  assert second.wait(60) == 2
  assert "--processes=3 here and 2 in process 0" in one_error_line(second)
  assert first.wait(20) == distributed.LOST
  assert "process 1 failed: --processes=3 here" in one_error_line(first)


@pytest.mark.parametrize(
  ("choice", "message"),
  [
    (("127.0.0.1:1", 2, 2), r"--process_id=2 --processes=2: the id should be 0 … processes − 1"),
    (("127.0.0.1:1", 2, -2), r"--process_id=-2"),
    (("127.0.0.1:1", -1, 0), r"--processes=-1"),
    (("127.0.0.1:1", 2, -1), r"--process_id must be given too"),
    (("127.0.0.1:1", 0, -1), r"--processes and --process_id must be given too"),
    (("", 2, 0), r"--coordinator=host:port must be given too"),
    (("127.0.0.1", 2, 0), r"--coordinator=127.0.0.1: should be host:port"),
    (("127.0.0.1:1", 2, 0, 0), r"--coordinator_timeout=0: should be at least 1"),
  ],
)
def test_impossible_choice_is_refused(choice, message):
  with pytest.raises(UserError, match=message):
    distributed.start(*choice)


def test_process_by_itself_needs_nothing():
  assert distributed.start() is False
  assert distributed.start(processes=1) is False
  assert distributed.gather_json({"a": (1,)}) == [{"a": [1]}]
  distributed.barrier("alone")
  distributed.finish()


def test_environment_of_a_cluster_is_used(monkeypatch):
  slurm = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "2", "PROCID": "1", "LOCALID": "1"}
  for name, value in slurm.items():
    monkeypatch.setenv(f"SLURM_{name}", value)
  with pytest.raises(UserError, match=r"coordinator at localhost:61447 within 1 s \(process 1 of 2\)"):
    distributed.start(timeout_s=1)
  assert distributed.start(processes=1) is False
  monkeypatch.setenv("SLURM_NTASKS", "1")
  monkeypatch.setenv("SLURM_PROCID", "0")
  assert distributed.start() is False


STEPS = """
  from jax.experimental import multihost_utils
  for step in range(100_000):
    multihost_utils.process_allgather(np.float32(step))
    if step == 5:
      print("running", flush=True)
    time.sleep(0.05)
"""
IDLE = 'print("running", flush=True); time.sleep(300)'


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_other_in_the_middle_of_a_step(workers, victim):
  group = workers(STEPS)
  for worker in group:
    worker.wait_for("running")
  group[victim].process.kill()
  other = group[1 - victim]
  assert other.wait(60) == distributed.LOST
  assert last_line(other).startswith(f"error: process {1 - victim} of 2 ends: ")


def test_killed_coordinator_ends_an_idle_process_at_once(workers):
  group = workers(IDLE)
  for worker in group:
    worker.wait_for("running")
  group[0].process.kill()
  assert group[1].wait(60) == distributed.LOST
  assert "process 0, the coordinator at 127.0.0.1:" in last_line(group[1])
  assert last_line(group[1]).endswith("died or cannot be reached")


@pytest.mark.slow
def test_killed_process_ends_an_idle_coordinator_within_a_minute(workers):
  group = workers(IDLE)
  for worker in group:
    worker.wait_for("running")
  group[1].process.kill()
  assert group[0].wait(60) == distributed.LOST
  assert last_line(group[0]).startswith("error: process 0 of 2 ends: another process died")


@pytest.mark.parametrize("failing", [0, 1])
def test_process_that_fails_reports_its_error_and_the_other_tells_it(workers, failing):
  group = workers(f"""
    from glm5_jax.errors import UserError
    if me == {failing}:
      raise UserError("this machine lacks something")
    time.sleep(300)
  """)
  assert group[failing].wait(60) == 2
  assert one_error_line(group[failing]) == "error: this machine lacks something\n"
  other = group[1 - failing]
  assert other.wait(20) == distributed.LOST
  told = f"process {1 - failing} of 2 ends: process {failing} failed: this machine lacks something"
  assert last_line(other) == f"error: {told}"


@pytest.mark.slow
def test_bug_in_one_process_shows_its_traceback(workers):
  failing, other = workers("assert me, 'a bug'\ntime.sleep(300)")
  assert failing.wait(60) == 1
  assert last_line(failing) == "AssertionError: a bug"
  assert other.wait(20) == distributed.LOST


def test_port_that_is_taken_is_refused(workers):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    [worker] = workers("pass", "--coordinator_timeout=5", ids=[0], address=address)
    assert worker.wait(60) == 2
  assert address in one_error_line(worker)
