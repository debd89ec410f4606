"""Masked softmax attention on given queries, keys and values. No positions, no weights, no policy.

The backward pass recomputes the probabilities from the row log-sum-exp (as in FlashAttention), so that
nothing of size [N, T, S] is kept between the passes. A row that sees nothing gives 0, with gradient 0.
"""

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: −∞ would give NaN in a row that is masked throughout


def attend(q_BTNK, k, v, visible_BTS, scale: float) -> jax.Array:
  """softmax(q·k · scale over visible keys) · v, in float32 inside; returns [B, T, N, H] in v's dtype.

  k and v are [B, S, N, ·], or [B, S, ·] where one key serves all heads (absorbed MLA).
  """
  return _attend(q_BTNK, k, v, visible_BTS, scale)


def attend_gathered(q_BTNK, k_BTSK, v_BTSH, valid_BTS, scale: float) -> jax.Array:
  """The same where every query has keys of its own [B, T, S, ·], shared by all heads."""
  B, T = q_BTNK.shape[:2]

  def fold(x):  # each query becomes a row of one query
    return x.reshape(B * T, 1, *x.shape[2:])

  out = _attend(
    fold(q_BTNK),
    k_BTSK.reshape(B * T, *k_BTSK.shape[2:]),
    v_BTSH.reshape(B * T, *v_BTSH.shape[2:]),
    fold(valid_BTS),
    scale,
  )
  return out.reshape(B, T, *out.shape[2:])


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _specs(k: jax.Array) -> tuple[str, str]:
  """Einsum letters of keys and values, with or without a head axis."""
  return ("bsnk", "bsnh") if k.ndim == 4 else ("bsk", "bsh")


def _logits(q, k, visible_BTS, scale):
  logits_BNTS = _dot(f"btnk,{_specs(k)[0]}->bnts", q, k) * scale
  return jnp.where(visible_BTS[:, None], logits_BNTS, MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, visible_BTS, scale):
  return _forward(q, k, v, visible_BTS, scale)[0]


def _forward(q, k, v, visible_BTS, scale):
  logits_BNTS = _logits(q, k, visible_BTS, scale)
  top_BNT1 = jnp.max(logits_BNTS, axis=-1, keepdims=True)
  exp_BNTS = jnp.where(visible_BTS[:, None], jnp.exp(logits_BNTS - top_BNT1), 0.0)
  sum_BNT1 = jnp.sum(exp_BNTS, axis=-1, keepdims=True)
  safe_BNT1 = jnp.where(sum_BNT1 > 0, sum_BNT1, 1.0)
  mixed_BTNH = _dot(f"bnts,{_specs(v)[1]}->btnh", exp_BNTS.astype(v.dtype), v)
  out = (mixed_BTNH / jnp.swapaxes(safe_BNT1, 1, 2)).astype(v.dtype)
  return out, (q, k, v, visible_BTS, out, top_BNT1 + jnp.log(safe_BNT1))


def _backward(scale, saved, grad_BTNH):
  q, k, v, visible_BTS, out, lse_BNT1 = saved
  spec_k, spec_v = _specs(k)
  prob_BNTS = jnp.where(visible_BTS[:, None], jnp.exp(_logits(q, k, visible_BTS, scale) - lse_BNT1), 0.0)
  grad_v = _dot(f"bnts,btnh->{spec_v}", prob_BNTS.astype(v.dtype), grad_BTNH)
  grad_prob_BNTS = _dot(f"btnh,{spec_v}->bnts", grad_BTNH, v)
  row_BTN = jnp.sum(grad_BTNH.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
  row_BNT1 = jnp.swapaxes(row_BTN, 1, 2)[..., None]
  grad_logits = (prob_BNTS * (grad_prob_BNTS - row_BNT1) * scale).astype(q.dtype)
  grad_q = _dot(f"bnts,{spec_k}->btnk", grad_logits, k)
  grad_k = _dot(f"bnts,btnk->{spec_k}", grad_logits, q)
  return grad_q.astype(q.dtype), grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
