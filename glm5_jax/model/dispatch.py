"""Moving token rows to their experts and back.

Both directions are gathers, in the forward and in the backward pass: the inverse permutation is known,
so the scatter-add that autodiff would make of a gather's gradient is never needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowPlan(NamedTuple):
  """Where each of the M · K (token, slot) pairs stands among rows sorted by expert."""

  pair_of_row: jax.Array  # int32 [rows], token · K + slot; M · K for a padding row
  row_of_slot_MK: jax.Array  # int32
  group_sizes_E: jax.Array  # int32, padding rows included; sums to at most the number of rows

  @property
  def token_of_row(self) -> jax.Array:
    """int32 [rows]; M for a padding row."""
    return self.pair_of_row // self.row_of_slot_MK.shape[1]


def plan_rows(experts_MK: jax.Array, n_experts: int, alignment: int) -> RowPlan:
  """Stable order by expert, each group padded to a multiple of `alignment` rows.

  The number of rows is static: M · K, plus room for every group's padding, rounded up.
  """
  M, K = experts_MK.shape
  flat = experts_MK.reshape(-1)
  pairs = M * K
  rows = pairs if alignment == 1 else -(-pairs // alignment) * alignment + n_experts * alignment
  one_hot = (flat[:, None] == jnp.arange(n_experts)).astype(jnp.int32)
  rank_in_group = jnp.take_along_axis(jnp.cumsum(one_hot, axis=0), flat[:, None], axis=1)[:, 0] - 1
  counts_E = jnp.sum(one_hot, axis=0)
  sizes_E = -(-counts_E // alignment) * alignment
  begins_E = jnp.cumsum(sizes_E) - sizes_E
  row_of_slot = begins_E[flat] + rank_in_group
  pair_of_row = jnp.full(rows, pairs, jnp.int32)
  pair_of_row = pair_of_row.at[row_of_slot].set(
    jnp.arange(pairs, dtype=jnp.int32), unique_indices=True, mode="promise_in_bounds"
  )
  return RowPlan(pair_of_row, row_of_slot.reshape(M, K), sizes_E)


def take(x: jax.Array, index: jax.Array, rows: RowPlan) -> jax.Array:
  """x[index], index being of rows; 0 for padding rows, as they count in weights' gradients."""
  if rows.pair_of_row.size == rows.row_of_slot_MK.size:
    return x.at[index].get(mode="promise_in_bounds")
  return x.at[index].get(mode="fill", fill_value=0)


def _pick(x: jax.Array, rows: RowPlan) -> jax.Array:
  """[M, K, …]: what stands in each pair's row."""
  return x.at[rows.row_of_slot_MK].get(mode="promise_in_bounds")


@jax.custom_vjp
def dispatch(x_MD: jax.Array, rows: RowPlan) -> jax.Array:
  """[rows, D]: each row its token's activations, 0 where padding."""
  return take(x_MD, rows.token_of_row, rows)


def _dispatch_backward(rows, grad):
  return jnp.sum(_pick(grad, rows), axis=1, dtype=jnp.float32).astype(grad.dtype), None


dispatch.defvjp(lambda x_MD, rows: (dispatch(x_MD, rows), rows), _dispatch_backward)


@jax.custom_vjp
def spread(gates_MK: jax.Array, rows: RowPlan) -> jax.Array:
  """[rows]: each row its pair's number, 0 where padding."""
  return take(gates_MK.reshape(-1), rows.pair_of_row, rows)


spread.defvjp(
  lambda gates_MK, rows: (spread(gates_MK, rows), rows), lambda rows, grad: (_pick(grad, rows), None)
)


@jax.custom_vjp
def collect(out: jax.Array, rows: RowPlan) -> jax.Array:
  """[M, D] float32: the sum of each token's rows."""
  return jnp.sum(_pick(out, rows).astype(jnp.float32), axis=1)


def _collect_backward(saved, grad_MD):
  rows, like = saved
  return take(grad_MD.astype(like.dtype), rows.token_of_row, rows), None


collect.defvjp(lambda out, rows: (collect(out, rows), (rows, jnp.zeros((0,), out.dtype))), _collect_backward)
