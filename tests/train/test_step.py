"""One optimiser step, as compiled: what moves, by how much, and what stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from glm5_jax import losses
from glm5_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from glm5_jax.errors import UserError
from glm5_jax.model.attention import ATTENTION
from glm5_jax.model.attention.context import AttentionOutput
from glm5_jax.model.weights import normal, weight
from glm5_jax.optim import rules
from glm5_jax.optim.guard import SkipCounts
from glm5_jax.train.stages import optimizer_of
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import make_gradients, make_train_step
from tests.losses.batches import packed
from tests.model import toy

T, STEPS, RATE = 16, 10, 0.25  # 0.25: a bias moves by it without rounding
ROWS = [(16,), (3, 5), (1, 2, 13), (4,)]
MODEL = toy.config(num_nextn_predict_layers=1, mtp_depths=2)
OPTIM = {"peak_lr": 0.01, "final_lr": 0.01, "warmup_steps": 0, "ns_dtype": "float32", "ns_steps": 2}
# AdamW with a large eps is smooth in the gradient, so that equal gradients show as equal weights.
SMOOTH = {"name": "adamw", "eps": 1.0, "clip_norm": 0.0}


def run_config(model=MODEL, grad_accum=1, **optim) -> RunConfig:
  run = RunConfig(
    model=model,
    data=DataConfig(seq_len=T),
    optim=OptimConfig(
      **{"peak_lr": 0.01, "final_lr": 0.01, "warmup_steps": 0, "ns_dtype": "float32"} | optim
    ),
    train=TrainConfig(
      steps=STEPS,
      batch_size=4,
      loss_chunk=24,
      grad_accum=grad_accum,
      balance_weight=0.05,
      router_bias_rate=RATE,
    ),
  )
  run.validate()
  return run


class Trainer:
  """A compiled step and fresh states for it. States are donated, so each is a copy."""

  def __init__(self, run: RunConfig, params=None):
    self.params = toy.params(run.model) if params is None else params
    self.optimizer = optimizer_of(run)
    step = make_train_step(run, self.optimizer)
    self.step = step.lower(self.state(), packed(ROWS, T)).compile(compiler_options=toy.FAST_COMPILE)

  def state(self, step: int = 0, **params) -> TrainState:
    params = jax.tree.map(lambda x: jnp.array(x, copy=True), self.params | params)
    zero = jnp.zeros((), jnp.float32)
    state = TrainState(
      jnp.full((), step, jnp.int32), params, None, SkipCounts.zeros(), zero, jax.random.key(0)
    )
    return state.replace(opt_state=self.optimizer.init(params))


@functools.cache
def trainer() -> Trainer:
  """With Muon Split, as in pre-training."""
  return Trainer(run_config())


def changed(left, right) -> dict[str, bool]:
  """Which parameters differ in any bit."""
  pairs = zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True)
  return {rules.path_name(path): (np.asarray(a) != np.asarray(b)).any() for (path, a), b in pairs}


def biases(params):
  """{router: selection bias}, by place."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {rules.path_name(path): np.asarray(x) for path, x in leaves if path[-1].key == "router_bias"}


def test_everything_trainable_moves_and_the_idle_indexer_rests():
  """Frozen means bit-equal: no update, no weight decay. The selection biases move by their own rule."""
  state, _ = trainer().step(trainer().state(), packed(ROWS, T))
  for name, moved in changed(state.params, trainer().params).items():
    assert moved == ("indexer" not in name), name
  assert state.step == 1 and state.tokens == 37


def test_biases_move_by_the_rate_against_the_load():
  """In stacked layers and in MTP's router, whose counts are those of all depths together."""
  batch, params = packed(ROWS, T), trainer().params
  state, _ = trainer().step(trainer().state(), batch)
  inputs = (batch["tokens"], batch["segment_ids"], batch["positions"])
  _, layers = toy.observed(MODEL, *inputs, mtp_depths=MODEL.mtp_depths)
  segments = batch["segment_ids"]
  inside = [segments != 0] + [
    (segments != 0) & (np.pad(segments[:, k:], ((0, 0), (0, k))) == segments) for k in (1, 2)
  ]

  def move(choices, masks):
    counts = sum(
      np.bincount(c[mask].reshape(-1), minlength=8) for c, mask in zip(choices, masks, strict=True)
    )
    return RATE * np.sign(counts.mean() - counts)

  expected = {
    "layers_1/block_0/moe/router_bias": [move(layers[i]["moe"]["experts_BTK"], inside[:1]) for i in (1, 2)],
    "mtp/block/moe/router_bias": move(layers[3]["moe"]["experts_BTK"], inside[1:]),
  }
  before, after = biases(params), biases(state.params)
  assert before.keys() == after.keys() == expected.keys()
  for name, moves in expected.items():
    np.testing.assert_array_equal(after[name], before[name] + np.array(moves, np.float32), err_msg=name)
    assert np.any(moves)


def test_loss_weights_and_bias_rate_switch_together():
  """λ 0.3 and γ up to 0.55 of the steps, then 0.1 and 0."""
  for step, mtp_weight, moves in [(0, 0.3, True), (5, 0.3, True), (6, 0.1, False)]:
    start = trainer().state(step)
    state, metrics = trainer().step(start, packed(ROWS, T))
    mtp = np.mean([metrics["mtp_loss_1"], metrics["mtp_loss_2"]])
    expected = metrics["lm_loss"] + mtp_weight * mtp + 0.05 * metrics["balance_loss"]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    before, after = biases(trainer().params), biases(state.params)
    assert all((before[name] != after[name]).any() == moves for name in before)


