"""Chunked cross-entropy against the plain one, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.losses.cross_entropy import chunked_cross_entropy, token_log_probs

M, D, V = 13, 6, 17


def data(seed=0, rows=M):
  rng = np.random.default_rng(seed)
  hidden = rng.standard_normal((rows, D)).astype(np.float32)
  head = rng.standard_normal((D, V)).astype(np.float32)
  weights = rng.choice([0.0, 0.5, 1.0], rows).astype(np.float32)
  return hidden, head, rng.integers(0, V, rows, dtype=np.int32), weights


@jax.jit
def unchunked(hidden, head, targets, weights):
  """The weighted sum of losses, all logits at once."""
  logp = jax.nn.log_softmax(jnp.dot(hidden, head, precision="highest"))
  return -jnp.sum(jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0] * weights)


@functools.partial(jax.jit, static_argnames="chunk")
def chunked(hidden, head, targets, weights, scale, chunk):
  def loss(hidden, head):
    sums = chunked_cross_entropy(hidden, head, targets, weights, chunk)
    return sums.loss * scale, sums

  (_, sums), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
  return sums, grads


@settings(max_examples=40, deadline=None)
@given(
  st.sampled_from([1, 5, 12, 13, 1000]),
  st.sampled_from([1.0, -2.5, 0.0, 1e-3, 4096.0]),
  st.integers(0, 99),
)
def test_any_chunk_and_scale_equal_the_unchunked(chunk, scale, seed):
  hidden, head, targets, weights = data(seed)
  sums, grads = chunked(hidden, head, targets, weights, scale, chunk)
  expected, right = jax.value_and_grad(unchunked, argnums=(0, 1))(hidden, head, targets, weights)
  np.testing.assert_allclose(sums.loss, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(sums.nll_M @ weights, expected, rtol=1e-5, atol=1e-5)
  hits = np.argmax(hidden @ head, axis=-1) == targets
  np.testing.assert_array_equal(sums.hits_M, hits)
  for left, gradient in zip(grads, right, strict=True):
    np.testing.assert_allclose(left, scale * gradient, rtol=1e-4, atol=1e-5 * abs(scale))


def test_value_without_gradient_is_the_same():
  """Outside of differentiation other code runs."""
  hidden, head, targets, weights = data()
  sums = jax.jit(chunked_cross_entropy, static_argnums=4)(hidden, head, targets, weights, 5)
  np.testing.assert_allclose(sums.loss, unchunked(hidden, head, targets, weights), rtol=1e-5)
  np.testing.assert_array_equal(sums.hits_M, chunked(hidden, head, targets, weights, 1.0, 4)[0].hits_M)


@pytest.mark.parametrize("chunk", [4, 13])
def test_nothing_to_predict(chunk):
  hidden, head, targets, _ = data()
  sums, grads = chunked(hidden, head, targets, np.zeros(M, np.float32), 1.0, chunk)
  assert sums.loss == 0
  assert not any(np.asarray(g).any() for g in grads)


def test_masked_tokens_get_exactly_no_gradient():
  hidden, head, targets, weights = data(seed=1)
  assert 0 < (weights == 0).sum() < M
  _, (grad_hidden, _) = chunked(hidden, head, targets, weights, 1.0, 5)
  np.testing.assert_array_equal(np.asarray(grad_hidden).any(-1), weights != 0)


def test_a_tied_head_gathers_both_gradients():
  """The embedding is read once to embed and once, transposed, to predict."""
  rng = np.random.default_rng(3)
  embed = rng.standard_normal((V, D)).astype(np.float32)
  inputs, targets, weights = rng.integers(0, V, M), rng.integers(0, V, M, dtype=np.int32), data()[3]

  def tied(loss, embed):
    return loss(jnp.tanh(embed[inputs]), embed.T, targets, weights)

  ours = jax.grad(lambda e: tied(lambda *a: chunked_cross_entropy(*a, 4).loss, e))(embed)
  np.testing.assert_allclose(ours, jax.grad(functools.partial(tied, unchunked))(embed), atol=1e-4)


def test_extreme_logits_stay_finite():
  hidden, head, targets, weights = data()
  sums, grads = chunked(hidden * 1e4, head * 1e4, targets, weights, 1.0, 4)
  assert np.isfinite(sums.loss) and all(np.isfinite(g).all() for g in grads)


def test_bfloat16_sums_in_float32():
  """Losses of 4096 tokens add up in float32, and gradients keep their input's dtype."""
  rows = 4096
  hidden, head, targets, _ = data(rows=rows)
  hidden, head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
  ones = np.ones(rows, np.float32)
  sums, grads = chunked(hidden, head, targets, ones, 1 / rows, 100)
  wide = hidden.astype(jnp.float32), head.astype(jnp.float32)
  expected, right = jax.value_and_grad(unchunked, argnums=(0, 1))(*wide, targets, ones)
  assert sums.loss.dtype == "float32" and [g.dtype for g in grads] == [jnp.bfloat16] * 2
  np.testing.assert_allclose(sums.loss, expected, rtol=1e-5)
  for left, gradient in zip(grads, right, strict=True):
    error = np.abs(np.asarray(left, np.float32) - np.asarray(gradient) / rows).max()
    assert error < 0.01 * np.abs(gradient).max() / rows


def test_weights_in_float32_keep_their_gradient_under_bfloat16_activations():
  hidden, head, targets, weights = data()
  _, (grad_hidden, grad_head) = chunked(jnp.asarray(hidden, jnp.bfloat16), head, targets, weights, 1.0, 4)
  assert grad_hidden.dtype == jnp.bfloat16 and grad_head.dtype == jnp.float32


@pytest.mark.parametrize("chunk", [1, 4, 13, 50])
def test_token_log_probs(chunk):
  hidden, head, targets, _ = data()
  log_probs, correct = jax.jit(token_log_probs, static_argnums=3)(hidden, head, targets, chunk)
  logp = np.asarray(jax.nn.log_softmax(hidden @ head))
  np.testing.assert_allclose(log_probs, logp[np.arange(M), targets], rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(correct, logp.argmax(-1) == targets)
