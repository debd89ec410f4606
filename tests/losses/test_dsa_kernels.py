"""Both stages' losses by the kernels for TPU, interpreted, equal those in plain jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.losses import dsa
from glm5_jax.losses.pretrain import LossWeights, denominators
from tests.losses.batches import packed
from tests.model import toy

WIDTHS = dict(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128, index_head_dim=128)
CFG = toy.config(num_hidden_layers=2, index_topk=8, num_nextn_predict_layers=1, mtp_depths=1, **WIDTHS)


@pytest.mark.slow
@pytest.mark.parametrize("loss, mode", [(dsa.warmup_loss, "dense"), (dsa.sparse_loss, "sparse")])
def test_metrics_and_gradients(loss, mode):
  cfg, batch = CFG.replace(dsa_mode=mode), packed([(20, 12), (30,)], 32)
  params = toy.params(cfg)

  def gradients(implementation):
    def of(params):
      ours = cfg.replace(dsa_implementation=implementation)
      return loss(params, batch, ours, denominators(batch, 1), LossWeights(0.3, 0.01, 1.0), 64)

    (_, metrics), grads = jax.jit(jax.value_and_grad(of, has_aux=True))(params)
    return grads, metrics

  (expected, metrics), (found, kernel_metrics) = gradients("reference"), gradients("tpu_interpret")
  for name in ("loss", "indexer_kl", "indexer_kl_mtp"):
    np.testing.assert_allclose(kernel_metrics[name], metrics[name], rtol=1e-5)
  leaves = zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True)
  for (path, a), b in leaves:
    assert float(jnp.max(jnp.abs(a - b))) <= 2e-5 * float(jnp.max(jnp.abs(a))), path
