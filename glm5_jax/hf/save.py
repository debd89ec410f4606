"""Writes a Hugging Face GLM-5 folder, part by part of each parameter, wherever its values lie in the files.

Files are made at their full size in a temporary folder inside the target and moved when they are complete;
the one that makes the folder loadable (the index, or the only weights file) comes last.
"""

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.hf import names
from glm5_jax.hf.lazy import stored_params
from glm5_jax.hf.load import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from glm5_jax.hf.safetensors_file import StoredTensor, create

DEFAULT_SHARD_BYTES = 5_000_000_000


def save_params(
  params: dict[str, Any], cfg: ModelConfig, folder: str | Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
  """Writes weights under Hugging Face's names (per-expert, MTP as the layer after the last) and config.json.

  Args:
    params: the parameter tree of `cfg`: NumPy or jax arrays, or what has a shape and `parts()`, such as
      `checkpoint_lazy.SavedArray`, of which one part at a time is held. Written in `param_dtype`, the
      selection bias in float32.
    cfg: the architecture; must be one that transformers' GLM-5 can describe.
    folder: created if need be; may hold other files (a tokeniser), but no weights or config.json yet.
    max_shard_bytes: more than this is split into shards with an index; one tensor is never split.
  Raises:
    UserError: the config has no Hugging Face form, params do not fit it, the folder holds such
      files already, or it cannot be written (the disk is full, …), in which case nothing is left behind.
  """
  folder = Path(folder)
  config = cfg.to_hf()
  leaves = _flatten(params)
  _check(leaves, cfg)
  present = sorted(
    path.name for pattern in ("*.safetensors", INDEX_FILE, CONFIG_FILE) for path in folder.glob(pattern)
  )
  if present:
    raise UserError(f"{folder} already holds {present[0]}; choose another folder")
  temporary = folder / f".saving-{os.getpid()}"
  try:
    temporary.mkdir(parents=True)
    last = _write(leaves, cfg, temporary, max_shard_bytes)
    _write_json(temporary / CONFIG_FILE, config)
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == last):
      os.replace(path, folder / path.name)
    _sync(folder)
  except OSError as error:
    raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def _write(leaves: dict[names.Path, Any], cfg: ModelConfig, folder: Path, max_shard_bytes: int) -> str:
  """Writes the weights; returns the name of the file that completes them."""
  shards = _shards(cfg, max_shard_bytes)
  stored: dict[str, StoredTensor] = {}
  for number, shard in enumerate(shards, start=1):
    file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    specs = {tensor.name: (tensor.shape, _stored_dtype(cfg, tensor)) for tensor in shard}
    stored |= create(folder / file, specs)
  for path, target in stored_params(cfg, itertools.chain(*shards), stored, {}).items():
    for start, values in _parts(leaves[path], target.tensor_axes):
      target.put(start, values)
  for written in folder.iterdir():
    _sync(written)
  if len(shards) == 1:
    return WEIGHTS_FILE
  total = sum(_bytes(cfg, tensor) for shard in shards for tensor in shard)
  weight_map = {name: tensor.file.name for name, tensor in stored.items()}
  _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
  return INDEX_FILE


def _shards(cfg: ModelConfig, max_shard_bytes: int) -> list[list[names.Tensor]]:
  """Tensors in order, cut wherever the next one would make a shard too large."""
  shards: list[list[names.Tensor]] = [[]]
  size = 0
  for tensor in names.tensors(cfg):
    if shards[-1] and size + _bytes(cfg, tensor) > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(tensor)
    size += _bytes(cfg, tensor)
  return shards


def _parts(leaf: Any, tensor_axes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
  """(where it begins, values) of the parts of a parameter, each on the host while it is the one at hand."""
  if hasattr(leaf, "parts"):
    yield from leaf.parts()
  elif isinstance(leaf, np.ndarray):
    yield (0,) * leaf.ndim, leaf
  else:
    for place in np.ndindex(leaf.shape[:tensor_axes]):
      yield (*place, *(0,) * (leaf.ndim - tensor_axes)), np.asarray(leaf[place])[(None,) * tensor_axes]


def _stored_dtype(cfg: ModelConfig, tensor: names.Tensor) -> np.dtype:
  return names.param_dtype(cfg, tensor.pieces[0].path)


def _bytes(cfg: ModelConfig, tensor: names.Tensor) -> int:
  return _stored_dtype(cfg, tensor).itemsize * int(np.prod(tensor.shape, dtype=np.int64))


def _flatten(tree: dict[str, Any], path: names.Path = ()) -> dict[names.Path, Any]:
  leaves: dict[names.Path, Any] = {}
  for name, value in tree.items():
    leaves |= _flatten(value, (*path, name)) if isinstance(value, dict) else {(*path, name): _on_host(value)}
  return leaves


def _on_host(leaf: Any) -> Any:
  """A NumPy view where that costs no copy; other devices are asked for one tensor at a time."""
  if isinstance(leaf, jax.Array) and {device.platform for device in leaf.devices()} == {"cpu"}:
    return np.asarray(leaf) if len(leaf.devices()) == 1 else leaf
  return leaf


def _check(leaves: dict[names.Path, Any], cfg: ModelConfig) -> None:
  specs = names.param_specs(cfg)
  for path in specs.keys() ^ leaves.keys():
    state = "is missing from the parameters" if path in specs else "has no place in this config"
    raise UserError(f"parameter {'.'.join(path)} {state}")
  for path, (shape, _) in specs.items():
    if tuple(leaves[path].shape) != shape:
      raise UserError(
        f"parameter {'.'.join(path)} has shape {list(leaves[path].shape)}; this config needs {list(shape)}"
      )


def _write_json(file: Path, value: dict[str, Any]) -> None:
  with file.open("w", encoding="utf-8") as stream:
    json.dump(value, stream, indent=2)
    stream.write("\n")
    stream.flush()
    os.fsync(stream.fileno())


def _sync(path: Path) -> None:
  """Returns once a file, or what a folder lists, is on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
