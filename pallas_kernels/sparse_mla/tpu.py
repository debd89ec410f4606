"""Attention over selected keys by Pallas for TPU: flash attention on the tiles in which any is selected.

A step of the grid takes a tile of queries and one of keys of a head (see `tiles`). The mask of 128 keys is
one bit of 128 words, so that nothing moves between lanes. Maxima and sums of the softmax go from step to step
in base 2: its powers are what the hardware has.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.sparse_mla import tiles as tiling
from pallas_kernels.sparse_mla.tpu_backward import backward as backward
from pallas_kernels.sparse_mla.tpu_common import NT, Shapes, call, dot, mask, padded, pieces, wide
from pallas_kernels.topk.bits import LANES

LEAST_MOST = -1e30  # a maximum before any key: above MASKED, so that masked powers are 0 and not 1


def refusal(q_BNTK: jax.Array, k_BNSK: jax.Array, v_BNSH: jax.Array) -> str | None:
  """Why the kernels do not take these; None where they do."""
  K, H = q_BNTK.shape[3], v_BNSH.shape[3]
  if K % LANES or H % LANES:
    return f"heads whose widths are multiples of {LANES} are possible, got {K} and {H}"
  pairs = q_BNTK.shape[0] * tiling.most_pairs(q_BNTK.shape[2], k_BNSK.shape[2])
  if pairs > tiling.MOST_STEPS:
    return f"at most {tiling.MOST_STEPS} pairs of tiles are possible, got {pairs}"
  return None


def forward(
  q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale: float, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
  """As reference.forward."""
  shapes = Shapes.of(q_BNTK, k_BNSK, v_BNSH)
  tiles = tiling.cut(shapes.T, shapes.S, longer="keys")
  T, S = tiles.padded
  words = padded(bits_BTW, 1, T)
  out, lse = call(
    functools.partial(_kernel, scale=scale),
    "sparse_mla_forward",
    shapes,
    tiles,
    tiling.occupied(words, tiles),
    inputs=[
      ("query", padded(q_BNTK, 2, T)),
      ("key", padded(k_BNSK, 2, S)),
      ("key", padded(v_BNSH, 2, S)),
      ("words", words),
    ],
    outputs=[("query", shapes.H, v_BNSH.dtype), ("row", T, jnp.float32)],
    scratch=[(tiles.queries, LANES), (tiles.queries, LANES), (tiles.queries, shapes.H)],
    interpret=interpret,
  )
  return out[:, :, : shapes.T], lse[:, :, 0, : shapes.T]


def _kernel(step, q_ref, k_ref, v_ref, words_ref, out_ref, lse_ref, most_ref, sum_ref, acc_ref, *, scale):
  @pl.when(step.first)
  def _start():
    most_ref[...] = jnp.full(most_ref.shape, LEAST_MOST, jnp.float32)
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

  words = words_ref[...] >> step.shift
  for piece in pieces(k_ref.shape[0]):
    logits = dot(q_ref[...], k_ref[piece], NT) * (scale / math.log(2))
    logits = mask(logits, words, piece.start, axis=1)
    before = most_ref[...]
    most = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
    p = jnp.exp2(logits - wide(most, logits.shape[1]))
    shrink = jnp.exp2(before - most)
    most_ref[...] = most
    # Sums stay apart by lanes until the end.
    sum_ref[...] = shrink * sum_ref[...] + sum(p[:, i : i + LANES] for i in range(0, p.shape[1], LANES))
    mixed = dot(p.astype(v_ref.dtype), v_ref[piece])
    acc_ref[...] = wide(shrink, mixed.shape[1]) * acc_ref[...] + mixed

  @pl.when(step.last)
  def _finish():
    total = jnp.sum(sum_ref[...], axis=1, keepdims=True)
    some = jnp.where(total == 0, 1.0, total)
    out_ref[...] = (acc_ref[...] * (1 / some)).astype(out_ref.dtype)
    lse = jnp.where(total == 0, 0.0, most_ref[...] * math.log(2) + jnp.log(some))
    lse_ref[...] = lse.T[:1]


class Interpreted:
  """The same on any back end, one instruction after another."""

  forward = staticmethod(functools.partial(forward, interpret=True))
  backward = staticmethod(functools.partial(backward, interpret=True))
