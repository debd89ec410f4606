"""What a language model must beat: an order-2 Markov byte model, and gzip.

Both are given as bits per byte of the same held-out documents, so that they stand beside the bits per byte
of a model with any tokeniser. Neither pays for where documents end.
"""

import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from glm5_jax.errors import UserError

BYTES = 256


class MarkovByteModel:
  """P(byte | the two bytes before it), interpolated with shorter contexts by Witten–Bell smoothing.

  p_n(b | h) = (count(h b) + kinds(h) · p_{n−1}(b | h')) / (count(h) + kinds(h)), where kinds(h) is the number
  of different bytes seen after h, h' is h without its oldest byte, and p_{−1} = 1/256. A context never seen
  leaves the estimate to the shorter one; no byte has probability 0; there is no constant to tune.
  Contexts do not reach over a document's start: its first byte has order 0, its second order 1.
  Source: Witten and Bell, 1991; the recursion as in Chen and Goodman, 1999, section 2.6.

  Memory: one table of 256³ counts (128 MiB), whatever the size of the text.
  """

  def __init__(self, documents: Iterable[bytes]):
    """Counts the training text in one pass. Raises UserError when it holds no byte."""
    # Table n holds count(h b) at the index that reads the n bytes of h and b as one base-256 number.
    self._counts = [np.zeros(BYTES ** (order + 1), np.int64) for order in range(3)]
    for index, order in _contexts(documents):
      np.add.at(self._counts[order], index, 1)
    # What was counted under the longest context that the document's start allows belongs to the shorter too.
    for order in (1, 0):
      self._counts[order] += self._counts[order + 1].reshape(BYTES, -1).sum(0)
    if not self._counts[0].any():
      raise UserError("the training text of the order-2 byte model is empty: give at least one byte")
    rows = [counts.reshape(-1, BYTES) for counts in self._counts]
    self._totals = [table.sum(1) for table in rows]
    self._kinds = [np.count_nonzero(table, axis=1) for table in rows]

  def probability(self, index: np.ndarray, order: int) -> np.ndarray:
    """p_order(b | h), float64, for indices that hold h and b as a base-256 number of order + 1 digits."""
    if order < 0:
      return np.full(index.shape, 1.0 / BYTES)
    context, kinds = index // BYTES, self._kinds[order]
    shorter = self.probability(index % BYTES**order, order - 1)
    weight = kinds[context]
    # A context never seen has no count and no kinds: the shorter one answers alone.
    top = self._counts[order][index] + np.where(weight, weight, 1) * shorter
    return top / np.where(weight, self._totals[order][context] + weight, 1)

  def bits_per_byte(self, documents: Iterable[bytes]) -> float:
    """Mean −log2 p of every byte of the held-out documents. Raises UserError when they hold no byte."""
    bits, size = 0.0, 0
    for index, order in _contexts(documents):
      bits -= float(np.log2(self.probability(index, order)).sum())
      size += index.size
    if not size:
      raise UserError("the held-out text is empty: give at least one byte")
    return bits / size


def gzip_bits_per_byte(documents: Iterable[bytes]) -> float:
  """Bits per byte of `cat documents | gzip -9`: one stream, its header included, no training text.

  gzip learns as it goes from the last 32 KiB alone, so this is what the text compresses to by itself.
  Raises UserError when the documents hold no byte.
  """
  compressor = zlib.compressobj(level=9, method=zlib.DEFLATED, wbits=zlib.MAX_WBITS | 16, memLevel=8)
  size = compressed = 0
  for document in documents:
    size += len(document)
    compressed += len(compressor.compress(document))
  if not size:
    raise UserError("the held-out text is empty: give at least one byte")
  return 8 * (compressed + len(compressor.flush())) / size


_BLOCK = 1 << 22  # bytes handled at a time


def _contexts(documents: Iterable[bytes]) -> Iterator[tuple[np.ndarray, int]]:
  """(indices, order) of every byte once, under the longest context up to two bytes that its document has."""
  starts: tuple[list[int], list[int]] = ([], [])
  block: list[np.ndarray] = []
  waiting = 0
  for document in documents:
    values = np.frombuffer(document, np.uint8).astype(np.int64)
    if values.size > 0:
      starts[0].append(int(values[0]))
    if values.size > 1:
      starts[1].append(int(values[0] * BYTES + values[1]))
    if values.size > 2:
      block.append((values[:-2] * BYTES + values[1:-1]) * BYTES + values[2:])
      waiting += block[-1].size
    if waiting >= _BLOCK:
      yield np.concatenate(block), 2
      block, waiting = [], 0
  if block:
    yield np.concatenate(block), 2
  for order, indices in enumerate(starts):
    if indices:
      yield np.array(indices, np.int64), order
