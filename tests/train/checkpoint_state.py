"""A small training state and what checkpoint tests do with it."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import RunConfig, tiny
from glm5_jax.train.checkpoint import Checkpointer
from tests.conftest import ROOT

EXTRA = {"rows": 8, "best": [1.5, 2], "note": "ü"}


def config(**model):
  return RunConfig(name="run", model=tiny().replace(**model))


def random(shape, seed, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def abstract(state):
  return jax.eval_shape(lambda: state)


def assert_bit_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def restore(folder, state, step=None, run_config=None):
  checkpointer = Checkpointer(folder, keep=2, config=run_config or config())
  try:
    return checkpointer.restore(step, abstract(state))
  finally:
    checkpointer.close()


def python(code, *arguments):
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
