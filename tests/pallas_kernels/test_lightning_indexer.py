"""One suite for every implementation of the indexer with selection.

Queries, keys and gates are small integers, so that every sum is exact in any order and sets are compared bit
by bit; the oracle is NumPy. Every new shape compiles for seconds in the interpreted kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import order, select, select_indices, select_paged, tpu
from pallas_kernels.lightning_indexer.api import RUN_ANYWHERE
from pallas_kernels.topk import bits

I, J = 16, 128


@pytest.fixture(params=RUN_ANYWHERE)
def implementation(request):
  return request.param


run = jax.jit(select, static_argnums=(3, 7))
run_indices = jax.jit(select_indices, static_argnums=(3, 7))
run_paged = jax.jit(select_paged, static_argnums=(5, 6))


def operands(B, T, S, start=0, dtype=np.float32, seed=0, heads=I):
  """Integers, many scores equal and many 0; queries stand at slots start to start + T − 1."""
  rng = np.random.default_rng(seed)
  query = rng.integers(-2, 3, (B, T, heads, J)).astype(np.float32)
  gate = rng.integers(-4, 5, (B, T, heads)).astype(np.float32)
  key = rng.integers(-2, 3, (B, S, J)).astype(np.float32)
  slots = np.broadcast_to(np.arange(start, start + T, dtype=np.int32), (B, T))
  return jnp.asarray(query, dtype), gate, jnp.asarray(key, dtype), slots


def scores_by_hand(query, gate, key):
  """Float64 [B, T, S]."""
  query, key = np.asarray(query, np.float64), np.asarray(key, np.float64)
  total = np.zeros((*query.shape[:2], key.shape[1]))
  for i in range(query.shape[2]):
    total += np.maximum(np.einsum("btj,bsj->bts", query[:, :, i], key), 0) * gate[:, :, i, None]
  return total


def best(score, seen, k):
  """Selected slots of one query, ascending: highest first, ties to the lowest."""
  ranked = np.lexsort((np.arange(len(score)), -np.where(seen, score, -np.inf)))[:k]
  return sorted(int(s) for s in ranked if seen[s] and np.isfinite(score[s]))


def check(packed, query, gate, key, k, slots, segments, key_segments):
  score = scores_by_hand(query, gate, key)
  mask = np.asarray(bits.unpack(packed, key.shape[1]))
  assert packed.shape == (*slots.shape, bits.words(key.shape[1]))
  for b, t in np.ndindex(slots.shape):
    same = (key_segments[b] == segments[b, t]) & (segments[b, t] != 0)
    seen = same & (np.arange(key.shape[1]) <= slots[b, t])
    assert np.flatnonzero(mask[b, t]).tolist() == best(score[b, t], seen, k), (b, t)


def documents(B, T, S, start=0, lengths=()):
  """Segments 1, 2, … of these lengths over S keys, the rest padding: of the queries, and of the keys."""
  keys = np.zeros((B, S), np.int32)
  begin = 0
  for number, length in enumerate(lengths):
    keys[:, begin : begin + length] = number + 1
    begin += length
  return keys[:, start : start + T].copy(), keys


CASES = {
  # rows, queries, keys, first slot, lengths of documents, k
  "fewer keys than k": (2, 12, 40, 0, (40,), 64),
  "packed documents and padding, several blocks": (2, 150, 1300, 560, (500, 90, 40, 600), 50),
}
SLOW_CASES = {
  "a causal square of several tiles": (1, 140, 1100, 0, (1100,), 33),
  "behind the first chunk": (1, 40, 5000, 4700, (4996,), 300),
  # The last block's keys all lie behind the first chunk, of which words are left from the blocks before.
  "a document behind the first chunk": (1, 200, 5000, 4200, (4300, 690), 50),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_selected_sets(implementation, case):
  B, T, S, start, lengths, k = case
  args = operands(B, T, S, start)
  segments = documents(B, T, S, start, lengths)
  check(run(*args[:3], k, args[3], *segments, implementation), *args[:3], k, args[3], *segments)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES.values(), ids=SLOW_CASES.keys())
def test_selected_sets_of_longer_rows(implementation, case):
  test_selected_sets(implementation, case)


def test_bfloat16_and_rows_that_differ(implementation):
  """Row 0 is full, row 1 starts with padding as cached prompts do, some queries are padding."""
  query, gate, key, slots = operands(2, 12, 1100, 1000, jnp.bfloat16)
  segments, keys = documents(2, 12, 1100, 1000, (1100,))
  keys[1, :900] = 0
  segments[1, 9:] = 0
  slots = slots - np.array([[0], [60]], np.int32)
  packed = run(query, gate, key, 70, slots, segments, keys, implementation)
  check(packed, query, gate, key, 70, slots, segments, keys)
  assert not np.asarray(packed)[1, 9:].any()
  mask = np.asarray(bits.unpack(packed, 1100))
  indices = np.asarray(run_indices(query, gate, key, 70, slots, segments, keys, implementation))
  assert indices.shape == (2, 12, 70)
  for b, t in np.ndindex(2, 12):
    chosen = np.flatnonzero(mask[b, t]).tolist()
    assert indices[b, t].tolist() == chosen + [-1] * (70 - len(chosen))


def test_a_plateau_of_zeros_goes_to_the_lowest_slots(implementation):
  """Without a positive product every score is 0, or −0.0 by a negative gate."""
  query, gate, key, slots = operands(2, 12, 40)
  key = -jnp.abs(key) - 1
  query = jnp.abs(query) + 1
  segments = documents(2, 12, 40, 0, (40,))
  mask = bits.unpack(run(query, gate, key, 7, slots, *segments, implementation), 40)
  expected = np.arange(40) <= np.minimum(slots[0], 6)[:, None]
  np.testing.assert_array_equal(mask, np.broadcast_to(expected, (2, 12, 40)))


def test_keys_without_a_number_are_never_selected(implementation):
  query, gate, key, slots = operands(2, 12, 40)
  key = key.at[:, 3].set(np.nan).at[:, 7].set(np.nan)
  segments = documents(2, 12, 40, 0, (40,))
  mask = np.asarray(bits.unpack(run(query, gate, key, 7, slots, *segments, implementation), 40))
  assert not mask[:, :, [3, 7]].any()
  np.testing.assert_array_equal(mask.sum(-1)[0], [1, 2, 3, 3, 4, 5, 6, 6, 7, 7, 7, 7])


def test_no_query_sees_anything(implementation):
  query, gate, key, slots = operands(2, 12, 40)
  nothing = np.zeros((2, 12), np.int32), np.ones((2, 40), np.int32)
  assert not np.asarray(run(query, gate, key, 7, slots, *nothing, implementation)).any()


def pages(key, length, seed=0):
  """Keys [B, S, J] cut into pages, shuffled among others that hold NaN, and the table that finds them."""
  B, S, _ = key.shape
  count = -(-S // length)
  padded = np.pad(
    np.asarray(key, np.float32), ((0, 0), (0, count * length - S), (0, 0)), constant_values=np.nan
  )
  place = np.random.default_rng(seed).permutation(B * count + 5)[: B * count].reshape(B, count)
  pool = np.full((B * count + 5, length, J), np.nan, np.float32)
  pool[place] = padded.reshape(B, count, length, J)
  return jnp.asarray(pool, key.dtype), place.astype(np.int32)


def check_paged(found, query, gate, key, k, slots):
  score = scores_by_hand(query, gate, key)
  for b, t in np.ndindex(slots.shape):
    expected = best(score[b, t], np.arange(key.shape[1]) <= slots[b, t], k)
    assert found[b, t].tolist() == expected + [-1] * (found.shape[2] - len(expected)), (b, t)


@pytest.mark.parametrize(
  ("B", "T", "length", "dtype"),
  [pytest.param(11, 1, 64, jnp.bfloat16, marks=pytest.mark.slow), (3, 3, 512, np.float32)],
)
def test_decoding_from_pages(implementation, B, T, length, dtype):
  """One query of 11 sequences, three of each of 3, two programs: one sees nothing, one itself, one all."""
  S, k = 2300, 40
  query, gate, key, _ = operands(B, T, S, dtype=dtype)
  pool, table = pages(key, length)
  slots = np.random.default_rng(1).integers(0, S, (B, T)).astype(np.int32)
  slots[0], slots[1], slots[2] = -1, 0, S - 1
  table[1, 1:] = 10**6  # not read
  found = np.asarray(run_paged(query, gate, pool, table, slots, k, implementation))
  assert (
    found.shape == (B, T, k) and (found[0] == -1).all() and found[1].tolist() == [[0] + [-1] * (k - 1)] * T
  )
  check_paged(found, query, gate, key, k, slots)


@pytest.mark.slow
def test_more_queries_than_rows_of_a_program(implementation):
  query, gate, key, _ = operands(2, 11, 600)
  pool, table = pages(key, 32)
  slots = np.random.default_rng(1).integers(0, 600, (2, 11)).astype(np.int32)
  check_paged(
    np.asarray(run_paged(query, gate, pool, table, slots, 9, implementation)), query, gate, key, 9, slots
  )


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "S"), [(32, 9000), (64, 600)])
def test_heads_and_chunks(implementation, heads, S):
  args = operands(1, 16, S, S - 16, jnp.bfloat16, heads=heads)
  segments = documents(1, 16, S, S - 16, (S,))
  check(run(*args[:3], 500, args[3], *segments, implementation), *args[:3], 500, args[3], *segments)


def rounding(B, T, S, heads):
  """Operands whose true scores are equal for all keys of a query, so that only rounding tells keys apart.

  Head i reads element i of a key, the elements of all keys are the same numbers rearranged, small and large,
  and gates are powers of two, by which no product rounds.
  """
  rng = np.random.default_rng(5)
  numbers = np.ldexp(rng.uniform(0.5, 1, heads), rng.integers(-6, 1, heads)).astype(np.float32)
  key = np.zeros((B, S, J), np.float32)
  key[:, :, :heads] = rng.permuted(np.broadcast_to(numbers, (B, S, heads)), axis=-1)
  query = np.broadcast_to(np.eye(heads, J, dtype=np.float32), (B, T, heads, J))
  gate = np.broadcast_to(np.exp2(rng.integers(0, 3, (B, T, 1))).astype(np.float32), (B, T, heads))
  return jnp.asarray(query), gate, jnp.asarray(key)


def score_in_order(gate, key):
  """float32 [B, T, S] of `rounding`, added as `order` says."""
  heads = gate.shape[-1]
  terms = key[:, None, :, :heads] * gate[:, :, None]
  classes = [sum((terms[..., i] for i in range(c + 8, heads, 8)), start=terms[..., c]) for c in range(8)]
  halves = [(classes[i] + classes[i + 4]) + (classes[i + 2] + classes[i + 6]) for i in (0, 1)]
  return halves[0] + halves[1]


@pytest.mark.parametrize("heads", [I, pytest.param(32, marks=pytest.mark.slow)])
def test_all_kernels_add_heads_in_one_order(heads):
  """So that prefill and decoding select alike also where scores differ in their last bit only."""
  query, gate, key = rounding(2, 12, 40, heads)
  slots = np.broadcast_to(np.arange(28, 40, dtype=np.int32), (2, 12))
  ones = np.ones((2, 12), np.int32), np.ones((2, 40), np.int32)
  mask = np.asarray(bits.unpack(run(query, gate, key, 7, slots, *ones, "tpu_interpret"), 40))
  score = score_in_order(gate, np.asarray(key))
  assert all(len(set(row.tolist())) > 1 for row in score.reshape(-1, 40))
  for b, t in np.ndindex(2, 12):
    assert np.flatnonzero(mask[b, t]).tolist() == best(score[b, t], np.arange(40) <= slots[b, t], 7)
  query, gate, key = rounding(3, 3, 2300, heads)
  slots = np.random.default_rng(1).integers(1000, 2300, (3, 3)).astype(np.int32)
  found = np.asarray(run_paged(query, gate, *pages(key, 512), slots, 40, "tpu_interpret"))
  score = score_in_order(gate, np.asarray(key))
  for b, t in np.ndindex(3, 3):
    assert found[b, t].tolist() == best(score[b, t], np.arange(2300) <= slots[b, t], 40)


def test_the_order_of_heads():
  assert order.by_class(jnp.arange(16), 0).tolist() == [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15]
  both = order.by_class(jnp.arange(48).reshape(2, 24), -1)
  assert both.tolist()[1] == [24 + s + 8 * c for s in (0, 4, 2, 6, 1, 5, 3, 7) for c in range(3)]


def test_no_gradient_passes():
  query, gate, key, slots = operands(1, 12, 40)
  segments = documents(1, 12, 40, 0, (40,))

  def value(query, gate, key, implementation=None):
    packed = select(query, gate, key, 5, slots, *segments, implementation)
    return (
      jnp.sum(jnp.where(bits.unpack(packed, 40), 1.0, 0.0)) + jnp.sum(query) + jnp.sum(gate) + jnp.sum(key)
    )

  floats = query, jnp.asarray(gate), key
  for grad in jax.grad(value, argnums=(0, 1, 2))(*floats):
    assert (np.asarray(grad) == 1).all()
  kernel = functools.partial(value, implementation="tpu_interpret")
  assert jax.eval_shape(jax.grad(kernel, argnums=2), *floats).shape == key.shape


@pytest.mark.parametrize(
  ("change", "says"),
  [
    (dict(k=0), "k = 0 selects nothing"),
    (dict(key=np.float16), "both float32 or both bfloat16, got float32 and float16"),
    (dict(query=jnp.bfloat16), "both float32 or both bfloat16, got bfloat16 and float32"),
    (dict(gate=3), r"gate of shape \(2, 12, 16\) is needed .* got \(2, 12, 13\)"),
    (dict(implementation="fast"), "'fast' is unknown; known: .*reference"),
  ],
)
def test_impossible_requests_are_named(change, says):
  query, gate, key, slots = operands(2, 12, 40)
  segments = documents(2, 12, 40, 0, (40,))
  query = query.astype(change.get("query", query.dtype))
  gate = gate[..., change.get("gate", 0) :]
  keys = key.astype(change.get("key", key.dtype))
  k, implementation = change.get("k", 4), change.get("implementation")
  with pytest.raises(ValueError, match=says):
    select(query, gate, keys, k, slots, *segments, implementation)
  with pytest.raises(ValueError, match=says):
    select_indices(query, gate, keys, k, slots, *segments, implementation)
  with pytest.raises(ValueError, match=says):
    select_paged(query, gate, keys, np.zeros((2, 1), np.int32), slots, k, implementation)


def test_arrays_that_do_not_belong_together_are_named():
  query, gate, key, slots = operands(2, 12, 40)
  segments, keys = documents(2, 12, 40, 0, (40,))
  with pytest.raises(ValueError, match=r"key_segments of shape \(2, 40\) is needed .* got \(2, 39\)"):
    select(query, gate, key, 4, slots, segments, keys[:, 1:])
  with pytest.raises(ValueError, match=r"slots of shape \(2, 12\)"):
    select(query, gate, key, 4, slots[0], segments, keys)
  with pytest.raises(ValueError, match=r"page_table of shape \(2, 3\) is needed .* got \(1, 3\)"):
    select_paged(query, gate, key, np.zeros((1, 3), np.int32), slots, 4)
  with pytest.raises(ValueError, match=r"keys \[·, ·, J\] are needed, got \(2, 12, 16, 128\), \(2, 40, 64\)"):
    select(query, gate, key[..., :64], 4, slots, segments, keys)


def test_a_kernel_asked_for_by_name_says_what_it_does_not_take():
  query, gate, key, slots = operands(2, 12, 40)
  segments = documents(2, 12, 40, 0, (40,))
  with pytest.raises(ValueError, match="'tpu_interpret': index_head_dim 128 is possible, got 64"):
    select(query[..., :64], gate, key[..., :64], 4, slots, *segments, "tpu_interpret")
  with pytest.raises(ValueError, match="'tpu': index heads by 8, at most 120, are possible, got 12"):
    select_indices(query[:, :, :12], gate[:, :, :12], key, 4, slots, *segments, "tpu")
  with pytest.raises(ValueError, match=r"pages of 16, 32, 64, … 2048 keys are possible, got 40"):
    select_paged(query, gate, key, np.zeros((2, 1), np.int32), slots, 4, "tpu_interpret")
  # Without a name the reference takes them.
  narrow = select(query[..., :64], gate, key[..., :64], 4, slots, *segments)
  check(narrow, query[..., :64], gate, key[..., :64], 4, slots, *segments)


def test_long_rows_are_scored_in_blocks_by_the_reference():
  """600 queries: no array of all queries and all keys, and the same sets."""
  args = operands(1, 600, 600)
  segments = documents(1, 600, 600, 0, (300, 290))
  call = functools.partial(
    select, k=9, slots_BT=args[3], segments_BT=segments[0], key_segments_BS=segments[1]
  )
  text = jax.jit(lambda *a: call(*a, implementation="reference")).lower(*args[:3]).as_text()
  assert "x600x600x" not in text and "x256x600x" in text
  check(call(*args[:3]), *args[:3], 9, args[3], *segments)


@pytest.mark.slow
def test_blocks_race_for_nothing(race_free):
  query, gate, key, slots = operands(1, 40, 1100, 1000, jnp.bfloat16)
  segments = documents(1, 40, 1100, 1000, (1100,))
  with race_free(cores=2) as interpret:
    packed = tpu.select(query, gate, key, 33, slots, *segments, interpret=interpret)
    packed.block_until_ready()
  check(packed, query, gate, key, 33, slots, *segments)


@pytest.mark.slow
def test_pages_race_for_nothing(race_free):
  query, gate, key, _ = operands(11, 1, 2300, dtype=jnp.bfloat16)
  pool, table = pages(key, 512)
  slots = np.random.default_rng(1).integers(0, 2300, (11, 1)).astype(np.int32)
  with race_free(cores=2) as interpret:
    found = tpu.select_paged(query, gate, pool, table, slots, 40, interpret=interpret)
    found.block_until_ready()
  check_paged(np.asarray(found), query, gate, key, 40, slots)
