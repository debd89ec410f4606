"""What the reference checkpoint does not cover, against a NumPy forward written from the formulas alone.

The NumPy forward first has to reproduce the reference itself; then it judges multi-token prediction,
IndexShare and group-limited routing, on the reference's weights plus a random MTP layer.
"""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm5_jax import hf
from glm5_jax.hf import names
from glm5_jax.model import GLM5
from tests.model import golden
from tests.model.golden import FAST_COMPILE, distance
from tests.model.numpy_forward import Forward

DEPTHS = 3
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def file():
  """The reference's tensors, and random ones for an MTP layer."""
  tensors = load_file(golden.FOLDER / "model.safetensors")
  rng = np.random.default_rng(0)
  for tensor in names.tensors(golden.config().replace(num_nextn_predict_layers=1)):
    if tensor.name not in tensors:
      values = rng.standard_normal(tensor.shape)
      if len(tensor.shape) == 2:
        values /= np.sqrt(tensor.shape[1])
      else:
        values = 0.2 * values + (not tensor.name.endswith("bias"))
      tensors[tensor.name] = values.astype(np.float32)
  return tensors


def _ours(cfg, file, folder, **inputs):
  """The model's output on these tensors, read through the loader."""
  folder.mkdir(exist_ok=True)
  save_file(file, folder / "model.safetensors")
  params = hf.load_params(folder, cfg)
  run = jax.jit(
    lambda p, t: GLM5(cfg).apply({"params": p}, t, **inputs),
    compiler_options=FAST_COMPILE,
  )
  return run(params, golden.tokens())


def test_the_numpy_forward_reproduces_the_reference():
  forward = Forward(golden.config(), load_file(golden.FOLDER / "model.safetensors"))
  for row, tokens in enumerate(golden.tokens()):
    hidden, sets = forward.trunk(tokens)
    assert distance(forward.logits(hidden), golden.reference()["logits"][row]) < 2e-5
    for layer, theirs in enumerate(golden.reference()["topk_indices"][:, row]):
      for t, indices in enumerate(theirs):
        assert set(sets[layer][t]) == {s for s in indices if s <= t}


def test_mtp_depths_share_one_layer(file, tmp_path):
  """Embedding first; hidden after the final norm, then after shared_head.norm; a slot keeps its position."""
  cfg = golden.config().replace(num_nextn_predict_layers=1, mtp_depths=DEPTHS, scan_layers=False)
  out = _ours(cfg, file, tmp_path, mtp_depths=DEPTHS)
  assert out.aux["mtp_hidden_KBTD"].shape[0] == DEPTHS
  right = Forward(cfg, file)
  for row, tokens in enumerate(golden.tokens()):
    hidden, _ = right.trunk(tokens)
    expected = right.mtp(hidden, tokens, DEPTHS)
    ours = [out.aux["mtp_hidden_KBTD"][k, row, : len(tokens) - k - 1] for k in range(DEPTHS)]
    for depth in range(DEPTHS):
      assert distance(ours[depth], expected[depth]) < TOLERANCE, depth + 1


@pytest.mark.parametrize("mistake, depth", [("hidden_first", 1), ("recycle_before_norm", 2)])
def test_mistakes_of_mtp_would_be_seen(file, mistake, depth):
  cfg = golden.config().replace(num_nextn_predict_layers=1)
  tokens = golden.tokens()[0]
  right, wrong = Forward(cfg, file), Forward(cfg, file, **{mistake: True})
  hidden, _ = right.trunk(tokens)
  good, bad = right.mtp(hidden, tokens, depth)[-1], wrong.mtp(hidden, tokens, depth)[-1]
  assert distance(good, bad) > 1000 * TOLERANCE


VARIANTS = {
  "IndexShare": {"indexer_types": ("full", "full", "shared", "shared")},
  "groups": {"n_group": 4, "topk_group": 2},
  "weights not normalised": {"norm_topk_prob": False},
}


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants(file, tmp_path, change):
  cfg = golden.config().replace(**change)
  kept = {tensor.name: file[tensor.name] for tensor in names.tensors(cfg)}
  out = _ours(cfg, kept, tmp_path)
  forward = Forward(cfg, kept)
  for row, tokens in enumerate(golden.tokens()):
    logits = forward.logits(forward.trunk(tokens)[0])
    assert distance(out.logits_BTV[row], logits) < TOLERANCE
    assert distance(logits, golden.reference()["logits"][row]) > 0.1
