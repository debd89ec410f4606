"""The indexer's loss by Pallas for TPU: no distribution of a whole row, and no head's attention, leaves VMEM.

A program takes a tile of queries and walks along the tiles of keys that any of them marks. Logits lie with
keys in rows, so that what is summed over keys is summed down columns. The first kernel finds the
log-sum-exps, of every main head and of the scores. The second forms both distributions of a tile, a head at
a time, their divergence, and from softmax − attention at once the gradients of the scores' queries, gates and
keys, since the loss is a sum whose cotangent is one number. Gradients of keys are sums over programs: each of
two cores adds its own up in memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_loss.plan import Walk, walk
from pallas_kernels.sparse_mla.tiles import Tiles, occupied
from pallas_kernels.topk.bits import CHUNK, LANES, TILES

QUERIES, KEYS = 128, 1024  # of a tile, at most
CORES = 2
MASKED = -1e30  # finite, and far below FLOOR: exp(MASKED − FLOOR) is 0
FLOOR = -1e20  # least column maximum
NOTHING = 1e30  # log-sum-exp of a query that marks nothing: exp(x − NOTHING) is 0
NEAR = 0.25  # below it d + e^−d − 1 is summed as a series: its terms would cancel
VMEM_BYTES = 56 * 2**20


class Sizes(NamedTuple):
  """Tiles of one call."""

  heads: int
  index_heads: int
  keys: int
  query_tiles: int  # of a row, a multiple of CORES
  key_tiles: int
  scale: float


def refusal(query_BTIJ: jax.Array, q_BNTL: jax.Array) -> str | None:
  """Why these cannot be computed here; None where they can."""
  if query_BTIJ.shape[-1] % LANES:
    return f"index_head_dim by {LANES} is possible, got {query_BTIJ.shape[-1]}"
  return "at least one query is needed" if 0 in (*query_BTIJ.shape, *q_BNTL.shape) else None


def indexer_loss(
  query_BTIJ, gate_BTI, key_BSJ, q_BNTL, k_BSL, bits_BTW, scale, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
  """See api.indexer_loss."""
  T, I = query_BTIJ.shape[1:3]
  S = key_BSJ.shape[1]
  keys = min(KEYS, LANES * (1 << (-(-S // LANES) - 1).bit_length()))  # divides a chunk
  more_T, more_S = -T % (CORES * QUERIES), -S % keys
  sizes = Sizes(q_BNTL.shape[1], I, keys, (T + more_T) // QUERIES, (S + more_S) // keys, scale)

  def pad(x, axis: int, more: int):
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])

  total, kl_BT = _loss(
    pad(jnp.moveaxis(query_BTIJ, 2, 1), 2, more_T),
    pad(jnp.moveaxis(gate_BTI, 2, 1), 2, more_T),
    pad(key_BSJ, 1, more_S),
    pad(q_BNTL, 2, more_T),
    pad(k_BSL, 1, more_S),
    pad(bits_BTW, 1, more_T),
    sizes,
    interpret,
  )
  return total, kl_BT[:, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _loss(query_BITJ, gate_BIT, key_BSJ, q_BNTL, k_BSL, words, sizes: Sizes, interpret):
  return _forward(query_BITJ, gate_BIT, key_BSJ, q_BNTL, k_BSL, words, sizes, interpret)[0]


def _forward(query_BITJ, gate_BIT, key_BSJ, q_BNTL, k_BSL, words, sizes: Sizes, interpret):
  meet = occupied(words, Tiles(QUERIES, sizes.keys, sizes.query_tiles, sizes.key_tiles))
  arrays = query_BITJ, gate_BIT, key_BSJ, q_BNTL, k_BSL, words
  sums = _call(_sums_kernel, "indexer_loss_sums", walk(meet), arrays, (), sizes, interpret)
  second = _call(_loss_kernel, "indexer_loss", walk(meet), arrays, tuple(sums), sizes, interpret)
  kl_B1T, grad_query, grad_gate, grad_key_parts = second
  grads = (
    grad_query.astype(query_BITJ.dtype),
    grad_gate.astype(gate_BIT.dtype),
    jnp.sum(grad_key_parts, axis=0).astype(key_BSJ.dtype),
  )
  kl_BT = kl_B1T[:, 0]
  return (jnp.sum(kl_BT), kl_BT), grads


def _backward(sizes: Sizes, interpret, grads, cotangents):
  del sizes, interpret
  by = cotangents[0]  # that of the single rows is not asked for: api
  return *((g.astype(jnp.float32) * by).astype(g.dtype) for g in grads), None, None, None


_loss.defvjp(_forward, _backward)


def _call(kernel, name: str, plan: Walk, arrays, sums, sizes: Sizes, interpret) -> list[jax.Array]:
  """One of the two kernels; `sums` are the first one's results, for the second."""
  query_BITJ, _, key_BSJ, q_BNTL, *_ = arrays
  B, I, T, J = query_BITJ.shape
  N, L = sizes.heads, q_BNTL.shape[-1]
  a_core = B * sizes.query_tiles // CORES

  def place(core, i):
    """(row, tile of queries): causal rows grow, so that the cores take tiles in turn."""
    program = i * CORES + core
    tiles = jnp.int32(sizes.query_tiles)
    return jax.lax.div(program, tiles), jax.lax.rem(program, tiles)

  def met(core, i, j, counts, others):
    program = i * CORES + core
    return others[program * sizes.key_tiles + jnp.maximum(jnp.minimum(j, counts[program] - 1), 0)]

  def of_queries(*middle: int, width: int | None = None):
    if width is None:  # [B, middle, T]
      return pl.BlockSpec((None, *middle, QUERIES), lambda c, i, j, *_: (place(c, i)[0], 0, place(c, i)[1]))
    index = lambda c, i, j, *_: (place(c, i)[0], 0, place(c, i)[1], 0)  # noqa: E731
    return pl.BlockSpec((None, *middle, QUERIES, width), index)

  def of_keys(width: int):
    return pl.BlockSpec((None, sizes.keys, width), lambda c, i, j, *p: (place(c, i)[0], met(c, i, j, *p), 0))

  words = pl.BlockSpec(
    (None, QUERIES, LANES),
    lambda c, i, j, *p: (*place(c, i), jax.lax.div(met(c, i, j, *p), jnp.int32(CHUNK // sizes.keys))),
  )
  in_specs = [of_queries(I, width=J), of_queries(I), of_keys(J), of_queries(N, width=L), of_keys(L), words]
  tile = pltpu.VMEM((sizes.keys, QUERIES), jnp.float32)
  f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  if not sums:
    out_specs, out_shapes = [of_queries(N), of_queries(1)], [f32((B, N, T)), f32((B, 1, T))]
    more, aliases = (), {}
    stats = [pltpu.VMEM((rows, QUERIES), jnp.float32) for rows in (N, N, 1, 1)]
    scratch = [tile, tile, *stats]
  else:
    in_specs += [of_queries(N), of_queries(1), pl.BlockSpec(memory_space=pl.ANY)]
    out_specs = [of_queries(1), of_queries(I, width=J), of_queries(I), pl.BlockSpec(memory_space=pl.ANY)]
    parts = f32((CORES, *key_BSJ.shape))
    out_shapes = [f32((B, 1, T)), f32((B, I, T, J)), f32((B, I, T)), parts]
    more = (*sums, jnp.zeros(parts.shape, jnp.float32))
    aliases = {2 + len(arrays) + len(more) - 1: 3}
    keys = pltpu.VMEM((sizes.keys, J), jnp.float32)
    scratch = [tile, tile, tile, keys, keys, pltpu.SemaphoreType.DMA]
  return pl.pallas_call(
    functools.partial(kernel, sizes=sizes),
    name=name,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(CORES, a_core, sizes.key_tiles),
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
    ),
    out_shape=out_shapes,
    input_output_aliases=aliases,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
    ),
    interpret=interpret,
  )(*plan, *arrays, *more)


def _sums_kernel(
  counts, others, query_ref, gate_ref, key_ref, q_ref, k_ref, words_ref, lse_ref, index_lse_ref,
  bias_ref, score_ref, top_ref, sum_ref, index_top_ref, index_sum_ref, *, sizes,
):  # fmt: skip
  count, key_tile = _step(counts, others, sizes)[:2]
  j = pl.program_id(2)

  @pl.when(j == 0)
  def _():
    for ref in (top_ref, index_top_ref):
      ref[...] = jnp.full(ref.shape, FLOOR, jnp.float32)
    for ref in (sum_ref, index_sum_ref):
      ref[...] = jnp.zeros(ref.shape, jnp.float32)

  def add(row, logits, top_ref, sum_ref):
    before = top_ref[row]
    top = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
    here = jnp.sum(jnp.exp(logits - top), axis=0, keepdims=True)
    sum_ref[row] = sum_ref[row] * jnp.exp(before - top) + here
    top_ref[row] = top

  @pl.when(j < count)
  def _():
    bias_ref[...] = _bias(words_ref, key_tile, sizes)
    _scores(query_ref, gate_ref, key_ref, score_ref, sizes)
    add(pl.ds(0, 1), score_ref[...] + bias_ref[...], index_top_ref, index_sum_ref)

    def head(h, _):
      logits = _dot(k_ref[...], q_ref[h], 1, 1) * sizes.scale + bias_ref[...]
      add(pl.ds(h, 1), logits, top_ref, sum_ref)
      return 0

    jax.lax.fori_loop(0, sizes.heads, head, 0)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    for top, total, out_ref in ((top_ref, sum_ref, lse_ref), (index_top_ref, index_sum_ref, index_lse_ref)):
      found = total[...] > 0
      lse = top[...] + jnp.log(jnp.where(found, total[...], 1.0))
      out_ref[...] = jnp.where(found, lse, NOTHING)


def _loss_kernel(
  counts, others, query_ref, gate_ref, key_ref, q_ref, k_ref, words_ref, lse_ref, index_lse_ref, _zeros,
  kl_ref, grad_query_ref, grad_gate_ref, grad_key_ref, bias_ref, score_ref, target_ref, keys_ref, old_ref,
  semaphore, *, sizes,
):  # fmt: skip
  count, key_tile, row = _step(counts, others, sizes)
  core, j = pl.program_id(0), pl.program_id(2)

  @pl.when(j == 0)
  def _():
    for ref in (kl_ref, grad_query_ref, grad_gate_ref):
      ref[...] = jnp.zeros(ref.shape, jnp.float32)

  @pl.when(j < count)
  def _():
    begin = pl.multiple_of(key_tile * sizes.keys, sizes.keys)
    there = grad_key_ref.at[core, row, pl.ds(begin, sizes.keys)]
    read = pltpu.make_async_copy(there, old_ref, semaphore)
    read.start()
    bias_ref[...] = _bias(words_ref, key_tile, sizes)
    _scores(query_ref, gate_ref, key_ref, score_ref, sizes)
    target_ref[...] = jnp.zeros(target_ref.shape, jnp.float32)

    def head(h, _):
      logits = _dot(k_ref[...], q_ref[h], 1, 1) * sizes.scale + bias_ref[...]
      target_ref[...] += jnp.exp(logits - lse_ref[pl.ds(h, 1)])
      return 0

    jax.lax.fori_loop(0, sizes.heads, head, 0)
    target = target_ref[...] * (1.0 / sizes.heads)
    log_guess = score_ref[...] + bias_ref[...] - index_lse_ref[...]
    guess = jnp.exp(log_guess)
    kl_ref[...] += jnp.sum(_divergence(target, guess, log_guess), axis=0, keepdims=True)
    score_ref[...] = guess - target
    keys_ref[...] = jnp.zeros(keys_ref.shape, jnp.float32)

    def index_head(i, _):
      grad_score, key, query = score_ref[...], key_ref[...], query_ref[i]
      dots = _dot(key, query, 1, 1)
      gate = gate_ref[pl.ds(i, 1)]
      grad_gate_ref[pl.ds(i, 1)] += jnp.sum(grad_score * jnp.maximum(dots, 0.0), axis=0, keepdims=True)
      grad_dots = jnp.where(dots > 0, grad_score * gate, 0.0).astype(key.dtype)
      grad_query_ref[i] += _dot(grad_dots, key, 0, 0)
      keys_ref[...] += _dot(grad_dots, query, 1, 0)
      return 0

    jax.lax.fori_loop(0, sizes.index_heads, index_head, 0)
    read.wait()
    old_ref[...] += keys_ref[...]
    write = pltpu.make_async_copy(old_ref, there, semaphore)
    write.start()
    write.wait()


def _divergence(target, guess, log_guess):
  """p log(p / q) − p + q of each entry, which is not negative; see the reference."""
  some = target > 0
  ratio = jnp.log(jnp.where(some, target, 1.0)) - jnp.where(some, log_guess, 0.0)
  series = ratio * ratio * (0.5 - ratio * (1 / 6 - ratio * (1 / 24 - ratio * (1 / 120 - ratio / 720))))
  exact = target * (ratio - 1.0) + guess
  terms = jnp.where(jnp.abs(ratio) < NEAR, target * series, exact)
  return jnp.where(some, terms, guess)


def _scores(query_ref, gate_ref, key_ref, score_ref, sizes: Sizes) -> None:
  """Σ_i gate_i · ReLU(key · query_i) into score_ref [keys, queries]."""
  score_ref[...] = jnp.zeros(score_ref.shape, jnp.float32)

  def add(i, _):
    dots = _dot(key_ref[...], query_ref[i], 1, 1)
    score_ref[...] += jnp.maximum(dots, 0.0) * gate_ref[pl.ds(i, 1)]
    return 0

  jax.lax.fori_loop(0, sizes.index_heads, add, 0)


def _bias(words_ref, key_tile, sizes: Sizes):
  """[keys, queries]: 0 where the query marks the key, else MASKED."""
  first = jax.lax.rem(key_tile * (sizes.keys // LANES), jnp.int32(TILES))
  words = words_ref[...].T
  tiles = [(words >> (first + t)) & 1 for t in range(sizes.keys // LANES)]
  return jnp.where(jnp.concatenate(tiles, axis=0) != 0, 0.0, MASKED)


def _step(counts, others, sizes: Sizes):
  """(how many tiles of keys this program's queries meet, the one of this step, row of the batch)."""
  program = pl.program_id(1) * CORES + pl.program_id(0)
  count = counts[program]
  step = jnp.maximum(jnp.minimum(pl.program_id(2), count - 1), 0)
  row = jax.lax.div(program, jnp.int32(sizes.query_tiles))
  return count, others[program * sizes.key_tiles + step], row


def _dot(a, b, contract_a: int, contract_b: int):
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  dims = (((contract_a,), (contract_b,)), ((), ()))
  return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


class Interpreted:
  """The same on any back end, one instruction after another."""

  indexer_loss = staticmethod(functools.partial(indexer_loss, interpret=True))
