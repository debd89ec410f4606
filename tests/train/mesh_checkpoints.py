"""Saves and restores one known training state on meshes; test_checkpoint_meshes runs it in other processes.

JAX_NUM_CPU_DEVICES=8 python -m tests.train.mesh_checkpoints victim FOLDER    dies while it saves step 2
JAX_NUM_CPU_DEVICES=4 python -m tests.train.mesh_checkpoints pair FOLDER ADDRESS ID    one of two that save
JAX_NUM_CPU_DEVICES=8 python -m tests.train.mesh_checkpoints restore FOLDER    reads all that; prints JSON
"""

import functools
import glob
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from glm5_jax import hf
from glm5_jax.config import MeshConfig, RunConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.optim.groups import make_optimizer
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_shardings
from glm5_jax.train import checksum
from glm5_jax.train.checkpoint import Checkpointer, load_params_checkpoint
from glm5_jax.train.checkpoint_import import import_params_checkpoint
from glm5_jax.train.state import abstract_state

GOLDEN = Path(__file__).parent.parent / "golden" / "hf_tiny"
MESHES = {
  "4x2": {"fsdp": 4, "tensor": 2},
  "2x2": {"fsdp": 2, "tensor": 2},
  "8x1": {"fsdp": 8},
  "1": {},
  "experts": {"expert": 2, "data": 2, "context": 2},
}
SAVED_ON, *RESTORED_ON = MESHES
DEADLINE = 60  # seconds, for what another process or thread should do


def run_config(mesh: str, vocab_size: int = 128) -> RunConfig:
  model = tiny().replace(vocab_size=vocab_size, num_hidden_layers=2)
  return RunConfig(name="run", model=model, mesh=MeshConfig(**{"data": 1, **MESHES[mesh]}))


def devices(mesh: str) -> list[jax.Device]:
  return jax.devices()[: math.prod(MESHES[mesh].values())]


@functools.cache
def abstract(mesh: str, vocab_size: int = 128) -> Any:
  """The state's shapes, and its shardings on a mesh over the first devices."""
  run = run_config(mesh, vocab_size)
  optimizer = make_optimizer(run.optim, run.model, abstract_params(run.model), run.train.steps)
  return abstract_state(run, optimizer, make_mesh(run.mesh, devices(mesh)))


def words(leaf: Any) -> Any:
  return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def known(shapes: Any) -> Any:
  """NumPy values for every leaf, moments and counters too; a random key's are its words."""
  rng = np.random.default_rng(0)

  def fill(leaf):
    described = jax.eval_shape(words, leaf)
    return (rng.standard_normal(described.shape) * 100).astype(described.dtype)

  return jax.tree.map(fill, shapes)


def place(value: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  sharding = leaf.sharding
  if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
  return jax.jit(lambda: jax.random.wrap_key_data(value), out_shardings=sharding)()


def faults(tree: Any, shapes: Any) -> list[str]:
  """Leaves that are not, bit for bit, the known values on the devices that `shapes` names."""
  found = []
  leaves = zip(
    jax.tree_util.tree_leaves_with_path(tree),
    jax.tree.leaves(known(shapes)),
    jax.tree.leaves(shapes),
    strict=True,
  )
  for (path, leaf), value, wanted in leaves:
    shards = words(leaf).addressable_shards
    equal = all(np.asarray(shard.data).tobytes() == value[shard.index].tobytes() for shard in shards)
    if not equal or leaf.sharding != wanted.sharding or leaf.dtype != wanted.dtype:
      found.append(jax.tree_util.keystr(path))
  return found


def victim(folder: str) -> None:
  run = run_config(SAVED_ON)
  shapes = abstract(SAVED_ON)
  state = jax.tree.map(place, known(shapes), shapes)
  saver = Checkpointer(folder, 2, run)
  saver.save(1, state, b"one")
  saver.wait()
  sharding = jax.tree.leaves(shapes.params)[0].sharding
  large = jax.make_array_from_callback(
    (4096, 8192), sharding, lambda i: np.random.default_rng(0).random((4096, 8192), np.float32)[i]
  )
  saver.save(2, state.replace(params=state.params | {"large": large}), b"two")
  until = time.monotonic() + DEADLINE
  while not glob.glob(f"{folder}/2.*") and time.monotonic() < until:
    pass
  os.kill(os.getpid(), signal.SIGKILL)


def pair(folder: str, address: str, number: str) -> None:
  """Both processes hold half of every sharded array; the checkpoint is one."""
  jax.distributed.initialize(address, 2, int(number), initialization_timeout=DEADLINE)
  run = run_config(SAVED_ON)
  shapes = abstract(SAVED_ON)
  saver = Checkpointer(folder, 2, run)
  saver.save(1, jax.tree.map(place, known(shapes), shapes), b"both")
  saver.wait()
  state, data, _ = saver.restore(None, shapes)
  saver.close()
  params, _ = load_params_checkpoint(folder, None, shapes.params)
  sums = checksum.checksums(state)
  print(json.dumps({"faults": faults(state, shapes), "data": data.decode(), "sums": sums}))
  assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, params, shapes.params))


