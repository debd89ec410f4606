"""Selection among keys that lie in VMEM: part of a Pallas kernel, for every kernel that selects.

Keys are int32 in the order of the floats. A group of 8 rows lies as a tall array [tiles · 8, 128]: row r of
tile t, positions 128·t to 128·t + 127, is at t · 8 + r, so that a tile is one vector register. Groups stand
one below the other, each from its `base` line. All groups of a program go through every step together: sums
across lanes and products take a hundred cycles or more, and those of one group hide behind the others'.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.topk.bits import CHUNK, LANES, TILES, log2

ROWS = 8
CHUNK_LINES = TILES * ROWS  # of the tall array: one chunk of positions, see bits
CHUNKS_AT_ONCE = 8  # whose set bits are counted in one product
COUNTED_AT_ONCE = (
  4  # tiles of different groups or chunks: as many independent sums hide an addition's latency
)
LEAST = -(2**31)
INFINITY = 0x7F800000  # bits of a float
EMPTY = -INFINITY  # key of −∞, which is never selected

Ref = Any
Range = tuple[Any, Any]  # of chunks, from and to before; ints, or traced int32


@dataclasses.dataclass(frozen=True)
class Layout:
  """Sizes of a program's part: `groups` of 8 rows, `chunks` of 4,096 positions each."""

  groups: int
  chunks: int

  @property
  def unroll(self) -> int:
    """Chunks that are counted at a time; the ends of a range of chunks are multiples of it."""
    return next(n for n in (4, 2, 1) if self.chunks % n == 0 and n * self.groups <= max(4, self.groups))

  @property
  def keys(self) -> tuple[int, int]:
    """Shape of the tall array of all groups, int32."""
    return self.groups * self.chunks * CHUNK_LINES, LANES

  @property
  def equal(self) -> tuple[int, int]:
    """Shape of the scratch for `select`, int32."""
    return self.groups * ROWS, -(-self.chunks // CHUNKS_AT_ONCE) * CHUNKS_AT_ONCE * LANES

  @property
  def scratch_bytes(self) -> int:
    return 4 * self.groups * ROWS * (self.chunks * CHUNK + self.equal[1])

  def base(self, group: int) -> int:
    return group * self.chunks * CHUNK_LINES


def ordered_keys(scores: jax.Array) -> jax.Array:
  """int32 in the order of the float32 scores; −0.0 counts as +0.0 and NaN as −∞."""
  bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
  keys = jnp.where(bits < 0, LEAST - bits, bits)  # a negative float becomes minus its magnitude
  return jnp.where(keys > INFINITY, EMPTY, jnp.maximum(keys, EMPTY))


def lines(first: Any, size: int = ROWS) -> Any:
  """Index of `size` lines of a tall array; `first` may be traced and is a multiple of 8."""
  return pl.ds(pl.multiple_of(first, ROWS), size)


def select(keys_ref: Ref, out_ref: Ref, equal_ref: Ref, layout: Layout, chunks: Range, k: int) -> None:
  """Writes the k largest of each row as words of `bits`, [groups · 8, chunks · 128]; others are left alone.

  Of equal keys at the cut those at the lowest positions are taken; EMPTY ones never.
  """
  threshold, wanted = _thresholds(keys_ref, layout, chunks, k)
  _write_compared(keys_ref, out_ref, equal_ref, layout, chunks, threshold)
  cut, before, word = _find_cut(equal_ref, layout, chunks, wanted)
  last = _first_set(word, [w - b for w, b in zip(wanted, before, strict=True)])

  def finish(chunk, carry):
    for g in range(layout.groups):
      at = _rows(g), _words(chunk)
      taken = jnp.where(chunk < cut[g], -1, jnp.where(chunk == cut[g], last[g], 0))
      out_ref[at] = out_ref[at] | (equal_ref[at] & taken)
    return carry

  jax.lax.fori_loop(*chunks, finish, 0)


def _rows(group: int) -> slice:
  return slice(group * ROWS, (group + 1) * ROWS)


def _words(chunk: Any) -> Any:
  return pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)


def _wide(x: jax.Array) -> jax.Array:
  return jnp.broadcast_to(x, (ROWS, LANES))


def _thresholds(keys_ref, layout: Layout, chunks: Range, k: int) -> tuple[list[jax.Array], list[jax.Array]]:
  """By group: the k-th largest key of every row, and how many keys equal to it are wanted; [8, 128].

  Rows with fewer than k keys above EMPTY get EMPTY and 0: everything above it.
  """

  def halve(i, carry):
    # Builds the threshold bit by bit: the largest t with at least k keys ≥ t. The first flip clears the sign
    # of the least int, every later one sets a bit. The last trial that failed is t + 1, so that the count
    # then was the number of keys above t.
    trials = [t ^ (jnp.int32(1) << (31 - i)) for t, _ in carry]
    after = []
    for (t, above), trial, count in zip(
      carry, trials, _counts(keys_ref, layout, chunks, trials), strict=True
    ):
      enough = count >= k
      after.append((jnp.where(enough, trial, t), jnp.where(enough, above, count)))
    return after

  start = (jnp.full((ROWS, 1), LEAST, jnp.int32), jnp.zeros((ROWS, 1), jnp.int32))
  found = jax.lax.fori_loop(0, 32, halve, [start] * layout.groups)
  wanted = [_wide(jnp.where(t <= EMPTY, 0, k - above)) for t, above in found]
  return [_wide(jnp.maximum(t, EMPTY)) for t, _ in found], wanted


