"""The pre-training loss: next token, multi-token prediction at every depth, and sequence balance.

Each part is a sum over this micro-batch divided by a denominator of the *whole* batch, so that micro-batch
losses and gradients add up to those of one large batch, whatever the split.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.losses.cross_entropy import chunked_cross_entropy
from glm5_jax.model import ModelOutput, forward, head_of, with_successor
from glm5_jax.parallel import spmd
from glm5_jax.parallel.mesh import ROW_AXES

Batch = dict[str, jax.Array]  # the fields of data.batch.Batch, each [B, T]


class Denominators(NamedTuple):
  """What sums are divided by, counted over every micro-batch and device; at least 1."""

  tokens: jax.Array  # float32: weight of next-token targets
  mtp_tokens: tuple[jax.Array, ...]  # the same for depth 1, 2, …
  rows: jax.Array  # float32: rows with any token
  queries: jax.Array  # float32: tokens, which all attend to something
  mtp_queries: jax.Array  # the same over all depths together


class LossWeights(NamedTuple):
  """What the parts of a loss are multiplied by."""

  mtp: jax.Array | float  # λ, shared by the depths
  balance: float  # α
  indexer: float = 1.0  # of the KL of each layer's indexer


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

  def count(marked: jax.Array) -> jax.Array:
    return jnp.sum(marked, dtype=jnp.float32)

  segments = flat["segment_ids"]
  ahead = [with_successor(segments, k + 1) for k in range(mtp_depths)]
  return Denominators(
    tokens=total(0),
    mtp_tokens=tuple(total(k + 1) for k in range(mtp_depths)),
    rows=_at_least_one(count(jnp.any(segments != 0, axis=-1))),
    queries=_at_least_one(count(segments != 0)),
    mtp_queries=_at_least_one(sum((count(x != 0) for x in ahead), jnp.zeros(()))),
  )


def _at_least_one(count: jax.Array) -> jax.Array:
  return jnp.maximum(spmd.psum(count, ROW_AXES), 1.0)


def pretrain_loss(
  params: Any,
  batch: Batch,
  cfg: ModelConfig,
  denominator: Denominators,
  weights: LossWeights,
  chunk: int,
) -> tuple[jax.Array, dict[str, Any]]:
  """Loss of one micro-batch, CE + λ/3 · Σ_k CE_k + α · balance, and its parts.

  On a mesh all of them, the loss included, are this shard's shares; their sums over all devices are
  the values.

  Metrics: "loss", "lm_loss", "mtp_loss_k", "accuracy", "mtp_accuracy_k", "balance_loss" (unscaled) and
  "router_counts"; all are shares of the whole batch's value and add up over micro-batches.
  """
  out = forward_of(params, cfg, batch, denominator)
  return language_loss(out, params, cfg, batch, denominator, weights, chunk)


def forward_of(params: Any, cfg: ModelConfig, batch: Batch, denominator: Denominators) -> ModelOutput:
  """The model on a batch, with as many depths of MTP as the denominators count."""
  rows = batch["tokens"], batch["positions"], batch["segment_ids"]
  return forward(params, cfg, *rows, mtp_depths=len(denominator.mtp_tokens))


def language_loss(
  out: ModelOutput,
  params: Any,
  cfg: ModelConfig,
  batch: Batch,
  denominator: Denominators,
  weights: LossWeights,
  chunk: int,
) -> tuple[jax.Array, dict[str, Any]]:
  """`pretrain_loss` of what the model has returned."""
  hidden = [out.hidden_BTD[None]]
  if denominator.mtp_tokens:
    hidden.append(out.aux["mtp_hidden_KBTD"])
  with jax.named_scope("loss"):
    # Behind a barrier the whole head is there for the loss alone: forwards it is fetched when the layers are
    # done, backwards its gradient has gone to where it is stored before theirs begin.
    stored = "embed" if cfg.tie_word_embeddings else "head"
    hidden, table = jax.lax.optimization_barrier((hidden, params[stored]))
    head_DV = head_of({stored: table}, cfg)
    loss, metrics = _token_losses(hidden, head_DV, batch, denominator, weights.mtp, chunk)
    balance = out.aux["balance"] / denominator.rows
    loss += weights.balance * balance
  metrics |= {"loss": loss, "balance_loss": balance, "router_counts": out.aux["router_counts"]}
  return loss, metrics


def _token_losses(
  hidden: list[jax.Array],
  head_DV: jax.Array,
  batch: Batch,
  denominator: Denominators,
  mtp_weight: jax.Array | float,
  chunk: int,
) -> tuple[jax.Array, dict[str, Any]]:
  """CE + λ/3 · Σ_k CE_k and their metrics, through one pass over the tokens of all depths.

  hidden: of the trunk [1, B, T, D], and of the MTP depths [K, B, T, D] where there are any.
  """
  depths = len(denominator.mtp_tokens)
  counts = (denominator.tokens, *denominator.mtp_tokens)
  factors = (1.0, *[mtp_weight / depths] * depths)
  targets, shares, weights = [], [], []
  for depth, (tokens, factor) in enumerate(zip(counts, factors, strict=True)):
    targets_BT, weights_BT = map(spmd.take_mine, depth_targets(batch, depth))
    targets.append(targets_BT)
    shares.append(weights_BT / tokens)
    weights.append(shares[-1] * factor)
  hidden_MD = jnp.concatenate(hidden).reshape(-1, head_DV.shape[0])
  depth_M = jnp.repeat(jnp.arange(depths + 1), targets[0].size)
  stacked = (jnp.stack(x).reshape(-1) for x in (targets, weights, shares))
  hidden_P, targets_P, weights_P, shares_P, depth_P = map(spmd.my_share, (hidden_MD, *stacked, depth_M))
  of_tokens = chunked_cross_entropy(hidden_P, head_DV, targets_P, weights_P, chunk)
  metrics: dict[str, Any] = {}
  for depth in range(depths + 1):
    of_depth_P = jnp.where(depth_P == depth, shares_P, 0.0)
    loss, accuracy = (f"mtp_loss_{depth}", f"mtp_accuracy_{depth}") if depth else ("lm_loss", "accuracy")
    metrics[loss], metrics[accuracy] = of_tokens.nll_M @ of_depth_P, of_tokens.hits_M @ of_depth_P
  return of_tokens.loss, metrics
