"""Which tiles of keys a tile of queries has to do with.

A kernel's programs walk along lists of tiles instead of along all of them, so that a tile in which no query
marks a key is neither fetched nor computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Walk(NamedTuple):
  """For every tile of queries the tiles of keys that it meets, ascending."""

  counts: jax.Array  # int32 [B · query tiles], flat, as scalar memory wants it
  others: jax.Array  # int32 [B · query tiles · key tiles]; what is past the count is 0


def walk(occupied_BXY: jax.Array) -> Walk:
  """The lists, from whether tiles of queries X and of keys Y meet."""
  Y = occupied_BXY.shape[-1]
  place = jnp.cumsum(occupied_BXY, axis=-1) - 1
  # The j-th of a list is the one tile whose place is j: a sum over one-hots, since nothing here may sort.
  hot = occupied_BXY[..., None, :] & (place[..., None, :] == jnp.arange(Y)[:, None])
  others = jnp.sum(jnp.where(hot, jnp.arange(Y), 0), axis=-1, dtype=jnp.int32)
  counts = jnp.sum(occupied_BXY, axis=-1, dtype=jnp.int32)
  return Walk(counts.reshape(-1), others.reshape(-1))
