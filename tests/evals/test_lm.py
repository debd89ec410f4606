"""Scores of held-out rows against numbers known beforehand and a plain count over full logits."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.data.batch import Batch
from glm5_jax.errors import UserError
from glm5_jax.evals import lm
from glm5_jax.evals.lm import evaluate_lm
from tests.evals.runs import config
from tests.model import toy

V = 32
CFG = config(vocab_size=V)
LENGTHS = np.arange(V, dtype=np.int32) % 3  # bytes of text of each token; some have none


def make_batch(documents, rows: int, length: int = 24, seed: int = 0) -> Batch:
  """Rows of random tokens in documents of the given lengths, the rest padding; padding rows at the end."""
  rng = np.random.default_rng(seed)
  fields = {
    name: np.zeros((rows, length), np.int32) for name in ("tokens", "targets", "positions", "segment_ids")
  }
  weights = np.zeros((rows, length), np.float32)
  for row, lengths in enumerate(documents):
    start = 0
    for document, n in enumerate(lengths, start=1):
      ids, place = rng.integers(0, V, n + 1), slice(start, start + n)
      fields["tokens"][row, place], fields["targets"][row, place] = ids[:-1], ids[1:]
      fields["positions"][row, place], fields["segment_ids"][row, place] = np.arange(n), document
      # The last token of a document that is cut off knows its target only if the row has one more token.
      weights[row, start : start + n - 1] = 1
      start += n
  fields["targets"] *= weights > 0
  return Batch(weights=weights, **fields)


BATCH = make_batch([[24], [10, 9], [3, 2, 11]], rows=4)


def test_a_head_that_knows_nothing_costs_log_v():
  params = toy.params(CFG)
  params = params | {"head": jnp.zeros_like(params["head"])}
  scores = evaluate_lm(params, CFG, [BATCH], LENGTHS)
  counted = BATCH.weights > 0
  size = LENGTHS[BATCH.targets[counted]].sum()
  assert (scores["tokens"], scores["bytes"]) == (counted.sum(), size)
  for name in ("loss", "mtp_loss_1", "mtp_loss_2"):
    assert scores[name] == pytest.approx(math.log(V), rel=1e-6)
  assert scores["perplexity"] == pytest.approx(V, rel=1e-5)
  assert scores["bits_per_byte"] == pytest.approx(math.log2(V) * counted.sum() / size, rel=1e-6)
  assert scores["accuracy"] == pytest.approx(np.mean(BATCH.targets[counted] == 0))  # ties: the lowest id


def test_scores_are_those_of_full_logits():
  """Each depth: its logits, targets shifted within the document, summed one by one."""
  params = toy.params(CFG)
  scores = evaluate_lm(params, CFG, [BATCH], LENGTHS, chunk=7)
  run = toy.compiled(CFG, mtp_depths=2)
  out, _ = run(params, BATCH.tokens, BATCH.positions, BATCH.segment_ids)
  hiddens = [out.hidden_BTD, *out.aux["mtp_hidden_KBTD"]]
  for depth, names in enumerate(
    [("loss", "accuracy"), ("mtp_loss_1", "mtp_accuracy_1"), ("mtp_loss_2", "mtp_accuracy_2")]
  ):
    log_probs = np.asarray(jax.nn.log_softmax(hiddens[depth] @ params["head"]), np.float64)
    losses, hits = [], []
    for row, slot in np.argwhere(BATCH.segment_ids):
      ahead = slot + depth
      if ahead >= BATCH.shape[1] or not BATCH.weights[row, ahead]:
        continue
      if BATCH.segment_ids[row, ahead] != BATCH.segment_ids[row, slot]:
        continue
      target = BATCH.targets[row, ahead]
      losses.append(-log_probs[row, slot, target])
      hits.append(log_probs[row, slot].argmax() == target)
    assert scores[names[0]] == pytest.approx(np.mean(losses), rel=1e-5)
    assert scores[names[1]] == pytest.approx(np.mean(hits))


def test_batching_and_padding_change_nothing():
  params = toy.params(CFG)
  other = make_batch([[20], [5, 5]], rows=4, seed=1)
  empty = make_batch([], rows=4)
  together = Batch(**{k: np.concatenate([v[:3], vars(other)[k][:2]]) for k, v in vars(BATCH).items()})
  expected = evaluate_lm(params, CFG, [together], LENGTHS)
  assert evaluate_lm(params, CFG, [BATCH, empty, other, empty], LENGTHS) == pytest.approx(expected, rel=1e-6)


def test_compiled_once_for_a_config_and_shape(monkeypatch):
  """Equal configs are one; other values, batches and numbers of batches trace nothing anew."""
  traces = []
  real = lm.forward
  monkeypatch.setattr(lm, "forward", lambda *a, **k: traces.append(1) or real(*a, **k))
  cfg = CFG.replace(rope_theta=5e5)  # not traced by another test
  for seed in range(3):
    batches = [make_batch([[24], [12]], rows=4, seed=seed)] * (seed + 1)
    evaluate_lm(toy.params(CFG, seed), cfg.replace(), batches, LENGTHS)
  assert len(traces) == 1


def test_depths_that_no_document_reaches_are_left_out():
  """Targets exist at depth 1 for documents of 3 tokens, not at depth 2."""
  scores = evaluate_lm(toy.params(CFG), CFG, [make_batch([[3, 3]], rows=4)], LENGTHS)
  assert "mtp_loss_1" in scores and "mtp_loss_2" not in scores and "mtp_accuracy_2" not in scores


def test_scores_are_the_same_on_every_mesh(on_devices):
  """Rows, slots, experts and heads in parts; four rows are filled up where there are eight parts."""
  code = """
import json
import jax
from glm5_jax.config import MeshConfig
from glm5_jax.evals.lm import evaluate_lm
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_shardings
from tests.evals.test_lm import BATCH, CFG, LENGTHS, toy
params = toy.params(CFG)
scores = [evaluate_lm(params, CFG, [BATCH], LENGTHS)]
for sizes in ({"fsdp": 4, "expert": 2}, {"context": 2, "tensor": 2, "expert": 2}):
  mesh = make_mesh(MeshConfig(**{"data": 1} | sizes))
  there = jax.device_put(params, param_shardings(mesh, logical_axes(CFG), abstract_params(CFG)))
  scores.append(evaluate_lm(there, CFG, [BATCH], LENGTHS, chunk=7, mesh=mesh))
print(json.dumps(scores))
"""
  alone, *others = json.loads(on_devices(code))
  assert {"mtp_loss_2", "bytes"} <= alone.keys()
  for scores in others:
    assert scores == pytest.approx(alone, rel=1e-6)


def test_a_model_without_mtp_has_no_depths():
  cfg = CFG.replace(num_nextn_predict_layers=0)
  scores = evaluate_lm(toy.params(cfg), cfg, [BATCH], LENGTHS)
  assert sorted(scores) == ["accuracy", "bits_per_byte", "bytes", "loss", "perplexity", "tokens"]


def test_nothing_to_predict_is_said_in_one_line():
  with pytest.raises(UserError, match="hold no text to predict"):
    evaluate_lm(toy.params(CFG), CFG, [make_batch([], rows=4)], LENGTHS)
  with pytest.raises(UserError, match="hold no text to predict"):
    evaluate_lm(toy.params(CFG), CFG, [], LENGTHS)
