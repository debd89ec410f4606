"""Checkpoints: asynchronous, atomic, readable on any mesh, and refused clearly when they do not fit.

A checkpoint folder holds one numbered folder a step, each with four items: `state` (arrays; the key
"params" at its root), `data` (where the data pipeline stands), `extra` (small JSON values of the loop)
and `config` (the resolved RunConfig). A step is written under a temporary name and renamed when
complete, so a run killed in the middle of a save leaves the earlier steps as they were.
"""

import base64
import contextlib
import errno
import logging
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from glm5_jax.config import RunConfig
from glm5_jax.errors import UserError
from glm5_jax.train.resume import check_resume, shape_fields

COMMIT_FILE = "commit_success.txt"  # orbax writes it last, just before the rename
SUBFOLDER = "checkpoints"  # of a run's folder
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Orbax narrates every phase of a save and logs the traceback of errors that it also raises.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class Checkpointer:
  """Saves and restores one run's training state.

  Args:
    folder: where the numbered step folders stand; made if absent. Step folders that a killed run left
      incomplete are set aside as `<step>.torn`, temporary ones are removed.
    keep: newest steps kept; older ones go only after a newer one is complete.
    config: the run's resolved configuration, saved with every step and compared on restore.
  """

  def __init__(self, folder: str | pathlib.Path, keep: int, config: RunConfig):
    if keep < 1:
      raise UserError(f"train.keep_checkpoints is {keep}; it must be at least 1")
    self.folder = pathlib.Path(folder).absolute()
    self.config = config
    self._keep = keep
    self._pending: int | None = None
    with _disk_errors(self.folder, "opening the folder"):
      self.folder.mkdir(parents=True, exist_ok=True)
      _set_torn_steps_aside(self.folder)
      self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(
      self.folder, options=options, item_names=("state", "data", "extra", "config")
    )

  def save(self, step: int, state: Any, data_state: bytes | dict, extra: dict | None = None) -> bool:
    """Starts writing a step and returns once the arrays are copied; `wait` blocks until it is complete.

    Args:
      step: optimiser steps done.
      state: pytree of arrays with the parameters under the root key or attribute "params". Its buffers
        may be donated as soon as this returns.
      data_state: state of the data iterator; JSON-able when a dict. Process 0's is kept.
      extra: JSON-able values.

    Returns:
      False when this step is on disk already.

    Raises:
      UserError: this save or the one before it failed for want of space or permission. Earlier steps are
        kept, and the incomplete one is removed.
    """
    self.wait()
    if step in complete_steps(self.folder):
      return False
    self._pending = step
    with self._save_errors():
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          data=ocp.args.JsonSave(_encode(data_state)),
          extra=ocp.args.JsonSave(extra or {}),
          config=ocp.args.JsonSave({"json": self.config.to_json()}),
        ),
        force=True,
      )
    return True

  def wait(self) -> None:
    """Blocks until the save in progress is complete. Raises as `save` does."""
    with self._save_errors():
      self._manager.wait_until_finished()
    self._pending = None

  def latest_step(self) -> int | None:
    """The newest complete step on disk, or None."""
    return max(complete_steps(self.folder), default=None)

  def restore(self, step: int | None, abstract_state: Any) -> tuple[Any, bytes | dict, dict]:
    """Reads a step back, onto the devices and mesh that `abstract_state` names.

    Args:
      step: None takes the newest complete one.
      abstract_state: the state's structure with ShapeDtypeStruct (or array) leaves. A leaf's `sharding`
        says where it goes; without one it goes to the first local device.

    Returns:
      (state, data_state, extra) as given to `save`.

    Raises:
      UserError: there is no complete step, the step is damaged, its shapes differ from
        `abstract_state`, or the run's config differs in a field that a resumed run must keep.
    """
    step = _pick_step(self.folder, step)
    path = self.folder / str(step)
    saved = read_config(path)
    mismatch = _first_mismatch(_saved_shapes(path), abstract_state)
    check_resume(saved, self.config, where=str(path), detail=mismatch)
    if mismatch:
      raise UserError(f"{path} does not fit this run: {mismatch}, though the configs agree")
    with _damage(path):
      items = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(_placed(abstract_state)),
          data=ocp.args.JsonRestore(),
          extra=ocp.args.JsonRestore(),
        ),
      )
      return items["state"], _decode(items["data"]), items["extra"]

  def close(self) -> None:
    """Finishes the save in progress and stops the background threads."""
    self.wait()
    self._manager.close()

  @contextlib.contextmanager
  def _save_errors(self) -> Iterator[None]:
    step = self._pending
    try:
      with _disk_errors(self.folder, f"saving step {step}"):
        yield
    except BaseException:
      # A failed manager repeats its error at every call: start a new one, which also removes what the
      # failed save left, so that a later save can succeed.
      self._pending = None
      with contextlib.suppress(Exception):
        self._manager.close()
      for leftover in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
        shutil.rmtree(leftover, ignore_errors=True)
      self._manager = self._open()
      raise


