"""Losses, one file each, found by name."""

from collections.abc import Callable
from typing import Any

from glm5_jax.errors import UserError
from glm5_jax.losses import dsa
from glm5_jax.losses.pretrain import pretrain_loss

# (params, batch, cfg, denominators, weights, chunk) → (loss, metrics), all as in pretrain_loss
BatchLoss = Callable[..., tuple[Any, dict[str, Any]]]
BATCH_LOSSES: dict[str, BatchLoss] = {
  "pretrain": pretrain_loss,
  "dsa_warmup": dsa.warmup_loss,
  "dsa_sparse": dsa.sparse_loss,
}


def batch_loss(name: str) -> BatchLoss:
  """What `train.loss` names: the loss of a packed batch of text.

  Raises:
    UserError: an unknown name; lists the known ones.
  """
  if name not in BATCH_LOSSES:
    raise UserError(f"train.loss={name}: should be one of {', '.join(BATCH_LOSSES)}")
  return BATCH_LOSSES[name]
