"""Top-k in plain jnp: the oracle, and what runs where there is no kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.topk.bits import pack


def clean(scores: jax.Array) -> jax.Array:
  """NaN → −∞ and −0.0 → +0.0, so that every comparison has one answer."""
  # By bits: XLA drops an addition of 0.0, and a comparison with 0.0 holds for denormals too on CPU.
  negative_zero = jax.lax.bitcast_convert_type(scores, jnp.int32) == jnp.iinfo(jnp.int32).min
  return jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(negative_zero, 0.0, scores))


def topk(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """See api.topk."""
  values, indices = jax.lax.top_k(clean(scores), k)
  found = values > -jnp.inf
  order = jnp.where(found, indices, scores.shape[-1])  # empty slots sort behind every index
  order, values = jax.lax.sort((order, values), num_keys=1)
  return values, jnp.where(values > -jnp.inf, order, -1)


def topk_mask(scores: jax.Array, k: int) -> jax.Array:
  """See api.topk_mask. Counted bisection instead of a sort: 32 compare-and-count passes over a row."""
  scores = clean(scores)
  keys = _ordered_int(scores)
  lowest = jnp.full(scores.shape[:-1], jnp.iinfo(jnp.int32).min, jnp.int32)

  def halve(i, threshold):
    # Builds the k-th largest key bit by bit: the largest t with at least k keys ≥ t. The first flip
    # clears the sign of the smallest int, every later one sets a bit that is still 0.
    trial = threshold ^ (jnp.int32(1) << (31 - i))
    enough = jnp.sum(keys >= trial[..., None], axis=-1, dtype=jnp.int32) >= k
    return jnp.where(enough, trial, threshold)

  threshold = jax.lax.fori_loop(0, 32, halve, lowest)[..., None]
  above, equal = keys > threshold, keys == threshold
  wanted = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
  crowded = jnp.any(jnp.sum(equal, axis=-1, keepdims=True, dtype=jnp.int32) > wanted)
  equal = jax.lax.cond(crowded, _first_of_each_row, lambda mask, _: mask, equal, wanted)
  return (above | equal) & (scores > -jnp.inf)


def topk_bits(scores: jax.Array, k: int) -> jax.Array:
  """See api.topk_bits."""
  return pack(topk_mask(scores, k))


def _ordered_int(scores: jax.Array) -> jax.Array:
  """int32 keys in the order of the floats: negative floats have their magnitude bits flipped."""
  bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
  return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _first_of_each_row(mask: jax.Array, wanted: jax.Array) -> jax.Array:
  """Keeps the `wanted` [..., 1] lowest set positions of each row."""
  return mask & (jnp.cumsum(mask, axis=-1, dtype=jnp.int32) <= wanted)
