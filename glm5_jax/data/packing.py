"""Documents of any length to rows of one length.

A window of seq_len + 1 tokens makes a row: inputs are its first seq_len tokens, targets its last. Every
token of every document stands in exactly one window.
  "truncate"  documents are laid end to end and cut at window ends; the rest of a cut document goes on in
              the next row as a segment of its own. No padding (but in the last row of a finite set).
  "best_fit"  a document goes whole into the open row that it fills best; one longer than a window is cut
              into full windows and a rest. Rows are padded at the end.
Sources: GLM-4.5 report §2.3 (random truncation in pre-training, best fit in mid-training); best-fit
packing, arXiv 2404.10830.
"""

import grain
import numpy as np

from glm5_jax.errors import UserError

PACKINGS = ("truncate", "best_fit")


class SplitLong(grain.experimental.FlatMapTransform):
  """Cuts {"tokens": [n]} into consecutive pieces of `width` tokens, the last one shorter."""

  def __init__(self, width: int):
    self._width = width

  def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    tokens = element["tokens"]
    return [{"tokens": tokens[i : i + self._width]} for i in range(0, len(tokens), self._width)]


def pack(
  documents: grain.IterDataset, packing: str, seq_len: int, bins: int, seed: int, shuffle: bool
) -> grain.IterDataset:
  """Rows ([seq_len] arrays under the names of `Batch`) of a dataset of {"tokens": int32 [n]}.

  Args:
    packing: a name of PACKINGS.
    bins: rows that best_fit keeps open.
    shuffle: whether rows of one group of bins are emitted in random order (best_fit fills the first ones
      most). Without it the order is a function of the documents' order alone.
  """
  if packing not in PACKINGS:
    raise UserError(f"data.packing {packing!r} is unknown; use one of {', '.join(PACKINGS)}")
  if seq_len < 1 or bins < 1:
    raise UserError(f"data.seq_len {seq_len} and data.pack_bins {bins} must be at least 1")
  width = seq_len + 1
  if packing == "truncate":
    windows = grain.experimental.ConcatThenSplitIterDataset(documents, length_struct={"tokens": width})
  else:
    windows = grain.experimental.BestFitPackIterDataset(
      grain.experimental.FlatMapIterDataset(documents, SplitLong(width)),
      length_struct={"tokens": width},
      num_packing_bins=bins,
      seed=seed,
      shuffle_bins=shuffle,
    )
  return windows.map(lambda w: window_to_row(w["tokens"], w["tokens_segment_ids"], w["tokens_positions"]))


def window_to_row(
  tokens: np.ndarray, segment_ids: np.ndarray, positions: np.ndarray
) -> dict[str, np.ndarray]:
  """Inputs and next-token targets of a window; all three arguments are int32 [T + 1], results [T].

  A target counts where it lies in the same document as its input: segments [1, 1, 1, 2, 2, 0] give
  weights [1, 1, 0, 1, 0]. Nothing wraps around.
  """
  same = (segment_ids[:-1] == segment_ids[1:]) & (segment_ids[:-1] != 0)
  return {
    "tokens": tokens[:-1].astype(np.int32),
    "targets": np.where(same, tokens[1:], 0).astype(np.int32),
    "weights": same.astype(np.float32),
    "positions": positions[:-1].astype(np.int32),
    "segment_ids": segment_ids[:-1].astype(np.int32),
  }
