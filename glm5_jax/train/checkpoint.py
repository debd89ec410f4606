"""Checkpoints: asynchronous, atomic, readable on any mesh, and refused clearly when they do not fit.

A checkpoint folder holds one numbered folder a step, each with three items: `state` (arrays; the key
"params" at its root), `loop` (JSON: where the data pipeline stands, small values of the loop, a checksum
of every array) and `config` (JSON: the resolved RunConfig). A step is written under a temporary name and
renamed when complete, so a run killed in the middle of a save leaves the earlier steps as they were.
"""

import base64
import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from glm5_jax.config import RunConfig
from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint_files import (
  SIBLINGS_SECONDS,
  complete_steps,
  disk_errors,
  read_or_damaged,
  remove_leftovers,
  set_torn_steps_aside,
)
from glm5_jax.train.checksum import checksums
from glm5_jax.train.resume import check_resume, shape_fields

SUBFOLDER = "checkpoints"  # of a run's folder


class Checkpointer:
  """Saves and restores one run's training state.

  Args:
    folder: where the numbered step folders stand; made if absent. Step folders that lack the mark of a
      complete save are set aside as `<step>.torn`, temporary ones are removed.
    keep: newest steps kept; older ones go only after a newer one is complete.
    config: the run's resolved configuration, saved with every step and compared on restore.
  """

  def __init__(self, folder: str | pathlib.Path, keep: int, config: RunConfig):
    if keep < 1:
      raise UserError(f"config.train.keep_checkpoints={keep}: should be at least 1")
    self.folder = pathlib.Path(folder).absolute()
    self.config = config
    self._keep = keep
    self._pending: int | None = None
    with disk_errors(self.folder, "opening the checkpoint folder"):
      self.folder.mkdir(parents=True, exist_ok=True)
      set_torn_steps_aside(self.folder)
      remove_leftovers(self.folder)
      self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=self._keep)
    return ocp.CheckpointManager(self.folder, options=options, item_names=("state", "loop", "config"))

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
      UserError: this save, or the one before it, failed for want of space or permission. Earlier steps
        are kept and the incomplete one is removed.
    """
    self.wait()
    if step in complete_steps(self.folder):
      return False
    remove_leftovers(self.folder)
    loop = {"data": _encode(data_state), "extra": extra or {}, "checksums": checksums(state)}
    json.dumps(loop)  # what is not JSON fails here rather than in the background
    self._pending = step
    with self._save_errors():
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          loop=ocp.args.JsonSave(loop),
          config=ocp.args.JsonSave(json.loads(self.config.to_json())),
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
      UserError: there is no complete step, the step is damaged, its shapes or dtypes differ from
        `abstract_state`, or the run's config differs in a field that a resumed run must keep.
    """
    path = self.folder / str(_pick_step(self.folder, step))
    mismatch = _first_mismatch(saved_arrays(path), abstract_state)
    check_resume(read_config(path), self.config, where=str(path), detail=mismatch)
    if mismatch:
      raise UserError(f"cannot resume from {path}: {mismatch}; start in another folder")
    args = ocp.args.Composite(
      state=ocp.args.StandardRestore(_placed(abstract_state)), loop=ocp.args.JsonRestore()
    )

    def read():
      items = self._manager.restore(int(path.name), args=args)
      _verify(items["state"], items["loop"]["checksums"])
      return items["state"], _decode(items["loop"]["data"]), items["loop"]["extra"]

    return read_or_damaged(path, read)

  def close(self) -> None:
    """Finishes the save in progress and stops the background threads. Raises as `save` does."""
    self.wait()
    self._manager.close()

  @contextlib.contextmanager
  def _save_errors(self) -> Iterator[None]:
    step = self._pending
    try:
      with disk_errors(self.folder, f"saving step {step}"):
        yield
    except Exception:
      # A failed manager repeats its error at every call: a new one lets a later save succeed. What the
      # failed save left goes at once, since the disk may be full.
      self._pending = None
      with contextlib.suppress(Exception):
        self._manager.close()
      time.sleep(SIBLINGS_SECONDS)
      remove_leftovers(self.folder)
      self._manager = self._open()
      raise


