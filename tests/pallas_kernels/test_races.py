"""The watch for races can fail: a kernel whose two programs write the same place is caught."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def test_a_race_is_found(race_free):
  def kernel(out_ref):
    def write(buffer, semaphore):
      buffer[...] = jnp.full(buffer.shape, pl.program_id(0), jnp.float32)
      copy = pltpu.make_async_copy(buffer, out_ref, semaphore)
      copy.start()
      copy.wait()

    pl.run_scoped(write, pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA)

  with pytest.raises(AssertionError, match="RACE DETECTED"), race_free(cores=2) as interpret:
    pl.pallas_call(
      kernel,
      grid=(2,),
      out_specs=pl.BlockSpec(memory_space=pl.ANY),
      out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
      interpret=interpret,
    )().block_until_ready()
