"""The lightning indexer: a cheap score of every key for every query, one selection for all heads.

I[t, s] = Σ_j w[t, j] · ReLU(q_j[t] · k[s] / √J), with w = h · W_w / √I. Source: DeepSeek-V3.2 report;
GLM-5 rotates the first R of the J dims, interleaved, and normalises keys with a true LayerNorm.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.layers import apply_rope, layer_norm, project
from glm5_jax.model.weights import normal, ones, weight, zeros

K_NORM_EPS = 1e-6  # of the key LayerNorm, whatever the model's rms_norm_eps


class IndexerInputs(NamedTuple):
  """What scoring needs, queries and keys in `index_dtype`; the scales of the formula are in `gate_BTI`."""

  query_BTIJ: jax.Array
  gate_BTI: jax.Array
  key_BTJ: jax.Array


class Indexer(nn.Module):
  """Projects the layer's input to indexer queries, gates and keys.

  Args of the call: h_BTD, the layer's normed input; q_rank_BTQ, the query latent *after* its norm;
  rope tables for the first R dims. Everything is float32, bfloat16 gates flip selections; only the results
  are rounded to the config's `index_dtype`, to which the matrix unit is six times as fast.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, h_BTD, q_rank_BTQ, rope) -> IndexerInputs:
    cfg = self.cfg
    D, Q, I, J = cfg.hidden_size, cfg.q_lora_rank, cfg.index_n_heads, cfg.index_head_dim
    init, store = normal(cfg), cfg.param_dtype
    wq_QIJ = weight(self, "wq_b", (Q, I, J), ("q_rank", "index_heads", "index_dim"), init, store)
    wk_DJ = weight(self, "wk", (D, J), ("embed", "index_dim"), init, store)
    k_scale_J = weight(self, "k_norm_scale", (J,), ("index_dim",), ones, store)
    k_bias_J = weight(self, "k_norm_bias", (J,), ("index_dim",), zeros, store)
    gate_DI = weight(self, "weights_proj", (D, I), ("embed", "index_heads"), init, store)
    float32 = jnp.dtype(jnp.float32)
    query_BTIJ = project(q_rank_BTQ, wq_QIJ, float32)
    key_BTJ = layer_norm(project(h_BTD, wk_DJ, float32), k_scale_J, k_bias_J, K_NORM_EPS)
    gate_BTI = project(h_BTD, gate_DI, float32) / math.sqrt(I * J)  # √I of w and √J inside the ReLU
    query_BTIJ, key_BTJ = (self._rotate(x, rope).astype(cfg.index_dtype) for x in (query_BTIJ, key_BTJ))
    return IndexerInputs(query_BTIJ, gate_BTI, key_BTJ)

  def _rotate(self, x: jax.Array, rope) -> jax.Array:
    R = self.cfg.qk_rope_head_dim
    rotated = apply_rope(x[..., :R], rope, self.cfg.indexer_rope_interleave)
    return jnp.concatenate([rotated, x[..., R:]], axis=-1)


def index_scores(query_BTIJ: jax.Array, gate_BTI: jax.Array, key_BSJ: jax.Array) -> jax.Array:
  """Scores [B, T, S] in float32; heads are summed one after another, so that [I, T, S] never exists."""

  def add_head(score_BTS, head):
    query_BTJ, gate_BT = head
    dots_BTS = jnp.einsum("btj,bsj->bts", query_BTJ, key_BSJ, preferred_element_type=jnp.float32)
    return score_BTS + jax.nn.relu(dots_BTS) * gate_BT[..., None], None

  B, T, _, _ = query_BTIJ.shape
  heads = (jnp.moveaxis(query_BTIJ, 2, 0), jnp.moveaxis(gate_BTI, 2, 0))
  return jax.lax.scan(add_head, jnp.zeros((B, T, key_BSJ.shape[1]), jnp.float32), heads)[0]
