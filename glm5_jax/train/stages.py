"""What each stage of training trains, and by which loss."""

from typing import NamedTuple

from jax.sharding import Mesh

from glm5_jax.config import RunConfig
from glm5_jax.losses import BatchLoss, batch_loss
from glm5_jax.model import abstract_params
from glm5_jax.optim.groups import Optimizer, make_optimizer


class Stage(NamedTuple):
  """Patterns of parameters that rest, as `optim.groups.labels` takes them, and a name of BATCH_LOSSES."""

  frozen: tuple[str, ...]
  loss: str
  moves_biases: bool = True  # of the routers, which no gradient moves


STAGES: dict[str, Stage] = {
  "pretrain": Stage(("indexer",), "pretrain"),  # and everything else that trains a model as it is
  "dsa_warmup": Stage(("~indexer",), "dsa_warmup", moves_biases=False),
  "dsa_sparse": Stage((), "dsa_sparse"),
}


def stage_of(run: RunConfig) -> Stage:
  return STAGES[run.train.stage]


def loss_of(run: RunConfig) -> BatchLoss:
  """The loss that `train.loss` names, or else the stage's. Raises UserError for an unknown name."""
  return batch_loss(run.train.loss or stage_of(run).loss)


def optimizer_of(run: RunConfig, mesh: Mesh | None = None) -> Optimizer:
  """The run's optimiser, of what its stage trains. Raises UserError as `make_optimizer`."""
  params = abstract_params(run.model)
  frozen = stage_of(run).frozen
  return make_optimizer(run.optim, run.model, params, run.train.steps, frozen, mesh)
