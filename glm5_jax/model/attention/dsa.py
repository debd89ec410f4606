"""DeepSeek sparse attention: each query attends to the `index_topk` keys its indexer scores highest.

In "dense" mode (pre-training) the indexer's weights exist and rest; in "sparse" mode selection is
exact and deterministic, and no gradient passes through it or through the scores.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import (
  AttentionContext,
  AttentionOutput,
  LayerCache,
  Selection,
  query_blocks,
  visible,
  write,
)
from glm5_jax.model.attention.forms import attend_causal, attend_selected, attend_visible
from glm5_jax.model.attention.indexer import Indexer, IndexerInputs, index_scores
from glm5_jax.model.attention.latent import Latent, project_latent
from glm5_jax.parallel import spmd
from pallas_kernels.topk import topk, topk_mask

GATHER_QUERIES = 16  # up to this many queries a row, keys are gathered instead of masked


class SparseAttention(nn.Module):
  """MLA over selected keys. Source: GLM-5 report §2.1.3, DeepSeek-V3.2 report.

  A layer without an indexer (IndexShare) reuses the `selection` of the last layer that has one.
  """

  cfg: ModelConfig
  owns_indexer: bool = True

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    ctx: AttentionContext,
    selection: Selection | None = None,
    cache: LayerCache | None = None,
  ) -> AttentionOutput:
    cfg = self.cfg
    latent, cache = project_latent(self, x_BTD, ctx, cache)
    sparse = cfg.dsa_mode == "sparse" and latent.keys_BSL.shape[1] > cfg.index_topk
    keeps_keys = cache is not None and cache.index_key_BSJ is not None
    if self.owns_indexer and (sparse or keeps_keys or self.is_initializing()):
      inputs = jax.lax.stop_gradient(Indexer(cfg, name="indexer")(x_BTD, latent.q_rank_BTQ, ctx.rope))
      key_BSJ, cache = _remember(inputs.key_BTJ, ctx, cache)
      if sparse:
        selection = self._select(inputs, key_BSJ, ctx, cached=cache is not None)
    if not sparse:  # every visible key is kept: exactly dense attention
      return AttentionOutput(attend_causal(latent, ctx, cfg), selection, cache)
    if selection is None:
      raise ValueError("a shared DSA layer needs the selection of a layer before it that owns an indexer")
    self._record(selection)
    return AttentionOutput(self._attend(latent, selection, ctx), selection, cache)

  def _attend(self, latent: Latent, selection: Selection, ctx: AttentionContext) -> jax.Array:
    if selection.indices_BTK is not None:
      return attend_selected(latent, selection.indices_BTK, self.cfg)
    assert selection.masks is not None
    blocks = [(begin, end) for begin, end, _ in query_blocks(self.cfg, ctx)]
    masks = dict(zip(blocks, selection.masks, strict=True))
    return attend_visible(latent, lambda begin, end, _: masks[begin, end], ctx, self.cfg)

  def _select(
    self, inputs: IndexerInputs, key_BSJ: jax.Array, ctx: AttentionContext, cached: bool
  ) -> Selection:
    """Selected keys of every query; invisible keys score −∞ and are never selected."""
    cfg = self.cfg
    k, implementation = cfg.index_topk, cfg.topk_implementation or None

    def scores(begin: int, end: int, keys: int) -> jax.Array:
      score = index_scores(inputs.query_BTIJ[:, begin:end], inputs.gate_BTI[:, begin:end], key_BSJ[:, :keys])
      return jnp.where(visible(ctx, begin, end, keys), score, -jnp.inf)

    T, S = inputs.query_BTIJ.shape[1], key_BSJ.shape[1]
    if cached and T <= GATHER_QUERIES:
      return Selection(indices_BTK=topk(scores(0, T, S), k, implementation)[1])
    masks = []
    for begin, end, keys in query_blocks(cfg, ctx):
      # A block that sees at most k keys keeps them all, without scoring any.
      masks.append(
        visible(ctx, begin, end, keys)
        if keys <= k
        else topk_mask(scores(begin, end, keys), k, implementation)
      )
    return Selection(masks=tuple(masks))

  def _record(self, selection: Selection) -> None:
    """Sows the selected set as a mask over keys, [B, T, S], where the caller asks for intermediates."""
    if not self.is_mutable_collection("intermediates") or selection.masks is None:
      return
    widest = selection.masks[-1].shape[-1]
    padded = [jnp.pad(m, ((0, 0), (0, 0), (0, widest - m.shape[-1]))) for m in selection.masks]
    self.sow("intermediates", "selected_BTS", jnp.concatenate(padded, axis=1))


def _remember(
  key_BTJ: jax.Array, ctx: AttentionContext, cache: LayerCache | None
) -> tuple[jax.Array, LayerCache | None]:
  """(all keys to score, cache with the new ones written); without a cache of keys, the new ones alone."""
  if cache is None or cache.index_key_BSJ is None or ctx.cache_length is None:
    return spmd.gather_slots(key_BTJ), cache
  keys_BSJ = write(cache.index_key_BSJ, key_BTJ, ctx.cache_length)
  return key_BTJ if ctx.from_start else keys_BSJ, cache._replace(index_key_BSJ=keys_BSJ)
