"""Reads a Hugging Face GLM-5 folder into arrays, on one device or dealt over many.

No host holds more than its own devices' part of the model and about one shard of one parameter. Names and
shapes are checked against the config before any data is read: every tensor is used, every parameter is
filled, or nothing is.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.config_hf import FP8_BLOCK
from glm5_jax.errors import UserError
from glm5_jax.hf import names
from glm5_jax.hf.lazy import Bounds, StoredParam, stored_params
from glm5_jax.hf.safetensors_file import StoredTensor, read_header

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SCALE_END = "_scale_inv"
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SHOWN = 4  # names listed in an error


def load_config(folder: str | Path, **ours) -> ModelConfig:
  """`ModelConfig.from_hf` of the folder's config.json; `ours` overrides fields."""
  return ModelConfig.from_hf(_read_json(Path(folder) / CONFIG_FILE), **ours)


def is_hf_folder(folder: str | Path) -> bool:
  """Whether the folder is meant as Hugging Face's (our run folders have another config.json)."""
  folder = Path(folder)
  if (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists():
    return True
  return (folder / CONFIG_FILE).is_file() and "model_type" in _read_json(folder / CONFIG_FILE)


def load_params(
  folder: str | Path, cfg: ModelConfig, shardings: Any = None, drop_mtp: bool = False
) -> dict[str, Any]:
  """The parameter tree of `cfg` from a Hugging Face folder.

  Args:
    folder: holds model.safetensors, or model.safetensors.index.json and its shards. Weights may be
      float32, float16, bfloat16, or float8_e4m3fn with 128×128 block scales (`…weight_scale_inv`).
    cfg: the architecture. Values are rounded to `param_dtype`; the selection bias stays float32.
    shardings: a tree of shardings like the parameters'. Every process reads what its own devices hold;
      beside that, its memory takes about one shard of one parameter. None: all on the default device.
    drop_mtp: with `num_nextn_predict_layers` 0, a stored MTP layer is an error unless this is set.
  Raises:
    UserError: a file is missing or torn, or a tensor is missing, left over or of another shape.
  """
  stored = open_params(folder, cfg, drop_mtp)
  if shardings is None:
    return jax.tree.map(lambda param: jnp.asarray(param[_whole(param)]), stored)
  return jax.tree.map(_sharded, stored, shardings)


def open_params(folder: str | Path, cfg: ModelConfig, drop_mtp: bool = False) -> dict[str, Any]:
  """The parameter tree of `cfg` with StoredParam leaves: checked, but no values read yet.

  Arguments and errors as in `load_params`.
  """
  stored = _read_headers(Path(folder))
  tensors = _match(Path(folder), stored, cfg, drop_mtp)
  scales = {tensor.name: _scale(stored, tensor.name) for tensor in tensors}
  params: dict[str, Any] = {}
  for path, param in stored_params(cfg, tensors, stored, scales).items():
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = param
  return params


def _whole(param: StoredParam) -> tuple[slice, ...]:
  return (slice(None),) * len(param.shape)


def _sharded(param: StoredParam, sharding: jax.sharding.Sharding) -> jax.Array:
  """Like jax.make_array_from_callback, but reads replicas once and holds one shard on the host at a time."""
  holders: dict[Bounds, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(param.shape).items():
    slices = index or ()
    bounds = tuple(s.indices(size)[:2] for s, size in zip(slices, param.shape, strict=True))
    holders.setdefault(bounds, []).append(device)
  shards: list[jax.Array] = []
  for bounds, devices in holders.items():
    values = param[tuple(slice(*pair) for pair in bounds)]
    shards += jax.block_until_ready([jax.device_put(values, device) for device in devices])
  return jax.make_array_from_single_device_arrays(param.shape, sharding, shards)


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


def _scale(stored: dict[str, StoredTensor], name: str) -> StoredTensor | None:
  """The block scales of a float8 tensor; None for others."""
  entry = stored[name]
  if entry.dtype != _FP8:
    return None
  scale = stored.get(name + _SCALE_END)
  blocks = tuple(-(-size // FP8_BLOCK) for size in entry.shape)
  if scale is None or len(blocks) != 2 or scale.shape != blocks:
    found = "missing" if scale is None else f"of shape {list(scale.shape)}"
    raise UserError(
      f"{entry.file}: {name} is float8; its {name + _SCALE_END} is {found}, needs {list(blocks)}"
    )
  return scale


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
