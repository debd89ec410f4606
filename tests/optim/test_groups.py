"""Freezing, AdamW, decay and clipping as make_optimizer composes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import OptimConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.optim import norms
from glm5_jax.optim.groups import make_optimizer
from glm5_jax.optim.guard import apply_or_skip
from glm5_jax.optim.rules import path_name

LR = 1e-2


def config(**changes):
  plain = {"name": "adamw", "schedule": "constant", "peak_lr": LR, "warmup_steps": 0, "clip_norm": 0.0}
  return OptimConfig(**(plain | changes))


@pytest.fixture
def tree(abstract):
  """One dense block with its indexer, the root's weights, and one router."""
  full = abstract(tiny())
  moe = full["mtp"]["block"]["moe"]
  router = {name: moe[name] for name in ("router", "router_bias")}
  keep = {name: full[name] for name in ("embed", "head", "final_norm", "layers_0")}
  return keep | {"mtp": {"block": {"moe": router}}}


def train(opt, params, gradients):
  state = opt.init(params)
  step = jax.jit(lambda g, s, p: apply_or_skip(opt, g, s, p, jnp.float32(1.0)))
  for grads in gradients:
    params, state, *_ = step(grads, state, params)
  return params, state


def by_path(tree):
  return {path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def test_frozen_parameters_neither_move_nor_decay_nor_hold_state(tree, random_tree):
  params, grads = random_tree(tree, 0), random_tree(tree, 1)
  opt = make_optimizer(config(weight_decay=0.5), tiny(), params, 10, frozen=("indexer",))
  after, state = train(opt, params, [grads, grads])
  before, after = by_path(params), by_path(after)
  for path in before:
    still = "indexer" in path or path.endswith("router_bias")
    assert np.array_equal(before[path], after[path]) == still, path
  trainable = [x.size for path, x in before.items() if "indexer" not in path and "router_bias" not in path]
  moments = [x.size for x in jax.tree.leaves(state) if x.ndim and x.shape != (5, 3)]  # (5, 3): coefficients
  assert sorted(moments) == sorted(2 * trainable)


def test_frozen_gradients_reach_nothing(tree, random_tree):
  """Not even through the global norm that clipping divides by."""
  params, grads = random_tree(tree, 0), random_tree(tree, 1)
  loud = random_tree(tree, 1)
  loud["layers_0"]["block_0"]["attn"]["indexer"]["wk"] *= 1e6
  loud["mtp"]["block"]["moe"]["router_bias"] += jnp.nan
  opt = make_optimizer(config(clip_norm=1.0), tiny(), params, 10)
  jax.tree.map(np.testing.assert_array_equal, *(train(opt, params, [g])[0] for g in (grads, loud)))


def test_adamw_equals_a_hand_written_one(tree, random_tree):
  b1, b2, eps, decay = 0.9, 0.95, 1e-8, 0.1
  params, gradients = random_tree(tree, 0), [random_tree(tree, seed) for seed in (1, 2, 3)]
  opt = make_optimizer(config(weight_decay=decay), tiny(), params, 10, frozen=())
  after = by_path(train(opt, params, gradients)[0])
  for path, p in by_path(params).items():
    p, m, v = p.astype(np.float64), 0.0, 0.0
    wd = 0.0 if "norm" in path else decay
    for t, grads in enumerate(gradients, start=1):
      g = by_path(grads)[path].astype(np.float64)
      m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
      p = p * (1 - LR * wd) - LR * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    if not path.endswith("router_bias"):
      np.testing.assert_allclose(after[path], p, rtol=2e-5, atol=1e-6, err_msg=path)


def test_muon_decays_its_matrices(tree, random_tree):
  """With a zero gradient the update is the decay alone: p (1 − lr · wd)."""
  params = random_tree(tree, 0)
  opt = make_optimizer(config(name="muon_split", weight_decay=0.1, ns_dtype="float32"), tiny(), params, 10)
  after = by_path(train(opt, params, [jax.tree.map(jnp.zeros_like, params)])[0])
  for path, p in by_path(params).items():
    kept = "norm" in path or "indexer" in path or path.endswith("router_bias")
    np.testing.assert_allclose(after[path], p if kept else p * (1 - LR * 0.1), rtol=1e-6, err_msg=path)


def test_bfloat16_parameters_stay_bfloat16(abstract, random_tree):
  cfg = tiny().replace(param_dtype="bfloat16")
  params = random_tree({"embed": abstract(cfg)["embed"]}, 0)
  after, _ = train(make_optimizer(config(), cfg, params, 10), params, [params])
  assert after["embed"].dtype == jnp.bfloat16 and not np.array_equal(after["embed"], params["embed"])


def test_clipping_scales_to_the_limit_and_leaves_smaller_gradients():
  clip = norms.clip_by_global_norm(1.0)
  big = {"a": jnp.full((3, 4), 2.0), "b": jnp.full((2,), -3.0)}
  clipped, _ = clip.update(big, clip.init(big))
  np.testing.assert_allclose(norms.global_norm(jax.tree.leaves(clipped)), 1.0, rtol=1e-6)
  np.testing.assert_allclose(clipped["a"] / clipped["b"][0], big["a"] / big["b"][0], rtol=1e-6)
  small = jax.tree.map(lambda g: g * 0.01, big)
  jax.tree.map(np.testing.assert_array_equal, clip.update(small, clip.init(small))[0], small)


def test_global_norm_at_zero_has_gradient_zero():
  """Pitfall 12."""
  value, grad = jax.value_and_grad(lambda x: norms.global_norm([x]))(jnp.zeros(3))
  assert value == 0 and (grad == 0).all()
  zeros = {"a": jnp.zeros(3)}
  assert (norms.clip_by_global_norm(1.0).update(zeros, None)[0]["a"] == 0).all()


def test_global_norm_accumulates_in_float32_and_keeps_nan():
  x = jnp.full((5000,), 0.1, jnp.bfloat16)
  exact = np.sqrt(5000 * float(x[0]) ** 2)
  np.testing.assert_allclose(norms.global_norm([x, x]), np.sqrt(2) * exact, rtol=1e-5)
  assert jnp.isnan(norms.global_norm([x, jnp.array([jnp.nan])]))


def test_impossible_schedule_is_refused(tree):
  with pytest.raises(UserError, match=r"config\.optim\.warmup_steps=10: should be less than 10"):
    make_optimizer(config(schedule="cosine", warmup_steps=10), tiny(), tree, 10)
