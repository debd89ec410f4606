"""The pre-training loss: which targets count, and that micro-batches add up to the batch."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.losses.pretrain import LossWeights, denominators, depth_targets, pretrain_loss
from tests.losses.batches import packed
from tests.model import toy

T, DEPTHS = 16, 3
MTP_WEIGHT, BALANCE_WEIGHT = 0.3, 0.05
CFG = toy.config(num_nextn_predict_layers=1, mtp_depths=DEPTHS)
ROWS = [(16,), (3, 5), (1, 2, 13), ()]  # lengths of each row's documents: uneven padding, an empty row


# Targets


def test_targets_stay_inside_their_document():
  """The table of segments [1,1,1,2,2,0]."""
  batch = packed([(3, 2)], 6)
  assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0]]
  valid = [np.flatnonzero(depth_targets(batch, depth)[1][0]).tolist() for depth in range(4)]
  assert valid == [[0, 1, 3], [0], [], []]


def by_hand(batch, depth):
  """{(row, slot): target} of a depth: the token depth + 1 places ahead, if the document holds it."""
  found = {}
  for r, i in np.ndindex(batch["tokens"].shape):
    ahead, segments = i + depth + 1, batch["segment_ids"][r]
    if ahead < len(segments) and segments[i] == segments[ahead] != 0:
      found[r, i] = int(batch["tokens"][r, ahead])
  return found


DOCUMENTS = st.lists(st.integers(1, 5), max_size=4).filter(lambda sizes: sum(sizes) <= 9)


@settings(max_examples=60, deadline=None)
@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.integers(0, 12))
def test_targets_of_any_packing_and_depth(rows, depth):
  """Depths past the row's end included; nothing wraps."""
  batch = packed(rows, 9)
  targets, weights = map(np.asarray, depth_targets(batch, depth))
  assert targets.shape == weights.shape == batch["tokens"].shape
  found = {(int(r), int(i)): int(targets[r, i]) for r, i in np.argwhere(weights)}
  assert found == by_hand(batch, depth)


def test_a_samples_own_mask_moves_with_its_targets():
  batch = packed([(8,)], 8)
  batch["weights"][0, 4] = 0  # the target token 5 carries no loss, at any depth
  for depth in range(3):
    _, weights = depth_targets(batch, depth)
    assert np.flatnonzero(np.asarray(weights[0]) == 0).tolist() == [4 - depth, *range(7 - depth, 8)]


def test_padding_never_counts():
  """Whatever weight the caller left there: a loss weight is (segment ≠ 0) and the sample's mask."""
  batch = packed([(5,)], 8)
  batch["weights"][0, 5:] = 1
  for depth in range(3):
    _, weights = depth_targets(batch, depth)
    assert np.flatnonzero(weights[0]).tolist() == list(range(4 - depth))


def test_denominators_count_the_whole_batch():
  batch = packed(ROWS, T)
  found = denominators(batch, DEPTHS)
  assert found.tokens == len(by_hand(batch, 0)) == 34
  assert [float(n) for n in found.mtp_tokens] == [len(by_hand(batch, k)) for k in (1, 2, 3)]
  assert found.rows == 3
  assert found.queries == np.count_nonzero(batch["segment_ids"])
  longer = [max(n - k, 0) for row in ROWS for n in row for k in (1, 2, 3)]
  assert found.mtp_queries == sum(longer)  # a slot is one of depth k where its document has k more tokens
  split = {name: x.reshape(4, 1, T) for name, x in batch.items()}
  assert [float(x) for x in jax.tree.leaves(denominators(split, DEPTHS))] == [
    float(x) for x in jax.tree.leaves(found)
  ]


# Loss and gradients


counted = jax.jit(denominators, static_argnums=1)


@functools.partial(jax.jit, compiler_options=toy.FAST_COMPILE)
def compiled(params, batch, denominator, mtp_weight, balance_weight):
  def run(params):
    return pretrain_loss(params, batch, CFG, denominator, LossWeights(mtp_weight, balance_weight), chunk=7)

  return jax.value_and_grad(run, has_aux=True)(params)


def loss_and_gradients(params, batch, whole=None, mtp_weight=MTP_WEIGHT, balance_weight=BALANCE_WEIGHT):
  denominator = counted(batch if whole is None else whole, DEPTHS)
  (loss, metrics), grads = compiled(params, batch, denominator, mtp_weight, balance_weight)
  return loss, metrics, grads


