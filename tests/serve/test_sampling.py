"""From logits to tokens, and the rejection rule: exact where it can be, counted where it cannot."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from glm5_jax.serve.sampling import Sampling, draw, probabilities, residual, sample, verify
from tests.serve.oracle import misfit

VOCABULARY = 6
finite_logits = arrays.arrays(
  np.float32, VOCABULARY, elements=st.floats(-60, 60, width=32, allow_subnormal=False)
)
weights = arrays.arrays(np.float32, VOCABULARY, elements=st.sampled_from([0, 0.125, 1, 3, 3.5, 1000]))
distributions = weights.filter(np.any).map(lambda w: (w / w.sum()).astype(np.float32))


def keys(count: int, seed: int = 0) -> jax.Array:
  return jax.random.split(jax.random.key(seed), count)


@settings(deadline=None)  # the first example compiles
@given(finite_logits, st.floats(1e-6, 1), st.floats(0.01, 10))
def test_top_p_keeps_the_fewest_likeliest_tokens(logits, top_p, temperature):
  full = np.asarray(probabilities(logits, Sampling(temperature)))
  kept = np.asarray(probabilities(logits, Sampling(temperature, top_p)))
  assert kept.sum() == pytest.approx(1, abs=1e-5) and np.isfinite(kept).all()
  inside = kept > 0
  assert inside.any()
  if not inside.all():
    assert full[inside].min() >= full[~inside].max()
  np.testing.assert_allclose(kept[inside], full[inside] / full[inside].sum(), rtol=1e-4)
  # Enough mass, and no token more than needed; the margin is rounding.
  assert full[inside].sum() >= top_p - 1e-5
  assert full[inside].sum() - full[inside].min() <= top_p + 1e-5


def test_top_p_breaks_ties_by_the_lowest_id():
  kept = probabilities(jnp.zeros(4), Sampling(top_p=0.5))
  np.testing.assert_allclose(kept, [0.5, 0.5, 0, 0], atol=1e-6)


@settings(deadline=None)  # the first example compiles
@given(finite_logits)
def test_temperature_0_is_greedy(logits):
  greedy = Sampling(temperature=0.0)
  expected = int(np.argmax(logits))  # ties go to the lowest id
  assert np.asarray(probabilities(logits, greedy)).tolist() == np.eye(VOCABULARY)[expected].tolist()
  assert sample(keys(1), logits[None], greedy).tolist() == [expected]


@pytest.mark.parametrize("logits", [[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [300.0, 300.0, -300.0]])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1e-6), Sampling(1.0, 1e-6), Sampling(0.0)])
def test_extreme_logits_give_a_distribution(logits, sampling):
  probs = np.asarray(probabilities(jnp.array(logits), sampling))
  assert np.isfinite(probs).all() and probs.sum() == pytest.approx(1)


def test_draws_follow_the_distribution_and_never_take_a_zero():
  probs = jnp.array([0.5, 0.0, 0.3, 0.2])
  tokens = draw(keys(20_000), jnp.broadcast_to(probs, (20_000, 4)))
  assert misfit(np.bincount(tokens, minlength=4), np.asarray(probs, np.float64)) < 5


def test_residual_of_the_known_case():
  rest = residual(jnp.array([0.6, 0.4]), jnp.array([0.3, 0.7]))
  np.testing.assert_allclose(rest, [1, 0], atol=1e-6)


@settings(deadline=None)  # the first example compiles
@given(distributions, distributions)
def test_accepting_or_drawing_from_the_residual_adds_up_to_the_target(target, draft):
  """min(p, q) + P(reject) · residual = p, for every token."""
  rest = np.asarray(residual(target, draft), np.float64)
  assert rest.sum() == pytest.approx(1, abs=1e-5) and (rest >= 0).all()
  overlap = np.minimum(target, draft).astype(np.float64)
  np.testing.assert_allclose(overlap + (1 - overlap.sum()) * rest, target, atol=1e-5)


def random_chain(rng, vocabulary: int) -> np.ndarray:
  """[V + 1, V] next-token distributions after each token and, last, at the start; some tokens impossible."""
  table = rng.gamma(0.5, size=(vocabulary + 1, vocabulary)) * (rng.random((vocabulary + 1, vocabulary)) < 0.8)
  table[:, 0] += 0.05
  return table / table.sum(1, keepdims=True)


@pytest.mark.parametrize("draft_steps", [1, 2, 3])
def test_verified_tokens_have_the_target_distribution(draft_steps):
  """Drafts from one Markov chain, verified by another: K + 1 tokens in a row are as the other's own.

  Rows that end early are continued by the target, as the next round would.
  """
  V, K, B = 3, draft_steps, 200_000
  rng = np.random.default_rng(draft_steps)
  target, draft = jnp.array(random_chain(rng, V)), jnp.array(random_chain(rng, V))
  before, drafted, draft_probs = jnp.full(B, V), [], []
  for k in range(K):
    draft_probs.append(draft[before])
    before = draw(keys(B, seed=k + 1), draft[before])
    drafted.append(before)
  drafted = jnp.stack(drafted, axis=1)
  contexts = jnp.concatenate([jnp.full((B, 1), V), drafted], axis=1)
  accepted, after = jax.jit(verify)(keys(B), target[contexts], jnp.stack(draft_probs, axis=1), drafted)
  assert set(np.unique(accepted)) == set(range(K + 1))

  tokens = jnp.concatenate([drafted, jnp.zeros((B, 1), jnp.int32)], axis=1)
  tokens = tokens.at[jnp.arange(B), accepted].set(after)
  for place in range(1, K + 1):
    fresh = draw(keys(B, seed=100 + place), target[tokens[:, place - 1]])
    tokens = tokens.at[:, place].set(jnp.where(place > accepted, fresh, tokens[:, place]))

  expected, chain = np.zeros((V,) * (K + 1)), np.asarray(target, np.float64)
  for cell in itertools.product(range(V), repeat=K + 1):
    expected[cell] = np.prod([chain[a, b] for a, b in zip((V, *cell), cell, strict=False)])
  counts = np.zeros_like(expected)
  np.add.at(counts, tuple(np.asarray(tokens).T), 1)
  assert misfit(counts, expected) < 5


def test_a_draft_that_agrees_is_always_accepted():
  probs = jnp.broadcast_to(jnp.array([0.1, 0.2, 0.7]), (1000, 4, 3))
  drafted = jnp.stack([draw(keys(1000, seed=k), probs[:, 0]) for k in range(3)], axis=1)
  accepted, _ = verify(keys(1000, seed=9), probs, probs[:, :3], drafted)
  assert accepted.tolist() == [3] * 1000
