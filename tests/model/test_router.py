"""Routing: which experts, with what weight, and what keeps the load even."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glm5_jax.model import router
from glm5_jax.model.router import expert_counts, load_violation, update_bias
from tests.model import toy

route = jax.jit(router.route, static_argnums=2)
sequence_balance_loss = jax.jit(router.sequence_balance_loss, static_argnums=2)

M, E, K = 6, 8, 2
CFG = toy.config()  # 8 experts, 2 per token, scaled by 2.5
NO_BIAS = np.zeros(E, np.float32)
GROUPED = CFG.replace(n_group=4, topk_group=2)


def logit(score):
  score = np.asarray(score, np.float64)
  return np.log(score / (1 - score)).astype(np.float32)


def test_dropped_groups_are_minus_infinity_not_zero():
  """With every choice score negative, a mask of 0 would prefer the dropped group."""
  cfg = CFG.replace(n_routed_experts=4, n_group=2, topk_group=1)
  bias = np.array([-1.5, -1.6, -2, -2], np.float32)
  routing = route(logit([[0.9, 0.8, 0.2, 0.1]]), bias, cfg)
  assert routing.experts_MK.tolist() == [[0, 1]]
  np.testing.assert_allclose(routing.weights_MK, [[2.5 * 0.9 / 1.7, 2.5 * 0.8 / 1.7]], rtol=1e-6)


def test_the_bias_selects_and_does_not_weigh():
  scores = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]]
  bias = np.array([0, -1, 0, 0, 0, 0, 0, 1], np.float32)
  for normalise, weights in [(True, [0.2 / 1.1, 0.9 / 1.1]), (False, [0.2, 0.9])]:
    routing = route(logit(scores), bias, CFG.replace(norm_topk_prob=normalise))
    assert routing.experts_MK.tolist() == [[7, 0]]
    np.testing.assert_allclose(routing.weights_MK, [2.5 * np.array(weights)], rtol=1e-5)
    np.testing.assert_allclose(routing.score_ME, scores, rtol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("level", [-100.0, -88.0, 0.0, 100.0])
def test_values_and_gradients_are_finite_at_extreme_logits(level, normalise):
  cfg = CFG.replace(norm_topk_prob=normalise)
  logits = np.full((M, E), level, np.float32) + np.arange(E, dtype=np.float32) / 8

  def weighted(logits):
    routing = route(logits, NO_BIAS, cfg)
    return jnp.sum(routing.weights_MK * jnp.array([1.0, 3.0])), routing

  (_, routing), grads = jax.value_and_grad(weighted, has_aux=True)(logits)
  assert np.isfinite(routing.weights_MK).all() and np.isfinite(grads).all()
  if normalise:
    np.testing.assert_allclose(routing.weights_MK.sum(-1), 2.5, rtol=1e-6)
    if level < 0:  # there the score is exp(logit): weights are a softmax of the logits, with its gradient
      chosen = np.take_along_axis(logits, routing.experts_MK, axis=-1) - level
      share = np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True)
      np.testing.assert_allclose(routing.weights_MK, 2.5 * share, rtol=1e-5)
      grad = np.take_along_axis(grads, routing.experts_MK, axis=-1)
      np.testing.assert_allclose(grad[:, 1], 2.5 * 2 * share[:, 0] * share[:, 1], rtol=1e-4)


def test_ties_go_to_the_lowest_ids():
  assert route(np.zeros((M, E), np.float32), NO_BIAS, CFG).experts_MK.tolist() == [[0, 1]] * M
  assert route(np.zeros((M, E), np.float32), NO_BIAS, GROUPED).experts_MK.tolist() == [[0, 1]] * M
  tied = logit([[0.1, 0.5, 0.2, 0.5, 0.5, 0.1, 0.1, 0.5]])
  assert route(tied, NO_BIAS, CFG).experts_MK.tolist() == [[1, 3]]


@pytest.mark.parametrize("cfg", [CFG, GROUPED], ids=["one group", "four groups"])
def test_broken_rows_have_a_defined_result(cfg):
  """NaN is never chosen before a number; rows without any finite logit take valid, distinct experts."""
  broken = np.full((3, E), -np.inf, np.float32)
  broken[1] = np.nan
  broken[2] = np.nan
  broken[2, 4:6] = [0.5, 1.0]
  routing = route(broken, NO_BIAS, cfg)
  assert routing.experts_MK.tolist() == [[0, 1], [0, 1], [5, 4]]
  assert np.isfinite(routing.weights_MK[2]).all()


@settings(max_examples=50, deadline=None)
@given(
  hnp.arrays(np.float32, (M, E), elements=st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 2.0])),
  hnp.arrays(np.float32, (E,), elements=st.sampled_from([-2.0, -0.25, 0.0, 0.5])),
)
def test_group_limited_choice_equals_a_plain_loop(logits, bias):
  routing = route(logits, bias, GROUPED)
  choice = np.asarray(routing.score_ME) + bias
  for m in range(M):
    groups = choice[m].reshape(4, 2)
    kept = sorted(range(4), key=lambda g: (-np.float32(groups[g].sum()), g))[:2]
    allowed = [e for e in range(E) if e // 2 in kept]
    expected = sorted(allowed, key=lambda e: (-choice[m, e], e))[:K]
    assert routing.experts_MK[m].tolist() == expected


def test_no_gradient_reaches_the_bias():
  logits = np.random.default_rng(0).standard_normal((M, E)).astype(np.float32)

  def loss(bias):
    routing = route(logits, bias, CFG)
    balance = sequence_balance_loss(routing, jnp.ones((2, M // 2), bool), CFG)
    return jnp.sum(routing.weights_MK**2) + balance

  assert not np.asarray(jax.grad(loss)(NO_BIAS)).any()


# Load


def test_counts_ignore_padding():
  experts = np.array([[0, 1], [1, 2], [7, 1], [3, 4]], np.int32)
  counts = expert_counts(experts, np.array([True, True, False, True]), E)
  assert counts.tolist() == [1, 2, 1, 1, 1, 0, 0, 0] and counts.dtype == "float32"


def test_the_bias_moves_against_the_load():
  """Up below the mean, down above it, unmoved at it; stacked routers each by their own mean."""
  counts = np.array([[4.0, 0, 2, 2], [0, 0, 0, 8]], np.float32)
  moved = update_bias(jnp.full((2, 4), 0.5), counts, 0.25)
  assert moved.tolist() == [[0.25, 0.75, 0.5, 0.5], [0.75, 0.75, 0.75, 0.25]]
  assert update_bias(jnp.zeros(4), np.zeros(4, np.float32), 0.25).tolist() == [0] * 4  # nothing was routed


def test_load_violation():
  counts = np.array([[2.0, 2, 2, 2], [8, 0, 0, 0], [0, 0, 0, 0]], np.float32)
  violation = np.asarray(load_violation(counts))
  np.testing.assert_allclose(violation[:2], [0, 3])
  assert np.isfinite(violation).all()


def balance_by_hand(logits_BTE, experts_BTK, valid_BT):
  """Σ_rows Σ_e f_e · P_e in float64, from the report's formula."""
  total = 0.0
  for logits, experts, valid in zip(logits_BTE.astype(np.float64), experts_BTK, valid_BT, strict=True):
    tokens = np.flatnonzero(valid)
    if len(tokens) == 0:
      continue
    scores = 1 / (1 + np.exp(-logits[tokens]))
    share = (scores / scores.sum(-1, keepdims=True)).mean(0)
    counts = np.bincount(experts[tokens].reshape(-1), minlength=E)
    total += np.sum(E / (K * len(tokens)) * counts * share)
  return total


