"""Norms and rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.model.layers import apply_rope, layer_norm, rms_norm, rope_tables
from tests.model import toy

FAR = 131_071


@pytest.mark.parametrize("theta", [1e6, 8e6])
def test_phases_far_out_are_those_of_float64(theta):
  """Within 0.01 rad at position 131,071; positions in bfloat16 would be off by radians."""
  positions = np.array([[0, 1, 4095, FAR]], np.int32)
  cos, sin = map(np.asarray, jax.jit(rope_tables, static_argnums=(1, 2))(positions, 64, theta))
  phase = positions[..., None] * theta ** (-np.arange(0, 64, 2, dtype=np.float64) / 64)
  assert cos.shape == sin.shape == (1, 4, 32) and cos.dtype == sin.dtype == np.float32
  assert np.abs(cos - np.cos(phase)).max() < 0.01 and np.abs(sin - np.sin(phase)).max() < 0.01
  rounded = np.asarray(jnp.asarray(positions, jnp.bfloat16), np.float64)[..., None] * phase[:, 1:2]
  assert np.abs(np.cos(rounded) - np.cos(phase)).max() > 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_differences_of_positions_matter(dtype):
  """The whole model a hundred thousand tokens further on. Phases in bfloat16 would all be equal there."""
  cfg = toy.config(attention="F", num_hidden_layers=1, first_k_dense_replace=1, dtype=dtype)
  tokens = toy.tokens(1, 24)
  near = np.arange(24, dtype=np.int32)[None]
  logits = [np.asarray(toy.forward(cfg, tokens, positions_BT=near + p).logits_BTV) for p in (0, FAR - 23)]
  all_equal = np.asarray(toy.forward(cfg, tokens, positions_BT=0 * near).logits_BTV)
  error, effect = np.abs(logits[1] - logits[0]).max(), np.abs(all_equal - logits[0]).max()
  assert error < (0.02 if dtype == "float32" else 0.08) and effect > 0.4


def test_rotation_turns_pairs_by_their_phase():
  """As complex numbers; interleaved pairs are neighbours, the others are half a vector apart."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
  positions = rng.integers(0, 50, (2, 3), dtype=np.int32)
  tables = rope_tables(positions, 8, 100.0)
  turn = np.exp(1j * positions[..., None] * 100.0 ** (-np.arange(4) / 4))[:, :, None]
  for interleave in (True, False):
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleave else x[..., :4] + 1j * x[..., 4:]
    right = pairs * turn
    out = np.asarray(apply_rope(x, tables, interleave))
    np.testing.assert_allclose(out, np.concatenate([right.real, right.imag], axis=-1), atol=1e-5)
    np.testing.assert_array_equal(out[:, :, 1], apply_rope(x[:, :, 1], tables, interleave))


def test_norms_at_the_zero_vector_have_a_finite_gradient():
  zero, ones = jnp.zeros((2, 8)), jnp.ones(8)
  for norm in (lambda x: rms_norm(x, ones, 1e-5), lambda x: layer_norm(x, ones, 0 * ones, 1e-6)):
    value, grad = jax.value_and_grad(lambda x, norm=norm: jnp.sum(norm(x) ** 2))(zero)
    assert value == 0 and not np.asarray(grad).any()


def test_norms_work_in_float32():
  """A bfloat16 sum of 1024 squares would stall; the RMS keeps the input's dtype, the LayerNorm is wider."""
  x = jnp.full((1, 1024), 300.0, jnp.bfloat16)
  x = x.at[0, 0].set(302.0)
  out = rms_norm(x, jnp.ones(1024, jnp.bfloat16), 1e-5)
  assert out.dtype == jnp.bfloat16 and np.asarray(out, np.float32)[0, 1:].tolist() == [1.0] * 1023
  wide = layer_norm(x, jnp.ones(1024, jnp.bfloat16), jnp.zeros(1024, jnp.bfloat16), 1e-6)
  assert wide.dtype == jnp.float32
  right = np.asarray(x, np.float64) - np.asarray(x, np.float64).mean()
  np.testing.assert_allclose(wide, right / np.sqrt((right**2).mean() + 1e-6), rtol=1e-4, atol=1e-4)
