"""Moving rows to experts and back, against plain gathers whose gradients are JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.model.dispatch import collect, dispatch, plan_rows, spread

M, K, E, D = 9, 2, 5, 7
run_plan = jax.jit(plan_rows, static_argnums=(1, 2))


def choices(seed, tokens=M, slots=K, experts=E):
  """Distinct experts a token, as a router gives them."""
  rng = np.random.default_rng(seed)
  return np.argsort(rng.random((tokens, experts)), axis=-1)[:, :slots].astype(np.int32)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_every_pair_has_a_row_of_its_experts_group(seed, alignment, one_expert):
  experts = choices(seed)
  if one_expert:  # the least even load: slot 0 of every token goes to expert 3
    experts = np.stack([np.full(M, 3), np.arange(M) % 3], axis=1).astype(np.int32)
  rows = run_plan(experts, E, alignment)
  token_of_row, row_of_slot, sizes = map(
    np.asarray, (rows.token_of_row, rows.row_of_slot_MK, rows.group_sizes_E)
  )
  counts = np.bincount(experts.reshape(-1), minlength=E)
  assert sizes.tolist() == [-(-c // alignment) * alignment for c in counts]
  assert sizes.sum() <= len(token_of_row) and (alignment == 1 or len(token_of_row) % alignment == 0)
  begins = np.cumsum(sizes) - sizes
  assert len(set(row_of_slot.reshape(-1).tolist())) == M * K
  for m, k in np.ndindex(M, K):
    row, expert = row_of_slot[m, k], experts[m, k]
    assert token_of_row[row] == m and begins[expert] <= row < begins[expert] + counts[expert]
  assert (np.delete(token_of_row, row_of_slot.reshape(-1)) == M).all()  # the rest is padding
  for begin, count in zip(begins, counts, strict=True):
    assert (np.diff(token_of_row[begin : begin + count]) > 0).all()  # stable: tokens keep their order


@pytest.mark.parametrize("alignment", [1, 4])
def test_dispatch_has_the_gradient_of_a_plain_gather(alignment):
  rng = np.random.default_rng(0)
  rows = plan_rows(choices(1), E, alignment)
  x = jnp.asarray(rng.standard_normal((M, D)), jnp.float32)
  grad = jnp.asarray(rng.standard_normal((len(rows.token_of_row), D)), jnp.float32)

  def plain(x):
    return jnp.concatenate([x, jnp.zeros((1, D))])[rows.token_of_row]

  (out, pull), (right, right_pull) = jax.vjp(lambda x: dispatch(x, rows), x), jax.vjp(plain, x)
  np.testing.assert_array_equal(out, right)
  np.testing.assert_allclose(pull(grad)[0], right_pull(grad)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alignment", [1, 4])
def test_weighted_rows_are_collected_with_the_gradient_of_a_plain_sum(alignment):
  rng = np.random.default_rng(0)
  rows = plan_rows(choices(2), E, alignment)
  out = jnp.asarray(rng.standard_normal((len(rows.token_of_row), D)), jnp.float32)
  weights = jnp.asarray(rng.random((M, K)), jnp.float32)
  grad = jnp.asarray(rng.standard_normal((M, D)), jnp.float32)

  def plain(out, weights):
    result = jnp.zeros((M, D))
    for k in range(K):
      result += out[rows.row_of_slot_MK[:, k]] * weights[:, k, None]
    return result

  ours, pull = jax.vjp(lambda o, w: collect(o * spread(w, rows)[:, None], rows), out, weights)
  right, right_pull = jax.vjp(plain, out, weights)
  np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-6)
  for left, expected in zip(pull(grad), right_pull(grad), strict=True):
    np.testing.assert_allclose(left, expected, rtol=1e-5, atol=1e-6)


def test_padding_rows_reach_nothing():
  rows = plan_rows(choices(3), E, 4)
  padding = np.asarray(rows.token_of_row) == M
  out = np.ones((len(padding), D), np.float32)
  out[padding] = np.nan
  result, pull = jax.vjp(lambda o: collect(o, rows), jnp.asarray(out))
  assert (np.asarray(result) == K).all()
  (grad,) = pull(jnp.ones((M, D)))
  assert not np.asarray(grad)[padding].any()
  assert not np.asarray(dispatch(jnp.ones((M, D)), rows))[padding].any()
  assert not np.asarray(spread(jnp.ones((M, K)), rows))[padding].any()


def test_sums_are_exact_in_bfloat16():
  """1.0 added a thousand times to one row is 1000; a bfloat16 sum would stop at 256."""
  rows = plan_rows(np.arange(1000, dtype=np.int32)[None], 1000, 1)
  ones = jnp.ones((1000, 3), jnp.bfloat16)
  total, pull = jax.vjp(lambda x: dispatch(x, rows), jnp.ones((1, 3), jnp.bfloat16))
  assert total.dtype == jnp.bfloat16 and (np.asarray(pull(ones)[0], np.float32) == 1000).all()
  collected = collect(ones, rows)
  assert collected.dtype == "float32" and (np.asarray(collected) == 1000).all()
