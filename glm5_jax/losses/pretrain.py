"""The pre-training loss: next token, multi-token prediction at every depth, and sequence balance.

Each part is a sum over this micro-batch divided by a denominator of the *whole* batch, so that micro-batch
losses and gradients add up to those of one large batch, whatever the split.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.losses.cross_entropy import chunked_cross_entropy
from glm5_jax.model import forward, head_of
from glm5_jax.parallel import spmd
from glm5_jax.parallel.mesh import ROW_AXES

Batch = dict[str, jax.Array]  # the fields of data.batch.Batch, each [B, T]


class Denominators(NamedTuple):
  """What sums are divided by, counted over every micro-batch and device; at least 1."""

  tokens: jax.Array  # float32: weight of next-token targets
  mtp_tokens: tuple[jax.Array, ...]  # the same for depth 1, 2, …
  rows: jax.Array  # float32: rows with any token


def depth_targets(batch: Batch, depth: int) -> tuple[jax.Array, jax.Array]:
  """(targets, weights) [B, T] of an MTP depth: those of the main loss shifted by `depth`, within a document.

  Depth 0 is the main loss. Nothing wraps: a slot whose target would lie past the row has weight 0, and so
  has padding, whatever weight stands there.
  """
  weights = batch["weights"] * (batch["segment_ids"] != 0)
  if depth == 0:
    return batch["targets"], weights
  T = batch["targets"].shape[1]

  def ahead(x):
    return jnp.pad(x[:, depth:], ((0, 0), (0, min(depth, T))))

  same_document = ahead(batch["segment_ids"]) == batch["segment_ids"]
  return ahead(batch["targets"]), ahead(weights) * same_document


def denominators(batch: Batch, mtp_depths: int) -> Denominators:
  """Counted over `batch`, the whole one of a step. Arrays may have leading axes before [B, T].

  On a mesh `batch` is this shard's rows, and the counts are of all of them.
  """
  flat = {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items()}

  def total(depth: int) -> jax.Array:
    return _at_least_one(jnp.sum(depth_targets(flat, depth)[1], dtype=jnp.float32))

  rows = jnp.sum(jnp.any(flat["segment_ids"] != 0, axis=-1), dtype=jnp.float32)
  return Denominators(total(0), tuple(total(k + 1) for k in range(mtp_depths)), _at_least_one(rows))


def _at_least_one(count: jax.Array) -> jax.Array:
  return jnp.maximum(spmd.psum(count, ROW_AXES), 1.0)


def pretrain_loss(
  params: Any,
  batch: Batch,
  cfg: ModelConfig,
  denominator: Denominators,
  mtp_weight: jax.Array | float,
  balance_weight: float,
  chunk: int,
) -> tuple[jax.Array, dict[str, Any]]:
  """Loss of one micro-batch, CE + λ/3 · Σ_k CE_k + α · balance, and its parts.

  On a mesh all of them, the loss included, are this shard's shares; their sums over all devices are
  the values.

  Metrics: "loss", "lm_loss", "mtp_loss_k", "accuracy", "mtp_accuracy_k", "balance_loss" (unscaled) and
  "router_counts"; all are shares of the whole batch's value and add up over micro-batches.
  """
  depths = len(denominator.mtp_tokens)
  out = forward(
    params,
    cfg,
    batch["tokens"],
    batch["positions"],
    batch["segment_ids"],
    mtp_depths=depths,
  )
  head_DV = head_of(params, cfg)

  def cross_entropy(hidden_BTD: jax.Array, depth: int, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    targets_BT, weights_BT = map(spmd.take_mine, depth_targets(batch, depth))
    hidden_MD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    mine = map(spmd.my_share, (hidden_MD, targets_BT.reshape(-1), weights_BT.reshape(-1)))
    hidden, targets, weights = mine
    sums = chunked_cross_entropy(hidden, head_DV, targets, weights, chunk)
    return sums.loss / tokens, sums.correct / tokens

  metrics: dict[str, Any] = {"router_counts": out.aux["router_counts"]}
  with jax.named_scope("loss"):
    loss, metrics["accuracy"] = cross_entropy(out.hidden_BTD, 0, denominator.tokens)
    metrics["lm_loss"] = loss
    for k, tokens in enumerate(denominator.mtp_tokens, start=1):
      mtp, accuracy = cross_entropy(out.aux["mtp_hidden_KBTD"][k - 1], k, tokens)
      metrics[f"mtp_loss_{k}"], metrics[f"mtp_accuracy_{k}"] = mtp, accuracy
      loss += mtp_weight / depths * mtp
    balance = out.aux["balance"] / denominator.rows
    loss += balance_weight * balance
  metrics |= {"loss": loss, "balance_loss": balance}
  return loss, metrics