def _counts(keys_ref, layout: Layout, chunks: Range, least: list[jax.Array]) -> list[jax.Array]:
  """By group: keys ≥ least of each row, [8, 1]."""
  least = [_wide(x) for x in least]
  sums = -(-COUNTED_AT_ONCE // layout.groups)  # of a group

  def add(step, counts):
    counts = [list(mine) for mine in counts]
    for i in range(layout.unroll * TILES):
      for g in range(layout.groups):
        at = layout.base(g) + step * (layout.unroll * CHUNK_LINES) + i * ROWS
        counts[g][i % sums] += (keys_ref[lines(at), :] >= least[g]).astype(jnp.int32)
    return counts

  zeros = jnp.zeros((ROWS, LANES), jnp.int32)
  first, end = (edge >> log2(layout.unroll) for edge in chunks)
  counts = jax.lax.fori_loop(first, end, add, [[zeros] * sums] * layout.groups)
  return [sum_lanes(sum(mine[1:], mine[0])) for mine in counts]


def _write_compared(keys_ref, above_ref, equal_ref, layout: Layout, chunks: Range, threshold) -> None:
  """Which keys lie above the threshold, and which are equal to it."""

  def pack(chunk, carry):
    for g in range(layout.groups):
      above = equal = jnp.zeros((ROWS, LANES), jnp.int32)
      for i in range(TILES):
        keys = keys_ref[lines(layout.base(g) + chunk * CHUNK_LINES + i * ROWS), :]
        bit = jnp.int32(1 << i if i < 31 else LEAST)
        above = above | jnp.where(keys > threshold[g], bit, 0)
        equal = equal | jnp.where(keys == threshold[g], bit, 0)
      above_ref[_rows(g), _words(chunk)] = above
      equal_ref[_rows(g), _words(chunk)] = equal
    return carry

  jax.lax.fori_loop(*chunks, pack, 0)


def _find_cut(equal_ref, layout: Layout, chunks: Range, wanted: list[jax.Array]) -> tuple[list, list, list]:
  """By group: the chunk with the last wanted equal key, the number of equal keys before it, and its words.

  All [8, 128]; −1, 0 and 0 where none is wanted. Lanes are summed by a product with ones.
  """
  ones = jnp.ones((LANES, LANES), jnp.bfloat16)

  def find(step, carry):
    number = [step * CHUNKS_AT_ONCE + i for i in range(CHUNKS_AT_ONCE)]
    after = []
    for g, (seen, cut, before, word) in enumerate(carry):
      equal = [equal_ref[_rows(g), _words(chunk)] for chunk in number]
      counts = exact_dot(jax.lax.population_count(jnp.concatenate(equal)), ones)
      for i, chunk in enumerate(number):
        # Outside of the range the words are left over from other rows.
        inside = (chunks[0] <= chunk) & (chunk < chunks[1])
        upto = jnp.where(inside, seen + counts[_rows(i)], seen)
        here = (seen < wanted[g]) & (upto >= wanted[g])
        cut, before = jnp.where(here, chunk, cut), jnp.where(here, seen, before)
        word, seen = jnp.where(here, equal[i], word), upto
      after.append((seen, cut, before, word))
    return after

  zeros = jnp.zeros((ROWS, LANES), jnp.int32)
  shift = log2(CHUNKS_AT_ONCE)
  steps = chunks[0] >> shift, (chunks[1] + (CHUNKS_AT_ONCE - 1)) >> shift
  found = jax.lax.fori_loop(*steps, find, [(zeros, zeros - 1, zeros, zeros)] * layout.groups)
  _, cut, before, word = map(list, zip(*found, strict=True))
  return cut, before, word


def _first_set(words: list[jax.Array], counts: list[jax.Array]) -> list[jax.Array]:
  """By group: words [8, 128] of the first `count` set bits of one chunk, in the order of positions."""

  def before(tiles):
    return [
      sum_lanes(jax.lax.population_count(word & ((jnp.int32(1) << tile) - 1)))
      for word, tile in zip(words, tiles, strict=True)
    ]

  tiles = [jnp.zeros((ROWS, 1), jnp.int32)] * len(words)  # in which the last of them lies
  for step in (16, 8, 4, 2, 1):
    seen = before([tile + step for tile in tiles])
    tiles = [
      jnp.where(s < count[:, :1], tile + step, tile)
      for s, count, tile in zip(seen, counts, tiles, strict=True)
    ]
  upto = lane_order(lambda row, column: row <= column)
  first = []
  for word, count, tile, seen in zip(words, counts, tiles, before(tiles), strict=True):
    bit = jnp.int32(1) << tile
    rank = exact_dot((word >> tile) & 1, upto)
    first.append((bit - 1) | jnp.where(rank <= count - seen, bit, 0))
  return first


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
