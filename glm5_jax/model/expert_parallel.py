"""Expert parallelism without dropped tokens and without buffers for the worst case.

Each shard of `expert` holds E / R experts and tokens of its own. Its (token, slot) pairs wait in one queue a
destination. A round sends the next `capacity` of every queue, about 1.25 times the balanced share, computes
them where their expert lives and brings the results back; rounds go on until no shard has a pair left
(usually after one). The backward pass walks through the same rounds and sends the inputs again instead of
keeping them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from glm5_jax.model.dispatch import plan_rows, take
from glm5_jax.parallel import spmd

AXIS = "expert"
MORE_ROUNDS = "more_rounds"  # scope of what runs only where the routers are out of balance
SLACK = 1.25  # rows of a round over those of a balanced router
ROW_MULTIPLE = 8  # capacity is rounded up to whole tiles


class GroupedFn(Protocol):
  """What a shard does with rows sorted by its own experts, such as moe.GroupedSwiGLU. Hashable."""

  def alignment(self, rows: int, experts: int) -> int: ...

  def __call__(self, weights, x_rows, weight_rows, group_sizes_E, alignment, zero_rest) -> jax.Array: ...


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
  fn: GroupedFn, weights: Any, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array, n_experts: int
) -> jax.Array:
  """[M, D] float32: the sum over each token's experts, wherever they live, weighted inside `fn`.

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

  def round_(number):
    send = _Round(queues, number, n_experts, experts_MK.shape)
    here = _Here(fn, send)
    x, gates = send.to_experts(send.rows_of(x_MD)), send.to_experts(send.pairs_of(weights_MK))
    out = here.as_received(here.compute(weights, here.sorted(x), here.sorted(gates)))
    return jnp.sum(send.picked(send.back(out)), axis=0, dtype=jnp.float32)

  return _sum_of_rounds(round_, queues.rounds), (weights, x_MD, experts_MK, weights_MK)


def _backward(fn, n_experts, saved, grad_MD):
  weights, x_MD, experts_MK, weights_MK = saved
  queues = _queues(experts_MK, n_experts)
  grad_MD = grad_MD.astype(x_MD.dtype)

  def round_(number):
    send = _Round(queues, number, n_experts, experts_MK.shape)
    here = _Here(fn, send)
    x, grad = send.to_experts(send.rows_of(x_MD)), send.to_experts(send.rows_of(grad_MD))
    gates = send.to_experts(send.pairs_of(weights_MK))
    _, pullback = jax.vjp(here.compute, weights, here.sorted(x), here.sorted(gates))
    grad_weights, grad_rows, grad_gates = pullback(here.sorted(grad))
    grad_x_KMD = send.picked(send.back(here.as_received(grad_rows)))
    grad_gates_KM = send.picked(send.back(here.as_received(grad_gates)))
    return grad_weights, jnp.sum(grad_x_KMD, axis=0, dtype=jnp.float32), grad_gates_KM.T

  grad_weights, grad_x_MD, grad_gates_MK = _sum_of_rounds(round_, queues.rounds)
  return grad_weights, grad_x_MD.astype(x_MD.dtype), None, grad_gates_MK.astype(weights_MK.dtype)


def _sum_of_rounds(round_: Callable[[jax.Array], Any], rounds: jax.Array) -> Any:
  """Of a tree that `round_` makes of its number. Usually there is one, which then costs no addition."""

  def one_more(carry):
    number, total = carry
    return number + 1, jax.tree.map(jnp.add, total, round_(number))

  first = round_(jnp.zeros((), jnp.int32))
  with jax.named_scope(MORE_ROUNDS):
    more = (jnp.ones((), jnp.int32), first)
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, one_more, more)[1]


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


class _Here:
  """The rows that a shard receives in one round, by its own experts. Empty ones come last, in no group."""

  def __init__(self, fn: GroupedFn, send: "_Round"):
    expert_R = send.to_experts(send.local_experts())
    experts = send.experts
    self._fn, self._alignment = fn, fn.alignment(expert_R.size, experts)
    self._plan = plan_rows(expert_R[:, None], experts + 1, self._alignment)
    self._sizes_E = self._plan.group_sizes_E[:experts]

  def sorted(self, x: jax.Array) -> jax.Array:
    """Received rows [R · C, …] → by expert."""
    return take(x, self._plan.pair_of_row, self._plan)

  def as_received(self, x: jax.Array) -> jax.Array:
    """The other way."""
    return x.at[self._plan.row_of_slot_MK[:, 0]].get(mode="promise_in_bounds")

  def compute(self, weights: Any, x: jax.Array, gates: jax.Array) -> jax.Array:
    """What comes out in empty rows is sent back and read by nobody."""
    return self._fn(weights, x, gates, self._sizes_E, self._alignment, zero_rest=False)


class _Round:
  """Which pair travels in which row of one round."""

  def __init__(self, queues: Queues, number: jax.Array, n_experts: int, shape: tuple[int, ...]):
    self._queues, self._shape, self._shards = queues, shape, spmd.size(AXIS)
    self._rows = rows = capacity(math.prod(shape), self._shards)
    self.experts = n_experts // self._shards  # of one shard
    begins_R = jnp.cumsum(queues.counts_R) - queues.counts_R
    within = number * rows + jnp.arange(rows, dtype=jnp.int32)
    self._used_RC = within < queues.counts_R[:, None]
    self._pair_RC = jnp.where(self._used_RC, queues.order_P[_clipped(begins_R[:, None] + within, queues)], 0)
    in_round_P = queues.place_P // rows == number
    row_P = queues.shard_P * rows + queues.place_P - number * rows
    self._row_P = jnp.where(in_round_P, row_P, self._shards * rows)  # past the end: fetched as 0

  def rows_of(self, x_MD: jax.Array) -> jax.Array:
    """[R, C, D] to send: each pair's token, any token where empty."""
    return x_MD.at[self._pair_RC // self._shape[1]].get(mode="promise_in_bounds")

  def pairs_of(self, x_MK: jax.Array) -> jax.Array:
    """[R, C] of a number a pair, 0 where empty."""
    return jnp.where(self._used_RC, x_MK.reshape(-1)[self._pair_RC], 0)

  def local_experts(self) -> jax.Array:
    """[R, C] int32: which of the destination's experts, the number of its experts where empty."""
    return jnp.where(self._used_RC, self._queues.expert_P[self._pair_RC] % self.experts, self.experts)

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
    """[K, M, …]: each pair's result, 0 for those of other rounds. Sums over the first axis are cheap."""
    row_KM = self._row_P.reshape(self._shape).T
    return returned.at[row_KM].get(mode="fill", fill_value=0)


def _clipped(index: jax.Array, queues: Queues) -> jax.Array:
  return jnp.minimum(index, queues.order_P.shape[0] - 1)
