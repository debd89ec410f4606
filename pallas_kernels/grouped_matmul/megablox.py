"""Grouped matmul by jax's own megablox kernels: near the matrix units' rate on all TPU generations.

Differentiable by the same kernels. Off TPU they run in interpreted form, for tests.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from pallas_kernels.grouped_matmul.reference import row_alignment as row_alignment

TILE_ROWS, TILE_WIDTH = 512, 1024  # large enough that a matrix is fetched seldom, and three tiles fit VMEM
LANES = 128


def grouped_matmul(
  x_MK: jax.Array,
  w_EKN: jax.Array,
  group_sizes_E: jax.Array,
  alignment: int = 1,
  zero_rest: bool = True,
  interpret: bool = False,
) -> jax.Array:
  """See api.grouped_matmul. Alignment does not matter here."""
  del alignment
  M = x_MK.shape[0]
  tile = min(TILE_ROWS, -(-M // 8) * 8)
  x_MK = jnp.pad(x_MK, ((0, -M % tile), (0, 0)))
  tiling = (tile, _tile(w_EKN.shape[1]), _tile(w_EKN.shape[2]))
  sizes_E = group_sizes_E.astype(jnp.int32)
  if not zero_rest:
    return gmm(x_MK, w_EKN, sizes_E, x_MK.dtype, tiling, interpret=interpret)[:M]
  covered = (jnp.arange(x_MK.shape[0]) < jnp.sum(group_sizes_E))[:, None]
  out = gmm(_without_rest(x_MK, covered), w_EKN, sizes_E, x_MK.dtype, tiling, interpret=interpret)
  return jnp.where(covered, out, 0)[:M]


@jax.custom_vjp
def _without_rest(x_MK: jax.Array, covered: jax.Array) -> jax.Array:
  """x itself. What the kernels leave in the gradient's rows past the last group is whatever lay there."""
  del covered
  return x_MK


_without_rest.defvjp(
  lambda x_MK, covered: (x_MK, covered), lambda covered, grad: (jnp.where(covered, grad, 0), None)
)


def _tile(width: int) -> int:
  return min(TILE_WIDTH, -(-width // LANES) * LANES)


class Interpreted:
  """The same on any back end, one instruction after another."""

  row_alignment = staticmethod(row_alignment)
  grouped_matmul = staticmethod(functools.partial(grouped_matmul, interpret=True))
