"""What happens when a gradient or a loss is not finite: the update is skipped and counted.

A skipped step changes neither parameters nor optimiser state; the learning-rate schedule, whose count is
part of that state, does not advance. The data has advanced, and so has the loop's step number.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.errors import UserError
from glm5_jax.optim import norms
from glm5_jax.optim.groups import GROUPS, Optimizer
from glm5_jax.optim.rules import FROZEN


class Applied(NamedTuple):
  """Result of one optimiser step."""

  params: Any
  opt_state: Any
  skipped: jax.Array  # bool scalar
  grad_norm: jax.Array  # float32 scalar, trainable leaves, before clipping; may be non-finite
  update_norms: dict[str, jax.Array]  # by group, float32; 0 when skipped


class SkipCounts(NamedTuple):
  """Skipped steps, part of the train state."""

  total: jax.Array  # int32 scalar
  consecutive: jax.Array  # int32 scalar, up to the newest step

  @classmethod
  def zeros(cls) -> "SkipCounts":
    # Two arrays: a donated train state must not hold one buffer twice.
    return cls(jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32))

  def add(self, skipped: jax.Array) -> "SkipCounts":
    return SkipCounts(self.total + skipped, jnp.where(skipped, self.consecutive + 1, 0))

  def check(self, limit: int, batch_file: str = "") -> None:
    """Raises UserError once `limit` steps in a row were skipped. Blocks until the counts are computed.

    Args:
      limit: optim.max_nonfinite.
      batch_file: where the newest offending batch was saved, for the message.
    """
    if int(self.consecutive) >= limit:
      saved = f", the last batch is in {batch_file}" if batch_file else ""
      raise UserError(
        f"loss or gradient not finite in {int(self.consecutive)} steps in a row{saved}: "
        f"start another --workdir with a lower optim.peak_lr or more optim.warmup_steps "
        f"(optim.max_nonfinite={limit} stops the run)"
      )


def apply_or_skip(opt: Optimizer, grads: Any, opt_state: Any, params: Any, loss: jax.Array) -> Applied:
  """One optimiser step inside jit, or nothing when the loss or the gradients' norm is not finite.

  Args:
    opt: from make_optimizer.
    grads: tree like `params`. Gradients of frozen leaves are ignored, NaN or not.
    opt_state: from opt.init or the step before.
    params: parameters; frozen leaves come back bit-equal.
    loss: scalar.

  A finite gradient whose norm overflows float32 counts as not finite.
  """
  named = list(zip(jax.tree.leaves(opt.labels), jax.tree.leaves(grads), strict=True))
  grad_norm = norms.global_norm(g for group, g in named if group != FROZEN)
  finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
  updates, new_state = opt.update(grads, opt_state, params)

  def moved(group, p, u):
    return p if group == FROZEN else jnp.where(finite, (p + u).astype(p.dtype), p)

  new_params = jax.tree.map(moved, opt.labels, params, updates)
  new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, opt_state)
  return Applied(new_params, new_state, ~finite, grad_norm, _update_norms(opt.labels, updates, finite))


def _update_norms(labels: Any, updates: Any, finite: jax.Array) -> dict[str, jax.Array]:
  named = list(zip(jax.tree.leaves(labels), jax.tree.leaves(updates), strict=True))
  present = [group for group in GROUPS if any(label == group for label, _ in named)]
  by_group = {group: norms.global_norm(u for label, u in named if label == group) for group in present}
  return {group: jnp.where(finite, norm, 0.0) for group, norm in by_group.items()}
