"""Attention on latents: over all earlier keys, over marked ones, over gathered ones.

The expanded form (keys and values of every head) and the absorbed one (heads share the latent) are the same
function in exact arithmetic; which is cheaper depends on how many queries share a key.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention import headmajor, splash
from glm5_jax.model.attention.context import AttentionContext, query_blocks, visible
from glm5_jax.model.attention.core import attend, attend_gathered
from glm5_jax.model.attention.head_groups import sum_over_groups
from glm5_jax.model.attention.latent import Latent
from glm5_jax.model.layers import apply_rope, project
from pallas_kernels import sparse_mla
from pallas_kernels.topk import bits

# (begin, end, keys) -> bool [B, end − begin, keys]
VisibleFn = Callable[[int, int, int], jax.Array]


def uses_kernels(cfg: ModelConfig) -> bool:
  """Whether sparse attention runs on the TPU's kernels here, interpreted or not."""
  return (cfg.dsa_implementation or ("tpu" if jax.default_backend() == "tpu" else "reference")) != "reference"


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
  segments = ctx.segments_BT, ctx.key_segments_BS

  def attend_heads(latent: Latent) -> jax.Array:
    q, (k, v) = headmajor.queries(latent.query, dtype), headmajor.keys_values(latent, dtype)
    mixed = splash.attend_causal(q, k, v, *segments, cfg.qk_head_dim**-0.5, core == "splash_interpret")
    return headmajor.output(mixed, latent, dtype)

  return sum_over_groups(attend_heads, latent, cfg.head_group)


def attend_visible(
  latent: Latent, visible_fn: VisibleFn, ctx: AttentionContext, cfg: ModelConfig
) -> jax.Array:
  """The same over the keys that `visible_fn` marks."""
  dtype = jnp.dtype(cfg.dtype)
  T, S, C = latent.q_rank_BTQ.shape[1], latent.keys_BSL.shape[1], cfg.kv_lora_rank
  scale = cfg.qk_head_dim**-0.5  # of the expanded head, in both forms
  absorbed = choose_form(cfg, T, S) == "absorbed"
  if absorbed:
    q_BNTK = absorbed_query(latent, dtype)
    k, v = latent.keys_BSL, latent.keys_BSL[..., :C]
  else:
    q_BNTK = _expanded_query(latent, dtype)
    k, v = _expanded_keys_values(latent, cfg, dtype)
  blocks = tuple(query_blocks(cfg, ctx))
  masks = tuple(visible_fn(*block) for block in blocks)
  return _output(attend(q_BNTK, k, v, masks, blocks, scale), latent, absorbed, dtype)


def attend_bits(latent: Latent, bits_BTW: jax.Array, ctx: AttentionContext, cfg: ModelConfig) -> jax.Array:
  """The same over selected keys, int32 [B, T, words(S)]."""
  if uses_kernels(cfg):
    dtype = jnp.dtype(cfg.dtype)

    def attend_heads(latent: Latent) -> jax.Array:
      q, (k, v) = headmajor.queries(latent.query, dtype), headmajor.keys_values(latent, dtype)
      name = cfg.dsa_implementation or None
      return headmajor.output(
        sparse_mla.attend_bits(q, k, v, bits_BTW, cfg.qk_head_dim**-0.5, name), latent, dtype
      )

    return sum_over_groups(attend_heads, latent, cfg.head_group)

  def selected(begin: int, end: int, keys: int) -> jax.Array:
    return bits.unpack(bits_BTW[:, begin:end, : bits.words(keys)], keys)

  return attend_visible(latent, selected, ctx, cfg)


def attend_selected(latent: Latent, indices_BTK: jax.Array, cfg: ModelConfig) -> jax.Array:
  """Attention over gathered keys [B, T, K] in absorbed form; slots of −1 are masked before they index."""
  dtype, C = jnp.dtype(cfg.dtype), cfg.kv_lora_rank
  valid_BTK = indices_BTK >= 0
  safe_BTK = jnp.where(valid_BTK, indices_BTK, 0)
  B, T, K = safe_BTK.shape
  gathered = jnp.take_along_axis(latent.keys_BSL, safe_BTK.reshape(B, T * K, 1), axis=1)
  keys_BTKL = gathered.reshape(B, T, K, -1)
  q = absorbed_query(latent, dtype)
  mixed = attend_gathered(q, keys_BTKL, keys_BTKL[..., :C], valid_BTK, cfg.qk_head_dim**-0.5)
  return _output(mixed, latent, True, dtype)


def absorbed_query(latent: Latent, dtype) -> jax.Array:
  """[B, N, T, C + R]: W_UKᵀ q_nope beside the rotated part, to be dotted with cached keys directly."""
  q_BTNP, rope_BTNR = _queries(latent, dtype)
  q_BNTC = jnp.einsum(
    "btnp,cnp->bntc", q_BTNP, latent.k_b_CNP.astype(dtype), preferred_element_type=jnp.float32
  )
  return jnp.concatenate([q_BNTC.astype(dtype), jnp.swapaxes(rope_BTNR, 1, 2)], axis=-1)


def _queries(latent: Latent, dtype) -> tuple[jax.Array, jax.Array]:
  """[B, T, N, P] and, rotated, [B, T, N, R]."""
  query, P = latent.query, latent.k_b_CNP.shape[-1]
  q_BTNK = project(query.rank_BTQ, query.up_QNK, dtype)
  return q_BTNK[..., :P], apply_rope(q_BTNK[..., P:], query.rope, query.interleave)


def _expanded_query(latent: Latent, dtype) -> jax.Array:
  """[B, N, T, P + R]."""
  return jnp.swapaxes(jnp.concatenate(_queries(latent, dtype), axis=-1), 1, 2)


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
