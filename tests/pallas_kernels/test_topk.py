"""One suite for every implementation of the selection; the oracle is a stable sort of the cleaned row.

Every new shape and every new k compiles for seconds in the interpreted kernels, so that tests share them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.topk import bits, topk, topk_bits, topk_mask, tpu
from pallas_kernels.topk.api import RUN_ANYWHERE

ROWS, S = 4, 37


@functools.partial(jax.jit, static_argnums=(1, 2))
def run(scores, k, implementation):
  return *topk(scores, k, implementation), topk_bits(scores, k, implementation)


run_mask = jax.jit(topk_mask, static_argnums=(1, 2))

ADVERSARIAL = st.one_of(
  st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38]),
  st.floats(width=32),
)


@pytest.fixture(params=RUN_ANYWHERE)
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
  """The indices, values and bits of every row against the oracle."""
  width = min(k, scores.shape[-1])
  values, indices, packed = map(np.asarray, run(scores, k, implementation))
  assert values.shape == indices.shape == (*scores.shape[:-1], width)
  assert indices.dtype == np.int32 and values.dtype == np.float32
  mask = np.asarray(bits.unpack(packed, scores.shape[-1]))
  for at in np.ndindex(scores.shape[:-1]):
    expected = by_hand(scores[at], k)
    empty = width - len(expected)
    assert indices[at].tolist() == expected + [-1] * empty
    assert np.flatnonzero(mask[at]).tolist() == expected
    chosen = np.append(clean(scores[at])[expected], [np.float32(-np.inf)] * empty)
    np.testing.assert_array_equal(values[at].view(np.int32), chosen.astype(np.float32).view(np.int32))


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(np.float32, (ROWS, S), elements=ADVERSARIAL))
def test_adversarial_floats(scores):
  for implementation in RUN_ANYWHERE:
    check(scores, 8, implementation)


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, (ROWS, S), elements=st.sampled_from([-1.0, -0.0, 0.0, 2.0])))
def test_plateaus_across_the_cut(scores):
  for implementation in RUN_ANYWHERE:
    check(scores, 8, implementation)


def test_more_than_a_row_holds_is_the_row(implementation):
  scores = np.random.default_rng(0).standard_normal((ROWS, S)).astype(np.float32)
  scores[0, 3] = np.nan
  check(scores, 2 * S, implementation)


def test_agrees_with_jax_on_clean_rows(implementation):
  scores = np.random.default_rng(0).standard_normal((2, 2, S)).astype(np.float32)
  check(scores, 8, implementation)
  theirs = np.sort(jax.lax.top_k(scores, 8)[1], axis=-1)
  np.testing.assert_array_equal(run(scores, 8, implementation)[1], theirs)


def test_ties_go_to_the_lowest_index(implementation):
  scores = np.zeros((ROWS, S), np.float32)
  scores[:, ::2] = -0.0
  scores[1, 30] = 1
  _, indices, _ = run(scores, 8, implementation)
  assert indices.tolist()[0] == list(range(8)) and indices.tolist()[1] == [*range(7), 30]


def test_rows_of_different_fullness(implementation):
  """As attention asks: a row has t finite scores, t = 0, 3, 8, 30; one of a longer row's is NaN."""
  filled = np.arange(S) < np.array([0, 3, 8, 30])[:, None]
  scores = np.where(filled, np.float32(0.5), np.float32(-np.inf))
  scores[3, 3] = np.nan
  check(scores, 8, implementation)
  _, indices, packed = run(scores, 8, implementation)
  assert indices.tolist()[:2] == [[-1] * 8, [0, 1, 2] + [-1] * 5] and not np.asarray(packed)[0].any()


def test_rows_without_a_number(implementation):
  scores = np.full((ROWS, S), -np.inf, np.float32)
  scores[1:3] = np.nan
  scores[3, 5] = -np.finfo(np.float32).max
  check(scores, 8, implementation)


def test_denormals_and_neighbouring_floats_are_told_apart(implementation):
  tiny = np.float32(1e-45)
  scores = np.full((ROWS, S), -1, np.float32)
  scores[0, :9] = [0, tiny, -tiny, 1, np.nextafter(np.float32(1), np.float32(2)), -tiny, 2, 3, 4]
  scores[1, :10] = [-tiny, -0.0, *[5] * 7, -tiny]
  check(scores, 8, implementation)


