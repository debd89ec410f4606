"""One suite for every implementation of attention over selected keys; the oracle is NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import RESULT, attend_bits, tpu
from pallas_kernels.sparse_mla import tiles as tiling
from pallas_kernels.sparse_mla.api import RUN_ANYWHERE
from pallas_kernels.topk import bits

WIDTH = 128  # of heads
SCALE = 0.125


@pytest.fixture(params=RUN_ANYWHERE)
def implementation(request):
  return request.param


def operands(B, N, T, S, dtype=np.float32, widths=(WIDTH, WIDTH), seed=0):
  """q, k, v and a gradient of the output, rounded to dtype; logits are some units large."""
  rng = np.random.default_rng(seed)
  shapes = ((B, N, T, widths[0]), (B, N, S, widths[0]), (B, N, S, widths[1]), (B, N, T, widths[1]))
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def causal(B, T, S, start=0, keep=1.0, seed=1):
  """bool [B, T, S]: queries at slots from start select these many of the keys up to their own."""
  seen = np.arange(S) <= np.arange(start, start + T)[:, None]
  return seen & (np.random.default_rng(seed).random((B, T, S)) < keep)


def by_hand(q, k, v, gradient, mask, scale=SCALE):
  """Output and gradients of q, k, v in float64."""
  q, k, v, gradient = (np.asarray(x, np.float64) for x in (q, k, v, gradient))
  logits = np.where(mask[:, None], np.einsum("bntk,bnsk->bnts", q, k) * scale, -np.inf)
  most = np.max(logits, axis=-1, keepdims=True)
  weight = np.exp(logits - np.where(np.isfinite(most), most, 0))
  p = weight / np.maximum(weight.sum(-1, keepdims=True), 1e-300)
  out = np.einsum("bnts,bnsh->bnth", p, v)
  dp = np.einsum("bnth,bnsh->bnts", gradient, v)
  ds = p * (dp - np.sum(gradient * out, -1, keepdims=True)) * scale
  dq, dk = np.einsum("bnts,bnsk->bntk", ds, k), np.einsum("bnts,bntk->bnsk", ds, q)
  return out, dq, dk, np.einsum("bnts,bnth->bnsh", p, gradient)


def compute(q, k, v, gradient, words, implementation, scale=SCALE):
  """The same four by the implementation."""
  out, pull = jax.vjp(lambda q, k, v: attend_bits(q, k, v, words, scale, implementation), q, k, v)
  return out, *pull(gradient)


run = jax.jit(compute, static_argnums=(5, 6))


def check(args, mask, implementation, scale=SCALE, logits=1.0):
  """Errors against the largest value: rounding of products and of what comes out; `logits` are so large."""
  found = run(*args, bits.pack(jnp.asarray(mask)), implementation, scale)
  tolerance = 5e-6 * logits if args[0].dtype == jnp.float32 else 1e-2
  for name, mine, right in zip(("out", "dq", "dk", "dv"), found, by_hand(*args, mask, scale), strict=True):
    assert mine.dtype == args[0].dtype and mine.shape == right.shape
    error = np.max(np.abs(np.asarray(mine, np.float64) - right)) / np.max(np.abs(right))
    assert error < tolerance, (name, error)
  return found


CASES = {
  # rows, heads, queries, keys, slot of the first query, part of the keys that is selected, dtype
  "few keys, all selected": (2, 2, 40, 40, 0, 1.0, np.float32),
  "several tiles, bfloat16": (1, 2, 1100, 1300, 200, 0.1, jnp.bfloat16),
  "several tiles": (1, 1, 1100, 2100, 1000, 0.02, np.float32),
}
SLOW_CASES = {
  "behind the first chunk": (1, 2, 300, 5000, 4700, 0.05, jnp.bfloat16),
  "one query of several rows": (3, 2, 1, 4097, 4096, 0.3, np.float32),
  "a causal square": (2, 1, 2100, 2100, 0, 0.5, jnp.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_gradients(implementation, case):
  B, N, T, S, start, keep, dtype = case
  check(operands(B, N, T, S, dtype), causal(B, T, S, start, keep), implementation)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES.values(), ids=SLOW_CASES.keys())
def test_output_and_gradients_of_longer_rows(implementation, case):
  test_output_and_gradients(implementation, case)


@pytest.mark.parametrize("widths", [(256, 128), (128, 256)])
def test_widths_of_heads_and_a_scale_that_is_no_power_of_two(implementation, widths):
  args = operands(1, 1, 140, 300, widths=widths)
  check(args, causal(1, 140, 300, 160, 0.3), implementation, 0.07)


def test_rows_that_select_nothing(implementation):
  """0 with gradient 0; of a whole tile of queries, of keys, and of some rows of another tile."""
  mask = causal(1, 1100, 1100, keep=0.3)
  mask[:, 1024:] = False
  mask[:, ::3] = False
  mask[:, :, :5] = False
  found = check(operands(1, 1, 1100, 1100), mask, implementation)
  nobody = ~mask[0].any(axis=1)
  assert nobody.sum() > 400
  for rows in found[:2]:
    assert (np.asarray(rows)[0, 0, nobody] == 0).all()
  for keys in found[2:]:
    assert (np.asarray(keys)[0, 0, ~mask[0].any(axis=0)] == 0).all()


def test_nothing_is_selected_at_all(implementation):
  args = operands(2, 1, 40, 300)
  for x in run(*args, bits.pack(jnp.zeros((2, 40, 300), bool)), implementation):
    assert (np.asarray(x) == 0).all()


def test_rows_of_a_shard_in_any_order(implementation):
  """Some of the queries against all keys, shuffled: the same numbers, shuffled."""
  q, k, v, gradient = operands(2, 1, 300, 1100)
  mask = causal(2, 300, 1100, 700, 0.2)
  order = np.random.default_rng(3).permutation(300)
  there = check((q, k, v, gradient), mask, implementation)
  shuffled = check((q[:, :, order], k, v, gradient[:, :, order]), mask[:, order], implementation)
  for plain, mine in zip(there[:2], shuffled[:2], strict=True):
    np.testing.assert_allclose(plain[:, :, order], mine, rtol=0, atol=5e-6 * np.max(np.abs(plain)))


def test_large_logits_of_unselected_keys_count_nothing(implementation):
  """Key 3 has logits of some hundred; selected ones of minus some hundred alone still sum to 1."""
  q, k, v, gradient = operands(1, 1, 40, 40)
  q = jnp.abs(q)
  k = jnp.where(jnp.arange(40)[:, None] == 3, 40.0, -30 - jnp.abs(k))
  mask = causal(1, 40, 40)
  mask[:, :, 3] = False
  found = check((q, k, v, gradient), mask, implementation, logits=100)
  assert np.isfinite(np.asarray(found[0])).all() and np.abs(found[0][0, 0, 1]).max() > 0.1


def test_a_policy_keeps_the_result():
  """Of the reference's two loops the forward one runs once where its result is kept by name."""
  q, k, v, _ = operands(1, 1, 40, 40)
  words = bits.pack(jnp.asarray(causal(1, 40, 40)))

  def loops(policy):
    loss = jax.checkpoint(lambda q: jnp.sum(attend_bits(q, k, v, words, SCALE, "reference")), policy=policy)
    return str(jax.make_jaxpr(jax.grad(loss))(q)).count("scan[")

  assert loops(jax.checkpoint_policies.save_only_these_names(RESULT)) == 2
  assert loops(jax.checkpoint_policies.nothing_saveable) == 3


