"""Every kernel through the real TPU compiler, for every generation, at the sizes it is made for."""

import importlib.util

import jax.numpy as jnp
import pytest

from pallas_kernels.topk import topk, topk_mask

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='libtpu is not installed (pip install "glm5-jax[tpu]")'
  ),
]


def kernels(compiled) -> int:
  return compiled.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize(
  ("shape", "k"), [((64, 131_072), 2048), ((8, 262_144), 4096), ((3, 37), 5), ((300, 2000), 16)]
)
def test_topk(compile_for, shape, k):
  compiled = compile_for(lambda x: topk(x, k, "tpu"), (shape, jnp.float32))
  assert kernels(compiled) == 3 and " sort(" not in compiled.as_text()
  compiled = compile_for(lambda x: topk(x, k, "tpu")[1], (shape, jnp.float32))
  assert kernels(compiled) == 2  # who wants no values pays for none
  assert kernels(compile_for(lambda x: topk_mask(x, k, "tpu"), (shape, jnp.float32))) == 2
