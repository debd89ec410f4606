"""Small configs with every part of the checkpoint format, and random weights for them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from glm5_jax.config import tiny
from glm5_jax.hf import names, safetensors_file

GOLDEN = Path(__file__).parent.parent / "golden" / "hf_tiny"


def write_tensors(file, specs, arrays) -> None:
  """A safetensors file of `specs` (name -> shape, dtype) with one array for each, in that order."""
  for stored, array in zip(safetensors_file.create(file, specs).values(), arrays, strict=True):
    stored.map("r+")[...] = array


@pytest.fixture
def golden() -> Path:
  return GOLDEN


@pytest.fixture
def cfg():
  """Odd sizes (no two alike, none a multiple of 128), four layers of which one dense, and MTP."""
  return tiny().replace(
    vocab_size=131,
    hidden_size=40,
    intermediate_size=52,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=10,
    num_attention_heads=3,
    q_lora_rank=14,
    kv_lora_rank=18,
    index_head_dim=20,
    n_routed_experts=5,
    moe_intermediate_size=22,
    num_nextn_predict_layers=1,
  )


@pytest.fixture
def random_params():
  """random_params(cfg, seed=0): a parameter tree of NumPy arrays in their dtypes at rest."""
  return _random_params


def _random_params(cfg, seed=0):
  rng = np.random.default_rng(seed)
  params: dict = {}
  for path, (shape, dtype) in names.param_specs(cfg).items():
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = rng.standard_normal(shape, np.float32).astype(dtype)
  return params


@pytest.fixture
def to_fp8():
  """to_fp8(weight): (float8 values, block scales) of a matrix, and the float32 that they stand for."""
  return _to_fp8


def _to_fp8(weight):
  rows, cols = weight.shape
  values = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
  scale = np.empty((-(-rows // 128), -(-cols // 128)), np.float32)
  restored = np.empty_like(weight)
  for i in range(scale.shape[0]):
    for j in range(scale.shape[1]):
      block = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
      scale[i, j] = np.abs(weight[block]).max() / 448
      values[block] = (weight[block] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
      restored[block] = values[block].astype(np.float32) * scale[i, j]
  return values, scale, restored


@pytest.fixture
def assert_same_trees():
  def check(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
      if isinstance(value, dict):
        check(value, b[key])
      else:
        left, right = np.asarray(value), np.asarray(b[key])
        assert left.dtype == right.dtype, key
        np.testing.assert_array_equal(_bits(left), _bits(right), err_msg=key)

  return check


def _bits(array):
  return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
