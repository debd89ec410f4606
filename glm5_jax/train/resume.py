"""Which config fields may change when a run is resumed."""

import dataclasses
from typing import Any, NamedTuple

from glm5_jax.config import ModelConfig, RunConfig
from glm5_jax.errors import UserError

# These change how long, how fast or how observably a run trains, not what it computes (up to the order
# of floating-point sums). `train.steps` is here so that a run can be extended; it stretches a schedule
# whose optim.decay_steps is 0.
MAY_CHANGE = frozenset(
  {
    "name",
    "data.folder",
    "data.prefetch",
    "optim.max_nonfinite",
    "train.start_from",
    "train.steps",
    "train.grad_accum",
    "train.loss_chunk",
    "train.log_every",
    "train.eval_every",
    "train.eval_rows",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.profile_steps",
    "mesh.data",
    "mesh.fsdp",
    "mesh.expert",
    "mesh.context",
    "mesh.tensor",
    "mesh.dcn_data",
    "mesh.dcn_fsdp",
    "model.mla_form",
    "model.query_block",
    "model.head_group",
    "model.moe_implementation",
    "model.dsa_implementation",
    "model.remat",
  }
)


class Difference(NamedTuple):
  """A config field with two values."""

  field: str
  old: Any
  new: Any

  @property
  def allowed(self) -> bool:
    return self.field in MAY_CHANGE


def compare_configs(saved: RunConfig, now: RunConfig) -> list[Difference]:
  """Every field in which the two differ, by its dotted name as on the command line."""
  old, new = _flat(dataclasses.asdict(saved)), _flat(dataclasses.asdict(now))
  return [Difference(field, old[field], new[field]) for field in old if old[field] != new[field]]


def check_resume(saved: RunConfig, now: RunConfig, where: str, detail: str = "") -> list[Difference]:
  """Refuses to resume with a changed field outside MAY_CHANGE.

  Args:
    saved: config in the checkpoint.
    now: config of this run.
    where: the checkpoint, for the message.
    detail: what else is known to differ (a leaf's shape).

  Returns:
    The differences that are allowed, for the log.

  Raises:
    UserError: naming each such field, its old and its new value.
  """
  differences = compare_configs(saved, now)
  refused = [d for d in differences if not d.allowed]
  if refused:
    fields = ", ".join(f"{d.field} was {d.old!r} and is now {d.new!r}" for d in refused)
    why = f" ({detail})" if detail else ""
    raise UserError(f"cannot resume from {where}: {fields}{why}; set it back or start in another folder")
  return differences


def shape_fields(model: ModelConfig) -> str:
  """The fields that set the largest shapes, with their values, for messages."""
  names = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "n_routed_experts")
  return ", ".join(f"model.{name}={getattr(model, name)}" for name in names)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for name, value in values.items():
    if isinstance(value, dict):
      flat |= _flat(value, f"{prefix}{name}.")
    else:
      flat[prefix + name] = value
  return flat
