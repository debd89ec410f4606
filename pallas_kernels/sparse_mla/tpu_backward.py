"""The gradients: two kernels that compute the probabilities anew, as in FlashAttention-2.

One goes over the keys of a tile of queries. The other goes over the queries of a tile of keys and has keys
along sublanes and queries along lanes, so that no product needs its first operand transposed; a transposed
array of the words gives it its mask, again a bit a register.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.sparse_mla import tiles as tiling
from pallas_kernels.sparse_mla.tpu_common import NT, Shapes, call, dot, mask, padded, pieces, wide
from pallas_kernels.topk.bits import LANES


def backward(
  q_BNTK, k_BNSK, v_BNSH, bits_BTW, out_BNTH, lse_BNT, gradient_BNTH, scale: float, interpret: Any = False
):
  """As reference.backward."""
  delta_BNT = jnp.sum(gradient_BNTH.astype(jnp.float32) * out_BNTH.astype(jnp.float32), axis=-1)
  rows = lse_BNT[:, :, None] / math.log(2), delta_BNT[:, :, None]
  args = (q_BNTK, k_BNSK, v_BNSH, gradient_BNTH, *rows, bits_BTW, scale, interpret)
  return _query_gradient(*args), *_key_gradients(*args)


def _operands(tiles: tiling.Tiles, q_BNTK, k_BNSK, v_BNSH, gradient_BNTH, lse_BN1T, delta_BN1T):
  """By kind, as `call` takes them, padded to whole tiles; lse in base 2."""
  T, S = tiles.padded
  q, gradient = (("query", padded(x, 2, T)) for x in (q_BNTK, gradient_BNTH))
  k, v = (("key", padded(x, 2, S)) for x in (k_BNSK, v_BNSH))
  lse, delta = (("row", padded(x, 3, T)) for x in (lse_BN1T, delta_BN1T))
  return [q, k, v, gradient, lse, delta]


def _query_gradient(q_BNTK, k_BNSK, v_BNSH, gradient_BNTH, lse_BN1T, delta_BN1T, bits_BTW, scale, interpret):
  shapes = Shapes.of(q_BNTK, k_BNSK, v_BNSH)
  tiles = tiling.cut(shapes.T, shapes.S, longer="keys")
  words = padded(bits_BTW, 1, tiles.padded[0])
  operands = _operands(tiles, q_BNTK, k_BNSK, v_BNSH, gradient_BNTH, lse_BN1T, delta_BN1T)
  (dq,) = call(
    functools.partial(_query_kernel, scale=scale),
    "sparse_mla_dq",
    shapes,
    tiles,
    tiling.occupied(words, tiles),
    inputs=[*operands, ("words", words)],
    outputs=[("query", shapes.K, q_BNTK.dtype)],
    scratch=[(tiles.queries, LANES), (tiles.queries, LANES), (tiles.queries, shapes.K)],
    interpret=interpret,
  )
  return dq[:, :, : shapes.T]


def _key_gradients(q_BNTK, k_BNSK, v_BNSH, gradient_BNTH, lse_BN1T, delta_BN1T, bits_BTW, scale, interpret):
  shapes = Shapes.of(q_BNTK, k_BNSK, v_BNSH)
  tiles = tiling.cut(shapes.T, shapes.S, longer="queries")
  words = padded(bits_BTW, 1, tiles.padded[0])
  operands = _operands(tiles, q_BNTK, k_BNSK, v_BNSH, gradient_BNTH, lse_BN1T, delta_BN1T)
  dk, dv = call(
    functools.partial(_key_kernel, scale=scale),
    "sparse_mla_dkv",
    shapes,
    tiles,
    jnp.swapaxes(tiling.occupied(words, tiles), 1, 2),
    inputs=[*operands, ("words_across", jnp.swapaxes(words, 1, 2))],
    outputs=[("key", shapes.K, k_BNSK.dtype), ("key", shapes.H, v_BNSH.dtype)],
    scratch=[(tiles.keys, shapes.K), (tiles.keys, shapes.H)],
    interpret=interpret,
    by_query=False,
  )
  return dk[:, :, : shapes.S], dv[:, :, : shapes.S]


def _query_kernel(
  step, q_ref, k_ref, v_ref, gradient_ref, lse_ref, delta_ref, words_ref, dq_ref,
  lse_columns_ref, delta_columns_ref, acc_ref, *, scale,
):  # fmt: skip
  @pl.when(step.first)
  def _start():
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)
    for row_ref, columns_ref in ((lse_ref, lse_columns_ref), (delta_ref, delta_columns_ref)):
      columns_ref[...] = jnp.broadcast_to(row_ref[...], (LANES, row_ref.shape[1])).T

  words = words_ref[...] >> step.shift
  for piece in pieces(k_ref.shape[0]):
    logits = dot(q_ref[...], k_ref[piece], NT) * (scale / math.log(2))
    lanes = logits.shape[1]
    p = jnp.exp2(mask(logits, words, piece.start, axis=1) - wide(lse_columns_ref[...], lanes))
    ds = p * (dot(gradient_ref[...], v_ref[piece], NT) - wide(delta_columns_ref[...], lanes))
    acc_ref[...] += dot(ds.astype(k_ref.dtype), k_ref[piece])

  @pl.when(step.last)
  def _finish():
    dq_ref[...] = (acc_ref[...] * scale).astype(dq_ref.dtype)


def _key_kernel(
  step, q_ref, k_ref, v_ref, gradient_ref, lse_ref, delta_ref, words_ref, dk_ref, dv_ref,
  dk_acc_ref, dv_acc_ref, *, scale,
):  # fmt: skip
  @pl.when(step.first)
  def _start():
    dk_acc_ref[...] = jnp.zeros(dk_acc_ref.shape, jnp.float32)
    dv_acc_ref[...] = jnp.zeros(dv_acc_ref.shape, jnp.float32)

  for piece in pieces(q_ref.shape[0]):
    words = words_ref[:, piece] >> step.shift
    logits = mask(dot(k_ref[...], q_ref[piece], NT) * (scale / math.log(2)), words, 0, axis=0)
    p = jnp.exp2(logits - lse_ref[:, piece])
    dv_acc_ref[...] += dot(p.astype(gradient_ref.dtype), gradient_ref[piece])
    ds = p * (dot(v_ref[...], gradient_ref[piece], NT) - delta_ref[:, piece])
    dk_acc_ref[...] += dot(ds.astype(q_ref.dtype), q_ref[piece])

  @pl.when(step.last)
  def _finish():
    dk_ref[...] = (dk_acc_ref[...] * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_acc_ref[...].astype(dv_ref.dtype)
