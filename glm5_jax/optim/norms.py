"""Norms over trees, accumulated in float32."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def global_norm(arrays: Iterable[jax.Array]) -> jax.Array:
  """Euclidean norm over all entries, float32 scalar. At zero both value and gradient are 0, never NaN."""
  square = sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays), jnp.float32(0))
  positive = square > 0
  # Two selects, since the unselected branch of one would still send inf · 0 back.
  # A NaN is not positive either and must stay NaN.
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), square)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """Scales all updates by min(1, max_norm / norm); source: Pascanu et al., arXiv 1211.5063."""

  def update(updates: Any, state, params=None):
    del params
    norm = global_norm(jax.tree.leaves(updates))
    scale = max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), updates), state

  return optax.GradientTransformation(optax.init_empty_state, update)
