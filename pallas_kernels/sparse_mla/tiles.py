"""Which tiles of queries meet which tiles of keys: the steps of the kernels' grids, from the bits.

A step is a pair of tiles in which some query selects some key; of other pairs nothing is fetched or computed.
The steps of one output tile follow each other, and every output tile has at least one, that it be written. A
step is an int32 of scalar memory: row of the batch, output tile, tile that is summed over, whether it is the
first and whether it is the last of its output tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.topk.bits import CHUNK, LANES

MOST = 1024  # queries or keys of a tile, twice as many in long rows
LONG = 32_768  # queries or keys
MOST_STEPS = 2**17  # that scalar memory holds
FIRST, LAST = 1, 2
FLAGS = 2  # bits of them


class Tiles(NamedTuple):
  """Sizes of tiles and how many there are."""

  queries: int
  keys: int
  query_tiles: int
  key_tiles: int

  @property
  def padded(self) -> tuple[int, int]:
    """Queries and keys with those that fill the last tiles."""
    return self.queries * self.query_tiles, self.keys * self.key_tiles

  @property
  def in_chunk(self) -> int:
    """Tiles of keys whose bits are in the same words."""
    return CHUNK // self.keys


def cut(T: int, S: int, longer: str) -> Tiles:
  """Tiles of T queries and S keys; `longer` is "keys" or "queries", those that a kernel sums over.

  Of LONG or more of these, tiles are twice as long: at most 3 % more of a causal square is computed, and what
  every step costs is paid half as often.
  """
  count = {"queries": T, "keys": S}
  most = dict.fromkeys(count, MOST) | ({longer: 2 * MOST} if count[longer] >= LONG else {})
  queries, keys = (min(most[name], max(LANES, pl.next_power_of_2(n))) for name, n in count.items())
  return Tiles(queries, keys, pl.cdiv(T, queries), pl.cdiv(S, keys))


def most_pairs(T: int, S: int) -> int:
  """Pairs of tiles of the kernel that has most of them."""
  return max(t.query_tiles * t.key_tiles for t in (cut(T, S, longer) for longer in ("keys", "queries")))


def occupied(bits_BTW: jax.Array, tiles: Tiles) -> jax.Array:
  """bool [B, query tiles, key tiles]: somebody selects something. T fills the tiles."""
  B, _, W = bits_BTW.shape
  # Queries first: a reshape of all words by chunks may cost a copy of them.
  words = _union(bits_BTW.reshape(B, tiles.query_tiles, tiles.queries, W), 2)
  any_word = _union(words.reshape(B, tiles.query_tiles, W // LANES, LANES), 3)
  of_tile = tiles.keys // LANES  # bits
  shifts = of_tile * jnp.arange(tiles.in_chunk, dtype=jnp.int32)
  fields = jax.lax.shift_right_logical(*jnp.broadcast_arrays(any_word[..., None], shifts))
  return (fields & ((1 << of_tile) - 1) != 0).reshape(B, tiles.query_tiles, -1)[..., : tiles.key_tiles]


def steps(occupied_BXY: jax.Array) -> tuple[jax.Array, jax.Array]:
  """int32 [B · X · Y] of steps that write X and sum over Y, and how many of them there are."""
  _, X, Y = occupied_BXY.shape
  alone = ~jnp.any(occupied_BXY, axis=-1)
  visit = occupied_BXY.at[..., 0].set(occupied_BXY[..., 0] | alone).reshape(-1)
  count = jnp.sum(visit, dtype=jnp.int32)
  place = jnp.nonzero(visit, size=visit.size, fill_value=visit.size - 1)[0].astype(jnp.int32)
  row = place // Y
  number = jnp.arange(visit.size, dtype=jnp.int32)
  first = (number == 0) | (row != jnp.roll(row, 1))
  last = (number == count - 1) | (row != jnp.roll(row, -1))
  code = (((row // X) << _width(X)) | (row % X)) << _width(Y) | (place % Y)
  return (code << FLAGS) | jnp.where(first, FIRST, 0) | jnp.where(last, LAST, 0), count


def decode(code: Any, X: int, Y: int) -> tuple[Any, Any, Any]:
  """Row of the batch, output tile and tile that is summed over."""
  code >>= FLAGS
  row = code >> _width(Y)
  return row >> _width(X), row & ((1 << _width(X)) - 1), code & ((1 << _width(Y)) - 1)


def _union(words: jax.Array, axis: int) -> jax.Array:
  return jax.lax.reduce(words, jnp.int32(0), jax.lax.bitwise_or, (axis,))


def _width(count: int) -> int:
  """Bits that hold 0 to count − 1."""
  return (count - 1).bit_length()
