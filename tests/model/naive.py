"""A dense-feed-forward trunk from the formulas alone, differentiable, in whatever precision its inputs have.

What each layer attends to is handed in as a mask, so that one formula judges every attention kind: all
[T, S] probabilities exist, rows that see nothing give 0, and gradients are JAX's own.
"""

import jax
import jax.numpy as jnp


def hidden(weights, tokens_BT, positions_BT, masks, cfg):
  """After the final norm, [B, T, D]. weights: unrolled tree; masks: bool [B, T, S] of each layer."""
  x = weights["embed"][tokens_BT]
  for layer, mask_BTS in enumerate(masks):
    block = weights[f"layers_{layer}"]["block_0"]
    x = x + attention(
      block["attn"], norm(x, block["attn_norm"], cfg.rms_norm_eps), positions_BT, mask_BTS, cfg
    )
    h, mlp = norm(x, block["mlp_norm"], cfg.rms_norm_eps), block["mlp"]
    gate = h @ mlp["gate_proj"]
    x = x + (gate / (1 + jnp.exp(-gate)) * (h @ mlp["up_proj"])) @ mlp["down_proj"]
  return norm(x, weights["final_norm"], cfg.rms_norm_eps)


def attention(w, h, positions_BT, mask_BTS, cfg):
  """Expanded MLA over the keys of `mask_BTS`."""
  P, C = cfg.qk_nope_head_dim, cfg.kv_lora_rank
  q = jnp.einsum("btq,qnk->btnk", norm(h @ w["q_a_proj"], w["q_a_norm"], cfg.lora_norm_eps), w["q_b_proj"])
  kv = h @ w["kv_a_proj"]
  c = norm(kv[..., :C], w["kv_a_norm"], cfg.lora_norm_eps)
  k_rope = rotate(kv[..., None, C:], positions_BT, cfg.rope_theta)[:, :, 0]
  q_rope = rotate(q[..., P:], positions_BT, cfg.rope_theta)
  scores = jnp.einsum("btnp,bsnp->bnts", q[..., :P], jnp.einsum("bsc,cnp->bsnp", c, w["k_b_proj"]))
  scores = (scores + jnp.einsum("btnr,bsr->bnts", q_rope, k_rope)) / jnp.sqrt(P + cfg.qk_rope_head_dim)
  sees_something = mask_BTS.any(-1, keepdims=True)
  allowed = (mask_BTS | ~sees_something)[:, None]
  probability = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
  probability = jnp.where(sees_something[:, None], probability, 0)
  mixed = jnp.einsum("bnts,bsc,cnh->btnh", probability, c, w["v_b_proj"])
  return jnp.einsum("btnh,nhd->btd", mixed, w["o_proj"])


def rotate(x_BTNR, positions_BT, theta):
  """Interleaved pairs."""
  R = x_BTNR.shape[-1]
  angle = positions_BT[..., None, None] * theta ** (-jnp.arange(0, R, 2).astype(x_BTNR.dtype) / R)
  a, b = x_BTNR[..., 0::2], x_BTNR[..., 1::2]
  turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
  return jnp.stack(turned, axis=-1).reshape(x_BTNR.shape)


def norm(x, scale, eps):
  return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale
