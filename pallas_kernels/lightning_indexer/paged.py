"""The lightning indexer for decoding, by Pallas for TPU: a few queries a sequence, keys in pages.

A program takes the queries of several sequences, 8 rows in all, so that one selection serves them. It goes
through the sequences one after another and over the keys of each in tiles, whose pages it fetches by the page
table while the tile before is scored. With so few queries the products are short: each key is a column, and
the heads of a query are the rows, of which every eighth is summed at once, and the eight sums last.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.lightning_indexer.order import CLASSES
from pallas_kernels.topk import compact, vmem
from pallas_kernels.topk.bits import CHUNK, LANES, log2

KEY_TILE = 2048  # keys that are scored at a time
WIDEST = 2**19
LEAST_PAGE = 16  # rows of a bfloat16 tile
SPARE_BYTES = 2**23


class Sizes(NamedTuple):
  """What a program works on."""

  k: int
  sequences: int
  queries: int  # of a sequence
  heads: int
  page: int  # keys
  layout: vmem.Layout


def refusal(query_BTIJ: jax.Array, key_pages_PLJ: jax.Array, page_table_BN: jax.Array) -> str | None:
  """Why these cannot be scored here; None where they can."""
  L, J = key_pages_PLJ.shape[1:]
  if J != LANES:
    return f"index_head_dim {LANES} is possible, got {J}"
  if query_BTIJ.shape[2] % CLASSES:
    return f"index heads by {CLASSES} are possible, got {query_BTIJ.shape[2]}"
  if L % LEAST_PAGE or KEY_TILE % L:
    return f"pages of {LEAST_PAGE}, 32, 64, … {KEY_TILE} keys are possible, got {L}"
  if page_table_BN.shape[1] * L > WIDEST:
    return f"sequences of at most {WIDEST} keys are possible, got {page_table_BN.shape[1] * L}"
  return "at least one query and one page are needed" if 0 in (query_BTIJ.size, page_table_BN.size) else None


def select_paged(
  query_BTIJ, gate_BTI, key_pages_PLJ, page_table_BN, slots_BT, k, interpret: Any = False
) -> jax.Array:
  """See api.select_paged."""
  B, T, I, J = query_BTIJ.shape
  keys = page_table_BN.shape[1] * key_pages_PLJ.shape[1]
  # More queries than a program has rows become further sequences with the same pages.
  queries = min(T, vmem.ROWS)
  pieces = pl.cdiv(T, queries)
  sequences = vmem.ROWS // queries
  programs = pl.cdiv(B * pieces, sequences)

  def fold(x, fill):
    """[B, T, …] → [programs, sequences, queries, …]."""
    x = jnp.pad(x, [(0, 0), (0, pieces * queries - T)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
    x = x.reshape(B * pieces, queries, *x.shape[2:])
    widths = [(0, programs * sequences - B * pieces)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, constant_values=fill).reshape(programs, sequences, *x.shape[1:])

  sizes = Sizes(k, sequences, queries, I, key_pages_PLJ.shape[1], vmem.Layout(1, pl.cdiv(keys, CHUNK)))
  table = jnp.repeat(jnp.clip(page_table_BN, 0, key_pages_PLJ.shape[0] - 1), pieces, axis=0)
  # Whole tiles: past the end of a sequence page 0 is fetched, and nothing of it seen.
  rest = -table.shape[1] % (KEY_TILE // sizes.page)
  table = jnp.pad(table, ((0, programs * sequences - B * pieces), (0, rest)))
  bits = _call(sizes, programs, interpret)(
    table.reshape(programs, sequences, -1),
    fold(slots_BT, -1),
    _wide(fold(gate_BTI.astype(jnp.float32), 0).reshape(programs, sequences, queries * I)),
    fold(query_BTIJ, 0).reshape(programs, sequences, queries * I, J),
    key_pages_PLJ,
  )
  bits = bits[:, : sequences * queries].reshape(programs * sequences, queries, -1)[: B * pieces]
  bits = bits.reshape(B, pieces * queries, -1)[:, :T]
  most = min(k, keys)
  return compact.indices(bits.reshape(B * T, -1), most, interpret).reshape(B, T, most)


def _wide(gates: jax.Array) -> jax.Array:
  return jnp.broadcast_to(gates[..., None], (*gates.shape, LANES))


def _call(sizes: Sizes, programs: int, interpret: Any):
  rows = sizes.queries * sizes.heads
  layout = sizes.layout

  def call(table, slots, gates, queries, key_pages_PLJ):
    J, dtype = key_pages_PLJ.shape[2], key_pages_PLJ.dtype

    def block(*shape, **options):
      return pl.BlockSpec((None, *shape), lambda i: (i, *[0] * len(shape)), **options)

    return pl.pallas_call(
      functools.partial(_kernel, sizes=sizes),
      name="lightning_indexer_paged",
      grid=(programs,),
      in_specs=[
        block(*table.shape[1:], memory_space=pltpu.SMEM),
        block(*slots.shape[1:], memory_space=pltpu.SMEM),
        block(sizes.sequences, rows, LANES),
        block(sizes.sequences, rows, J),
        pl.BlockSpec(memory_space=pl.ANY),
      ],
      out_specs=block(vmem.ROWS, layout.chunks * LANES),
      out_shape=jax.ShapeDtypeStruct((programs, vmem.ROWS, layout.chunks * LANES), jnp.int32),
      scratch_shapes=[
        pltpu.VMEM((2, KEY_TILE, J), dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM(layout.keys, jnp.int32),
        pltpu.VMEM(layout.equal, jnp.int32),
      ],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel",),
        vmem_limit_bytes=2 * layout.scratch_bytes + SPARE_BYTES,
        disable_bounds_checks=True,  # of every page; the table is clipped to what there is
      ),
      interpret=interpret,
    )(table, slots, gates, queries, key_pages_PLJ)

  return call


def _kernel(
  table_ref, slots_ref, gates_ref, query_ref, pages_hbm, out_ref, tile_ref, semaphores, keys_ref,
  equal_ref, *, sizes: Sizes,
) -> None:  # fmt: skip
  layout = sizes.layout
  ends = [_tiles(slots_ref, s, sizes) for s in range(sizes.sequences)]
  in_piece = layout.unroll * CHUNK // KEY_TILE
  pieces = (functools.reduce(jnp.maximum, ends) + in_piece - 1) >> log2(in_piece)
  chunks = pieces * layout.unroll
  _clear(keys_ref, chunks)

  def fetch(sequence, tile, place):
    """Starts the transfers of a tile's pages."""
    in_tile = KEY_TILE // sizes.page
    for i in range(in_tile):
      page = table_ref[sequence, tile * in_tile + i]
      rows = tile_ref.at[place, i * sizes.page : (i + 1) * sizes.page]
      pltpu.make_async_copy(pages_hbm.at[page], rows, semaphores.at[place]).start()

  def await_tile(place):
    """Waits for as many bytes as a tile has, of whichever pages."""
    pltpu.make_async_copy(tile_ref.at[place], tile_ref.at[place], semaphores.at[place]).wait()

  fetch(0, 0, 0)
  done = jnp.int32(0)  # tiles before, whose parity says where the next one lies
  for sequence in range(sizes.sequences):

    def score(tile, done, sequence=sequence):
      place = done & 1
      last = tile + 1 == ends[sequence]

      @pl.when(jnp.logical_not(last))
      def _next():
        fetch(sequence, tile + 1, 1 - place)

      if sequence + 1 < sizes.sequences:

        @pl.when(last)
        def _next_sequence():
          fetch(sequence + 1, 0, 1 - place)

      await_tile(place)
      dots = _score_tile(query_ref, sequence, tile_ref[place], sizes)
      _store_tile(sequence, tile, dots, gates_ref, slots_ref, keys_ref, sizes)
      return done + 1

    done = jax.lax.fori_loop(0, ends[sequence], score, done)
  out_ref[...] = jnp.zeros(out_ref.shape, jnp.int32)
  vmem.select(keys_ref, out_ref, equal_ref, layout, (0, chunks), sizes.k)