def test_the_reference_never_holds_all_logits():
  q, k, v, gradient = operands(1, 4, 3000, 3000, jnp.bfloat16)
  words = jnp.zeros((1, 3000, bits.words(3000)), jnp.int32)
  text = run.lower(q, k, v, gradient, words, "reference", SCALE).as_text()
  assert "x1398x3000x" in text and "3000x3000" not in text


def test_pairs_of_tiles_without_a_selected_key_are_no_steps():
  """Of documents in bits: the pairs in which somebody selects somebody, and one for tiles of nobody."""
  mask = causal(2, 4100, 4100)
  mask[0, 2048:, :2048] = False  # two documents
  mask[1, 1024:] = False
  tiles = tiling.cut(4100, 4100, "keys")
  assert tiles == (1024, 1024, 5, 5)
  words = jnp.pad(bits.pack(jnp.asarray(mask)), ((0, 0), (0, 1020), (0, 0)))
  padded = np.pad(mask, ((0, 0), (0, 1020), (0, 1020))).reshape(2, 5, 1024, 5, 1024)
  found = tiling.occupied(words, tiles)
  np.testing.assert_array_equal(found, padded.any(axis=(2, 4)))
  for flip in (False, True):
    occupied = np.swapaxes(found, 1, 2) if flip else np.asarray(found)
    codes, count = tiling.steps(jnp.asarray(occupied))
    pairs = [tuple(int(x) for x in tiling.decode(code, 5, 5)) for code in codes[: int(count)]]
    empty = [(b, x, 0) for b, x in np.ndindex(2, 5) if not occupied[b, x].any()]
    assert len(empty) == 4 and pairs == sorted([*map(tuple, np.argwhere(occupied).tolist()), *empty])
    edges = [(pair[:2] != before[:2]) for pair, before in zip(pairs[1:], pairs[:-1], strict=True)]
    flags = np.asarray(codes[: int(count)])
    assert (flags & tiling.FIRST != 0).tolist() == [True, *edges]
    assert (flags & tiling.LAST != 0).tolist() == [*edges, True]


