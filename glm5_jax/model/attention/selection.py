"""Which keys a query of sparse attention may see: the `index_topk` that the indexer scores highest."""

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import AttentionContext, Selection, query_blocks, visible
from glm5_jax.model.attention.forms import uses_kernels
from glm5_jax.model.attention.indexer import IndexerInputs, index_scores
from pallas_kernels import lightning_indexer
from pallas_kernels.topk import bits, topk, topk_mask

GATHER_QUERIES = 16  # up to this many queries a row, keys are gathered instead of masked


def select(
  inputs: IndexerInputs, key_BSJ: jax.Array, ctx: AttentionContext, cfg: ModelConfig, cached: bool
) -> Selection:
  """Selected keys of every query; invisible keys are never selected. No gradient passes."""
  T = inputs.query_BTIJ.shape[1]
  few = cached and T <= GATHER_QUERIES
  if not uses_kernels(cfg):
    return _few_reference(inputs, key_BSJ, ctx, cfg) if few else _many_reference(inputs, key_BSJ, ctx, cfg)
  args = (inputs.query_BTIJ, inputs.gate_BTI, key_BSJ, cfg.index_topk)
  seen = (ctx.slots_BT, ctx.segments_BT, ctx.key_segments_BS)
  name = cfg.dsa_implementation or None
  if few:
    return Selection(indices_BTK=lightning_indexer.select_indices(*args, *seen, name))
  return Selection(bits_BTW=lightning_indexer.select(*args, *seen, name))


def _few_reference(inputs, key_BSJ, ctx: AttentionContext, cfg: ModelConfig) -> Selection:
  scores_BTS = _scores(inputs, key_BSJ, ctx, 0, inputs.query_BTIJ.shape[1], key_BSJ.shape[1])
  return Selection(indices_BTK=topk(scores_BTS, cfg.index_topk, "reference")[1])


def _many_reference(inputs, key_BSJ, ctx: AttentionContext, cfg: ModelConfig) -> Selection:
  """By blocks of queries. One that sees at most k keys keeps them all, without scoring any."""
  width, k, packed = bits.words(key_BSJ.shape[1]), cfg.index_topk, []
  for begin, end, keys in query_blocks(cfg, ctx):
    if keys <= k:
      mask = visible(ctx, begin, end, keys)
    else:
      mask = topk_mask(_scores(inputs, key_BSJ, ctx, begin, end, keys), k, "reference")
    block = bits.pack(mask)
    packed.append(jnp.pad(block, ((0, 0), (0, 0), (0, width - block.shape[-1]))))
  return Selection(bits_BTW=jnp.concatenate(packed, axis=1))


def _scores(inputs, key_BSJ, ctx: AttentionContext, begin: int, end: int, keys: int) -> jax.Array:
  """[B, end − begin, keys]; −∞ where a key is invisible."""
  query_BTIJ, gate_BTI = inputs.query_BTIJ[:, begin:end], inputs.gate_BTI[:, begin:end]
  scores_BTS = index_scores(query_BTIJ, gate_BTI, key_BSJ[:, :keys])
  return jnp.where(visible(ctx, begin, end, keys), scores_BTS, -jnp.inf)
