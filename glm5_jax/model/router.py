"""Which experts a token goes to, with what weight, and what keeps the load even.

Source: DeepSeek-V3 / GLM-4.5 reports (sigmoid gate, selection bias, group limits, sequence loss).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.parallel import spmd

ROW = ("context",)  # the mesh axis that a row's tokens are dealt over


class Routing(NamedTuple):
  experts_MK: jax.Array  # int32, by falling choice score; ties to the lowest id
  weights_MK: jax.Array  # float32
  score_ME: jax.Array  # sigmoid of the logits, without bias
  share_ME: jax.Array  # score / Σ score over all experts


def route(logits_ME: jax.Array, bias_E: jax.Array, cfg: ModelConfig) -> Routing:
  """Picks K experts of E from float32 router logits.

  Selection uses score + bias, limited to the best groups; weights use the score alone. NaN counts as
  −∞, and a row without any finite choice goes to the lowest ids.
  """
  score_ME = jax.nn.sigmoid(logits_ME)
  choice_ME = jax.lax.stop_gradient(score_ME) + bias_E.astype(jnp.float32)
  choice_ME = jnp.where(jnp.isnan(choice_ME), -jnp.inf, choice_ME)
  if cfg.n_group > 1:
    choice_ME = _keep_best_groups(choice_ME, cfg)
  _, experts_MK = jax.lax.top_k(choice_ME, cfg.num_experts_per_tok)
  chosen_MK = jnp.take_along_axis(logits_ME, experts_MK, axis=-1)
  if cfg.norm_topk_prob:
    # σ / Σσ of the chosen, as a softmax of log σ: finite with finite gradients for any logits.
    weights_MK = jax.nn.softmax(jax.nn.log_sigmoid(chosen_MK), axis=-1)
  else:
    weights_MK = jax.nn.sigmoid(chosen_MK)
  share_ME = jax.nn.softmax(jax.nn.log_sigmoid(logits_ME), axis=-1)  # the same, over all experts
  return Routing(experts_MK, weights_MK * cfg.routed_scaling_factor, score_ME, share_ME)


def _keep_best_groups(choice_ME: jax.Array, cfg: ModelConfig) -> jax.Array:
  """−∞ outside the `topk_group` groups whose two best choices sum highest."""
  M, E = choice_ME.shape
  grouped_MGE = choice_ME.reshape(M, cfg.n_group, E // cfg.n_group)
  best_two = jax.lax.top_k(grouped_MGE, min(2, E // cfg.n_group))[0]
  _, kept = jax.lax.top_k(best_two.sum(-1), cfg.topk_group)
  keep_MG = jnp.any(kept[:, :, None] == jnp.arange(cfg.n_group), axis=1)
  return jnp.where(keep_MG[:, :, None], grouped_MGE, -jnp.inf).reshape(M, E)


def expert_counts(experts_MK: jax.Array, valid_M: jax.Array, n_experts: int) -> jax.Array:
  """How many (token, slot) pairs each expert received, float32 [E]; padding does not count.

  On a mesh, of this shard's tokens.
  """
  chosen_ME = jnp.any(experts_MK[:, :, None] == jnp.arange(n_experts), axis=1)
  return jnp.sum(chosen_ME & valid_M[:, None], axis=0, dtype=jnp.float32)


def sequence_balance_loss(routing: Routing, valid_BT: jax.Array, cfg: ModelConfig) -> jax.Array:
  """Σ_rows Σ_e f_e · P_e, to be divided by the number of rows and scaled by α by the caller.

  f_e = E / (K · T) · count_e carries no gradient; P_e is the mean of the normalised scores. On a mesh the
  shards of a row sum up before they multiply, and each returns its share of the result.
  """
  B, T = valid_BT.shape
  E, K = cfg.n_routed_experts, cfg.num_experts_per_tok
  valid_BT1 = valid_BT[..., None].astype(jnp.float32)
  tokens_B1 = jnp.maximum(spmd.psum(jnp.sum(valid_BT1, axis=1), ROW), 1.0)
  chosen_BTE = jnp.any(routing.experts_MK.reshape(B, T, K, 1) == jnp.arange(E), axis=2)
  count_BE = spmd.psum(jnp.sum(chosen_BTE * valid_BT1, axis=1), ROW)
  fraction_BE = jax.lax.stop_gradient(E / (K * tokens_B1) * count_BE)
  mean_share_BE = spmd.psum(jnp.sum(routing.share_ME.reshape(B, T, E) * valid_BT1, axis=1), ROW) / tokens_B1
  return jnp.sum(fraction_BE * mean_share_BE) / spmd.size("context", "tensor")


def update_bias(bias: jax.Array, counts: jax.Array, rate: jax.Array | float) -> jax.Array:
  """b_e += γ · sign(mean(count) − count_e), counts [..., E] summed over the whole global batch."""
  mean = jnp.mean(counts, axis=-1, keepdims=True)
  return bias + rate * jnp.sign(mean - counts).astype(bias.dtype)


def load_violation(counts: jax.Array) -> jax.Array:
  """max(count) / mean(count) − 1 over the last axis: 0 is perfect balance."""
  mean = jnp.maximum(jnp.mean(counts, axis=-1), 1e-9)
  return jnp.max(counts, axis=-1) / mean - 1.0
