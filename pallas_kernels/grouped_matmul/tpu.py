"""Grouped matmul by Pallas for TPU, forward and both gradients.

The rows are cut into tiles, and each pair of a tile and a group that share rows is a visit. A program makes
one visit with one part of the group's matrix, which is fetched once for all visits of the group; of the tile
only blocks of rows that the group has a part in are multiplied. Grids do not depend on the group sizes, so
that two cores can share them; a visit too many fetches and multiplies nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.reference import row_alignment as row_alignment

LANES = 128
TILE_ROWS, LEAST_ROWS = 512, 16  # fetched at a time; 16 rows are a bfloat16 register
TILE_BYTES = 2**23  # VMEM for them; others are fetched meanwhile
BLOCK_ROWS = 256  # multiplied at a time: fewer are wasted where groups meet
MATRIX_BYTES = 13 * 2**20  # VMEM for a part of a matrix; another is fetched meanwhile
SUM_ROWS, SUM_COLUMNS = 1024, 2048  # part of a matrix's gradient that is added up in VMEM
SUM_STRIP = 256
SPARE_BYTES = 2**23


class Visits(NamedTuple):
  """Tiles of rows for groups, in the order of rows; as many as any group sizes could need.

  Those too many follow: they have tiles that no group has a part in, no rows, and the last group.
  """

  tile_V: jax.Array  # that is written
  fetch_V: jax.Array  # the same while there are rows
  group_V: jax.Array
  begin_V: jax.Array  # rows begin … end - 1 of the tile are the group's
  end_V: jax.Array


def grouped_matmul(
  x_MK: jax.Array,
  w_EKN: jax.Array,
  group_sizes_E: jax.Array,
  alignment: int = 1,
  zero_rest: bool = True,
  interpret: Any = False,
) -> jax.Array:
  """See api.grouped_matmul. Alignment does not matter here."""
  del alignment
  M = x_MK.shape[0]
  x_MK = jnp.pad(x_MK, ((0, -M % LEAST_ROWS), (0, 0)))
  return _multiply(x_MK, w_EKN, group_sizes_E.astype(jnp.int32), zero_rest, interpret)[:M]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(x_MK, w_EKN, group_sizes_E, zero_rest, interpret):
  return _rows(x_MK, w_EKN, group_sizes_E, zero_rest, interpret)


def _multiply_forward(x_MK, w_EKN, group_sizes_E, zero_rest, interpret):
  return _multiply(x_MK, w_EKN, group_sizes_E, zero_rest, interpret), (x_MK, w_EKN, group_sizes_E)


def _multiply_backward(zero_rest, interpret, saved, grad_MN):
  x_MK, w_EKN, group_sizes_E = saved
  grad_x_MK = _rows(grad_MN, w_EKN, group_sizes_E, zero_rest, interpret, turned=True)
  return grad_x_MK, _matrices(x_MK, grad_MN, group_sizes_E, w_EKN.dtype, interpret), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def visits(group_sizes_E: jax.Array, rows: int, tile: int, empty: bool, rest: bool) -> Visits:
  """Of `rows` in tiles.

  By comparing all visits with all groups, for which the compiler needs a few loops.

  Args:
    empty: whether an empty group has a visit, of no rows.
    rest: whether tiles that no group has a part in have one.
  """
  E = group_sizes_E.shape[0]
  tiles = pl.cdiv(rows, tile)
  group_E = jnp.arange(E, dtype=jnp.int32)
  number_V = jnp.arange(tiles + E - 1, dtype=jnp.int32)
  earlier_EE = group_E[None] < group_E[:, None]

  def before(values_E: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(earlier_EE, values_E, 0), axis=1)

  start_E = before(group_sizes_E)
  end_E = start_E + group_sizes_E
  first_E = jnp.minimum(start_E // tile, tiles - 1)
  count_E = jnp.where(group_sizes_E > 0, (end_E - 1) // tile - first_E + 1, int(empty))
  earlier_visits_E = before(count_E)
  since_VE = number_V[:, None] - earlier_visits_E
  mine_VE = (since_VE >= 0) & (since_VE < count_E)

  def of_group(values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mine_VE, values, 0), axis=1)

  many = number_V - jnp.sum(count_E)  # of those too many, the how many-eth; negative for the others
  covered = pl.cdiv(jnp.sum(group_sizes_E), tile)
  fetch_V = jnp.where(many < 0, of_group(first_E + since_VE), jnp.maximum(covered - 1, 0))
  tile_V = jnp.where((many >= 0) & rest, jnp.minimum(covered + many, tiles - 1), fetch_V)
  # What is too many and has no tile of its own keeps all rows of the last.
  kept = jnp.where(rest & (covered + many < tiles), 0, tile)
  begin_V, end_V = (
    jnp.where(many < 0, jnp.clip(of_group(at_E) - tile_V * tile, 0, tile), kept) for at_E in (start_E, end_E)
  )
  return Visits(tile_V, fetch_V, jnp.where(many < 0, of_group(group_E), E - 1), begin_V, end_V)


def _rows(x_MK, w_EKN, group_sizes_E, zero_rest, interpret, turned: bool = False) -> jax.Array:
  """x[m] @ w[e], or its transpose where `turned`, of every row m of group e."""
  M, K = x_MK.shape
  N = w_EKN.shape[1 if turned else 2]
  item = x_MK.dtype.itemsize
  tile = _tile(M, K * item)
  width = _even_part(N, MATRIX_BYTES // (K * w_EKN.dtype.itemsize))
  plan = visits(group_sizes_E, M, tile, empty=False, rest=zero_rest)
  part = (None, width, K) if turned else (None, K, width)

  def matrix_at(n, v, tile_V, fetch_V, group_V, *_):
    return (group_V[v], n, 0) if turned else (group_V[v], 0, n)

  block_bytes = tile * K * item + K * width * w_EKN.dtype.itemsize + tile * width * item
  return pl.pallas_call(
    functools.partial(_rows_kernel, turned=turned),
    name="grouped_matmul_turned" if turned else "grouped_matmul",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(plan),
      grid=(pl.cdiv(N, width), plan.tile_V.size),
      in_specs=[
        pl.BlockSpec((tile, K), lambda n, v, tile_V, fetch_V, *_: (fetch_V[v], 0)),
        pl.BlockSpec(part, matrix_at),
      ],
      out_specs=pl.BlockSpec((tile, width), lambda n, v, tile_V, *_: (tile_V[v], n)),
    ),
    out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=2 * block_bytes + SPARE_BYTES
    ),
    interpret=interpret,
    cost_estimate=_cost(M, K, N, x_MK, w_EKN),
  )(*plan, x_MK, w_EKN)


def _rows_kernel(tile_V, fetch_V, group_V, begin_V, end_V, x_ref, w_ref, out_ref, *, turned: bool) -> None:
  tile, width = out_ref.shape
  block = _block(tile)
  begin, end = begin_V[pl.program_id(1)], end_V[pl.program_id(1)]
  contracted = (((1,), (1 if turned else 0,)), ((), ()))

  def multiply(i, carry):
    rows = _part(i, block, tile)
    product = jax.lax.dot_general(x_ref[rows, :], w_ref[...], contracted, preferred_element_type=jnp.float32)
    row = jax.lax.broadcasted_iota(jnp.int32, (block, width), 0) + i * block
    # Rows before are of earlier visits, rows behind of later ones or of none.
    mine = jnp.where(row < end, product, 0.0)
    out_ref[rows, :] = jnp.where(row < begin, out_ref[rows, :].astype(jnp.float32), mine).astype(
      out_ref.dtype
    )
    return carry

  def clear(i, carry):
    out_ref[_part(i, block, tile), :] = jnp.zeros((block, width), out_ref.dtype)
    return carry

  first, behind = _blocks(begin, end, block)
  jax.lax.fori_loop(first, behind, multiply, 0)
  jax.lax.fori_loop(behind, tile // block, clear, 0)


def _matrices(x_MK, grad_MN, group_sizes_E, dtype, interpret) -> jax.Array:
  """[E, K, N]: the sum over a group's rows of x[m] by grad[m]."""
  M, K = x_MK.shape
  N, E = grad_MN.shape[1], group_sizes_E.shape[0]
  item = x_MK.dtype.itemsize
  tile = _tile(M, (SUM_ROWS + SUM_COLUMNS) * item)
  width = _even_part(N, SUM_COLUMNS)
  height = _even_part(K, SUM_ROWS)
  plan = visits(group_sizes_E, M, tile, empty=True, rest=False)
  sum_bytes = height * width * 4
  block_bytes = tile * (height + width) * item + height * width * jnp.dtype(dtype).itemsize
  return pl.pallas_call(
    _matrices_kernel,
    name="grouped_matmul_matrices",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(plan),
      grid=(pl.cdiv(K, height), pl.cdiv(N, width), plan.tile_V.size),
      in_specs=[
        pl.BlockSpec((tile, height), lambda k, n, v, tile_V, *_: (tile_V[v], k)),
        pl.BlockSpec((tile, width), lambda k, n, v, tile_V, *_: (tile_V[v], n)),
      ],
      out_specs=pl.BlockSpec(
        (None, height, width), lambda k, n, v, tile_V, fetch_V, group_V, *_: (group_V[v], k, n)
      ),
      scratch_shapes=[pltpu.VMEM((height, width), jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct((E, K, N), dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=2 * block_bytes + 2 * sum_bytes + SPARE_BYTES,
    ),
    interpret=interpret,
    cost_estimate=_cost(M, K, N, x_MK, grad_MN),
  )(*plan, x_MK, grad_MN)


def _matrices_kernel(tile_V, fetch_V, group_V, begin_V, end_V, x_ref, grad_ref, out_ref, sum_ref) -> None:
  v, last = pl.program_id(2), pl.num_programs(2) - 1
  begin, end, group = begin_V[v], end_V[v], group_V[v]
  tile, height = x_ref.shape[0], sum_ref.shape[0]
  block = _block(tile)
  strip = height if height % SUM_STRIP else SUM_STRIP

  def masked(ref, i):
    row = jax.lax.broadcasted_iota(jnp.int32, (block, ref.shape[1]), 0) + i * block
    return jnp.where((row >= begin) & (row < end), ref[_part(i, block, tile), :], 0)

  def clear(i, carry):
    sum_ref[_part(i, strip, height), :] = jnp.zeros((strip, sum_ref.shape[1]), jnp.float32)
    return carry

  def add(i, carry):
    sum_ref[...] += jax.lax.dot_general(
      masked(x_ref, i), masked(grad_ref, i), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return carry

  def write(i, carry):
    out_ref[_part(i, strip, height), :] = sum_ref[_part(i, strip, height), :].astype(out_ref.dtype)
    return carry

  strips = height // strip
  starts = (v == 0) | (group_V[jnp.maximum(v - 1, 0)] != group)
  ends = (v == last) | (group_V[jnp.minimum(v + 1, last)] != group)
  jax.lax.fori_loop(0, jnp.where(starts, strips, 0), clear, 0)
  jax.lax.fori_loop(*_blocks(begin, end, block), add, 0)
  jax.lax.fori_loop(0, jnp.where(ends, strips, 0), write, 0)


def _part(i, size: int, whole: int) -> Any:
  """The i-th so many rows of a whole."""
  return slice(None) if size == whole else pl.ds(pl.multiple_of(i * size, size), size)


def _blocks(begin, end, block: int) -> tuple[jax.Array, jax.Array]:
  """The first that has one of the rows begin … end - 1, and the one behind the last."""
  return jax.lax.div(begin, jnp.int32(block)), jax.lax.div(end + (block - 1), jnp.int32(block))


def _tile(rows: int, row_bytes: int) -> int:
  """Rows fetched at a time; whole blocks of those that are multiplied at a time."""
  tile = TILE_ROWS
  while tile > LEAST_ROWS and (tile > rows or tile * row_bytes > TILE_BYTES):
    tile //= 2
  return min(tile, rows)


def _block(tile: int) -> int:
  """Rows of a tile that are multiplied at a time."""
  return min(BLOCK_ROWS, tile)


def _even_part(width: int, most: int) -> int:
  """Lanes of a part of `width`, at most `most`: all, or of an even number of parts for two cores."""
  if width <= max(most, LANES):
    return width
  parts = pl.cdiv(width, most // LANES * LANES or LANES)
  return pl.cdiv(width, (parts + parts % 2) * LANES) * LANES


def _cost(M: int, K: int, N: int, *operands: jax.Array) -> pl.CostEstimate:
  read = sum(x.size * x.dtype.itemsize for x in operands)
  return pl.CostEstimate(flops=2 * M * K * N, transcendentals=0, bytes_accessed=read)


class Interpreted:
  """The same on any back end, one instruction after another."""

  row_alignment = staticmethod(row_alignment)
  grouped_matmul = staticmethod(functools.partial(grouped_matmul, interpret=True))
