"""The parameter tree: made, described and counted from the model's own declarations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.glm5 import GLM5

Tree = dict[str, Any]


def _boxed(cfg: ModelConfig) -> Tree:
  """Abstract parameters with their logical axes; traces the model once on one short row."""
  tokens_BT = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  return jax.eval_shape(GLM5(cfg).init, jax.random.key(0), tokens_BT)["params"]


def init_params(cfg: ModelConfig, key: jax.Array) -> Tree:
  """Fresh parameters, in `param_dtype`. Under jit nothing but the initialisers remains."""
  # On CPU a program that runs once is not worth optimising: it would compile three times as long. Inside a
  # caller's jit there is no program of our own.
  alone = jax.default_backend() == "cpu" and not isinstance(key, jax.core.Tracer)
  init = jax.jit(GLM5(cfg).init, compiler_options={"xla_backend_optimization_level": 0} if alone else None)
  return nn.unbox(init(key, jnp.zeros((1, 8), jnp.int32))["params"])


def abstract_params(cfg: ModelConfig) -> Tree:
  """The tree as ShapeDtypeStructs; no array is made."""
  return nn.unbox(_boxed(cfg))


def logical_axes(cfg: ModelConfig) -> Tree:
  """The tree with each weight's logical axes, a PartitionSpec of names such as ("embed", "mlp")."""
  return nn.get_partition_spec(_boxed(cfg))


def count_params(cfg: ModelConfig) -> dict[str, int]:
  """Numbers of parameters, counted from abstract shapes.

  total: main model with embedding and head; without_embeddings: less those two; mtp: the MTP layer;
  active: used per token without embeddings; active_with_head: plus the head. The indexer counts, the
  selection biases do not: they are statistics of the router, kept outside the optimiser.
  """

  def size(tree: Tree) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sum(
      math.prod(leaf.shape) for path, leaf in leaves if "router_bias" not in jax.tree_util.keystr(path)
    )

  params = abstract_params(cfg)
  mtp = size(params.pop("mtp", {}))
  total = size(params)
  outer = size({name: params[name] for name in ("embed", "head") if name in params})
  experts = sum(
    size(block["moe"]["experts"])
    for name, segment in params.items()
    if name.startswith("layers_")
    for block in segment.values()
    if "moe" in block
  )
  idle = experts - experts * cfg.num_experts_per_tok // cfg.n_routed_experts
  active = total - outer - idle
  return {
    "total": total,
    "without_embeddings": total - outer,
    "mtp": mtp,
    "active": active,
    "active_with_head": active + cfg.hidden_size * cfg.vocab_size,
  }
