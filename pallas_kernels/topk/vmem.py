"""Selection among keys that lie in VMEM: parts of a Pallas kernel, for every kernel that selects.

Keys are int32 in the order of the floats. A group of 8 rows lies as a tall array [tiles · 8, 128]: row r of
tile t, positions 128·t to 128·t + 127, is at t · 8 + r, so that a tile is one vector register and the tiles
of a single row are read with stride 8. Groups stand one below the other, each from its `base` line.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.topk.bits import LANES, TILES

ROWS = 8
CHUNK_LINES = TILES * ROWS  # of the tall array: one chunk of positions, see bits
CHUNKS_AT_ONCE = 8
LEAST = -(2**31)
INFINITY = 0x7F800000  # bits of a float
EMPTY = -INFINITY  # key of −∞, which is never selected

Ref = Any
Count = Any  # int, or traced int32


def ordered_keys(scores: jax.Array) -> jax.Array:
  """int32 in the order of the float32 scores; −0.0 counts as +0.0 and NaN as −∞."""
  bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
  keys = jnp.where(bits < 0, LEAST - bits, bits)  # a negative float becomes minus its magnitude
  return jnp.where(keys > INFINITY, EMPTY, jnp.maximum(keys, EMPTY))


def lines(first: Any, size: int = ROWS) -> Any:
  """Index of `size` lines of a tall array; `first` may be traced and is a multiple of 8."""
  return pl.ds(pl.multiple_of(first, ROWS), size)


def thresholds(
  keys_ref: Ref, bases: Sequence[int], chunks: Count, k: int, unroll: int
) -> list[tuple[jax.Array, jax.Array]]:
  """For each group: the k-th largest key of every row, and how many keys equal to it are wanted; [8, 1].

  32 halvings, each counting the keys of all groups: the sums across lanes of one group hide behind the
  counting of the next. `unroll` is the number of chunks that are counted at a time and has to divide
  `chunks`. Rows with fewer than k keys above −∞ get EMPTY and 0: everything above it.
  """

  def halve(i, carry):
    # Builds the threshold bit by bit: the largest t with at least k keys ≥ t. The first flip clears the sign
    # of the least int, every later one sets a bit. The last trial that failed is t + 1, so that the count
    # then was the number of keys above t.
    trials = [t ^ (jnp.int32(1) << (31 - i)) for t, _ in carry]
    counts = [_count(keys_ref, base, chunks, t, unroll) for base, t in zip(bases, trials, strict=True)]
    after = []
    for (t, above), trial, count in zip(carry, trials, counts, strict=True):
      enough = count >= k
      after.append((jnp.where(enough, trial, t), jnp.where(enough, above, count)))
    return after

  start = (jnp.full((ROWS, 1), LEAST, jnp.int32), jnp.zeros((ROWS, 1), jnp.int32))
  found = jax.lax.fori_loop(0, 32, halve, [start] * len(bases))
  return [(jnp.maximum(t, EMPTY), jnp.where(t <= EMPTY, 0, k - above)) for t, above in found]


def _count(keys_ref: Ref, base: int, chunks: Count, least: jax.Array, unroll: int) -> jax.Array:
  """Keys ≥ least of each row, [8, 1]."""
  least = jnp.broadcast_to(least, (ROWS, LANES))
  sums = 4  # as many independent chains of additions as the vector unit has slots

  def add(step, counts):
    counts = list(counts)
    for i in range(unroll * TILES):
      keys = keys_ref[lines(base + step * (unroll * CHUNK_LINES) + i * ROWS), :]
      counts[i % sums] += (keys >= least).astype(jnp.int32)
    return tuple(counts)

  zeros = jnp.zeros((ROWS, LANES), jnp.int32)
  counts = jax.lax.fori_loop(0, chunks // unroll, add, (zeros,) * sums)
  return sum_lanes((counts[0] + counts[1]) + (counts[2] + counts[3]))


def scratch_lines(chunks: int) -> int:
  """Lines of `bits_ref` and `equal_ref` for at most so many chunks."""
  return -(-chunks // CHUNKS_AT_ONCE) * CHUNKS_AT_ONCE * ROWS


def write_bits(
  keys_ref: Ref,
  base: int,
  bits_ref: Ref,
  equal_ref: Ref,
  chunks: Count,
  threshold: jax.Array,
  wanted: jax.Array,
) -> None:
  """Writes the selected set of one group: line 8·c + r of bits_ref has the words of chunk c, row r.

  Args:
    bits_ref, equal_ref: int32 [scratch_lines, 128], words as in `bits`; the latter is scratch.
    threshold, wanted: see `thresholds`. Of the equal keys those at the lowest positions are taken.
  """
  _write_compared(keys_ref, base, bits_ref, equal_ref, chunks, jnp.broadcast_to(threshold, (ROWS, LANES)))
  wanted = jnp.broadcast_to(wanted, (ROWS, LANES))
  cut, before, word = _find_cut(equal_ref, chunks, wanted)
  last = _first_set(word, wanted - before)

  def finish(chunk, _):
    at = lines(chunk * ROWS)
    taken = jnp.where(chunk < cut, -1, jnp.where(chunk == cut, last, 0))
    bits_ref[at, :] = bits_ref[at, :] | (equal_ref[at, :] & taken)
    return _

  jax.lax.fori_loop(0, chunks, finish, 0)


def _write_compared(keys_ref, base, above_ref, equal_ref, chunks, threshold) -> None:
  def pack(chunk, _):
    above = equal = jnp.zeros((ROWS, LANES), jnp.int32)
    for i in range(TILES):
      keys = keys_ref[lines(base + chunk * CHUNK_LINES + i * ROWS), :]
      bit = jnp.int32(1 << i if i < 31 else LEAST)
      above = above | jnp.where(keys > threshold, bit, 0)
      equal = equal | jnp.where(keys == threshold, bit, 0)
    above_ref[lines(chunk * ROWS), :] = above
    equal_ref[lines(chunk * ROWS), :] = equal
    return _

  jax.lax.fori_loop(0, chunks, pack, 0)


def _find_cut(equal_ref, chunks, wanted) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The chunk in which the last wanted equal key lies, the number of equal keys before it, and its words.

  All [8, 128]; −1, 0 and 0 where none is wanted. Lanes are summed as a product with ones.
  """
  ones = jnp.ones((LANES, LANES), jnp.bfloat16)

  def find(step, carry):
    seen, cut, before, word = carry
    first = step * CHUNKS_AT_ONCE
    equal = equal_ref[lines(first * ROWS, CHUNKS_AT_ONCE * ROWS), :]
    counts = exact_dot(jax.lax.population_count(equal), ones)
    for i in range(CHUNKS_AT_ONCE):
      mine = slice(i * ROWS, (i + 1) * ROWS)
      # Behind the last chunk the words are left over from other rows.
      after = jnp.where(first + i < chunks, seen + counts[mine], seen)
      here = (seen < wanted) & (after >= wanted)
      cut, before = jnp.where(here, first + i, cut), jnp.where(here, seen, before)
      word = jnp.where(here, equal[mine], word)
      seen = after
    return seen, cut, before, word

  zeros = jnp.zeros((ROWS, LANES), jnp.int32)
  steps = (chunks + (CHUNKS_AT_ONCE - 1)) // CHUNKS_AT_ONCE
  return jax.lax.fori_loop(0, steps, find, (zeros, zeros - 1, zeros, zeros))[1:]


