"""Computes one model on one device and on meshes of 8, and prints how far the numbers are apart, as JSON.

  JAX_NUM_CPU_DEVICES=8 python -m tests.parallel.mesh_equality fsdp=8 expert=2,context=4 data=4,dcn_data=2 …

A difference is max|a − b| / max|a| over a leaf, the largest leaf named.
"""

import dataclasses
import functools
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from glm5_jax.config import MeshConfig, OptimConfig, RunConfig, TrainConfig, tiny
from glm5_jax.model import GLM5, abstract_params, logical_axes
from glm5_jax.parallel import spmd
from glm5_jax.parallel.mesh import AXES, ROWS, make_mesh, row_sharding
from glm5_jax.parallel.rules import param_specs
from glm5_jax.train.stages import optimizer_of
from glm5_jax.train.state import init_state, state_shardings
from glm5_jax.train.step import make_gradients, make_train_step

STEPS = 3


def run_config(rows: int = 16, length: int = 32, **model: Any) -> RunConfig:
  """Packed rows, sparse attention, indexers in training, two MTP depths, one overloaded expert, one empty."""
  cfg = tiny().replace(**({"num_hidden_layers": 2, "dsa_mode": "sparse", "mtp_depths": 2} | model))
  cfg.max_position_embeddings = max(cfg.max_position_embeddings, length)
  run = RunConfig(
    model=cfg,
    # eps: Adam would make steps of noise that is all there is of some gradients.
    optim=OptimConfig(peak_lr=1e-3, schedule="constant", warmup_steps=0, ns_dtype="float32", eps=1e-2),
    train=TrainConfig(steps=10, batch_size=rows, balance_weight=1e-2, loss_chunk=48),
  )
  if cfg.dsa_mode == "sparse" and "D" in cfg.attention:
    run.train.stage = "dsa_sparse"  # trains everything
  run.data.seq_len = length
  return run


def packed_batch(run: RunConfig) -> dict[str, np.ndarray]:
  """Two or three documents a row, some padding at the end, some targets without weight."""
  rng, rows, length = np.random.default_rng(0), run.train.batch_size, run.data.seq_len
  tokens = rng.integers(0, run.model.vocab_size, (rows, length)).astype(np.int32)
  segments = np.zeros_like(tokens)
  positions = np.zeros_like(tokens)
  for row in range(rows):
    cuts = sorted(rng.choice(np.arange(2, length - 1), 2, replace=False))
    for i, (begin, end) in enumerate(zip([0, *cuts], [*cuts, length - row % 3], strict=True)):
      segments[row, begin:end] = i + 1
      positions[row, begin:end] = np.arange(end - begin)
  last = np.roll(segments, -1, axis=1) != segments
  weights = np.where((segments != 0) & ~last & (rng.random(tokens.shape) > 0.1), 1.0, 0.0).astype(np.float32)
  targets = np.roll(tokens, -1, axis=1)
  return dict(tokens=tokens, targets=targets, weights=weights, positions=positions, segment_ids=segments)


def lopsided(params: Any) -> Any:
  """Every token prefers expert 0 and shuns expert 5."""

  def tilt(path, x):
    if "router_bias" not in jax.tree_util.keystr(path):
      return x
    return x.at[..., 0].add(10.0).at[..., 5].add(-10.0)

  return jax.tree_util.tree_map_with_path(tilt, params)


def decided(params: Any) -> Any:
  """Indexers whose scores differ: of alike scores the loss has a gradient that is all cancellation."""

  def sharpen(path, x):
    return 50.0 * x if "weights_proj" in jax.tree_util.keystr(path) else x

  return jax.tree_util.tree_map_with_path(sharpen, params)


def choices(run: RunConfig, mesh=None):
  """(params, batch) → every layer's selected keys and chosen experts, rows and slots in order."""

  cfg = run.model

  def of(params, batch):
    arguments = batch["tokens"], batch["positions"], batch["segment_ids"]
    _, kept = GLM5(cfg).apply({"params": params}, *arguments, mutable="intermediates")
    kept = kept["intermediates"]
    wanted = {
      jax.tree_util.keystr(path): x
      for path, x in jax.tree_util.tree_leaves_with_path(kept)
      if "selected_BTS" in jax.tree_util.keystr(path) or "experts_BTK" in jax.tree_util.keystr(path)
    }
    return {name: _whole_rows(x, x.ndim - 2) for name, x in wanted.items()}

  if mesh is None:
    return jax.jit(of)
  specs = param_specs(logical_axes(cfg))
  rows = jax.eval_shape(of, abstract_params(cfg), packed_batch(run))
  out = {name: jax.sharding.PartitionSpec(*(None,) * (x.ndim - 3), *ROWS) for name, x in rows.items()}
  return jax.jit(jax.shard_map(of, mesh=mesh, in_specs=(specs, ROWS), out_specs=out, check_vma=False))


def _whole_rows(x, slot_axis: int):
  moved = jnp.moveaxis(x, (slot_axis - 1, slot_axis), (0, 1))
  return jnp.moveaxis(spmd.gather_slots(moved), (0, 1), (slot_axis - 1, slot_axis))