def test_a_row_does_not_depend_on_its_neighbours(implementation):
  """Plateaus in one row only; any order of rows and any batch layout select the same."""
  scores = np.random.default_rng(1).standard_normal((ROWS, S)).astype(np.float32)
  scores[2] = 0
  together = np.asarray(run(scores, 8, implementation)[1])
  for shift in range(1, ROWS):
    rolled = run(np.roll(scores, shift, axis=0), 8, implementation)[1]
    np.testing.assert_array_equal(rolled, np.roll(together, shift, axis=0))
  np.testing.assert_array_equal(run(scores.reshape(2, 2, S), 8, implementation)[1].reshape(ROWS, 8), together)


def long_rows(rows, width):
  """Random, a plateau over several chunks, mostly −∞, NaN, coarse, −0.0 before the cut; the rest random."""
  scores = np.random.default_rng(2).standard_normal((rows, width)).astype(np.float32)
  scores[1] = 0
  scores[2, width // 50 :] = -np.inf
  scores[3] = np.nan
  scores[4] = np.round(scores[4], 1)
  scores[5, : width * 3 // 4] = -0.0
  return scores


def test_long_rows(implementation):
  """Two chunks, the last no multiple of a tile; two programs of two groups of rows, the last not full."""
  check(long_rows(17, 4500), 130, implementation)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rows", "width", "k"),
  [(6, 200, 1), (70, 600, 130), (6, 40_000, 2048), (6, 9000, 9000), (6, 140_000, 2048), (6, 262_144, 4096)],
)
def test_many_rows_and_very_long_ones(implementation, rows, width, k):
  check(long_rows(rows, width), k, implementation)


@pytest.mark.parametrize("shape", [(2, 2, 4097)])
def test_the_mask_is_the_set(implementation, shape):
  scores = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
  mask = np.asarray(run_mask(scores, 17, implementation))
  assert mask.dtype == bool and mask.shape == shape
  for at in np.ndindex(shape[:-1]):
    assert np.flatnonzero(mask[at]).tolist() == by_hand(scores[at], 17)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(bool, st.sampled_from([(3, 1), (2, 128), (2, 2, 4096), (1, 4097), (2, 9000)])))
def test_bits_hold_any_mask(mask):
  packed = bits.pack(mask)
  assert packed.shape == (*mask.shape[:-1], bits.words(mask.shape[-1])) and packed.dtype == jnp.int32
  np.testing.assert_array_equal(bits.unpack(packed, mask.shape[-1]), mask)


def test_the_order_of_bits():
  """Position 4,096 + 5 · 128 + 7: second chunk, bit 5, lane 7."""
  packed = np.asarray(bits.pack(jnp.arange(5000) == 4096 + 5 * 128 + 7))
  assert packed.tolist() == [32 if word == 128 + 7 else 0 for word in range(256)]


def test_no_gradient_passes():
  def value(x, implementation=None):
    return jnp.sum(topk(x, 8, implementation)[0]) + jnp.sum(x)

  scores = jnp.ones((ROWS, S))
  np.testing.assert_array_equal(jax.grad(value)(scores), scores)
  assert jax.eval_shape(jax.grad(lambda x: value(x, "tpu_interpret")), scores).shape == (ROWS, S)


def test_no_rows_at_all():
  values, indices = topk(jnp.zeros((0, S)), 8)
  assert values.shape == indices.shape == (0, 8) and topk_mask(jnp.zeros((0, S)), 8).shape == (0, S)


def test_impossible_requests_are_named(implementation):
  scores = jnp.zeros((2, S))
  for call in (topk, topk_mask, topk_bits):
    with pytest.raises(ValueError, match="k = 0 selects nothing"):
      call(scores, 0, implementation)
    with pytest.raises(ValueError, match="float32 scores, got bfloat16"):
      call(scores.astype(jnp.bfloat16), 3, implementation)
    with pytest.raises(ValueError, match=r"'fast' is unknown; known: .*reference"):
      call(scores, 3, "fast")


def test_a_kernel_asked_for_by_name_says_what_it_does_not_take():
  with pytest.raises(
    ValueError, match="'tpu_interpret': rows of 1 to 262144 scores are possible, got 262145"
  ):
    topk_mask(jnp.zeros((1, 2**18 + 1)), 3, "tpu_interpret")
  with pytest.raises(ValueError, match="'tpu': at least one row"):
    topk(jnp.zeros((0, S)), 3, "tpu")


@pytest.mark.slow
def test_kernels_on_two_cores_race_for_nothing(race_free):
  """On the interpreter that knows cores, memory and transfers; rows for two programs, the last not full."""
  scores = long_rows(9, 130)
  with race_free(cores=2) as interpret:
    values, indices = tpu.topk(jnp.asarray(scores), 17, interpret)
  for row in range(9):
    expected = by_hand(scores[row], 17)
    assert indices[row].tolist()[: len(expected)] == expected
    np.testing.assert_array_equal(values[row][: len(expected)], clean(scores[row])[expected])
