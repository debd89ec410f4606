"""Moving token rows to their experts and back.

Both directions are gathers, in the forward and in the backward pass: the inverse permutation is known,
so the scatter-add that autodiff would make of a gather's gradient is never needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowPlan(NamedTuple):
  """Where each of the M · K (token, slot) pairs stands among rows sorted by expert."""

  token_of_row: jax.Array  # int32 [rows]; M for a padding row
  row_of_slot_MK: jax.Array  # int32
  group_sizes_E: jax.Array  # int32, padding rows included; sums to at most the number of rows


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
  token_of_row = jnp.full(rows, M, jnp.int32)
  token_of_row = token_of_row.at[row_of_slot].set(
    jnp.arange(pairs, dtype=jnp.int32) // K, unique_indices=True, mode="promise_in_bounds"
  )
  return RowPlan(token_of_row, row_of_slot.reshape(M, K), sizes_E)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
  """x[rows], rows out of range giving 0."""
  return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x_MD: jax.Array, rows: RowPlan) -> jax.Array:
  """[rows, D]: each row its token's activations, 0 where padding."""
  return _take(x_MD, rows.token_of_row)


def _dispatch_forward(x_MD, rows):
  return dispatch(x_MD, rows), rows


def _dispatch_backward(rows, grad):
  picked_MKD = jnp.take(grad, rows.row_of_slot_MK, axis=0, mode="clip")
  return jnp.sum(picked_MKD, axis=1, dtype=jnp.float32).astype(grad.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(out: jax.Array, weights_MK: jax.Array, rows: RowPlan) -> jax.Array:
  """[M, D] float32: each token's weighted sum over its slots' rows."""
  return _combine_forward(out, weights_MK, rows)[0]


def _combine_forward(out, weights_MK, rows):
  picked_MKD = jnp.take(out, rows.row_of_slot_MK, axis=0, mode="clip").astype(jnp.float32)
  return jnp.sum(picked_MKD * weights_MK[..., None], axis=1), (out, weights_MK, rows)


def _combine_backward(saved, grad_MD):
  out, weights_MK, rows = saved
  picked_MKD = jnp.take(out, rows.row_of_slot_MK, axis=0, mode="clip").astype(jnp.float32)
  grad_weights_MK = jnp.sum(picked_MKD * grad_MD[:, None], axis=-1)
  weight_of_row = jnp.zeros(rows.token_of_row.shape[0], jnp.float32)
  weight_of_row = weight_of_row.at[rows.row_of_slot_MK.reshape(-1)].set(
    weights_MK.reshape(-1), unique_indices=True, mode="promise_in_bounds"
  )
  grad_out = _take(grad_MD, rows.token_of_row) * weight_of_row[:, None]
  return grad_out.astype(out.dtype), grad_weights_MK.astype(weights_MK.dtype), None


combine.defvjp(_combine_forward, _combine_backward)
