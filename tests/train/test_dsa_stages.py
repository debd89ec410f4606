"""The two stages that train indexers: what moves, what it is moved by, and that padding counts nothing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import RunConfig, TrainConfig
from glm5_jax.errors import UserError
from glm5_jax.losses import dsa
from glm5_jax.losses.pretrain import LossWeights, denominators, pretrain_loss
from tests.losses.batches import packed
from tests.model import toy
from tests.train.test_step import OPTIM, T, Trainer

ROWS = [(16,), (3, 12), (5, 2, 7), (4,)]
DEPTHS = 2
SPARSE = toy.config(
  num_hidden_layers=2, dsa_mode="sparse", index_topk=4, num_nextn_predict_layers=1, mtp_depths=DEPTHS
)
DENSE = SPARSE.replace(dsa_mode="dense")


def stage_run(stage: str, **train) -> RunConfig:
  run = RunConfig(
    model=DENSE if stage == "dsa_warmup" else SPARSE,
    train=TrainConfig(stage=stage, steps=50, batch_size=4, loss_chunk=24, router_bias_rate=0.25, **train),
  )
  run.data.seq_len = T
  for name, value in (OPTIM | {"name": "adamw", "schedule": "constant"}).items():
    setattr(run.optim, name, value)
  run.validate()
  return run


def of_indexer(path) -> bool:
  return any(key.key == "indexer" for key in path)


def split(tree):
  """(leaves of indexers, the others), by path."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = jax.tree_util.keystr
  return (
    {name(path): np.asarray(x) for path, x in leaves if of_indexer(path)},
    {name(path): np.asarray(x) for path, x in leaves if not of_indexer(path)},
  )


@functools.partial(jax.jit, static_argnames=("loss", "cfg"))
def gradients(loss, cfg, params, batch, weights):
  def of(params):
    return loss(params, batch, cfg, denominators(batch, DEPTHS), weights, 24)

  (_, metrics), grads = jax.value_and_grad(of, has_aux=True)(params)
  return grads, metrics


def test_warm_up_moves_indexers_alone_and_lowers_their_loss():
  trainer = Trainer(stage_run("dsa_warmup"))
  state, batch, history = trainer.state(), packed(ROWS, T), []
  for _ in range(30):
    state, metrics = trainer.step(state, batch)
    history.append(jax.device_get(metrics))
  indexers, others = split(state.params)
  before, rest = split(trainer.params)
  assert all((indexers[path] != before[path]).any() for path in before)
  assert all((others[path] == rest[path]).all() for path in rest)  # routers' biases and norms among them
  layers = [name for name in history[0] if name.startswith("indexer_kl_")]
  assert sorted(layers) == ["indexer_kl_layer_0", "indexer_kl_layer_1", "indexer_kl_mtp"]
  for name in layers:
    assert 0 < history[-1][name] < 0.6 * history[0][name]
  assert history[0]["lm_loss"] == history[-1]["lm_loss"]
  total = sum(history[-1][name] for name in layers)
  np.testing.assert_allclose(history[-1]["loss"], total, rtol=1e-5)
  np.testing.assert_allclose(history[-1]["indexer_kl"], total / 3, rtol=1e-5)


def test_in_the_sparse_stage_each_part_has_gradients_of_its_own_loss_only():
  params, batch, weights = toy.params(SPARSE), packed(ROWS, T), LossWeights(0.3, 0.05, 1.0)
  grads, metrics = gradients(dsa.sparse_loss, SPARSE, params, batch, weights)
  lm, lm_metrics = gradients(pretrain_loss, SPARSE, params, batch, weights)
  indexers, others = split(grads)
  idle, alone = split(lm)
  assert not any(x.any() for x in idle.values()) and all(x.any() for x in indexers.values())
  for path, value in alone.items():
    np.testing.assert_allclose(others[path], value, rtol=1e-5, atol=1e-7 * np.abs(value).max(), err_msg=path)
  kl = sum(value for name, value in metrics.items() if name.startswith("indexer_kl_"))
  np.testing.assert_allclose(metrics["loss"], lm_metrics["loss"] + kl, rtol=1e-6)
  tenth, _ = gradients(dsa.sparse_loss, SPARSE, params, batch, weights._replace(indexer=0.1))
  for path, value in split(tenth)[0].items():
    np.testing.assert_allclose(
      10 * value, indexers[path], rtol=1e-4, atol=1e-6 * np.abs(indexers[path]).max()
    )


