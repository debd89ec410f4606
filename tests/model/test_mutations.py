"""Known mistakes in implementations of GLM-5, made on purpose: the reference checkpoint must notice each.

Selections agree while a row has no more than index_topk keys, so most of these are invisible on short
texts. The numbers that the specification reports: wrong indexer rotation or no ReLU 4.5 to 4.7 in the
logits, LoRA norms with the config's eps 9e-5.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.model import moe
from glm5_jax.model.attention import dsa, indexer, selection
from glm5_jax.model.layers import apply_rope, project, rms_norm
from tests.model import golden
from tests.model.golden import LOGIT_TOLERANCE, distance

CFG = golden.config().replace(scan_layers=False)


def _logit_difference(cfg=CFG) -> float:
  return distance(golden.forward(cfg).logits_BTV, golden.reference()["logits"])


def test_without_a_mutation_nothing_is_noticed():
  assert _logit_difference() < LOGIT_TOLERANCE


@pytest.mark.parametrize(
  "change, at_least",
  [
    ({"indexer_rope_interleave": False}, 1.0),
    ({"rope_interleave": False}, 1.0),
    ({"index_topk": 7}, 0.1),
    ({"lora_norm_eps": 1e-5}, 2 * LOGIT_TOLERANCE),
    ({"routed_scaling_factor": 1.0}, 0.1),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_setting(change, at_least):
  assert _logit_difference(dataclasses.replace(CFG, **change)) > at_least


def _rotate_last_dims(self, x, rope):
  R = self.cfg.qk_rope_head_dim
  rotated = apply_rope(x[..., -R:], rope, self.cfg.indexer_rope_interleave)
  return jnp.concatenate([x[..., :-R], rotated], axis=-1)


def _scores_without_relu(query_BTIJ, gate_BTI, key_BSJ):
  return jnp.einsum("btij,bsj,bti->bts", query_BTIJ, key_BSJ, gate_BTI)


def _scores_of_absolute_gates(query_BTIJ, gate_BTI, key_BSJ):
  dots = jnp.einsum("btij,bsj->btsi", query_BTIJ, key_BSJ)
  return jnp.einsum("btsi,bti->bts", jax.nn.relu(dots), jnp.abs(gate_BTI))


def _latent_with_raw_query(module, x_BTD, ctx, cache, original=dsa.project_latent):
  latent, cache = original(module, x_BTD, ctx, cache)
  raw = project(x_BTD, module.get_variable("params", "q_a_proj"), x_BTD.dtype)
  return latent._replace(q_rank_BTQ=raw), cache


def _route_without_bias(logits_ME, bias_E, cfg, original=moe.route):
  return original(logits_ME, jnp.zeros_like(bias_E), cfg)


def _weights_with_bias(logits_ME, bias_E, cfg, original=moe.route):
  routing = original(logits_ME, bias_E, cfg)
  biased = jnp.take_along_axis(routing.score_ME + bias_E, routing.experts_MK, axis=-1)
  share = biased / biased.sum(-1, keepdims=True)
  return routing._replace(weights_MK=share * cfg.routed_scaling_factor)


def _unmasked_scores(ctx, begin, end, keys, original=selection.visible):
  return jnp.ones_like(original(ctx, begin, end, keys))


MUTATIONS = {
  "indexer rope on the last dims": (indexer.Indexer, "_rotate", _rotate_last_dims, 1.0),
  "indexer without ReLU": (selection, "index_scores", _scores_without_relu, 1.0),
  "indexer gates made positive": (selection, "index_scores", _scores_of_absolute_gates, 1.0),
  "indexer fed the query latent before its norm": (dsa, "project_latent", _latent_with_raw_query, 0.1),
  "indexer key norm as RMSNorm": (
    indexer,
    "layer_norm",
    lambda x, scale, bias, eps: rms_norm(x, scale, eps) + bias,
    0.1,
  ),
  "indexer key norm without bias": (
    indexer,
    "layer_norm",
    lambda x, scale, bias, eps, original=indexer.layer_norm: original(x, scale, 0 * bias, eps),
    0.1,
  ),
  "scale of the latent width": (ModelConfig, "qk_head_dim", property(lambda cfg: cfg.latent_width), 0.1),
  "selection not causal": (selection, "visible", _unmasked_scores, 0.1),
  "experts selected without bias": (moe, "route", _route_without_bias, 0.1),
  "experts weighted with bias": (moe, "route", _weights_with_bias, 0.01),
}


@pytest.mark.parametrize("owner, name, mutant, at_least", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_formula(monkeypatch, owner, name, mutant, at_least):
  monkeypatch.setattr(owner, name, mutant)
  assert _logit_difference() > at_least