def save_params_checkpoint(folder: str | pathlib.Path, params: Any, run_config: RunConfig) -> None:
  """Writes parameters alone as step 0 of a checkpoint folder (an import, for instance).

  `load_params_checkpoint` reads it; a training run cannot resume from it. Raises UserError when the
  folder holds a checkpoint already or cannot be written.
  """
  checkpointer = Checkpointer(folder, keep=1, config=run_config)
  saved = checkpointer.latest_step() is None and checkpointer.save(0, {"params": params}, {})
  checkpointer.close()
  if not saved:
    raise UserError(f"{folder} holds a checkpoint already; give another folder")


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
  path = step_path(folder, step)
  config = read_config(path)
  saved = saved_arrays(path)["params"]
  wanted = saved if abstract_params is None else abstract_params
  if mismatch := _first_mismatch({"params": saved}, {"params": wanted}, dtypes=False):
    raise UserError(f"{path} is of another architecture: {mismatch}; it has {shape_fields(config.model)}")
  # Read in the saved dtype, which the checksums are of; cast afterwards.
  target = {"params": jax.tree.map(_with_dtype_of, _placed(wanted), saved)}
  args = ocp.args.PyTreeRestore(
    item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
  )

  def read():
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      restored = reader.restore(path / "state", args=args)
    _verify(restored, read_checksums(path))
    return restored["params"]

  params = read_or_damaged(path, read)
  return jax.tree.map(lambda x, want: x.astype(want.dtype), params, wanted), config


def read_config(path: pathlib.Path) -> RunConfig:
  """The RunConfig saved in a step's folder."""
  return RunConfig.from_json(json.dumps(read_or_damaged(path, lambda: _read_json(path / "config"))))


def read_description(folder: str | pathlib.Path, step: int | None = None) -> tuple[int, RunConfig, dict]:
  """(step, config, extra) as given to `save`, of a checkpoint or run folder; None takes the newest step."""
  path = step_path(folder, step)
  return int(path.name), read_config(path), read_or_damaged(path, lambda: _read_json(path / "loop"))["extra"]


def read_checksums(path: pathlib.Path) -> dict[str, int]:
  """Of every array in a step's folder, by its path in the state ("params/embed")."""
  return _read_json(path / "loop")["checksums"]


def step_path(folder: str | pathlib.Path, step: int | None) -> pathlib.Path:
  """A step's folder in a checkpoint or run folder; None takes the newest. UserError when there is none."""
  root = pathlib.Path(folder).absolute()
  root = root / SUBFOLDER if (root / SUBFOLDER).is_dir() else root
  return root / str(_pick_step(root, step))


def _read_json(item: pathlib.Path) -> Any:
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    return reader.restore(item, args=ocp.args.JsonRestore())


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
  """ShapeDtypeStructs that all have a sharding: the saved one may name devices that are not here."""
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

  def place(leaf):
    sharding = getattr(leaf, "sharding", None) or here
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(place, abstract)


def _with_dtype_of(target: jax.ShapeDtypeStruct, saved: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(target.shape, saved.dtype, sharding=target.sharding)


def saved_arrays(path: pathlib.Path) -> Any:
  """The saved state as a tree of ShapeDtypeStructs, from its metadata. Random keys are their words there."""

  def read():
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      metadata = reader.metadata(path / "state").item_metadata
    if metadata is None:
      raise ValueError("the description of its arrays is unreadable")
    return metadata.tree

  # Nodes without arrays (None, an empty tuple) have metadata without a shape.
  def abstract(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else None

  return jax.tree.map(abstract, read_or_damaged(path, read))


def _describe(tree: Any, dtypes: bool) -> dict[str, str]:
  """By path: "float32[64, 128]", or the shape alone."""
  described = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, leaf)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    described[name] = f"{leaf.dtype if dtypes else ''}{list(leaf.shape)}"
  return described


def _first_mismatch(saved: Any, wanted: Any, dtypes: bool = True) -> str:
  """The first leaf that differs, parameters first, in words; "" when all agree."""
  there, here = _describe(saved, dtypes), _describe(wanted, dtypes)
  for name in sorted(there.keys() | here.keys(), key=lambda name: (not name.startswith("params"), name)):
    if there.get(name) != here.get(name):
      return f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here"
  return ""


def _verify(state: Any, expected: dict[str, int]) -> None:
  """Raises ValueError naming the first array whose values are not those saved."""
  for name, value in checksums(state).items():
    if value != expected[name]:
      raise ValueError(f"the values of {name} are not those saved")