def farthest(expected: Any, found: Any) -> tuple[float, str]:
  """(largest relative difference of a leaf, its path)."""
  worst = (0.0, "")
  leaves = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
  for (path, a), b in leaves:
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      continue
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not np.isfinite(b).all():
      return float("inf"), jax.tree_util.keystr(path)
    distance = float(np.max(np.abs(a - b), initial=0.0) / max(float(np.max(np.abs(a), initial=0.0)), 1e-30))
    worst = max(worst, (distance, jax.tree_util.keystr(path)))
  return worst


@functools.cache
def alone(model: str, accum: int, tilted: bool):
  """(choices, (gradients, metrics), state after the steps, metrics) of one device."""
  run, batch, state, optimizer = _begin(model, accum, tilted)
  mine = choices(run)(state.params, batch)
  gradients = jax.jit(make_gradients(run))(state.params, batch, jnp.float32(0.3))
  step = make_train_step(run, optimizer)
  history = []
  for _ in range(STEPS):
    state, metrics = step(state, batch)
    history.append(jax.device_get(metrics))
  return (
    jax.device_get((mine, gradients)),
    jax.device_get(state.params),
    jax.device_get(state.opt_state),
    history,
  )


def _begin(model: str, accum: int, tilted: bool, mesh=None):
  run = run_config(**json.loads(model))
  run.train.grad_accum = accum
  run.validate()
  optimizer = optimizer_of(run, mesh)
  state = init_state(run, optimizer)
  params = decided(state.params)
  state = state.replace(params=lopsided(params) if tilted else params)
  return run, {name: jnp.asarray(x) for name, x in packed_batch(run).items()}, state, optimizer


class SliceDevice:
  """A CPU device that says which slice it belongs to, which jax's own do not."""

  def __init__(self, device: jax.Device, slice_index: int):
    self.device, self.slice_index = device, slice_index

  def __getattr__(self, name: str) -> Any:
    return getattr(self.device, name)


def assert_slices_are_outermost(mesh: Mesh, cfg: MeshConfig) -> None:
  """Only the outer parts of data and fsdp lead from one slice to another."""
  for (data, fsdp, *_), device in np.ndenumerate(mesh.devices):
    outer = data * cfg.dcn_data // mesh.shape["data"], fsdp * cfg.dcn_fsdp // mesh.shape["fsdp"]
    assert device.slice_index == outer[0] * cfg.dcn_fsdp + outer[1], (data, fsdp)


def mesh_of(cfg: MeshConfig) -> Mesh:
  """`make_mesh` over the first devices, which several slices, if the config has them, hold in turn."""
  devices = jax.devices()[: math.prod(getattr(cfg, axis) for axis in AXES)]
  slices = cfg.dcn_data * cfg.dcn_fsdp
  if slices == 1:
    return make_mesh(cfg, devices)
  mesh = make_mesh(cfg, [SliceDevice(device, i % slices) for i, device in enumerate(devices)])
  assert_slices_are_outermost(mesh, cfg)
  ours = np.vectorize(lambda each: each.device, otypes=[object])(mesh.devices)
  return Mesh(ours, mesh.axis_names, axis_types=mesh.axis_types)


def compare(sizes: dict[str, int], model: str = "{}", accum: int = 1, tilted: bool = False) -> dict:
  mesh = mesh_of(MeshConfig(**({"data": 1} | sizes)))
  (mine, gradients), params, moments, history = alone(model, accum, tilted)
  run, batch, state, optimizer = _begin(model, accum, tilted, mesh)
  state = jax.device_put(state, state_shardings(run, optimizer, mesh))
  batch = jax.device_put(batch, row_sharding(mesh))
  found = choices(run, mesh)(state.params, batch)
  same = all(np.array_equal(mine[name], np.asarray(found[name])) for name in mine)
  grads = jax.jit(make_gradients(run, mesh))(state.params, batch, jnp.float32(0.3))
  step = make_train_step(run, optimizer, mesh)
  losses = []
  for _ in range(STEPS):
    state, metrics = step(state, batch)
    losses.append(jax.device_get(metrics))
  return {
    "choices": same,
    "sets": len(mine),
    "gradients": farthest(gradients, grads),
    "params": farthest(params, state.params),
    "moments": farthest(moments, state.opt_state),
    "metrics": farthest(history, losses),
  }


def main(argv: list[str]) -> None:
  results = {}
  for case in argv:
    fields = dict(part.split("=", 1) for part in case.split(",") if "=" in part)
    accum, tilted = int(fields.pop("accum", 1)), bool(int(fields.pop("tilted", 0)))
    names = {field.name for field in dataclasses.fields(MeshConfig)}
    sizes = {name: int(value) for name, value in fields.items() if name in names}
    model = {name: json.loads(value) for name, value in fields.items() if name not in names}
    results[case] = compare(sizes, json.dumps(model), accum, tilted)
    print(case, json.dumps(results[case]), file=sys.stderr, flush=True)
  print(json.dumps(results))


if __name__ == "__main__":
  main(sys.argv[1:])
