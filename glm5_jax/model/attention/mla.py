"""Plain MLA: every query attends to all keys of its document up to itself."""

import jax
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import AttentionContext, AttentionOutput, LayerCache, Selection
from glm5_jax.model.attention.forms import attend_causal
from glm5_jax.model.attention.latent import project_latent


class FullAttention(nn.Module):
  """MLA-256 over all keys. Source: GLM-5 report §2.1."""

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
    latent, cache = project_latent(self, x_BTD, ctx, cache)
    return AttentionOutput(attend_causal(latent, ctx, self.cfg), selection, cache)
