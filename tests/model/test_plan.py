"""Which layers are stacked, where a layer's weights stand, and that every layout computes the same."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import glm5_2_744b, glm5_744b, small, tiny
from glm5_jax.model import GLM5, abstract_params
from glm5_jax.model.plan import block_spec, layer_plan, locate, unstack
from tests.model import toy

SHARING = {"index_topk_freq": 4, "index_skip_topk_offset": 1, "num_hidden_layers": 8}
CONFIGS = {
  "744B": glm5_744b(),
  "GLM-5.2": glm5_2_744b(),
  "unrolled": glm5_744b().replace(scan_layers=False),
  "tiny": tiny(),
  "small": small(),
  "one layer": toy.config(num_hidden_layers=1),
  "SFSS": toy.config(attention="SFSS", num_hidden_layers=9),
  "alternating": toy.config(attention="SF", num_hidden_layers=7, moe_layer_freq=2),
  "shared": toy.config(**SHARING),
}


def shapes(cfg):
  return [(segment.start, segment.period, segment.repeats) for segment in layer_plan(cfg)]


def test_glm5_is_three_dense_and_75_moe_blocks():
  assert shapes(glm5_744b()) == [(0, 1, 3), (3, 1, 75)]
  dense, moe = (segment.unit[0] for segment in layer_plan(glm5_744b()))
  assert not dense.moe and moe.moe and dense.owns_indexer and moe.owns_indexer


def test_index_share_is_scanned_in_units_of_four():
  """GLM-5.2: layers 0, 1, 2, 6, 10, …, 74 own an indexer, 21 of 78; units of three followers and an owner."""
  cfg = glm5_2_744b()
  owners = [layer for layer in range(78) if cfg.owns_indexer(layer)]
  assert owners == [0, 1, 2, *range(6, 78, 4)] and len(owners) == 21 and cfg.owns_indexer(78)
  assert shapes(cfg) == [(0, 1, 3), (3, 4, 18), (75, 1, 3)]
  assert [spec.owns_indexer for spec in layer_plan(cfg)[1].unit] == [False, False, False, True]


def test_patterns():
  assert shapes(CONFIGS["SFSS"]) == [(0, 1, 1), (1, 4, 2)]  # layer 0 is dense, so it stands alone
  assert shapes(CONFIGS["alternating"]) == [(0, 1, 1), (1, 2, 3)]
  assert shapes(CONFIGS["unrolled"]) == [(i, 1, 1) for i in range(78)]


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_layer_has_one_place(cfg):
  places = [locate(cfg, layer) for layer in range(cfg.num_hidden_layers)]
  assert len(set(places)) == cfg.num_hidden_layers
  segments = {segment.name: segment for segment in layer_plan(cfg)}
  for layer, ((segment, block), index) in enumerate(places):
    assert segments[segment].unit[int(block.removeprefix("block_"))] == block_spec(cfg, layer)
    assert (index is not None) == segments[segment].stacked
  counts = collections.Counter(segment for (segment, _), _ in places)
  assert counts == {name: s.period * s.repeats for name, s in segments.items()}
  assert locate(cfg, cfg.num_hidden_layers) == (("mtp", "block"), None)
  with pytest.raises(IndexError, match=f"layer {cfg.num_hidden_layers + 1} of {cfg.num_hidden_layers}"):
    locate(cfg, cfg.num_hidden_layers + 1)


@pytest.mark.parametrize("name", ["tiny", "SFSS", "alternating", "shared"])
def test_unstacking_keeps_every_weight_in_its_layer(name):
  cfg = CONFIGS[name]
  params = toy.params(cfg)
  flat, flat_cfg = unstack(params, cfg)
  assert flat_cfg == cfg.replace(scan_layers=False)
  described = abstract_params(flat_cfg)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), flat) == jax.tree.map(
    lambda x: (x.shape, x.dtype), described
  )
  for layer in range(cfg.num_hidden_layers):
    (segment, block), index = locate(cfg, layer)
    stacked = params[segment][block]
    theirs = stacked if index is None else jax.tree.map(lambda w, i=index: w[i], stacked)
    jax.tree.map(np.testing.assert_array_equal, flat[f"layers_{layer}"]["block_0"], theirs)
  again, _ = unstack(flat, flat_cfg)
  jax.tree.map(np.testing.assert_array_equal, again, flat)


# Layouts and rematerialisation compute the same


def gradients(cfg, params):
  tokens, cotangent = toy.tokens(2, 20), np.random.default_rng(0).standard_normal((2, 20, cfg.hidden_size))

  def loss(params):
    out = GLM5(cfg).apply({"params": params}, tokens)
    return jnp.vdot(out.hidden_BTD, cotangent) + out.aux["balance"], out.hidden_BTD

  run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=toy.FAST_COMPILE)
  (_, hidden), grads = run(params)
  return hidden, grads


@pytest.fixture(scope="module")
def scanned():
  cfg = toy.config(dsa_mode="sparse")
  return cfg, toy.params(cfg), gradients(cfg, toy.params(cfg))


def test_scanned_and_unrolled_layers_agree(scanned):
  cfg, params, (hidden, grads) = scanned
  flat, flat_cfg = unstack(params, cfg)
  flat_hidden, flat_grads = gradients(flat_cfg, flat)
  toy.close(flat_hidden, hidden, 1e-5)
  toy.close(flat_grads, unstack(grads, cfg)[0], 2e-5)


@pytest.mark.parametrize(
  "remat",
  ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dots", "attention", "offload"))],
)
def test_rematerialisation_changes_no_gradient(scanned, remat):
  cfg, params, right = scanned
  toy.close(gradients(cfg.replace(remat=remat), params), right, 1e-5)


@pytest.mark.slow
def test_unrolled_rematerialisation_hands_selections_on():
  """Blocks that share a selection, each recomputed in the backward pass."""
  cfg = toy.config(
    dsa_mode="sparse",
    index_topk_freq=2,
    index_skip_topk_offset=1,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    scan_layers=False,
  )
  params = toy.params(cfg)
  toy.close(gradients(cfg.replace(remat="full"), params), gradients(cfg, params), 1e-5)
