"""What a training run is, between two steps."""

from typing import Any

import flax
import jax
import jax.numpy as jnp

from glm5_jax.config import RunConfig
from glm5_jax.model import init_params
from glm5_jax.optim.groups import Optimizer
from glm5_jax.optim.guard import SkipCounts


class TrainState(flax.struct.PyTreeNode):
  """All arrays of a run; saved whole. Donated to each step."""

  step: jax.Array  # int32 scalar, batches consumed
  params: Any
  opt_state: Any
  skipped: SkipCounts
  tokens: jax.Array  # float32 scalar, targets trained on
  rng: jax.Array  # random key, folded with `step` where a stage draws numbers


def init_state(run: RunConfig, optimizer: Optimizer) -> TrainState:
  """Fresh parameters from `train.seed`."""
  init_key, rng = jax.random.split(jax.random.key(run.train.seed))
  params = init_params(run.model, init_key)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    skipped=SkipCounts.zeros(),
    tokens=jnp.zeros((), jnp.float32),
    rng=rng,
  )
