"""Slices of parameters that are still on the disk, and whole trees dealt over a mesh."""

import itertools
import json
import os

import ml_dtypes
import numpy as np
import pytest

from glm5_jax import hf
from glm5_jax.hf import names, safetensors_file
from glm5_jax.hf.lazy import Part, StoredParam
from tests.hf.conftest import GOLDEN, write_tensors

# Slices of an axis: all, one end, the middle, one element, nothing.
CUTS = (
  lambda n: slice(None),
  lambda n: slice(0, n // 2),
  lambda n: slice(n // 3, n - n // 3),
  lambda n: slice(n - 1, n),
  lambda n: slice(n, n),
)


def leaves(tree, path=()):
  for key, value in tree.items():
    yield from leaves(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_any_slice_of_any_parameter(cfg, random_params, tmp_path, param_dtype):
  cfg = cfg.replace(param_dtype=param_dtype)
  params = dict(leaves(random_params(cfg)))
  hf.save_params(random_params(cfg), cfg, tmp_path, max_shard_bytes=20_000)
  stored = dict(leaves(hf.open_params(tmp_path, cfg)))
  assert stored.keys() == params.keys()
  rng = np.random.default_rng(0)
  for path, param in stored.items():
    expected = params[path]
    assert (param.shape, param.dtype) == (expected.shape, expected.dtype)
    choices = [(CUTS[0],) * expected.ndim, *rng.choice(CUTS, size=(12, expected.ndim))]
    for choice in choices:
      index = tuple(cut(size) for cut, size in zip(choice, expected.shape, strict=True))
      got = param[index]
      assert got.dtype == expected.dtype and got.shape == expected[index].shape
      assert got.tobytes() == expected[index].tobytes(), (path, index)


def test_only_the_layers_and_experts_asked_for_are_read(golden, monkeypatch):
  read = []
  original = safetensors_file.StoredTensor.map

  def watch(self):
    read.append(self.name)
    return original(self)

  monkeypatch.setattr(safetensors_file.StoredTensor, "map", watch)
  params = hf.open_params(golden, hf.load_config(golden))
  assert read == []
  experts = params["layers_1"]["block_0"]["moe"]["experts"]["up_proj"]
  assert experts[1:2, 3:5, 2:7, :].shape == (1, 2, 5, experts.shape[3])
  assert read == [f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (3, 4)]


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (300, 129), (127, 500), (257, 256)])
def test_fp8_blocks_need_not_divide_the_shape(shape, to_fp8, tmp_path):
  values, scale, restored = to_fp8(np.random.default_rng(0).standard_normal(shape, np.float32))
  param = fp8_param(tmp_path, values, scale, shape, (0, 1))
  for rows, cols in itertools.product(CUTS, CUTS):
    index = (rows(shape[0]), cols(shape[1]))
    np.testing.assert_array_equal(param[index], restored[index])


@pytest.mark.parametrize(("view", "perm"), [((3, 90, 260), (2, 0, 1)), ((270, 2, 130), (1, 2, 0))])
def test_fp8_heads_straddle_blocks(view, perm, to_fp8, tmp_path):
  """Heads are split off the rows (q_b, kv_b) or the columns (o); 90 and 130 are no multiples of 128."""
  values, scale, restored = to_fp8(np.random.default_rng(0).standard_normal((270, 260), np.float32))
  expected = restored.reshape(view).transpose(perm)
  param = fp8_param(tmp_path, values, scale, view, perm)
  for choice in itertools.product(CUTS[:4], repeat=3):
    index = tuple(cut(size) for cut, size in zip(choice, expected.shape, strict=True))
    np.testing.assert_array_equal(param[index], expected[index])


def fp8_param(folder, values, scale, view, perm) -> StoredParam:
  file = folder / "model.safetensors"
  arrays = {"odd": np.zeros(3, ml_dtypes.float8_e4m3fn), "w": values, "w_scale": scale}
  specs = {name: (array.shape, array.dtype) for name, array in arrays.items()}
  write_tensors(file, specs, arrays.values())  # "odd" leaves the scales unaligned
  stored = safetensors_file.read_header(file)
  piece = names.Piece(("w",), perm)
  part = Part(names.Tensor("w", values.shape, view, (piece,)), piece, stored["w"], stored["w_scale"])
  shape = tuple(view[axis] for axis in perm)
  return StoredParam(shape, np.dtype(np.float32), {(): part})


# One process loads everything that the tests below look at.
SHARDED = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from glm5_jax import hf
from glm5_jax.config import MeshConfig
from glm5_jax.hf import lazy
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_shardings

folder = sys.argv[1]
cfg = hf.load_config(folder, param_dtype="bfloat16")
whole = jax.tree.map(np.asarray, hf.load_params(folder, cfg))
reads = []
original = lazy.Part.read
def watch(self, bounds):
  reads.append(int(np.prod([stop - start for start, stop in bounds])))
  return original(self, bounds)
lazy.Part.read = watch
out = {}
for name, sizes in json.loads(sys.argv[2]).items():
  mesh = make_mesh(MeshConfig(**sizes))
  shardings = param_shardings(mesh, logical_axes(cfg), abstract_params(cfg))
  reads.clear()
  params = hf.load_params(folder, cfg, shardings)
  leaves = jax.tree.leaves(params)
  out[name] = {
    "equal": all(jax.tree.leaves(jax.tree.map(
      lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == b.tobytes(), params, whole))),
    "placed": all(jax.tree.leaves(jax.tree.map(lambda a, s: a.sharding == s, params, shardings))),
    "devices": sorted({len(leaf.sharding.device_set) for leaf in leaves}),
    "shard": params["layers_1"]["block_0"]["moe"]["experts"]["up_proj"].addressable_shards[0].data.shape,
    "read": sum(reads), "size": sum(leaf.size for leaf in leaves),
  }
print(json.dumps(out))
"""
MESHES = {
  "one axis": {"data": 1, "fsdp": 8},
  "mixed": {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
  "replicas": {"data": 4, "fsdp": 1, "tensor": 2},
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
  import subprocess
  import sys

  done = subprocess.run(
    [sys.executable, "-c", SHARDED, str(GOLDEN), json.dumps(MESHES)],
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sharded_tree_is_the_whole_one_dealt_out(sharded, mesh):
  found = sharded[mesh]
  assert found["equal"] and found["placed"] and found["devices"] == [8]


def test_each_device_holds_its_own_part(sharded):
  # [layers, experts, embed, mlp] = [3, 8, 64, 32]
  assert sharded["one axis"]["shard"] == [3, 8, 8, 32]
  assert sharded["mixed"]["shard"] == [3, 4, 32, 16]
  assert sharded["replicas"]["shard"] == [3, 8, 64, 16]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_value_is_read_once_a_host(sharded, mesh):
  """Not once a replica."""
  assert sharded[mesh]["read"] == sharded[mesh]["size"]
