"""How well an indexer's scores tell what attention looks at: the loss that trains it, and what it recalls."""

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import AttentionContext, Selection, query_blocks, visible
from glm5_jax.model.attention.forms import absorbed_query
from glm5_jax.model.attention.indexer import IndexerInputs
from glm5_jax.model.attention.latent import Latent
from glm5_jax.parallel import spmd
from pallas_kernels.indexer_loss import indexer_loss
from pallas_kernels.topk import bits


def indexer_kl(
  inputs: IndexerInputs,
  key_BSJ: jax.Array,
  latent: Latent,
  selection: Selection | None,
  ctx: AttentionContext,
  cfg: ModelConfig,
) -> jax.Array:
  """Sum over this shard's queries of KL(attention, averaged over heads ‖ softmax of the scores), a scalar.

  Over the selected keys, or all visible ones where there is no selection. Source: DeepSeek-V3.2 report; the
  derivative by a score is softmax − attention, and nothing but the indexer is trained by it.
  """
  marked = visible_bits(ctx, cfg) if selection is None else selection.bits_BTW
  assert marked is not None
  scores = inputs.query_BTIJ, inputs.gate_BTI, key_BSJ
  name = cfg.dsa_implementation or None
  total, _ = indexer_loss(*scores, *_attention_of_all_heads(latent, cfg), marked, cfg.qk_head_dim**-0.5, name)
  return total / spmd.size("tensor")  # whose shards compute it alike


def visible_bits(ctx: AttentionContext, cfg: ModelConfig) -> jax.Array:
  """int32 [B, T, words(S)]: every key that a query sees."""
  width = bits.words(ctx.key_segments_BS.shape[1])
  blocks = [bits.pack(visible(ctx, *block)) for block in query_blocks(cfg, ctx)]
  return jnp.concatenate([jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in blocks], axis=1)


def recalled(latent: Latent, selection: Selection, ctx: AttentionContext, cfg: ModelConfig) -> jax.Array:
  """[B, T]: the share of dense attention, averaged over heads, that the selected keys hold; 0 for padding."""
  q_BNTL, keys_BSL = _attention_of_all_heads(latent, cfg)
  shares = []
  for begin, end, keys in query_blocks(cfg, ctx):
    logits_BNTS = jnp.einsum(
      "bntl,bsl->bnts", q_BNTL[:, :, begin:end], keys_BSL[:, :keys], preferred_element_type=jnp.float32
    )
    seen_BTS = visible(ctx, begin, end, keys)
    logits_BNTS = jnp.where(seen_BTS[:, None], logits_BNTS * cfg.qk_head_dim**-0.5, -1e30)
    attention_BTS = jnp.mean(jax.nn.softmax(logits_BNTS, axis=-1), axis=1)
    assert selection.bits_BTW is not None
    chosen_BTS = bits.unpack(selection.bits_BTW[:, begin:end, : bits.words(keys)], keys) & seen_BTS
    shares.append(jnp.sum(jnp.where(chosen_BTS, attention_BTS, 0.0), axis=-1))
  return jnp.concatenate(shares, axis=1)


def _attention_of_all_heads(latent: Latent, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """Detached absorbed queries [B, N, T, L], those of other shards of `tensor` too, and keys [B, S, L]."""
  q_BNTL, keys_BSL = jax.lax.stop_gradient((absorbed_query(latent, jnp.dtype(cfg.dtype)), latent.keys_BSL))
  return spmd.gather(q_BNTL, "tensor", axis=1), keys_BSL