@pytest.fixture(scope="module")
def whole():
  return loss_and_gradients(toy.params(CFG), packed(ROWS, T))


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_add_up(whole, parts):
  """Loss, every metric and every gradient, with the MTP and balance losses on and uneven padding."""
  batch, size = packed(ROWS, T), len(ROWS) // parts
  keep = [(np.arange(len(ROWS)) // size == part)[:, None] for part in range(parts)]
  pieces = [{name: np.where(rows, x, 0) for name, x in batch.items()} for rows in keep]
  results = [loss_and_gradients(toy.params(CFG), piece, batch) for piece in pieces]
  total = jax.tree.map(lambda *xs: np.sum([np.asarray(x) for x in xs], axis=0), *results)
  toy.close(total, whole, 1e-5)


def test_parts_of_the_loss(whole):
  loss, metrics, _ = whole
  mtp = [metrics[f"mtp_loss_{k}"] for k in (1, 2, 3)]
  expected = metrics["lm_loss"] + MTP_WEIGHT * np.mean(mtp) + BALANCE_WEIGHT * metrics["balance_loss"]
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(metrics["loss"], loss)
  assert metrics["lm_loss"] > 1 and min(mtp) > 1 and metrics["balance_loss"] > 1


def test_the_lm_loss_is_the_mean_over_targets(whole):
  """From the model's own logits, and MTP's hidden states through the shared head."""
  batch = packed(ROWS, T)
  out, _ = toy.observed(CFG, *(batch[n] for n in ("tokens", "segment_ids", "positions")), mtp_depths=DEPTHS)
  head = toy.params(CFG)["head"]
  logits = [out.logits_BTV, *(hidden @ head for hidden in out.aux["mtp_hidden_KBTD"])]
  names = ["lm_loss", "mtp_loss_1", "mtp_loss_2", "mtp_loss_3"]
  for depth, name in enumerate(names):
    logp = np.asarray(jax.nn.log_softmax(logits[depth]))
    losses = [-logp[r, i, target] for (r, i), target in by_hand(batch, depth).items()]
    np.testing.assert_allclose(whole[1][name], np.mean(losses), rtol=1e-5)


def test_segment_ids_are_names_not_weights(whole):
  batch = packed(ROWS, T)
  batch["segment_ids"] = np.where(batch["segment_ids"] == 0, 0, 10 * batch["segment_ids"] + 3)
  toy.close(loss_and_gradients(toy.params(CFG), batch), whole, 1e-6)


def test_tokens_in_padding_change_nothing(whole):
  """At the end of each depth's document either, nor in the routers' counts."""
  batch = packed(ROWS, T)
  batch["tokens"] = np.where(batch["segment_ids"] == 0, 77, batch["tokens"])
  batch["targets"] = np.where(batch["weights"] == 0, 78, batch["targets"])
  toy.close(loss_and_gradients(toy.params(CFG), batch), whole, 1e-5)


def test_mtp_reaches_every_weight_it_uses():
  """Its own layer, the shared embedding and head, and the trunk; but no selection bias, no idle indexer."""
  params, batch = toy.params(CFG), packed(ROWS, T)
  _, _, without = loss_and_gradients(params, batch, mtp_weight=0.0, balance_weight=0.0)
  _, _, with_mtp = loss_and_gradients(params, batch, mtp_weight=MTP_WEIGHT, balance_weight=0.0)
  assert not any(np.asarray(g).any() for g in jax.tree.leaves(without["mtp"]))
  pairs = zip(jax.tree_util.tree_leaves_with_path(without), jax.tree.leaves(with_mtp), strict=True)
  for (path, a), b in pairs:
    name, changed = jax.tree_util.keystr(path), (np.asarray(a) != np.asarray(b)).any()
    assert changed != ("router_bias" in name or "indexer" in name), name


def test_the_mtp_loss_depends_on_the_mtp_weights_alone(whole):
  params = toy.params(CFG)
  changed = params | {"mtp": params["mtp"] | {"eh_proj": params["mtp"]["eh_proj"] * 1.5}}
  _, metrics, _ = loss_and_gradients(changed, packed(ROWS, T))
  np.testing.assert_allclose(metrics["lm_loss"], whole[1]["lm_loss"], rtol=1e-6)
  for k in (1, 2, 3):
    assert abs(metrics[f"mtp_loss_{k}"] - whole[1][f"mtp_loss_{k}"]) > 1e-3


def test_the_balance_loss_is_a_mean_over_rows_that_hold_anything(whole):
  """Each row alone gives the sum over layers of its own loss; the empty one is no row."""
  batch = packed(ROWS, T)
  alone = []
  for row in range(3):
    piece = {name: np.where((np.arange(4) == row)[:, None], x, 0) for name, x in batch.items()}
    alone.append(loss_and_gradients(toy.params(CFG), piece)[1]["balance_loss"])
  np.testing.assert_allclose(whole[1]["balance_loss"], np.mean(alone), rtol=1e-5)


def test_the_balance_loss_that_is_logged_is_the_one_optimised(whole):
  """Its weight times the logged value is its share of the loss, and routers alone feel it first-hand."""
  params, batch = toy.params(CFG), packed(ROWS, T)
  loss, metrics, grads = loss_and_gradients(params, batch, balance_weight=0.0)
  np.testing.assert_allclose(whole[0] - loss, BALANCE_WEIGHT * metrics["balance_loss"], rtol=1e-3)
  routers = [grads["layers_1"]["block_0"]["moe"]["router"], grads["mtp"]["block"]["moe"]["router"]]
  with_balance = whole[2]["layers_1"]["block_0"]["moe"]["router"], whole[2]["mtp"]["block"]["moe"]["router"]
  for without, with_it in zip(routers, with_balance, strict=True):
    assert np.abs(without - with_it).max() > 1e-5


def test_a_batch_of_padding():
  loss, metrics, grads = loss_and_gradients(toy.params(CFG), packed([()] * len(ROWS), T))
  assert loss == 0
  for x in jax.tree.leaves((metrics, grads)):
    assert not np.asarray(x).any()  # which NaN would fail


def test_a_tied_head_gathers_the_gradients_of_both_uses():
  """Of next-token and MTP losses alike: embedding's and head's of the untied model with equal weights."""
  small = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "mtp_depths": 1}
  untied, tied = toy.config(**small), toy.config(**small, tie_word_embeddings=True)
  weights, batch = toy.params(tied), packed(ROWS, T)
  denominator = counted(batch, 1)

  def gradients(cfg, params):
    def loss(params):
      return pretrain_loss(params, batch, cfg, denominator, LossWeights(0.3, 0.0), 16)[0]

    return jax.jit(jax.value_and_grad(loss), compiler_options=toy.FAST_COMPILE)(params)

  value, grads = gradients(tied, weights)
  apart_value, apart = gradients(untied, weights | {"head": weights["embed"].T})
  np.testing.assert_allclose(value, apart_value, rtol=1e-6)
  toy.close(grads["embed"], apart["embed"] + apart["head"].T, 1e-5)