@pytest.mark.parametrize("loss, cfg", [(dsa.warmup_loss, DENSE), (dsa.sparse_loss, SPARSE)])
def test_padding_changes_nothing(loss, cfg):
  """The same documents in rows that are half padding, and rows of nothing else."""
  params, weights = toy.params(cfg), LossWeights(0.3, 0.0, 1.0)
  plain = packed(ROWS, T)
  padded = {name: np.pad(x, ((0, 2), (0, T))) for name, x in plain.items()}
  grads, metrics = gradients(loss, cfg, params, plain, weights)
  more_grads, more = gradients(loss, cfg, params, padded, weights)
  for name in (n for n in metrics if n.startswith("indexer_kl")):
    np.testing.assert_allclose(more[name], metrics[name], rtol=1e-5)
  chex.assert_trees_all_close(split(more_grads)[0], split(grads)[0], rtol=1e-3, atol=1e-6)


def test_rows_within_k_train_the_indexer_on_dense_attention():
  cfg = SPARSE.replace(index_topk=T)
  weights = LossWeights(0.0, 0.0, 1.0)
  grads, metrics = gradients(dsa.sparse_loss, cfg, toy.params(cfg), packed(ROWS, T), weights)
  dense, expected = gradients(dsa.warmup_loss, cfg, toy.params(cfg), packed(ROWS, T), weights)
  assert metrics["indexer_kl"] == pytest.approx(float(expected["indexer_kl"]), rel=1e-6)
  chex.assert_trees_all_close(split(grads)[0], split(dense)[0], rtol=1e-4, atol=1e-7)


def test_micro_batches_add_up():
  params, batch = toy.params(SPARSE), packed(ROWS, T)
  whole = Trainer(stage_run("dsa_sparse"), params)
  parts = Trainer(stage_run("dsa_sparse", grad_accum=2), params)
  _, metrics = whole.step(whole.state(), batch)
  _, summed = parts.step(parts.state(), batch)
  for name in ("loss", "indexer_kl", "indexer_kl_mtp", "grad_norm"):
    assert float(summed[name]) == pytest.approx(float(metrics[name]), rel=1e-5)


def test_shared_selections_have_no_loss_of_their_own():
  cfg = SPARSE.replace(num_hidden_layers=4, indexer_types=("full", "shared", "full", "shared"))
  _, metrics = gradients(dsa.sparse_loss, cfg, toy.params(cfg), packed(ROWS, T), LossWeights(0.3, 0.0, 1.0))
  layers = {name for name in metrics if name.startswith("indexer_kl_")}
  assert layers == {"indexer_kl_layer_0", "indexer_kl_layer_2", "indexer_kl_mtp"}


@pytest.mark.parametrize(
  ("stage", "model", "said"),
  [
    ("dsa_warmup", SPARSE, r"model.dsa_mode='sparse'.* 'dense' in stage dsa_warmup"),
    ("dsa_sparse", DENSE, r"model.dsa_mode='dense'.* 'sparse' in stage dsa_sparse"),
    ("dsa_sparse", SPARSE.replace(attention="F"), r"model.attention='F'.* trains indexers"),
    ("warm", SPARSE, r"train.stage='warm'"),
  ],
)
def test_stages_that_do_not_fit_the_model_are_refused(stage, model, said):
  run = stage_run("dsa_sparse")
  run.model, run.train.stage = model, stage
  with pytest.raises(UserError, match=said):
    run.validate()


def test_the_loss_is_finite_where_a_row_sees_nothing():
  empty = packed([(1,), (), (2,), ()], T)
  grads, metrics = gradients(dsa.sparse_loss, SPARSE, toy.params(SPARSE), empty, LossWeights(0.3, 0.0, 1.0))
  assert np.isfinite(metrics["indexer_kl"]) and all(jnp.isfinite(x).all() for x in jax.tree.leaves(grads))
