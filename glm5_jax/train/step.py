"""One optimiser step: micro-batches in a scan, gradients, update, router biases, metrics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from glm5_jax.config import RunConfig
from glm5_jax.losses.pretrain import Batch, LossWeights, denominators
from glm5_jax.model import logical_axes
from glm5_jax.model.router import load_violation, update_bias
from glm5_jax.optim.groups import Optimizer
from glm5_jax.optim.guard import apply_or_skip
from glm5_jax.optim.schedules import mtp_weight, router_bias_rate
from glm5_jax.parallel import spmd
from glm5_jax.parallel.mesh import ROWS
from glm5_jax.parallel.rules import param_specs, unsplit_axes
from glm5_jax.train.stages import loss_of, stage_of
from glm5_jax.train.state import TrainState, state_shardings

Metrics = dict[str, jax.Array]
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def mtp_depths(run: RunConfig) -> int:
  return run.model.mtp_depths if run.model.num_nextn_predict_layers else 0


def make_train_step(run: RunConfig, optimizer: Optimizer, mesh: Mesh | None = None) -> StepFn:
  """The jitted step (state, batch [B, T] arrays) → (state, metrics); the state is donated.

  On a mesh state and batch lie as `state_shardings` and `mesh.row_sharding` say.
  """
  train = run.train
  gradients = make_gradients(run, mesh)

  def step_fn(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    grads, metrics = gradients(state.params, batch, mtp_weight(train, state.step))
    counts = metrics.pop("router_counts")
    applied = apply_or_skip(optimizer, grads, state.opt_state, state.params, metrics["loss"])
    rests = applied.skipped | (not stage_of(run).moves_biases)
    rate = jnp.where(rests, 0.0, router_bias_rate(train, state.step))
    state = state.replace(
      step=state.step + 1,
      params=move_router_biases(applied.params, counts, rate),
      opt_state=applied.opt_state,
      skipped=state.skipped.add(applied.skipped),
      tokens=state.tokens + jnp.sum(batch["weights"]),
    )
    metrics |= {f"update_norm_{group}": norm for group, norm in applied.update_norms.items()}
    metrics |= {"grad_norm": applied.grad_norm, "skipped": state.skipped.total}
    metrics |= {"consecutive_skips": state.skipped.consecutive}
    loads = [jnp.max(load_violation(c)) for c in jax.tree.leaves(counts)]
    metrics["router_load_violation"] = jnp.max(jnp.stack(loads)) if loads else jnp.zeros(())
    return state, metrics

  options = compiler_options(mesh)
  if mesh is None:
    return jax.jit(step_fn, donate_argnums=0, compiler_options=options)
  shardings = state_shardings(run, optimizer, mesh)
  return jax.jit(step_fn, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)


def make_gradients(run: RunConfig, mesh: Mesh | None = None) -> Callable[..., tuple[Any, dict[str, Any]]]:
  """(params, batch, λ) → (gradients, metrics with "router_counts"), summed over micro-batches and devices.

  On a mesh all of it is one shard_map: a gradient comes out as its parameter is stored.
  """
  depths, train, loss = mtp_depths(run), run.train, loss_of(run)
  specs = param_specs(logical_axes(run.model)) if mesh is not None else None

  def gradients(params: Any, batch: Batch, weight: jax.Array) -> tuple[Any, dict[str, Any]]:
    denominator = denominators(batch, depths)

    def loss_fn(params: Any, micro: Batch):
      weights = LossWeights(weight, train.balance_weight, train.indexer_weight)
      return loss(params, micro, run.model, denominator, weights, train.loss_chunk)

    grads, metrics = accumulate(loss_fn, params, batch, train.grad_accum)
    if specs is not None:
      grads = jax.tree.map(lambda grad, spec: spmd.psum(grad, unsplit_axes(spec)), grads, specs)
    counts = spmd.sum_tokens(metrics.pop("router_counts"))
    return grads, spmd.psum(metrics) | {"router_counts": counts}

  if mesh is None:
    return gradients
  return jax.shard_map(
    gradients,
    mesh=mesh,
    in_specs=(specs, ROWS, PartitionSpec()),
    out_specs=(specs, PartitionSpec()),
    check_vma=False,
  )


def compiler_options(mesh: Mesh | None = None) -> dict[str, str] | None:
  """XLA's options for a training step.

  On CPU it gives matmuls and reductions to a library whose matmul is the slower one on two cores (a step
  of `experiments.benchmarks.ours` takes 7 % longer): only reductions go to it. On TPU a pass that wants to
  move the sums of gradients out of the loop over MTP's depths fails an assertion of its own: it is left out.
  """
  platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  return {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
    "tpu": {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"},
  }.get(platform)


def accumulate(loss_fn: Callable, params: Any, batch: Batch, parts: int) -> tuple[Any, dict[str, Any]]:
  """Gradients (float32 when there are several parts) and metrics, summed over micro-batches of rows.

  On a mesh a micro-batch is a part of every device's rows, and the sums are kept as parameters are stored.
  """
  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  if parts == 1:
    (_, metrics), grads = grad_fn(params, batch)
    return grads, metrics
  micro = {name: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]) for name, x in batch.items()}
  first = jax.tree.map(lambda x: x[0], micro)
  (_, metric_shapes), _ = jax.eval_shape(grad_fn, params, first)
  zeros = (
    jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
    jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), metric_shapes),
  )

  def body(sums, part):
    (_, metrics), grads = grad_fn(params, part)
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, (grads, metrics)), None

  (grads, metrics), _ = jax.lax.scan(body, zeros, micro)
  return grads, metrics


def move_router_biases(params: Any, counts: Any, rate: jax.Array) -> Any:
  """Params with each router's selection bias moved by its counts (a tree over segments and blocks)."""
  params = dict(params)
  for segment, blocks in counts.items():
    params[segment] = dict(params[segment])
    for name, counts_E in blocks.items():
      block = dict(params[segment][name])
      block["moe"] = block["moe"] | {"router_bias": update_bias(block["moe"]["router_bias"], counts_E, rate)}
      params[segment][name] = block
  return params
