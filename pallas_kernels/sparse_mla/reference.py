"""Attention over selected keys in plain jnp: the oracle, and what runs where there is no kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.topk import bits

QUERY_BLOCK = 256  # queries whose logits exist at a time
MASKED = -1e30  # finite: −∞ would give NaN in a row that sees nothing


def attend_bits(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale) -> jax.Array:
  """See api.attend_bits."""
  T, S = q_BNTK.shape[2], k_BNSK.shape[2]
  block = min(QUERY_BLOCK, T)

  @jax.checkpoint  # so that the backward pass too holds one block's logits
  def of_block(pieces):
    q_BNtK, words_BtW = pieces
    mask_B1tS = bits.unpack(words_BtW, S)[:, None]
    logits = jnp.einsum("bntk,bnsk->bnts", q_BNtK, k_BNSK, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask_B1tS, logits, MASKED), axis=-1)
    weights = jnp.where(mask_B1tS, weights, 0.0).astype(v_BNSH.dtype)
    return jnp.einsum("bnts,bnsh->bnth", weights, v_BNSH, preferred_element_type=jnp.float32)

  def cut(x, axis):
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -T % block)
    x = jnp.pad(x, pad)
    x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)

  out = jnp.moveaxis(jax.lax.map(of_block, (cut(q_BNTK, 2), cut(bits_BTW, 1))), 0, 2)
  B, N, _, _, H = out.shape
  return out.reshape(B, N, -1, H)[:, :, :T].astype(v_BNSH.dtype)