def save_params_checkpoint(folder: str | pathlib.Path, params: Any, run_config: RunConfig) -> None:
  """Writes parameters alone as step 0 of a checkpoint folder (an import, for instance).

  `load_params_checkpoint` reads it; a training run cannot resume from it. Raises UserError when the
  folder holds a checkpoint already or cannot be written.
  """
  checkpointer = Checkpointer(folder, keep=1, config=run_config)
  if (step := checkpointer.latest_step()) is not None:
    checkpointer.close()
    raise UserError(f"{folder} holds a checkpoint of step {step} already; give another folder")
  checkpointer.save(0, {"params": params}, {})
  checkpointer.close()


def load_params_checkpoint(
  folder: str | pathlib.Path, step: int | None = None, abstract_params: Any = None
) -> tuple[Any, RunConfig]:
  """Parameters and config of a checkpoint, leaving its optimiser state unread.

  Args:
    folder: a checkpoint folder, or a run's folder with `checkpoints` inside.
    step: None takes the newest complete one.
    abstract_params: shapes, dtypes (values are cast) and shardings wanted; None restores what was saved
      onto the first local device.

  Raises:
    UserError: no complete checkpoint, a damaged one, or one whose shapes differ from `abstract_params`.
  """
  root = pathlib.Path(folder).absolute()
  root = root / SUBFOLDER if (root / SUBFOLDER).is_dir() else root
  path = root / str(_pick_step(root, step))
  config = read_config(path)
  saved = _saved_shapes(path)["params"]
  if abstract_params is None:
    abstract_params = saved
  elif mismatch := _first_mismatch({"params": saved}, {"params": abstract_params}):
    fields = ", ".join(f"model.{name} {getattr(config.model, name)}" for name in shape_fields())
    raise UserError(f"{path} is of another architecture: {mismatch}; it was written with {fields}")
  target = {"params": _placed(abstract_params)}
  with _damage(path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    restored = reader.restore(
      path / "state",
      args=ocp.args.PyTreeRestore(
        item=target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
      ),
    )
  return restored["params"], config


def complete_steps(folder: pathlib.Path) -> list[int]:
  """Steps whose save finished, ascending. Anything else in the folder is not a checkpoint."""
  if not folder.is_dir():
    return []
  steps = [p for p in folder.iterdir() if p.name.isdecimal() and (p / COMMIT_FILE).is_file()]
  return sorted(int(p.name) for p in steps)


def read_config(path: pathlib.Path) -> RunConfig:
  """The RunConfig saved in a step's folder."""
  with _damage(path), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    text = reader.restore(path / "config", args=ocp.args.JsonRestore())["json"]
  return RunConfig.from_json(text)


def _set_torn_steps_aside(folder: pathlib.Path) -> None:
  """Renames numbered folders without the commit mark (an interrupted copy): their number may be saved."""
  if jax.process_index() != 0:
    return
  for path in folder.iterdir():
    if path.is_dir() and path.name.isdecimal() and not (path / COMMIT_FILE).is_file():
      aside = path.with_suffix(".torn")
      shutil.rmtree(aside, ignore_errors=True)
      path.rename(aside)


def _pick_step(folder: pathlib.Path, step: int | None) -> int:
  steps = complete_steps(folder)
  if not steps:
    raise UserError(f"no complete checkpoint in {folder}; train one or give another folder")
  if step is not None and step not in steps:
    raise UserError(f"no complete checkpoint of step {step} in {folder}; it has {', '.join(map(str, steps))}")
  return steps[-1] if step is None else step


def _encode(data_state: bytes | dict) -> dict:
  if isinstance(data_state, bytes):
    return {"base64": base64.b64encode(data_state).decode()}
  return {"json": data_state}


def _decode(item: dict) -> bytes | dict:
  return base64.b64decode(item["base64"]) if "base64" in item else item["json"]


def _placed(abstract: Any) -> Any:
  """ShapeDtypeStructs that all have a sharding: a saved one may name devices that are not here."""
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

  def place(leaf):
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or here)

  return jax.tree.map(place, abstract)


