"""What the tests of kernels share: an interpreter that watches for races, devices to compile for."""

import contextlib
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm5_jax.compiler import parse_topology, topology_devices

GENERATIONS = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@pytest.fixture
def race_free(capfd) -> Callable:
  """`with race_free(cores=2) as interpret:` runs kernels with `interpret=interpret`; a race fails the test.

  That interpreter prints what it finds, and its state is to be reset after a failure.
  """

  @contextlib.contextmanager
  def watch(cores: int = 1):
    try:
      yield pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
    finally:
      jax.effects_barrier()
      pltpu.reset_tpu_interpret_mode_state()
    printed = capfd.readouterr()
    assert "RACE DETECTED" not in printed.out + printed.err, printed.out + printed.err

  return watch


@pytest.fixture
def no_cache():
  """Programs for devices that are not here can be put into jax's persistent cache but not taken out of it."""
  enabled = jax.config.jax_enable_compilation_cache
  compilation_cache.reset_cache()
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", enabled)
  compilation_cache.reset_cache()


@pytest.fixture(params=GENERATIONS)
def compile_for(request, no_cache) -> Callable:
  """`compile_for(f, (shape, dtype), …)` compiles f for one device of each generation of TPU in turn."""
  devices = topology_devices(parse_topology(GENERATIONS[request.param]))
  everywhere = NamedSharding(Mesh(np.array(devices[:1]), ("one",)), PartitionSpec())

  def compile_it(function, *arguments):
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere) for shape, dtype in arguments]
    return jax.jit(function).lower(*structs).compile()

  return compile_it
