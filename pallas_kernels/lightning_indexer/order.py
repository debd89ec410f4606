"""The order in which the TPU kernels add the heads of a score, for a block of queries and for decoding.

Float addition is not associative, and a score that differs in its last bit can change the selected set. Heads
fall into eight classes by their number modulo 8, as the lines of a vector register: each class is summed in
order of the heads, then ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)), which is a sum over lines by halves.
"""

import jax
import jax.numpy as jnp

CLASSES = 8


def by_class(x: jax.Array, axis: int) -> jax.Array:
  """Heads so that classes stand one after another as they are summed: 0, 4, 2, 6, 1, 5, 3, 7.

  That is the order of their bits reversed, hence a transposition and not a gather.
  """
  axis %= x.ndim
  shape = x.shape
  split = x.reshape(*shape[:axis], -1, 2, 2, 2, *shape[axis + 1 :])
  return jnp.moveaxis(split, range(axis, axis + 4), range(axis + 3, axis - 1, -1)).reshape(shape)
