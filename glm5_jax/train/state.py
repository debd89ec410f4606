"""What a training run is, between two steps."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from glm5_jax.config import RunConfig
from glm5_jax.model import abstract_params, init_params, logical_axes
from glm5_jax.optim.groups import Optimizer
from glm5_jax.optim.guard import SkipCounts
from glm5_jax.parallel.mesh import replicated
from glm5_jax.parallel.rules import param_shardings


class TrainState(flax.struct.PyTreeNode):
  """All arrays of a run; saved whole. Donated to each step."""

  step: jax.Array  # int32 scalar, batches consumed
  params: Any
  opt_state: Any
  skipped: SkipCounts
  tokens: jax.Array  # float32 scalar, targets trained on
  rng: jax.Array  # random key, folded with `step` where a stage draws numbers


def init_state(run: RunConfig, optimizer: Optimizer, params: Any = None) -> TrainState:
  """Before the first step, from `params`; None draws them from `train.seed`."""
  init_key, rng = jax.random.split(jax.random.key(run.train.seed))
  params = init_params(run.model, init_key) if params is None else params
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    skipped=SkipCounts.zeros(),
    tokens=jnp.zeros((), jnp.float32),
    rng=rng,
  )


def state_shardings(run: RunConfig, optimizer: Optimizer, mesh: Mesh) -> Any:
  """A tree of NamedShardings like the state: moments lie as their parameter does, all else is everywhere.

  Raises:
    UserError: a parameter does not divide over the mesh.
  """
  cfg = run.model
  shardings = param_shardings(mesh, logical_axes(cfg), abstract_params(cfg))
  by_path = {path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)}
  everywhere = replicated(mesh)

  def place(path, _):
    # A moment's path ends with its parameter's.
    found = (by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path)
    return next(found, everywhere)

  return jax.tree_util.tree_map_with_path(place, jax.eval_shape(lambda: init_state(run, optimizer)))


def abstract_state(run: RunConfig, optimizer: Optimizer, mesh: Mesh | None = None) -> TrainState:
  """The state as ShapeDtypeStructs; on a mesh with shardings. No array is made."""
  shapes = jax.eval_shape(lambda: init_state(run, optimizer))
  if mesh is None:
    return shapes
  place = state_shardings(run, optimizer, mesh)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, place)
