"""Checkpoints written slice by slice are as good as those saved from arrays."""

import itertools
import math
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from glm5_jax.config import RunConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.train import checkpoint_import
from glm5_jax.train.checkpoint import Checkpointer, load_params_checkpoint, save_params_checkpoint
from glm5_jax.train.checkpoint_import import chunk_shape, import_params_checkpoint
from glm5_jax.train.checksum import checksums, part_checksum
from tests.conftest import ROOT

CONFIG = RunConfig(name="import", model=tiny())


@pytest.fixture
def params():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
  return {
    "experts": normal(3, 4, 20, 12).astype(ml_dtypes.bfloat16),
    "block": {"odd": normal(7, 11), "prime": normal(127), "vector": normal(64), "whole": normal(4, 4)},
  }


@pytest.fixture
def small_chunks(monkeypatch):
  monkeypatch.setattr(checkpoint_import, "CHUNK_BYTES", 240)


def test_imported_equals_saved(params, small_chunks, tmp_path):
  import_params_checkpoint(tmp_path / "imported", params, CONFIG)
  save_params_checkpoint(tmp_path / "saved", jax.tree.map(jnp.asarray, params), CONFIG)
  for folder in ("imported", "saved"):
    loaded, config = load_params_checkpoint(tmp_path / folder)
    assert config == CONFIG
    same = lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == b.tobytes()  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, loaded, params))
  assert [path.name for path in (tmp_path / "imported").iterdir()] == ["0"]


def test_a_run_knows_the_step_for_what_it_is(params, tmp_path):
  import_params_checkpoint(tmp_path, params, CONFIG)
  checkpointer = Checkpointer(tmp_path, keep=1, config=CONFIG)
  assert checkpointer.latest_step() == 0
  with pytest.raises(UserError, match=r"cannot resume from .*/0: opt_state is absent there"):
    checkpointer.restore(None, {"params": params, "opt_state": jnp.zeros(3)})
  checkpointer.save(1, {"params": jax.tree.map(jnp.asarray, params)}, {})
  checkpointer.close()
  assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_reads_one_chunk_at_a_time_and_each_once(params, small_chunks, tmp_path):
  reads: list = []

  class Watched:
    def __init__(self, array):
      self.array, self.shape, self.dtype = array, array.shape, array.dtype
      self.seen = np.zeros(array.shape, int)

    def __getitem__(self, index):
      self.seen[index] += 1
      reads.append(self.array[index].nbytes)
      return self.array[index]

  watched = jax.tree.map(Watched, params)
  import_params_checkpoint(tmp_path, watched, CONFIG)
  assert all((leaf.seen == 1).all() for leaf in jax.tree.leaves(watched))
  assert max(reads) <= 240 and len(reads) > 20


@pytest.mark.parametrize(
  ("shape", "itemsize", "expected"),
  [
    ((75, 256, 6144, 2048), 2, (1, 1, 3072, 2048)),  # GLM-5's experts
    ((154880, 6144), 2, (1280, 6144)),
    ((75, 6144), 2, (75, 6144)),
    ((3, 2**20, 7), 4, (1, 2**19, 7)),
    ((2, 8388617), 4, (1, 2796205)),  # a prime length
    ((), 4, ()),
  ],
)
def test_chunks_are_large_and_not_too_large(shape, itemsize, expected):
  assert chunk_shape(shape, itemsize) == expected
  assert math.prod(expected) * itemsize <= checkpoint_import.CHUNK_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "uint8", "bool"])
def test_checksum_of_parts_sums_to_the_whole(dtype):
  bits = np.random.default_rng(0).integers(0, 256, (6, 10, 8), np.uint8)
  x = bits > 99 if dtype == "bool" else bits.view(np.dtype(dtype))
  with jax.enable_x64(dtype == "float64"):
    total = sum(
      part_checksum(x[rows, cols], (rows.start, cols.start, 0), x.shape)
      for rows, cols in itertools.product([slice(0, 1), slice(1, 6)], [slice(0, 7), slice(7, 10)])
    )
    assert total % 2**32 == checksums({"x": jnp.asarray(x)})["x"]


def test_killed_import_is_no_checkpoint_and_can_be_repeated(params, tmp_path):
  code = """
import os, signal, sys
import numpy as np
from glm5_jax.config import RunConfig, tiny
from glm5_jax.train.checkpoint_import import import_params_checkpoint
class Deadly:
  shape, dtype = (8, 3000, 1000), np.dtype(np.float32)
  def __getitem__(self, index):
    if index[0].start == 5:
      os.kill(os.getpid(), signal.SIGKILL)
    return np.ones((1, 3000, 1000), np.float32)
import_params_checkpoint(sys.argv[1], {"w": Deadly()}, RunConfig(model=tiny()))
"""
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=120
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert os.listdir(tmp_path) == ["0.orbax-checkpoint-tmp"]
  with pytest.raises(UserError, match="no complete checkpoint"):
    load_params_checkpoint(tmp_path)
  import_params_checkpoint(tmp_path, params, CONFIG)
  assert os.listdir(tmp_path) == ["0"]
  with pytest.raises(UserError, match="holds a checkpoint already; give another folder"):
    import_params_checkpoint(tmp_path, params, CONFIG)


def test_full_disk_leaves_nothing(tmp_path):
  code = """
import os, resource, sys
import numpy as np
from glm5_jax.config import RunConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint_import import import_params_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
w = np.random.default_rng(0).normal(size=(2000, 1000))
try:
  import_params_checkpoint(sys.argv[1], {"w": w}, RunConfig(model=tiny()))
except UserError as error:
  print(error)
"""
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == (
    f"importing parameters ({tmp_path}) failed: no space left on the disk; no step is complete there; "
    "free space or give another folder\n"
  )
  assert os.listdir(tmp_path) == []
