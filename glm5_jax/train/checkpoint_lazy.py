"""Parameters of a checkpoint that no host could hold: opened by name, read part by part.

The way back of checkpoint_import, for every checkpoint, also one that a training run saved.
"""

import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from glm5_jax.config import RunConfig
from glm5_jax.train.checkpoint import read_checksums, read_config, saved_arrays, step_path
from glm5_jax.train.checkpoint_files import read_or_damaged
from glm5_jax.train.checkpoint_import import CHUNK_BYTES, chunk_shape, chunks
from glm5_jax.train.checksum import part_checksum


class SavedArray:
  """An array of a checkpoint that is still on the disk.

  Attributes:
    shape, dtype: as saved.
  """

  def __init__(self, store: ts.TensorStore, path: pathlib.Path, name: str, checksum: int):
    """`path`: the step's folder; `name` and `checksum` as in its list of checksums."""
    self.shape: tuple[int, ...] = store.shape
    self.dtype = np.dtype(store.dtype.numpy_dtype)
    self._store, self._path, self._name, self._checksum = store, path, name, checksum

  def parts(self) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(where it begins, values) of disjoint parts that make up the array, of at most CHUNK_BYTES.

    Every stored chunk is read once, small ones several together.

    Raises:
      UserError: a chunk cannot be read; or, when all are, the values are not those saved.
    """
    total = 0
    for start, values in self._reads():
      for inner, slices in chunks(values.shape, chunk_shape(values.shape, self.dtype.itemsize)):
        where = tuple(map(sum, zip(start, inner, strict=True)))
        total += part_checksum(values[slices], where, self.shape)
        yield where, values[slices]
    read_or_damaged(self._path, lambda: self._compare(total % 2**32))

  def _reads(self) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    stored = tuple(map(int, self._store.chunk_layout.read_chunk.shape))  # type: ignore[arg-type]
    for start, slices in chunks(self.shape, read_shape(self.shape, stored, self.dtype.itemsize)):
      yield start, read_or_damaged(self._path, self._store[slices].read().result)

  def _compare(self, checksum: int) -> None:
    if checksum != self._checksum:
      raise ValueError(f"the values of {self._name} are not those saved")


def open_params_checkpoint(folder: str | pathlib.Path, step: int | None = None) -> tuple[Any, RunConfig]:
  """Parameters, as a tree of SavedArray, and config of a checkpoint. No values are read yet.

  Args:
    folder: a checkpoint folder, or a run's folder with `checkpoints` inside.
    step: None takes the newest complete one.

  Raises:
    UserError: no complete checkpoint, or a damaged one.
  """
  path = step_path(folder, step)
  config = read_config(path)
  wanted = {"params": saved_arrays(path)["params"]}
  registry = ocp.type_handlers.create_type_handler_registry((ts.TensorStore, _OpenHandler()))
  args = ocp.args.PyTreeRestore(
    item=wanted,
    restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=ts.TensorStore), wanted),
    partial_restore=True,
  )

  def read():
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as reader:
      stores = reader.restore(path / "state", args=args)
    checksums = read_checksums(path)

    def described(keys, store: ts.TensorStore) -> SavedArray:
      name = jax.tree_util.keystr(keys, simple=True, separator="/")
      return SavedArray(store, path, name, checksums[name])

    return jax.tree_util.tree_map_with_path(described, stores)["params"]

  return read_or_damaged(path, read), config


class _OpenHandler(ocp.type_handlers.NumpyHandler):
  """Opens the arrays that orbax's own handler would read."""

  async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
    specs = [
      ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint) for info in infos
    ]
    return [
      await ts.open(ts.Spec(spec), open=True, context=info.ts_context)
      for spec, info in zip(specs, infos, strict=True)
    ]


def read_shape(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
  """A whole number of stored chunks along each axis: as many as fill CHUNK_BYTES, last axes first; or one."""
  read = [min(pair) for pair in zip(chunk, shape, strict=True)]
  for axis in reversed(range(len(shape))):
    times = max(1, CHUNK_BYTES // (math.prod(read) * itemsize))
    read[axis] = min(shape[axis], read[axis] * times)
  return tuple(read)
