"""Sliding-window MLA: the last `sliding_window` keys, the query's own included."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import (
  AttentionContext,
  AttentionOutput,
  LayerCache,
  Selection,
  visible,
)
from glm5_jax.model.attention.forms import attend_visible
from glm5_jax.model.attention.latent import project_latent


class SlidingAttention(nn.Module):
  """MLA over a window. Source: the sliding-window ablation of the GLM-5 report, §2.1.2."""

  cfg: ModelConfig
  owns_indexer: bool = False

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    ctx: AttentionContext,
    selection: Selection | None = None,
    cache: LayerCache | None = None,
  ) -> AttentionOutput:
    window = self.cfg.sliding_window

    def in_window(begin: int, end: int, keys: int) -> jax.Array:
      recent = ctx.slots_BT[:, begin:end, None] - jnp.arange(keys, dtype=jnp.int32) < window
      return visible(ctx, begin, end, keys) & recent

    latent, cache = project_latent(self, x_BTD, ctx, cache)
    return AttentionOutput(attend_visible(latent, in_window, ctx, self.cfg), selection, cache)
