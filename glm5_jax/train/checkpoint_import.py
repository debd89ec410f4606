"""Writes a checkpoint of parameters that no host could hold: slice by slice, as they are read.

The result is what `save_params_checkpoint` writes. Arrays lie in chunks of about CHUNK_BYTES, so that a
reader on any mesh reads little more than its own part.
"""

import itertools
import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from glm5_jax.config import RunConfig
from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint_files import (
  COMMIT_FILE,
  complete_steps,
  disk_errors,
  remove_leftovers,
  set_torn_steps_aside,
)
from glm5_jax.train.checksum import part_checksum

CHUNK_BYTES = 16 * 2**20  # before compression
_IN_FLIGHT = 4  # chunks that are being compressed and written while the next one is read


class Readable(Protocol):
  """An array of which slices can be read; on the disk, for instance."""

  shape: tuple[int, ...]
  dtype: np.dtype

  def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray: ...


def import_params_checkpoint(folder: str | pathlib.Path, params: Any, run_config: RunConfig) -> None:
  """Writes parameters as step 0 of a checkpoint folder, holding a few chunks of them at a time.

  Only for one process. `load_params_checkpoint` reads the result on any mesh.

  Args:
    folder: holds no complete checkpoint yet; leftovers of an interrupted import are removed.
    params: a tree of dicts with `Readable` leaves.

  Raises:
    UserError: the folder holds a checkpoint already or cannot be written; then nothing is left behind.
  """
  folder = pathlib.Path(folder).absolute()
  if complete_steps(folder):
    raise UserError(f"{folder} holds a checkpoint already; give another folder")
  unfinished = folder / "0.orbax-checkpoint-tmp"
  with disk_errors(folder, "importing parameters"):
    folder.mkdir(parents=True, exist_ok=True)
    set_torn_steps_aside(folder)
    remove_leftovers(folder)
    try:
      _write_items(unfinished, params, run_config)
      unfinished.rename(folder / "0")
    finally:
      shutil.rmtree(unfinished, ignore_errors=True)


def _write_items(path: pathlib.Path, params: Any, run_config: RunConfig) -> None:
  """The items of a step folder as `Checkpointer` writes them, and the mark that they are complete."""
  checksums: dict[str, int] = {}
  tree = jax.tree_util.tree_map_with_path(
    lambda keys, leaf: _Leaf(jax.tree_util.keystr(keys, simple=True, separator="/"), leaf), {"params": params}
  )
  registry = ocp.type_handlers.create_type_handler_registry((_Leaf, _LeafHandler(checksums)))
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as writer:
    writer.save(path / "state", args=ocp.args.PyTreeSave(tree))
  loop = {"data": {"json": {}}, "extra": {}, "checksums": checksums}
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as writer:
    writer.save(path / "loop", args=ocp.args.JsonSave(loop))
    writer.save(path / "config", args=ocp.args.JsonSave(json.loads(run_config.to_json())))
  (path / COMMIT_FILE).write_text(f"{path.name} is complete\n")


class _Leaf:
  def __init__(self, name: str, source: Readable):
    self.name, self.source = name, source


class _LeafHandler(ocp.type_handlers.NumpyHandler):
  """Stores leaves as orbax stores NumPy arrays, but chunk by chunk; leaves their checksums in a dict."""

  def __init__(self, checksums: dict[str, int]):
    super().__init__()
    self._checksums = checksums

  async def serialize(self, values: Sequence[_Leaf], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
    for leaf, info in zip(values, infos, strict=True):
      shape, dtype = leaf.source.shape, leaf.source.dtype
      spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=shape,
        local_shape=chunk_shape(shape, dtype.itemsize),
        dtype=dtype,
        process_index=0,
      )
      store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
      self._checksums[leaf.name] = await _copy(leaf.source, store)
    return []


async def _copy(source: Readable, store: ts.TensorStore) -> int:
  """Writes all of `source`; returns its checksum."""
  total = 0
  writes: list[ts.WriteFutures] = []
  for start, slices in chunks(source.shape, chunk_shape(source.shape, source.dtype.itemsize)):
    values = source[slices]
    total += part_checksum(values, start, source.shape)
    if len(writes) == _IN_FLIGHT:
      await writes.pop(0)
    writes.append(store[slices].write(values, can_reference_source_data_indefinitely=True))
    writes[-1].commit.force()
  for write in writes:
    await write
  return total % 2**32


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
  """Of at most CHUNK_BYTES; leading axes are divided first, evenly unless that would make chunks small."""
  chunk = list(shape)
  for axis, size in enumerate(shape):
    excess = math.ceil(math.prod(chunk) * itemsize / CHUNK_BYTES)
    most = max(1, size // excess)
    chunk[axis] = next((part for part in range(most, most // 2, -1) if size % part == 0), most)
  return tuple(chunk)


def chunks(
  shape: tuple[int, ...], chunk: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
  """(start, slices) of every chunk of an array, in order."""
  for start in itertools.product(*(range(0, size, part) for size, part in zip(shape, chunk, strict=True))):
    yield start, tuple(slice(s, min(s + p, n)) for s, p, n in zip(start, chunk, shape, strict=True))
