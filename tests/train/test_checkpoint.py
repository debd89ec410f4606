"""Round trips, kills, damage, full disks, other meshes and changed configs."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import OptimConfig, RunConfig, TrainConfig, tiny
from glm5_jax.errors import UserError
from glm5_jax.optim.groups import make_optimizer
from glm5_jax.train.checkpoint import Checkpointer, load_params_checkpoint, save_params_checkpoint
from glm5_jax.train.checksum import checksums
from glm5_jax.train.resume import MAY_CHANGE, check_resume, compare_configs

# Orbax's reads and writes that outlive a failed one are a race that read_or_damaged can shorten, not end.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT = pathlib.Path(__file__).parents[2]
EXTRA = {"rows": 8, "best": [1.5, 2], "note": "ü"}


def config(**model):
  return RunConfig(name="run", model=tiny().replace(**model))


def random(shape, seed, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


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


def abstract(state):
  return jax.eval_shape(lambda: state)


def assert_bit_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def saved(tmp_path, state):
  """A folder with complete steps 1 and 2."""
  checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, config=config())
  for step in (1, 2):
    checkpointer.save(step, state, b"\x00\xffdata", EXTRA)
  checkpointer.close()
  return tmp_path / "checkpoints"


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


# Round trips


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


def test_restores_on_other_meshes(on_devices, tmp_path):
  """Pitfall 25: 4×2 → 2×2, 8×1 and one device, with the target's sharding."""
  out = on_devices(f"""
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from glm5_jax.config import RunConfig, tiny
from glm5_jax.train.checkpoint import Checkpointer, load_params_checkpoint
def mesh(*shape):
  return Mesh(np.array(jax.devices()[:shape[0] * shape[1]]).reshape(shape), ("data", "tensor"))
values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
place = lambda m, spec: jax.device_put(values, NamedSharding(m, spec))
state = {{"params": {{"w": place(mesh(4, 2), P("data", "tensor")), "b": place(mesh(4, 2), P())}}}}
saver = Checkpointer({str(tmp_path)!r}, 1, RunConfig(model=tiny()))
saver.save(1, state, b"")
saver.wait()
for shape in ((2, 2), (8, 1)):
  here = NamedSharding(mesh(*shape), P("tensor", "data"))
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)
  resumed = saver.restore(1, target)[0]["params"]
  for p in (resumed, load_params_checkpoint({str(tmp_path)!r}, None, target["params"])[0]):
    assert p["w"].sharding == here, p["w"].sharding
    assert all((np.asarray(x) == values).all() for x in p.values())
one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
w = saver.restore(1, one)[0]["params"]["w"]
assert len(w.devices()) == 1 and (np.asarray(w) == values).all()
saver.close()
print("same")
""")
  assert out.strip() == "same"


# Kills and torn folders


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


# Damage


def largest(folder):
  return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGED = {
  "arrays": lambda step: largest(step / "state"),
  "array index": lambda step: step / "state" / "manifest.ocdbt",
  "array names": lambda step: step / "state" / "_METADATA",
  "loop": lambda step: step / "loop" / "metadata",
  "config": lambda step: step / "config" / "metadata",
}
KINDS = [("arrays", "flip"), ("arrays", "delete"), ("array index", "flip"), ("config", "delete")]


