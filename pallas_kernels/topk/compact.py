"""From sets as bits to ascending indices, and the scores at them, by Pallas for TPU.

A TPU has neither a scatter nor a compaction of lanes, but it can gather among the 128 lanes of a register.
So every output slot looks for its own position: the j-th slot descends a tree of counts (supergroups of
tiles, tiles, words of 32, bits) to the j-th set bit. The matrix unit makes the tree: it counts the bits of
every tile and packs neighbouring positions into words, sixteen at a time since bfloat16 holds 2^15 exactly.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.topk.bits import LANES, TILES, log2
from pallas_kernels.topk.vmem import LEAST, ROWS, exact_dot, lane_order, lines, small

HALF = 16  # bits that one product packs
HALVES = LANES // HALF
WORDS = HALVES // 2  # of 32 bits in a tile
LINES = 2 * HALVES  # of a product's result: the halves, the count, and padding to a bfloat16 tile
SLOT_BLOCKS = 8  # searched at the same time, 128 slots each, to hide the latency of a gather
VALUE_BLOCKS, VALUE_TILES = 2, 64  # blocks of slots and tiles that are compared at a time


def indices(bits: jax.Array, k: int, interpret) -> jax.Array:
  """Ascending positions of the first k set bits of int32 [R, words]; int32 [R, k], −1 behind the last.

  Rows of at most 128 chunks: as many supergroups as a register has lanes.
  """
  R, width = bits.shape
  chunks = width // LANES
  stride = max(ROWS, 1 << (chunks - 1).bit_length())
  tiles = stride * TILES // LANES  # in a supergroup
  blocks = -(-k // LANES)
  unroll = min(SLOT_BLOCKS, blocks)
  slots = -(-blocks // unroll) * unroll * LANES
  return pl.pallas_call(
    functools.partial(_indices_kernel, chunks=chunks, stride=stride, unroll=unroll),
    name="topk_indices",
    grid=(pl.cdiv(R, ROWS),),
    in_specs=[pl.BlockSpec((ROWS, width), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((ROWS, slots), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((R, k), jnp.int32),
    scratch_shapes=[
      pltpu.VMEM((stride * ROWS, LANES), jnp.int32),
      pltpu.VMEM((tiles * ROWS * LINES, LANES), jnp.int32),
      pltpu.VMEM((tiles, 1 + WORDS, ROWS, LANES), jnp.int32),
    ],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    interpret=interpret,
  )(bits)


def _indices_kernel(bits_ref, out_ref, rows_ref, products_ref, tree_ref, *, chunks, stride, unroll):
  groups = LANES // stride  # supergroups of a chunk
  tiles = TILES // groups
  for chunk in range(stride):
    place = slice(chunk * LANES, (chunk + 1) * LANES)
    nothing = jnp.zeros((ROWS, LANES), jnp.int32)
    rows_ref[chunk * ROWS : (chunk + 1) * ROWS, :] = bits_ref[:, place] if chunk < chunks else nothing
  _write_tree(rows_ref, products_ref, tree_ref, stride, groups, tiles)

  # Lane q · stride + c of the tree is supergroup c · groups + q, in the order of positions.
  def order(lane):
    return (lane & (stride - 1)) * groups + (lane >> log2(stride))

  up_to = lane_order(lambda row, column: order(row) <= column)
  upto = jnp.zeros((ROWS, LANES), jnp.int32)  # set bits in the supergroups up to each
  for b in range(tiles):
    upto += exact_dot(tree_ref[b, 0], up_to)
  total = _gather(upto, jnp.full((ROWS, LANES), LANES - 1, jnp.int32))

  def search(step, _):
    for i in range(unroll):
      block = step * unroll + i
      slot = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1) + block * LANES
      found = _find(tree_ref, upto, slot, stride, groups, tiles)
      out_ref[:, pl.ds(pl.multiple_of(block * LANES, LANES), LANES)] = jnp.where(slot < total, found, -1)
    return _

  jax.lax.fori_loop(0, out_ref.shape[1] // LANES // unroll, search, 0)


def _write_tree(rows_ref, products_ref, tree_ref, stride, groups, tiles) -> None:
  """tree_ref[b] of tile b of every supergroup, a lane each: its count of set bits, then its four words."""
  line, lane = (jax.lax.broadcasted_iota(jnp.int32, (LINES, LANES), axis) for axis in (0, 1))
  weight = jnp.where(lane >> log2(HALF) == line, 1 << (lane & (HALF - 1)), 0)
  weight = small(jnp.where(line == HALVES, 1, weight))
  contract_lanes = (((1,), (1,)), ((), ()))

  def row(r, _):
    words = rows_ref[pl.ds(r, stride, stride=ROWS), :]
    for b in range(tiles):
      shifted = [(words >> (q * tiles + b)) & 1 for q in range(groups)]
      inside = small(jnp.concatenate(shifted, axis=0))
      product = jax.lax.dot_general(weight, inside, contract_lanes, preferred_element_type=jnp.float32)
      products_ref[lines((b * ROWS + r) * LINES, LINES), :] = product.astype(jnp.int32)
    return _

  jax.lax.fori_loop(0, ROWS, row, 0)
  for b in range(tiles):
    first = b * ROWS * LINES
    halves = [products_ref[pl.ds(first + n, ROWS, stride=LINES), :] for n in range(HALVES + 1)]
    tree_ref[b, 0] = halves[HALVES]
    for w in range(WORDS):
      tree_ref[b, 1 + w] = halves[2 * w] | (halves[2 * w + 1] << HALF)


def _find(tree_ref, upto, slot, stride, groups, tiles) -> jax.Array:
  """Position of the set bit with `slot` set bits before it; anything where there are not so many."""
  group = jnp.zeros((ROWS, LANES), jnp.int32)
  for step in (64, 32, 16, 8, 4, 2, 1):
    group = jnp.where(_gather(upto, group + (step - 1)) <= slot, group + step, group)
  rank = slot - jnp.where(group > 0, _gather(upto, jnp.maximum(group - 1, 0)), 0)
  lane = (group & (groups - 1)) * stride + (group >> log2(groups))  # where `order` is the group
  tile, seen, before = (jnp.zeros((ROWS, LANES), jnp.int32) for _ in range(3))
  for b in range(tiles):
    seen += _gather(tree_ref[b, 0], lane)
    passed = seen <= rank
    tile, before = jnp.where(passed, b + 1, tile), jnp.where(passed, seen, before)
  rank -= before
  words = [_gather(tree_ref[0, 1 + w], lane) for w in range(WORDS)]
  for b in range(1, tiles):
    words = [jnp.where(tile == b, _gather(tree_ref[b, 1 + w], lane), words[w]) for w in range(WORDS)]
  return (group * tiles + tile) * LANES + _find_in_words(words, rank)


def _find_in_words(words: list[jax.Array], rank: jax.Array) -> jax.Array:
  """Position of the set bit with `rank` set bits before it in words of 32 bits."""
  word, at = words[0], jnp.zeros_like(rank)
  left = rank
  for w in range(1, WORDS):
    count = jax.lax.population_count(words[w - 1])
    # A rank that passed one word and fails the next stays there: later words find `at` behind.
    passed = (left >= count) & (at == (w - 1) * 32)
    left, at = jnp.where(passed, left - count, left), jnp.where(passed, w * 32, at)
    word = jnp.where(passed, words[w], word)
  for width in (16, 8, 4, 2, 1):
    count = jax.lax.population_count(word & ((1 << width) - 1))
    passed = left >= count
    left, at = jnp.where(passed, left - count, left), jnp.where(passed, at + width, at)
    word = jnp.where(passed, word >> width, word)
  return at


def _gather(x: jax.Array, lane: jax.Array) -> jax.Array:
  """x[row, lane[row, ·]]: a register's lanes rearranged within each row."""
  return jnp.take_along_axis(x, lane, axis=1, mode="promise_in_bounds")


