"""Reads a Hugging Face GLM-5 folder tensor by tensor.

Peak memory is the target plus a few copies of the largest tensor. Names and shapes are checked against
the config before any data is read: every tensor is used, every parameter is filled, or nothing is.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.config_hf import FP8_BLOCK
from glm5_jax.errors import UserError
from glm5_jax.hf import names
from glm5_jax.hf.safetensors_file import StoredTensor, read_header

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SCALE_END = "_scale_inv"
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SHOWN = 4  # names listed in an error


@dataclass(frozen=True)
class LoadedPiece:
  """Values for params[path][index]; `index` may be empty or hold a layer of a stack and an expert."""

  path: tuple[str, ...]
  index: tuple[int, ...]
  value: np.ndarray


def load_config(folder: str | Path, **ours) -> ModelConfig:
  """`ModelConfig.from_hf` of the folder's config.json; `ours` overrides fields."""
  return ModelConfig.from_hf(_read_json(Path(folder) / CONFIG_FILE), **ours)


def is_hf_folder(folder: str | Path) -> bool:
  """Whether the folder is meant as Hugging Face's (our run folders have another config.json)."""
  folder = Path(folder)
  if (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists():
    return True
  return (folder / CONFIG_FILE).is_file() and "model_type" in _read_json(folder / CONFIG_FILE)


def load_params(folder: str | Path, cfg: ModelConfig, drop_mtp: bool = False) -> dict[str, Any]:
  """The parameter tree of `cfg` (jax arrays on the default device) from a Hugging Face folder.

  Args:
    folder: holds model.safetensors, or model.safetensors.index.json and its shards. Weights may be
      float32, float16, bfloat16, or float8_e4m3fn with 128×128 block scales (`…weight_scale_inv`).
    cfg: the architecture. Values are rounded to `param_dtype`; the selection bias stays float32.
    drop_mtp: with `num_nextn_predict_layers` 0, a stored MTP layer is an error unless this is set.
  Raises:
    UserError: a file is missing or torn, or a tensor is missing, left over or of another shape.
  """
  arrays = {path: np.empty(shape, dtype) for path, (shape, dtype) in names.param_specs(cfg).items()}
  for piece in iter_params(folder, cfg, drop_mtp):
    arrays[piece.path][piece.index] = piece.value
  params: dict[str, Any] = {}
  for path in list(arrays):
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = jnp.asarray(arrays.pop(path))
  return params


def iter_params(folder: str | Path, cfg: ModelConfig, drop_mtp: bool = False) -> Iterator[LoadedPiece]:
  """Yields every part of every parameter once, in the order of the files, in its dtype at rest.

  For loaders that place each part on its own devices; arguments and errors as in `load_params`.
  """
  stored = _read_headers(Path(folder))
  todo = _match(Path(folder), stored, cfg, drop_mtp)
  for tensor in sorted(todo, key=lambda t: (str(stored[t.name].file), stored[t.name].start)):
    values = _read(stored, tensor.name)
    for piece, part in tensor.split(values):
      yield LoadedPiece(piece.path, piece.index, part.astype(names.param_dtype(cfg, piece.path)))


def _read_headers(folder: Path) -> dict[str, StoredTensor]:
  """Every stored tensor by name, from the single file or from the shards of the index."""
  if not folder.is_dir():
    raise UserError(f"{folder} is no folder; a Hugging Face checkpoint with {CONFIG_FILE} is needed")
  if (folder / WEIGHTS_FILE).exists():
    return read_header(folder / WEIGHTS_FILE)
  if not (folder / INDEX_FILE).exists():
    raise UserError(f"{folder} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")
  weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
  if not isinstance(weight_map, dict):
    raise UserError(f"{folder / INDEX_FILE} has no weight_map")
  stored: dict[str, StoredTensor] = {}
  for shard in sorted(set(weight_map.values())):
    stored |= read_header(folder / shard)
  for name, shard in weight_map.items():
    if name not in stored or stored[name].file.name != shard:
      raise UserError(f"{folder / INDEX_FILE} places {name} in {shard}, which does not hold it")
  return stored


def _match(
  folder: Path, stored: dict[str, StoredTensor], cfg: ModelConfig, drop_mtp: bool
) -> list[names.Tensor]:
  """The tensors to read, after checking names and shapes both ways."""
  layers = range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers)
  fused = frozenset(layer for layer in layers if names.fused_name(layer) in stored)
  todo = list(names.tensors(cfg, fused))
  missing = [tensor.name for tensor in todo if tensor.name not in stored]
  if missing:
    raise UserError(f"{folder}: {_listing(missing)} missing; is this config of another checkpoint?")
  for tensor in todo:
    found = stored[tensor.name].shape
    if found != tensor.shape:
      raise UserError(
        f"{folder}: {tensor.name} has shape {list(found)}; this config needs {list(tensor.shape)}"
      )
  used = {tensor.name for tensor in todo}
  used |= {name + _SCALE_END for name in used if stored[name].dtype == _FP8}
  left = [
    name for name in stored if name not in used and not names.ignored(cfg, name.removesuffix(_SCALE_END))
  ]
  mtp = f"model.layers.{cfg.num_hidden_layers}."
  if not cfg.num_nextn_predict_layers and any(name.startswith(mtp) for name in left):
    if not drop_mtp:
      raise UserError(
        f"{folder} stores an MTP layer ({mtp}*), but num_nextn_predict_layers is 0; set it to 1, or drop "
        "the layer explicitly (drop_mtp)"
      )
    left = [name for name in left if not name.startswith(mtp)]
  if left:
    raise UserError(f"{folder}: {_listing(left)} left over, with no place in this config")
  return todo


def _read(stored: dict[str, StoredTensor], name: str) -> np.ndarray:
  """One tensor's values; fp8 is expanded to float32 by its block scales."""
  entry = stored[name]
  if entry.dtype != _FP8:
    return entry.read()
  scale = stored.get(name + _SCALE_END)
  blocks = tuple(-(-size // FP8_BLOCK) for size in entry.shape)
  if scale is None or len(blocks) != 2 or scale.shape != blocks:
    found = "missing" if scale is None else f"of shape {list(scale.shape)}"
    raise UserError(
      f"{entry.file}: {name} is float8; its {name + _SCALE_END} is {found}, needs {list(blocks)}"
    )
  return dequantise(entry.read(), scale.read())


def dequantise(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """float32 values · scale, one scale per block of 128×128; the last blocks may be smaller.

  Args:
    values: [rows, cols], any dtype.
    scale: [ceil(rows/128), ceil(cols/128)], the factor to multiply by (named scale_inv in the files).
  """
  out = values.astype(np.float32)
  for block, start in enumerate(range(0, out.shape[0], FP8_BLOCK)):
    factors = np.repeat(scale[block].astype(np.float32), FP8_BLOCK)[: out.shape[1]]
    out[start : start + FP8_BLOCK] *= factors
  return out


def _read_json(file: Path) -> dict[str, Any]:
  try:
    return json.loads(file.read_text(encoding="utf-8"))
  except (FileNotFoundError, NotADirectoryError):
    raise UserError(f"{file} is missing") from None
  except ValueError as error:
    raise UserError(f"{file} is not valid JSON: {error}") from None


def _listing(found: list[str]) -> str:
  more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
  return f"{', '.join(found[:_SHOWN])}{more} {'is' if len(found) == 1 else 'are'}"
