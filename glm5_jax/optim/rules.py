"""One entry a parameter: who trains it, and which axes make the matrices that Muon orthogonalises.

Sources: GLM-5 report §2 (Muon Split: W_UQ, W_UK and W_UV head by head), GLM-4.5 report §2.4 (Muon on
everything except embeddings, biases and norms), GLM-5 report App. A (the rest as in GLM-4.5).
Ours, where no source says: head and indexer on AdamW, embeddings and head decay, router on Muon,
experts one matrix each.
"""

import dataclasses
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.model import plan

MUON, ADAMW, ADAMW_NO_DECAY, FROZEN = "muon", "adamw", "adamw_no_decay", "frozen"


@dataclasses.dataclass(frozen=True)
class Rule:
  """How one parameter is trained.

  Axes are counted from the end, so that a leading axis of stacked layers is always a batch axis: each
  layer is orthogonalised alone.
  """

  group: str
  rank: int  # axes of one layer's weight
  split: MuonDimensionNumbers | None = None  # matrices under Muon Split
  whole: MuonDimensionNumbers | None = None  # matrices under plain Muon


def _muon(rank: int, reduction: tuple[int, ...], output: tuple[int, ...], whole=None) -> Rule:
  split = MuonDimensionNumbers(reduction, output)
  return Rule(MUON, rank, split, whole or split)


_MATRIX = _muon(2, (-2,), (-1,))
_EXPERTS = _muon(3, (-2,), (-1,))  # [E, in, out]: the expert axis is a batch
# [rank, heads, dim]: split has heads as batch, plain Muon one matrix [rank, heads · dim].
_PER_HEAD = _muon(3, (-3,), (-1,), whole=MuonDimensionNumbers((-3,), (-2, -1)))
_NORM = Rule(ADAMW_NO_DECAY, 1)
_MLP = {"gate_proj": _MATRIX, "up_proj": _MATRIX, "down_proj": _MATRIX}

# Keys are paths inside the tree's root, or inside a block. A new attention adds its weights here.
# Plain Muon takes W_UK and W_UV as two matrices over all heads, since they are two parameters here.
RULES: dict[str, Rule] = {
  "embed": Rule(ADAMW, 2),
  "head": Rule(ADAMW, 2),
  "final_norm": _NORM,
  "attn_norm": _NORM,
  "mlp_norm": _NORM,
  "attn/q_a_proj": _MATRIX,
  "attn/q_a_norm": _NORM,
  "attn/q_b_proj": _PER_HEAD,
  "attn/kv_a_proj": _MATRIX,
  "attn/kv_a_norm": _NORM,
  "attn/k_b_proj": _PER_HEAD,
  "attn/v_b_proj": _PER_HEAD,
  "attn/o_proj": _muon(3, (-3, -2), (-1,)),  # [N, H, D] is one matrix [N · H, D]
  "attn/indexer/wq_b": Rule(ADAMW, 3),
  "attn/indexer/wk": Rule(ADAMW, 2),
  "attn/indexer/weights_proj": Rule(ADAMW, 2),
  "attn/indexer/k_norm_scale": _NORM,
  "attn/indexer/k_norm_bias": Rule(ADAMW_NO_DECAY, 1),
  **{f"mlp/{name}": rule for name, rule in _MLP.items()},
  "moe/router": _MATRIX,
  "moe/router_bias": Rule(FROZEN, 1),  # moved by the load-balancing rule, never by a gradient
  **{f"moe/experts/{name}": _EXPERTS for name in _MLP},
  **{f"moe/shared/{name}": rule for name, rule in _MLP.items()},
  "mtp/enorm": _NORM,
  "mtp/hnorm": _NORM,
  "mtp/norm": _NORM,
  "mtp/eh_proj": _MATRIX,
}


def path_name(path: tuple) -> str:
  """A jax key path as "layers_3/block_0/attn/o_proj"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def rules(params: Any, cfg: ModelConfig) -> Any:
  """The tree of rules for a parameter tree (arrays or ShapeDtypeStructs).

  Raises:
    UserError: a parameter has no entry, or not the rank that its entry states.
  """
  stacked = {segment.name for segment in plan.layer_plan(cfg) if segment.stacked}

  def find(path, leaf) -> Rule:
    name = path_name(path)
    parts = name.split("/")
    if parts[0].startswith("layers_") or parts[:2] == ["mtp", "block"]:
      key = "/".join(parts[2:])
    else:
      key = name
    if key not in RULES:
      raise UserError(f"parameter {name} has no optimiser rule; add {key!r} to glm5_jax/optim/rules.py")
    rule = RULES[key]
    rank = rule.rank + (parts[0] in stacked)
    if len(leaf.shape) != rank:
      raise UserError(f"parameter {name} has shape {list(leaf.shape)}; its optimiser rule wants {rank} axes")
    return rule

  return jax.tree_util.tree_map_with_path(find, params)
