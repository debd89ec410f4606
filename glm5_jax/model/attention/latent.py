"""Multi-head latent attention: projections, the expanded and the absorbed form.

Source: specification of MLA-256 (GLM-5 report §2.1, DeepSeek-V2). Both forms are the same function in
exact arithmetic; which is cheaper depends on how many queries share a key.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention import splash
from glm5_jax.model.attention.context import AttentionContext, LayerCache, query_blocks, visible, write
from glm5_jax.model.attention.core import attend, attend_gathered
from glm5_jax.model.layers import apply_rope, project, rms_norm
from glm5_jax.model.weights import normal, ones, residual, weight
from glm5_jax.parallel import spmd

# (begin, end, keys) -> bool [B, end − begin, keys]
VisibleFn = Callable[[int, int, int], jax.Array]


class Latent(NamedTuple):
  """What the projections of one layer hand to its attention."""

  q_rank_BTQ: jax.Array  # query latent, after its norm; also the indexer's input
  q_nope_BTNP: jax.Array
  q_rope_BTNR: jax.Array  # rotated
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
  q_BTNK = project(q_rank_BTQ, q_b_QNK, dtype)
  kv_BTL = project(x_BTD, kv_a_DL, dtype)
  latent_BTC = rms_norm(kv_BTL[..., :C], kv_norm_C, cfg.lora_norm_eps)
  k_rope_BTR = apply_rope(kv_BTL[..., C:], ctx.rope, cfg.rope_interleave)  # not normalised
  keys = spmd.gather_slots(jnp.concatenate([latent_BTC, k_rope_BTR], axis=-1))
  if cache is not None and ctx.cache_length is not None:
    cache = cache._replace(latent_BSL=write(cache.latent_BSL, keys, ctx.cache_length))
    keys = keys if ctx.from_start else cache.latent_BSL.astype(dtype)
  q_rope_BTNR = apply_rope(q_BTNK[..., P:], ctx.rope, cfg.rope_interleave)
  return Latent(q_rank_BTQ, q_BTNK[..., :P], q_rope_BTNR, keys, k_b_CNP, v_b_CNH, o_NHD), cache


def choose_form(cfg: ModelConfig, queries: int, keys: int) -> str:
  """ "expanded" or "absorbed": the config's, or whichever needs fewer multiplications at this shape."""
  if cfg.mla_form != "auto":
    return cfg.mla_form
  C, R, P, H = cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.qk_nope_head_dim, cfg.v_head_dim
  expanded = queries * keys * (P + R + H) + keys * C * (P + H)
  absorbed = queries * keys * (2 * C + R) + queries * C * (P + H)
  return "absorbed" if absorbed < expanded else "expanded"


def attend_causal(latent: Latent, ctx: AttentionContext, cfg: ModelConfig) -> jax.Array:
  """Softmax attention over all earlier keys of the query's document; returns the block's output [B, T, D].

  On a mesh with `tensor`, a part of the sum over heads.
  """
  T, S = ctx.slots_BT.shape[1], ctx.key_segments_BS.shape[1]
  core = cfg.attention_implementation or ("splash" if jax.default_backend() == "tpu" else "reference")
  if core == "reference" or ctx.cache_length is not None or not splash.fits(T, S):
    return attend_visible(latent, functools.partial(visible, ctx), ctx, cfg)
  dtype = jnp.dtype(cfg.dtype)
  k, v = _expanded_keys_values(latent, cfg, dtype)
  segments = ctx.segments_BT, ctx.key_segments_BS
  scale = cfg.qk_head_dim**-0.5
  mixed = splash.attend_causal(_expanded_query(latent), k, v, *segments, scale, core == "splash_interpret")
  return _output(mixed, latent, False, dtype)


