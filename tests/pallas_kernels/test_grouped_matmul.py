"""One suite for every implementation of the grouped matmul."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_matmul, row_alignment, tpu
from pallas_kernels.grouped_matmul.api import RUN_ANYWHERE

E = 5
# Rows, group sizes, the multiple they are promised to be of: balanced, unbalanced, with empty groups, with
# rows past the last group, all rows in one group, no rows in any.
CASES = {
  "balanced": (40, (8, 8, 8, 8, 8), 8),
  "unbalanced": (40, (1, 30, 2, 4, 3), 1),
  "empty groups": (40, (0, 7, 0, 33, 0), 1),
  "rows past the last": (40, (8, 0, 16, 0, 8), 8),
  "rows past the last, unaligned": (37, (3, 0, 1, 20, 2), 1),
  "one group": (32, (0, 0, 32, 0, 0), 16),
  "nothing": (16, (0, 0, 0, 0, 0), 1),
}
WIDTHS = [(96, 192), (7, 129), (128, 100)]


@pytest.fixture(params=RUN_ANYWHERE)
def implementation(request):
  return request.param


def by_hand(x, w, sizes):
  """Float64, one group after another; rows past the last stay 0."""
  out, begin = np.zeros((len(x), w.shape[2])), 0
  for matrix, size in zip(w, sizes, strict=True):
    out[begin : begin + size] = x[begin : begin + size].astype(np.float64) @ matrix
    begin += size
  return out


def gradients_by_hand(x, w, sizes, grad):
  grad_x, grad_w, begin = np.zeros(x.shape), np.zeros(w.shape), 0
  for e, size in enumerate(sizes):
    part = np.s_[begin : begin + size]
    grad_x[part] = grad[part].astype(np.float64) @ w[e].T
    grad_w[e] = x[part].astype(np.float64).T @ grad[part]
    begin += size
  return grad_x, grad_w


def operands(rows, width_in=96, width_out=130, groups=E, seed=0):
  rng = np.random.default_rng(seed)
  shapes = [(rows, width_in), (groups, width_in, width_out), (rows, width_out)]
  return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def with_gradients(x, w, sizes, grad, implementation, alignment):
  out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation, alignment), x, w)
  return out, *pull(grad)


run = jax.jit(with_gradients, static_argnums=(4, 5))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_and_gradients(implementation, case):
  rows, sizes, alignment = case
  x, w, grad = operands(rows)
  out, grad_x, grad_w = run(x, w, np.array(sizes, np.int32), grad, implementation, alignment)
  np.testing.assert_allclose(out, by_hand(x, w, sizes), atol=1e-4)
  right_x, right_w = gradients_by_hand(x, w, sizes, grad)
  np.testing.assert_allclose(grad_x, right_x, atol=2e-4)
  np.testing.assert_allclose(grad_w, right_w, atol=2e-4)
  used = sum(sizes)
  assert not np.asarray(out[used:]).any() and not np.asarray(grad_x[used:]).any()
  for e, size in enumerate(sizes):
    assert np.asarray(grad_w[e]).any() == (size > 0)  # exactly zero for an empty group


@pytest.fixture
def small_parts(monkeypatch):
  """Several tiles, blocks and parts of the widths at a few rows and columns."""
  sizes = {"TILE_ROWS": 64, "BLOCK_ROWS": 32, "MATRIX_BYTES": 2**17, "SUM_ROWS": 128, "SUM_COLUMNS": 256}
  for name, value in (sizes | {"SUM_STRIP": 64}).items():
    monkeypatch.setattr(tpu, name, value)


PARTED = {
  "whole tiles": (256, (64, 0, 128, 64, 0)),
  "groups meet inside blocks": (256, (3, 130, 1, 0, 122)),
  "several groups in a block": (224, (2, 3, 5, 7, 200)),
  "tiles past the last": (256, (0, 40, 0, 31, 0)),
  "the last tile in part": (240, (100, 0, 1, 139, 0)),
  "nothing": (256, (0, 0, 0, 0, 0)),
}


@pytest.mark.parametrize("case", PARTED.values(), ids=PARTED.keys())
def test_parts_of_a_kernel_make_the_whole(small_parts, case):
  """Values and gradients over tiles that groups share, whose rest holds what is no number."""
  rows, sizes = case
  used = sum(sizes)
  x, w, grad = operands(rows, 200, 300)
  x[used:], grad[used:] = np.nan, np.inf
  out, grad_x, grad_w = with_gradients(x, w, np.array(sizes, np.int32), grad, "tpu_interpret", 1)
  right_x, right_w = gradients_by_hand(x, w, sizes, grad)
  np.testing.assert_allclose(out, by_hand(x, w, sizes), atol=5e-4)
  np.testing.assert_allclose(grad_x, right_x, atol=5e-4)
  np.testing.assert_allclose(grad_w, right_w, atol=5e-4)


def test_a_rest_that_nobody_reads_costs_no_visit(small_parts):
  """Without `zero_rest` the rows of groups, and the matrices' gradients, are the same."""
  sizes = np.array([0, 70, 0, 31, 0], np.int32)
  x, w, grad = operands(256, 200, 300)

  def both(zero_rest):
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, "tpu_interpret", zero_rest=zero_rest), x, w)
    grad_x, grad_w = pull(grad)
    return out[:101], grad_x[:101], grad_w

  for left, right in zip(both(False), both(True), strict=True):
    np.testing.assert_array_equal(left, right)
  written = [np.unique(tpu.visits(sizes, 256, 64, empty=False, rest=rest).tile_V) for rest in (True, False)]
  assert [tiles.tolist() for tiles in written] == [[0, 1, 2, 3], [0, 1]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.booleans(), st.booleans())
