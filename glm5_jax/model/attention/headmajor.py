"""Expanded queries, keys and values as kernels want them, [B, N, T, ·], with no copy on the way.

On TPU an array lies in tiles over its last two axes. To split N · K into heads, to exchange time and heads,
to take 192 of 256 lanes or every second one: each is a copy of everything. A matmul writes its heads in front
for nothing, and moves lanes for next to nothing when the numbers that move are multiplied by constants; such
a product is exact, for each of its sums has one term.
"""

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.model.attention.latent import Latent, Query

EXACT = jax.lax.Precision.HIGHEST  # matters to float32 only


def queries(query: Query, dtype: jnp.dtype) -> jax.Array:
  """[B, N, T, P + R], the last R rotated; as `apply_rope` orders them."""
  q_BNTK = _dot("btq,qnk->bntk", query.rank_BTQ, query.up_QNK, dtype)
  cos, sin = query.rope
  K, R = q_BNTK.shape[-1], 2 * cos.shape[-1]
  straight_KK, turned_KK = _rotation(K, R, query.interleave)
  cos_BTK = jnp.pad(jnp.concatenate([cos, cos], axis=-1), ((0, 0), (0, 0), (K - R, 0)), constant_values=1)
  sin_BTK = jnp.pad(jnp.concatenate([sin, sin], axis=-1), ((0, 0), (0, 0), (K - R, 0)))

  def moved(by_KK: np.ndarray) -> jax.Array:
    by = jnp.asarray(by_KK, dtype)
    return jnp.einsum("bntk,kj->bntj", q_BNTK, by, precision=EXACT, preferred_element_type=jnp.float32)

  return (moved(straight_KK) * cos_BTK[:, None] + moved(turned_KK) * sin_BTK[:, None]).astype(dtype)


def keys_values(latent: Latent, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
  """[B, N, S, P + R] and [B, N, S, H]; the rotated key passes to every head through an identity."""
  C, N, _ = latent.k_b_CNP.shape
  R = latent.keys_BSL.shape[-1] - C
  into_all_RNR = jnp.broadcast_to(jnp.eye(R, dtype=dtype)[:, None], (R, N, R))
  k_b_LNP = jnp.pad(latent.k_b_CNP.astype(dtype), ((0, R), (0, 0), (0, 0)))
  rope_LNR = jnp.pad(into_all_RNR, ((C, 0), (0, 0), (0, 0)))
  up_LNK = jnp.concatenate([k_b_LNP, rope_LNR], axis=-1)
  k_BNSK = _dot("bsl,lnk->bnsk", latent.keys_BSL, up_LNK, dtype)
  v_BNSH = _dot("bsc,cnh->bnsh", latent.keys_BSL[..., :C], latent.v_b_CNH, dtype)
  return k_BNSK, v_BNSH


def output(mixed_BNTH: jax.Array, latent: Latent, dtype: jnp.dtype) -> jax.Array:
  """[B, T, D]."""
  return _dot("bnth,nhd->btd", mixed_BNTH, latent.o_NHD, dtype)


def _dot(spec: str, x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
  return jnp.einsum(spec, x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32).astype(dtype)


def _rotation(width: int, rope_dim: int, interleave: bool) -> tuple[np.ndarray, np.ndarray]:
  """Matrices [K, K]: q @ first is what cos multiplies, q @ second what sin does. All but the last R rest."""
  straight, turned = np.eye(width), np.zeros((width, width))
  begin, half = width - rope_dim, rope_dim // 2
  straight[begin:, begin:] = 0
  for i in range(half):
    a, b = (2 * i, 2 * i + 1) if interleave else (i, half + i)
    straight[begin + a, begin + i] = straight[begin + b, begin + half + i] = 1
    turned[begin + b, begin + i], turned[begin + a, begin + half + i] = -1, 1
  return straight, turned
