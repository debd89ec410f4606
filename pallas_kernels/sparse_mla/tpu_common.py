"""What the three kernels of sparse attention share: the call with its steps, the mask, products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla import tiles as tiling
from pallas_kernels.topk.bits import LANES, log2

MASKED = -2e30  # in place of the logit of what is not selected
PIECE = 512  # queries or keys of a tile whose logits are computed at a time
VMEM_BYTES = 60 * 2**20
NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))  # dimensions of products; NT: second transposed


class Shapes(NamedTuple):
  """Of the operands, unpadded; see the dimension key of the suffixes."""

  B: int
  N: int
  T: int
  S: int
  K: int
  H: int

  @classmethod
  def of(cls, q_BNTK, k_BNSK, v_BNSH) -> "Shapes":
    B, N, T, K = q_BNTK.shape
    return cls(B, N, T, k_BNSK.shape[2], K, v_BNSH.shape[3])


class Step(NamedTuple):
  """As a kernel sees it: whether it is the first, the last of its output tile; the lowest bit of its mask."""

  first: Any
  last: Any
  shift: Any


def padded(x: jax.Array, axis: int, size: int) -> jax.Array:
  """With zeros behind the end."""
  if x.shape[axis] == size:
    return x
  return jnp.pad(x, [(0, size - n if a == axis else 0) for a, n in enumerate(x.shape)])


def dot(x: jax.Array, y: jax.Array, dimensions=NN) -> jax.Array:
  """Sums in float32; of float32 operands all bits count."""
  exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jax.lax.dot_general(x, y, dimensions, precision=exact, preferred_element_type=jnp.float32)


def wide(x: jax.Array, lanes: int) -> jax.Array:
  """[rows, 128], equal in all lanes → [rows, lanes]."""
  return jnp.concatenate([x] * (lanes // LANES), axis=1)


def pieces(length: int) -> list[slice]:
  """Of a tile, for which a kernel goes through its steps one after another.

  So the matrix units have the products of one to do while the vector units have the softmax of another.
  """
  piece = min(PIECE, length)
  return [slice(start, start + piece) for start in range(0, length, piece)]


def mask(logits: jax.Array, words: jax.Array, start: int, axis: int) -> jax.Array:
  """MASKED where the bit of a key is 0. Keys from `start` are along the axis, 128 a bit of as many words."""
  blocks = []
  for i, block in enumerate(jnp.split(logits, logits.shape[axis] // LANES, axis), start // LANES):
    bit = 1 << i if i < 31 else -(2**31)
    blocks.append(jnp.where((words & bit) != 0, block, MASKED))
  return jnp.concatenate(blocks, axis)


def call(
  kernel: Callable,
  name: str,
  shapes: Shapes,
  tiles: tiling.Tiles,
  occupied_BXY: jax.Array,
  inputs: list[tuple[str, jax.Array]],
  outputs: list[tuple[str, int, Any]],
  scratch: list[tuple[int, int]],
  interpret: Any,
  by_query: bool = True,
):
  """Runs kernel(step, *refs) for every head and every step.

  Args:
    occupied_BXY: of tiles.occupied, the tiles that are written first.
    inputs: arrays by kind: "query" [B, N, T, ·] and "key" [B, N, S, ·], "row" [B, N, 1, T] with queries along
      lanes, "words" [B, T, W] and "words_across" [B, W, T].
    outputs: kind, last dimension, dtype.
    scratch: shapes of float32.
    by_query: tiles of queries are written and tiles of keys summed over; or the other way round.
  """
  T, S = tiles.padded
  X, Y = occupied_BXY.shape[1:]

  def place(codes_ref, p):
    row, x, y = tiling.decode(codes_ref[p], X, Y)
    return (row, x, y) if by_query else (row, y, x)

  def spec(kind: str, width: int) -> pl.BlockSpec:
    sizes, index = {
      "query": ((None, None, tiles.queries, width), lambda n, b, i, j: (b, n, i, 0)),
      "key": ((None, None, tiles.keys, width), lambda n, b, i, j: (b, n, j, 0)),
      "row": ((None, None, 1, tiles.queries), lambda n, b, i, j: (b, n, 0, i)),
      "words": ((None, tiles.queries, LANES), lambda n, b, i, j: (b, i, j >> log2(tiles.in_chunk))),
      "words_across": ((None, LANES, tiles.queries), lambda n, b, i, j: (b, j >> log2(tiles.in_chunk), i)),
    }[kind]
    return pl.BlockSpec(sizes, lambda n, p, codes_ref: index(n, *place(codes_ref, p)))

  def full(kind: str, width: int) -> tuple[int, ...]:
    length = {"query": T, "key": S, "row": 1}[kind]
    return (shapes.B, shapes.N, length, width)

  def body(codes_ref, *refs):
    p = pl.program_id(1)
    code = codes_ref[p]
    _, _, j = place(codes_ref, p)
    shift = (j & (tiles.in_chunk - 1)) * (tiles.keys // LANES)
    kernel(Step((code & tiling.FIRST) != 0, (code & tiling.LAST) != 0, shift), *refs)

  codes, count = tiling.steps(occupied_BXY)
  return pl.pallas_call(
    body,
    name=name,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(shapes.N, count),
      in_specs=[spec(kind, x.shape[-1]) for kind, x in inputs],
      out_specs=[spec(kind, width) for kind, width, _ in outputs],
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    out_shape=[jax.ShapeDtypeStruct(full(kind, width), dtype) for kind, width, dtype in outputs],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
    ),
    interpret=interpret,
  )(codes, *(x for _, x in inputs))
