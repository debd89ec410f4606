"""Counts and dtypes of parameters, from declarations alone: no array of the 744B shape is made."""

import jax
import numpy as np
import pytest

from glm5_jax.config import glm5_2_744b, glm5_744b, tiny
from glm5_jax.model import abstract_params, count_params, init_params, logical_axes
from tests.model import toy

BILLION = 1e9


def test_counts_of_glm5():
  counts = count_params(glm5_744b())
  billions = {name: round(n / BILLION, 2) for name, n in counts.items()}
  assert billions == {
    "total": 743.91,
    "without_embeddings": 742.01,
    "mtp": 9.95,
    "active": 39.88,
    "active_with_head": 40.83,
  }
  assert count_params(glm5_744b().replace(scan_layers=False)) == counts


def test_counts_by_hand():
  """Every part of GLM-5's shape, from its sizes."""
  attention = (
    6144 * 2048 + 2048 + 2048 * 64 * 256 + 6144 * 576 + 512 + 512 * 64 * (192 + 256) + 64 * 256 * 6144
  )
  indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
  expert = 3 * 6144 * 2048
  layer = attention + indexer + 2 * 6144
  dense, moe = layer + 3 * 6144 * 12288, layer + 257 * expert + 6144 * 256
  vocabulary = 154880 * 6144
  counts = count_params(glm5_744b())
  assert counts["total"] == 3 * dense + 75 * moe + 2 * vocabulary + 6144
  assert counts["mtp"] == moe + 2 * 6144 * 6144 + 3 * 6144
  assert counts["active"] == counts["without_embeddings"] - 75 * (256 - 8) * expert


def test_counts_follow_the_config():
  base = count_params(tiny())
  assert count_params(tiny().replace(num_nextn_predict_layers=0)) == base | {"mtp": 0}
  tied = count_params(tiny().replace(tie_word_embeddings=True))
  assert base["total"] - tied["total"] == 128 * 64
  assert tied["without_embeddings"] == base["without_embeddings"] and tied["active"] == base["active"]
  shared = count_params(glm5_2_744b())
  per_indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
  assert count_params(glm5_744b())["total"] - shared["total"] == 57 * per_indexer


@pytest.fixture(scope="module")
def initial():
  return init_params(tiny(), jax.random.key(0))


def test_arrays_have_the_declared_shapes(initial):
  cfg, params = tiny(), initial
  described = abstract_params(cfg)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
    lambda x: (x.shape, x.dtype), described
  )
  counted = sum(
    x.size for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key != "router_bias"
  )
  counts = count_params(cfg)
  assert counted == counts["total"] + counts["mtp"]


def test_initial_values(initial):
  """Norms one, biases zero, matrices normal with initializer_range (those that write to the stream less)."""
  for path, value in jax.tree_util.tree_leaves_with_path(initial):
    name, spread = path[-1].key, float(np.std(value))
    if name.endswith("norm") or name == "k_norm_scale":
      assert (np.asarray(value) == 1).all(), name
    elif name in ("router_bias", "k_norm_bias"):
      assert not np.asarray(value).any(), name
    else:
      expected = 0.02 / np.sqrt(8) if name in ("o_proj", "down_proj") else 0.02
      np.testing.assert_allclose(spread, expected, rtol=0.15, err_msg=name)


def test_weights_follow_the_key(initial):
  other = init_params(tiny(), jax.random.key(1))
  assert (np.asarray(initial["embed"]) != np.asarray(other["embed"])).mean() > 0.99
  stacked = np.asarray(initial["layers_1"]["block_0"]["attn"]["q_a_proj"])
  assert (stacked[0] != stacked[1]).mean() > 0.99  # each layer of a stack has weights of its own


def test_dtypes_at_rest():
  """Selection biases are float32 whatever the weights are; GLM-5.2's routers too."""
  for cfg, router in [
    (glm5_744b(), "bfloat16"),
    (glm5_2_744b(), "float32"),
    (tiny().replace(param_dtype="bfloat16", router_param_dtype="float32"), "float32"),
  ]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(cfg)):
      expected = {"router": router, "router_bias": "float32"}.get(path[-1].key, "bfloat16")
      assert leaf.dtype == expected, jax.tree_util.keystr(path)


def test_every_axis_is_named():
  """One logical axis for each dimension, "layers" in front of what is stacked."""
  axes = logical_axes(tiny())
  flat = dict(jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda x: isinstance(x, jax.P)))
  for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(tiny())):
    spec = flat[path]
    assert len(spec) == leaf.ndim, jax.tree_util.keystr(path)
    assert (spec[0] == "layers") == (path[0].key == "layers_1"), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
  "field, value", [("rope_theta", 8e6), ("rms_norm_eps", 1e-2), ("lora_norm_eps", 1e-2)]
)
def test_numeric_fields_reach_the_model(field, value):
  cfg = toy.config(attention="F", num_hidden_layers=1, first_k_dense_replace=1)
  tokens = toy.tokens(1, 24)
  base, changed = (toy.forward(c, tokens).logits_BTV for c in (cfg, cfg.replace(**{field: value})))
  assert np.abs(base - changed).max() > 1e-3


def test_a_float32_router_keeps_small_differences():
  """Weights in bfloat16, the router apart: two experts told apart by less than bfloat16 holds."""
  cfg = toy.config(
    num_hidden_layers=1, first_k_dense_replace=0, param_dtype="bfloat16", num_experts_per_tok=1
  )
  chosen = []
  for dtype in ("float32", ""):
    cfg = cfg.replace(router_param_dtype=dtype)
    params = toy.params(cfg)
    moe = params["layers_0"]["block_0"]["moe"]
    column = np.asarray(moe["router"], np.float32)[:, :1]
    router = np.tile(column, (1, 8)) * np.array([1, 1 + 1e-3] * 4)
    moe = moe | {"router": router.astype(moe["router"].dtype), "router_bias": np.zeros(8, np.float32)}
    params = params | {"layers_0": {"block_0": params["layers_0"]["block_0"] | {"moe": moe}}}
    _, layers = toy.observed(cfg, toy.tokens(1, 40), weights=params)
    chosen.append(set(layers[0]["moe"]["experts_BTK"][0].ravel().tolist()))
  assert chosen == [{0, 1}, {0}]  # by the logit's sign; ties to the lowest id
