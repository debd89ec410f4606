"""The lightning indexer by Pallas for TPU: scores of a block of queries live in VMEM and nowhere else.

A program takes a block of queries. It goes once over the tiles of keys that any of them sees, fetching the
next while it scores one: all heads of all queries are rows of one product, whose results are clamped, gated
and added head by head, and turned into sortable int32. Then the selection of `topk.vmem` runs on the block,
over the chunks that were scored. Of the keys behind a block's queries nothing is fetched or computed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.lightning_indexer.order import CLASSES, by_class
from pallas_kernels.lightning_indexer.paged import select_paged as select_paged
from pallas_kernels.topk import compact, vmem
from pallas_kernels.topk.bits import CHUNK, LANES, log2, words

KEY_TILE = 512  # keys that are scored at a time
LEAST_QUERIES, MOST_QUERIES = 16, 64  # of a block; 16 rows are a bfloat16 tile
KEYS_BYTES = 2**25  # VMEM for the sortable scores of a block
WIDEST = 2**19  # keys, where the smallest block takes that much
SPARE_BYTES = 2**23
NOBODY = -1  # segment of a query that sees nothing


class Sizes(NamedTuple):
  """What a program works on."""

  k: int
  heads: int
  layout: vmem.Layout  # of a block of queries
  blocks: int  # of a row of the batch
  programs: int

  @property
  def queries(self) -> int:
    return self.layout.groups * vmem.ROWS


def refusal(query_BTIJ: jax.Array, key_BSJ: jax.Array) -> str | None:
  """Why these cannot be scored here; None where they can."""
  I, J = query_BTIJ.shape[2:]
  if J != LANES:
    return f"index_head_dim {LANES} is possible, got {J}"
  if I % CLASSES or I > LANES - 2:
    return f"index heads by {CLASSES}, at most {LANES - CLASSES}, are possible, got {I}"
  if key_BSJ.shape[1] > WIDEST:
    return f"rows of at most {WIDEST} keys are possible, got {key_BSJ.shape[1]}"
  return "at least one query is needed" if query_BTIJ.size == 0 else None


def select(
  query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS, interpret: Any = False
) -> jax.Array:
  """See api.select."""
  B, T, I, _ = query_BTIJ.shape
  S = key_BSJ.shape[1]
  chunks = pl.cdiv(S, CHUNK)
  queries = _queries(T, chunks)
  blocks = pl.cdiv(T, queries)
  sizes = Sizes(k, I, vmem.Layout(queries // vmem.ROWS, chunks), blocks, B * blocks)
  query_BITJ = _padded(jnp.moveaxis(by_class(query_BTIJ, 2), 1, 2), 2, blocks * queries)
  segments_BT = _padded(jnp.where(segments_BT == 0, NOBODY, segments_BT), 1, blocks * queries, NOBODY)
  slots_BT = _padded(slots_BT, 1, blocks * queries)
  gate_BTI = _padded(by_class(gate_BTI, 2), 1, blocks * queries)
  tiles = pl.cdiv(S, KEY_TILE)
  key_segments_BS = _padded(key_segments_BS, 1, tiles * KEY_TILE)
  ranges = _tile_ranges(slots_BT, segments_BT, key_segments_BS, queries)
  bits = _call(sizes, interpret)(
    ranges,
    query_BITJ,
    _row_data(gate_BTI, slots_BT, segments_BT),
    key_segments_BS[:, None],
    _padded(key_BSJ, 1, tiles * KEY_TILE),
  )
  return bits[:, :T, : words(S)]


def select_indices(
  query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS, interpret: Any = False
) -> jax.Array:
  """See api.select_indices."""
  bits_BTW = select(query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS, interpret)
  indices = compact.indices(bits_BTW.reshape(-1, bits_BTW.shape[-1]), k, interpret)
  return indices.reshape(*bits_BTW.shape[:2], k)


def _queries(T: int, chunks: int) -> int:
  """Queries of a block: as many as fit, since every block fetches its keys anew."""
  queries = MOST_QUERIES
  while queries > LEAST_QUERIES and (queries * chunks * CHUNK * 4 > KEYS_BYTES or queries >= 2 * T):
    queries //= 2
  return queries


def _padded(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
  if x.shape[axis] == size:
    return x
  widths = [(0, size - n if a == axis else 0) for a, n in enumerate(x.shape)]
  return jnp.pad(x, widths, constant_values=value)


def _row_data(gate_BTI: jax.Array, slots_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
  """int32 [B, T, 128]: a query's gates as bits, its slot and its segment, in a lane each."""
  gates = jax.lax.bitcast_convert_type(gate_BTI.astype(jnp.float32), jnp.int32)
  data = jnp.concatenate([gates, slots_BT[..., None], segments_BT[..., None]], axis=-1)
  return _padded(data, 2, LANES)


