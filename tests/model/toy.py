"""Small models with every weight drawn at random, since defaults (ones, zeros) hide mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig, tiny
from glm5_jax.model import GLM5, ModelOutput, abstract_params, plan

# Many small programs run once each: compile them quickly rather than well.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def config(**changes) -> ModelConfig:
  """`tiny()` with 1 dense and 2 MoE layers, without MTP, and `changes`."""
  return tiny().replace(**{"num_hidden_layers": 3, "num_nextn_predict_layers": 0} | changes)


@functools.cache
def params(cfg: ModelConfig, seed: int = 0):
  """Random weights: matrices that keep a signal's size, norms and biases away from one and zero.

  The same seed gives a scanned and an unrolled layout the same weights.
  """
  stacked = cfg.replace(scan_layers=True)
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = path[-1].key
    value = rng.standard_normal(leaf.shape)
    if name.endswith("norm") or name == "k_norm_scale":
      value = 1 + 0.3 * value
    elif name in ("k_norm_bias", "router_bias"):
      value *= 0.1
    elif name != "embed":
      inputs = leaf.shape[-3] * leaf.shape[-2] if name == "o_proj" else leaf.shape[-2]
      if name in ("q_b_proj", "k_b_proj", "v_b_proj", "wq_b"):
        inputs = leaf.shape[-3]
      value /= np.sqrt(inputs)
    return jnp.asarray(value, leaf.dtype)

  tree = jax.tree_util.tree_map_with_path(draw, abstract_params(stacked))
  return tree if cfg.scan_layers else plan.unstack(tree, stacked)[0]


@functools.cache
def compiled(cfg: ModelConfig, mtp_depths: int = 0):
  def run(weights, tokens_BT, positions_BT, segments_BT):
    inputs = (tokens_BT, positions_BT, segments_BT)
    model = GLM5(cfg)
    return model.apply({"params": weights}, *inputs, mtp_depths=mtp_depths, mutable=["intermediates"])

  return jax.jit(run, compiler_options=FAST_COMPILE)


def forward(cfg: ModelConfig, tokens_BT, segments_BT=None, positions_BT=None, weights=None) -> ModelOutput:
  """One pass; compiled once for each config and shape."""
  return observed(cfg, tokens_BT, segments_BT, positions_BT, weights)[0]


def observed(cfg, tokens_BT, segments_BT=None, positions_BT=None, weights=None, mtp_depths=0):
  """(output, intermediates as a list of one dictionary a layer)."""
  weights = params(cfg) if weights is None else weights
  out, state = compiled(cfg, mtp_depths)(weights, tokens_BT, positions_BT, segments_BT)
  layers = []
  for layer in range(cfg.num_hidden_layers + (mtp_depths > 0)):
    (segment, block), index = plan.locate(cfg, layer)
    sown = state["intermediates"][segment][block]
    layers.append(jax.tree.map(lambda x, i=index: np.asarray(x if i is None else x[i]), sown))
  if mtp_depths > 1 and cfg.scan_layers:  # one stacked entry, where a loop in Python leaves one a depth
    layers[-1] = jax.tree.map(tuple, layers[-1], is_leaf=lambda x: isinstance(x, np.ndarray))
    layers[-1] = _joined(layers[-1])
  return out, layers


def _joined(tree):
  """Tuples of one tuple as that tuple."""
  if isinstance(tree, dict):
    return {name: _joined(value) for name, value in tree.items()}
  return tree[0]


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, tiny().vocab_size, (batch, length), dtype=np.int32)


def close(left, right, tolerance: float) -> None:
  """Equal trees: each leaf's largest difference is small beside its largest value."""
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.isfinite(a).all(), jax.tree_util.keystr(path)
    bound = tolerance * max(np.abs(b).max(initial=0), 1e-3)
    np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))
