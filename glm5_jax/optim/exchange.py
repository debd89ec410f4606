"""Matrices that lie in parts on several devices: in to where they are whole, worked on, and out again.

Every weight is a batch of matrices: layers, experts and heads are the batch. A device holds a part of each
of its n matrices when their rows or columns are split over S devices. One all-to-all among these S gives
each of them n/S whole matrices, another takes the results back. Where R such groups hold copies (a per-head
weight is the same on every shard of `expert`) each group works on n/R of the matrices only and sends results
to all, which is n/R in and n out instead of n and n. A matrix that is whole on its device does not travel.
Nothing travels along `data`, which may cross a slow network: its replicas each do all the work.

Where n is no multiple of S the batch is filled up with zeros. To waste little, weights whose matrices have
the same shape and layout, transposed or not, share an exchange.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from optax.contrib import MuonDimensionNumbers

Sizes = Mapping[str, int]  # devices along each mesh axis

TOGETHER = 2**29  # entries on a device up to which weights share an exchange: all are in flight at once


class Kind(NamedTuple):
  """How a matrix lies on the devices. Weights alike in this may share an exchange."""

  part: tuple[int, int]  # rows and columns on one device
  grid: tuple[int, int]  # parts that rows and columns are split into
  axes: tuple[str, ...]  # mesh axes of this split, the rows' first
  groups: int  # devices along the axes in `copies`
  copies: tuple[str, ...]  # mesh axes along which the matrix is the same

  @property
  def shards(self) -> int:
    return math.prod(self.grid)


@dataclasses.dataclass(frozen=True)
class Layout:
  """One device's part of a weight as a batch of parts of matrices, turned to have rows ≤ columns."""

  order: tuple[int, ...]  # the weight's axes: batch, rows, columns
  shape: tuple[int, ...]  # of the part, in this order
  count: int  # matrices
  kind: Kind

  def matrices(self, x: jax.Array) -> jax.Array:
    """A part of the weight → [count, rows, columns]."""
    return x.transpose(self.order).reshape(self.count, *self.kind.part)

  def weight(self, x: jax.Array) -> jax.Array:
    """And back."""
    return x.reshape(self.shape).transpose(tuple(np.argsort(self.order)))


def matrix_axes(rank: int, dims: MuonDimensionNumbers) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The weight's axes that make the rows and the columns of its matrices, counted from the front."""
  rows, cols = (tuple(axis % rank for axis in axes) for axes in dims)
  return rows, cols