def _first_set(word: jax.Array, count: jax.Array) -> jax.Array:
  """Words [8, 128] that cover the first `count` [8, 128] set bits of one chunk, in the order of positions."""
  tile = jnp.zeros((ROWS, 1), jnp.int32)  # in which the last of them lies

  def before(tile):
    return sum_lanes(jax.lax.population_count(word & ((jnp.int32(1) << tile) - 1)))

  for step in (16, 8, 4, 2, 1):
    tile = jnp.where(before(tile + step) < count[:, :1], tile + step, tile)
  rank = exact_dot((word >> tile) & 1, lane_order(lambda row, column: row <= column))
  bit = jnp.int32(1) << tile
  return (bit - 1) | jnp.where(rank <= count - before(tile), bit, 0)


def lane_order(holds) -> jax.Array:
  """bfloat16 [128, 128] with 1 where holds(row, column): a product with it sums chosen lanes.

  With ≤ that is a cumulative sum, of which there is none for vectors.
  """
  row, column = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
  return small(holds(row, column))


def small(x: jax.Array) -> jax.Array:
  """bfloat16 of ints that it holds exactly: up to 256, and powers of two. By way of float32, as TPUs want."""
  return x.astype(jnp.float32).astype(jnp.bfloat16)


def exact_dot(counts: jax.Array, matrix: jax.Array) -> jax.Array:
  """counts @ matrix in int32, for `small` ints and sums below 2^24."""
  return jnp.dot(small(counts), matrix, preferred_element_type=jnp.float32).astype(jnp.int32)


def sum_lanes(x: jax.Array) -> jax.Array:
  """Sum over lanes of small ints, [8, 1]; exact below 2^24, since it is taken in float32."""
  return jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True).astype(jnp.int32)
