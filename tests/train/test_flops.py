"""Model FLOPs against counts by hand, by the parameter tree, by XLA, and the published model's 6 · N · D."""

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.config import glm5_744b, small, tiny
from glm5_jax.model import GLM5, abstract_params, count_params, init_params
from glm5_jax.model.plan import layer_plan
from glm5_jax.optim.groups import path_name
from glm5_jax.train import flops
from glm5_jax.train.flops import PEAK_FLOPS, layer_weights, peak_flops, train_flops_per_token

# tiny(): hidden 64, 4 layers of which the first dense, 4 heads of 12 + 8 and 16, ranks 32 and 16,
# 8 experts of width 32 of which 2 + 1 are met, vocabulary 128.
ATTENTION = 64 * 32 + 32 * 4 * 20 + 64 * 24 + 16 * 4 * (12 + 16) + 4 * 16 * 64
DENSE = 3 * 64 * 96
MOE = 64 * 8 + 3 * 3 * 64 * 32
HEAD = 64 * 128
PER_KEY = 4 * (20 + 16)


def test_tiny_by_hand():
  weights = 4 * ATTENTION + DENSE + 3 * MOE + HEAD
  assert train_flops_per_token(tiny(), 63, 0) == 6 * (weights + 4 * PER_KEY * 32)  # 32 keys on average
  depth = 2 * 64 * 64 + ATTENTION + MOE + HEAD
  assert train_flops_per_token(tiny(), 63, 3) == 6 * (weights + 3 * depth + 7 * PER_KEY * 32)


def test_sparse_attention_by_hand():
  """Queries 1 … 16 meet 1 … 8 keys and then 8; the indexer scores all of them, forward only."""
  cfg = tiny().replace(dsa_mode="sparse")
  weights = 4 * ATTENTION + DENSE + 3 * MOE + HEAD
  keys = (sum(range(1, 9)) + 8 * 8) / 16
  indexer = 32 * 16 * 16 + 64 * 16 + 64 * 16
  scores = 16 * 16 * 8.5
  assert train_flops_per_token(cfg, 16, 0) == 6 * (weights + 4 * PER_KEY * keys) + 2 * 4 * (indexer + scores)
  shared = cfg.replace(indexer_types=("full", "shared", "shared", "full"))
  saved = 2 * 2 * (indexer + scores)
  assert train_flops_per_token(shared, 16, 0) == train_flops_per_token(cfg, 16, 0) - saved
  assert train_flops_per_token(cfg, 8, 3) == train_flops_per_token(tiny(), 8, 3)  # nothing to select


def test_sliding_layers_meet_their_window():
  """Two layers of 8 keys at most, two of all 16."""
  full = train_flops_per_token(tiny().replace(attention="F"), 16, 0)
  window = (sum(range(1, 9)) + 8 * 8) / 16
  half = train_flops_per_token(tiny().replace(attention="SF"), 16, 0)
  assert half == full - 6 * 2 * PER_KEY * (8.5 - window)


def matrix_weights(cfg) -> int:
  """From the parameter tree: everything a token is multiplied with in the trunk and the head."""
  stacked = {segment.name for segment in layer_plan(cfg) if segment.stacked}
  total = 0
  for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(cfg)):
    name = path_name(path)
    rank = len(leaf.shape) - (name.split("/")[0] in stacked)
    if rank < 2 or name == "embed" or "indexer" in name or name.startswith("mtp"):
      continue
    share = cfg.num_experts_per_tok / cfg.n_routed_experts if "/experts/" in name else 1
    total += round(leaf.size * share)
  return total


@pytest.mark.parametrize("cfg", [tiny(), small(), glm5_744b()], ids=["tiny", "small", "glm5_744b"])
def test_weights_are_those_of_the_parameter_tree(cfg):
  ours = sum(layer_weights(cfg, layer) for layer in range(cfg.num_hidden_layers))
  assert ours + cfg.hidden_size * cfg.vocab_size == matrix_weights(cfg)


def test_full_model_is_about_six_times_the_active_parameters():
  """40.83 B active with the head; attention's products at 4,096 tokens come on top."""
  cfg = glm5_744b()
  active = count_params(cfg)["active_with_head"]
  assert active == pytest.approx(40.83e9, rel=1e-3)
  attention = 6 * 78 * 64 * (256 + 256) * 4097 / 2
  ratio = (train_flops_per_token(cfg, 4096, 0) - attention) / (6 * active)
  assert 0.97 < ratio < 1  # less the idle indexers (2.5 %) and norms


@pytest.mark.parametrize("length", [32, 128])
def test_forward_agrees_with_what_xla_counts(length):
  """A dense model without MTP, layers unrolled: loops are counted once. XLA also counts masked products."""
  cfg = tiny().replace(
    hidden_size=128,
    intermediate_size=512,
    vocab_size=512,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    num_nextn_predict_layers=0,
    attention="F",
    scan_layers=False,
  )
  params = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
  tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)
  forward = jax.jit(lambda params, tokens: GLM5(cfg).apply({"params": params}, tokens).logits_BTV)
  counted = forward.lower(params, tokens).compile().cost_analysis()["flops"] / (2 * length)
  masked = 2 * 2 * PER_KEY * (length - (length + 1) / 2)
  assert train_flops_per_token(cfg, length, 0) / 3 + masked == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
  ("kind", "peak"),
  [
    *(("TPU v5p", 459e12), ("TPU v5", 459e12), ("TPU v5 lite", 197e12), ("TPU v5e", 197e12)),
    *(("TPU v6 lite", 918e12), ("TPU7x", 1153.5e12), ("NVIDIA H100 80GB HBM3", 989e12)),
  ],
)
def test_listed_devices(monkeypatch, kind, peak):
  class Device:
    device_kind = kind

  monkeypatch.setattr(flops.jax, "local_devices", lambda: [Device()])
  assert peak_flops("bfloat16")[0] == peak


def test_no_entry_is_shadowed_by_an_earlier_one():
  names = list(PEAK_FLOPS)
  assert not [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if b.startswith(a)]


def test_unlisted_device_is_measured_once():
  first, source = peak_flops("float32")
  assert source == "a measured matmul, float32" and 1e8 < first < 1e15
  assert peak_flops("float32")[0] == first
