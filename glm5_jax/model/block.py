"""One decoder layer, and a unit of them that is repeated by a scan."""

from typing import Any

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention import ATTENTION, splash
from glm5_jax.model.attention.context import AttentionContext, LayerCache, Selection
from glm5_jax.model.layers import SwiGLU, rms_norm
from glm5_jax.model.moe import MoE
from glm5_jax.model.plan import BlockSpec
from glm5_jax.model.weights import ones, weight
from glm5_jax.parallel import spmd
from pallas_kernels import sparse_mla

Aux = dict[str, jax.Array]

# Names of activations that a rematerialisation policy may keep or move.
INPUT, ATTENDED = "block_input", "block_attended"


class Block(nn.Module):
  """x += Attention(RMSNorm(x)); x += FeedForward(RMSNorm(x))."""

  cfg: ModelConfig
  spec: BlockSpec

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    ctx: AttentionContext,
    selection: Selection | None = None,
    cache: LayerCache | None = None,
  ) -> tuple[jax.Array, Selection | None, LayerCache | None, Aux]:
    cfg, spec, D = self.cfg, self.spec, self.cfg.hidden_size
    x_BTD = checkpoint_name(x_BTD, INPUT)
    attn_norm_D = weight(self, "attn_norm", (D,), ("embed",), ones, cfg.param_dtype)
    mlp_norm_D = weight(self, "mlp_norm", (D,), ("embed",), ones, cfg.param_dtype)
    with jax.named_scope("attention"):
      attention = ATTENTION[spec.attention](cfg, spec.owns_indexer, name="attn")
      attended = attention(rms_norm(x_BTD, attn_norm_D, cfg.rms_norm_eps), ctx, selection, cache)
      x_BTD = checkpoint_name(x_BTD + spmd.psum(attended.out_BTD, ("tensor",)), ATTENDED)
    h_BTD = rms_norm(x_BTD, mlp_norm_D, cfg.rms_norm_eps)
    aux: Aux = {} if attended.indexer_kl is None else {"indexer_kl": attended.indexer_kl}
    with jax.named_scope("feed_forward"):
      if spec.moe:
        y_BTD, moe_aux = MoE(cfg, name="moe")(h_BTD, ctx.segments_BT != 0)
        aux |= moe_aux
      else:
        y_BTD = SwiGLU(cfg, cfg.intermediate_size, name="mlp")(h_BTD)
    x_BTD = x_BTD + spmd.psum(y_BTD, ("tensor",))
    self.sow("intermediates", "output_BTD", x_BTD)
    return x_BTD, attended.selection, attended.cache, aux


class Unit(nn.Module):
  """A few unlike blocks in a row: what a segment repeats."""

  cfg: ModelConfig
  specs: tuple[BlockSpec, ...]

  @nn.compact
  def __call__(
    self,
    carry: tuple[jax.Array, Selection | None],
    caches: tuple[LayerCache | None, ...],
    ctx: AttentionContext,
  ) -> tuple[tuple[jax.Array, Selection | None], tuple[tuple[LayerCache | None, ...], dict[str, Aux]]]:
    x_BTD, selection = carry
    block_class = remat_block(self.cfg)
    new_caches, aux = [], {}
    for j, (spec, cache) in enumerate(zip(self.specs, caches, strict=True)):
      block = block_class(self.cfg, spec, name=f"block_{j}")
      x_BTD, chosen, cache, aux[f"block_{j}"] = block(x_BTD, ctx, selection, cache)
      selection = None if selection is None else chosen
      new_caches.append(cache)
    return (x_BTD, selection), (tuple(new_caches), aux)


def remat_block(cfg: ModelConfig) -> Any:
  """Block, wrapped by the config's rematerialisation policy, a name of REMAT."""
  if cfg.remat == "none":
    return Block
  return nn.remat(Block, policy=REMAT[cfg.remat], prevent_cse=not cfg.scan_layers)


_policies = jax.checkpoint_policies
# What the backward pass is given; it computes the rest again.
REMAT: dict[str, Any] = {
  "full": None,  # each layer's input
  "dots": _policies.dots_with_no_batch_dims_saveable,  # and the results of matmuls with weights
  # And what attention returned.
  "attention": _policies.save_only_these_names(INPUT, ATTENDED, splash.RESULT, sparse_mla.RESULT),
  "offload": _policies.save_and_offload_only_these_names(  # each layer's input, in the host's memory
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[INPUT],
    offload_src="device",
    offload_dst="pinned_host",
  ),
}
