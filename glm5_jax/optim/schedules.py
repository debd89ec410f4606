"""Everything that changes with the step: learning rate, rows a batch, MTP weight, router-bias rate.

Sources: GLM-5 report §2 and App. A for the stages; GLM-4.5 report §2.4 for λ, γ and the batch warm-up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from glm5_jax.config import OptimConfig, TrainConfig
from glm5_jax.config_checks import parse_batch_warmup
from glm5_jax.errors import UserError

Step = int | jax.Array


class Stage(NamedTuple):
  """A schedule with its rates."""

  shape: str  # "cosine" | "linear" | "constant"
  peak: float
  final: float
  warmup: bool  # linear from 0 over optim.warmup_steps first


MIDTRAIN_TOKENS = {"32k": 1.0e12, "128k": 0.5e12, "200k": 0.05e12}  # in this order
MIDTRAIN_LR = (4e-5, 1e-5)


def midtrain_lr(tokens: float) -> float:
  """Learning rate after that many mid-training tokens: one line through all three context lengths."""
  share = min(max(tokens / sum(MIDTRAIN_TOKENS.values()), 0.0), 1.0)
  return MIDTRAIN_LR[0] + share * (MIDTRAIN_LR[1] - MIDTRAIN_LR[0])


def _midtrain_stages() -> dict[str, Stage]:
  stages, done = {"midtrain": Stage("linear", *MIDTRAIN_LR, warmup=False)}, 0.0
  for name, tokens in MIDTRAIN_TOKENS.items():
    stages[f"midtrain_{name}"] = Stage("linear", midtrain_lr(done), midtrain_lr(done + tokens), warmup=False)
    done += tokens
  return stages


SHAPES = ("cosine", "linear", "constant")  # between optim.peak_lr and optim.final_lr
# GLM-5's stages. Each sets both rates and ignores the config's; only the first warms up (ours).
STAGES: dict[str, Stage] = {
  "pretrain": Stage("cosine", 2e-4, 4e-5, warmup=True),
  **_midtrain_stages(),
  "dsa_warmup": Stage("cosine", 5e-3, 2e-4, warmup=False),  # the decay's shape is not published; ours
  "dsa_sparse": Stage("constant", 1e-5, 1e-5, warmup=False),
}


def make_schedule(optim: OptimConfig, total_steps: int) -> optax.Schedule:
  """Learning rate (float32) as a function of updates done so far, 0 for the first.

  Update s of w warm-up updates has peak · (s + 1) / w, so that none is spent at rate 0. The decay ends
  at optim.decay_steps, or `total_steps` where that is 0, and the final rate holds after it.

  Raises:
    UserError: an unknown schedule, or a warm-up that leaves no step to decay in.
  """
  name = optim.schedule
  if name not in SHAPES and name not in STAGES:
    raise UserError(f"config.optim.schedule={name!r}: should be one of {', '.join((*SHAPES, *STAGES))}")
  stage = STAGES.get(name) or Stage(name, optim.peak_lr, optim.final_lr, warmup=True)
  warmup = optim.warmup_steps if stage.warmup else 0
  end = optim.decay_steps or total_steps
  if stage.shape != "constant" and warmup >= end:
    raise UserError(f"config.optim.warmup_steps={warmup}: should be less than {end}, where the decay ends")

  def rate(step: Step) -> jax.Array:
    step = jnp.asarray(step, jnp.float32)
    progress = jnp.clip((step - warmup) / max(end - warmup, 1), 0.0, 1.0)
    rising = jnp.minimum((step + 1) / max(warmup, 1), 1.0)
    return jnp.where(step < warmup, stage.peak * rising, _decayed(stage, progress))

  return rate


def _decayed(stage: Stage, progress: jax.Array) -> jax.Array:
  """From peak at progress 0 to final at 1."""
  if stage.shape == "constant":
    return jnp.full_like(progress, stage.peak)
  left = 1.0 - progress if stage.shape == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
  return stage.final + (stage.peak - stage.final) * left


def batch_size_at(train: TrainConfig, step: int) -> int:
  """Rows of the batch of that step (0-based), from "rows:until_step" stairs in train.batch_warmup.

  GLM-4.5 goes from 16 M to 64 M tokens a step over its first 500 B tokens. Raises UserError on another form.
  """
  for rows, until in parse_batch_warmup(train.batch_warmup):
    if step < until:
      return rows
  return train.batch_size


def mtp_weight(train: TrainConfig, step: Step) -> jax.Array:
  """λ of the MTP loss at a step: 0.3 for the first 15 T tokens (here a share of the steps), then 0.1."""
  return jnp.where(_before_switch(train, step), train.mtp_weight, train.mtp_weight_final)


def router_bias_rate(train: TrainConfig, step: Step) -> jax.Array:
  """γ of the selection bias at a step: 1e-3 up to the same switch, then 0."""
  return jnp.where(_before_switch(train, step), train.router_bias_rate, 0.0)


def _before_switch(train: TrainConfig, step: Step) -> jax.Array:
  return jnp.asarray(step) < round(train.mtp_switch * train.steps)
