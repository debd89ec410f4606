"""Our model against Hugging Face's, on the reference checkpoint. Nothing here may skip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.hf import names
from glm5_jax.model import GLM5, init_cache, plan
from tests.model import golden
from tests.model.golden import LOGIT_TOLERANCE, distance

UNROLLED = {"scan_layers": False}


@pytest.fixture(scope="module")
def full_logits():
  """Logits of one pass without a cache."""
  return np.asarray(golden.forward(golden.config().replace(**UNROLLED)).logits_BTV)


@pytest.fixture(scope="module", params=["scanned-expanded", "unrolled-absorbed"])
def observed(request):
  """(config, output, intermediates of each layer) of one pass, compiled as in production."""
  layout, form = request.param.split("-")
  cfg = golden.config().replace(scan_layers=layout == "scanned", mla_form=form)
  run = jax.jit(lambda p, t: GLM5(cfg).apply({"params": p}, t, mutable=["intermediates"]))
  out, state = run(golden.params(cfg.scan_layers), golden.tokens())
  sown, layers = state["intermediates"], []
  for layer in range(cfg.num_hidden_layers):
    (segment, block), index = plan.locate(cfg, layer)
    of_layer = sown[segment][block]
    layers.append(jax.tree.map(lambda x, i=index: np.asarray(x if i is None else x[i]), of_layer))
  return cfg, out, sown["embedding_BTD"][0], layers


def test_logits(observed):
  _, out, _, _ = observed
  assert distance(out.logits_BTV, golden.reference()["logits"]) < LOGIT_TOLERANCE


def test_hidden_states_of_every_layer(observed):
  _, out, embedding_BTD, layers = observed
  theirs = golden.reference()["hidden_states"]  # embedding, layers 0 to 2, then after the final norm
  ours = [embedding_BTD, *(layer["output_BTD"][0] for layer in layers[:-1]), out.hidden_BTD]
  assert len(theirs) == len(ours) == 5
  for layer, (left, right) in enumerate(zip(ours, theirs, strict=True)):
    assert distance(left, right) < 2e-5, f"hidden state {layer}"


def test_selected_sets_are_identical(observed):
  """Where there are no more than k keys, theirs lists future keys as well, which their mask removes."""
  cfg, _, _, layers = observed
  theirs = golden.reference()["topk_indices"]
  for layer, intermediates in enumerate(layers):
    (selected_BTS,) = intermediates["attn"]["selected_BTS"]
    for b, t in np.ndindex(selected_BTS.shape[:2]):
      chosen = set(np.flatnonzero(selected_BTS[b, t]).tolist())
      assert chosen == {s for s in theirs[layer, b, t].tolist() if s <= t}, (layer, b, t)
      assert len(chosen) == min(t + 1, cfg.index_topk)


def test_dense_mode():
  cfg = golden.config().replace(dsa_mode="dense", **UNROLLED)
  logits_BTV = golden.forward(cfg).logits_BTV
  assert distance(logits_BTV, golden.reference()["dense_logits"]) < LOGIT_TOLERANCE
  sparse, k = golden.reference()["logits"], cfg.index_topk
  assert distance(logits_BTV[:, :k], sparse[:, :k]) < LOGIT_TOLERANCE  # all keys are selected there
  assert distance(logits_BTV, sparse) > 1


def test_left_padding(full_logits):
  """Rows padded by 5 and by 2; what stands in the padding is of no account, the eos id (1) included."""
  cfg, tokens_BT = golden.config().replace(**UNROLLED), golden.tokens()
  T, pads = tokens_BT.shape[1], (5, 2)
  padded = np.random.default_rng(0).integers(0, 128, (2, T + 5), dtype=np.int32)
  padded[:, :2] = 1
  segments = np.zeros(padded.shape, np.int32)
  for row, pad in enumerate(pads):
    padded[row, pad : pad + T] = tokens_BT[row]
    segments[row, pad : pad + T] = 1
  logits_BTV = golden.forward(cfg, padded, segment_ids_BT=segments).logits_BTV
  assert np.isfinite(logits_BTV).all()
  for row, pad in enumerate(pads):
    ours = logits_BTV[row, pad : pad + T]
    assert distance(ours, golden.reference()["leftpad_logits"][row]) < LOGIT_TOLERANCE
    assert distance(ours, full_logits[row]) < 1e-5


def test_the_pad_id_is_an_ordinary_token(full_logits):
  """Padding is known from the segments, never from the id: GLM-5's pad is an eos that texts contain."""
  used = int(golden.tokens()[0, 3])
  cfg = golden.config().replace(pad_token_id=used, eos_token_id=(used,), **UNROLLED)
  np.testing.assert_array_equal(golden.forward(cfg).logits_BTV, full_logits)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("chunks", [(18, *[1] * 8), (3, 21, 1, 1)], ids=["one by one", "in chunks"])
