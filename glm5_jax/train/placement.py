"""A run's mesh, and what lies on it: state, batches, a word from every process."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm5_jax.config import RunConfig
from glm5_jax.config_checks import parse_batch_warmup
from glm5_jax.data.batch import Batch
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.optim.groups import Optimizer
from glm5_jax.parallel.distributed import global_batch, local_parts
from glm5_jax.parallel.mesh import (
  AXES,
  axis_sizes,
  check_shapes,
  describe,
  make_mesh,
  replicated,
  row_sharding,
)
from glm5_jax.parallel.rules import param_shardings
from glm5_jax.train.state import TrainState, init_state, state_shardings


def run_mesh(run: RunConfig) -> Mesh | None:
  """The mesh of a run over all devices of all processes; None for one device, where nothing is split.

  Raises:
    UserError: sizes that do not multiply to the devices, or rows, tokens or a parameter that do not divide.
  """
  devices = jax.device_count()
  axis_sizes(run.mesh, devices)
  stages = [rows for rows, _ in parse_batch_warmup(run.train.batch_warmup)]
  for rows in (*stages, run.train.batch_size):
    check_shapes(run.mesh, devices, rows // run.train.grad_accum, run.data.seq_len)
  if devices == 1:
    return None
  mesh = make_mesh(run.mesh)
  param_shardings(mesh, logical_axes(run.model), abstract_params(run.model))
  return mesh


def devices_of(mesh: Mesh | None) -> str:
  """ "TPU v5p", or "8 × TPU v5p in 2 processes (fsdp 4 × expert 2)"."""
  kind = jax.local_devices()[0].device_kind
  if mesh is None:
    return kind
  several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
  return f"{jax.device_count()} × {kind}{several} ({describe(mesh)})"


def parts_of_rows(mesh: Mesh | None) -> tuple[list[int], int]:
  """Which rows of a batch this process makes, as (part, parts) of `data.pipeline.make_train_iterator`."""
  return ([0], 1) if mesh is None else local_parts(row_sharding(mesh))


def fresh_state(run: RunConfig, optimizer: Optimizer, mesh: Mesh | None, params: Any = None) -> TrainState:
  """`init_state`, each array made where it lies; `params`, where given, lie there and are taken over."""
  if mesh is None:
    # Bound to the device as a restored state is, so that both run the very same compiled step.
    return jax.device_put(init_state(run, optimizer, params), jax.local_devices()[0])
  init = jax.jit(
    lambda params: init_state(run, optimizer, params),
    out_shardings=state_shardings(run, optimizer, mesh),
    donate_argnums=0,
  )
  return init(params)


def on_devices(batch: Batch, mesh: Mesh | None) -> dict[str, jax.Array]:
  """The global arrays [B, T] of a batch of which every process gives the rows that it makes."""
  if mesh is None:
    return {name: jnp.asarray(value) for name, value in vars(batch).items()}
  return global_batch(vars(batch), row_sharding(mesh))


def all_rows(batch: Batch, mesh: Mesh | None) -> dict[str, Any]:
  """The whole batch on every process, from the rows that each makes. All have to call this together."""
  if mesh is None or jax.process_count() == 1:
    return vars(batch)
  copies = jax.jit(lambda x: x, out_shardings=replicated(mesh))(on_devices(batch, mesh))
  return {name: np.asarray(value) for name, value in copies.items()}


def largest(number: int, mesh: Mesh | None) -> int:
  """The largest of all processes' small numbers. All have to call this together."""
  if mesh is None or jax.process_count() == 1:
    return number
  one_each = NamedSharding(mesh, PartitionSpec(AXES))
  mine = np.array([number], np.int32)
  numbers = jax.make_array_from_callback((mesh.size,), one_each, lambda _: mine)
  return int(_largest_of(mesh)(numbers))


@functools.cache
def _largest_of(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
  return jax.jit(jnp.max, out_shardings=replicated(mesh))
