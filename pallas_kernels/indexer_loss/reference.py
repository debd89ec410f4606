"""The indexer's loss in plain jnp: the oracle, and what runs where there is no kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.lightning_indexer.reference import scores
from pallas_kernels.topk import bits

QUERY_BLOCK = 256  # queries whose distributions exist at a time
MASKED = -1e30  # finite: −∞ would give NaN in a row that sees nothing


def indexer_loss(
  query_BTIJ, gate_BTI, key_BSJ, q_BNTL, k_BSL, bits_BTW, scale
) -> tuple[jax.Array, jax.Array]:
  """See api.indexer_loss."""
  T = query_BTIJ.shape[1]
  block = min(QUERY_BLOCK, T)
  rows = query_BTIJ, gate_BTI, jnp.swapaxes(q_BNTL, 1, 2), bits_BTW

  @jax.checkpoint  # so that the backward pass too holds one block's scores
  def of_block(pieces):
    query, gate, q_BtNL, words = pieces
    mask_BtS = bits.unpack(words, key_BSJ.shape[1])
    target_BtS = _attention(jnp.moveaxis(q_BtNL, 2, 0), k_BSL, mask_BtS, scale)
    return _divergence(target_BtS, scores(query, gate, key_BSJ), mask_BtS)

  def cut(x):
    x = jnp.pad(x, [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

  kl = jax.lax.map(of_block, tuple(map(cut, rows)))
  kl_BT = jnp.moveaxis(kl, 0, 1).reshape(kl.shape[1], -1)[:, :T]
  return jnp.sum(kl_BT), kl_BT


def _attention(q_NBtL: jax.Array, k_BSL: jax.Array, mask_BtS: jax.Array, scale: float) -> jax.Array:
  """[B, t, S]: the mean of the heads' softmax attention, 0 where a row sees nothing; a head at a time."""

  def add_head(total, q_BtL):
    logits = jnp.einsum("btl,bsl->bts", q_BtL, k_BSL, preferred_element_type=jnp.float32) * scale
    return total + jax.nn.softmax(jnp.where(mask_BtS, logits, MASKED), axis=-1), None

  total, _ = jax.lax.scan(add_head, jnp.zeros(mask_BtS.shape, jnp.float32), q_NBtL)
  return jax.lax.stop_gradient(jnp.where(mask_BtS, total / q_NBtL.shape[0], 0.0))


def _divergence(target_BtS: jax.Array, scores_BtS: jax.Array, mask_BtS: jax.Array) -> jax.Array:
  """KL of each row; its derivative by a score is softmax − target.

  Summed as p · (d + e^−d − 1) with d = log(p / q), which is p log(p / q) − p + q: no term is negative. Of
  p log(p / q) the sum is what is left of terms that cancel, and where p and q are alike that is rounding.
  """
  sees = jnp.any(mask_BtS, axis=-1)
  log_q = jax.nn.log_softmax(jnp.where(mask_BtS, scores_BtS, MASKED), axis=-1)
  log_ratio = jnp.where(target_BtS > 0, jnp.log(jnp.where(target_BtS > 0, target_BtS, 1.0)) - log_q, 0.0)
  terms = target_BtS * (log_ratio + jnp.expm1(-log_ratio))
  rest = jnp.where(target_BtS > 0, 0.0, jnp.exp(log_q))
  return jnp.where(sees, jnp.sum(terms + rest, axis=-1), 0.0)
