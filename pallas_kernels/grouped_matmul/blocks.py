"""Grouped matmul as one batched matmul of aligned row blocks, each with its group's matrix. For CPU.

A block belongs to one group, because groups are padded to whole blocks. The weight gradient is summed
over a group's blocks by a small one-hot matmul rather than by a scatter.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import group_of_row

MAX_BLOCK = 128


def row_alignment(rows: int, groups: int) -> int:
  """About the mean group, rounded up to a power of two, between 1 and 128 rows."""
  mean = max(1, rows // groups)
  return min(MAX_BLOCK, 1 << (mean - 1).bit_length())


def grouped_matmul(
  x_MK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, alignment: int, zero_rest: bool = True
) -> jax.Array:
  """See api.grouped_matmul. Groups that are not aligned are spread over padded blocks and gathered back."""
  del zero_rest
  M, E = x_MK.shape[0], w_EKN.shape[0]
  wanted = row_alignment(M, E)
  if alignment >= min(wanted, 8) and M % alignment == 0:
    return _blocks(x_MK, w_EKN, group_sizes_E, alignment)
  groups_M = group_of_row(group_sizes_E, M)
  aligned_E = -(-group_sizes_E // wanted) * wanted
  shift_E = (jnp.cumsum(aligned_E) - aligned_E) - (jnp.cumsum(group_sizes_E) - group_sizes_E)
  rows = -(-M // wanted) * wanted + E * wanted
  # Rows past the last group go out of range: dropped on the way in, filled with 0 on the way back.
  place_M = jnp.where(groups_M < E, jnp.arange(M) + shift_E[jnp.minimum(groups_M, E - 1)], rows)
  padded = jnp.zeros((rows, x_MK.shape[1]), x_MK.dtype).at[place_M].set(x_MK, mode="drop")
  out = _blocks(padded, w_EKN, aligned_E, wanted)
  return jnp.take(out, place_M, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks(x_MK, w_EKN, group_sizes_E, block):
  return _forward(x_MK, w_EKN, group_sizes_E, block)[0]


def _forward(x_MK, w_EKN, group_sizes_E, block):
  owner_G, x_GBK = _owners(group_sizes_E, x_MK, block)
  out_GBN = _dot("gbk,gkn->gbn", x_GBK, _matrices(w_EKN, owner_G))
  return out_GBN.astype(x_MK.dtype).reshape(x_MK.shape[0], -1), (x_MK, w_EKN, group_sizes_E)


def _backward(block, saved, grad_MN):
  x_MK, w_EKN, group_sizes_E = saved
  owner_G, x_GBK = _owners(group_sizes_E, x_MK, block)
  grad_GBN = grad_MN.reshape(*x_GBK.shape[:2], -1)
  grad_x = _dot("gbn,gnk->gbk", grad_GBN, _matrices(_turn(w_EKN), owner_G)).astype(x_MK.dtype)
  outer_GKN = _dot("gkb,gbn->gkn", _turn(x_GBK), grad_GBN)
  mine_EG = (owner_G[None] == jnp.arange(w_EKN.shape[0])[:, None]).astype(jnp.float32)
  grad_w = jnp.einsum("eg,gkn->ekn", mine_EG, outer_GKN)
  return grad_x.reshape(x_MK.shape), grad_w.astype(w_EKN.dtype), None


_blocks.defvjp(_forward, _backward)


def _owners(group_sizes_E, x_MK, block):
  """Each block's group (E when past the last) and the rows as blocks."""
  blocks = x_MK.shape[0] // block
  return group_of_row(group_sizes_E // block, blocks), x_MK.reshape(blocks, block, -1)


def _matrices(w_EKN, owner_G):
  """Each block's matrix; 0 for blocks past the last group, so that their rows give 0 and get no gradient."""
  with_zero = jnp.concatenate([w_EKN, jnp.zeros_like(w_EKN[:1])])
  return with_zero.at[owner_G].get(mode="promise_in_bounds")


def _turn(x: jax.Array) -> jax.Array:
  """x with its last two axes exchanged in memory: XLA:CPU multiplies faster by rows that lie together."""
  return jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
