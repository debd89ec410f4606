"""Multi-head latent attention: its weights, and the projections that all forms of it start from.

Source: specification of MLA-256 (GLM-5 report §2.1, DeepSeek-V2).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.model.attention.context import AttentionContext, LayerCache, write
from glm5_jax.model.layers import apply_rope, project, rms_norm
from glm5_jax.model.weights import normal, ones, residual, weight
from glm5_jax.parallel import spmd


class Query(NamedTuple):
  """What every form makes its queries of, in the order of axes that it wants."""

  rank_BTQ: jax.Array  # query latent, after its norm
  up_QNK: jax.Array
  rope: tuple[jax.Array, jax.Array]  # of the last R of K
  interleave: bool


class Latent(NamedTuple):
  """What the projections of one layer hand to its attention."""

  q_rank_BTQ: jax.Array  # query latent, after its norm: the indexer's input
  query: Query
  keys_BSL: jax.Array  # normalised latent ‖ rotated shared key, over all keys (cached ones included)
  k_b_CNP: jax.Array  # W_UK
  v_b_CNH: jax.Array  # W_UV
  o_NHD: jax.Array


def project_latent(
  module: nn.Module, x_BTD: jax.Array, ctx: AttentionContext, cache: LayerCache | None
) -> tuple[Latent, LayerCache | None]:
  """Declares MLA's weights on `module` and projects x up to queries and latent keys.

  With a cache the new keys are written to it, and the returned keys are all of its slots.
  """
  cfg, dtype = module.cfg, jnp.dtype(module.cfg.dtype)
  D, N, Q, C = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
  P, R, H = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
  init, store = normal(cfg), cfg.param_dtype
  q_a_DQ = weight(module, "q_a_proj", (D, Q), ("embed", "q_rank"), init, store, dtype)
  q_norm_Q = weight(module, "q_a_norm", (Q,), ("q_rank",), ones, store)
  q_b_QNK = weight(module, "q_b_proj", (Q, N, P + R), ("q_rank", "heads", "head_dim"), init, store, dtype)
  kv_a_DL = weight(module, "kv_a_proj", (D, C + R), ("embed", "kv_rank"), init, store, dtype)
  kv_norm_C = weight(module, "kv_a_norm", (C,), ("kv_rank",), ones, store)
  k_b_CNP = weight(module, "k_b_proj", (C, N, P), ("kv_rank", "heads", "head_dim"), init, store, dtype)
  v_b_CNH = weight(module, "v_b_proj", (C, N, H), ("kv_rank", "heads", "head_dim"), init, store, dtype)
  o_NHD = weight(module, "o_proj", (N, H, D), ("heads", "head_dim", "embed"), residual(cfg), store, dtype)

  q_rank_BTQ = rms_norm(project(x_BTD, q_a_DQ, dtype), q_norm_Q, cfg.lora_norm_eps)
  kv_BTL = project(x_BTD, kv_a_DL, dtype)
  latent_BTC = rms_norm(kv_BTL[..., :C], kv_norm_C, cfg.lora_norm_eps)
  k_rope_BTR = apply_rope(kv_BTL[..., C:], ctx.rope, cfg.rope_interleave)  # not normalised
  keys = spmd.gather_slots(jnp.concatenate([latent_BTC, k_rope_BTR], axis=-1))
  if cache is not None and ctx.cache_length is not None:
    cache = cache._replace(latent_BSL=write(cache.latent_BSL, keys, ctx.cache_length))
    keys = keys if ctx.from_start else cache.latent_BSL.astype(dtype)
  query = Query(q_rank_BTQ, q_b_QNK, ctx.rope, cfg.rope_interleave)
  return Latent(q_rank_BTQ, query, keys, k_b_CNP, v_b_CNH, o_NHD), cache
