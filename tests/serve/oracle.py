"""What small random models should say, computed without cache, left padding, batches or drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.model import forward
from tests.model import toy

LENGTH = 96  # of the oracles' rows
DEPTHS = 4  # of multi-token prediction in the oracles


def small(vocab_size: int = 4, **fields) -> ModelConfig:
  """One dense and one MoE layer. With 4 tokens a random draft often holds and often does not."""
  return toy.config(
    **{"vocab_size": vocab_size, "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "eos_token_id": ()}
    | fields
  )


@functools.partial(jax.jit, static_argnames="cfg", compiler_options=toy.FAST_COMPILE)
def _logits(params, cfg, tokens_BT, segments_BT):
  """Of the trunk and of every depth, [1 + DEPTHS, T, V]."""
  out = forward(params, cfg, tokens_BT, None, segments_BT, mtp_depths=DEPTHS)
  mtp_KBTV = jnp.einsum("kbtd,dv->kbtv", out.aux["mtp_hidden_KBTD"], params["head"])
  return jnp.concatenate([out.logits_BTV, mtp_KBTV[:, 0]])


def full_logits(params, cfg: ModelConfig, ids) -> np.ndarray:
  """[1 + DEPTHS, n, V] at each of `ids`, by one pass in training form; the row is filled up on the right."""
  tokens = np.zeros((1, LENGTH), np.int32)
  tokens[0, : len(ids)] = ids
  segments = (np.arange(LENGTH) < len(ids)).astype(np.int32)[None]
  return np.asarray(_logits(params, cfg, tokens, segments))[:, : len(ids)]


def argmax_continuation(params, cfg: ModelConfig, prompt, count: int) -> list[int]:
  """`count` greedy tokens, each from a full pass."""
  ids = list(prompt)
  for _ in range(count):
    ids.append(int(full_logits(params, cfg, ids)[0, -1].argmax()))
  return ids[len(prompt) :]


def drafts_that_hold(
  params, cfg: ModelConfig, prompt, continuation, count: int, draft_steps: int
) -> np.ndarray:
  """[rounds] int: how many greedy drafts hold in each round, had drafting used full passes.

  Depth k at slot i has seen token i + k and predicts the one after it. Rounds go on until `count` tokens
  are known; `continuation` has draft_steps more.
  """
  held = []
  ids = list(prompt) + list(continuation)
  known = len(prompt) + 1
  while known < len(prompt) + count:
    drafted: list[int] = []
    for k in range(1, draft_steps + 1):
      logits = full_logits(params, cfg, ids[:known] + drafted)
      drafted.append(int(logits[k, known - 2].argmax()))
    agree = np.array(drafted) == ids[known : known + draft_steps]
    held.append(int(np.cumprod(agree).sum()))
    known += held[-1] + 1
  return np.array(held)


def cut(ids, stop_ids) -> list[int]:
  """`ids` up to the first stop, which is kept."""
  first = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
  return list(ids[: first + 1])


def ragged_prompts(vocab_size: int, lengths=(13, 1, 40, 6), seed: int = 0) -> list[list[int]]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, vocab_size, n).tolist() for n in lengths]


def misfit(counts: np.ndarray, probs: np.ndarray) -> float:
  """How many standard deviations chi-square lies above its mean, were `counts` drawn from `probs`.

  Cells expected fewer than 5 times are taken together.
  """
  counts, expected = counts.ravel(), probs.ravel() * counts.sum()
  assert counts[expected == 0].sum() == 0, "something impossible was drawn"
  rare = expected < 5
  groups = [(np.append(x[~rare], x[rare].sum())) for x in (counts, expected)]
  counts, expected = (x[groups[1] > 0] for x in groups)
  freedom = len(expected) - 1
  return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))
