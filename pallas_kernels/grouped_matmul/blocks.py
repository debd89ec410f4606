"""Grouped matmul as a loop over blocks of rows, each times its group's matrix. For CPU.

Blocks begin where groups do, so groups need no padding; what the last one of a group has of the next group's
rows is left as it was. The loop takes as many turns as the group sizes need, and copies no matrix but the one
at hand.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import row_alignment as row_alignment

MAX_BLOCK = 256


class Blocks(NamedTuple):
  """As many as any group sizes could need, of which the first `used` are."""

  used: jax.Array
  group_G: jax.Array
  at_G: jax.Array  # first row of a block
  begin_G: jax.Array  # rows begin … end - 1 of a block are the group's
  end_G: jax.Array


def grouped_matmul(
  x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, alignment: int = 1, zero_rest: bool = True
) -> jax.Array:
  """See api.grouped_matmul. Alignment does not matter here."""
  del alignment, zero_rest
  return _multiply(x_MK, w_EKN, group_sizes_E)


@jax.custom_vjp
def _multiply(x_MK, w_EKN, group_sizes_E):
  return _rows(x_MK, w_EKN, group_sizes_E, "mk,kn->mn")


def _forward(x_MK, w_EKN, group_sizes_E):
  return _multiply(x_MK, w_EKN, group_sizes_E), (x_MK, w_EKN, group_sizes_E)


def _backward(saved, grad_MN):
  x_MK, w_EKN, group_sizes_E = saved
  grad_x_MK = _rows(grad_MN, w_EKN, group_sizes_E, "mn,kn->mk")
  return grad_x_MK, _matrices(x_MK, grad_MN, group_sizes_E).astype(w_EKN.dtype), None


_multiply.defvjp(_forward, _backward)


def _rows(x_MK, w_EKN, group_sizes_E, equation: str) -> jax.Array:
  """Each row times its group's matrix; 0 past the last group."""
  M, E = x_MK.shape[0], w_EKN.shape[0]
  block = _block(M, E)
  blocks = _plan(group_sizes_E, M, block)
  width = jax.eval_shape(functools.partial(jnp.einsum, equation), x_MK, w_EKN[0]).shape[1]

  def multiply(i, out):
    at = blocks.at_G[i]
    matrix = jax.lax.dynamic_index_in_dim(w_EKN, blocks.group_G[i], keepdims=False)
    product = _dot(equation, jax.lax.dynamic_slice_in_dim(x_MK, at, block), matrix)
    before = jax.lax.dynamic_slice_in_dim(out, at, block)
    after = jnp.where(_mine(blocks, i, block), product.astype(out.dtype), before)
    return jax.lax.dynamic_update_slice_in_dim(out, after, at, 0)

  return jax.lax.fori_loop(0, blocks.used, multiply, jnp.zeros((M, width), x_MK.dtype))


def _matrices(x_MK, grad_MN, group_sizes_E) -> jax.Array:
  """float32 [E, K, N]: the sum over a group's rows of x[m] by grad[m]."""
  M, E = x_MK.shape[0], group_sizes_E.shape[0]
  block = _block(M, E)
  blocks = _plan(group_sizes_E, M, block)

  def add(i, sum_EKN):
    mine = _mine(blocks, i, block)
    x, grad = (
      jnp.where(mine, jax.lax.dynamic_slice_in_dim(a, blocks.at_G[i], block), 0) for a in (x_MK, grad_MN)
    )
    return sum_EKN.at[blocks.group_G[i]].add(_dot("mk,mn->kn", x, grad))

  zero = jnp.zeros((E, x_MK.shape[1], grad_MN.shape[1]), jnp.float32)
  return jax.lax.fori_loop(0, blocks.used, add, zero)


def _block(rows: int, groups: int) -> int:
  """Rows of a block: about the mean group, so that less than half of them is for nothing."""
  mean = max(1, rows // groups)
  return min(MAX_BLOCK, rows, 1 << (mean - 1).bit_length())


def _plan(group_sizes_E: jax.Array, rows: int, block: int) -> Blocks:
  E = group_sizes_E.shape[0]
  count_E = -(-group_sizes_E // block)
  last_E, end_E = jnp.cumsum(count_E), jnp.cumsum(group_sizes_E)
  number_G = jnp.arange(rows // block + E)
  group_G = jnp.minimum(jnp.sum(number_G[:, None] >= last_E, axis=1), E - 1)
  first_G = (end_E - group_sizes_E)[group_G] + (number_G - (last_E - count_E)[group_G]) * block
  at_G = jnp.clip(first_G, 0, rows - block)  # the last one may reach back into rows that are done
  return Blocks(last_E[-1], group_G, at_G, first_G - at_G, end_E[group_G] - at_G)


def _mine(blocks: Blocks, i: jax.Array, block: int) -> jax.Array:
  """bool [block, 1]: which rows of a block are its group's."""
  row = jnp.arange(block)[:, None]
  return (row >= blocks.begin_G[i]) & (row < blocks.end_G[i])


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
