"""How many tokens a round of self-speculation makes on held-out text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.data.records import decode_record, read_meta, record_source
from glm5_jax.errors import UserError
from glm5_jax.evals.context import EvalContext
from glm5_jax.serve.sampling import Sampling
from glm5_jax.serve.speculate import SpeculativeGenerator

# Suffix of a score's name → how tokens are drawn.
KINDS = {"": Sampling(temperature=0.0), "_sampled": Sampling(temperature=1.0)}


def run(context: EvalContext) -> dict[str, float]:
  """The task: `measure` on prompts out of the held-out documents, on one device. Deterministic for a seed.

  Raises:
    UserError: this device cannot have all parameters, see `EvalContext.on_one_device`.
  """
  limits = context.limits
  prompts = heldout_prompts(context.data.folder, limits.prompts, limits.prompt_tokens, context.seed)
  steps = limits.draft_steps or context.cfg.mtp_depths
  return measure(context.on_one_device(), context.cfg, prompts, limits.new_tokens, steps, context.seed)


def measure(
  params: Any,
  cfg: ModelConfig,
  prompts: Sequence[Sequence[int]],
  new_tokens: int,
  draft_steps: int,
  seed: int = 0,
) -> dict[str, float]:
  """Accept length, greedy and at temperature 1, of continuing all prompts in one batch.

  Returns:
    "accept_length", tokens made per verification by the trunk (1 where no draft is ever accepted, at most
    draft_steps + 1); "accept_rate_k", the share of rounds in which draft k held; both again with "_sampled"
    for temperature 1; "prompts".

  Raises:
    UserError: the model has no MTP layer, or the request is impossible (see SpeculativeGenerator).
  """
  generator = SpeculativeGenerator(params, cfg, draft_steps=draft_steps)
  scores: dict[str, float] = {}
  for suffix, sampling in KINDS.items():
    generator.generate(prompts, new_tokens, sampling, seed)
    gained = generator.acceptance
    scores[f"accept_length{suffix}"] = gained.accept_length
    for k, rate in enumerate(gained.accept_rate_K, start=1):
      scores[f"accept_rate{suffix}_{k}"] = rate
  return scores | {"prompts": float(len(prompts))}


def heldout_prompts(folder: str, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
  """The first `tokens` ids of `count` held-out documents, or as many as are longer, drawn by `seed`.

  Raises:
    UserError: no held-out document is longer than `tokens`, or an argument is not positive.
  """
  if count < 1 or tokens < 1:
    raise UserError(f"prompts {count} and prompt_tokens {tokens} must be at least 1")
  source = record_source(folder, read_meta(folder), "heldout")
  prompts: list[list[int]] = []
  longest = 0
  for i in np.random.default_rng(seed).permutation(len(source)):
    ids = decode_record(source[int(i)]).tokens
    longest = max(longest, ids.size)
    if ids.size > tokens:
      prompts.append(ids[:tokens].tolist())
    if len(prompts) == count:
      break
  if not prompts:
    raise UserError(
      f"the longest held-out document in {folder} has {longest} tokens; set prompt_tokens below that"
    )
  return prompts