def layout(
  shape: Sequence[int],
  dims: MuonDimensionNumbers,
  spec: PartitionSpec | None = None,
  sizes: Sizes | None = None,
) -> Layout:
  """The layout of a weight of this (whole) shape, stored as `spec` says on a mesh of these sizes.

  Raises:
    ValueError: a split axis lies inside a row or column made of several, so that parts would interleave.
  """
  sizes = sizes or {}
  entries = tuple(spec or ()) + (None,) * (len(shape) - len(spec or ()))
  names = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
  names = [tuple(name for name in group if sizes.get(name, 1) > 1) for group in names]
  shards = [math.prod(sizes[name] for name in group) for group in names]
  local = [size // parts for size, parts in zip(shape, shards, strict=True)]
  sides = matrix_axes(len(shape), dims)
  if any(names[axis] for side in sides for axis in side[1:]):
    raise ValueError(f"weight {list(shape)} split as {spec}: of the axes {sides} only the first may be split")
  rows, cols = sorted(sides, key=lambda side: math.prod(shape[axis] for axis in side))
  order = (*(axis for axis in range(len(shape)) if axis not in rows + cols), *rows, *cols)
  part = math.prod(local[axis] for axis in rows), math.prod(local[axis] for axis in cols)
  taken = ("data", *(name for group in names for name in group))
  copies = tuple(name for name, size in sizes.items() if size > 1 and name not in taken)
  grid = shards[rows[0]], shards[cols[0]]
  groups = math.prod(sizes[name] for name in copies)
  return Layout(
    order=order,
    shape=tuple(local[axis] for axis in order),
    count=math.prod(local) // math.prod(part),
    kind=Kind(part, grid, names[rows[0]] + names[cols[0]], groups, copies),
  )


def rounds(layouts: Sequence[Layout]) -> list[list[int]]:
  """Which weights share an exchange, by their index: those of a kind, while they are small together."""
  bins: dict[Kind, list[list[int]]] = collections.defaultdict(list)

  def entries(members: Sequence[int]) -> int:
    return sum(math.prod(layouts[index].shape) for index in members)

  for index in sorted(range(len(layouts)), key=lambda index: -math.prod(layouts[index].shape)):
    kind = layouts[index].kind
    open_bins = (members for members in bins[kind] if kind.axes and entries([*members, index]) <= TOGETHER)
    found = next(open_bins, None)
    if found is None:
      bins[kind].append([index])
    else:
      found.append(index)
  return [members for of_kind in bins.values() for members in of_kind]


def shares(count: int, kind: Kind) -> tuple[int, int]:
  """How many matrices each device works on, and among how many groups that hold copies they are dealt."""

  def parts_sent(groups: int) -> int:
    return -(-count // (kind.shards * groups)) * (1 + groups)

  groups = kind.groups if parts_sent(kind.groups) <= parts_sent(1) else 1
  return -(-count // (kind.shards * groups)), groups


def exchanged_bytes(layouts: Sequence[Layout], dtype: str) -> int:
  """Bytes that a device hands to all-to-alls, both ways, zeros and what it keeps for itself included."""
  total = 0
  for members in rounds(layouts):
    kind = layouts[members[0]].kind
    if kind.axes:
      share, groups = shares(sum(layouts[index].count for index in members), kind)
      total += share * kind.shards * (1 + groups) * math.prod(kind.part)
  return total * jnp.dtype(dtype).itemsize


def map_matrices(
  fn: Callable[[jax.Array], jax.Array],
  weights: Sequence[jax.Array],
  dims: Sequence[MuonDimensionNumbers],
  mesh: Mesh | None = None,
  specs: Sequence[PartitionSpec] = (),
) -> list[jax.Array]:
  """Hands every matrix of the weights, whole, to `fn`, which maps [n, rows, columns] to the same shape.

  Args:
    fn: is handed matrices with no more rows than columns, and zeros among them.
    weights: in the global view.
    dims: which axes of each are matrices.
    mesh, specs: the layout that they come in and leave in; without a mesh nothing is split.
  """
  if mesh is None or mesh.size == 1:
    layouts = [layout(x.shape, dim) for x, dim in zip(weights, dims, strict=True)]
    return [one.weight(fn(one.matrices(x))) for one, x in zip(layouts, weights, strict=True)]
  layouts = [
    layout(x.shape, dim, spec, mesh.shape) for x, dim, spec in zip(weights, dims, specs, strict=True)
  ]

  def on_each_device(parts: list[jax.Array]) -> list[jax.Array]:
    done: dict[int, jax.Array] = {}
    for members in rounds(layouts):
      batch = jnp.concatenate([layouts[index].matrices(parts[index]) for index in members])
      ends = np.cumsum([layouts[index].count for index in members])
      results = jnp.split(_there_and_back(fn, batch, layouts[members[0]].kind), ends[:-1])
      done |= {index: layouts[index].weight(x) for index, x in zip(members, results, strict=True)}
    return [done[index] for index in range(len(parts))]

  split = list(specs)
  over_mesh = jax.shard_map(on_each_device, mesh=mesh, in_specs=(split,), out_specs=split, check_vma=False)
  return over_mesh(list(weights))


def _there_and_back(fn: Callable[[jax.Array], jax.Array], x: jax.Array, kind: Kind) -> jax.Array:
  """`fn` over whole matrices, given and returned as the parts [count, rows, columns] on this device."""
  if not kind.axes:
    return fn(x)
  count, (r, c), (down, across) = x.shape[0], kind.part, kind.grid
  share, groups = shares(count, kind)
  mine = share * kind.shards  # matrices that my group works on
  x = jnp.pad(x, ((0, mine * groups - count), (0, 0), (0, 0)))
  if groups > 1:
    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(kind.copies) * mine, mine)
  # Piece s of what arrives is part s of my share; parts are numbered as the axes are listed, last fastest.
  x = _all_to_all(x, kind.axes)
  x = x.reshape(down, across, share, r, c).transpose(2, 0, 3, 1, 4).reshape(share, down * r, across * c)
  x = fn(x)
  x = x.reshape(share, down, r, across, c).transpose(1, 3, 0, 2, 4).reshape(mine, r, c)
  receivers = kind.axes
  if groups > 1:
    x = jnp.tile(x, (groups, 1, 1))
    receivers = kind.copies + kind.axes
  return _all_to_all(x, receivers)[:count]


def _all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Piece s of the first axis goes to device s of those along `axes`; their pieces come in this order."""
  # The CPU compiler splits x into its pieces and then refuses them when it finds that x was put together
  # of arrays that lie differently in memory. Behind the barrier it does not look.
  return jax.lax.all_to_all(jax.lax.optimization_barrier(x), axes, split_axis=0, concat_axis=0, tiled=True)