def _tile_ranges(slots_BT, segments_BT, key_segments_BS, queries: int) -> jax.Array:
  """int32 [B · blocks · 2]: first tile of keys that a block may see, and the one behind the last.

  By the least and the greatest segment of a block and of a tile, so that packed documents are skipped.
  """
  B = slots_BT.shape[0]
  many = jnp.iinfo(jnp.int32).max
  segments = segments_BT.reshape(B, -1, queries)
  asking = segments != NOBODY
  last_slot = jnp.max(jnp.where(asking, slots_BT.reshape(B, -1, queries), -1), axis=-1)
  tiles = key_segments_BS.reshape(B, -1, KEY_TILE)
  most, least = jnp.max(tiles, axis=-1), jnp.min(jnp.where(tiles == 0, many, tiles), axis=-1)
  least_asked = jnp.min(jnp.where(asking, segments, many), axis=-1)
  meets = (least[:, None] <= jnp.max(segments, axis=-1)[..., None]) & (
    most[:, None] >= least_asked[..., None]
  )
  number = jnp.arange(tiles.shape[1], dtype=jnp.int32)
  meets &= number * KEY_TILE <= last_slot[..., None]
  first = jnp.min(jnp.where(meets, number, many), axis=-1)
  end = jnp.max(jnp.where(meets, number + 1, 0), axis=-1)
  return jnp.stack([jnp.minimum(first, end), end], axis=-1).reshape(-1)


def _call(sizes: Sizes, interpret: Any):
  queries, heads, chunks = sizes.queries, sizes.heads, sizes.layout.chunks

  def call(ranges, query_BITJ, rows_BTL, key_segments_B1S, key_BSJ):
    B, S, J = key_BSJ.shape
    item = query_BITJ.dtype.itemsize

    def block(i, _ranges):
      return _block_of(i, sizes)

    return pl.pallas_call(
      functools.partial(_kernel, sizes=sizes),
      name="lightning_indexer",
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(sizes.programs,),
        in_specs=[
          pl.BlockSpec((None, heads, queries, J), lambda i, r: (block(i, r)[0], 0, block(i, r)[1], 0)),
          pl.BlockSpec((None, queries, LANES), lambda i, r: (*block(i, r), 0)),
          pl.BlockSpec((None, 1, S), lambda i, r: (block(i, r)[0], 0, 0)),
          pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((None, queries, chunks * LANES), lambda i, r: (*block(i, r), 0)),
        scratch_shapes=[
          pltpu.VMEM((2, KEY_TILE, J), key_BSJ.dtype),
          pltpu.SemaphoreType.DMA((2,)),
          pltpu.VMEM(((heads + 2) * queries, LANES), jnp.int32),
          pltpu.VMEM(sizes.layout.keys, jnp.int32),
          pltpu.VMEM(sizes.layout.equal, jnp.int32),
        ],
      ),
      out_shape=jax.ShapeDtypeStruct((B, sizes.blocks * queries, chunks * LANES), jnp.int32),
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel",),
        vmem_limit_bytes=sizes.layout.scratch_bytes
        + 2 * queries * (chunks * LANES * 4 + heads * J * item)
        + SPARE_BYTES,
      ),
      interpret=interpret,
    )(ranges, query_BITJ, rows_BTL, key_segments_B1S, key_BSJ)

  return call


def _block_of(program, sizes: Sizes) -> tuple[Any, Any]:
  """(row of the batch, block of queries) of a program.

  Two cores of a v5p take the first and the second half of the programs, and a causal row's second half sees
  three times the keys of its first: so they take every other block each.
  """
  half = (sizes.programs + 1) // 2
  number = jnp.where(program < half, 2 * program, 2 * (program - half) + 1)
  blocks = jnp.int32(sizes.blocks)
  return jax.lax.div(number, blocks), jax.lax.rem(number, blocks)


def _kernel(
  ranges_ref,
  query_ref,
  rows_ref,
  key_segments_ref,
  key_hbm,
  out_ref,
  tile_ref,
  semaphores,
  columns_ref,
  keys_ref,
  equal_ref,
  *,
  sizes: Sizes,
) -> None:
  row, block = _block_of(pl.program_id(0), sizes)
  number = row * sizes.blocks + block
  first, end = ranges_ref[2 * number], ranges_ref[2 * number + 1]
  _spread_columns(rows_ref, columns_ref, sizes)

  def fetch(tile, place):
    rows = pl.ds(pl.multiple_of(tile * KEY_TILE, KEY_TILE), KEY_TILE)
    return pltpu.make_async_copy(key_hbm.at[row, rows, :], tile_ref.at[place], semaphores.at[place])

  @pl.when(first < end)
  def _start():
    fetch(first, first & 1).start()

  def score(tile, carry):
    place = tile & 1

    @pl.when(tile + 1 < end)
    def _next():
      fetch(tile + 1, 1 - place).start()

    fetch(tile, place).wait()
    scores = _score_tile(query_ref, tile_ref[place], columns_ref, sizes)
    _store_tile(scores, tile, key_segments_ref, columns_ref, keys_ref, sizes)
    return carry

  jax.lax.fori_loop(first, end, score, 0)
  _select(first, end, out_ref, keys_ref, equal_ref, sizes)


