"""launch.convert, both ways, from the command line."""

import os
import shlex
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from glm5_jax import hf
from glm5_jax.config import RunConfig
from glm5_jax.train.checkpoint_import import import_params_checkpoint
from tests.conftest import ROOT


@pytest.fixture
def ours(golden, tmp_path):
  """The golden folder as a checkpoint."""
  cfg = hf.load_config(golden)
  import_params_checkpoint(tmp_path / "ours", hf.open_params(golden, cfg), RunConfig(model=cfg))
  return tmp_path / "ours"


def test_there_and_back(command, golden, tmp_path):
  there = command("convert", f"--source={golden}", f"--target={tmp_path}/ours")
  assert there.returncode == 0, there.stderr
  back = command(
    "convert", f"--source={tmp_path}/ours", f"--target={tmp_path}/back", "--max_shard_bytes=400000"
  )
  assert back.returncode == 0, back.stderr
  assert "329,112 parameters" in back.stdout
  shards = list((tmp_path / "back").glob("*.safetensors"))
  assert len(shards) == 4
  after = {name: array for shard in shards for name, array in load_file(shard).items()}
  before = load_file(golden / "model.safetensors")
  assert before.keys() == after.keys()
  assert all((before[name] == after[name]).all() for name in before)


def test_mistakes_are_one_line(command, golden, tmp_path):
  (tmp_path / "config.json").write_text('{"model_type": "llama"}')
  for arguments, named in [
    ([f"--source={golden}"], "--target"),
    ([f"--source={tmp_path}", f"--target={tmp_path}/x"], "model_type is 'llama'"),
  ]:
    done = command("convert", *arguments)
    assert done.returncode == 2
    assert named in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_torn_checkpoint_leaves_nothing(command, ours, tmp_path):
  for path in (ours / "0" / "state").rglob("d/*"):
    path.write_bytes(path.read_bytes()[:-100])
  done = command("convert", f"--source={ours}", f"--target={tmp_path}/back")
  assert done.returncode == 2, done.stderr
  assert f"checkpoint {ours}/0 is damaged" in done.stderr and done.stderr.count("\n") == 1
  assert not list((tmp_path / "back").glob("*"))


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(ours, tmp_path):
  """No file may grow beyond 500 kB; a write to a map of one would end the process."""
  line = shlex.join([sys.executable, "-m", "launch.convert", f"--source={ours}", f"--target={tmp_path}/back"])
  done = subprocess.run(
    ["bash", "-c", f"ulimit -f 500; exec {line}"],
    cwd=ROOT,
    env={key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 2, done.stderr
  assert done.stderr == f"error: {tmp_path}/back cannot be written: File too large\n"
  assert list((tmp_path / "back").iterdir()) == []
