"""Parameters on the disk: a slice of one is read from, or written to, the tensors that hold it, and no more.

A parameter may be spread over many tensors (one a layer, one an expert), transposed, cut out of a fused one,
or, for reading, float8 with a scale a block; all of that is done on the slice.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.config_hf import FP8_BLOCK
from glm5_jax.hf import names
from glm5_jax.hf.safetensors_file import StoredTensor

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each axis
_ALIGNMENT = 64  # bytes; jax on CPU then takes an array's memory over instead of copying it
_STRIP = 16  # elements


@dataclass(frozen=True)
class Part:
  """One piece of a stored tensor, with the block scales of a float8 one."""

  tensor: names.Tensor
  piece: names.Piece
  stored: StoredTensor
  scale: StoredTensor | None

  def read(self, bounds: Bounds) -> np.ndarray:
    """A slice of the piece, in our axes; float32 for float8, else in the stored dtype."""
    slices = self._slices(bounds)
    values = self.stored.map().reshape(self.tensor.view)[slices]
    if self.scale is not None:
      values = values.astype(np.float32) * self._factors(slices)
    return values.transpose(self.piece.perm)

  def write(self, bounds: Bounds, values: np.ndarray) -> None:
    """The other way; of a tensor in the dtype of `values`."""
    out = self.stored.map("r+").reshape(self.tensor.view)[self._slices(bounds)]
    _fill(out, values.transpose(np.argsort(self.piece.perm)))

  def _slices(self, bounds: Bounds) -> tuple[slice, ...]:
    """Of the tensor's view, for a slice of the piece in our axes."""
    slices = [slice(0)] * len(bounds)
    for axis, (start, stop) in zip(self.piece.perm, bounds, strict=True):
      first = self.piece.cut[1] if self.piece.cut is not None and self.piece.cut[0] == axis else 0
      slices[axis] = slice(first + start, first + stop)
    return tuple(slices)

  def _factors(self, slices: tuple[slice, ...]) -> np.ndarray:
    """The block scale of every element of a slice of the view."""
    assert self.scale is not None
    view, (rows, _) = self.tensor.view, self.tensor.shape
    split = next(n for n in range(len(view) + 1) if np.prod(view[:n], dtype=int) == rows)
    blocks = []
    for axes, size in ((slice(split), rows), (slice(split, None), self.tensor.shape[1])):
      blocks.append(np.arange(size).reshape(view[axes])[slices[axes]].ravel() // FP8_BLOCK)
    factors = np.asarray(self.scale.map())[np.ix_(*blocks)].astype(np.float32)
    return factors.reshape([s.stop - s.start for s in slices])


class StoredParam:
  """A parameter of our tree in a Hugging Face folder: `param[slices]` reads, `param.put(…)` writes.

  Attributes:
    shape, dtype: as in our tree; values are rounded to `dtype`.
  """

  def __init__(self, shape: tuple[int, ...], dtype: np.dtype, parts: dict[tuple[int, ...], Part]):
    """`parts` by index on the leading axes (layer of a stack, expert)."""
    self.shape, self.dtype = shape, dtype
    self._parts = parts
    # A layer's experts may be one tensor, another's one an expert.
    self._depths = sorted({len(index) for index in parts})

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """The values of a slice, one slice (without a step) an axis, as a new array."""
    bounds = tuple(s.indices(size)[:2] for s, size in zip(index, self.shape, strict=True))
    out = _empty(tuple(stop - start for start, stop in bounds), self.dtype)
    for depth in self._depths:
      for place in itertools.product(*(range(*pair) for pair in bounds[:depth])):
        if part := self._parts.get(place):
          here = tuple(i - start for i, (start, _) in zip(place, bounds, strict=False))
          _fill(out[here], part.read(bounds[depth:]).astype(self.dtype, copy=False))
    return out

  @property
  def tensor_axes(self) -> int:
    """How many leading axes are apart in the files: an index of these is one tensor, or a part of one."""
    return self._depths[-1]

  def put(self, start: tuple[int, ...], values: np.ndarray) -> None:
    """Writes the slice that begins at `start`, rounded to `dtype`."""
    bounds = tuple((first, first + size) for first, size in zip(start, values.shape, strict=True))
    for depth in self._depths:
      for here in np.ndindex(values.shape[:depth]):
        place = tuple(map(sum, zip(start, here, strict=False)))
        if part := self._parts.get(place):
          part.write(bounds[depth:], values[here].astype(self.dtype, copy=False))


def stored_params(
  cfg: ModelConfig,
  tensors: Iterable[names.Tensor],
  stored: dict[str, StoredTensor],
  scales: dict[str, StoredTensor | None],
) -> dict[names.Path, StoredParam]:
  """Every parameter of `cfg`, from where its tensors and the scales of float8 ones lie, both by name."""
  parts: dict[names.Path, dict[tuple[int, ...], Part]] = {}
  for tensor in tensors:
    for piece in tensor.pieces:
      part = Part(tensor, piece, stored[tensor.name], scales.get(tensor.name))
      parts.setdefault(piece.path, {})[piece.index] = part
  specs = names.param_specs(cfg)
  return {path: StoredParam(shape, dtype, parts[path]) for path, (shape, dtype) in specs.items()}


def _fill(out: np.ndarray, values: np.ndarray) -> None:
  """out[...] = values; transposed ones in strips that fit the cache, which is three times as fast."""
  width = values.shape[-1] if values.flags.c_contiguous else _STRIP
  for start in range(0, values.shape[-1], max(width, 1)):
    out[..., start : start + width] = values[..., start : start + width]


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
  raw = np.empty(size + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)