def _spread_columns(rows_ref, columns_ref, sizes: Sizes) -> None:
  """Every gate, slot and segment of the block over all lanes: [(heads + 2) · queries, 128]."""
  data = rows_ref[...]
  for column in range(sizes.heads + 2):
    lines = slice(column * sizes.queries, (column + 1) * sizes.queries)
    columns_ref[lines, :] = jnp.broadcast_to(data[:, column : column + 1], (sizes.queries, LANES))


def _score_tile(query_ref, keys, columns_ref, sizes: Sizes) -> jax.Array:
  """float32 [queries, KEY_TILE]."""
  queries, J = sizes.queries, keys.shape[-1]
  exact = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
  in_class = sizes.heads // CLASSES

  def sum_class(dots, first):
    """Of the heads from `first`, whose products are the rows of dots."""
    terms = []
    for i in range(in_class):
      gate = columns_ref[(first + i) * queries : (first + i + 1) * queries, :]
      gate = jax.lax.bitcast_convert_type(gate, jnp.float32)
      gate = jnp.concatenate([gate] * (KEY_TILE // LANES), axis=1)
      terms.append(jnp.maximum(dots[i * queries : (i + 1) * queries], 0.0) * gate)
    return sum(terms[1:], terms[0])

  def sum_pair(pair):
    first = pair * 2 * in_class
    query = query_ref[first : first + 2 * in_class].reshape(2 * in_class * queries, J)
    dots = jax.lax.dot_general(
      query, keys, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )
    middle = in_class * queries
    return sum_class(dots[:middle], first) + sum_class(dots[middle:], first + in_class)

  return (sum_pair(0) + sum_pair(1)) + (sum_pair(2) + sum_pair(3))


def _store_tile(scores, tile, key_segments_ref, columns_ref, keys_ref, sizes: Sizes) -> None:
  """Writes the sortable scores of a tile; what a query does not see is EMPTY."""
  queries = sizes.queries
  lane = jax.lax.broadcasted_iota(jnp.int32, (vmem.ROWS, LANES), 1)
  for group in range(queries // vmem.ROWS):
    rows = slice(group * vmem.ROWS, (group + 1) * vmem.ROWS)
    slots, segments = (
      columns_ref[column * queries + rows.start : column * queries + rows.stop, :]
      for column in (sizes.heads, sizes.heads + 1)
    )
    for n in range(KEY_TILE // LANES):
      first = pl.multiple_of(tile * KEY_TILE, KEY_TILE) + n * LANES
      key_segments = key_segments_ref[:, pl.ds(first, LANES)]
      visible = (lane + first <= slots) & (key_segments == segments)
      keys = vmem.ordered_keys(scores[rows, n * LANES : (n + 1) * LANES])
      at = sizes.layout.base(group) + (tile * (KEY_TILE // LANES) + n) * vmem.ROWS
      keys_ref[vmem.lines(at), :] = jnp.where(visible, keys, vmem.EMPTY)


def _clear(keys_ref, sizes: Sizes, tiles) -> None:
  """Makes the tiles of a range EMPTY."""
  lines = KEY_TILE // LANES * vmem.ROWS

  def clear(tile, carry):
    for group in range(sizes.layout.groups):
      at = vmem.lines(sizes.layout.base(group) + tile * lines, lines)
      keys_ref[at, :] = jnp.full((lines, LANES), vmem.EMPTY, jnp.int32)
    return carry

  first, end = tiles
  jax.lax.fori_loop(first, end, clear, 0)


def _select(first, end, out_ref, keys_ref, equal_ref, sizes: Sizes) -> None:
  """The block's selection among tiles first to end − 1."""
  unroll = sizes.layout.unroll
  piece = unroll * CHUNK // KEY_TILE  # tiles
  pieces = first >> log2(piece), (end + piece - 1) >> log2(piece)
  _clear(keys_ref, sizes, (pieces[0] * piece, first))
  _clear(keys_ref, sizes, (end, pieces[1] * piece))
  out_ref[...] = jnp.zeros(out_ref.shape, jnp.int32)
  chunks = pieces[0] * unroll, pieces[1] * unroll
  vmem.select(keys_ref, out_ref, equal_ref, sizes.layout, chunks, sizes.k)


class Interpreted:
  """The same on any back end, one instruction after another."""

  select = staticmethod(functools.partial(select, interpret=True))
  select_indices = staticmethod(functools.partial(select_indices, interpret=True))
  select_paged = staticmethod(functools.partial(select_paged, interpret=True))
