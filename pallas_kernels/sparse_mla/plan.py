"""Which tiles of queries and keys have anything to do with each other.

A kernel's programs walk along lists of tiles instead of along all of them, so that a tile in which no query
selects a key is neither fetched nor computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.topk.bits import CHUNK, LANES, TILES


class Walk(NamedTuple):
  """For every tile of one side the tiles of the other that it meets, ascending."""

  counts: jax.Array  # int32 [B · tiles], flat, as scalar memory wants it
  others: jax.Array  # int32 [B · tiles · all others]; what is past the count is 0


def occupied(bits_BTW: jax.Array, queries: int, keys: int) -> jax.Array:
  """bool [B, T / queries, W · 32 / keys]: whether any query of a tile selects any key of a tile."""
  B, T, W = bits_BTW.shape
  tiles = bits_BTW.reshape(B, T // queries, queries, W // LANES, LANES)
  chunks = jax.lax.reduce(tiles, jnp.int32(0), jax.lax.bitwise_or, (2, 4))
  lanes = (chunks[..., None] >> jnp.arange(TILES)) & 1
  return jnp.any(lanes.reshape(B, T // queries, W // LANES * CHUNK // keys, keys // LANES) != 0, axis=-1)


def walk(occupied_Bnm: jax.Array) -> Walk:
  """The lists of every n."""
  m = occupied_Bnm.shape[-1]
  place = jnp.cumsum(occupied_Bnm, axis=-1) - 1
  # The j-th of a list is the one tile whose place is j: a sum over one-hots, since nothing here may sort.
  hot = occupied_Bnm[..., None, :] & (place[..., None, :] == jnp.arange(m)[:, None])
  others = jnp.sum(jnp.where(hot, jnp.arange(m), 0), axis=-1, dtype=jnp.int32)
  counts = jnp.sum(occupied_Bnm, axis=-1, dtype=jnp.int32)
  return Walk(counts.reshape(-1), others.reshape(-1))