def attend_visible(
  latent: Latent, visible_fn: VisibleFn, ctx: AttentionContext, cfg: ModelConfig
) -> jax.Array:
  """The same over the keys that `visible_fn` marks."""
  dtype = jnp.dtype(cfg.dtype)
  T, S, C = latent.q_nope_BTNP.shape[1], latent.keys_BSL.shape[1], cfg.kv_lora_rank
  scale = cfg.qk_head_dim**-0.5  # of the expanded head, in both forms
  absorbed = choose_form(cfg, T, S) == "absorbed"
  if absorbed:
    q_BNTK = _absorbed_query(latent, dtype)
    k, v = latent.keys_BSL, latent.keys_BSL[..., :C]
  else:
    q_BNTK = _expanded_query(latent)
    k, v = _expanded_keys_values(latent, cfg, dtype)
  blocks = tuple(query_blocks(cfg, ctx))
  masks = tuple(visible_fn(*block) for block in blocks)
  return _output(attend(q_BNTK, k, v, masks, blocks, scale), latent, absorbed, dtype)


def attend_selected(latent: Latent, indices_BTK: jax.Array, cfg: ModelConfig) -> jax.Array:
  """Attention over gathered keys [B, T, K] in absorbed form; slots of −1 are masked before they index."""
  dtype, C = jnp.dtype(cfg.dtype), cfg.kv_lora_rank
  valid_BTK = indices_BTK >= 0
  safe_BTK = jnp.where(valid_BTK, indices_BTK, 0)
  B, T, K = safe_BTK.shape
  gathered = jnp.take_along_axis(latent.keys_BSL, safe_BTK.reshape(B, T * K, 1), axis=1)
  keys_BTKL = gathered.reshape(B, T, K, -1)
  q = _absorbed_query(latent, dtype)
  mixed = attend_gathered(q, keys_BTKL, keys_BTKL[..., :C], valid_BTK, cfg.qk_head_dim**-0.5)
  return _output(mixed, latent, True, dtype)


def _expanded_query(latent: Latent) -> jax.Array:
  """[B, N, T, P + R]."""
  return jnp.swapaxes(jnp.concatenate([latent.q_nope_BTNP, latent.q_rope_BTNR], axis=-1), 1, 2)


def _absorbed_query(latent: Latent, dtype) -> jax.Array:
  """[B, N, T, C + R]: W_UKᵀ q_nope beside the rotated part, to be dotted with cached keys directly."""
  q_BNTC = jnp.einsum(
    "btnp,cnp->bntc",
    latent.q_nope_BTNP,
    latent.k_b_CNP.astype(dtype),
    preferred_element_type=jnp.float32,
  )
  return jnp.concatenate([q_BNTC.astype(dtype), jnp.swapaxes(latent.q_rope_BTNR, 1, 2)], axis=-1)


def _expanded_keys_values(latent: Latent, cfg: ModelConfig, dtype) -> tuple[jax.Array, jax.Array]:
  """[B, N, S, P + R] and [B, N, S, H] from the latent; the rotated key is shared by all heads."""
  c_BSC, rope_BSR = latent.keys_BSL[..., : cfg.kv_lora_rank], latent.keys_BSL[..., cfg.kv_lora_rank :]
  k_BSNP, v_BSNH = project(c_BSC, latent.k_b_CNP, dtype), project(c_BSC, latent.v_b_CNH, dtype)
  B, S, R = rope_BSR.shape
  rope_BSNR = jnp.broadcast_to(rope_BSR[:, :, None], (B, S, k_BSNP.shape[2], R))
  k_BSNK = jnp.concatenate([k_BSNP, rope_BSNR], axis=-1)
  return jnp.swapaxes(k_BSNK, 1, 2), jnp.swapaxes(v_BSNH, 1, 2)


def _output(mixed_BNTX, latent: Latent, absorbed: bool, dtype) -> jax.Array:
  """Mixed values [B, N, T, C] (absorbed) or [B, N, T, H] → [B, T, D]."""
  if absorbed:
    mixed_BTNH = jnp.einsum(
      "bntc,cnh->btnh", mixed_BNTX, latent.v_b_CNH.astype(dtype), preferred_element_type=jnp.float32
    ).astype(dtype)
  else:
    mixed_BTNH = jnp.swapaxes(mixed_BNTX, 1, 2)
  B, T, N, H = mixed_BTNH.shape
  return project(mixed_BTNH.reshape(B, T, N * H), latent.o_NHD.reshape(N * H, -1), dtype)
