"""The MoE layer against one token at a time, by every implementation of its matmul."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model.moe import MoE
from pallas_kernels.grouped_matmul.api import RUN_ANYWHERE
from tests.model import toy

CFG = toy.config(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, hidden_size=12)
MANY, FEW = (3, 40), (2, 3)  # rows and tokens: sorted by expert, or every expert on every token


def weights(cfg=CFG, seed=0):
  rng = np.random.default_rng(seed)
  E, D, F = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size

  def matrix(*shape):
    return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)

  def mlp(*lead):
    return {
      "gate_proj": matrix(*lead, D, F),
      "up_proj": matrix(*lead, D, F),
      "down_proj": matrix(*lead, F, D),
    }

  bias = jnp.asarray(rng.standard_normal(E) * 0.1, jnp.float32)
  return {"router": matrix(D, E), "router_bias": bias, "experts": mlp(E), "shared": mlp()}


def swiglu(x, w):
  return (jax.nn.silu(x @ w["gate_proj"]) * (x @ w["up_proj"])) @ w["down_proj"]


def by_token(params, x_BTD, experts_BTK, cfg=CFG):
  """Each token through its own experts' matrices; weights from the scores alone."""

  def one(x, experts):
    scores = jax.nn.sigmoid(x @ params["router"])[experts]
    share = scores / scores.sum() * cfg.routed_scaling_factor
    outputs = [swiglu(x, jax.tree.map(lambda w, e=e: w[e], params["experts"])) for e in experts]
    return sum(w * y for w, y in zip(share, outputs, strict=True)) + swiglu(x, params["shared"])

  return jax.vmap(jax.vmap(one))(x_BTD, experts_BTK)


def inputs(shape, seed=1):
  rng = np.random.default_rng(seed)
  x, cotangent = rng.standard_normal((2, *shape, CFG.hidden_size)).astype(np.float32)
  return x, cotangent, np.arange(shape[1]) < np.array([[shape[1]], [shape[1] - 1], [1]])[: shape[0]]


@functools.partial(jax.jit, static_argnums=0, compiler_options=toy.FAST_COMPILE)
def run(cfg, params, x, cotangent, valid):
  def loss(params, x):
    (y, aux), sown = MoE(cfg).apply({"params": params}, x, valid, mutable=["intermediates"])
    return jnp.vdot(y, cotangent), (y, aux, sown["intermediates"]["experts_BTK"][0])

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)


@functools.cache
def expected(shape):
  x, cotangent, valid = inputs(shape)
  (_, (_, _, experts)), _ = run(CFG, weights(), x, cotangent, valid)
  experts = np.asarray(experts)

  def loss(params, x):
    y = by_token(params, x, experts)
    return jnp.vdot(y, cotangent), y

  plain = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), compiler_options=toy.FAST_COMPILE)
  (_, y), grads = plain(weights(), x)
  return y, grads


@pytest.mark.parametrize("shape", [FEW, (1, 1), MANY], ids=["few tokens", "one token", "many tokens"])
@pytest.mark.parametrize("implementation", ["", *RUN_ANYWHERE])
def test_equals_token_by_token(shape, implementation):
  x, cotangent, valid = inputs(shape)
  (_, (y, _, _)), grads = run(CFG.replace(moe_implementation=implementation), weights(), x, cotangent, valid)
  right, right_grads = expected(shape)
  np.testing.assert_allclose(y, right, atol=1e-4)
  toy.close(grads, right_grads, 1e-4)


def test_counts_and_balance_ignore_padding():
  x, cotangent, valid = inputs(MANY)
  (_, (_, aux, experts)), _ = run(CFG, weights(), x, cotangent, valid)
  counts = np.bincount(np.asarray(experts)[valid].reshape(-1), minlength=8)
  assert aux["counts_E"].tolist() == counts.tolist()
  assert counts.sum() == 2 * valid.sum() < 2 * valid.size
  x[~valid] = 7.0
  (_, (_, changed, _)), _ = run(CFG, weights(), x, cotangent, valid)
  toy.close(changed, aux, 1e-6)


def test_router_logits_are_float32_under_bfloat16():
  """Of two experts whose logits bfloat16 would round to one number the better is chosen."""
  cfg = CFG.replace(dtype="bfloat16", n_group=1, num_experts_per_tok=1)
  params = weights()
  router = np.zeros((12, 8), np.float32)
  router[:, 2], router[:, 5] = 1.0, 1.0
  router[0, 5] += 2.0**-9
  params |= {"router": jnp.asarray(router), "router_bias": jnp.zeros(8)}
  x = np.ones((1, 40, 12), np.float32)
  (_, (y, _, experts)), _ = run(cfg, params, jnp.asarray(x, jnp.bfloat16), x, np.ones((1, 40), bool))
  assert (np.asarray(experts) == 5).all() and y.dtype == jnp.bfloat16
