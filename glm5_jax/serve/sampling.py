"""From logits to tokens: temperature, top-p, and the rejection rule of speculative decoding."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.errors import UserError

MIN_TEMPERATURE = 1e-6  # below it float32 has no room for logits divided by it


class Sampling(NamedTuple):
  """How a next token is drawn. Hashable: compiled functions depend on it."""

  temperature: float = 1.0  # 0 is greedy
  top_p: float = 1.0  # smallest set of most likely tokens with at least this mass; 1 keeps all

  def check(self) -> "Sampling":
    if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf):
      raise UserError(f"temperature {self.temperature} must be 0 (greedy), or finite from {MIN_TEMPERATURE}")
    if not 0 < self.top_p <= 1:
      raise UserError(f"top_p {self.top_p} must be above 0 and at most 1")
    return self


def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
  """The distribution [..., V] that tokens are drawn from, float32; one-hot at temperature 0.

  Top-p keeps the most likely tokens until their mass reaches top_p, at least one; ties at the cut are
  broken by the lowest id.
  """
  logits = logits.astype(jnp.float32)
  if sampling.temperature == 0:
    return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
  logits -= jnp.max(logits, axis=-1, keepdims=True)  # before the division, which must not reach infinity
  probs = jax.nn.softmax(logits / sampling.temperature, axis=-1)
  if sampling.top_p == 1:
    return probs
  order = jnp.argsort(-probs, axis=-1, stable=True)
  falling = jnp.take_along_axis(probs, order, axis=-1)
  before = jnp.cumsum(falling, axis=-1) - falling  # mass of the tokens that are likelier
  rank = jnp.argsort(order, axis=-1)
  kept = jnp.where(jnp.take_along_axis(before < sampling.top_p, rank, axis=-1), probs, 0.0)
  return kept / jnp.sum(kept, axis=-1, keepdims=True)


def draw(keys: jax.Array, probs: jax.Array) -> jax.Array:
  """One token a row, int32 [B], from probs [B, V] with a key a row; a zero is never drawn."""
  logits = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), -jnp.inf)
  return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def sample(keys: jax.Array, logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
  """One token a row, int32 [B]; ties at temperature 0 go to the lowest id."""
  if sampling.temperature == 0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  return draw(keys, probabilities(logits_BV, sampling))


def residual(target: jax.Array, draft: jax.Array) -> jax.Array:
  """norm(max(0, p − q)) [..., V]: what to draw from after q's token was rejected; p where they agree."""
  rest = jnp.maximum(target - draft, 0.0)
  mass = jnp.sum(rest, axis=-1, keepdims=True)
  return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), target)


def verify(
  keys: jax.Array, target_BJV: jax.Array, draft_BKV: jax.Array, drafted_BK: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Accepts a prefix of the drafted tokens and draws the one after it; distributed as the target.

  Args:
    keys: one a row.
    target_BJV: the target's distributions at the K drafted places and at the one after, J = K + 1.
    draft_BKV: the distributions the drafts were drawn from.
    drafted_BK: int32 drafts.

  Returns:
    (accepted_B in 0 … K, next_B), both int32. Source: Leviathan et al., Chen et al. (2023).
  """
  K = drafted_BK.shape[1]
  split = jax.vmap(lambda key: jax.random.split(key, 2))(keys)
  uniform_BK = jax.vmap(lambda key: jax.random.uniform(key, (K,)))(split[:, 0])
  p_BK = jnp.take_along_axis(target_BJV[:, :K], drafted_BK[..., None], axis=-1)[..., 0]
  q_BK = jnp.take_along_axis(draft_BKV, drafted_BK[..., None], axis=-1)[..., 0]
  accept_BK = uniform_BK * q_BK < p_BK
  accepted_B = jnp.sum(jnp.cumprod(accept_BK, axis=1), axis=1, dtype=jnp.int32)
  no_draft_B1V = jnp.zeros_like(draft_BKV[:, :1])  # past the last draft the residual is the target itself
  rest_BJV = residual(target_BJV, jnp.concatenate([draft_BKV, no_draft_B1V], axis=1))
  rest_BV = jnp.take_along_axis(rest_BJV, accepted_B[:, None, None], axis=1)[:, 0]
  return accepted_B, draw(split[:, 1], rest_BV)
