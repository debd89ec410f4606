"""Exact top-k by Pallas for TPU: a threshold by counted bisection of rows in VMEM, no sort.

A program's rows are turned into int32 keys once; 32 passes over VMEM find the k-th largest of each row, one
more packs the set into bits. Indices and values are made from the bits by kernels of their own, so that a
caller who wants the mask pays for nothing else.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.topk import compact, vmem
from pallas_kernels.topk.bits import CHUNK, LANES, TILES

WIDEST = 2**18  # rows that fit VMEM on every generation
GROUPS = 8  # of 8 rows, in a program, where rows are short
GROUPED_POSITIONS = 2**15  # of a program's rows: beyond, the counting of one group is long enough
VMEM_SPARE = 2**22


def refusal(scores: jax.Array) -> str | None:
  """Why these scores cannot be selected from here; None where they can."""
  if not 0 < scores.shape[-1] <= WIDEST:
    return f"rows of 1 to {WIDEST} scores are possible, got {scores.shape[-1]}"
  return "at least one row is needed" if scores.size == 0 else None


def topk(scores: jax.Array, k: int, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
  """See api.topk."""
  *lead, S = scores.shape
  rows = scores.reshape(-1, S)
  chosen = compact.indices(topk_bits(rows, k, interpret), k, interpret)
  found = compact.values(rows, chosen, interpret)
  return found.reshape(*lead, k), chosen.reshape(*lead, k)


def topk_mask(scores: jax.Array, k: int, interpret: Any = False) -> jax.Array:
  """See api.topk_mask."""
  S = scores.shape[-1]
  packed = topk_bits(scores.reshape(-1, S), k, interpret)
  return _expand(packed, S, interpret).reshape(scores.shape)


def topk_bits(scores: jax.Array, k: int, interpret: Any = False) -> jax.Array:
  """See api.topk_bits."""
  *lead, S = scores.shape
  rows = scores.reshape(-1, S)
  R, chunks = rows.shape[0], pl.cdiv(S, CHUNK)
  groups = max(1, min(GROUPS, GROUPED_POSITIONS // (chunks * CHUNK), pl.cdiv(R, 2 * vmem.ROWS)))
  layout = vmem.Layout(groups, chunks)
  block = groups * vmem.ROWS
  packed = pl.pallas_call(
    functools.partial(_kernel, k=k, width=S, layout=layout),
    name="topk",
    grid=(pl.cdiv(R, block),),
    in_specs=[pl.BlockSpec((block, chunks * CHUNK), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((block, chunks * LANES), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((R, chunks * LANES), jnp.int32),
    scratch_shapes=[pltpu.VMEM(layout.keys, jnp.int32), pltpu.VMEM(layout.equal, jnp.int32)],
    compiler_params=pltpu.CompilerParams(
      # Two cores of a v5p share the rows; blocks are fetched and written while another is worked on.
      dimension_semantics=("parallel",),
      vmem_limit_bytes=3 * layout.scratch_bytes + VMEM_SPARE,
    ),
    interpret=interpret,
  )(rows)
  return packed.reshape(*lead, chunks * LANES)


def _kernel(scores_ref, out_ref, keys_ref, equal_ref, *, k, width, layout) -> None:
  for group in range(layout.groups):
    _fill(scores_ref, keys_ref, group, width, layout)
  vmem.select(keys_ref, out_ref, equal_ref, layout, (0, layout.chunks), k)


def _fill(scores_ref, keys_ref, group, width, layout) -> None:
  """Keys of a group of 8 rows; what the block holds beyond the row's width is no key."""
  lane = jax.lax.broadcasted_iota(jnp.int32, (vmem.ROWS, LANES), 1)
  rows = slice(group * vmem.ROWS, (group + 1) * vmem.ROWS)

  def fill(chunk, carry):
    for i in range(TILES):
      first = pl.multiple_of(chunk * CHUNK + i * LANES, LANES)
      keys = vmem.ordered_keys(scores_ref[rows, pl.ds(first, LANES)])
      if width % CHUNK:
        keys = jnp.where(lane + first < width, keys, vmem.EMPTY)
      at = layout.base(group) + chunk * vmem.CHUNK_LINES + i * vmem.ROWS
      keys_ref[vmem.lines(at), :] = keys
    return carry

  jax.lax.fori_loop(0, layout.chunks, fill, 0)


def _expand(packed: jax.Array, positions: int, interpret: Any) -> jax.Array:
  """bits.unpack of [R, words]. XLA would first write every word 32 times."""
  R, width = packed.shape
  tall = 32  # an int8 register has as many rows
  chunks = width // LANES
  at_once = next(n for n in (8, 4, 2, 1) if chunks % n == 0)
  mask = pl.pallas_call(
    functools.partial(_expand_kernel, chunks=at_once),
    name="topk_mask",
    grid=(pl.cdiv(R, tall), chunks // at_once),
    in_specs=[pl.BlockSpec((tall, at_once * LANES), lambda i, j: (i, j))],
    out_specs=pl.BlockSpec((tall, at_once * CHUNK), lambda i, j: (i, j)),
    out_shape=jax.ShapeDtypeStruct((R, positions), jnp.int8),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    interpret=interpret,
  )(packed)
  return mask != 0


def _expand_kernel(packed_ref, out_ref, *, chunks) -> None:
  for chunk in range(chunks):
    words = packed_ref[:, chunk * LANES : (chunk + 1) * LANES]
    for i in range(TILES):
      first = chunk * CHUNK + i * LANES
      out_ref[:, first : first + LANES] = ((words >> i) & 1).astype(jnp.int8)


class Interpreted:
  """The same on any back end, one instruction after another."""

  refusal = staticmethod(refusal)
  topk = staticmethod(functools.partial(topk, interpret=True))
  topk_mask = staticmethod(functools.partial(topk_mask, interpret=True))
  topk_bits = staticmethod(functools.partial(topk_bits, interpret=True))
