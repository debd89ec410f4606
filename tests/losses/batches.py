"""Packed batches with uneven padding, for tests of losses and of the step."""

from collections.abc import Sequence

import numpy as np

from glm5_jax.data.batch import FIELDS


def packed(
  rows: Sequence[Sequence[int]], length: int, seed: int = 0, vocab: int = 128
) -> dict[str, np.ndarray]:
  """A batch whose row r holds documents of the lengths in `rows[r]` (tokens, the predicted ones included)."""
  rng = np.random.default_rng(seed)
  batch = {name: np.zeros((len(rows), length), np.int32) for name in FIELDS}
  batch["weights"] = np.zeros((len(rows), length), np.float32)
  for r, documents in enumerate(rows):
    begin = 0
    for segment, size in enumerate(documents, start=1):
      part, text = np.s_[r, begin : begin + size], rng.integers(0, vocab, size + 1)
      batch["tokens"][part], batch["targets"][part] = text[:-1], text[1:]
      batch["positions"][part], batch["segment_ids"][part] = np.arange(size), segment
      batch["weights"][part] = 1
      batch["weights"][r, begin + size - 1] = 0  # its target belongs to no document of the row
      begin += size
    assert begin <= length
  return batch
