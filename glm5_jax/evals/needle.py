"""Retrieval from long texts: which of the numbers hidden in it does the model write when asked for them?

One forward pass a prompt: a value counts as retrieved where each of its tokens is the most likely one after
the text, the question and the tokens before it. That is exactly when greedy decoding would write it there, so
nothing need be generated. "exact" is the share of a prompt's questions all of whose values are retrieved,
"token" the share of the values' tokens that are the most likely ones.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.evals.context import EvalContext
from glm5_jax.evals.needle_text import filler_text, heldout_text, make_rows
from glm5_jax.evals.rows import on_mesh, row_shards, sum_over_slots
from glm5_jax.losses.cross_entropy import token_log_probs
from glm5_jax.model import forward, head_of
from glm5_jax.parallel import spmd

CHUNK = 1024  # tokens projected to the vocabulary at a time


def run(context: EvalContext) -> dict[str, float]:
  """The task: every length in every mode of attention, on the same prompts.

  Returns:
    "exact_4096" and "token_4096", means over prompts, and "…_se", their standard errors. Where modes are
    named, "exact_4096_sparse" and so on, and of each mode after the first "exact_4096_sparse_minus_dense":
    the mean difference of a prompt's scores, whose standard error is smaller than that of two sets of
    prompts. "prompts", of each length.

  Raises:
    UserError: a length or a mode is impossible for the model or the mesh.
  """
  spec, cfg, data = context.limits.needle, context.cfg, context.data
  lengths = spec.lengths or (data.seq_len,)
  check(context)
  haystack = heldout_text(data.folder, context.tokenizer) if data.folder else filler_text(context.tokenizer)
  scores: dict[str, float] = {}
  for length in lengths:
    tokens, asked = make_rows(spec, length, haystack, context.tokenizer, context.seed)
    rows = max(1, context.limits.batch_size * data.seq_len // length)  # as many tokens at a time as for lm
    by_mode = {
      mode: retrieved(
        context.params, cfg.replace(dsa_mode=mode), tokens, asked, spec.queries, rows, context.mesh
      )
      for mode in spec.dsa_modes or (cfg.dsa_mode,)
    }
    for i, measure in enumerate(("exact", "token")):
      scores |= compare(f"{measure}_{length}", {m: found[i] for m, found in by_mode.items()}, spec.dsa_modes)
  return scores | {"prompts": float(spec.prompts)}


def check(context: EvalContext) -> None:
  """Raises UserError for what cannot be asked of this model on this mesh."""
  spec, cfg = context.limits.needle, context.cfg
  if min(spec.keys, spec.values, spec.queries) < 1 or spec.prompts < 2:
    raise UserError("needles need at least 1 key, 1 value, 1 query, and 2 prompts for a standard error")
  if spec.queries > spec.keys:
    raise UserError(f"--needle_queries={spec.queries}: only --needle_keys={spec.keys} can be asked for")
  parts = 2 * context.mesh.shape["context"] if context.mesh is not None else 1
  parts = 1 if parts == 2 else parts
  for length in spec.lengths or (context.data.seq_len,):
    if length > cfg.max_position_embeddings:
      raise UserError(
        f"--needle_lengths: {length} is more than the model's max_position_embeddings "
        f"{cfg.max_position_embeddings}"
      )
    if length % parts:
      raise UserError(f"--needle_lengths: {length} should be a multiple of {parts}, for the mesh's context")
  for mode in spec.dsa_modes:
    if mode not in ("dense", "sparse") or spec.dsa_modes.count(mode) > 1:
      raise UserError(f"--dsa_modes: {','.join(spec.dsa_modes)} should be dense, sparse, or both, once each")
  if "sparse" in spec.dsa_modes and "D" not in cfg.attention:
    raise UserError(f"--dsa_modes: the model's attention {cfg.attention!r} has no sparse layer (D)")


def compare(name: str, by_mode: dict[str, np.ndarray], named: Sequence[str]) -> dict[str, float]:
  """Means and standard errors of prompts' scores in each mode, and of their differences from the first's."""
  if not named:
    return _mean(name, next(iter(by_mode.values())))
  first = named[0]
  scores: dict[str, float] = {}
  for mode in named:
    scores |= _mean(f"{name}_{mode}", by_mode[mode])
  for mode in named[1:]:
    scores |= _mean(f"{name}_{mode}_minus_{first}", by_mode[mode] - by_mode[first])
  return scores


def _mean(name: str, values: np.ndarray) -> dict[str, float]:
  return {name: float(values.mean()), f"{name}_se": float(values.std(ddof=1) / math.sqrt(values.size))}


def retrieved(
  params: Any,
  cfg: ModelConfig,
  tokens: np.ndarray,
  asked: np.ndarray,
  queries: int,
  rows: int,
  mesh: Mesh | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """(share of questions answered exactly, share of the answers' tokens that are right), float64 [P] each.

  Args:
    params: of `cfg`; on a mesh as `parallel.rules` says.
    tokens, asked: int32 [P, T], as `needle_text.make_rows` gives them; on several processes to all of them.
    rows: at a time, at least; filled up to what the mesh divides.
  """
  rows += -rows % row_shards(mesh)
  counts = []
  for begin in range(0, len(tokens), rows):
    batch = {"tokens": tokens[begin : begin + rows], "asked": asked[begin : begin + rows]}
    fill = ((0, rows - len(batch["tokens"])), (0, 0))  # so that one program does all
    batch = {name: np.pad(array, fill) for name, array in batch.items()}
    arrays = batch if mesh is None else on_mesh(batch, mesh)
    counts.append(np.asarray(_count(params, cfg, arrays, queries, mesh), np.float64))
  wanted, right = np.concatenate(counts, axis=-1)[..., : len(tokens)]  # [queries, P] each
  return (wanted == right).mean(0), right.sum(0) / wanted.sum(0)


@functools.partial(jax.jit, static_argnames=("cfg", "queries", "mesh"))
def _count(params: Any, cfg: ModelConfig, rows: Any, queries: int, mesh: Mesh | None) -> jax.Array:
  """float32 [2, queries, B]: tokens that answer each question, and those of them that are right."""

  def count(params: Any, rows: dict[str, jax.Array]) -> jax.Array:
    tokens_BT = rows["tokens"]
    out = forward(params, cfg, tokens_BT)
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)  # the last is asked for nothing
    targets_BT, asked_BT = spmd.take_mine(targets_BT), spmd.take_mine(rows["asked"])
    hidden_MD = out.hidden_BTD.reshape(-1, out.hidden_BTD.shape[-1])
    _, right_M = token_log_probs(hidden_MD, head_of(params, cfg), targets_BT.reshape(-1), CHUNK)
    mine_QBT = asked_BT[None] == jnp.arange(1, queries + 1)[:, None, None]
    hits_QBT = mine_QBT & right_M.reshape(asked_BT.shape)
    return jnp.stack([mine_QBT, hits_QBT]).sum(axis=-1, dtype=jnp.float32)

  return sum_over_slots(count, params, cfg, rows, mesh)
