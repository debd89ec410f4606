"""Muon against a NumPy iteration written from the report, and the properties of the per-head split."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.config import OptimConfig, tiny
from glm5_jax.optim import muon_split
from glm5_jax.optim.groups import labels, make_optimizer
from glm5_jax.optim.muon_split import dimension_numbers, scale_by_muon_split
from glm5_jax.optim.rules import path_name

LR, MOMENTUM, RMS = 1e-2, 0.95, 0.2
HEADS = ("q_b_proj", "k_b_proj", "v_b_proj")


def config(**changes):
  plain = {"schedule": "constant", "peak_lr": LR, "warmup_steps": 0, "clip_norm": 0.0, "weight_decay": 0.0}
  return OptimConfig(**(plain | {"ns_dtype": "float32"} | changes))


def run(opt, params, gradients):
  """Updates by path after a list of gradient trees, and the state."""
  state, step = opt.init(params), jax.jit(opt.update)
  for grads in gradients:
    updates, state = step(grads, state, params)
  return by_path(updates), state


def by_path(tree):
  return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def newton_schulz(u):
  """Moonlight's iteration and update size for one [rows, cols] matrix, in float64."""
  x = u / (np.linalg.norm(u) + 1e-7)
  x = x.T if u.shape[0] > u.shape[1] else x
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  x = x.T if u.shape[0] > u.shape[1] else x
  return -LR * RMS * np.sqrt(max(u.shape)) * x


def lookahead(gradients):
  """Nesterov momentum, bias-corrected as optax does it."""
  m = 0.0
  for t, g in enumerate(gradients, start=1):
    m = MOMENTUM * m + (1 - MOMENTUM) * g
    u = MOMENTUM * m / (1 - MOMENTUM ** (t + 1)) + (1 - MOMENTUM) * g / (1 - MOMENTUM**t)
  return u


def reference(path, gradients, split):
  """The update of one leaf, matrix by matrix; axes before the weight's own are layers or experts."""
  u = lookahead([g.astype(np.float64) for g in gradients])
  name = path.split("/")[-1]
  rank = 3 if name in (*HEADS, "o_proj") else 2
  out = np.zeros_like(u)
  for at in np.ndindex(*u.shape[: u.ndim - rank]):
    w = u[at]
    if name in HEADS and split:
      for head in range(w.shape[1]):
        out[at][:, head] = newton_schulz(w[:, head])
    elif name in HEADS:
      out[at] = newton_schulz(w.reshape(w.shape[0], -1)).reshape(w.shape)
    else:
      out[at] = newton_schulz(w.reshape(-1, w.shape[-1])).reshape(w.shape)
  return out


@pytest.mark.parametrize(("name", "matrices"), [("muon_split", 9 + 13 + 1), ("muon", 6)])
def test_update_equals_numpy(name, matrices, abstract, random_tree):
  """Pitfall 28. Every kind of Muon matrix, dense and stacked MoE layers, after three steps."""
  cfg = tiny()
  tree = abstract(cfg)
  del tree["mtp"]["block"]  # as in the layers; saves compiling it
  if name == "muon":  # differs in the attention weights alone
    tree = {"layers_1": {"block_0": {"attn": tree["layers_1"]["block_0"]["attn"]}}}
  params, gradients = random_tree(tree, 0), [random_tree(tree, seed) for seed in (1, 2, 3)]
  opt = make_optimizer(config(name=name), cfg, params, 10)
  updates, _ = run(opt, params, gradients)
  groups = {path_name(path): group for path, group in jax.tree_util.tree_leaves_with_path(opt.labels)}
  named = [by_path(g) for g in gradients]
  trained = [path for path, group in groups.items() if group == "muon"]
  assert len(trained) == matrices
  for path in trained:
    expected = reference(path, [g[path] for g in named], split=name == "muon_split")
    np.testing.assert_allclose(updates[path], expected, rtol=1e-3, atol=1e-6, err_msg=path)


