"""Next-token and multi-token prediction on held-out rows: bits per byte, perplexity, top-1 accuracy."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from glm5_jax.config import ModelConfig
from glm5_jax.data.batch import Batch, target_bytes
from glm5_jax.data.pipeline import heldout_batches
from glm5_jax.errors import UserError
from glm5_jax.evals.context import EvalContext
from glm5_jax.evals.rows import on_mesh, row_shards, sum_over_slots
from glm5_jax.losses.cross_entropy import token_log_probs
from glm5_jax.losses.pretrain import depth_targets
from glm5_jax.model import forward, head_of
from glm5_jax.parallel import spmd

_MAX_EXPONENT = 700.0  # math.exp overflows soon after


def run(context: EvalContext) -> dict[str, float]:
  """The task: `evaluate_lm` on the held-out rows of the data folder, on all devices of the mesh."""
  length, most = context.data.seq_len, context.cfg.max_position_embeddings
  if not 2 <= length <= most:
    raise UserError(f"seq_len {length} must lie between 2 and the model's max_position_embeddings {most}")
  rows = context.limits.batch_size
  rows += -rows % row_shards(context.mesh)  # rather rows of text than of padding
  batches = heldout_batches(context.data, rows, context.limits.rows)
  return evaluate_lm(context.params, context.cfg, batches, context.tokenizer.token_lengths, mesh=context.mesh)


def evaluate_lm(
  params: Any,
  cfg: ModelConfig,
  batches: Iterable[Batch],
  token_lengths: np.ndarray,
  chunk: int = 1024,
  mtp_depths: int | None = None,
  mesh: Mesh | None = None,
) -> dict[str, float]:
  """Scores of `batches`, each target counted once; compiled once for each (cfg, batch shape).

  Rows or whole batches of padding count nothing. Sums are kept in float64.

  Args:
    params: of `cfg`; on a mesh as `parallel.rules` says.
    batches: all rows of each, also where several processes share the mesh: every one of them calls this
      with the same batches and has the same scores.
    token_lengths: int32 [ids of the tokeniser], bytes of text of each id (`Tokenizer.token_lengths`).
    chunk: tokens projected to the vocabulary at a time.
    mtp_depths: depths of multi-token prediction to score; None takes what the model is trained with.
    mesh: of the devices that compute this together; None for one device.

  Returns:
    "loss" (nats a token), "perplexity" (its exponential), "bits_per_byte" (summed loss / ln 2 / bytes of the
    targets: the ends of documents cost bits and have no bytes), "accuracy" (share of targets that are the
    most likely token), "mtp_loss_k" and "mtp_accuracy_k" of depth k = 1, 2, … (left out where no document
    is long enough), "tokens" and "bytes" scored.

  Raises:
    UserError: the batches hold no target, or none with text.
  """
  if mtp_depths is None:
    mtp_depths = cfg.mtp_depths if cfg.num_nextn_predict_layers else 0
  sums = np.zeros((3, mtp_depths + 1))  # loss, correct, weight of each depth
  size = 0
  for batch in batches:
    arrays = vars(batch) if mesh is None else on_mesh(vars(batch), mesh)
    rows = _row_sums(params, cfg, arrays, chunk, mtp_depths, mesh)
    sums += np.asarray(rows, np.float64).sum(axis=-1)
    size += target_bytes(batch, token_lengths)
  if not size:
    raise UserError("the held-out rows hold no text to predict; prepare the data with longer held-out files")
  loss, correct, weight = sums
  scores = {
    "bits_per_byte": loss[0] / math.log(2) / size,
    "perplexity": math.exp(min(loss[0] / weight[0], _MAX_EXPONENT)),
    "loss": loss[0] / weight[0],
    "accuracy": correct[0] / weight[0],
  }
  for k in range(1, mtp_depths + 1):
    if weight[k]:
      scores |= {f"mtp_loss_{k}": loss[k] / weight[k], f"mtp_accuracy_{k}": correct[k] / weight[k]}
  return {name: float(value) for name, value in (scores | {"tokens": weight[0], "bytes": size}).items()}


@functools.partial(jax.jit, static_argnames=("cfg", "chunk", "depths", "mesh"))
def _row_sums(
  params: Any, cfg: ModelConfig, batch: dict[str, jax.Array], chunk: int, depths: int, mesh: Mesh | None
) -> jax.Array:
  """float32 [3, depths + 1, B]: loss, correct and weight of each row at each depth, 0 the next token."""

  def sums(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return _token_sums(params, cfg, batch, chunk, depths)

  return sum_over_slots(sums, params, cfg, batch, mesh)


def _token_sums(
  params: Any, cfg: ModelConfig, batch: dict[str, jax.Array], chunk: int, depths: int
) -> jax.Array:
  """float32 [3, depths + 1, B], over the tokens of each row that this shard of `context` holds."""
  out = forward(params, cfg, batch["tokens"], batch["positions"], batch["segment_ids"], mtp_depths=depths)
  head_DV = head_of(params, cfg)

  def of_depth(hidden_BTD: jax.Array, depth: int) -> jax.Array:
    targets_BT, weights_BT = map(spmd.take_mine, depth_targets(batch, depth))
    hidden_MD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    log_probs_M, correct_M = token_log_probs(hidden_MD, head_DV, targets_BT.reshape(-1), chunk)
    # `where`, since a weight of 0 must also silence a log-probability that is not finite.
    losses_BT = jnp.where(weights_BT > 0, -log_probs_M.reshape(weights_BT.shape) * weights_BT, 0.0)
    hits_BT = correct_M.reshape(weights_BT.shape) * weights_BT
    return jnp.stack([losses_BT, hits_BT, weights_BT]).sum(axis=-1)

  hiddens = [out.hidden_BTD, *(out.aux["mtp_hidden_KBTD"] if depths else ())]
  return jnp.stack([of_depth(hidden_BTD, depth) for depth, hidden_BTD in enumerate(hiddens)], axis=1)
