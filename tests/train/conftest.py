import jax
import jax.numpy as jnp
import pytest

from glm5_jax.config import OptimConfig, tiny
from glm5_jax.optim.groups import make_optimizer
from glm5_jax.train.checkpoint import Checkpointer
from tests.train.checkpoint_state import EXTRA, config, random
from tests.train.small_run import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
  """A data folder, shared: nobody may change it."""
  return write_data(tmp_path_factory.mktemp("training"))


@pytest.fixture
def state():
  """Parameters of two dtypes, the real optimiser's state (masked nodes, counters), a random key."""
  params = {
    "embed": random((128, 64), 0),
    "final_norm": random((64,), 1),
    "mtp": {"eh_proj": random((128, 64), 2), "enorm": random((64,), 3, jnp.bfloat16)},
  }
  opt = make_optimizer(OptimConfig(schedule="constant"), tiny(), params, 10)
  _, opt_state = opt.update(params, opt.init(params), params)
  return {"params": params, "opt_state": opt_state, "rng": jax.random.key(7), "step": jnp.int32(3)}


@pytest.fixture
def saved(tmp_path, state):
  """A folder with complete steps 1 and 2."""
  checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, config=config())
  for step in (1, 2):
    checkpointer.save(step, state, b"\x00\xffdata", EXTRA)
  checkpointer.close()
  return tmp_path / "checkpoints"
