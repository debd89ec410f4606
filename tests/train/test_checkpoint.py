"""Round trips, kills and torn folders."""

import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint import Checkpointer, load_params_checkpoint, save_params_checkpoint
from glm5_jax.train.checksum import checksums
from tests.train.checkpoint_state import EXTRA, abstract, assert_bit_equal, config, python, random, restore


def test_round_trip_is_bit_equal(saved, state):
  restored, data_state, extra = restore(saved, state)
  assert_bit_equal(restored, state)
  assert (data_state, extra) == (b"\x00\xffdata", EXTRA)
  draw = lambda key: jax.random.normal(key, (3,))  # noqa: E731
  np.testing.assert_array_equal(draw(restored["rng"]), draw(state["rng"]))


def test_special_values_survive(tmp_path):
  words = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 0x00000001], np.uint32)
  state = {"params": {"w": jnp.asarray(words.view(np.float32))}}
  checkpointer = Checkpointer(tmp_path, keep=1, config=config())
  checkpointer.save(0, state, {})
  checkpointer.wait()
  restored, data_state, extra = checkpointer.restore(0, abstract(state))
  checkpointer.close()
  np.testing.assert_array_equal(np.asarray(restored["params"]["w"]).view(np.uint32), words)
  assert (data_state, extra) == ({}, {})


def test_keeps_the_newest_and_skips_a_step_already_there(tmp_path, state):
  checkpointer = Checkpointer(tmp_path, keep=2, config=config())
  assert checkpointer.latest_step() is None
  assert [checkpointer.save(step, state, {"at": step}) for step in (1, 2, 3, 3)] == [True, True, True, False]
  checkpointer.wait()
  assert checkpointer.latest_step() == 3
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
  assert checkpointer.restore(2, abstract(state))[1] == {"at": 2}
  checkpointer.close()


def test_state_may_be_donated_right_after_save(tmp_path):
  """The save is asynchronous: it must not read buffers that the next step overwrites."""
  first = np.random.default_rng(0).normal(size=(2_000_000,)).astype(np.float32)
  state = {"params": {"w": jnp.asarray(first)}}
  step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
  checkpointer = Checkpointer(tmp_path, keep=1, config=config())
  checkpointer.save(1, state, {})
  for _ in range(5):
    state = step(state)
  jax.block_until_ready(state)
  restored, *_ = (checkpointer.wait(), checkpointer.restore(1, abstract(state)))[1]
  checkpointer.close()
  np.testing.assert_array_equal(restored["params"]["w"], first)


def test_params_alone(saved, state):
  for folder in (saved, saved.parent):  # the checkpoint folder, or the run's
    params, run_config = load_params_checkpoint(folder)
    assert_bit_equal(params, state["params"])
    assert run_config == config()
  wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), state["params"])
  cast, _ = load_params_checkpoint(saved, step=1, abstract_params=wanted)
  assert_bit_equal(cast, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"]))


def test_params_checkpoint_without_a_run(tmp_path, state):
  save_params_checkpoint(tmp_path / "import", state["params"], config())
  params, run_config = load_params_checkpoint(tmp_path / "import")
  assert_bit_equal(params, state["params"])
  assert run_config == config()
  with pytest.raises(UserError, match="holds a checkpoint already; give another folder"):
    save_params_checkpoint(tmp_path / "import", state["params"], config())
  with pytest.raises(UserError, match=r"opt_state/\S+ is absent there"):
    restore(tmp_path / "import", state)


def test_checksum_sees_bits_order_and_not_sharding(on_devices):
  x = random((6, 4), 0)
  name = lambda x: checksums({"x": x})["x"]  # noqa: E731
  flipped = jnp.asarray(np.asarray(x).view(np.uint32) ^ np.eye(6, 4, dtype=np.uint32)).view(jnp.float32)
  assert len({name(x), name(flipped), name(x[::-1]), name(-x), name(x.at[0, 0].set(jnp.nan))}) == 5
  assert name(jnp.array([True, False])) != name(jnp.array([False, True]))
  assert name(jax.random.key(0)) != name(jax.random.key(1))
  sharded = on_devices("""
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from glm5_jax.train.checksum import checksums
x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
x = jax.device_put(x, NamedSharding(jax.make_mesh((4, 2), ("a", "b")), P("b", "a")))
print(checksums({"x": x})["x"])
""")
  assert int(sharded) == name(random((16, 24), 0))


def test_killed_during_a_save_leaves_the_step_before(tmp_path):
  """Pitfall 26. The process dies when the temporary folder has appeared and 80 MB are being written to it."""
  done = python(
    """
    import glob, os, signal, sys
    import jax.numpy as jnp, numpy as np
    from glm5_jax.config import RunConfig, tiny
    from glm5_jax.train.checkpoint import Checkpointer
    saver = Checkpointer(sys.argv[1], 2, RunConfig(name="run", model=tiny()))
    w = np.random.default_rng(0).normal(size=(20_000_000,)).astype(np.float32)
    saver.save(1, {"params": {"w": jnp.ones(5)}}, b"one")
    saver.wait()
    saver.save(2, {"params": {"w": jnp.asarray(w)}}, b"two")
    while not glob.glob(sys.argv[1] + "/2.*"):
      pass
    os.kill(os.getpid(), signal.SIGKILL)
    """,
    tmp_path,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  names = sorted(p.name for p in tmp_path.iterdir())
  assert names[0] == "1" and len(names) == 2 and names[1].startswith("2.") and "tmp" in names[1]
  params, _ = load_params_checkpoint(tmp_path)  # while the leftover still stands there
  np.testing.assert_array_equal(params["w"], np.ones(5))
  state = {"params": {"w": jnp.zeros(5)}}
  checkpointer = Checkpointer(tmp_path, keep=2, config=config())
  assert checkpointer.latest_step() == 1
  assert checkpointer.restore(None, abstract(state))[1] == b"one"
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]  # the leftover is gone
  checkpointer.save(2, state, b"again")
  checkpointer.wait()
  assert checkpointer.restore(2, abstract(state))[1] == b"again"
  checkpointer.close()


def test_a_folder_with_only_a_torn_step_is_no_checkpoint(saved, state):
  shutil.rmtree(saved / "1")
  (saved / "2" / "commit_success.txt").unlink()
  for load in (lambda: load_params_checkpoint(saved), lambda: restore(saved, state)):
    with pytest.raises(UserError, match=r"no complete checkpoint in .*; train one or give another folder"):
      load()
  checkpointer = Checkpointer(saved, keep=2, config=config())
  assert (saved / "2.torn").is_dir() and checkpointer.latest_step() is None
  assert checkpointer.save(2, state, b"new")  # the number is free again
  checkpointer.close()
  assert restore(saved, state)[1] == b"new"


def test_missing_checkpoints_are_named(tmp_path, saved):
  with pytest.raises(UserError, match=r"no complete checkpoint in .*nowhere"):
    load_params_checkpoint(tmp_path / "nowhere")
  with pytest.raises(UserError, match=r"no complete checkpoint of step 5 in .*; it has 1, 2"):
    load_params_checkpoint(saved, step=5)
