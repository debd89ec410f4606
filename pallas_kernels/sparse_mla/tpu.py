"""Attention over selected keys by Pallas for TPU: flash attention that walks along occupied tiles.

A tile of keys is a few bits of every word of its chunk, so that its mask is some shifts of its queries' words
and moves nothing across lanes. Three kernels, as in FlashAttention-2: the output with each row's log-sum-exp,
the gradient of queries, and that of keys and values, whose tiles of logits lie with the keys in rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla.plan import Walk, occupied, walk
from pallas_kernels.topk.bits import CHUNK, LANES, TILES

RESULT = "sparse_mla_result"  # name of the output and its log-sum-exp
QUERIES, KEYS = 512, 1024  # of a tile, at most
MASKED = -1e30  # finite, and far below FLOOR: exp(MASKED − FLOOR) is 0 also in a row that selects nothing
FLOOR = -1e20  # least row maximum
NOTHING = 1e30  # log-sum-exp of a row that selects nothing: exp(x − NOTHING) is 0
VMEM_BYTES = 48 * 2**20


class Sizes(NamedTuple):
  """Tiles of one call."""

  heads: int
  queries: int  # of a tile
  keys: int
  query_tiles: int
  key_tiles: int

  def chunk(self, key_tile):
    """Which chunk of the words holds a tile's bits."""
    return jax.lax.div(key_tile, jnp.int32(CHUNK // self.keys))

  def first_bit(self, key_tile):
    return jax.lax.rem(key_tile * (self.keys // LANES), jnp.int32(TILES))

  def row(self, program):
    """Which row of the batch a program's head belongs to. (`//` would ask for a sign.)"""
    return jax.lax.div(program, jnp.int32(self.heads))


def refusal(q_BNTK: jax.Array, k_BNSK: jax.Array, v_BNSH: jax.Array) -> str | None:
  """Why these cannot be attended here; None where they can."""
  widths = q_BNTK.shape[-1], v_BNSH.shape[-1]
  if any(width % LANES for width in widths):
    return f"head widths by {LANES} are possible, got {widths[0]} and {widths[1]}"
  return "at least one query and one key are needed" if 0 in (*q_BNTK.shape, *k_BNSK.shape) else None


def attend_bits(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale, interpret: Any = False) -> jax.Array:
  """See api.attend_bits."""
  B, N, T, _ = q_BNTK.shape
  S = k_BNSK.shape[2]
  queries = min(QUERIES, -(-T // LANES) * LANES)
  keys = min(
    KEYS, LANES * (1 << (-(-S // LANES) - 1).bit_length())
  )  # a power of two of lanes: divides a chunk
  sizes = Sizes(N, queries, keys, -(-T // queries), -(-S // keys))

  def rows(x, size: int):
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % size), (0, 0)))
    return x.reshape(B * N, *x.shape[2:])

  words = jnp.pad(bits_BTW, ((0, 0), (0, -T % queries), (0, 0)))
  q = rows((q_BNTK * scale).astype(q_BNTK.dtype), queries)
  out = _attend(q, rows(k_BNSK, keys), rows(v_BNSH, keys), words, sizes, interpret)
  return out.reshape(B, N, *out.shape[1:])[:, :, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, words, sizes: Sizes, interpret):
  return _forward(q, k, v, words, sizes, interpret)[0]


def _forward(q, k, v, words, sizes: Sizes, interpret):
  meet = occupied(words, sizes.queries, sizes.keys)[..., : sizes.key_tiles]
  out, lse = _along_keys(
    _forward_kernel, "sparse_mla_fwd", sizes, walk(meet), (q,), (), (k, v), words, interpret,
    out=((v.shape[-1], v.dtype),), row_out=True,
    scratch=[(sizes.queries, LANES), (sizes.queries, LANES), (sizes.queries, v.shape[-1])],
  )  # fmt: skip
  out, lse = checkpoint_name(out, RESULT), checkpoint_name(lse, RESULT)
  return out, (q, k, v, words, meet, out, lse)


def _backward(sizes: Sizes, interpret, saved, grad):
  q, k, v, words, meet, out, lse = saved
  inner_G1T = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[:, None]
  stats = lse, inner_G1T
  (grad_q,) = _along_keys(
    _query_kernel, "sparse_mla_dq", sizes, walk(meet), (q, grad), stats, (k, v), words, interpret,
    out=((q.shape[-1], q.dtype),), row_out=False,
    scratch=[(sizes.queries, q.shape[-1]), (sizes.queries, LANES), (sizes.queries, LANES)],
  )  # fmt: skip
  grad_k, grad_v = _along_queries(
    sizes, walk(jnp.swapaxes(meet, 1, 2)), q, grad, stats, k, v, words, interpret
  )
  return grad_q, grad_k, grad_v, None


_attend.defvjp(_forward, _backward)


def _along_keys(
  kernel: Callable, name: str, sizes: Sizes, plan: Walk, by_query, stats, by_key, words, interpret,
  *, out, row_out: bool, scratch,
):  # fmt: skip
  """Calls a kernel whose programs hold a tile of queries and walk along tiles of keys."""
  G, T, _ = by_query[0].shape

  def met(g, i, j, counts, others):
    tile = sizes.row(g) * sizes.query_tiles + i
    return others[tile * sizes.key_tiles + jnp.maximum(jnp.minimum(j, counts[tile] - 1), 0)]

  def queries(width: int):
    return pl.BlockSpec((None, sizes.queries, width), lambda g, i, j, *_: (g, i, 0))

  def keys(width: int):
    return pl.BlockSpec((None, sizes.keys, width), lambda g, i, j, *plan: (g, met(g, i, j, *plan), 0))

  row = pl.BlockSpec((None, 1, sizes.queries), lambda g, i, j, *_: (g, 0, i))
  word = pl.BlockSpec(
    (None, sizes.queries, LANES),
    lambda g, i, j, *plan: (sizes.row(g), i, sizes.chunk(met(g, i, j, *plan))),
  )
  shapes = [jax.ShapeDtypeStruct((G, T, width), dtype) for width, dtype in out]
  specs = [queries(width) for width, _ in out]
  if row_out:
    shapes.append(jax.ShapeDtypeStruct((G, 1, T), jnp.float32))
    specs.append(row)
  return pl.pallas_call(
    functools.partial(kernel, sizes=sizes),
    name=name,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(G, sizes.query_tiles, sizes.key_tiles),
      in_specs=[
        *(queries(x.shape[-1]) for x in by_query),
        *(row for _ in stats),
        *(keys(x.shape[-1]) for x in by_key),
        word,
      ],
      out_specs=specs,
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    out_shape=shapes,
    compiler_params=_params(),
    interpret=interpret,
  )(*plan, *by_query, *stats, *by_key, words)


def _along_queries(sizes: Sizes, plan: Walk, q, grad, stats, k, v, words, interpret):
  """(gradient of k, of v): programs hold a tile of keys and walk along tiles of queries."""
  G = k.shape[0]

  def met(g, i, j, counts, others):
    tile = sizes.row(g) * sizes.key_tiles + i
    return others[tile * sizes.query_tiles + jnp.maximum(jnp.minimum(j, counts[tile] - 1), 0)]

  def queries(width: int):
    return pl.BlockSpec((None, sizes.queries, width), lambda g, i, j, *plan: (g, met(g, i, j, *plan), 0))

  def keys(width: int):
    return pl.BlockSpec((None, sizes.keys, width), lambda g, i, j, *_: (g, i, 0))

  row = pl.BlockSpec((None, 1, sizes.queries), lambda g, i, j, *plan: (g, 0, met(g, i, j, *plan)))
  word = pl.BlockSpec(
    (None, sizes.queries, LANES),
    lambda g, i, j, *plan: (sizes.row(g), met(g, i, j, *plan), sizes.chunk(i)),
  )
  widths = k.shape[-1], v.shape[-1]
  return pl.pallas_call(
    functools.partial(_key_kernel, sizes=sizes),
    name="sparse_mla_dkv",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(G, sizes.key_tiles, sizes.query_tiles),
      in_specs=[*map(queries, widths), row, row, *map(keys, widths), word],
      out_specs=[*map(keys, widths)],
      scratch_shapes=[pltpu.VMEM((sizes.keys, width), jnp.float32) for width in widths],
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
    compiler_params=_params(),
    interpret=interpret,
  )(*plan, q, grad, *stats, k, v, words)


def _params():
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
  )


def _forward_kernel(
  counts, others, q_ref, k_ref, v_ref, words_ref, out_ref, lse_ref, top_ref, sum_ref, mixed_ref, *, sizes
):
  count, key_tile = _met_keys(counts, others, sizes)
  j = pl.program_id(2)

  @pl.when(j == 0)
  def _():
    top_ref[...] = jnp.full(top_ref.shape, FLOOR, jnp.float32)
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
    mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)

  @pl.when(j < count)
  def _():
    logits = jnp.where(_mask(words_ref[...], key_tile, sizes, 1), _dot(q_ref[...], k_ref[...], 1, 1), MASKED)
    before = top_ref[:, :1]
    top = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    weights, shrink = jnp.exp(logits - top), jnp.exp(before - top)
    total = sum_ref[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    mixed_ref[...] = mixed_ref[...] * shrink + _dot(weights.astype(v_ref.dtype), v_ref[...], 1, 0)
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    sum_ref[...] = jnp.broadcast_to(total, sum_ref.shape)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    total = sum_ref[...]
    found = total > 0
    total = jnp.where(found, total, 1.0)
    out_ref[...] = (mixed_ref[...] / total[:, :1]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(found, top_ref[...] + jnp.log(total), NOTHING).T[:1]


def _query_kernel(
  counts, others, q_ref, grad_ref, lse_ref, inner_ref, k_ref, v_ref, words_ref, out_ref,
  sum_ref, lse_column_ref, inner_column_ref, *, sizes,
):  # fmt: skip
  count, key_tile = _met_keys(counts, others, sizes)
  j = pl.program_id(2)

  @pl.when(j == 0)
  def _():
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
    for row_ref, column_ref in ((lse_ref, lse_column_ref), (inner_ref, inner_column_ref)):
      column_ref[...] = jnp.broadcast_to(row_ref[...], (LANES, sizes.queries)).T

  @pl.when(j < count)
  def _():
    logits = jnp.where(_mask(words_ref[...], key_tile, sizes, 1), _dot(q_ref[...], k_ref[...], 1, 1), MASKED)
    weights = jnp.exp(logits - lse_column_ref[:, :1])
    grad_logits = weights * (_dot(grad_ref[...], v_ref[...], 1, 1) - inner_column_ref[:, :1])
    sum_ref[...] += _dot(grad_logits.astype(k_ref.dtype), k_ref[...], 1, 0)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _key_kernel(
  counts, others, q_ref, grad_ref, lse_ref, inner_ref, k_ref, v_ref, words_ref, grad_k_ref, grad_v_ref,
  sum_k_ref, sum_v_ref, *, sizes,
):  # fmt: skip
  key_tile, j = pl.program_id(1), pl.program_id(2)
  count = counts[sizes.row(pl.program_id(0)) * sizes.key_tiles + key_tile]

  @pl.when(j == 0)
  def _():
    sum_k_ref[...] = jnp.zeros(sum_k_ref.shape, jnp.float32)
    sum_v_ref[...] = jnp.zeros(sum_v_ref.shape, jnp.float32)

  @pl.when(j < count)
  def _():
    mask = _mask(words_ref[...].T, key_tile, sizes, 0)
    logits = jnp.where(mask, _dot(k_ref[...], q_ref[...], 1, 1), MASKED)
    weights = jnp.exp(logits - lse_ref[...])  # [keys, queries]
    grad_logits = weights * (_dot(v_ref[...], grad_ref[...], 1, 1) - inner_ref[...])
    sum_v_ref[...] += _dot(weights.astype(grad_ref.dtype), grad_ref[...], 1, 0)
    sum_k_ref[...] += _dot(grad_logits.astype(q_ref.dtype), q_ref[...], 1, 0)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    grad_k_ref[...] = sum_k_ref[...].astype(grad_k_ref.dtype)
    grad_v_ref[...] = sum_v_ref[...].astype(grad_v_ref.dtype)


def _met_keys(counts, others, sizes: Sizes):
  """(how many tiles of keys this program's queries meet, the one of this step)."""
  tile = sizes.row(pl.program_id(0)) * sizes.query_tiles + pl.program_id(1)
  count = counts[tile]
  step = jnp.maximum(jnp.minimum(pl.program_id(2), count - 1), 0)
  return count, others[tile * sizes.key_tiles + step]


def _mask(words, key_tile, sizes: Sizes, axis: int):
  """bool, keys along `axis`: tile t of 128 keys is bit t of the words."""
  first = sizes.first_bit(key_tile)
  tiles = [(words >> (first + t)) & 1 for t in range(sizes.keys // LANES)]
  return jnp.concatenate(tiles, axis=axis) != 0


def _dot(a, b, contract_a: int, contract_b: int):
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  dims = (((contract_a,), (contract_b,)), ((), ()))
  return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


class Interpreted:
  """The same on any back end, one instruction after another."""

  attend_bits = staticmethod(functools.partial(attend_bits, interpret=True))
