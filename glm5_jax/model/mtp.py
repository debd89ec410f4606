"""Multi-token prediction: one decoder layer, looped; every depth shares its weights.

Depth k at slot i: u = eh_proj · [enorm(Emb(t[i+k])) ; hnorm(h[k−1][i])], then a decoder layer, then
`norm`. h[0] is the trunk's hidden state *after* the final norm, and what the next depth receives is
after `norm`. Slot i keeps position i. Embedding and head are the trunk's.
Sources: GLM-5 report §2.1.4; checkpoint order of eh_proj as served by vLLM and SGLang.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import AttentionContext, LayerCache
from glm5_jax.model.block import remat_block
from glm5_jax.model.layers import project, rms_norm
from glm5_jax.model.plan import block_spec
from glm5_jax.model.weights import normal, ones, weight


class MultiTokenPrediction(nn.Module):
  """The shared layer, applied once for each embedding handed in."""

  cfg: ModelConfig

  @nn.compact
  def __call__(
    self,
    hidden_BTD: jax.Array,
    embeddings: list[jax.Array],
    contexts: list[AttentionContext],
    caches: tuple[LayerCache, ...] | None = None,
  ) -> tuple[list[jax.Array], list[Any], dict[str, jax.Array]]:
    """Returns (hidden of each depth [B, T, D], caches, aux summed over depths).

    embeddings: for depth 1, 2, …, the embedded tokens that many places ahead, each [B, T, D].
    contexts: one a depth; slots whose token ahead is in another document have segment 0 there.
    """
    cfg, dtype, D = self.cfg, jnp.dtype(self.cfg.dtype), self.cfg.hidden_size
    enorm_D = weight(self, "enorm", (D,), ("embed",), ones, cfg.param_dtype)
    hnorm_D = weight(self, "hnorm", (D,), ("embed",), ones, cfg.param_dtype)
    eh_2DD = weight(self, "eh_proj", (2 * D, D), ("embed_pair", "embed"), normal(cfg), cfg.param_dtype, dtype)
    norm_D = weight(self, "norm", (D,), ("embed",), ones, cfg.param_dtype)
    block = remat_block(cfg)(cfg, block_spec(cfg, cfg.num_hidden_layers), name="block")
    hiddens, new_caches, total = [], [], None
    for depth, (embedding_BTD, ctx) in enumerate(zip(embeddings, contexts, strict=True)):
      pair = [
        rms_norm(embedding_BTD, enorm_D, cfg.rms_norm_eps),
        rms_norm(hidden_BTD, hnorm_D, cfg.rms_norm_eps),
      ]
      u_BTD = project(jnp.concatenate(pair, axis=-1), eh_2DD, dtype)
      u_BTD, _, cache, aux = block(u_BTD, ctx, None, None if caches is None else caches[depth])
      hidden_BTD = rms_norm(u_BTD, norm_D, cfg.rms_norm_eps)
      hiddens.append(hidden_BTD)
      new_caches.append(cache)
      total = aux if total is None else jax.tree.map(jnp.add, total, aux)
    return hiddens, new_caches, total or {}