def test_a_batch_of_padding():
  """Loss and gradient are 0 and nothing is NaN; biases stay, for no expert was chosen."""
  state, metrics = trainer().step(trainer().state(), packed([()] * 4, T))
  assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["skipped"] == 0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((metrics, state.params)))
  assert state.tokens == 0
  after = biases(state.params)
  assert all((after[name] == bias).all() for name, bias in biases(trainer().params).items())


def test_a_loss_that_is_not_finite_changes_no_parameter():
  head = trainer().params["head"].at[0, 0].set(jnp.nan)
  start = trainer().state(head=head)
  before = jax.tree.map(np.array, start.params)
  state, metrics = trainer().step(start, packed(ROWS, T))
  assert not np.isfinite(metrics["loss"]) and metrics["skipped"] == metrics["consecutive_skips"] == 1
  jax.tree.map(np.testing.assert_array_equal, state.params, before)  # selection biases included
  assert state.step == 1
  state, metrics = trainer().step(state.replace(params=trainer().state().params), packed(ROWS, T))
  assert metrics["skipped"] == 1 and metrics["consecutive_skips"] == 0


def test_two_runs_are_bit_equal():
  def run():
    state, losses = trainer().state(), []
    for step in range(3):
      state, metrics = trainer().step(state, packed(ROWS, T, seed=step))
      losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, (state.params, state.opt_state))

  (losses, first), (again, second) = run(), run()
  assert losses == again
  jax.tree.map(np.testing.assert_array_equal, first, second)


def test_the_loss_falls():
  state, losses = trainer().state(), []
  for _ in range(STEPS):
    state, metrics = trainer().step(state, packed(ROWS, T))
    losses.append(float(metrics["lm_loss"]))
  assert losses[-1] < 0.8 * losses[0]
  assert metrics["mtp_loss_1"] > 0 and metrics["accuracy"] > 0.1


ONE_LAYER = MODEL.replace(num_hidden_layers=1, first_k_dense_replace=0, mtp_depths=1)


@functools.cache
def after_one_step(grad_accum):
  """(parameters, metrics) with micro-batches of unequal numbers of targets."""
  made = Trainer(run_config(ONE_LAYER, grad_accum, **SMOOTH))
  state, metrics = made.step(made.state(), packed(ROWS, T))
  return jax.tree.map(np.asarray, state.params), metrics


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_micro_batches_give_the_step_of_the_whole_batch(parts):
  """With the MTP and the balance loss on, uneven padding, and biases moved once by all counts."""
  (params, metrics), (whole, right) = after_one_step(parts), after_one_step(1)
  toy.close(metrics, right, 1e-5)
  update, expected = (
    jax.tree.map(lambda p, start: p - start, p, toy.params(ONE_LAYER)) for p in (params, whole)
  )
  toy.close(update, expected, 1e-3)
  jax.tree.map(np.testing.assert_array_equal, biases(params), biases(whole))


# A new kind of attention: one module and one name


class RunningMean(nn.Module):
  """Each position receives the mean of what came before it in its document, through one matrix."""

  cfg: object
  owns_indexer: bool = False

  @nn.compact
  def __call__(self, x_BTD, ctx, selection=None, cache=None):
    D = self.cfg.hidden_size
    mix_DD = weight(self, "mix", (D, D), ("embed", "embed"), normal(self.cfg), self.cfg.param_dtype)
    seen = (ctx.segments_BT[:, :, None] == ctx.segments_BT[:, None]) & np.tri(x_BTD.shape[1], dtype=bool)
    mean_BTD = jnp.einsum("bts,bsd->btd", seen / jnp.sum(seen, axis=-1, keepdims=True), x_BTD)
    return AttentionOutput(mean_BTD @ mix_DD, selection, cache)


def test_a_new_attention_kind_trains(monkeypatch):
  monkeypatch.setitem(ATTENTION, "M", RunningMean)
  monkeypatch.setitem(rules.RULES, "attn/mix", rules.RULES["attn/q_a_proj"])
  monkeypatch.setattr("glm5_jax.config_checks.ATTENTION_LETTERS", (*ATTENTION,))
  model = toy.config(attention="MF", num_hidden_layers=2, first_k_dense_replace=2)
  params = toy.params(model)
  assert params["layers_0"]["block_0"]["attn"].keys() == {"mix"}
  made = Trainer(run_config(model), params)
  state, metrics = made.step(made.state(), packed(ROWS, T))
  assert np.isfinite(metrics["loss"]) and metrics["skipped"] == 0
  assert changed(state.params, params)["layers_0/block_0/attn/mix"]


def test_a_loss_of_ones_own_is_found_by_its_name(monkeypatch):
  def threefold(params, batch, *_):
    loss = 3.0 * jnp.sum(params["final_norm"])
    return loss, {"router_counts": {}, "loss": loss}

  monkeypatch.setitem(losses.BATCH_LOSSES, "threefold", threefold)
  run = run_config()
  run.train.loss = "threefold"
  grads, metrics = make_gradients(run)(trainer().params, packed(ROWS, T), 0.3)
  assert np.all(grads["final_norm"] == 3.0) and not np.any(grads["embed"])
  assert metrics["loss"] == pytest.approx(3.0 * float(np.sum(trainer().params["final_norm"])))
  run.train.loss = "fourfold"
  with pytest.raises(UserError, match=r"train\.loss=fourfold: should be one of pretrain, .*, threefold"):
    make_gradients(run)