@pytest.mark.parametrize(("what", "how"), [*KINDS, *((what, "truncate") for what in DAMAGED)])
def test_damage_is_found_and_named(what, how, saved, state):
  path = DAMAGED[what](saved / "2")
  content = bytearray(path.read_bytes())
  if how == "flip":
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
  elif how == "truncate":
    path.write_bytes(content[: len(content) // 2])
  else:
    path.unlink()
  message = r"checkpoint .*/2 is damaged \(.*\); move it away to use step 1$"
  with pytest.raises(UserError, match=message):
    restore(saved, state)
  if what != "arrays" or how == "delete":  # what is lost may be the optimiser's, which this does not read
    with pytest.raises(UserError, match=message):
      load_params_checkpoint(saved)
  assert_bit_equal(restore(saved, state, step=1)[0], state)


def test_flipped_parameter_is_found_when_loading_parameters(tmp_path):
  save_params_checkpoint(tmp_path, {"w": random((300, 300), 0)}, config())
  path = largest(tmp_path / "0" / "state")
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)
  with pytest.raises(
    UserError, match=r"damaged \(the values of params/w are not those saved\); no other step"
  ):
    load_params_checkpoint(tmp_path)


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


# Full and forbidden disks


def test_full_disk_keeps_the_step_before(tmp_path):
  """A file-size limit makes every large write fail, as a full disk does; then space comes back."""
  done = python(
    """
    import os, resource, sys
    import jax.numpy as jnp, numpy as np
    from glm5_jax.config import RunConfig, tiny
    from glm5_jax.errors import UserError
    from glm5_jax.train.checkpoint import Checkpointer
    saver = Checkpointer(sys.argv[1], 1, RunConfig(name="run", model=tiny()))
    state = {"params": {"w": jnp.asarray(np.random.default_rng(0).normal(size=(1000, 1000)))}}
    saver.save(1, state, b"one")
    saver.wait()
    limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for size in (1 << 20, 100):  # the arrays fail in the background, then the small files at once
      limit(size)
      try:
        saver.save(2, state, b"two")
        saver.wait()
      except UserError as error:
        print(error)
      limit(resource.RLIM_INFINITY)
      print(saver.latest_step())
    print(saver.save(3, state, b"three"), saver.wait(), sorted(os.listdir(sys.argv[1])))
    saver.close()
    """,
    tmp_path,
  )
  assert done.returncode == 0, done.stderr
  why = "no space left on the disk; step 1 is complete and kept; free space or give another folder"
  failed = [f"saving step 2 ({tmp_path}) failed: {why}", "1"]
  assert done.stdout.splitlines() == [*failed, *failed, "True None ['3']"]
  assert done.stderr == ""


@pytest.fixture
def small_disk(tmp_path):
  """A 2 MB file system of its own."""
  disk = tmp_path / "disk"
  disk.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
  if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
    pytest.skip("mounting needs root; test_full_disk_keeps_the_step_before runs everywhere")
  yield disk
  subprocess.run(["umount", str(disk)], check=True)


def test_full_file_system(small_disk):
  folder = small_disk / "checkpoints"
  state = {"params": {"w": random((100_000,), 0)}}
  checkpointer = Checkpointer(folder, keep=1, config=config())
  checkpointer.save(1, state, b"one")
  checkpointer.wait()
  filler = small_disk / "filler"
  with pytest.raises(OSError, match="No space left"):
    filler.write_bytes(b"\0" * 2**22)
  for _ in range(2):
    with pytest.raises(UserError, match="no space left on the disk; step 1 is complete and kept"):
      checkpointer.save(2, state, b"two")
      checkpointer.wait()
    assert checkpointer.latest_step() == 1
  filler.unlink()
  checkpointer.save(2, state, b"two")
  checkpointer.close()
  assert [p.name for p in folder.iterdir()] == ["2"]
  assert restore(folder, state)[1] == b"two"


def test_failure_is_reported_by_the_next_save(tmp_path, state, monkeypatch):
  """A loop that never waits must not go on believing that it has a checkpoint."""
  checkpointer = Checkpointer(tmp_path, keep=1, config=config())
  checkpointer.save(1, state, b"")
  checkpointer.wait()

  def full(*_):
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(checkpointer._manager, "wait_until_finished", full)
    with pytest.raises(UserError, match="no space left on the disk; step 1 is complete and kept"):
      checkpointer.save(2, state, b"")
  checkpointer.close()


def test_a_bug_is_not_reported_as_a_full_disk(tmp_path):
  checkpointer = Checkpointer(tmp_path, keep=1, config=config())
  with pytest.raises(TypeError, match="not JSON serializable"):
    checkpointer.save(1, {"params": {"w": jnp.ones(2)}}, {"bad": object()})
  checkpointer.close()


def test_a_file_in_the_folders_place(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(
    UserError, match=r"opening the checkpoint folder \(.*file/checkpoints\) failed: Not a dir"
  ):
    Checkpointer(tmp_path / "file" / "checkpoints", keep=1, config=config())


# Configs


def test_another_architecture_names_leaf_and_field(saved, state):
  other = state | {"params": state["params"] | {"embed": jnp.zeros((256, 64))}}
  with pytest.raises(UserError) as error:
    restore(saved, other, run_config=config(vocab_size=256))
  assert "model.vocab_size was 128 and is now 256" in str(error.value)
  assert "params/embed is float32[128, 64] there and float32[256, 64] here" in str(error.value)
  with pytest.raises(
    UserError, match=r"architecture: params/embed is \[128, 64\] there .* model.vocab_size=128"
  ):
    load_params_checkpoint(saved, abstract_params=other["params"])


def test_missing_and_surplus_leaves_are_named(saved, state):
  more = state | {"params": state["params"] | {"head": jnp.zeros((64, 128))}}
  with pytest.raises(UserError, match=r"params/head is absent there and float32\[64, 128\] here"):
    restore(saved, more)
  fewer = {name: value for name, value in state.items() if name != "rng"}
  with pytest.raises(UserError, match=r"rng is uint32\[2\] there and absent here"):
    restore(saved, fewer)


@pytest.mark.parametrize(
  ("field", "value"),
  [("optim.name", "adamw"), ("data.seq_len", 256), ("train.seed", 1), ("train.batch_size", 16)],
)
def test_a_changed_field_is_refused_with_both_values(field, value, saved, state):
  section, name = field.split(".")
  run_config = config()
  old = getattr(getattr(run_config, section), name)
  setattr(getattr(run_config, section), name, value)
  with pytest.raises(UserError) as error:
    restore(saved, state, run_config=run_config)
  assert f"cannot resume from {saved}/2: {field} was {old!r} and is now {value!r}; set it back" in str(
    error.value
  )
  assert "\n" not in str(error.value)


def test_fields_of_pace_and_place_may_change(saved, state):
  run_config = config(remat="full")
  run_config.train = TrainConfig(steps=5, log_every=1, eval_every=2, checkpoint_every=3, keep_checkpoints=9)
  run_config.data.folder = "elsewhere"
  assert_bit_equal(restore(saved, state, run_config=run_config)[0], state)
  differences = check_resume(config(), run_config, where="here")
  assert {d.field for d in differences} >= {"train.steps", "data.folder", "model.remat"}


def test_every_difference_is_found_and_every_name_exists():
  assert compare_configs(config(), config()) == []
  assert [tuple(d) for d in compare_configs(config(), config(hidden_size=32))] == [
    ("model.hidden_size", 64, 32)
  ]
  fields = {
    f"{section}.{name}" if isinstance(values, dict) else section
    for section, values in json.loads(config().to_json()).items()
    for name in (values if isinstance(values, dict) else [""])
  }
  assert fields >= MAY_CHANGE
