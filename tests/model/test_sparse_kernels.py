"""Sparse attention by the kernels for TPU, interpreted, against plain jnp: sets, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import tiny
from glm5_jax.model import GLM5, init_params

CFG = tiny().replace(
  num_hidden_layers=2,
  first_k_dense_replace=2,
  num_nextn_predict_layers=0,
  dsa_mode="sparse",
  qk_nope_head_dim=64,
  qk_rope_head_dim=64,
  v_head_dim=128,
  index_head_dim=128,
  index_topk=24,
)
SEGMENTS = np.repeat([1, 2, 0], [60, 75, 25])[None].astype(np.int32)


@pytest.fixture(scope="module")
def compute():
  params = init_params(CFG, jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), SEGMENTS.shape, 0, CFG.vocab_size)

  def value(implementation, **fields):
    cfg = CFG.replace(dsa_implementation=implementation, **fields)

    def loss(params):
      out, kept = GLM5(cfg).apply({"params": params}, tokens, None, SEGMENTS, mutable="intermediates")
      chosen = [x for path, x in jax.tree_util.tree_leaves_with_path(kept) if "selected_BTS" in str(path)]
      return jnp.sum(jnp.sin(out.logits_BTV) * (SEGMENTS != 0)[..., None]), (out.hidden_BTD, chosen)

    (_, (hidden, chosen)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return hidden, chosen, grads

  return value


@pytest.fixture(scope="module")
def plain(compute):
  return compute("reference")


@pytest.mark.parametrize("fields", [{}, {"head_group": 2, "remat": "attention"}], ids=["whole", "2 heads"])
def test_the_same_sets_values_and_gradients(compute, plain, fields):
  hidden, chosen, grads = plain
  kernel_hidden, kernel_chosen, kernel_grads = compute("tpu_interpret", **fields)
  for expected, found in zip(chosen, kernel_chosen, strict=True):
    np.testing.assert_array_equal(found, expected)
  assert 0 < np.asarray(chosen[0]).sum(-1).max() == CFG.index_topk
  np.testing.assert_allclose(kernel_hidden, hidden, atol=3e-6 * float(jnp.max(jnp.abs(hidden))))
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(kernel_grads), strict=True
  ):
    assert float(jnp.max(jnp.abs(a - b))) <= 1e-5 * float(jnp.max(jnp.abs(a))), path