def values(scores: jax.Array, indices: jax.Array, interpret) -> jax.Array:
  """Cleaned scores [R, S] at ascending indices [R, k]; −∞ where the index is −1.

  Each block of slots looks through the tiles between its first and its last position in any of 8 rows, by a
  gather of lanes a tile: less than fetching a number at a time, also where that is the whole row.
  """
  R, S = scores.shape
  k = indices.shape[1]
  blocks = -(-k // LANES)
  at_once = min(VALUE_BLOCKS, blocks)
  slots = -(-blocks // at_once) * at_once * LANES
  width = pl.cdiv(S, VALUE_TILES * LANES) * VALUE_TILES * LANES
  return pl.pallas_call(
    functools.partial(_values_kernel, width=S, at_once=at_once),
    name="topk_values",
    grid=(pl.cdiv(R, ROWS),),
    in_specs=[
      pl.BlockSpec((ROWS, width), lambda i: (i, 0)),
      pl.BlockSpec((ROWS, slots), lambda i: (i, 0)),
    ],
    out_specs=pl.BlockSpec((ROWS, slots), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((R, k), jnp.float32),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel",), vmem_limit_bytes=8 * ROWS * (width + 2 * slots) + 2**22
    ),
    interpret=interpret,
  )(scores, indices)


def _values_kernel(scores_ref, indices_ref, out_ref, *, width, at_once):
  def search(number, _):
    first = number * at_once * LANES
    places = [pl.ds(pl.multiple_of(first + i * LANES, LANES), LANES) for i in range(at_once)]
    wanted = [indices_ref[:, place] for place in places]
    first_step, last_step = _span(wanted, width)

    def match(step, found):
      found = list(found)
      for i, index in enumerate(
        wanted
      ):  # all tiles of a block together: changing the lanes of a gather is slow
        tile, lane = index >> log2(LANES), index & (LANES - 1)
        for t in range(VALUE_TILES):
          number = step * VALUE_TILES + t
          scores = scores_ref[:, pl.ds(pl.multiple_of(number * LANES, LANES), LANES)]
          found[i] = jnp.where(tile == number, _gather(scores, lane), found[i])
      return tuple(found)

    nothing = jnp.full((ROWS, LANES), -jnp.inf, jnp.float32)
    found = jax.lax.fori_loop(first_step, last_step + 1, match, (nothing,) * at_once)
    for place, score in zip(places, found, strict=True):
      negative_zero = jax.lax.bitcast_convert_type(score, jnp.int32) == LEAST
      out_ref[:, place] = jnp.where(negative_zero, 0.0, score)
    return _

  jax.lax.fori_loop(0, out_ref.shape[1] // LANES // at_once, search, 0)


def _span(wanted: list[jax.Array], width: int) -> tuple[jax.Array, jax.Array]:
  """Least and greatest of the wanted, in steps of VALUE_TILES; slots past the end hold anything."""
  least = functools.reduce(jnp.minimum, [jnp.where(index < 0, width, index) for index in wanted])
  most = functools.reduce(jnp.maximum, wanted)
  ends = jnp.min(least.astype(jnp.float32)), jnp.max(most.astype(jnp.float32))  # exact below 2^24
  first, last = (jnp.clip(end.astype(jnp.int32), -1, width) for end in ends)
  step = log2(VALUE_TILES * LANES)
  return first >> step, jnp.minimum(last, width - 1) >> step
