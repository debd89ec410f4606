"""What every attention kind must hold, through the whole model: isolation, causality, exact selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model import GLM5, init_cache
from glm5_jax.model.plan import unstack
from tests.model import naive, toy

T, A, B = 32, 11, 15  # row length, lengths of two documents; index_topk and sliding_window are 8
TOLERANCE = 1e-5
DENSE_FFN = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
KINDS = {
  "full-expanded": {"attention": "F", "mla_form": "expanded", **DENSE_FFN},
  "window-absorbed-blocks": {"attention": "S", "mla_form": "absorbed", "query_block": 7, **DENSE_FFN},
  "dsa-dense-absorbed": {"attention": "D", "mla_form": "absorbed", **DENSE_FFN},
  "dsa-sparse-expanded": {"attention": "D", "dsa_mode": "sparse", "mla_form": "expanded", **DENSE_FFN},
  "dsa-sparse-absorbed-blocks": {
    "attention": "D",
    "dsa_mode": "sparse",
    "mla_form": "absorbed",
    "query_block": 7,
    **DENSE_FFN,
  },
  "SFSS-moe": {"attention": "SFSS", "num_hidden_layers": 4, "query_block": 9},
  "SFDD-sparse-moe": {"attention": "SFDD", "num_hidden_layers": 4, "dsa_mode": "sparse"},
}
# Rows of the batch that `rows` makes.
A_ALONE, B_ALONE, PACKED, LEFT_PADDED, B_CHANGED, A_CHANGED, EMPTY = range(7)
CHANGED_IN_B, CHANGED_IN_A = 6, 10  # index of the token that differs, inside its document


def rows():
  """(tokens, segments) of documents A and B alone, packed, behind padding, and with one token changed."""
  tokens, segments = toy.tokens(7, T, seed=3), np.zeros((7, T), np.int32)
  a, b = toy.tokens(1, A, seed=1)[0], toy.tokens(1, B, seed=2)[0]
  both, ids = np.concatenate([a, b]), np.repeat([1, 2], [A, B])
  tokens[A_ALONE, :A], segments[A_ALONE, :A] = a, 1
  tokens[B_ALONE, :B], segments[B_ALONE, :B] = b, 1
  for row, start in [(PACKED, 0), (LEFT_PADDED, T - A - B), (B_CHANGED, 0), (A_CHANGED, 0)]:
    tokens[row, start : start + A + B], segments[row, start : start + A + B] = both, ids
  tokens[B_CHANGED, A + CHANGED_IN_B] ^= 1
  tokens[A_CHANGED, CHANGED_IN_A] ^= 1
  tokens[EMPTY] = 5
  return tokens, segments


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def kind(request):
  """(config, logits [7, T, V], intermediates) of the batch of `rows`."""
  cfg = toy.config(**request.param)
  cfg.validate()
  out, layers = toy.observed(cfg, *rows())
  return cfg, np.asarray(out.logits_BTV), layers


def same(left, right):
  np.testing.assert_allclose(left, right, rtol=0, atol=TOLERANCE)


def test_packed_documents_equal_each_alone(kind):
  _, logits, _ = kind
  same(logits[PACKED, :A], logits[A_ALONE, :A])
  same(logits[PACKED, A : A + B], logits[B_ALONE, :B])


def test_padding_before_a_row_changes_nothing(kind):
  _, logits, _ = kind
  same(logits[LEFT_PADDED, T - A - B :], logits[PACKED, : A + B])


def test_a_token_changes_nothing_before_it_nor_in_other_documents(kind):
  _, logits, _ = kind
  same(logits[B_CHANGED, : A + CHANGED_IN_B], logits[PACKED, : A + CHANGED_IN_B])
  same(logits[A_CHANGED, :CHANGED_IN_A], logits[PACKED, :CHANGED_IN_A])
  same(logits[A_CHANGED, A : A + B], logits[PACKED, A : A + B])
  difference = np.abs(logits[B_CHANGED] - logits[PACKED]).max(-1)
  assert (difference[A + CHANGED_IN_B : A + B] > 1e-3).all()  # and everything after it in its document


def test_padding_attends_to_nothing(kind):
  """Equal padding tokens give equal logits, wherever they stand: a mean over others would differ."""
  _, logits, _ = kind
  assert np.isfinite(logits).all()
  tokens, segments = rows()
  of_five = logits[(segments == 0) & (tokens == 5)]
  assert len(of_five) >= T
  same(of_five, np.broadcast_to(of_five[0], of_five.shape))
  other = logits[A_ALONE, A]
  assert tokens[A_ALONE, A] != 5 and np.abs(other - of_five[0]).max() > 0.1


def test_selected_sets_do_not_depend_on_the_layout(kind):
  cfg, _, layers = kind
  selections = [s["attn"]["selected_BTS"][0] for s in layers if "selected_BTS" in s.get("attn", {})]
  assert len(selections) == (cfg.dsa_mode == "sparse") * sum(
    cfg.attention_kind(i) == "D" for i in range(cfg.num_hidden_layers)
  )
  start = T - A - B
  for selected in selections:
    counts = selected.sum(-1)
    assert counts[PACKED].tolist() == [min(i + 1, 8) for n in (A, B) for i in range(n)] + [0] * start
    assert not selected[EMPTY].any()
    packed = selected[PACKED]
    np.testing.assert_array_equal(packed[:A, :A], selected[A_ALONE, :A, :A])
    np.testing.assert_array_equal(packed[A : A + B, A : A + B], selected[B_ALONE, :B, :B])
    np.testing.assert_array_equal(packed[: A + B, : A + B], selected[LEFT_PADDED, start:, start:])


# Against the formulas, in float64


def visible(segments_BT):
  same_document = segments_BT[:, :, None] == segments_BT[:, None]
  return same_document & (segments_BT != 0)[:, :, None] & np.tri(segments_BT.shape[1], dtype=bool)


def positions_of(segments_BT):
  offsets = np.arange(segments_BT.shape[1])
  starts = [[np.flatnonzero(row == s)[0] for s in row] for row in segments_BT]
  return (offsets - np.array(starts)).astype(np.int32)


FORMS = {
  "expanded": {"mla_form": "expanded"},
  "absorbed-blocks": {"mla_form": "absorbed", "query_block": 7, "rope_theta": 8e6},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_values_and_gradients_equal_the_plain_formula(form):
  """A window, a full and a sparse layer, with padding and an empty row; autodiff of all [T, S] in float64."""
  cfg = toy.config(
    attention="SFD", dsa_mode="sparse", first_k_dense_replace=3, scan_layers=False, sliding_window=5, **form
  )
  weights = toy.params(cfg)
  tokens, segments = (x[[PACKED, LEFT_PADDED, EMPTY]] for x in rows())
  cotangent = np.random.default_rng(0).standard_normal((*tokens.shape, cfg.hidden_size))

  def ours(weights):
    apply = GLM5(cfg).apply
    out, sown = apply({"params": weights}, tokens, segment_ids_BT=segments, mutable=["intermediates"])
    return jnp.vdot(out.hidden_BTD, cotangent), (out.hidden_BTD, sown["intermediates"])

  run = jax.jit(jax.value_and_grad(ours, has_aux=True), compiler_options=toy.FAST_COMPILE)
  (_, (hidden, sown)), grads = run(weights)
  near = np.arange(T)[:, None] - np.arange(T) < cfg.sliding_window
  selected = np.asarray(sown["layers_2"]["block_0"]["attn"]["selected_BTS"][0])
  masks = [visible(segments) & near, visible(segments), selected]
  assert selected[0].sum() < masks[1][0].sum()
  with jax.enable_x64(True):
    weights64 = jax.tree.map(lambda w: jnp.asarray(np.asarray(w), jnp.float64), weights)

    def theirs(weights):
      hidden = naive.hidden(weights, tokens, positions_of(segments), masks, cfg)
      return jnp.sum(hidden * jnp.asarray(cotangent)), hidden

    run = jax.jit(jax.value_and_grad(theirs, has_aux=True), compiler_options=toy.FAST_COMPILE)
    (_, right), right_grads = run(weights64)
    assert right.dtype == "float64"
    toy.close(hidden, right, 1e-5)
    toy.close(grads, right_grads, 2e-5)


def test_padding_has_no_gradient_through_attention():
  """Rows that see nothing: output 0, so what comes in at padding slots reaches no attention weight."""
  cfg = toy.config(attention="FSD", dsa_mode="sparse", first_k_dense_replace=3, num_hidden_layers=3)
  tokens, segments = (x[[A_ALONE, EMPTY]] for x in rows())

  def of_padding(weights):
    hidden = GLM5(cfg).apply({"params": weights}, tokens, segment_ids_BT=segments).hidden_BTD
    return jnp.sum(jnp.sin(hidden) * (segments == 0)[..., None])

  grads = jax.jit(jax.grad(of_padding), compiler_options=toy.FAST_COMPILE)(toy.params(cfg))
  for name in ("layers_0", "layers_1", "layers_2"):
    block = grads[name]["block_0"]
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(block["attn"]))
    assert np.asarray(block["mlp"]["up_proj"]).any()


def test_a_window_sees_exactly_its_keys():
  """One layer: changing the token at s changes the output at t exactly where t − window < s ≤ t."""
  cfg = toy.config(attention="S", num_hidden_layers=1, sliding_window=5, query_block=6)
  base = toy.tokens(1, 16)
  changed = np.where(np.eye(16, dtype=bool), base ^ 1, base)
  logits = np.asarray(toy.forward(cfg, np.concatenate([base, changed])).logits_BTV)
  moved_ST = np.abs(logits[1:] - logits[0]).max(-1) > 1e-5
  distance = np.arange(16)[None] - np.arange(16)[:, None]
  np.testing.assert_array_equal(moved_ST, (distance >= 0) & (distance < 5))


def test_positions_restart_in_each_document():
  """To the bit: rope sees only differences, so that anything else would show in roundings alone."""
  cfg = toy.config(attention="F", mla_form="expanded", **DENSE_FFN)
  tokens, segments = rows()
  positions = positions_of(segments)
  assert positions[PACKED, A - 1 : A + 2].tolist() == [A - 1, 0, 1]
  counted = toy.forward(cfg, tokens, segments).logits_BTV
  np.testing.assert_array_equal(counted, toy.forward(cfg, tokens, segments, positions).logits_BTV)
  on = np.broadcast_to(np.arange(T, dtype=np.int32), positions.shape)
  assert (counted != toy.forward(cfg, tokens, segments, on).logits_BTV).any()


# The same function, computed in other ways


def test_forms_and_query_blocks_agree():
  base = {"attention": "SFD", "dsa_mode": "sparse", "first_k_dense_replace": 3}
  outputs = [
    toy.forward(toy.config(**base, mla_form=form, query_block=block), *rows()).logits_BTV
    for form, block in [("expanded", 0), ("absorbed", 0), ("expanded", 13)]
  ]
  for logits in outputs[1:]:
    same(logits, outputs[0])


@pytest.mark.parametrize("topk", [T, T + 1, 100])
def test_sparse_with_no_more_than_k_keys_is_dense_exactly(topk):
  cfg = toy.config(attention="D", index_topk=topk, query_block=7, **DENSE_FFN)
  sparse = toy.forward(cfg.replace(dsa_mode="sparse"), *rows()).logits_BTV
  np.testing.assert_array_equal(sparse, toy.forward(cfg, *rows()).logits_BTV)


def test_sparse_differs_from_dense_only_past_k_keys():
  cfg = toy.config(attention="D", mla_form="expanded", **DENSE_FFN)
  sparse = np.asarray(toy.forward(cfg.replace(dsa_mode="sparse"), *rows()).logits_BTV)[PACKED]
  dense = np.asarray(toy.forward(cfg, *rows()).logits_BTV)[PACKED]
  few = [i for start in (0, A) for i in range(start, start + 8)]
  same(sparse[few], dense[few])
  assert np.abs(sparse - dense).max() > 0.1


def zero_scores(weights):
  """All index gates negative zero or zero: every key scores alike."""

  def flatten(path, w):
    return -0.0 * w if path[-1].key == "weights_proj" else w

  return jax.tree_util.tree_map_with_path(flatten, weights)


@pytest.mark.parametrize("block", [0, 7])
def test_a_plateau_selects_the_oldest_keys(block):
  cfg = toy.config(attention="D", dsa_mode="sparse", query_block=block, **DENSE_FFN)
  weights = zero_scores(toy.params(cfg))
  _, layers = toy.observed(cfg, *rows(), weights=weights)
  expected = visible(rows()[1])
  expected &= np.cumsum(expected, axis=-1) <= cfg.index_topk
  for layer in layers:
    np.testing.assert_array_equal(layer["attn"]["selected_BTS"][0], expected)


# Cached decoding

SHARING = {"attention": "DDSF", "dsa_mode": "sparse", "index_topk_freq": 2, "index_skip_topk_offset": 1}


@pytest.fixture(scope="module")
def decode():
  """`decode(cfg, weights, tokens, chunks, poison)`: logits of a row of tokens run on the cache in chunks."""

  def step(cfg, weights, cache, tokens, positions, from_start):
    segments = jnp.ones_like(tokens)
    inputs = (tokens, positions, segments, cache)
    out = GLM5(cfg).apply({"params": weights}, *inputs, from_start=from_start)
    return out.logits_BTV, out.cache

  run = jax.jit(step, static_argnums=(0, 5), compiler_options=toy.FAST_COMPILE)

  def decode(cfg, weights, tokens, chunks, poison=0.0):
    cache = init_cache(cfg, len(tokens), tokens.shape[1] + 3)
    cache = cache._replace(layers=jax.tree.map(lambda x: jnp.full_like(x, poison), cache.layers))
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    logits, begin = [], 0
    for size in chunks:
      part = np.s_[:, begin : begin + size]
      new, cache = run(cfg, weights, cache, tokens[part], positions[part], begin == 0)
      logits.append(new)
      begin += size
    return np.concatenate(logits, axis=1)

  return decode


@pytest.mark.parametrize("plateau", [False, True], ids=["scores", "plateau"])
def test_decoding_on_the_cache_equals_the_full_pass(decode, plateau):
  """Chunks below and above the limit at which keys are gathered, and single tokens with fewer than k keys."""
  cfg = toy.config(num_hidden_layers=4, first_k_dense_replace=4, scan_layers=False, **SHARING)
  weights = toy.params(cfg)
  weights = zero_scores(weights) if plateau else weights
  tokens = toy.tokens(2, 30)
  full = toy.forward(cfg, tokens, weights=weights).logits_BTV
  same(decode(cfg, weights, tokens, (3, *[1] * 7, 20)), full)


def test_slots_without_a_key_index_nothing(decode):
  """−1 would read the last slot of the cache; what stands there before it is written must not matter."""
  cfg = toy.config(attention="D", dsa_mode="sparse", scan_layers=False, **DENSE_FFN)
  tokens = toy.tokens(2, 10)
  clean, poisoned = (decode(cfg, toy.params(cfg), tokens, (3, *[1] * 7), value) for value in (0.0, 1e3))
  np.testing.assert_array_equal(clean, poisoned)
  same(clean, toy.forward(cfg, tokens).logits_BTV)


# IndexShare


def test_shared_layers_reuse_the_last_owners_set():
  """Two units of one owner and three followers, scanned and unrolled."""
  cfg = toy.config(
    attention="D",
    dsa_mode="sparse",
    index_topk_freq=4,
    index_skip_topk_offset=1,
    num_hidden_layers=8,
    first_k_dense_replace=8,
  )
  cfg.validate()
  tokens, segments = (x[[PACKED, LEFT_PADDED]] for x in rows())
  weights = toy.params(cfg)
  assert sorted(weights) == ["embed", "final_norm", "head", "layers_0"]  # one scanned segment
  out, layers = toy.observed(cfg, tokens, segments)
  flat_weights, flat_cfg = unstack(weights, cfg)
  for layer in range(8):
    assert ("indexer" in flat_weights[f"layers_{layer}"]["block_0"]["attn"]) == (layer in (0, 4))
  sets = [layer["attn"]["selected_BTS"][0] for layer in layers]
  for layer in range(8):
    np.testing.assert_array_equal(sets[layer], sets[layer // 4 * 4])
  assert (sets[0] != sets[4]).any()
  flat_out, flat_layers = toy.observed(flat_cfg, tokens, segments, weights=flat_weights)
  same(flat_out.logits_BTV, out.logits_BTV)
  np.testing.assert_array_equal(sets, [layer["attn"]["selected_BTS"][0] for layer in flat_layers])
