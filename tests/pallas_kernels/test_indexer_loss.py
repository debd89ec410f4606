"""The indexer's loss: every implementation against the plain formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_loss import api, indexer_loss, tpu
from pallas_kernels.topk import bits

SCALE = 0.2


@pytest.fixture(params=api.RUN_ANYWHERE)
def implementation(request):
  return request.param


def operands(B, N, I, T, S, L=48, dtype="float32", share=0.5, empty=3, seed=0):
  """Random heads, a causal mask of about that share of the keys; the first `empty` queries mark nothing."""
  rng = np.random.default_rng(seed)

  def some(*shape, size=0.3):
    return jnp.asarray(size * rng.standard_normal(shape), dtype)

  mask = np.tril(np.ones((T, S), bool), S - T) & (rng.random((B, T, S)) < share)
  mask[:, :empty] = False
  index = some(B, T, I, 128), some(B, T, I, size=0.1).astype(jnp.float32), some(B, S, 128)
  return index, (some(B, N, T, L, size=0.6), some(B, S, L)), mask


def exact(index, main, mask):
  """(KL of each query, gradients of its sum by queries, gates and keys) in float64."""
  query, gate, key, q, k = (np.asarray(x, np.float64) for x in (*index, *main))
  dots = np.einsum("btij,bsj->btis", query, key)
  scores = np.einsum("btis,bti->bts", np.maximum(dots, 0), gate)

  def softmax(x, mask):
    top = np.where(mask.any(-1, keepdims=True), np.max(np.where(mask, x, -np.inf), -1, keepdims=True), 0)
    weights = np.where(mask, np.exp(np.where(mask, x - top, 0)), 0)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)

  target = softmax(np.einsum("bntl,bsl->bnts", q, k) * SCALE, mask[:, None]).mean(1)
  guess = softmax(scores, mask)
  kl = np.where(mask, target * np.log(np.where(mask, target, 1) / np.where(mask, guess, 1)), 0).sum(-1)
  grad_score = guess - target  # the formula to hold
  grad_dots = grad_score[:, :, None] * gate[..., None] * (dots > 0)
  return (
    kl,
    np.einsum("btis,bsj->btij", grad_dots, key),
    np.einsum("bts,btis->bti", grad_score, np.maximum(dots, 0)),
    np.einsum("btis,btij->bsj", grad_dots, query),
  )


def found(implementation, index, main, mask):
  words = bits.pack(jnp.asarray(mask))

  def loss(query, gate, key):
    return indexer_loss(query, gate, key, *main, words, SCALE, implementation)

  (total, kl), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*index)
  np.testing.assert_allclose(total, np.sum(kl), rtol=1e-5)
  return kl, *grads


SHAPES = {
  "one tile": dict(B=1, N=3, I=8, T=40, S=40),
  "tiles of both": dict(B=2, N=2, I=8, T=300, S=1100),
  "a selection": dict(B=1, N=2, I=8, T=200, S=200, share=0.1),
  "every visible key": dict(B=1, N=2, I=8, T=64, S=64, share=1.0, empty=0),
  "more than a chunk of words": dict(B=1, N=1, I=8, T=20, S=4300),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_values_and_gradients(implementation, shape):
  arguments = operands(**shape)
  names = ("kl", "query", "gate", "key")
  for name, expected, ours in zip(names, exact(*arguments), found(implementation, *arguments), strict=True):
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max(), rtol=0, err_msg=name)


def test_gradients_are_the_differences_of_the_loss():
  index, main, mask = operands(1, 2, 8, 24, 24)
  grads = exact(index, main, mask)[1:]
  rng = np.random.default_rng(1)
  for place, grad in enumerate(grads):
    way = rng.standard_normal(grad.shape)

    def moved(by, place=place, way=way):
      moved = [np.asarray(x, np.float64) for x in index]
      moved[place] = moved[place] + by * way
      return exact(moved, main, mask)[0].sum()

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    np.testing.assert_allclose(slope, (grad * way).sum(), rtol=1e-5)


def test_bfloat16(implementation):
  arguments = operands(1, 2, 8, 150, 150, L=64, dtype="bfloat16")
  for expected, ours in zip(exact(*arguments), found(implementation, *arguments), strict=True):
    np.testing.assert_allclose(
      np.asarray(ours, np.float64), expected, atol=0.012 * np.abs(expected).max(), rtol=0
    )


def test_alike_distributions_leave_no_rounding(implementation):
  """A KL of 1e-6 is right to a per cent: of p log p and p log q it would be the difference."""
  (query, gate, key), (q, k), mask = operands(1, 2, 8, 64, 64, share=1.0, empty=0)
  arguments = (1e-2 * query, gate, 1e-2 * key), (q * 1e-2, k), mask
  expected = exact(*arguments)[0]
  assert 1e-9 < expected.max() < 1e-5
  np.testing.assert_allclose(found(implementation, *arguments)[0], expected, atol=1e-2 * expected.max())


def test_a_query_that_marks_nothing_has_no_loss(implementation):
  index, main, mask = operands(1, 2, 8, 40, 40, empty=10)
  mask[:, :, 30:] = False
  kl, query, gate, key = map(np.asarray, found(implementation, index, main, mask))
  assert not kl[:, :10].any() and not query[:, :10].any() and not gate[:, :10].any()
  assert not key[:, 30:].any() and kl[:, 12:].all()
  assert not any(np.asarray(x).any() for x in found(implementation, index, main, np.zeros_like(mask)))


def test_a_weighted_sum_scales_its_gradients(implementation):
  index, main, mask = operands(1, 2, 8, 40, 40)
  words = bits.pack(jnp.asarray(mask))
  grad = jax.grad(lambda key: 3 * indexer_loss(*index[:2], key, *main, words, SCALE, implementation)[0])
  np.testing.assert_allclose(
    grad(index[2]), 3 * found(implementation, index, main, mask)[3], rtol=1e-4, atol=1e-6
  )


def test_nothing_else_is_trained(implementation):
  index, main, mask = operands(1, 2, 8, 40, 40)
  words = bits.pack(jnp.asarray(mask))
  grads = jax.grad(lambda q, k: indexer_loss(*index, q, k, words, SCALE, implementation)[0], argnums=(0, 1))(
    *main
  )
  assert not any(np.asarray(x).any() for x in grads)


def test_no_race_between_cores(race_free):
  index, main, mask = operands(1, 1, 8, 256, 256)
  words = bits.pack(jnp.asarray(mask))
  with race_free(cores=2) as interpret:
    jax.block_until_ready(
      jax.grad(lambda *index: tpu.indexer_loss(*index, *main, words, SCALE, interpret)[0])(*index)
    )


def test_refused():
  (query, gate, key), main, mask = operands(1, 2, 8, 16, 16)
  words = bits.pack(jnp.asarray(mask))
  with pytest.raises(ValueError, match="implementation 'fast' is unknown; known: reference"):
    indexer_loss(query, gate, key, *main, words, SCALE, "fast")
  with pytest.raises(ValueError, match=r"bits of shape \(1, 16, 128\) are needed, got"):
    indexer_loss(query, gate, key, *main, words[:, :8], SCALE)
  narrow = query[..., :64], gate, key[..., :64]
  with pytest.raises(ValueError, match="index_head_dim by 128 is possible, got 64"):
    indexer_loss(*narrow, *main, words, SCALE, "tpu_interpret")
  assert np.isfinite(indexer_loss(*narrow, *main, words, SCALE)[0])
