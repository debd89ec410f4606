"""The safetensors format, one tensor at a time: u64 header length, JSON header, raw little-endian data.

The `safetensors` package reads whole tensors well but knows no float8 in NumPy and writes a file only
from all of its tensors at once; both matter here.
"""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from glm5_jax.errors import UserError

DTYPES: dict[str, np.dtype] = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
  "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the reference implementation's limit, in bytes


@dataclass(frozen=True)
class StoredTensor:
  """Where one tensor lies; `start` counts from the beginning of the file, in bytes."""

  file: Path
  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  start: int

  def map(self, mode: Literal["r", "r+"] = "r") -> np.ndarray:
    """The tensor, in its stored dtype, as a map of the file: what is used of it is read; r+ also writes."""
    return np.memmap(self.file, self.dtype, mode, self.start, self.shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
  """Every tensor of a file by name, without its data.

  Raises:
    UserError: the file is missing, torn, not safetensors, or holds a dtype that is no floating weight.
  """
  try:
    size = file.stat().st_size
    with file.open("rb") as stream:
      (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
      if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise UserError(f"{file} is cut short or no safetensors file: {size} bytes")
      header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    entries = [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in header.items()]
  except FileNotFoundError:
    raise UserError(f"{file} is missing") from None
  except (ValueError, AttributeError, TypeError, KeyError):
    raise UserError(f"{file} is no safetensors file: its header does not list tensors") from None
  tensors, end = {}, 8 + length
  for name, dtype, shape, begin, stop in entries:
    if dtype not in DTYPES:
      raise UserError(f"{file}: {name} has dtype {dtype}; one of {', '.join(DTYPES)} can be read")
    stored = StoredTensor(file, name, DTYPES[dtype], shape, 8 + length + begin)
    if stop - begin != stored.dtype.itemsize * int(np.prod(stored.shape, dtype=np.int64)):
      raise UserError(
        f"{file}: {name} takes {stop - begin} bytes, which does not fit shape {list(stored.shape)}"
      )
    tensors[name], end = stored, max(end, 8 + length + stop)
  if end > size:
    raise UserError(f"{file} is cut short: {size} bytes, its header tells of {end}")
  return tensors


def create(file: Path, specs: dict[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, StoredTensor]:
  """Makes a file of its full size, whose tensors are then written through `StoredTensor.map("r+")`.

  Args:
    file: created or overwritten.
    specs: name -> (shape, dtype).

  Raises:
    OSError: the disk has not that much space: a map could only end the process when it runs out.
  """
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on the format key
  offset = 0
  for name, (shape, dtype) in specs.items():
    stop = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
    offset = stop
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)  # data begins at a multiple of eight
  data = 8 + len(text)
  with file.open("wb") as stream:
    stream.write(struct.pack("<Q", len(text)) + text)
    stream.flush()
    _reserve(stream.fileno(), data + offset)
  return {
    name: StoredTensor(file, name, dtype, shape, data + header[name]["data_offsets"][0])
    for name, (shape, dtype) in specs.items()
  }


def _reserve(descriptor: int, size: int) -> None:
  if hasattr(os, "posix_fallocate"):
    os.posix_fallocate(descriptor, 0, size)
  else:  # macOS
    os.truncate(descriptor, size)
