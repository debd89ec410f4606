"""No host ever holds the whole model: peaks of a 3 GB folder, each measured in a process of its own."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from glm5_jax.config import tiny
from glm5_jax.hf import names, safetensors_file
from tests.conftest import ROOT
from tests.hf.conftest import GOLDEN, write_tensors

MB = 2**20
# Baseline: the process after all the same on a tiny folder. Linux counts ru_maxrss in KiB; pages of mapped
# files count.
PREFIX = """
import json, resource, sys
from pathlib import Path
import jax, numpy as np
from glm5_jax import hf
tiny, large, target = sys.argv[1:]
def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""
CONVERT = """
from absl import flags
from launch import convert
from glm5_jax.train.checkpoint import load_params_checkpoint
def run(source, target):
  flags.FLAGS(["convert", f"--source={source}", f"--target={target}"])
  convert.main([])
run(tiny, target + "/tiny")
before = peak()
run(large, target + "/large")
rise = peak() - before
params, config = load_params_checkpoint(target + "/large")  # compares the checksums
def last(a):
  return np.asarray(a[(slice(-1, None), *[slice(None)] * (len(a.shape) - 1))]).tobytes()
stored = hf.open_params(large, config.model)
same = all(last(a) == last(b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(stored), strict=True))
print(json.dumps({"rise": rise, "bytes": sum(x.nbytes for x in jax.tree.leaves(params)), "same": same}))
"""
EXPORT = """
from absl import flags
from launch import convert
def run(source, target):
  flags.FLAGS(["convert", f"--source={source}", f"--target={target}"])
  convert.main([])
run(tiny, target + "/tiny")
before = peak()
run(large, target + "/large")
rise = peak() - before
count = sum(path.stat().st_size for path in Path(target, "large").glob("*.safetensors"))
print(json.dumps({"rise": rise, "bytes": count}))
"""
LOAD = """
from glm5_jax.config import MeshConfig
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_shardings
def load(folder):
  cfg = hf.load_config(folder)
  mesh = make_mesh(MeshConfig(data=1, fsdp=4, expert=2))
  return hf.load_params(folder, cfg, param_shardings(mesh, logical_axes(cfg), abstract_params(cfg)))
load(tiny)
before = peak()
params = load(large)
rise = peak() - before
print(json.dumps({"rise": rise, "bytes": sum(x.nbytes for x in jax.tree.leaves(params))}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
  """Three layers of 64 experts, bfloat16, in files of half a gigabyte; the largest tensor has 16 MB."""
  folder = tmp_path_factory.mktemp("large")
  cfg = tiny().replace(
    num_hidden_layers=4,
    hidden_size=1024,
    moe_intermediate_size=2560,
    n_routed_experts=64,
    vocab_size=8192,
    num_nextn_predict_layers=0,
    param_dtype="bfloat16",
    dtype="bfloat16",
  )
  (folder / "config.json").write_text(json.dumps(cfg.to_hf()))
  rng = np.random.default_rng(0)
  files: list[list[names.Tensor]] = [[]]
  size = 0
  for tensor in names.tensors(cfg):
    if size > 512 * MB:
      files.append([])
      size = 0
    files[-1].append(tensor)
    size += 2 * int(np.prod(tensor.shape))
  weight_map = {}
  for number, tensors in enumerate(files):
    file = folder / f"model-{number}.safetensors"
    specs = {t.name: (t.shape, names.param_dtype(cfg, t.pieces[0].path)) for t in tensors}
    values = (
      rng.integers(0, 0x40, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
      for shape, dtype in specs.values()
    )
    write_tensors(file, specs, values)
    weight_map |= dict.fromkeys(specs, file.name)
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
  return folder


def measure(code, *arguments):
  done = subprocess.run(
    [sys.executable, "-c", PREFIX + code, *map(str, arguments)],
    cwd=ROOT,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  print(f"peak rises by {found['rise'] / MB:.0f} MB for {found['bytes'] / MB:.0f} MB of parameters")
  assert found["bytes"] > 3e9
  return found


@pytest.fixture(scope="module")
def imported(large, tmp_path_factory):
  """(folder with the checkpoints "tiny" and "large", what making them took)"""
  folder = tmp_path_factory.mktemp("imported")
  return folder, measure(CONVERT, GOLDEN, large, folder)


@pytest.mark.slow
def test_import_holds_a_few_chunks(imported):
  _, found = imported
  assert found["same"]
  assert found["rise"] < 0.3 * found["bytes"]  # most of it: compiled checksums, the allocator's arenas


@pytest.mark.slow
def test_export_holds_a_few_chunks(imported, large, tmp_path):
  folder, _ = imported
  found = measure(EXPORT, folder / "tiny", folder / "large", tmp_path)
  assert found["rise"] < 0.3 * found["bytes"]
  before, after = (stored_tensors(path) for path in (large, tmp_path / "large"))
  assert before.keys() == after.keys()
  for name, tensor in before.items():
    assert tensor.map().tobytes() == after[name].map().tobytes(), name


def stored_tensors(folder):
  files = map(safetensors_file.read_header, folder.glob("*.safetensors"))
  return {name: tensor for tensors in files for name, tensor in tensors.items()}


@pytest.mark.slow
def test_loading_holds_the_shards_and_little_more(large):
  found = measure(LOAD, GOLDEN, large, "unused")
  assert found["rise"] < 1.1 * found["bytes"]