def _tiles(slots_ref, sequence: int, sizes: Sizes) -> jax.Array:
  """Tiles of keys that the sequence's queries see, at least 1."""
  last = functools.reduce(jnp.maximum, [slots_ref[sequence, t] for t in range(sizes.queries)])
  return jnp.maximum((last >> log2(KEY_TILE)) + 1, 1)


def _clear(keys_ref, chunks) -> None:
  def clear(chunk, carry):
    nothing = jnp.full((vmem.CHUNK_LINES, LANES), vmem.EMPTY, jnp.int32)
    keys_ref[vmem.lines(chunk * vmem.CHUNK_LINES, vmem.CHUNK_LINES), :] = nothing
    return carry

  jax.lax.fori_loop(0, chunks, clear, 0)


def _score_tile(query_ref, sequence: int, keys, sizes: Sizes) -> jax.Array:
  """float32 [query rows, KEY_TILE]."""
  exact = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    query_ref[sequence], keys, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
  )


def _store_tile(sequence: int, tile, dots, gates_ref, slots_ref, keys_ref, sizes: Sizes) -> None:
  """Sums over heads and writes the sortable scores of the sequence's rows; what is not seen is EMPTY."""
  line, lane = (jax.lax.broadcasted_iota(jnp.int32, (vmem.ROWS, LANES), axis) for axis in (0, 1))
  for t in range(sizes.queries):
    heads = range(t * sizes.heads, (t + 1) * sizes.heads, CLASSES)
    classes = [slice(first, first + CLASSES) for first in heads]
    for octet in range(KEY_TILE // LANES // vmem.ROWS):
      sums = []
      for n in range(octet * vmem.ROWS, (octet + 1) * vmem.ROWS):
        terms = [
          jnp.maximum(dots[rows, n * LANES : (n + 1) * LANES], 0.0) * gates_ref[sequence, rows, :]
          for rows in classes
        ]
        sums.append(sum(terms[1:], terms[0]))  # line i: of heads i, i + 8, i + 16, …
      first = tile * KEY_TILE + octet * vmem.ROWS * LANES
      seen = first + line * LANES + lane <= slots_ref[sequence, t]
      keys = jnp.where(seen, vmem.ordered_keys(_sum_classes(sums)), vmem.EMPTY)
      at = (tile * (KEY_TILE // LANES) + octet * vmem.ROWS) * vmem.ROWS + sequence * sizes.queries + t
      keys_ref[pl.ds(at, vmem.ROWS, stride=vmem.ROWS), :] = keys


def _sum_classes(sums: list[jax.Array]) -> jax.Array:
  """[8, 128] whose line n is the sum of the eight lines of sums[n], in the order of `order`.

  Two registers become one in each step: half of their lines holds sums of the one, half of the other.
  """
  line = jax.lax.broadcasted_iota(jnp.int32, (vmem.ROWS, LANES), 0)
  for distance in (4, 2, 1):
    low = line & distance == 0
    merged = []
    for one, other in zip(sums[:distance], sums[distance:], strict=True):
      mine, partner = jnp.where(low, one, other), jnp.where(low, other, one)
      up = pltpu.roll(partner, vmem.ROWS - distance, axis=0)
      down = up if distance == 4 else pltpu.roll(partner, distance, axis=0)
      merged.append(mine + jnp.where(low, up, down))
    sums = merged
  return sums[0]
