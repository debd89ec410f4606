"""One suite for every implementation of the selection; the oracle is a stable sort of the cleaned row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.topk import topk, topk_mask
from pallas_kernels.topk.api import IMPLEMENTATIONS

ROWS, S = 4, 37
run = functools.partial(jax.jit, static_argnums=(1, 2))
run_topk, run_mask = run(topk), run(topk_mask)

ADVERSARIAL = st.one_of(
  st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38]),
  st.floats(width=32),
)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
  return request.param


def clean(scores):
  """NaN counts as −∞, −0.0 as +0.0."""
  return np.where(np.isnan(scores), np.float32(-np.inf), scores) + np.float32(0)


def by_hand(scores, k):
  """Selected positions of one row, ascending: highest first, ties to the lowest, −∞ never."""
  row = clean(scores)
  best = np.argsort(-row, kind="stable")[:k]
  return sorted(int(i) for i in best if row[i] > -np.inf)


def check(scores, k, implementation):
  """The indices, values and mask of every row against the oracle and against each other."""
  width = min(k, scores.shape[-1])
  values, indices = map(np.asarray, run_topk(scores, k, implementation))
  mask = np.asarray(run_mask(scores, k, implementation))
  assert values.shape == indices.shape == (*scores.shape[:-1], width) and mask.shape == scores.shape
  assert indices.dtype == np.int32 and values.dtype == np.float32 and mask.dtype == bool
  for at in np.ndindex(scores.shape[:-1]):
    expected = by_hand(scores[at], k)
    empty = width - len(expected)
    assert indices[at].tolist() == expected + [-1] * empty
    assert np.flatnonzero(mask[at]).tolist() == expected
    np.testing.assert_array_equal(values[at], [*clean(scores[at])[expected], *[-np.inf] * empty])


@settings(max_examples=150, deadline=None)
@given(hnp.arrays(np.float32, (ROWS, S), elements=ADVERSARIAL), st.sampled_from([1, 8, S - 1, S, 2 * S]))
def test_adversarial_floats(scores, k):
  for implementation in IMPLEMENTATIONS:
    check(scores, k, implementation)


@settings(max_examples=80, deadline=None)
@given(hnp.arrays(np.float32, (ROWS, S), elements=st.sampled_from([-1.0, -0.0, 0.0, 2.0])))
def test_plateaus_across_the_cut(scores):
  for implementation in IMPLEMENTATIONS:
    check(scores, 8, implementation)


def test_agrees_with_jax_on_clean_rows(implementation):
  scores = np.random.default_rng(0).standard_normal((3, 5, 200)).astype(np.float32)
  check(scores, 17, implementation)
  theirs = np.sort(jax.lax.top_k(scores, 17)[1], axis=-1)
  np.testing.assert_array_equal(run_topk(scores, 17, implementation)[1], theirs)


def test_ties_go_to_the_lowest_index(implementation):
  scores = np.zeros((1, S), np.float32)
  scores[0, ::2] = -0.0
  _, indices = run_topk(scores, 5, implementation)
  assert indices.tolist() == [[0, 1, 2, 3, 4]]
  scores[0, 30] = 1
  assert run_topk(scores, 5, implementation)[1].tolist() == [[0, 1, 2, 3, 30]]


def test_rows_of_different_fullness(implementation):
  """As attention asks: row t has t finite scores."""
  scores = np.where(np.tri(S, S, -1, dtype=bool), np.float32(0.5), np.float32(-np.inf))
  scores[20:, 3] = np.nan
  check(scores, 8, implementation)
  assert (np.asarray(run_topk(scores, 8, implementation)[1])[0] == -1).all()
  assert not np.asarray(run_mask(scores, 8, implementation))[0].any()


def test_denormals_and_neighbouring_floats_are_told_apart(implementation):
  tiny = np.float32(1e-45)
  scores = np.array([[0, tiny, -tiny, 1, np.nextafter(np.float32(1), np.float32(2)), -1]], np.float32)
  check(scores, 2, implementation)
  check(scores, 3, implementation)


def test_a_row_does_not_depend_on_its_neighbours(implementation):
  """Plateaus in one row only; any batch layout selects the same."""
  scores = np.random.default_rng(1).standard_normal((6, S)).astype(np.float32)
  scores[2] = 0
  together = np.asarray(run_mask(scores, 8, implementation))
  for row in range(6):
    np.testing.assert_array_equal(run_mask(scores[row], 8, implementation), together[row])
  np.testing.assert_array_equal(run_mask(scores.reshape(2, 3, S), 8, implementation).reshape(6, S), together)


def test_impossible_requests_are_named(implementation):
  scores = jnp.zeros((2, S))
  for call in (topk, topk_mask):
    with pytest.raises(ValueError, match="k = 0 selects nothing"):
      call(scores, 0, implementation)
    with pytest.raises(ValueError, match="float32 scores, got bfloat16"):
      call(scores.astype(jnp.bfloat16), 3, implementation)
    with pytest.raises(ValueError, match=r"'fast' is unknown; known: .*reference"):
      call(scores, 3, "fast")