def test_sequence_balance_loss_equals_the_formula():
  """Rows with uneven padding and an empty one, which adds nothing."""
  B, T = 4, 5
  logits = np.random.default_rng(1).standard_normal((B, T, E)).astype(np.float32)
  valid = np.arange(T) < np.array([5, 3, 1, 0])[:, None]
  flat = jnp.asarray(logits.reshape(B * T, E))
  routing = route(flat, NO_BIAS, CFG)
  experts = np.asarray(routing.experts_MK).reshape(B, T, K)
  expected = balance_by_hand(logits, experts, valid)
  np.testing.assert_allclose(sequence_balance_loss(routing, valid, CFG), expected, rtol=1e-6)
  assert expected > 2

  def loss(logits):
    return sequence_balance_loss(route(logits, NO_BIAS, CFG), valid, CFG)

  grads = np.asarray(jax.grad(loss)(flat)).reshape(B, T, E)
  assert np.isfinite(grads).all() and not grads[~valid].any() and grads[valid].any()
  step = 1e-5  # the choice, and with it f, is held: f has no gradient
  for b, t, e in [(0, 0, 3), (1, 2, 0), (2, 0, 7)]:
    moved = [logits.astype(np.float64) for _ in range(2)]
    moved[0][b, t, e] += step
    moved[1][b, t, e] -= step
    numeric = (balance_by_hand(moved[0], experts, valid) - balance_by_hand(moved[1], experts, valid)) / (
      2 * step
    )
    np.testing.assert_allclose(grads[b, t, e], numeric, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("level", [-50.0, -100.0, 100.0])
def test_balance_loss_at_extreme_logits(level):
  """Shares and gradients of scores that underflow together are those of scores that do not."""
  spread = np.random.default_rng(2).standard_normal((M, E)).astype(np.float32)

  def loss(logits, experts):
    routing = route(logits, NO_BIAS, CFG)._replace(experts_MK=experts)
    return sequence_balance_loss(routing, jnp.ones((2, M // 2), bool), CFG)

  experts = route(spread, NO_BIAS, CFG).experts_MK
  value, grads = jax.value_and_grad(loss)(level + spread, experts)
  assert np.isfinite(value) and np.isfinite(grads).all()
  if level < 0:  # there a score is exp(logit), so that only differences matter
    expected, right = jax.value_and_grad(loss)(spread - 20, experts)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads, right, atol=1e-5)


def test_a_balanced_choice_costs_one_a_row():
  """Σ f_e · P_e = 1 when all shares are equal, as f_e averages to 1."""
  experts = np.arange(8, dtype=np.int32).reshape(4, 2)
  routing = route(np.zeros((4, E), np.float32), NO_BIAS, CFG)._replace(experts_MK=experts)
  np.testing.assert_allclose(sequence_balance_loss(routing, np.ones((2, 2), bool), CFG), 2.0, rtol=1e-6)
