"""The one way a weight is declared: shape, logical axes and initialiser in one line.

Abstract values and arrays come from these declarations, and so do shardings: the logical axes ("vocab",
"embed", "embed_pair", "q_rank", "kv_rank", "heads", "head_dim", "index_heads", "index_dim", "mlp",
"experts", and "layers" in front of stacked weights) are what a table of rules maps to mesh axes.
"""

from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.parallel import spmd
from glm5_jax.parallel.rules import Axes


def weight(
  module: nn.Module,
  name: str,
  shape: Sequence[int],
  axes: Axes,
  init: Callable,
  dtype: str | jnp.dtype,
  use: str | jnp.dtype | None = None,
) -> jax.Array:
  """Declares and returns parameter `name` of `module`.

  On a mesh what is stored here is a part. The other parts are fetched, in dtype `use` where that is given
  (the dtype of the computation, half the bytes); those of heads, experts and feed-forward widths stay where
  they are.
  """
  if module.is_initializing():
    boxed = nn.with_logical_partitioning(init, axes)
    w = cast(jax.Array, module.param(name, boxed, tuple(shape), jnp.dtype(dtype)))
  else:  # not by `param`, which compares shapes with the whole weight's
    w = module.get_variable("params", name)
    if w is None:
      raise KeyError(f"parameter {'/'.join((*module.path, name))} is absent")
  return spmd.gather_weight(w, axes, use)


def normal(cfg) -> Callable:
  """GLM-5's initialiser for matrices: normal with `initializer_range`."""
  return nn.initializers.normal(cfg.initializer_range)


ones = nn.initializers.ones
zeros = nn.initializers.zeros


def residual(cfg) -> Callable:
  """Matrices that write to the residual stream: scaled down by sqrt(2 · layers), as in GPT-2 (our choice)."""
  return nn.initializers.normal(cfg.initializer_range / (2 * cfg.num_hidden_layers) ** 0.5)