def test_cached_decoding_equals_the_full_pass(form, chunks, full_logits):
  """A prompt, then further tokens on the cache; the second row is padded on the left, the first behind."""
  cfg = golden.config().replace(mla_form=form, **UNROLLED)
  (B, T), pads = golden.tokens().shape, (0, 2)
  tokens_BT = np.stack([np.pad(golden.tokens()[row], (pad, 2 - pad)) for row, pad in enumerate(pads)])
  positions_BT = np.arange(T + 2, dtype=np.int32) - np.array(pads, np.int32)[:, None]
  segments_BT = ((positions_BT >= 0) & (positions_BT < T)).astype(np.int32)

  def step(params, cache, tokens, positions, segments, from_start):
    out = GLM5(cfg).apply({"params": params}, tokens, positions, segments, cache, from_start=from_start)
    return out.logits_BTV, out.cache

  run = jax.jit(step, static_argnums=5, compiler_options=golden.FAST_COMPILE)
  cache, begin, logits = init_cache(cfg, B, T + 5), 0, []
  for size in chunks:
    part = np.s_[:, begin : begin + size]
    inputs = (tokens_BT[part], np.maximum(positions_BT[part], 0), segments_BT[part])
    chunk_logits, cache = run(golden.params(), cache, *inputs, begin == 0)
    logits.append(chunk_logits)
    begin += size
  logits_BTV = np.concatenate(logits, axis=1)
  for row, pad in enumerate(pads):
    ours = logits_BTV[row, pad : pad + T]
    assert distance(ours, full_logits[row]) < 1e-5
    assert distance(ours, golden.reference()["cached_logits"][row]) < LOGIT_TOLERANCE


def test_loss_and_every_gradient():
  """Next-token cross-entropy; labels are the input ids. Gradients under Hugging Face's names."""
  cfg, tokens_BT = golden.config().replace(scan_layers=True), golden.tokens()

  def loss(params):
    logits_BTV = GLM5(cfg).apply({"params": params}, tokens_BT).logits_BTV
    logp = jax.nn.log_softmax(logits_BTV[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp, tokens_BT[:, 1:, None], axis=-1))

  value, grads = jax.jit(jax.value_and_grad(loss), compiler_options=golden.FAST_COMPILE)(golden.params(True))
  theirs = dict(golden.gradients())
  np.testing.assert_allclose(value, theirs.pop("loss"), rtol=1e-6)
  moe = frozenset(layer for layer in range(cfg.num_hidden_layers) if cfg.is_moe(layer))
  for tensor in names.tensors(cfg, fused=moe):
    without_gradient = ".indexer." in tensor.name or tensor.name.endswith("e_score_correction_bias")
    stored = np.zeros(tensor.shape, np.float32) if without_gradient else theirs.pop(tensor.name)
    for piece in tensor.pieces:
      ours, expected = np.asarray(_at(grads, piece.path)[piece.index]), _cut(tensor, piece, stored)
      assert ours.shape == expected.shape
      assert distance(ours, expected) <= 1e-4 * np.abs(stored).max(), tensor.name
  assert not theirs  # every gradient of the reference was compared


def _cut(tensor, piece, values):
  """What of a tensor's values a piece holds, in our axes."""
  view = values.reshape(tensor.view)
  if piece.cut is not None:
    axis, start, stop = piece.cut
    view = view.take(range(start, stop), axis)
  return view.transpose(piece.perm)


def _at(tree, path):
  return functools.reduce(lambda node, key: node[key], path, tree)
