"""Batches of rows through the model on one device or a mesh, for what is counted row by row."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from glm5_jax.config import ModelConfig
from glm5_jax.model import logical_axes
from glm5_jax.parallel import spmd
from glm5_jax.parallel.mesh import ROW_AXES, ROWS, replicated, row_sharding
from glm5_jax.parallel.rules import param_specs


def row_shards(mesh: Mesh | None) -> int:
  """How many parts the rows of a batch are dealt out in."""
  return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in ROW_AXES)


def on_mesh(rows: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
  """Each device's part of arrays [B, T], after padding rows that make the parts equal.

  Every process calls this with all rows.
  """

  def place(array: np.ndarray) -> jax.Array:
    padded = np.pad(array, ((0, -len(array) % row_shards(mesh)), (0, 0)))
    return jax.make_array_from_callback(padded.shape, row_sharding(mesh), lambda index: padded[index])

  return {name: place(array) for name, array in rows.items()}


def sum_over_slots(
  count: Callable[[Any, dict[str, jax.Array]], jax.Array],
  params: Any,
  cfg: ModelConfig,
  rows: dict[str, jax.Array],
  mesh: Mesh | None,
) -> jax.Array:
  """`count(params, rows)` of all slots of each row, on every process; to be traced by a caller's jit.

  Args:
    count: gives [n, m, B], sums over the slots of each row that this shard of `context` holds.
    rows: as `on_mesh` gives them where there is a mesh.
  """

  def of_rows(params: Any, rows: dict[str, jax.Array]) -> jax.Array:
    return spmd.psum(count(params, rows), ("context",))

  if mesh is None:
    return of_rows(params, rows)
  sums = jax.shard_map(
    of_rows,
    mesh=mesh,
    in_specs=(param_specs(logical_axes(cfg)), ROWS),
    out_specs=PartitionSpec(None, None, ROW_AXES),
    check_vma=False,
  )(params, rows)
  return jax.lax.with_sharding_constraint(sums, replicated(mesh))
