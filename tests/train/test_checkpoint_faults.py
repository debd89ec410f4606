"""Damaged files, full disks, failures in the background."""

import os
import subprocess

import jax.numpy as jnp
import pytest

from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint import Checkpointer, load_params_checkpoint, save_params_checkpoint
from tests.train.checkpoint_state import assert_bit_equal, config, python, random, restore

# Orbax's reads and writes that outlive a failed one are a race that read_or_damaged can shorten, not end.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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
  if what != "arrays":  # what is lost may be the optimiser's, which this does not read
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
