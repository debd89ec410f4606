"""Non-finite gradients and losses skip the update and are counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import OptimConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.optim.groups import make_optimizer
from glm5_jax.optim.guard import SkipCounts, apply_or_skip


@pytest.fixture
def setup(abstract, random_tree):
  tree = {"embed": abstract(tiny())["embed"], "mtp": {"eh_proj": abstract(tiny())["mtp"]["eh_proj"]}}
  params = random_tree(tree, 0)
  config = OptimConfig(schedule="linear", peak_lr=1e-2, final_lr=0.0, warmup_steps=2, ns_dtype="float32")
  opt = make_optimizer(config, tiny(), params, 20)
  return opt, params, random_tree(tree, 1)


def bad_element(grads, value):
  return grads | {"embed": grads["embed"].at[3, 5].set(value)}


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_non_finite_gradient_changes_nothing(value, setup):
  """3e38 is finite, but its square is not."""
  opt, params, grads = setup
  state = opt.init(params)
  applied = jax.jit(lambda g: apply_or_skip(opt, g, state, params, jnp.float32(1.0)))(
    bad_element(grads, value)
  )
  assert applied.skipped and not np.isfinite(applied.grad_norm)
  assert_same(applied.params, params)
  assert_same(applied.opt_state, state)
  assert all(norm == 0 for norm in applied.update_norms.values())


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_non_finite_loss_changes_nothing(loss, setup):
  opt, params, grads = setup
  state = opt.init(params)
  applied = apply_or_skip(opt, grads, state, params, jnp.float32(loss))
  assert applied.skipped and np.isfinite(applied.grad_norm)
  assert_same((applied.params, applied.opt_state), (params, state))


def test_training_goes_on_as_if_the_step_had_not_been(setup):
  """The schedule and the moments, too, do not see a skipped step."""
  opt, params, grads = setup
  step = jax.jit(lambda g, s, p: apply_or_skip(opt, g, s, p, jnp.float32(1.0)), donate_argnums=(1, 2))

  def run(gradients):
    p, s = jax.tree.map(jnp.copy, params), opt.init(params)
    for g in gradients:
      p, s, *_ = step(g, s, p)
    return p, s

  assert_same(run([grads, grads]), run([grads, bad_element(grads, np.nan), grads]))


def test_norms_are_those_of_gradient_and_update(setup):
  opt, params, grads = setup
  applied = apply_or_skip(opt, grads, opt.init(params), params, jnp.float32(1.0))
  flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)])
  np.testing.assert_allclose(applied.grad_norm, np.linalg.norm(flat), rtol=1e-5)
  moved = np.asarray(applied.params["embed"]) - np.asarray(params["embed"])
  assert set(applied.update_norms) == {"muon", "adamw"}
  np.testing.assert_allclose(applied.update_norms["adamw"], np.linalg.norm(moved), rtol=1e-3)


def test_counts_and_the_limit():
  counts = SkipCounts.zeros()
  for skipped in (True, False, True, True):
    counts = counts.add(jnp.asarray(skipped))
  assert (counts.total, counts.consecutive) == (3, 2)
  counts.check(limit=3)
  with pytest.raises(UserError, match=r"not finite in 2 steps in a row, the last batch is in bad\.npz"):
    counts.check(limit=2, batch_file="bad.npz")
