"""Mixture of experts: route, sort rows by expert, grouped matmuls, combine. No token is dropped."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.dispatch import collect, dispatch, plan_rows, spread
from glm5_jax.model.expert_parallel import expert_parallel
from glm5_jax.model.layers import SwiGLU
from glm5_jax.model.router import expert_counts, route, sequence_balance_loss
from glm5_jax.model.weights import normal, residual, weight, zeros
from glm5_jax.parallel import spmd
from pallas_kernels.grouped_matmul import grouped_matmul, row_alignment


class Experts(nn.Module):
  """The routed experts' weights and their grouped SwiGLU.

  On a mesh with `expert` the rows travel to where their expert lives and back; with `tensor` the result is a
  part of the sum over F.
  """

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array) -> jax.Array:
    cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
    E, D, F = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
    into, out = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
    gate_EDF = weight(self, "gate_proj", (E, D, F), into, normal(cfg), cfg.param_dtype, dtype)
    up_EDF = weight(self, "up_proj", (E, D, F), into, normal(cfg), cfg.param_dtype, dtype)
    down_EFD = weight(self, "down_proj", (E, F, D), out, residual(cfg), cfg.param_dtype, dtype)
    weights = gate_EDF.astype(dtype), up_EDF.astype(dtype), down_EFD.astype(dtype)
    x_MD = x_MD.astype(dtype)
    swiglu = GroupedSwiGLU(cfg.moe_implementation)
    if spmd.size("expert") > 1:
      return expert_parallel(swiglu, weights, x_MD, experts_MK, weights_MK, E).astype(dtype)
    if _dense_is_cheaper(x_MD.shape[0], cfg):
      return _all_experts(x_MD, experts_MK, weights_MK, *weights)
    alignment = swiglu.alignment(experts_MK.size, E)
    rows = plan_rows(experts_MK, E, alignment)
    gate_rows = spread(weights_MK, rows)
    out_rows = swiglu(weights, dispatch(x_MD, rows), gate_rows, rows.group_sizes_E, alignment)
    return collect(out_rows, rows).astype(dtype)


@dataclasses.dataclass(frozen=True)
class GroupedSwiGLU:
  """down(w · silu(gate x) · up x) of rows sorted by expert, w being the router's weight of the row.

  The weight multiplies before the last product, where it costs a third of what it costs after it, and where
  its gradient needs no result of that product.
  """

  implementation: str  # of the grouped matmul; "" picks by back end

  def alignment(self, rows: int, experts: int) -> int:
    """The multiple that groups are best padded to."""
    return row_alignment(rows, experts, self.implementation or None)

  def __call__(
    self,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    x_rows: jax.Array,
    weight_rows: jax.Array,
    group_sizes_E: jax.Array,
    alignment: int,
    zero_rest: bool = True,
  ) -> jax.Array:
    """x [rows, D] → [rows, D]; float32 between the products. `zero_rest` as in grouped_matmul."""
    gate_EDF, up_EDF, down_EFD = weights

    def matmul(a, w):
      return grouped_matmul(a, w, group_sizes_E, self.implementation or None, alignment, zero_rest)

    # As one product: its backward pass then has no two gradients of x to add.
    both = matmul(x_rows, jnp.concatenate([gate_EDF, up_EDF], axis=-1))
    gate, up = (half.astype(jnp.float32) for half in jnp.split(both, 2, axis=-1))
    hidden = jax.nn.silu(gate) * up * weight_rows[:, None]
    return matmul(hidden.astype(x_rows.dtype), down_EFD)


def _dense_is_cheaper(tokens: int, cfg: ModelConfig) -> bool:
  """For a few decoded tokens on CPU, reading every expert once beats gathering the chosen ones."""
  if cfg.moe_implementation or jax.default_backend() != "cpu":
    return False
  return tokens <= 32 and cfg.n_routed_experts <= 4 * tokens * cfg.num_experts_per_tok


def _all_experts(x_MD, experts_MK, weights_MK, gate_EDF, up_EDF, down_EFD) -> jax.Array:
  """Every expert on every token, weighted 0 where not chosen."""
  E = gate_EDF.shape[0]
  chosen_MKE = experts_MK[..., None] == jnp.arange(E)
  weights_ME = jnp.sum(jnp.where(chosen_MKE, weights_MK[..., None], 0.0), axis=1)
  x_EMD = jnp.broadcast_to(x_MD, (E, *x_MD.shape))

  def matmul(a, w):
    return jnp.matmul(a, w.astype(x_MD.dtype), preferred_element_type=jnp.float32).astype(x_MD.dtype)

  hidden_EMF = jax.nn.silu(matmul(x_EMD, gate_EDF)) * matmul(x_EMD, up_EDF)
  out_EMD = matmul(hidden_EMF, down_EFD).astype(jnp.float32)
  return jnp.einsum("emd,me->md", out_EMD, weights_ME).astype(x_MD.dtype)


class MoE(nn.Module):
  """Routed experts plus the shared one, which is neither gated nor scaled."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (y_BTD, aux): aux["counts_E"] and aux["balance"], the sum over rows of the sequence loss."""
    cfg = self.cfg
    B, T, D = x_BTD.shape
    E = cfg.n_routed_experts
    router_dtype = cfg.router_param_dtype or cfg.param_dtype
    router_DE = weight(self, "router", (D, E), ("embed", "experts"), normal(cfg), router_dtype)
    bias_E = weight(self, "router_bias", (E,), ("experts",), zeros, jnp.float32)
    x_MD = x_BTD.reshape(B * T, D)
    logits_ME = jnp.dot(
      x_MD.astype(jnp.float32), router_DE.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    routing = route(logits_ME, jax.lax.stop_gradient(bias_E), cfg)
    self.sow("intermediates", "experts_BTK", routing.experts_MK.reshape(B, T, -1))
    routed_MD = Experts(cfg, name="experts")(x_MD, routing.experts_MK, routing.weights_MK)
    shared_BTD = SwiGLU(cfg, cfg.moe_intermediate_size * cfg.n_shared_experts, name="shared")(x_BTD)
    aux = {
      "counts_E": expert_counts(routing.experts_MK, valid_BT.reshape(-1), E),
      "balance": sequence_balance_loss(routing, valid_BT, cfg),
    }
    return routed_MD.reshape(B, T, D) + shared_BTD, aux
