"""What code inside `jax.shard_map` may ask of its mesh. Outside of one, every axis has size 1.

The whole forward and backward pass runs in one shard_map over all axes, so that every collective is one
that somebody wrote. A derivative there is that of the *sum over all devices* of what each returns: a loss
that several devices compute alike must be divided by their number, the transpose of `psum` is `psum`, and
that of `all_gather` is a reduce-scatter.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from glm5_jax.parallel.mesh import AXES, TOKEN_AXES
from glm5_jax.parallel.rules import Axes, gathered_axes


def _present(names: tuple[str, ...]) -> tuple[str, ...]:
  """Those of the axes that are split here."""
  mesh = jax.sharding.get_abstract_mesh()
  return tuple(name for name in names if name in mesh.manual_axes and mesh.shape[name] > 1)


def size(*names: str) -> int:
  """Devices along the axes together."""
  shape = jax.sharding.get_abstract_mesh().shape
  return math.prod(shape[name] for name in _present(names))


def index(name: str) -> jax.Array | int:
  """This device's place on the axis."""
  return jax.lax.axis_index(name) if _present((name,)) else 0


def psum(tree: Any, names: tuple[str, ...] = AXES) -> Any:
  """Sums over the axes (default: all of them)."""
  present = _present(names)
  return jax.lax.psum(tree, present) if present else tree


def pmax(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
  """The largest over the axes."""
  present = _present(names)
  return jax.lax.pmax(x, present) if present else x


def sum_tokens(tree: Any) -> Any:
  """Sums over every axis that tokens are dealt over."""
  return psum(tree, TOKEN_AXES)


def gather_weight(w: jax.Array, axes: Axes, use: Any = None) -> jax.Array:
  """A stored weight made whole, but for the axes that computation uses in parts; its gradient is scattered.

  `use`: the dtype in which parts travel; without a mesh the weight stays as it is.
  """
  if use is not None and w.dtype != use and any(_present(names) for names in gathered_axes(axes)):
    # The compiler would cast the weights of all layers before the first, and keep both.
    w = jax.lax.optimization_barrier(w).astype(use)
  for dim, names in enumerate(gathered_axes(axes)):
    # One axis after another, the last first: XLA has no all-gather for small parts on axes that together are
    # no line of the torus, and would sum zeros instead, at four times the bytes.
    for name in reversed(_present(names)):
      w = jax.lax.all_gather(w, name, axis=dim, tiled=True)
  return w


def gather(x: jax.Array, name: str, axis: int) -> jax.Array:
  """The parts of an array that the shards of one mesh axis hold, put together along `axis`."""
  return jax.lax.all_gather(x, name, axis=axis, tiled=True) if _present((name,)) else x


def my_share(x: jax.Array) -> jax.Array:
  """This device's part of an array [M, …] that every shard of `tensor` holds alike, filled up with zeros."""
  parts = size("tensor")
  if parts == 1:
    return x
  count = -(-x.shape[0] // parts)
  padded = jnp.pad(x, ((0, parts * count - x.shape[0]),) + ((0, 0),) * (x.ndim - 1))
  return jax.lax.dynamic_slice_in_dim(padded, index("tensor") * count, count)


def my_slots(length: int) -> jax.Array | None:
  """The slots of a row that this shard of `context` holds, int32; None where it holds them all.

  Shard r of R holds pieces r and 2R − 1 − r of 2R, so that all see equally many keys under a causal mask.
  """
  shards = size("context")
  if shards == 1:
    return None
  piece = length // (2 * shards)
  within = jnp.arange(piece, dtype=jnp.int32)
  mine = index("context")
  return jnp.concatenate([mine * piece + within, (2 * shards - 1 - mine) * piece + within])


def take_mine(x: jax.Array) -> jax.Array:
  """This shard's slots of whole rows [B, S, …] → [B, T, …]."""
  slots = my_slots(x.shape[1])
  return x if slots is None else jnp.take(x, slots, axis=1)


def gather_slots(x: jax.Array) -> jax.Array:
  """The other way, from all shards of `context`: [B, T, …] → whole rows [B, S, …] in their order."""
  shards = size("context")
  if shards == 1:
    return x
  B, T, *rest = x.shape
  pieces = jax.lax.all_gather(x.reshape(B, 2, T // 2, *rest), "context", axis=1)  # [B, R, 2, piece, …]
  ordered = jnp.concatenate([pieces[:, :, 0], pieces[:, ::-1, 1]], axis=1)
  return ordered.reshape(B, shards * T, *rest)
