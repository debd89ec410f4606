"""The arrow from data to model: one dataclass of equally shaped arrays."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass
class Batch:
  """B packed rows of T tokens.

  Attributes:
    tokens: int32 [B, T], the inputs.
    targets: int32 [B, T], the token that follows each input (0 where `weights` is 0).
    weights: float32 [B, T], 1 where the target belongs to the same document as the input, else 0.
    positions: int32 [B, T], 0 at the first token of each document (or piece of one) in the row.
    segment_ids: int32 [B, T], documents 1, 2, … from the left, 0 for padding. The only mark of padding.
  """

  tokens: np.ndarray
  targets: np.ndarray
  weights: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray

  @property
  def shape(self) -> tuple[int, int]:
    return self.tokens.shape


FIELDS = tuple(field.name for field in dataclasses.fields(Batch))


def stack_rows(rows: Sequence[Mapping[str, np.ndarray]], size: int = 0) -> Batch:
  """A batch of rows ([T] arrays under the names of `Batch`), filled up to `size` rows with padding."""
  empty = {name: np.zeros_like(rows[0][name]) for name in FIELDS}
  rows = [*rows, *[empty] * (size - len(rows))]
  return Batch(**{name: np.stack([row[name] for row in rows]) for name in FIELDS})


def target_bytes(batch: Batch, token_lengths: np.ndarray) -> int:
  """Bytes of text behind the targets that count: bits per byte = summed loss / ln 2 / this.

  Args:
    token_lengths: int32 [vocab_size], bytes of each id (`Tokenizer.token_lengths`).
  """
  return int(token_lengths[batch.targets[batch.weights > 0]].sum())
