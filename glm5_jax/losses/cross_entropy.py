"""Cross-entropy of a vocabulary projection, a chunk of tokens at a time.

Logits of all tokens never exist. Under differentiation the gradients are formed while each chunk's
logits are at hand, so that the projection is not computed twice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLosses(NamedTuple):
  """What each token costs, and the weighted sum, which alone carries a gradient."""

  loss: jax.Array  # −Σ w · log p(target), float32
  nll_M: jax.Array  # −log p(target), float32
  hits_M: jax.Array  # [argmax = target], bool


def chunked_cross_entropy(
  hidden_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array, weights_M: jax.Array, chunk: int
) -> TokenLosses:
  """The losses of tokens; equal to the unchunked ones for any chunk, M need be no multiple.

  Several losses of one head are best taken together, each token's weight holding the factor of its loss:
  the head's gradient is then one array, and as large as that array is, another for each loss is what a
  device has no room for.

  Args:
    hidden_MD: states after the final norm, in the compute dtype.
    head_DV: output projection, any dtype; cast to hidden's for the product, which accumulates in float32.
    targets_M: int32. weights_M: float32, 0 ignores a token.
    chunk: tokens projected at a time.
  """
  M = hidden_MD.shape[0]
  loss, tokens = _sums(hidden_MD, head_DV, targets_M, weights_M, min(chunk, M))
  nll, hits = (x.reshape(-1)[:M] for x in jax.lax.stop_gradient(tokens))
  return TokenLosses(loss, nll, hits)


def token_log_probs(
  hidden_MD: jax.Array, head_DV: jax.Array, targets_M: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """(log p(target) [M] float32, argmax = target [M] bool), for evaluation."""

  def body(_, piece):
    logits = _logits(piece[0], head_DV)
    correct = jnp.argmax(logits, axis=-1) == piece[1]
    return None, (_picked(logits, piece[1]) - jax.nn.logsumexp(logits, axis=-1), correct)

  M = hidden_MD.shape[0]
  pieces = _pieces(min(chunk, M), hidden_MD, targets_M)
  _, (log_probs, correct) = jax.lax.scan(body, None, pieces)
  return log_probs.reshape(-1)[:M], correct.reshape(-1)[:M]


def _logits(hidden_MD, head_DV):
  return jnp.dot(hidden_MD, head_DV.astype(hidden_MD.dtype), preferred_element_type=jnp.float32)


def _picked(logits_MV, targets_M):
  return jnp.take_along_axis(logits_MV, targets_M[:, None], axis=-1)[:, 0]


def _hits(logits_MV, targets_M):
  """Whether no logit exceeds the target's: ties count, as the log-sum-exp has a maximum and no argmax."""
  return _picked(logits_MV, targets_M) == jnp.max(logits_MV, axis=-1)


def _pieces(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Each array [M, …] as [chunks, chunk, …], filled up with zeros (weight 0)."""
  fill = -arrays[0].shape[0] % chunk
  padded = [jnp.pad(a, ((0, fill),) + ((0, 0),) * (a.ndim - 1)) for a in arrays]
  return tuple(a.reshape(-1, chunk, *a.shape[1:]) for a in padded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(hidden_MD, head_DV, targets_M, weights_M, chunk):
  """(weighted sum, (losses, hits) of tokens in chunks)."""

  def body(loss, piece):
    hidden, targets, weights = piece
    logits = _logits(hidden, head_DV)
    losses = jax.nn.logsumexp(logits, axis=-1) - _picked(logits, targets)
    return loss + losses @ weights, (losses, _hits(logits, targets))

  zero = jnp.zeros((), jnp.float32)
  return jax.lax.scan(body, zero, _pieces(chunk, hidden_MD, targets_M, weights_M))


def _forward(hidden_MD, head_DV, targets_M, weights_M, chunk):
  """The sums, and the gradients of the first, to be scaled by what comes from above."""
  dtype = hidden_MD.dtype

  def body(carry, piece):
    loss, grad_head = carry
    hidden, targets, weights = piece
    logits = _logits(hidden, head_DV)
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_target = targets[:, None] == jnp.arange(logits.shape[-1])
    losses = log_sum[:, 0] - _picked(logits, targets)
    grad_logits = ((jnp.exp(logits - log_sum) - is_target) * weights[:, None]).astype(dtype)
    grad_hidden = jnp.dot(grad_logits, head_DV.T.astype(dtype), preferred_element_type=jnp.float32)
    grad_head += jnp.dot(hidden.T, grad_logits, preferred_element_type=jnp.float32)
    tokens = losses, _hits(logits, targets)
    return (loss + losses @ weights, grad_head), (tokens, grad_hidden.astype(dtype))

  start = (jnp.zeros((), jnp.float32), jnp.zeros(head_DV.shape, jnp.float32))
  pieces = _pieces(chunk, hidden_MD, targets_M, weights_M)
  (loss, grad_head), (tokens, grad_hidden) = jax.lax.scan(body, start, pieces)
  grad_hidden = grad_hidden.reshape(-1, hidden_MD.shape[1])[: hidden_MD.shape[0]]
  return (loss, tokens), (grad_hidden, grad_head, jnp.zeros((0,), head_DV.dtype))


def _backward(chunk, saved, grads):
  del chunk
  grad_hidden, grad_head, head_like = saved
  scale = grads[0]
  grad_hidden = (grad_hidden.astype(jnp.float32) * scale).astype(grad_hidden.dtype)
  return grad_hidden, (grad_head * scale).astype(head_like.dtype), None, None


_sums.defvjp(_forward, _backward)
