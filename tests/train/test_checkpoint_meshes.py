"""Checkpoints belong to no mesh: saved on one, restored on another, by fewer processes, after a kill."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
RESTORED_ON = {"2x2": 4, "8x1": 8, "1": 1, "experts": 8}  # devices


def start(devices: int, *arguments: object) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-m", "tests.train.mesh_checkpoints", *map(str, arguments)],
    cwd=ROOT,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
  try:
    out, error = process.communicate(timeout=240)
  finally:
    process.kill()
  return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def printed(process: subprocess.Popen) -> dict:
  done = finish(process)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  """All that the processes of mesh_checkpoints saw, each started once."""
  folder = tmp_path_factory.mktemp("meshes")
  victim = finish(start(8, "victim", folder / "killed"))
  assert victim.returncode == -signal.SIGKILL, victim.stderr
  before = sorted(path.name for path in (folder / "killed").iterdir())
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  two = [start(4, "pair", folder / "pair", address, number) for number in (0, 1)]
  two = [printed(process) for process in two]
  return printed(start(8, "restore", folder)) | {"before": before, "two": two}


@pytest.mark.parametrize("mesh", RESTORED_ON)
def test_bit_equal_with_the_targets_shardings(found, mesh):
  """Pitfall 25: saved on 4×2. Parameters, moments, counters and the random key."""
  seen = found["meshes"][mesh]
  assert seen["faults"] == []
  assert seen["data"] == "one" and seen["params alone"]
  assert seen["devices"] == RESTORED_ON[mesh]
  assert seen["draw"] == found["meshes"]["1"]["draw"]


def test_killed_during_a_sharded_save(found):
  """Pitfall 26. The restores above are of this folder; its leftover stood there and is gone."""
  assert found["before"][0] == "1" and len(found["before"]) == 2
  assert found["before"][1].startswith("2.") and "tmp" in found["before"][1]
  assert found["after the kill"] == ["1"]


def test_two_processes_save_one_checkpoint(found):
  for process in found["two"]:
    assert process["faults"] == [] and process["data"] == "both"
  assert found["two"][0]["sums"] == found["two"][1]["sums"]


def test_one_process_restores_what_two_saved(found):
  seen = found["pair"]
  assert seen["faults"] == [] and seen["data"] == "both" and seen["params alone"]


def test_another_architecture_is_refused(found):
  resuming, reading = found["refused"]
  assert "model.vocab_size was 128 and is now 256" in resuming
  assert "params/embed is float32[128, 64] there and float32[256, 64] here" in resuming
  assert "is of another architecture: params/embed is [128, 64] there and [256, 64] here" in reading
  assert "\n" not in resuming + reading


def test_an_imported_checkpoint_reads_on_every_mesh(found):
  assert found["imported"]


def test_checksums_gather_nothing(found):
  program = found["checksum"]
  assert program["argument"] == 4096 * 1024 * 4 // 8
  assert program["gathers"] == 0 and program["reduces"] >= 1
  assert program["temporaries"] < 1.1 * program["argument"]  # of its own shard; the whole array has eight