def test_tiles_grow_with_rows():
  assert tiling.cut(1, 40, "keys") == (128, 128, 1, 1)
  assert tiling.cut(131_072, 131_072, "keys") == (1024, 2048, 128, 64)
  assert tiling.cut(131_072, 131_072, "queries") == (2048, 1024, 64, 128)
  assert tiling.cut(1024, 131_072, "keys") == (1024, 2048, 1, 64)
  assert tiling.cut(1024, 131_072, "queries") == (1024, 1024, 1, 128)


@pytest.mark.slow
@pytest.mark.parametrize("longer", ["keys", "queries"])
def test_long_tiles(monkeypatch, longer):
  """Tiles of twice the length, whose mask takes 16 bits of a word, on a row that the interpreter manages."""
  monkeypatch.setattr(tiling, "LONG", 2048)
  T, S = (1100, 4200) if longer == "keys" else (2100, 1100)
  args = operands(1, 1, T, S, jnp.bfloat16)
  assert max(tiling.cut(T, S, longer)[:2]) == 2048
  mask = causal(1, T, S, S - 1100, 0.05)
  right = by_hand(*args, mask)
  found = compute(*args, bits.pack(jnp.asarray(mask)), "tpu_interpret")
  for mine, wanted in zip(found, right, strict=True):
    assert np.max(np.abs(np.asarray(mine, np.float64) - wanted)) < 1e-2 * np.max(np.abs(wanted))


@pytest.mark.slow
def test_steps_race_for_nothing(race_free):
  args = operands(2, 2, 1100, 1300, jnp.bfloat16)
  mask = causal(2, 1100, 1300, 200, 0.1)
  mask[1, :, 1024:] = False
  words = bits.pack(jnp.asarray(mask))
  q, k, v, gradient = args
  with race_free(cores=2) as interpret:
    out, lse = tpu.forward(q, k, v, words, SCALE, interpret)
    found = (out, *tpu.backward(q, k, v, words, out, lse, gradient, SCALE, interpret))
    jax.block_until_ready(found)
  for mine, wanted in zip(found, by_hand(*args, mask), strict=True):
    assert np.max(np.abs(np.asarray(mine, np.float64) - wanted)) < 1e-2 * np.max(np.abs(wanted))


def test_a_kernel_asked_for_by_name_says_what_it_does_not_take():
  q, k, v, gradient = operands(2, 2, 12, 40, widths=(64, 128))
  mask = causal(2, 12, 40, 28)
  words = bits.pack(jnp.asarray(mask))
  for name in ("tpu", "tpu_interpret"):
    with pytest.raises(ValueError, match=f"'{name}': heads whose widths are multiples of 128 .* 64 and 128"):
      attend_bits(q, k, v, words, SCALE, name)
  check((q, k, v, gradient), mask, None)  # without a name the reference takes them
  with pytest.raises(ValueError, match="at most 131072 pairs of tiles are possible, got 262144"):
    jax.eval_shape(
      lambda x, words: attend_bits(x, x, x, words, SCALE, "tpu"),
      jax.ShapeDtypeStruct((2, 1, 2**19, 128), jnp.bfloat16),
      jax.ShapeDtypeStruct((2, 2**19, 2**14), jnp.int32),
    )


def test_impossible_requests_are_named():
  q, k, v, _ = operands(2, 2, 12, 40)
  words = jnp.zeros((2, 12, 128), jnp.int32)
  half = v.astype(jnp.bfloat16)
  for args, says in [
    ((q, k, half, words), "all float32 or all bfloat16, got float32, float32, bfloat16"),
    ((q, k[:, :, 1:], v, words), r"v \[B, N, S, H\] are needed, got .*\(2, 2, 39, 128\)"),
    ((q, k, v, words[:, 1:]), r"bits int32 \(2, 12, 128\) are needed .* got int32 \(2, 11, 128\)"),
    ((q, k, v, words.astype(jnp.uint32)), r"12 queries and 40 keys, got uint32"),
  ]:
    with pytest.raises(ValueError, match=says):
      attend_bits(*args, SCALE)
  with pytest.raises(ValueError, match="sparse_mla implementation 'fast' is unknown; known: reference"):
    attend_bits(q, k, v, words, SCALE, "fast")
