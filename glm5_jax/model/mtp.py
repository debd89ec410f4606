"""Multi-token prediction: one decoder layer, looped; every depth shares its weights.

Depth k at slot i: u = eh_proj · [enorm(Emb(t[i+k])) ; hnorm(h[k−1][i])], then a decoder layer, then
`norm`. h[0] is the trunk's hidden state *after* the final norm, and what the next depth receives is
after `norm`. Slot i keeps position i. Embedding and head are the trunk's.
Sources: GLM-5 report §2.1.4; checkpoint order of eh_proj as served by vLLM and SGLang.
"""

from collections.abc import Callable
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
    # XLA's scheduler for TPU makes an order of copies to the host and this loop that it then refuses itself.
    loops = self.cfg.scan_layers and self.cfg.remat != "offload"
    if caches is None and loops and len(embeddings) > 1:
      return self._scanned(hidden_BTD, embeddings, contexts)
    block = self._block()  # one, called again and again
    hiddens, new_caches, total = [], [], None
    for depth, (embedding_BTD, ctx) in enumerate(zip(embeddings, contexts, strict=True)):
      cache = None if caches is None else caches[depth]
      hidden_BTD, cache, aux = self._depth(block, hidden_BTD, embedding_BTD, ctx, cache)
      hiddens.append(hidden_BTD)
      new_caches.append(cache)
      total = aux if total is None else jax.tree.map(jnp.add, total, aux)
    return hiddens, new_caches, total or {}

  def _scanned(self, hidden_BTD, embeddings, contexts):
    """The same as a loop in the program: one depth is compiled, whatever their number."""

    def body(module, hidden_BTD, inputs):
      embedding_BTD, segments_BT = inputs
      ctx = contexts[0]._replace(segments_BT=segments_BT)  # nothing else differs between depths
      hidden_BTD, _, aux = module._depth(module._block(), hidden_BTD, embedding_BTD, ctx, None)
      return hidden_BTD, (hidden_BTD, aux)

    scanned = nn.scan(
      body,
      variable_broadcast="params",
      variable_axes={"intermediates": 0},
      split_rngs={"params": False},
    )
    inputs = jnp.stack(embeddings), jnp.stack([ctx.segments_BT for ctx in contexts])
    _, (hidden_KBTD, aux) = scanned(self, hidden_BTD, inputs)
    return list(hidden_KBTD), [None] * len(embeddings), jax.tree.map(lambda x: jnp.sum(x, axis=0), aux)

  def _block(self) -> nn.Module:
    return remat_block(self.cfg)(self.cfg, block_spec(self.cfg, self.cfg.num_hidden_layers), name="block")

  def _depth(self, block, hidden_BTD, embedding_BTD, ctx: AttentionContext, cache: LayerCache | None):
    """(hidden of this depth, cache, aux)."""
    cfg, dtype, D = self.cfg, jnp.dtype(self.cfg.dtype), self.cfg.hidden_size
    enorm_D = weight(self, "enorm", (D,), ("embed",), ones, cfg.param_dtype)
    hnorm_D = weight(self, "hnorm", (D,), ("embed",), ones, cfg.param_dtype)
    eh_2DD = weight(self, "eh_proj", (2 * D, D), ("embed_pair", "embed"), normal(cfg), cfg.param_dtype, dtype)
    norm_D = weight(self, "norm", (D,), ("embed",), ones, cfg.param_dtype)
    eps = cfg.rms_norm_eps

    def join(embedding_BTD, hidden_BTD, enorm_D, hnorm_D, eh_2DD):
      pair = [rms_norm(embedding_BTD, enorm_D, eps), rms_norm(hidden_BTD, hnorm_D, eps)]
      return project(jnp.concatenate(pair, axis=-1), eh_2DD, dtype)

    u_BTD = self._recomputed(join)(embedding_BTD, hidden_BTD, enorm_D, hnorm_D, eh_2DD)
    u_BTD, _, cache, aux = block(u_BTD, ctx, None, cache)
    hidden_BTD = self._recomputed(lambda x_BTD, scale_D: rms_norm(x_BTD, scale_D, eps))(u_BTD, norm_D)
    return hidden_BTD, cache, aux

  def _recomputed(self, fn: Callable) -> Callable:
    """What stands around the block is computed again in the backward pass wherever the block is."""
    return fn if self.cfg.remat == "none" else jax.checkpoint(fn, prevent_cse=not self.cfg.scan_layers)
