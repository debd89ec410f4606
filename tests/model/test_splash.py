"""The splash kernels, interpreted, against the plain formula: packed rows, padding, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import tiny
from glm5_jax.model import forward, init_params
from glm5_jax.model.attention import splash

HEADS = dict(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128)
CFG = tiny().replace(
  attention="F", num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0, **HEADS
)
SEGMENTS = np.repeat([1, 2, 0], [100, 130, 26])[None].astype(np.int32)


@pytest.fixture(scope="module")
def results():
  params = init_params(CFG, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), SEGMENTS.shape, 0, CFG.vocab_size)

  def value(implementation, **fields):
    cfg = CFG.replace(attention_implementation=implementation, **fields)

    def loss(params):
      out = forward(params, cfg, tokens, None, SEGMENTS)
      return jnp.sum(jnp.sin(out.logits_BTV) * (SEGMENTS != 0)[..., None]), out.hidden_BTD

    (_, hidden), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return hidden, grads

  grouped = {"head_group": 2, "remat": "attention"}
  return value("reference"), {
    "whole": value("splash_interpret"),
    "2 heads": value("splash_interpret", **grouped),
  }


@pytest.mark.parametrize("heads", ["whole", "2 heads"])
def test_values_and_gradients_equal_the_plain_formula(results, heads):
  (hidden, grads), (splash_hidden, splash_grads) = results[0], results[1][heads]
  np.testing.assert_allclose(splash_hidden, hidden, atol=2e-6 * float(jnp.max(jnp.abs(hidden))))
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(splash_grads), strict=True
  ):
    assert float(jnp.max(jnp.abs(a - b))) <= 5e-6 * float(jnp.max(jnp.abs(a))), path


def test_padding_attends_to_nothing():
  q, k, v = (jax.random.normal(jax.random.key(i), (1, 2, 256, 128)) for i in range(3))
  out, pull = jax.vjp(lambda *qkv: splash.attend_causal(*qkv, SEGMENTS, SEGMENTS, 0.1, True), q, k, v)
  assert np.all(np.asarray(out)[:, :, 230:] == 0) and np.any(np.asarray(out)[:, :, 229] != 0)
  for grad in pull(jnp.ones_like(out)):
    assert np.all(np.asarray(grad)[:, :, 230:] == 0)


@pytest.mark.parametrize(("length", "block"), [(128, 128), (384, 384), (4096, 1024), (25_344, 768)])
def test_blocks_divide_the_row(length, block):
  assert splash._block(length) == block and length % block == 0
  assert splash.fits(length, length) and not splash.fits(length + 1, length)


def test_queries_lie_as_the_shards_of_context_hold_them():
  mask = splash._Causal(16, shards=2)
  assert mask.q_sequence.tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11]
