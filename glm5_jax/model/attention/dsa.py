"""DeepSeek sparse attention: each query attends to the `index_topk` keys its indexer scores highest.

In "dense" mode (pre-training) the indexer's weights exist and rest; in "sparse" mode selection is exact and
deterministic, and no gradient passes through it. What trains an indexer is its own loss alone, the KL of
its scores to attention, for which its inputs are detached: see indexer_kl.
"""

import jax
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import AttentionContext, AttentionOutput, LayerCache, Selection, write
from glm5_jax.model.attention.forms import attend_bits, attend_causal, attend_selected
from glm5_jax.model.attention.indexer import Indexer
from glm5_jax.model.attention.indexer_kl import indexer_kl, recalled
from glm5_jax.model.attention.latent import Latent, project_latent
from glm5_jax.model.attention.selection import select
from glm5_jax.parallel import spmd
from pallas_kernels.topk import bits


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
    kl = None
    if self.owns_indexer and (sparse or keeps_keys or cfg.indexer_loss or self.is_initializing()):
      detached = jax.lax.stop_gradient((x_BTD, latent.q_rank_BTQ))
      inputs = Indexer(cfg, name="indexer")(*detached, ctx.rope)
      if not cfg.indexer_loss:
        inputs = jax.lax.stop_gradient(inputs)
      key_BSJ, cache = _remember(inputs.key_BTJ, ctx, cache)
      if sparse:
        selection = select(*jax.lax.stop_gradient((inputs, key_BSJ)), ctx, cfg, cached=cache is not None)
      if cfg.indexer_loss and cache is None:
        kl = indexer_kl(inputs, key_BSJ, latent, selection if sparse else None, ctx, cfg)
    if not sparse:  # every visible key is kept: exactly dense attention
      return AttentionOutput(attend_causal(latent, ctx, cfg), selection, cache, kl)
    if selection is None:
      raise ValueError("a shared DSA layer needs the selection of a layer before it that owns an indexer")
    self._record(selection, latent, ctx)
    return AttentionOutput(self._attend(latent, selection, ctx), selection, cache, kl)

  def _attend(self, latent: Latent, selection: Selection, ctx: AttentionContext) -> jax.Array:
    if selection.indices_BTK is not None:
      return attend_selected(latent, selection.indices_BTK, self.cfg)
    assert selection.bits_BTW is not None
    return attend_bits(latent, selection.bits_BTW, ctx, self.cfg)

  def _record(self, selection: Selection, latent: Latent, ctx: AttentionContext) -> None:
    """Sows, for a caller that wants intermediates, the selected set [B, T, S] and what it recalls [B, T]."""
    if not self.is_mutable_collection("intermediates") or selection.bits_BTW is None:
      return
    self.sow("intermediates", "selected_BTS", bits.unpack(selection.bits_BTW, latent.keys_BSL.shape[1]))
    self.sow("intermediates", "recalled_BT", recalled(latent, selection, ctx, self.cfg))


def _remember(
  key_BTJ: jax.Array, ctx: AttentionContext, cache: LayerCache | None
) -> tuple[jax.Array, LayerCache | None]:
  """(all keys to score, cache with the new ones written); without a cache of keys, the new ones alone."""
  if cache is None or cache.index_key_BSJ is None or ctx.cache_length is None:
    return spmd.gather_slots(key_BTJ), cache
  keys_BSJ = write(cache.index_key_BSJ, key_BTJ, ctx.cache_length)
  return key_BTJ if ctx.from_start else keys_BSJ, cache._replace(index_key_BSJ=keys_BSJ)
