"""Expert parallelism without dropped tokens and without buffers for the worst case.

Each shard of `expert` holds E / R experts and tokens of its own. Its (token, slot) pairs wait in one queue a
destination. A round sends the next `capacity` of every queue, about 1.25 times the balanced share, computes
them where their expert lives and brings the results back; rounds go on until no shard has a pair left
(usually after one). The backward pass walks through the same rounds and sends the inputs again instead of
keeping them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.parallel import spmd

AXIS = "expert"
SLACK = 1.25  # rows of a round over those of a balanced router
ROW_MULTIPLE = 8  # capacity is rounded up to whole tiles

# (weights, rows [rows, D], local expert of each row int32, E / R where empty) → [rows, D]
ExpertFn = Callable[[Any, jax.Array, jax.Array], jax.Array]


class Queues(NamedTuple):
  """Where each of the P = M · K pairs of this shard stands."""

  expert_P: jax.Array  # int32, global id
  shard_P: jax.Array  # int32, destination
  place_P: jax.Array  # int32, position in the destination's queue
  order_P: jax.Array  # int32, pairs by destination, then place
  counts_R: jax.Array  # int32, length of each queue
  rounds: jax.Array  # int32 scalar, the same on all shards


def capacity(pairs: int, shards: int) -> int:
  """Rows that one shard sends another in a round."""
  balanced = SLACK * pairs / shards
  return -(-int(balanced + 1) // ROW_MULTIPLE) * ROW_MULTIPLE


def expert_parallel(
  fn: ExpertFn, weights: Any, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, n_experts: int
) -> jax.Array:
  """[M, D] float32: each token's weighted sum over its experts, wherever they live.

  Args:
    fn: computes rows with this shard's experts; may return a part of a sum over `tensor`.
    weights: this shard's experts, a tree that `fn` takes.
    experts_MK, weights_MK: the routers' choices, global ids, and their float32 weights.
  """
  return _apply(fn, n_experts, weights, x_MD, experts_MK, weights_MK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(fn, n_experts, weights, x_MD, experts_MK, weights_MK):
  return _forward(fn, n_experts, weights, x_MD, experts_MK, weights_MK)[0]


def _forward(fn, n_experts, weights, x_MD, experts_MK, weights_MK):
  queues = _queues(experts_MK, n_experts)
  rows = capacity(experts_MK.size, spmd.size(AXIS))

  def round_(carry):
    i, y_MD = carry
    send = _Round(queues, i, rows, n_experts, experts_MK.shape)
    out = fn(weights, send.to_experts(send.rows_of(x_MD)), send.to_experts(send.local_experts()))
    picked_MKD = send.picked(send.back(out)).astype(jnp.float32)
    return i + 1, y_MD + jnp.sum(picked_MKD * weights_MK[..., None], axis=1)

  start = (jnp.zeros((), jnp.int32), jnp.zeros(x_MD.shape, jnp.float32))
  _, y_MD = jax.lax.while_loop(lambda carry: carry[0] < queues.rounds, round_, start)
  return y_MD, (weights, x_MD, experts_MK, weights_MK)


def _backward(fn, n_experts, saved, grad_MD):
  weights, x_MD, experts_MK, weights_MK = saved
  queues = _queues(experts_MK, n_experts)
  rows = capacity(experts_MK.size, spmd.size(AXIS))
  grad_MD = grad_MD.astype(x_MD.dtype)

  def round_(carry):
    i, grad_weights, grad_x_MD, grad_gate_MK = carry
    send = _Round(queues, i, rows, n_experts, experts_MK.shape)
    experts = send.to_experts(send.local_experts())
    gate = send.to_experts(send.pairs_of(weights_MK))
    grad = send.to_experts(send.rows_of(grad_MD)).astype(jnp.float32)
    out, pullback = jax.vjp(lambda w, x: fn(w, x, experts), weights, send.to_experts(send.rows_of(x_MD)))
    grad_w, grad_rows = pullback((grad * gate[:, None]).astype(out.dtype))
    grad_gate = jnp.sum(out.astype(jnp.float32) * grad, axis=-1)
    grad_weights = jax.tree.map(lambda total, new: total + new.astype(total.dtype), grad_weights, grad_w)
    picked_MKD = send.picked(send.back(grad_rows)).astype(jnp.float32)
    return (
      i + 1,
      grad_weights,
      grad_x_MD + jnp.sum(picked_MKD, axis=1),
      grad_gate_MK + send.picked(send.back(grad_gate)),
    )

  start = (
    jnp.zeros((), jnp.int32),
    jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), weights),
    jnp.zeros(x_MD.shape, jnp.float32),
    jnp.zeros(weights_MK.shape, jnp.float32),
  )
  result = jax.lax.while_loop(lambda carry: carry[0] < queues.rounds, round_, start)
  _, grad_weights, grad_x_MD, grad_gate_MK = result
  return grad_weights, grad_x_MD.astype(x_MD.dtype), None, grad_gate_MK.astype(weights_MK.dtype)


_apply.defvjp(_forward, _backward)


def _queues(experts_MK: jax.Array, n_experts: int) -> Queues:
  shards = spmd.size(AXIS)
  expert_P = experts_MK.reshape(-1)
  pairs = expert_P.shape[0]
  shard_P = expert_P // (n_experts // shards)
  one_hot = (shard_P[:, None] == jnp.arange(shards)).astype(jnp.int32)
  place_P = jnp.take_along_axis(jnp.cumsum(one_hot, axis=0), shard_P[:, None], axis=1)[:, 0] - 1
  counts_R = jnp.sum(one_hot, axis=0)
  begins_R = jnp.cumsum(counts_R) - counts_R
  order_P = jnp.zeros(pairs, jnp.int32)
  order_P = order_P.at[begins_R[shard_P] + place_P].set(
    jnp.arange(pairs, dtype=jnp.int32), unique_indices=True
  )
  longest = jnp.max(counts_R)
  rounds = -(-longest // capacity(pairs, shards))
  return Queues(expert_P, shard_P, place_P, order_P, counts_R, spmd.pmax(rounds, (AXIS,)))


class _Round:
  """Which pair travels in which row of one round."""

  def __init__(self, queues: Queues, number: jax.Array, rows: int, n_experts: int, shape: tuple[int, ...]):
    self._queues, self._rows, self._shape = queues, rows, shape
    self._shards = spmd.size(AXIS)
    self._experts = n_experts // self._shards  # of one shard
    begins_R = jnp.cumsum(queues.counts_R) - queues.counts_R
    within = number * rows + jnp.arange(rows, dtype=jnp.int32)
    self._used_RC = within < queues.counts_R[:, None]
    self._pair_RC = jnp.where(self._used_RC, queues.order_P[_clipped(begins_R[:, None] + within, queues)], 0)
    in_round_P = queues.place_P // rows == number
    row_P = queues.shard_P * rows + queues.place_P - number * rows
    self._row_P = jnp.where(in_round_P, row_P, self._shards * rows)  # past the end: fetched as 0

  def rows_of(self, x_MD: jax.Array) -> jax.Array:
    """[R, C, D] to send: each pair's token, 0 where empty."""
    picked = jnp.take(x_MD, self._pair_RC // self._shape[1], axis=0)
    return jnp.where(self._used_RC[..., None], picked, 0)

  def pairs_of(self, x_MK: jax.Array) -> jax.Array:
    """[R, C] of a number a pair, 0 where empty."""
    return jnp.where(self._used_RC, x_MK.reshape(-1)[self._pair_RC], 0)

  def local_experts(self) -> jax.Array:
    """[R, C] int32: which of the destination's experts, the number of its experts where empty."""
    return jnp.where(self._used_RC, self._queues.expert_P[self._pair_RC] % self._experts, self._experts)

  def to_experts(self, x_RC: jax.Array) -> jax.Array:
    """The exchange: [R, C, …] by destination → [R · C, …] by source."""
    received = jax.lax.all_to_all(x_RC, AXIS, split_axis=0, concat_axis=0, tiled=True)
    return received.reshape(self._shards * self._rows, *x_RC.shape[2:])

  def back(self, rows: jax.Array) -> jax.Array:
    """The way back: results [R · C, …] as they were received → as they were sent."""
    by_source = rows.reshape(self._shards, self._rows, *rows.shape[1:])
    returned = jax.lax.all_to_all(by_source, AXIS, split_axis=0, concat_axis=0, tiled=True)
    return returned.reshape(rows.shape)

  def picked(self, returned: jax.Array) -> jax.Array:
    """[M, K, …]: each pair's result, 0 for those of other rounds."""
    rows = jnp.take(returned, self._row_P, axis=0, mode="fill", fill_value=0)
    return rows.reshape(*self._shape, *returned.shape[1:])


def _clipped(index: jax.Array, queues: Queues) -> jax.Array:
  return jnp.minimum(index, queues.order_P.shape[0] - 1)
