"""Rules 9, 10 and 23 of packing: nothing dropped, order kept, boundaries masked, positions restart."""

import itertools

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.data.batch import FIELDS, stack_rows, target_bytes
from glm5_jax.data.packing import PACKINGS, pack, window_to_row
from glm5_jax.errors import UserError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)


def numbered(lengths):
  """Documents whose tokens are all different, 1, 2, 3 …, so that a row shows where each came from."""
  ends = np.cumsum(lengths)
  return [np.arange(end - n + 1, end + 1, dtype=np.int32) for n, end in zip(lengths, ends, strict=True)]


def rows_of(documents, packing, seq_len, bins=4, shuffle=False):
  source = grain.MapDataset.source([{"tokens": tokens} for tokens in documents])
  return list(pack(source.to_iter_dataset(), packing, seq_len, bins, seed=0, shuffle=shuffle))


def segments_of(row):
  """The row's pieces of documents, left to right."""
  last = row["segment_ids"].max()
  return [row["tokens"][row["segment_ids"] == i] for i in range(1, last + 1)]


def predicted(rows):
  """(input, target) of every target that counts, in order."""
  return [
    (int(x), int(y))
    for row in rows
    for x, y, w in zip(row["tokens"], row["targets"], row["weights"], strict=True)
    if w > 0
  ]


def test_boundary_targets_have_no_weight():
  segments = np.array([1, 1, 1, 2, 2, 0])
  row = window_to_row(np.array([11, 12, 13, 21, 22, 0]), segments, np.array([0, 1, 2, 0, 1, 0]))
  assert row["weights"].tolist() == [1, 1, 0, 1, 0]  # valid at 0, 1 and 3
  assert row["targets"].tolist() == [12, 13, 0, 22, 0]
  assert row["tokens"].tolist() == [11, 12, 13, 21, 22]
  assert row["segment_ids"].tolist() == [1, 1, 1, 2, 2]
  assert row["positions"].tolist() == [0, 1, 2, 0, 1]


def test_a_segment_id_is_no_weight_and_nothing_wraps():
  row = window_to_row(np.array([5, 6, 7, 5]), np.array([3, 3, 4, 4]), np.array([0, 1, 0, 1]))
  assert row["weights"].tolist() == [1, 0, 1]
  assert row["weights"].dtype == np.float32
  alone = window_to_row(np.array([5, 6]), np.array([1, 2]), np.array([0, 0]))
  assert alone["weights"].tolist() == [0]


def test_padding_is_no_segment():
  row = window_to_row(np.zeros(5, np.int32), np.zeros(5, np.int32), np.zeros(5, np.int32))
  assert row["weights"].sum() == 0


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 12), packing=st.sampled_from(PACKINGS), bins=st.integers(1, 5))
def test_every_row_keeps_the_rules(lengths, seq_len, packing, bins):
  documents = numbered(lengths)
  document_of = {int(token): i for i, tokens in enumerate(documents) for token in tokens}
  for row in rows_of(documents, packing, seq_len, bins):
    assert {name: row[name].shape for name in FIELDS} == dict.fromkeys(FIELDS, (seq_len,))
    real = row["segment_ids"] != 0
    assert not real[np.argmin(real) :].any() or real.all()  # padding stands at the end alone
    assert (row["weights"][~real] == 0).all()
    assert (np.diff(row["segment_ids"][real]) >= 0).all()
    for piece in segments_of(row):
      assert len({document_of[int(token)] for token in piece}) == 1
      assert (np.diff(piece) == 1).all()
    starts = np.flatnonzero(np.diff(row["segment_ids"], prepend=0) > 0)
    assert (row["positions"][starts] == 0).all()
    inside = real & ~np.isin(np.arange(seq_len), starts)
    assert (row["positions"][inside] == row["positions"][np.flatnonzero(inside) - 1] + 1).all()


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 12), packing=st.sampled_from(PACKINGS), bins=st.integers(1, 5))
def test_targets_are_the_next_tokens_of_the_same_document_and_none_counts_twice(
  lengths, seq_len, packing, bins
):
  documents = numbered(lengths)
  possible = {(int(a), int(b)) for tokens in documents for a, b in itertools.pairwise(tokens)}
  pairs = predicted(rows_of(documents, packing, seq_len, bins))
  assert len(pairs) == len(set(pairs))
  assert set(pairs) <= possible


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 12))
def test_truncate_is_the_documents_end_to_end(lengths, seq_len):
  documents = numbered(lengths)
  stream = np.concatenate(documents)
  rows = rows_of(documents, "truncate", seq_len)
  windows = [stream[i : i + seq_len + 1] for i in range(0, len(stream), seq_len + 1)]
  assert len(rows) == len(windows)  # the last partial row is there
  for row, window in zip(rows, windows, strict=True):
    assert row["tokens"][row["segment_ids"] != 0].tolist() == window[:seq_len].tolist()
  ends = {int(tokens[-1]) for tokens in documents}
  lost = {int(window[-1]) for window in windows}  # the next token opens the next window
  assert predicted(rows) == [(int(t), int(t) + 1) for t in stream if int(t) not in ends | lost]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 12), bins=st.integers(1, 5))
def test_best_fit_keeps_documents_whole_and_cuts_long_ones_into_full_windows(lengths, seq_len, bins):
  documents = numbered(lengths)
  width = seq_len + 1
  pieces = [tokens[i : i + width] for tokens in documents for i in range(0, len(tokens), width)]
  expected = sorted((int(a), int(a) + 1) for piece in pieces for a in piece[:-1])
  assert sorted(predicted(rows_of(documents, "best_fit", seq_len, bins))) == expected


def test_best_fit_fills_the_tightest_row_in_stable_order():
  rows = rows_of(numbered([5, 8, 3, 6]), "best_fit", seq_len=8, bins=3)  # windows of 9
  assert [[len(piece) for piece in segments_of(row)] for row in rows] == [[5, 3], [8], [6]]
  again = rows_of(numbered([5, 8, 3, 6]), "best_fit", seq_len=8, bins=3)
  assert all((a[name] == b[name]).all() for a, b in zip(rows, again, strict=True) for name in FIELDS)


def test_document_as_long_as_a_window_fills_one_row():
  for packing in PACKINGS:
    (row,) = rows_of(numbered([9]), packing, seq_len=8)
    assert row["weights"].tolist() == [1] * 8
    assert row["targets"].tolist() == list(range(2, 10))


@pytest.mark.parametrize(
  ("packing", "seq_len", "bins", "message"),
  [
    ("tight", 8, 4, "data.packing 'tight' is unknown; use one of truncate, best_fit"),
    ("truncate", 0, 4, "data.seq_len 0"),
    ("best_fit", 8, 0, "data.pack_bins 0"),
  ],
)
def test_impossible_settings_are_named(packing, seq_len, bins, message):
  with pytest.raises(UserError, match=message):
    rows_of(numbered([3]), packing, seq_len, bins)


def test_batch_is_filled_with_padding_rows():
  rows = rows_of(numbered([4, 4]), "truncate", seq_len=3)
  batch = stack_rows(rows, size=4)
  assert batch.shape == (4, 3)
  assert batch.segment_ids[2:].sum() == 0
  assert batch.weights[2:].sum() == 0


def test_bytes_count_only_targets_that_count():
  (row,) = rows_of(numbered([3, 2]), "truncate", seq_len=5)  # targets 2, 3 and 5
  lengths = np.array([100, 100, 1, 2, 100, 4], dtype=np.int32)
  assert target_bytes(stack_rows([row], size=3), lengths) == 1 + 2 + 4
