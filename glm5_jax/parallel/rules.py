"""The one table from logical to mesh axes, and the shardings of parameters that follow from it.

A weight's axes are resolved from left to right; a mesh axis that an earlier one has taken is skipped. So an
expert's matrix ("experts", "embed", "mlp") is split over expert, then fsdp × context, then tensor, and a
dense one ("embed", "mlp") over fsdp × context × expert, then tensor. Vectors are whole everywhere.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm5_jax.errors import UserError
from glm5_jax.parallel.mesh import AXES

RULES: dict[str, tuple[str, ...]] = {
  "layers": (),  # reserved for pipeline stages
  "experts": ("expert",),
  "embed": ("fsdp", "context", "expert"),
  "embed_pair": ("fsdp", "context", "expert"),
  "q_rank": ("fsdp", "context", "expert"),
  "kv_rank": ("fsdp", "context"),  # a quarter of q_rank: too few rows for all three
  "heads": ("tensor",),
  "mlp": ("tensor",),
  "vocab": (),
  "head_dim": (),
  "index_heads": (),
  "index_dim": (),
}
# Axes that a computation uses in parts. All others are gathered where the weight is used (ZeRO-3).
KEPT_SPLIT = ("experts", "heads", "mlp")

Axes = tuple[str | None, ...]


def mesh_axes(axes: Axes) -> tuple[tuple[str, ...], ...]:
  """The mesh axes that each axis of a weight is split over."""
  if len([axis for axis in axes if axis != "layers"]) < 2:
    return ((),) * len(axes)
  taken: set[str] = set()
  out = []
  for axis in axes:
    mine = tuple(name for name in RULES[axis] if name not in taken) if axis else ()
    taken.update(mine)
    out.append(mine)
  return tuple(out)


def gathered_axes(axes: Axes) -> tuple[tuple[str, ...], ...]:
  """Of these, the ones that are gathered before the weight is used."""
  pairs = zip(axes, mesh_axes(axes), strict=True)
  return tuple(() if axis in KEPT_SPLIT else names for axis, names in pairs)


def spec(axes: Axes) -> PartitionSpec:
  """The stored layout of a weight with these logical axes."""
  return PartitionSpec(*(names or None for names in mesh_axes(axes)))


def unsplit_axes(partition: PartitionSpec) -> tuple[str, ...]:
  """The mesh axes over which a weight of this layout is the same: its gradients there are to be summed."""
  split = {name for entry in partition for name in _names(entry)}
  return tuple(name for name in AXES if name not in split)


def _names(entry: Any) -> tuple[str, ...]:
  """Mesh axes of one entry of a PartitionSpec, which shortens a tuple of one."""
  return (entry,) if isinstance(entry, str) else entry or ()


def param_specs(logical: Any) -> Any:
  """A tree of PartitionSpecs, from `model.logical_axes(cfg)`."""
  return jax.tree.map(lambda axes: spec(tuple(axes)), logical, is_leaf=lambda x: isinstance(x, PartitionSpec))


def param_shardings(mesh: Mesh, logical: Any, shapes: Any) -> Any:
  """A tree of NamedShardings.

  Raises:
    UserError: a dimension that does not divide over its mesh axes, with the numbers.
  """

  def check(path, shape, partition):
    for size, entry in zip(shape.shape, partition, strict=False):
      names = _names(entry)
      shards = math.prod(mesh.shape[name] for name in names)
      if size % shards:
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        parts = " × ".join(f"{name} {mesh.shape[name]}" for name in names if mesh.shape[name] > 1)
        raise UserError(
          f"{where} {list(shape.shape)}: {size} does not divide over the mesh's {parts} = {shards}"
        )
    return NamedSharding(mesh, partition)

  return jax.tree_util.tree_map_with_path(check, shapes, param_specs(logical))