def test_visits_are_the_pairs_that_share_rows(sizes, empty, rest):
  """In the order of rows, with an empty group's where asked for; then, once, tiles without any group."""
  tile, tiles = 16, 11
  plan = np.array(plan_visits(np.array(sizes, np.int32), tiles * tile - 5, tile, empty, rest))
  expected, start = [], 0
  for group, size in enumerate(sizes):
    end = start + size
    for t in range(start // tile, -(-end // tile)) if size else []:
      expected.append((t, t, group, max(start - t * tile, 0), min(end - t * tile, tile)))
    if not size and empty:
      t = min(start // tile, tiles - 1)
      expected.append((t, t, group, start - t * tile, start - t * tile))
    start = end
  used = len(expected)
  assert [tuple(visit) for visit in plan[:, :used].T] == expected
  tile_V, fetch_V, group_V, begin_V, end_V = plan[:, used:]
  covered = -(-start // tile)
  assert (begin_V == end_V).all() and (group_V == 3).all() and (fetch_V == max(covered - 1, 0)).all()
  cleared = tile_V[begin_V == 0]
  assert cleared.tolist() == (list(range(covered, tiles))[: tile_V.size] if rest else [])
  assert (np.isin(tile_V[begin_V != 0], [max(covered - 1, 0), tiles - 1])).all()


plan_visits = jax.jit(tpu.visits, static_argnums=(1, 2, 3, 4))


def test_two_cores_do_not_race(small_parts, race_free):
  x, w, grad = operands(192, 200, 300)
  sizes = np.array([3, 90, 1, 0, 60], np.int32)
  with race_free(cores=2) as interpret:
    out, pull = jax.vjp(lambda x, w: tpu.grouped_matmul(x, w, sizes, interpret=interpret), x, w)
    grad_x, grad_w = jax.block_until_ready(pull(grad))
  right_x, right_w = gradients_by_hand(x, w, sizes, grad)
  np.testing.assert_allclose(out, by_hand(x, w, sizes), atol=5e-4)
  np.testing.assert_allclose(grad_x, right_x, atol=5e-4)
  np.testing.assert_allclose(grad_w, right_w, atol=5e-4)


def test_rows_past_the_last_group_may_hold_any_number(implementation):
  """Garbage there reaches neither the result nor any gradient."""
  x, w, grad = operands(40)
  sizes = np.array([8, 0, 16, 0, 8], np.int32)
  clean = run(x, w, sizes, grad, implementation, 8)
  x[32:], grad[32:] = 1e3, -1e3
  for left, right in zip(run(x, w, sizes, grad, implementation, 8), clean, strict=True):
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("width_in, width_out", WIDTHS)
def test_widths_that_are_no_multiple_of_a_tile(implementation, width_in, width_out):
  x, w, grad = operands(24, width_in, width_out)
  sizes = (5, 0, 9, 3, 6)
  out, grad_x, grad_w = run(x, w, np.array(sizes, np.int32), grad, implementation, 1)
  right_x, right_w = gradients_by_hand(x, w, sizes, grad)
  np.testing.assert_allclose(out, by_hand(x, w, sizes), atol=1e-4)
  np.testing.assert_allclose(grad_x, right_x, atol=2e-4)
  np.testing.assert_allclose(grad_w, right_w, atol=2e-4)


@pytest.mark.parametrize("alignment", [1, 2, 8, 16, 64, 128])
def test_every_alignment_gives_the_same(implementation, alignment):
  x, w, grad = operands(4 * 128, 12, 10)
  sizes = np.array([128, 0, 256, 0, 0], np.int32)
  right = run(x, w, sizes, grad, "reference", 1)
  for left, expected in zip(run(x, w, sizes, grad, implementation, alignment), right, strict=True):
    np.testing.assert_allclose(left, expected, atol=2e-4)


def test_the_alignment_that_is_asked_for(implementation):
  """`row_alignment` is a power of two, and groups padded to it are what the caller then hands in."""
  for rows, groups in [(1, 8), (64, 8), (4096, 8), (1_000_000, 256)]:
    alignment = row_alignment(rows, groups, implementation)
    assert alignment >= 1 and alignment & (alignment - 1) == 0


def test_bfloat16_accumulates_in_float32(implementation):
  """1 + 1 + … over 1024 terms, forward and in both gradients; bfloat16 sums would stop at 256."""
  N = 1024
  ones = jnp.ones((N, N), jnp.bfloat16)
  sizes = np.array([0, N], np.int32)
  w = jnp.ones((2, N, N), jnp.bfloat16)
  out, grad_x, grad_w = run(ones, w, sizes, ones, implementation, 128)
  assert out.dtype == grad_x.dtype == grad_w.dtype == jnp.bfloat16
  assert (np.asarray(out, np.float32) == N).all() and (np.asarray(grad_x, np.float32) == N).all()
  assert (np.asarray(grad_w[1], np.float32) == N).all() and not np.asarray(grad_w[0], np.float32).any()


@settings(max_examples=25, deadline=None)
@given(
  st.lists(st.integers(0, 12), min_size=E, max_size=E).filter(lambda s: sum(s) <= 40), st.integers(0, 99)
)
def test_any_group_sizes(sizes, seed):
  x, w, grad = operands(40, 6, 5, seed=seed)
  right = by_hand(x, w, sizes), *gradients_by_hand(x, w, sizes, grad)
  for implementation in RUN_ANYWHERE:
    left = run(x, w, np.array(sizes, np.int32), grad, implementation, 1)
    for a, b in zip(left, right, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-4, err_msg=implementation)


def test_no_rows_and_one_row(implementation):
  x, w, _ = operands(1, 6, 5)
  np.testing.assert_allclose(
    grouped_matmul(x, w, np.array([0, 0, 1, 0, 0]), implementation), x @ w[2], atol=1e-5
  )
  out, grad_x, grad_w = run(x[:0], w, np.zeros(E, np.int32), np.zeros((0, 5), np.float32), implementation, 1)
  assert out.shape == (0, 5) and grad_x.shape == (0, 6) and not np.asarray(grad_w).any()


@pytest.mark.parametrize(
  "shapes, says",
  [
    (((4, 3), (2, 5, 6), (2,)), r"x \[M, K\] and w \[E, K, N\], got \(4, 3\) and \(2, 5, 6\)"),
    (((4,), (2, 5, 6), (2,)), r"got \(4,\)"),
    (((4, 5), (2, 5, 6), (3,)), r"2 matrices need as many group sizes, got \(3,\)"),
  ],
)
def test_wrong_shapes_are_named(shapes, says):
  x, w, sizes = (jnp.zeros(shape, kind) for shape, kind in zip(shapes, ("f4", "f4", "i4"), strict=True))
  with pytest.raises(ValueError, match=says):
    grouped_matmul(x, w, sizes)


def test_an_unknown_name_is_an_error():
  x, w, _ = operands(4, 3, 2)
  with pytest.raises(ValueError, match=r"'fast' is unknown; known: .*reference"):
    grouped_matmul(x, w, np.zeros(E, np.int32), "fast")
  with pytest.raises(ValueError, match="'fast' is unknown"):
    row_alignment(4, E, "fast")
