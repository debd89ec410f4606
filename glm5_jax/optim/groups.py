"""Who trains which parameter, and the optimiser made of it."""

import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from optax.transforms import MaskedNode

from glm5_jax.config import ModelConfig, OptimConfig
from glm5_jax.errors import UserError
from glm5_jax.model import logical_axes
from glm5_jax.optim import norms, schedules
from glm5_jax.optim.muon_split import dimension_numbers, scale_by_muon_split
from glm5_jax.optim.rules import ADAMW, ADAMW_NO_DECAY, FROZEN, MUON, path_name, rules
from glm5_jax.parallel.rules import param_specs

OPTIMIZERS = ("muon_split", "muon", "adamw")
GROUPS = (MUON, ADAMW, ADAMW_NO_DECAY)


class Optimizer(NamedTuple):
  """An optax.GradientTransformation that knows its groups and its learning rate."""

  init: Any
  update: Any
  labels: Any  # tree like the parameters, of "muon" | "adamw" | "adamw_no_decay" | "frozen"
  learning_rate: optax.Schedule  # of updates done; skipped steps do not count


def labels(params: Any, cfg: ModelConfig, name: str = "muon_split", frozen: tuple[str, ...] = ()) -> Any:
  """A tree like `params` that names each parameter's group.

  Args:
    params: arrays or ShapeDtypeStructs.
    cfg: the architecture of `params`.
    name: the optimiser; under "adamw" Muon's matrices are AdamW's, with decay.
    frozen: patterns. A pattern is a path component ("indexer", "embed"), or a glob over the whole path
      ("layers_0/*"); a leading "~" freezes everything that the rest does not match ("~indexer").

  Raises:
    UserError: an unknown optimiser, or a parameter that no rule names.
  """
  if name not in OPTIMIZERS:
    raise UserError(f"config.optim.name={name!r}: should be one of {', '.join(OPTIMIZERS)}")

  def label(path, rule) -> str:
    if rule.group == FROZEN or any(_matches(path_name(path), pattern) for pattern in frozen):
      return FROZEN
    return ADAMW if name == "adamw" and rule.group == MUON else rule.group

  return jax.tree_util.tree_map_with_path(label, rules(params, cfg))


def _matches(path: str, pattern: str) -> bool:
  if pattern.startswith("~"):
    return not _matches(path, pattern[1:])
  return pattern in path.split("/") or fnmatch.fnmatchcase(path, pattern)


def make_optimizer(
  optim: OptimConfig,
  model: ModelConfig,
  params: Any,
  total_steps: int,
  frozen: tuple[str, ...] = ("indexer",),
  mesh: Mesh | None = None,
) -> Optimizer:
  """The optimiser of a run: clipping, then Muon Split, Muon or AdamW by group, decay, learning rate.

  Args:
    optim: name, schedule and hyper-parameters.
    model: architecture of `params`.
    params: arrays or ShapeDtypeStructs; only paths and shapes are read.
    total_steps: length of the schedule where optim.decay_steps is 0.
    frozen: patterns as in `labels`: no update, no decay, no state. The router's selection bias always
      stands outside (train.step moves it).
    mesh: of the devices that parameters, gradients and state are split over as `parallel.rules` says.

  Muon's matrices, embeddings, head and a trained indexer's matrices decay, p ← p (1 − lr · weight_decay);
  norms and biases do not. Moments and arithmetic are float32 whatever dtype the parameters have.

  Raises:
    UserError: an unknown optimiser, schedule or parameter.
  """
  groups = labels(params, model, optim.name, frozen)
  rate = schedules.make_schedule(optim, total_steps)

  def of_muon(tree):
    return jax.tree.map(lambda group, entry: entry if group == MUON else MaskedNode(), groups, tree)

  muon = scale_by_muon_split(
    of_muon(dimension_numbers(params, model, split=optim.name == "muon_split")),
    optim.momentum,
    optim.ns_steps,
    optim.ns_dtype,
    optim.update_rms,
    mesh,
    None if mesh is None else of_muon(param_specs(logical_axes(model))),
  )
  adam = optax.scale_by_adam(optim.b1, optim.b2, optim.eps)
  decay = optax.add_decayed_weights(optim.weight_decay)
  step = optax.scale_by_learning_rate(rate)
  by_group = optax.partition(
    {
      MUON: _in_float32(optax.chain(muon, decay, step)),
      ADAMW: _in_float32(optax.chain(adam, decay, step)),
      ADAMW_NO_DECAY: _in_float32(optax.chain(adam, step)),
      FROZEN: optax.set_to_zero(),
    },
    groups,
  )
  if optim.clip_norm > 0:
    trainable = jax.tree.map(lambda group: group != FROZEN, groups)
    by_group = optax.chain(optax.masked(norms.clip_by_global_norm(optim.clip_norm), trainable), by_group)
  return Optimizer(by_group.init, by_group.update, groups, rate)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """Runs a transformation on float32 copies, so that its moments are float32 for bfloat16 weights too."""

  def init(params):
    return inner.init(optax.tree.cast(params, jnp.float32))

  def update(updates, state, params=None):
    return inner.update(optax.tree.cast(updates, jnp.float32), state, optax.tree.cast(params, jnp.float32))

  return optax.GradientTransformation(init, update)
