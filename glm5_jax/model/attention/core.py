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
FLOOR = -1e20  # least row maximum and log-sum-exp: exp(MASKED − FLOOR) = 0 in such a row too

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
  """Einsum letters of keys and values as [.., S, ·], with or without a head axis."""
  return ("bnsk", "bnsh") if k.ndim == 4 else ("bsk", "bsh")


def _turned(spec: str) -> str:
  """The letters of `_turn(x)`."""
  return spec[:-2] + spec[-1] + spec[-2]


def _turn(x: jax.Array) -> jax.Array:
  """x with its last two axes exchanged, in memory too on CPU.

  There XLA would fold the exchange into the matmul, and one that reads an operand across its rows takes
  up to twice as long; the copy is small beside it.
  """
  turned = jnp.swapaxes(x, -1, -2)
  return jax.lax.optimization_barrier(turned) if jax.default_backend() == "cpu" else turned


def _upto(x: jax.Array, keys: int) -> jax.Array:
  """The first `keys` slots of keys or values [.., S, ·]."""
  return jax.lax.slice_in_dim(x, 0, keys, axis=x.ndim - 2)


def _logits(q, k_turned, visible_BTS, scale):
  letters = _turned("bnsk" if k_turned.ndim == 4 else "bsk")
  logits_BNTS = _dot(f"bntk,{letters}->bnts", q, k_turned) * scale
  return jnp.where(visible_BTS[:, None], logits_BNTS, MASKED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q, k, v, masks, blocks, scale):
  return _forward(q, k, v, masks, blocks, scale)[0]


def _forward(q, k, v, masks, blocks, scale):
  k_turned = _turn(k)
  outs, sums = [], []
  for visible_BTS, (begin, end, keys) in zip(masks, blocks, strict=True):
    logits_BNTS = _logits(q[:, :, begin:end], k_turned[..., :keys], visible_BTS, scale)
    out, lse = _forward_block(logits_BNTS, _upto(v, keys))
    outs.append(out)
    sums.append(lse)
  out = jnp.concatenate(outs, axis=2)
  return out, (q, k, v, masks, out, tuple(sums))


def _forward_block(logits_BNTS, v):
  """Output [B, N, T, H] and row log-sum-exp [B, N, T, 1] of one block of queries."""
  top_BNT1 = jnp.maximum(jnp.max(logits_BNTS, axis=-1, keepdims=True), FLOOR)
  exp_BNTS = jnp.exp(logits_BNTS - top_BNT1)
  sum_BNT1 = jnp.sum(exp_BNTS, axis=-1, keepdims=True)
  safe_BNT1 = jnp.where(sum_BNT1 > 0, sum_BNT1, 1.0)
  mixed_BNTH = _dot(f"bnts,{_specs(v)[1]}->bnth", exp_BNTS.astype(v.dtype), v)
  return (mixed_BNTH / safe_BNT1).astype(v.dtype), top_BNT1 + jnp.log(safe_BNT1)


def _backward(blocks, scale, saved, grad_BNTH):
  q, k, v, masks, out, sums = saved
  row_BNT1 = jnp.sum(grad_BNTH.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
  q_turned, k_turned, v_turned, grad_turned = (_turn(x) for x in (q, k, v, grad_BNTH))
  spec_k, spec_v = _specs(k)
  grad_q = []
  grad_k = jnp.zeros(k_turned.shape, jnp.float32)  # the sums too are kept turned
  grad_v = jnp.zeros(v_turned.shape, jnp.float32)
  for visible_BTS, lse_BNT1, (begin, end, keys) in zip(masks, sums, blocks, strict=True):
    piece = slice(begin, end)
    logits_BNTS = _logits(q[:, :, piece], k_turned[..., :keys], visible_BTS, scale)
    prob_BNTS = jnp.exp(logits_BNTS - lse_BNT1)
    grad_prob = _dot(f"bnth,{_turned(spec_v)}->bnts", grad_BNTH[:, :, piece], v_turned[..., :keys])
    grad_logits = (prob_BNTS * (grad_prob - row_BNT1[:, :, piece]) * scale).astype(q.dtype)
    grad_q.append(_dot(f"bnts,{spec_k}->bntk", grad_logits, _upto(k, keys)))
    block_k = _dot(f"bnkt,bnts->{_turned(spec_k)}", q_turned[..., piece], grad_logits)
    block_v = _dot(f"bnht,bnts->{_turned(spec_v)}", grad_turned[..., piece], prob_BNTS.astype(v.dtype))
    grad_k = grad_k.at[..., :keys].add(block_k)
    grad_v = grad_v.at[..., :keys].add(block_v)
  grad_q_BNTK = jnp.concatenate(grad_q, axis=2).astype(q.dtype)
  return grad_q_BNTK, _turn(grad_k).astype(k.dtype), _turn(grad_v).astype(v.dtype), None


_attend.defvjp(_forward, _backward)
