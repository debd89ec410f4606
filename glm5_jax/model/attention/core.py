"""Masked softmax attention on given queries, keys and values. No positions, no weights, no policy.

Heads stand before time in every operand, so that each product is a plain batched matmul. Queries are
taken in blocks, each with the keys up to its end. The backward pass recomputes the probabilities from the
row log-sum-exp (as in FlashAttention), so that nothing of size [N, T, S] is kept between the passes. A row
that sees nothing gives 0, with gradient 0.
"""

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: −∞ would give NaN in a row that is masked throughout

Blocks = tuple[tuple[int, int, int], ...]  # (begin, end, keys) of each block of queries
Masks = tuple[jax.Array, ...]  # bool [B, end − begin, keys] of each block


def attend(q_BNTK, k, v, masks: Masks, blocks: Blocks, scale: float) -> jax.Array:
  """softmax(q·k · scale over visible keys) · v, in float32 inside; returns [B, N, T, H] in v's dtype.

  k and v are [B, N, S, ·], or [B, S, ·] where one key serves all heads (absorbed MLA). The blocks cover
  the T queries in order.
  """
  return _attend(q_BNTK, k, v, masks, blocks, scale)


def attend_gathered(q_BNTK, k_BTSK, v_BTSH, valid_BTS, scale: float) -> jax.Array:
  """The same where every query has keys of its own, shared by all heads; returns [B, N, T, H]."""
  B, N, T, K = q_BNTK.shape

  def fold(x):  # each query becomes a row of one query
    return x.reshape(B * T, *x.shape[2:])

  q = jnp.swapaxes(q_BNTK, 1, 2).reshape(B * T, N, 1, K)
  mask = fold(valid_BTS)[:, None]
  out = _attend(q, fold(k_BTSK), fold(v_BTSH), (mask,), ((0, 1, valid_BTS.shape[-1]),), scale)
  return jnp.swapaxes(out.reshape(B, T, N, -1), 1, 2)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _specs(k: jax.Array) -> tuple[str, str]:
  """Einsum letters of keys and values, with or without a head axis."""
  return ("bnsk", "bnsh") if k.ndim == 4 else ("bsk", "bsh")


def _upto(x: jax.Array, keys: int) -> jax.Array:
  """The first `keys` slots of keys or values."""
  return jax.lax.slice_in_dim(x, 0, keys, axis=x.ndim - 2)


def _logits(q, k, visible_BTS, scale):
  logits_BNTS = _dot(f"bntk,{_specs(k)[0]}->bnts", q, k) * scale
  return jnp.where(visible_BTS[:, None], logits_BNTS, MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, masks, blocks, scale):
  return _forward(q, k, v, masks, blocks, scale)[0]


def _forward(q, k, v, masks, blocks, scale):
  outs, sums = [], []
  for visible_BTS, (begin, end, keys) in zip(masks, blocks, strict=True):
    out, lse = _forward_block(q[:, :, begin:end], _upto(k, keys), _upto(v, keys), visible_BTS, scale)
    outs.append(out)
    sums.append(lse)
  out = jnp.concatenate(outs, axis=2)
  return out, (q, k, v, masks, out, tuple(sums))


def _forward_block(q, k, v, visible_BTS, scale):
  """Output [B, N, T, H] and row log-sum-exp [B, N, T, 1] of one block of queries."""
  logits_BNTS = _logits(q, k, visible_BTS, scale)
  top_BNT1 = jnp.max(logits_BNTS, axis=-1, keepdims=True)
  exp_BNTS = jnp.where(visible_BTS[:, None], jnp.exp(logits_BNTS - top_BNT1), 0.0)
  sum_BNT1 = jnp.sum(exp_BNTS, axis=-1, keepdims=True)
  safe_BNT1 = jnp.where(sum_BNT1 > 0, sum_BNT1, 1.0)
  mixed_BNTH = _dot(f"bnts,{_specs(v)[1]}->bnth", exp_BNTS.astype(v.dtype), v)
  return (mixed_BNTH / safe_BNT1).astype(v.dtype), top_BNT1 + jnp.log(safe_BNT1)


def _backward(blocks, scale, saved, grad_BNTH):
  q, k, v, masks, out, sums = saved
  row_BNT1 = jnp.sum(grad_BNTH.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
  grad_q = []
  grad_k, grad_v = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  for visible_BTS, lse_BNT1, (begin, end, keys) in zip(masks, sums, blocks, strict=True):
    piece = slice(begin, end)
    block_q, block_k, block_v = _backward_block(
      q[:, :, piece], _upto(k, keys), _upto(v, keys), visible_BTS, lse_BNT1,
      grad_BNTH[:, :, piece], row_BNT1[:, :, piece], scale,
    )  # fmt: skip
    grad_q.append(block_q)
    grad_k = grad_k.at[..., :keys, :].add(block_k)
    grad_v = grad_v.at[..., :keys, :].add(block_v)
  grad_q_BNTK = jnp.concatenate(grad_q, axis=2).astype(q.dtype)
  return grad_q_BNTK, grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


def _backward_block(q, k, v, visible_BTS, lse_BNT1, grad_BNTH, row_BNT1, scale):
  """Gradients of one block of queries, float32: its own queries' and its share of keys' and values'."""
  spec_k, spec_v = _specs(k)
  logits_BNTS = _logits(q, k, visible_BTS, scale)
  prob_BNTS = jnp.where(visible_BTS[:, None], jnp.exp(logits_BNTS - lse_BNT1), 0.0)
  grad_v = _dot(f"bnts,bnth->{spec_v}", prob_BNTS.astype(v.dtype), grad_BNTH)
  grad_prob_BNTS = _dot(f"bnth,{spec_v}->bnts", grad_BNTH, v)
  grad_logits = (prob_BNTS * (grad_prob_BNTS - row_BNT1) * scale).astype(q.dtype)
  grad_q = _dot(f"bnts,{spec_k}->bntk", grad_logits, k)
  return grad_q, _dot(f"bnts,bntk->{spec_k}", grad_logits, q), grad_v


_attend.defvjp(_forward, _backward)