def test_equals_optax_contrib_muon(abstract, random_tree):
  """In float32 it is optax.contrib.muon with consistent_rms, momentum bias correction included."""
  cfg = tiny()
  tree = {"layers_1": {"block_0": {"attn": abstract(cfg)["layers_1"]["block_0"]["attn"]}}}
  params, gradients = random_tree(tree, 0), [random_tree(tree, seed) for seed in (1, 2)]
  opt = make_optimizer(config(weight_decay=0.1), cfg, params, 10)
  theirs = optax.contrib.muon(
    LR,
    eps=1e-7,
    weight_decay=0.1,
    consistent_rms=RMS,
    muon_weight_dimension_numbers=dimension_numbers(params, cfg),
  )
  ours, expected = run(opt, params, gradients)[0], run(theirs, params, gradients)[0]
  for path, group in jax.tree_util.tree_leaves_with_path(opt.labels):
    if group == "muon":
      name = path_name(path)
      np.testing.assert_allclose(ours[name], expected[name], rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.fixture
def heads(random_tree):
  """Only the three per-head weights of two stacked layers."""
  shapes = {"q_b_proj": (2, 32, 4, 20), "k_b_proj": (2, 16, 4, 12), "v_b_proj": (2, 16, 4, 16)}
  attn = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
  return {"layers_1": {"block_0": {"attn": attn}}}


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
def test_scaling_one_heads_gradient_changes_no_update(ns_dtype, heads, random_tree):
  """Pitfall 29. Plain Muon fails this: there the small head's update shrinks with its gradient."""
  cfg = tiny()
  params, grads = random_tree(heads, 0), random_tree(heads, 1)
  scaled = jax.tree.map(lambda g: g.at[:, :, 2].multiply(2.0**-10), grads)
  opt = make_optimizer(config(ns_dtype=ns_dtype), cfg, params, 10)
  before, after = run(opt, params, [grads])[0], run(opt, params, [scaled])[0]
  for path in before:
    np.testing.assert_allclose(after[path], before[path], rtol=1e-3, atol=1e-7, err_msg=path)
  whole = make_optimizer(config(name="muon"), cfg, params, 10)
  before, after = run(whole, params, [grads])[0], run(whole, params, [scaled])[0]
  for path in before:
    small = np.abs(after[path][:, :, 2]).mean() / np.abs(before[path][:, :, 2]).mean()
    assert small < 0.05, path


def test_w_uk_and_w_uv_are_orthogonalised_apart(heads, random_tree):
  """Pitfall 30: one iteration over their concatenation is another update."""
  cfg = tiny()
  params, grads = random_tree(heads, 0), random_tree(heads, 1)
  updates, _ = run(make_optimizer(config(), cfg, params, 10), params, [grads])
  k, v = (by_path(grads)[f"layers_1/block_0/attn/{name}_b_proj"] for name in "kv")
  joint = newton_schulz(np.concatenate([k[0, :, 0], v[0, :, 0]], axis=1).astype(np.float64))
  ours = np.concatenate([updates[f"layers_1/block_0/attn/{n}_b_proj"][0, :, 0] for n in "kv"], axis=1)
  assert np.abs(ours - joint).max() > 0.1 * np.abs(joint).max()
  only_k = jax.tree.map(lambda g: g, grads)
  only_k["layers_1"]["block_0"]["attn"]["v_b_proj"] *= 100.0
  again, _ = run(make_optimizer(config(), cfg, params, 10), params, [only_k])
  np.testing.assert_array_equal(*(u["layers_1/block_0/attn/k_b_proj"] for u in (updates, again)))


def test_update_rms_is_about_the_configured_one(abstract, random_tree):
  cfg = tiny()
  tree = {"mtp": {"eh_proj": abstract(cfg)["mtp"]["eh_proj"]}}
  params, grads = random_tree(tree, 0), random_tree(tree, 1, scale=1e-3)
  updates, _ = run(make_optimizer(config(), cfg, params, 10), params, [grads])
  rms = np.sqrt(np.mean(np.square(updates["mtp/eh_proj"]))) / LR
  assert 0.7 * RMS < rms < 1.2 * RMS  # the iteration leaves singular values in about 0.7 … 1.2


def test_zero_gradient_moves_nothing(heads, random_tree):
  """An expert that no token chose: no NaN from the norm, no update."""
  params, grads = random_tree(heads, 0), jax.tree.map(lambda x: jnp.zeros(x.shape), heads)
  for ns_dtype in ("float32", "bfloat16"):
    updates, _ = run(make_optimizer(config(ns_dtype=ns_dtype), tiny(), params, 10), params, [grads])
    assert all((u == 0).all() for u in updates.values())


def test_ns_dtype_sets_the_arithmetic_and_not_the_momentum(heads, random_tree):
  params, grads = random_tree(heads, 0), random_tree(heads, 1)
  dims = dimension_numbers(params, tiny())
  dots, states = {}, {}
  for ns_dtype in ("float32", "bfloat16"):
    opt = scale_by_muon_split(dims, MOMENTUM, 5, ns_dtype, RMS)
    state = opt.init(params)
    jaxpr = jax.make_jaxpr(opt.update)(grads, state)
    dots[ns_dtype] = {str(v.aval.dtype) for eqn in _equations(jaxpr.jaxpr) for v in eqn.outvars}
    _, states[ns_dtype] = opt.update(grads, state)
  assert dots == {"float32": {"float32"}, "bfloat16": {"bfloat16"}}
  jax.tree.map(np.testing.assert_array_equal, states["float32"].mu, states["bfloat16"].mu)


def _equations(jaxpr):
  """Matrix products of a jaxpr and everything it calls."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      yield eqn
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from _equations(inner)


def test_bfloat16_weights_keep_float32_moments(abstract):
  cfg = tiny().replace(param_dtype="bfloat16")
  params = abstract(cfg)
  opt = make_optimizer(config(), cfg, params, 10)
  state = jax.eval_shape(opt.init, params)
  _, new_state = jax.eval_shape(opt.update, params, state, params)
  dtypes = lambda s: [x.dtype for x in jax.tree.leaves(s)]  # noqa: E731
  assert dtypes(state) == dtypes(new_state)
  assert jnp.bfloat16 not in dtypes(state)


def test_matrices_worked_on_in_chunks_are_the_same(monkeypatch, heads, random_tree):
  """Two layers of four heads, two heads of q at a time."""
  params, grads = random_tree(heads, 0), random_tree(heads, 1)
  expected, _ = run(make_optimizer(config(), tiny(), params, 10), params, [grads])
  monkeypatch.setattr(muon_split, "CHUNK_BYTES", 3 * 32 * 20 * 4)
  found, _ = run(make_optimizer(config(), tiny(), params, 10), params, [grads])
  for path in expected:
    np.testing.assert_allclose(found[path], expected[path], rtol=1e-5, atol=1e-8, err_msg=path)


def test_labels_and_dimension_numbers_agree(abstract):
  cfg = tiny()
  tree = abstract(cfg)
  dims = dimension_numbers(tree, cfg)
  jax.tree.map(lambda group, dim: _same(group == "muon", dim is not None), labels(tree, cfg), dims)


def _same(a, b):
  assert a == b
