"""Sets of positions as bits, in an order that the vector unit packs and tests without moving lanes.

Positions come in chunks of 4,096 = 32 tiles of 128 lanes. Position s is bit (s // 128) % 32 of the int32
word (s // 4096) · 128 + s % 128: a tile of 128 neighbouring positions is one bit of 128 neighbouring words.
"""

import jax
import jax.numpy as jnp

LANES = 128
TILES = 32  # bits of a word
CHUNK = LANES * TILES


def words(positions: int) -> int:
  """int32 words that hold so many positions."""
  return -(-positions // CHUNK) * LANES


def pack(mask: jax.Array) -> jax.Array:
  """bool [..., S] → int32 [..., words(S)]; bits past S are 0."""
  lead, S = mask.shape[:-1], mask.shape[-1]
  padded = jnp.pad(mask, [(0, 0)] * len(lead) + [(0, -S % CHUNK)])
  tiles = padded.reshape(*lead, -1, TILES, LANES).astype(jnp.int32)
  return jnp.sum(tiles << _shifts(), axis=-2, dtype=jnp.int32).reshape(*lead, words(S))


def unpack(bits: jax.Array, positions: int) -> jax.Array:
  """int32 [..., words(S)] → bool [..., S] for S = positions."""
  lead = bits.shape[:-1]
  tiles = bits.reshape(*lead, -1, 1, LANES) >> _shifts()
  return (tiles & 1).reshape(*lead, -1)[..., :positions] != 0


def _shifts() -> jax.Array:
  return jnp.arange(TILES, dtype=jnp.int32)[:, None]


def log2(size: int) -> int:
  """Of a power of two: vectors of ints are divided by shifts."""
  return size.bit_length() - 1
