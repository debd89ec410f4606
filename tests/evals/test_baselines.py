"""The baselines against slow, plainly written ones."""

import gzip
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.errors import UserError
from glm5_jax.evals import baselines
from glm5_jax.evals.baselines import MarkovByteModel, gzip_bits_per_byte

TRAIN = [b"the cat sat on the mat", b"", b"a", b"it", b"that hat, \xff\x00!"]


def slow_bits_per_byte(train: list[bytes], heldout: list[bytes]) -> float:
  """Witten–Bell from dictionaries, one byte at a time."""
  seen: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
  for document in train:
    for at, byte in enumerate(document):
      for order in range(min(at, 2) + 1):
        seen[document[at - order : at]][byte] += 1

  def probability(context: bytes, byte: int) -> float:
    shorter = probability(context[1:], byte) if context else 1 / 256
    after = seen[context]
    if not after:
      return shorter
    return (after[byte] + len(after) * shorter) / (sum(after.values()) + len(after))

  bits = [
    -math.log2(probability(document[max(at - 2, 0) : at], byte))
    for document in heldout
    for at, byte in enumerate(document)
  ]
  return sum(bits) / len(bits)


@settings(max_examples=5, deadline=None)
@given(heldout=st.lists(st.binary(max_size=20), min_size=1).filter(any))
def test_markov_equals_a_plain_one(heldout):
  assert MarkovByteModel(TRAIN).bits_per_byte(heldout) == pytest.approx(slow_bits_per_byte(TRAIN, heldout))


def test_markov_equals_a_plain_one_on_text_of_its_own_kind():
  heldout = [b"the hat sat", b"that", b"ta", b"z"]
  assert MarkovByteModel(TRAIN).bits_per_byte(heldout) == pytest.approx(slow_bits_per_byte(TRAIN, heldout))


@pytest.mark.parametrize(
  "order,context", [(0, b""), (1, b"t"), (1, b"\x07"), (2, b"th"), (2, b"zz"), (2, b"tz")]
)
def test_probabilities_add_up_to_one(order, context):
  index = int.from_bytes(context, "big") * 256 + np.arange(256)
  probability = MarkovByteModel(TRAIN).probability(index, order)
  assert probability.sum() == pytest.approx(1.0)
  assert probability.min() > 0


def test_more_than_one_block_counts_the_same(monkeypatch):
  random.seed(0)
  documents = [random.randbytes(n) for n in (50, 1, 0, 70, 2, 30)]
  whole = MarkovByteModel(documents).bits_per_byte(documents)
  monkeypatch.setattr(baselines, "_BLOCK", 40)
  assert MarkovByteModel(iter(documents)).bits_per_byte(iter(documents)) == pytest.approx(whole, rel=1e-12)


def test_a_longer_memory_pays_on_text_that_has_one():
  """ "ab" and "cb" alternate after the same byte, so only order 2 tells what follows b."""
  text = b"abXcbY" * 300
  assert MarkovByteModel([text]).bits_per_byte([text]) < 0.1
  assert MarkovByteModel([b"abXcbX" * 300]).bits_per_byte([text]) > 1.0


def test_gzip_is_gzip_9_of_one_stream():
  documents = [b"the same words again, " * 20, b"", b"the same words again, " * 5]
  joined = b"".join(documents)
  expected = 8 * len(gzip.compress(joined, compresslevel=9, mtime=0)) / len(joined)
  assert gzip_bits_per_byte(iter(documents)) == pytest.approx(expected)


@pytest.mark.parametrize("empty", [[], [b""], [b"", b""]])
def test_empty_text_is_refused(empty):
  with pytest.raises(UserError, match="training text"):
    MarkovByteModel(empty)
  with pytest.raises(UserError, match="held-out text"):
    MarkovByteModel(TRAIN).bits_per_byte(empty)
  with pytest.raises(UserError, match="held-out text"):
    gzip_bits_per_byte(empty)
