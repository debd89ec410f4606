"""Norms, rotary positions and the SwiGLU feed-forward: the parts that every block shares."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.weights import normal, residual, weight


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) · scale over the last axis, in float32; the weight multiplies directly (no 1 + w)."""
  x32 = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
  """True LayerNorm (mean-subtracting, with bias) over the last axis, in float32; returns float32."""
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
  return centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)


def rope_tables(positions_BT: jax.Array, rope_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """cos and sin of pos · theta^(−2i/R), each [B, T, R/2] in float32.

  The frequencies are rounded once, from float64; the product is float32, as in the public
  implementations. At position 131,071 a phase is then within 0.008 rad of its float64 value.
  """
  frequency = theta ** (-np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim)
  phase_BTr = positions_BT.astype(jnp.float32)[..., None] * jnp.asarray(frequency, jnp.float32)
  return jnp.cos(phase_BTr), jnp.sin(phase_BTr)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array], interleave: bool) -> jax.Array:
  """Rotates the last axis of x [B, T, R] or [B, T, heads, R]; returns x's dtype.

  `interleave` pairs (x0,x1),(x2,x3),…; otherwise (x0,x_{R/2}),…  Either way the result lists all first
  members, then all second members: queries and keys are permuted alike, so products do not change.
  """
  cos, sin = tables
  if x.ndim == 4:
    cos, sin = cos[:, :, None], sin[:, :, None]
  x32 = x.astype(jnp.float32)
  half = x.shape[-1] // 2
  a, b = (x32[..., 0::2], x32[..., 1::2]) if interleave else (x32[..., :half], x32[..., half:])
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table_VD: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Rows of the table, [..., D] in `dtype`. Their gradients are summed in float32: a token may come often."""
  return table_VD[ids].astype(dtype)


def _embed_forward(table_VD, ids, dtype):
  return embed(table_VD, ids, dtype), (ids, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _embed_backward(dtype, saved, grad):
  del dtype
  ids, like = saved
  rows = grad.reshape(-1, grad.shape[-1]).astype(jnp.float32)
  total = jnp.zeros((like.shape[0], grad.shape[-1]), jnp.float32).at[ids.reshape(-1)].add(rows)
  return total.astype(like.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def project(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Contracts the last axis of x with the first of w; float32 accumulation, result in `dtype`.

  Both are matrices inside: the weight gradient of a product with two token axes would first copy x.
  """
  x_MK, w_KN = x.reshape(-1, x.shape[-1]), w.reshape(w.shape[0], -1)
  out_MN = jnp.dot(x_MK.astype(dtype), w_KN.astype(dtype), preferred_element_type=jnp.float32)
  return out_MN.astype(dtype).reshape(*x.shape[:-1], *w.shape[1:])


class SwiGLU(nn.Module):
  """down(silu(gate x) · up x), width F. On a mesh with `tensor`, a part of the sum over F."""

  cfg: ModelConfig
  width: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
    D, F = cfg.hidden_size, self.width
    gate_DF = weight(self, "gate_proj", (D, F), ("embed", "mlp"), normal(cfg), cfg.param_dtype, dtype)
    up_DF = weight(self, "up_proj", (D, F), ("embed", "mlp"), normal(cfg), cfg.param_dtype, dtype)
    down_FD = weight(self, "down_proj", (F, D), ("mlp", "embed"), residual(cfg), cfg.param_dtype, dtype)
    return project(jax.nn.silu(project(x, gate_DF, dtype)) * project(x, up_DF, dtype), down_FD, dtype)