def restored(folder: str, meshes: list[str]) -> dict[str, Any]:
  """What restoring step 1 on each mesh gives."""
  out = {}
  for mesh in meshes:
    shapes = abstract(mesh)
    reader = Checkpointer(folder, 2, run_config(mesh))
    state, data, _ = reader.restore(1, shapes)
    reader.close()
    params, _ = load_params_checkpoint(folder, None, shapes.params)
    alone = jax.tree.map(lambda a, b: a.sharding == b.sharding and bool((a == b).all()), params, state.params)
    out[mesh] = {
      "faults": faults(state, shapes),
      "data": data.decode(),
      "params alone": jax.tree.all(alone),
      "devices": len(state.params["embed"].sharding.device_set),
      "draw": float(jax.random.normal(state.rng)),
    }
  return out


def refused(folder: str) -> list[str]:
  """What another architecture is told, resuming and reading parameters."""
  shapes = abstract("2x2", 256)
  reader = Checkpointer(folder, 2, run_config("2x2", 256))
  told = []
  for load in (
    lambda: reader.restore(None, shapes),
    lambda: load_params_checkpoint(folder, None, shapes.params),
  ):
    try:
      load()
    except UserError as error:
      told.append(str(error))
  reader.close()
  return told


def imported(folder: str) -> bool:
  """Whether a Hugging Face folder, written in chunks, is on every mesh what it is when read directly."""
  cfg = hf.load_config(GOLDEN)
  import_params_checkpoint(folder, hf.open_params(GOLDEN, cfg), RunConfig(model=cfg))
  shapes = abstract_params(cfg)
  axes = logical_axes(cfg)
  same = []
  for name in RESTORED_ON:
    mesh = make_mesh(run_config(name).mesh, devices(name))
    shardings = param_shardings(mesh, axes, shapes)
    wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    params, _ = load_params_checkpoint(folder, None, wanted)
    direct = hf.load_params(GOLDEN, cfg, shardings)
    equal = jax.tree.map(lambda a, b: a.sharding == b.sharding and bool((a == b).all()), params, direct)
    same.append(jax.tree.all(equal))
  return all(same)


def checksum_program() -> dict[str, Any]:
  """What the compiled checksum of a sharded array exchanges and holds, per device."""
  sharding = NamedSharding(make_mesh(run_config(SAVED_ON).mesh), PartitionSpec("fsdp", "tensor"))
  shape = jax.ShapeDtypeStruct((4096, 1024), np.float32, sharding=sharding)
  program = checksum._checksum.lower(shape).compile()
  memory = program.memory_analysis()
  return {
    "gathers": program.as_text().count("all-gather"),
    "reduces": program.as_text().count("all-reduce"),
    "argument": memory.argument_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
  }


def restore(folder: str) -> None:
  root = Path(folder)
  found = {
    "meshes": restored(str(root / "killed"), RESTORED_ON),
    "after the kill": sorted(path.name for path in (root / "killed").iterdir()),
    "refused": refused(str(root / "killed")),
    "pair": restored(str(root / "pair"), ["8x1"])["8x1"],
    "imported": imported(str(root / "imported")),
    "checksum": checksum_program(),
  }
  print(json.dumps(found))


if __name__ == "__main__":
  {"victim": victim, "pair": pair, "restore": restore}[sys.argv[1]](*sys.argv[2:])