def _saved_shapes(path: pathlib.Path) -> Any:
  """The saved state's tree of ShapeDtypeStructs, read from its metadata."""
  with _damage(path), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    tree = reader.metadata(path / "state").item_metadata.tree
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else None, tree
    )


def _by_path(tree: Any) -> dict[str, tuple[int, ...]]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): _stored_shape(x) for path, x in leaves}


def _stored_shape(leaf: Any) -> tuple[int, ...]:
  """A leaf's shape on disk: random keys are stored as their words."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.eval_shape(jax.random.key_data, leaf)
  return tuple(leaf.shape)


def _first_mismatch(saved: Any, wanted: Any) -> str:
  """The first leaf that differs in presence or shape, in words; "" when all agree."""
  there, here = _by_path(saved), _by_path(wanted)
  for name in sorted(there.keys() | here.keys(), key=lambda name: (not name.startswith("params"), name)):
    if there.get(name) != here.get(name):
      shapes = [str(list(side[name])) if name in side else "absent" for side in (there, here)]
      return f"{name} is {shapes[0]} there, {shapes[1]} here"
  return ""


@contextlib.contextmanager
def _damage(path: pathlib.Path) -> Iterator[None]:
  """Turns what orbax raises on unreadable files into one line. Out-of-memory errors pass through."""
  try:
    yield
  except (OSError, ValueError, KeyError, TypeError) as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
    others = [s for s in complete_steps(path.parent) if str(s) != path.name]
    remedy = f"move it away to use step {others[-1]}" if others else "no other step is in that folder"
    raise UserError(f"checkpoint {path} is damaged ({reason}); {remedy}") from error


@contextlib.contextmanager
def _disk_errors(folder: pathlib.Path, doing: str) -> Iterator[None]:
  """Turns a full or read-only disk into one line; every other error passes through."""
  try:
    yield
  except Exception as error:
    reason = _disk_reason(error)
    if reason is None:
      raise
    latest = max(complete_steps(folder), default=None)
    kept = "no step is complete there" if latest is None else f"step {latest} is complete and kept"
    raise UserError(f"{doing} in {folder} failed: {reason}; {kept}. Free space or give another folder") from error


def _disk_reason(error: BaseException | None) -> str | None:
  """Says what the disk refused, looking through chained errors and tensorstore's text; None: not the disk."""
  while error is not None:
    if isinstance(error, OSError) and error.errno is not None:
      return "no space left on the disk" if error.errno in _NO_SPACE else str(error.strerror)
    text = str(error)
    if "No space left" in text or "File too large" in text or "Disk quota" in text:
      return "no space left on the disk"
    error = error.__cause__ or error.__context__
  return None
