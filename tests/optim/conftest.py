"""A parameter tree written by hand, so that these tests fail when the model's names change unnoticed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.model.plan import BlockSpec, block_spec, layer_plan


def _mlp(d, f):
  return {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def _block(cfg: ModelConfig, spec: BlockSpec):
  d, q, n, c = cfg.hidden_size, cfg.q_lora_rank, cfg.num_attention_heads, cfg.kv_lora_rank
  p, r, h = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
  i, j = cfg.index_n_heads, cfg.index_head_dim
  attn = {
    "q_a_proj": (d, q),
    "q_a_norm": (q,),
    "q_b_proj": (q, n, p + r),
    "kv_a_proj": (d, c + r),
    "kv_a_norm": (c,),
    "k_b_proj": (c, n, p),
    "v_b_proj": (c, n, h),
    "o_proj": (n, h, d),
  }
  if spec.owns_indexer:
    attn["indexer"] = {
      "wq_b": (q, i, j),
      "wk": (d, j),
      "k_norm_scale": (j,),
      "k_norm_bias": (j,),
      "weights_proj": (d, i),
    }
  block = {"attn_norm": (d,), "mlp_norm": (d,), "attn": attn}
  if not spec.moe:
    return block | {"mlp": _mlp(d, cfg.intermediate_size)}
  e, f = cfg.n_routed_experts, cfg.moe_intermediate_size
  experts = {name: (e, *shape) for name, shape in _mlp(d, f).items()}
  moe = {
    "router": (d, e),
    "router_bias": (e,),
    "experts": experts,
    "shared": _mlp(d, f * cfg.n_shared_experts),
  }
  return block | {"moe": moe}


def tree_of_shapes(cfg: ModelConfig):
  d, v = cfg.hidden_size, cfg.vocab_size
  tree = {"embed": (v, d), "head": (d, v), "final_norm": (d,)}
  for segment in layer_plan(cfg):
    lead = (segment.repeats,) if segment.stacked else ()
    blocks = {f"block_{k}": _block(cfg, spec) for k, spec in enumerate(segment.unit)}
    tree[segment.name] = jax.tree.map(
      lambda s, lead=lead: lead + s, blocks, is_leaf=lambda x: isinstance(x, tuple)
    )
  if cfg.num_nextn_predict_layers:
    block = _block(cfg, block_spec(cfg, cfg.num_hidden_layers))
    tree["mtp"] = {"enorm": (d,), "hnorm": (d,), "norm": (d,), "eh_proj": (2 * d, d), "block": block}
  return tree


@pytest.fixture
def abstract():
  def make(cfg: ModelConfig):
    dtype = jnp.dtype(cfg.param_dtype)
    return jax.tree.map(
      lambda shape: jax.ShapeDtypeStruct(shape, dtype),
      tree_of_shapes(cfg),
      is_leaf=lambda x: isinstance(x, tuple),
    )

  return make


@pytest.fixture
def random_tree():
  """Normal values for a tree of ShapeDtypeStructs."""

  def make(tree, seed: int, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, x.dtype), tree)

  return make
