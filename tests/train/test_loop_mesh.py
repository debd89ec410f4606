"""One run on many devices: the numbers of one device, resumed on another mesh; impossible meshes refused."""

import json
import shutil

import pytest

from glm5_jax.train.checkpoint_files import complete_steps
from glm5_jax.train.loop import train
from tests.train.small_run import PLAIN, Lines, as_flags, metrics, small_run

# The plain model with its one layer made of experts.
MODEL = PLAIN | {"model.first_k_dense_replace": 0, "train.batch_size": 8}
UNOPTIMISED = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # programs of a few steps are not worth it
TOLERANCE = 1e-5


def mesh_run(folder, data=1, fsdp=1, expert=1):
  return small_run(folder, **MODEL, **{"mesh.data": data, "mesh.fsdp": fsdp, "mesh.expert": expert})


def assert_same_numbers(workdir, other):
  ours, theirs = metrics(workdir), metrics(other)
  assert [entry.keys() for entry in ours] == [entry.keys() for entry in theirs]
  for mine, expected in zip(ours, theirs, strict=True):
    assert mine == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
  """The run on one device, scored twice."""
  workdir = tmp_path_factory.mktemp("mesh") / "alone"
  assert train(mesh_run(data), workdir, Lines())
  return workdir


def test_same_numbers_on_eight_devices_and_resumed_on_two(data, alone, tmp_path, command):
  eight = tmp_path / "eight"
  flags = as_flags(mesh_run(data, fsdp=4, expert=2))
  done = command("train", *flags, f"--workdir={eight}", JAX_NUM_CPU_DEVICES="8", **UNOPTIMISED)
  assert done.returncode == 0 and done.stderr == "", done.stderr
  assert "8 rows of 32 tokens on 8 × cpu (fsdp 4 × expert 2), peak" in done.stdout
  assert_same_numbers(eight, alone)

  two = tmp_path / "two"
  shutil.copytree(eight, two)
  shutil.rmtree(two / "checkpoints" / "6")  # as if it had been killed before
  flags = as_flags(mesh_run(data, data=2))
  done = command("train", *flags, f"--workdir={two}", JAX_NUM_CPU_DEVICES="2", **UNOPTIMISED)
  assert done.returncode == 0 and done.stderr == "", done.stderr
  resumed = f"resuming from step 4 in {two}; mesh.data 1 → 2; mesh.fsdp 4 → 1; mesh.expert 2 → 1"
  assert done.stdout.splitlines()[0] == resumed
  assert complete_steps(two / "checkpoints") == [4, 6]
  assert_same_numbers(two, alone)


def test_impossible_mesh_is_refused_before_the_folder_is_made(data, tmp_path, command):
  flags = as_flags(mesh_run(data, fsdp=4))
  done = command("train", *flags, f"--workdir={tmp_path / 'run'}", JAX_NUM_CPU_DEVICES="8")
  assert done.returncode == 2
  assert done.stderr == (
    "error: config.mesh: fsdp 4 uses 4 of the 8 devices found and would leave the rest idle; "
    "set one axis to -1\n"
  )
  assert not (tmp_path / "run").exists()


REFUSED = {
  "fsdp 3 does not divide the 8 devices": {"mesh.fsdp": 3, "train.batch_size": 6},
  "16 needs 16 devices, 8 found": {"mesh.data": 16, "train.batch_size": 16},
  "4 rows: should be a multiple of 8": {"train.batch_size": 4},
  "= 4 rows: should be a multiple of 8, the mesh's data 8": {"train.batch_warmup": "4:3"},
  "rows: should be a multiple of 8, the mesh's data 4 · fsdp 1 · expert 2": {
    "mesh.expert": 2,
    "train.grad_accum": 2,
  },
  "data.seq_len=24: should be a multiple of 16": {"mesh.data": 1, "mesh.context": -1, "data.seq_len": 24},
  "36 does not divide over the mesh's fsdp 8 = 8": {"mesh.data": 1, "mesh.fsdp": -1, "model.q_lora_rank": 36},
}


def test_what_does_not_divide_over_the_devices_is_refused(data, on_devices):
  code = f"""
import json
from glm5_jax.errors import UserError
from glm5_jax.train.placement import run_mesh
from tests.train.small_run import small_run
said = []
for fields in json.loads({json.dumps(json.dumps(list(REFUSED.values())))}):
  run = small_run({data!r}, **{MODEL!r} | fields)
  run.validate()
  try:
    run_mesh(run)
    said.append("nothing")
  except UserError as error:
    said.append(str(error))
print(json.dumps(said))
"""
  said = json.loads(on_devices(code, count=8))
  for expected, message in zip(REFUSED, said, strict=True):
    assert expected in message and "\n" not in message
