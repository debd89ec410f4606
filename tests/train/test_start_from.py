"""A run that begins with the parameters of another: of a run, of a Hugging Face folder, on any devices."""

import chex
import jax
import pytest

from glm5_jax import hf
from glm5_jax.errors import UserError
from glm5_jax.model import init_params
from glm5_jax.serve.load import open_model
from glm5_jax.train.loop import train
from tests.train.small_run import PLAIN, Lines, as_flags, saved, small_run

# Steps so small that every parameter stays what it is.
STILL = PLAIN | {"optim.schedule": "constant", "optim.peak_lr": 1e-30, "train.steps": 2}


@pytest.fixture(scope="module")
def parent(data, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "parent"
  assert train(small_run(data, **PLAIN), workdir, Lines())
  return workdir


def params(workdir, step=None):
  """Checksums of a checkpoint's parameters."""
  found = saved(workdir, step)["checksums"]
  return {path: value for path, value in found.items() if path.startswith("params/")}


def child(data, start_from, **fields):
  ours = STILL | {"train.start_from": str(start_from), "train.seed": 5}
  return small_run(data, **ours | fields)


def test_parameters_of_another_run(data, parent, tmp_path):
  lines = Lines()
  assert train(child(data, parent), tmp_path / "run", lines)
  assert f"starting from {parent}, step 6" in lines.lines
  assert saved(tmp_path / "run")["at"] == 2
  assert params(tmp_path / "run") == params(parent) != params(parent, 4)


def test_a_resumed_run_needs_its_parent_no_more(data, parent, tmp_path):
  workdir = tmp_path / "run"
  assert train(child(data, parent), workdir, Lines())
  longer, lines = child(data, tmp_path / "gone", **{"train.steps": 4}), Lines()
  assert train(longer, workdir, lines)
  assert "resuming from step 2" in lines.lines[0] and not lines.matching("starting from")


def test_on_four_devices(data, parent, tmp_path, command):
  flags = as_flags(child(data, parent, **{"mesh.fsdp": 4, "train.batch_size": 4}))
  done = command("train", *flags, f"--workdir={tmp_path / 'run'}", JAX_NUM_CPU_DEVICES="4")
  assert done.returncode == 0, done.stderr
  assert params(tmp_path / "run") == params(parent)


def test_parameters_of_a_hugging_face_folder(data, tmp_path):
  run = child(data, tmp_path / "hf", **{"model.attention": "D"})
  theirs = init_params(run.model, jax.random.key(3))
  hf.save_params(theirs, run.model, tmp_path / "hf")
  assert train(run, tmp_path / "run", Lines())
  chex.assert_trees_all_equal(open_model(tmp_path / "run").load_params(), theirs)


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"train.start_from": "nowhere"}, "no folder nowhere"),
    ({"model.hidden_size": 128}, "is of another architecture: params/"),
  ],
)
def test_refused(data, parent, tmp_path, fields, said):
  with pytest.raises(UserError, match=said):
    train(child(data, parent, **fields), tmp_path / "run", Lines())
  assert not (tmp_path / "run" / "config.json").exists()
