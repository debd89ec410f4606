"""Losses of the two stages that turn a dense model into a sparse one. Source: DeepSeek-V3.2 report §2.1.

Warm-up: attention is dense and nothing but the indexers trains. Sparse stage: everything trains, the model
by its own loss, the indexers by theirs, whose inputs are detached. Either way an indexer's loss is the mean
over queries of its KL, and layers are added up: their gradients have no parameter in common.
"""

from typing import Any

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.losses.pretrain import Batch, Denominators, LossWeights, forward_of, language_loss


def warmup_loss(
  params: Any, batch: Batch, cfg: ModelConfig, denominator: Denominators, weights: LossWeights, chunk: int
) -> tuple[jax.Array, dict[str, Any]]:
  """The indexers' KL over all visible keys; no gradient reaches any other parameter, or is computed."""
  out, loss, metrics = _both(_indexers_only(params), batch, cfg, denominator, weights, chunk)
  loss = weights.indexer * _total_kl(out.aux["indexer_kl"], denominator, metrics)
  return loss, metrics | {"loss": loss}


def sparse_loss(
  params: Any, batch: Batch, cfg: ModelConfig, denominator: Denominators, weights: LossWeights, chunk: int
) -> tuple[jax.Array, dict[str, Any]]:
  """The pre-training loss, and the indexers' KL over the selected keys."""
  out, loss, metrics = _both(params, batch, cfg, denominator, weights, chunk)
  loss += weights.indexer * _total_kl(out.aux["indexer_kl"], denominator, metrics)
  return loss, metrics | {"loss": loss}


def _both(params, batch, cfg, denominator, weights, chunk):
  """(model's output, pre-training loss, its metrics)."""
  out = forward_of(params, cfg.replace(indexer_loss=True), batch, denominator)
  return out, *language_loss(out, params, cfg, batch, denominator, weights, chunk)


def _indexers_only(params: Any) -> Any:
  """Parameters of which all but the indexers' are constants."""

  def choose(path, x):
    return x if any(key.key == "indexer" for key in path) else jax.lax.stop_gradient(x)

  return jax.tree_util.tree_map_with_path(choose, params)


def _total_kl(kl: dict[str, jax.Array], denominator: Denominators, metrics: dict[str, Any]) -> jax.Array:
  """Sum over layers of the mean KL of a query; adds each to the metrics, and their mean, "indexer_kl"."""
  means = {
    layer: value / (denominator.mtp_queries if layer == "mtp" else denominator.queries)
    for layer, value in kl.items()
  }
  total = sum(means.values(), jnp.zeros(()))
  metrics |= {f"indexer_kl_{layer}": value for layer, value in means.items()}
  metrics["indexer_kl"] = total / len(means)
  return total
