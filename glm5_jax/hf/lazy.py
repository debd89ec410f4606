"""Parameters that are still on the disk: any slice of one is read from the tensors that hold it, and no more.

A parameter may be spread over many tensors (one a layer, one an expert), transposed, cut out of a fused one,
or float8 with a scale a block; all of that is done on the slice.
"""

import itertools
from dataclasses import dataclass

import numpy as np

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
    view_bounds = [(0, 0)] * len(bounds)
    for axis, (start, stop) in zip(self.piece.perm, bounds, strict=True):
      first = self.piece.cut[1] if self.piece.cut is not None and self.piece.cut[0] == axis else 0
      view_bounds[axis] = (first + start, first + stop)
    slices = tuple(slice(*pair) for pair in view_bounds)
    values = self.stored.map().reshape(self.tensor.view)[slices]
    if self.scale is not None:
      values = values.astype(np.float32) * self._factors(slices)
    return values.transpose(self.piece.perm)

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
  """A parameter of our tree in a Hugging Face folder; `param[slices]` reads.

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
