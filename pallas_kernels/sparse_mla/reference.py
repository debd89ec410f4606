"""Attention over selected keys in plain jnp, a block of queries at a time: the oracle, and the fallback."""

import jax
import jax.numpy as jnp

from pallas_kernels.topk import bits

MASKED = -1e30  # finite: −∞ would give NaN in a row that selects nothing
LOGITS = 2**24  # that exist at a time, of all heads
LEAST_QUERIES = 8


def forward(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale: float) -> tuple[jax.Array, jax.Array]:
  """Output [B, N, T, H] in v's dtype and log-sum-exp of the scaled logits, float32 [B, N, T].

  The latter is 0 where a row selects nothing.
  """

  def one(piece):
    q_BNtK, words_BtW = piece
    logits_BNtS, mask_B1tS = _logits(q_BNtK, k_BNSK, words_BtW, scale)
    most_BNt1 = jnp.max(logits_BNtS, axis=-1, keepdims=True)
    p_BNtS = jnp.where(mask_B1tS, jnp.exp(logits_BNtS - most_BNt1), 0.0)
    sum_BNt1 = jnp.sum(p_BNtS, axis=-1, keepdims=True)
    some_BNt1 = jnp.where(sum_BNt1 == 0, 1.0, sum_BNt1)
    out_BNtH = _dot("bnts,bnsh->bnth", p_BNtS, v_BNSH) / some_BNt1
    lse_BNt1 = jnp.where(sum_BNt1 == 0, 0.0, most_BNt1 + jnp.log(some_BNt1))
    return out_BNtH.astype(v_BNSH.dtype), lse_BNt1[..., 0]

  block = _block(q_BNTK, k_BNSK)
  out, lse = jax.lax.map(one, (_cut(q_BNTK, 2, block), _cut(bits_BTW, 1, block)))
  return _join(out, q_BNTK.shape[2]), _join(lse, q_BNTK.shape[2])


def backward(q_BNTK, k_BNSK, v_BNSH, bits_BTW, out_BNTH, lse_BNT, gradient_BNTH, scale: float):
  """Gradients of q, k and v, of a gradient of the output."""
  delta_BNT = jnp.sum(gradient_BNTH.astype(jnp.float32) * out_BNTH.astype(jnp.float32), axis=-1)

  def one(sums, piece):
    q_BNtK, words_BtW, lse_BNt, delta_BNt, gradient_BNtH = piece
    logits_BNtS, mask_B1tS = _logits(q_BNtK, k_BNSK, words_BtW, scale)
    p_BNtS = jnp.where(mask_B1tS, jnp.exp(logits_BNtS - lse_BNt[..., None]), 0.0)
    dp_BNtS = _dot("bnth,bnsh->bnts", gradient_BNtH, v_BNSH)
    ds_BNtS = p_BNtS * (dp_BNtS - delta_BNt[..., None]) * scale
    dk_BNSK = sums[0] + _dot("bnts,bntk->bnsk", ds_BNtS, q_BNtK)
    dv_BNSH = sums[1] + _dot("bnts,bnth->bnsh", p_BNtS, gradient_BNtH)
    return (dk_BNSK, dv_BNSH), _dot("bnts,bnsk->bntk", ds_BNtS, k_BNSK).astype(q_BNtK.dtype)

  block = _block(q_BNTK, k_BNSK)
  by_head = (_cut(x, 2, block) for x in (lse_BNT, delta_BNT, gradient_BNTH))
  zeros = jnp.zeros(k_BNSK.shape, jnp.float32), jnp.zeros(v_BNSH.shape, jnp.float32)
  pieces = _cut(q_BNTK, 2, block), _cut(bits_BTW, 1, block), *by_head
  (dk_BNSK, dv_BNSH), dq = jax.lax.scan(one, zeros, pieces)
  return _join(dq, q_BNTK.shape[2]), dk_BNSK.astype(k_BNSK.dtype), dv_BNSH.astype(v_BNSH.dtype)


def _logits(q_BNtK, k_BNSK, words_BtW, scale: float) -> tuple[jax.Array, jax.Array]:
  """Scaled, MASKED where not selected; and what is selected, bool [B, 1, t, S]."""
  mask_B1tS = bits.unpack(words_BtW, k_BNSK.shape[2])[:, None]
  return jnp.where(mask_B1tS, _dot("bntk,bnsk->bnts", q_BNtK, k_BNSK) * scale, MASKED), mask_B1tS


def _dot(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Sums in float32 of products of the second operand's dtype."""
  exact = jax.lax.Precision.HIGHEST
  return jnp.einsum(letters, x.astype(y.dtype), y, precision=exact, preferred_element_type=jnp.float32)


def _block(q_BNTK, k_BNSK) -> int:
  """Queries at a time."""
  B, N, T, _ = q_BNTK.shape
  return min(T, max(LEAST_QUERIES, LOGITS // (B * N * k_BNSK.shape[2])))


def _cut(x: jax.Array, axis: int, block: int) -> jax.Array:
  """[…, T, …] → [blocks, …, block, …], zeros behind the end."""
  x = jnp.pad(x, [(0, -n % block if a == axis else 0) for a, n in enumerate(x.shape)])
  return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)


def _join(x: jax.Array, T: int) -> jax.Array:
  """[blocks, B, N, block, …] → [B, N, T, …]."""
  x = jnp.moveaxis(x, 0, 2)
  return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :T]
