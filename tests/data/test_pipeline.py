import dataclasses
import itertools
import json

import numpy as np
import pytest

from glm5_jax.config import DataConfig
from glm5_jax.data.batch import FIELDS, target_bytes
from glm5_jax.data.packing import PACKINGS
from glm5_jax.data.pipeline import heldout_batches, make_train_iterator, merge_states, train_documents
from glm5_jax.data.records import load_data_tokenizer, load_token_bytes, read_meta, read_records
from glm5_jax.errors import UserError


@pytest.fixture(params=PACKINGS)
def cfg(request, data_folder):
  return DataConfig(
    folder=data_folder,
    seq_len=24,
    packing=request.param,
    pack_bins=4,
    shuffle_window=16,
    seed=3,
    prefetch=2,
  )


@pytest.fixture
def train(request):
  """`make_train_iterator` whose threads are stopped at the end of the test."""

  def make(*arguments):
    iterator = make_train_iterator(*arguments)
    request.addfinalizer(iterator.close)
    return iterator

  return make


def assert_equal(ours, theirs):
  for name in FIELDS:
    np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)


def test_batch_has_the_declared_shapes_and_types(cfg, train):
  batch = train(cfg, 4).next_batch()
  assert batch.shape == (4, 24)
  assert {name: getattr(batch, name).dtype.name for name in FIELDS} == {
    "tokens": "int32", "targets": "int32", "weights": "float32", "positions": "int32", "segment_ids": "int32",
  }  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("stop", [0, 1, 2, 5, 9, 30])
def test_resume_after_any_number_of_batches_equals_uninterrupted(cfg, train, stop, prefetch):
  cfg = dataclasses.replace(cfg, prefetch=prefetch)
  interrupted = train(cfg, 4)
  for _ in range(stop):
    interrupted.next_batch()
  state = json.dumps(interrupted.get_state())
  resumed = train(cfg, 4)
  resumed.set_state(json.loads(state))
  assert json.dumps(resumed.get_state()) == state
  for _ in range(6):
    assert_equal(resumed.next_batch(), interrupted.next_batch())


def test_resume_at_every_row_of_two_epochs(cfg, train):
  """Every kind of place: inside a document, at its end, between groups of bins, across epochs."""
  cfg = dataclasses.replace(cfg, seq_len=96)
  rows = 2 * read_meta(cfg.folder).train.tokens // 97
  running, resumed = train(cfg, 1), train(cfg, 1)
  for _ in range(rows):
    resumed.set_state(json.loads(json.dumps(running.get_state())))
    assert_equal(resumed.next_batch(), running.next_batch())


def test_set_state_goes_back_on_a_used_iterator(cfg, train):
  iterator = train(cfg, 2)
  state = iterator.get_state()
  first = [iterator.next_batch() for _ in range(5)]
  iterator.set_state(state)
  for batch in first:
    assert_equal(iterator.next_batch(), batch)


def test_rows_do_not_depend_on_how_they_are_batched(cfg, train):
  """Batch warm-up: the number of rows changes from step to step, also over a resume."""
  single = train(cfg, 1)
  rows = [single.next_batch() for _ in range(12)]
  varying = train(cfg, 8)
  first, second = varying.next_batch(2), varying.next_batch(4)
  resumed = train(cfg, 3)
  resumed.set_state(varying.get_state())
  third = resumed.next_batch(6)
  for name in FIELDS:
    joined = np.concatenate([getattr(batch, name) for batch in (first, second, third)])
    np.testing.assert_array_equal(joined, np.concatenate([getattr(row, name) for row in rows]))


def test_seed_changes_the_order_and_equal_seeds_do_not(cfg, train):
  first = train(cfg, 4).next_batch()
  assert_equal(first, train(cfg, 4).next_batch())
  other = train(dataclasses.replace(cfg, seed=4), 4).next_batch()
  assert (first.tokens != other.tokens).any()


def epochs_of(cfg, count, shard=0):
  """Lists of the documents of the first `count` epochs of one shard."""
  meta = read_meta(cfg.folder)
  [stream] = train_documents(cfg, meta, [shard])
  documents = iter(stream)
  length = len(range(shard, meta.train.documents, cfg.shards))
  return [[tuple(next(documents)["tokens"].tolist()) for _ in range(length)] for _ in range(count)]


def test_each_epoch_has_every_document_once_in_another_order(cfg):
  stored = [tuple(record.tokens.tolist()) for record in read_records(cfg.folder, "train")]
  epochs = epochs_of(cfg, 3)
  assert [sorted(epoch) for epoch in epochs] == [sorted(stored)] * 3
  assert len({tuple(epoch) for epoch in [*epochs, stored]}) == 4
  assert epochs_of(dataclasses.replace(cfg, shuffle=False), 2) == [stored] * 2


@pytest.mark.parametrize("count", [2, 3])
def test_shards_have_disjoint_documents_that_cover_all_in_every_epoch(cfg, count):
  stored = [tuple(record.tokens.tolist()) for record in read_records(cfg.folder, "train")]
  parts = [epochs_of(dataclasses.replace(cfg, shards=count), 2, shard) for shard in range(count)]
  for epoch in range(2):
    assert sorted(document for part in parts for document in part[epoch]) == sorted(stored)


def test_rows_are_mixed_within_windows_and_none_is_lost(cfg, train):
  plain = train(dataclasses.replace(cfg, shuffle_window=1), 32).next_batch().tokens.tolist()
  mixed = train(cfg, 32).next_batch().tokens.tolist()
  assert mixed != plain
  for begin in (0, 16):
    assert sorted(mixed[begin : begin + 16]) == sorted(plain[begin : begin + 16])


def test_end_of_text_stands_once_at_the_end_of_each_document(data_folder):
  eos = load_data_tokenizer(data_folder).eos_id
  for split in ("train", "heldout"):
    for record in read_records(data_folder, split):
      assert np.flatnonzero(record.tokens == eos).tolist() == [len(record.tokens) - 1]


def test_without_shuffle_documents_come_in_stored_order(data_folder, train):
  cfg = DataConfig(folder=data_folder, seq_len=24, packing="truncate", shuffle=False)
  first = next(read_records(data_folder, "train")).tokens
  tokens = train(cfg, 1).next_batch().tokens[0]
  n = min(len(first), 24)
  assert tokens[:n].tolist() == first[:n].tolist()


ROWS = (4, 12, 8, 4)  # of successive batches; each divides over shards and readers


def readers(train, cfg, count):
  return [train(cfg, 12, index, count) for index in range(count)]


def global_batch(readers, rows):
  """What the readers' rows make together, in order."""
  shares = [reader.next_batch(rows) for reader in readers]
  assert {share.shape for share in shares} == {(rows // len(readers), shares[0].shape[1])}
  return {name: np.concatenate([getattr(share, name) for share in shares]) for name in FIELDS}


def assert_same_batches(ours, theirs, sizes):
  for rows in sizes:
    left, right = global_batch(ours, rows), global_batch(theirs, rows)
    for name in FIELDS:
      np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_batches_do_not_depend_on_the_number_of_readers(cfg, train, shards, count):
  """Fewer shards than readers, as many, and more; rows a batch change from step to step."""
  cfg = dataclasses.replace(cfg, shards=shards)
  assert_same_batches(readers(train, cfg, 1), readers(train, cfg, count), ROWS)


def test_readers_need_not_divide_the_shards(cfg, train):
  cfg = dataclasses.replace(cfg, shards=4)
  assert_same_batches(readers(train, cfg, 1), readers(train, cfg, 3), (12, 24, 12))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_resume_by_another_number_of_readers_continues_the_same_batches(cfg, train, shards, before, after):
  """Handed to and fro before the first batch and after each: bit-equal to a run that never stops."""
  cfg = dataclasses.replace(cfg, shards=shards)
  whole, running, waiting = readers(train, cfg, 1), readers(train, cfg, before), readers(train, cfg, after)
  for rows in ROWS:
    state = merge_states(json.loads(json.dumps([reader.get_state() for reader in running])))
    assert list(state["positions"]) == [str(shard) for shard in range(shards)]
    running, waiting = waiting, running
    for reader in running:
      reader.set_state(json.loads(json.dumps(state)))
    assert_same_batches(whole, running, [rows])


def test_merged_state_does_not_depend_on_the_number_of_readers(cfg, train):
  cfg = dataclasses.replace(cfg, shards=4)
  states = []
  for count in (1, 2, 4):
    group = readers(train, cfg, count)
    for rows in ROWS:
      global_batch(group, rows)
    states.append(json.dumps(merge_states([reader.get_state() for reader in group])))
  assert len(set(states)) == 1


def test_reader_of_several_parts_makes_their_rows_in_order(cfg, train):
  """On a pod the rows of one process need not lie together."""
  cfg = dataclasses.replace(cfg, shards=4)
  whole = train(cfg, 8).next_batch()
  some = train(cfg, 8, (1, 6), 8).next_batch()
  for name in FIELDS:
    np.testing.assert_array_equal(getattr(some, name), getattr(whole, name)[[1, 6]])
  held = next(iter(heldout_batches(cfg, 8)))
  np.testing.assert_array_equal(next(iter(heldout_batches(cfg, 8, 0, (0, 5), 8))).tokens, held.tokens[[0, 5]])


def test_reader_reads_only_the_shards_of_its_rows(cfg, train):
  cfg = dataclasses.replace(cfg, shards=4)
  held = [sorted(reader.get_state()["positions"]) for reader in readers(train, cfg, 2)]
  assert held == [["0", "1"], ["2", "3"]]


def test_as_many_rows_are_mixed_in_shards_together(cfg, train):
  sharded = dataclasses.replace(cfg, shards=4)
  plain = train(dataclasses.replace(sharded, shuffle_window=1), 32).next_batch().tokens.reshape(4, 2, 4, -1)
  mixed = train(sharded, 32).next_batch().tokens.reshape(4, 2, 4, -1)
  assert (mixed != plain).any()
  for shard in range(4):
    for window in range(2):
      assert sorted(mixed[shard, window].tolist()) == sorted(plain[shard, window].tolist())


def test_shards_give_different_rows(cfg, train):
  tokens = train(dataclasses.replace(cfg, shards=4), 4).next_batch().tokens
  assert len({tuple(row) for row in tokens.tolist()}) == 4


def test_state_of_some_readers_alone_is_refused(cfg, train):
  cfg = dataclasses.replace(cfg, shards=4)
  first, second = (reader.get_state() for reader in readers(train, cfg, 2))
  with pytest.raises(UserError, match=r"lacks 2 of 4 shards \(2, 3\).* merged"):
    merge_states([first])
  with pytest.raises(UserError, match=r"lacks 2 of 4 shards \(0, 1\)"):
    train(cfg, 8).set_state(second)


def test_states_after_different_batches_are_not_merged(cfg, train):
  cfg = dataclasses.replace(cfg, shards=2)
  first, second = readers(train, cfg, 2)
  first.next_batch()
  with pytest.raises(UserError, match="disagree on where the data stands: rows_taken 6 of one, 0 of another"):
    merge_states([first.get_state(), second.get_state()])
  other = train(dataclasses.replace(cfg, seed=4), 8, 1, 2)
  with pytest.raises(UserError, match="disagree on where the data stands: settings"):
    merge_states([second.get_state(), other.get_state()])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"seq_len": 25}, r"data.seq_len was 24 .* is 25; set it back to 24"),
    ({"seed": 9}, r"data.seed was 3"),
    ({"shuffle": False}, r"data.shuffle was True"),
    ({"shards": 2}, r"data.shards was 1 .* is 2; set it back to 1"),
  ],
)
def test_resume_with_changed_settings_names_the_field(cfg, train, change, message):
  state = train(cfg, 4).get_state()
  with pytest.raises(UserError, match=message):
    train(dataclasses.replace(cfg, **change), 4).set_state(state)


def test_state_of_another_format_is_refused(cfg, train):
  with pytest.raises(UserError, match="format None"):
    train(cfg, 4).set_state({})
  with pytest.raises(
    UserError, match="format 1, this program reads 2; resume with the version that saved it"
  ):
    train(cfg, 4).set_state({"format": 1, "settings": {}, "position": {}})


def test_batch_that_does_not_divide_is_refused(cfg, train):
  with pytest.raises(UserError, match="batch_size 3 must be a positive multiple of the 2 readers"):
    train(cfg, 3, 0, 2)
  with pytest.raises(UserError, match="part 2 of a batch must be between 0 and 1"):
    train(cfg, 2, 2, 2)
  sharded = dataclasses.replace(cfg, shards=4)
  with pytest.raises(UserError, match="batch_size 6 must be a multiple of data"):
    train(sharded, 6)
  with pytest.raises(UserError, match="batch_size 10 must be a multiple of data"):
    train(sharded, 8).next_batch(10)
  with pytest.raises(UserError, match=r"shards 1000 must be at most the \d+ documents"):
    train(dataclasses.replace(cfg, shards=1000), 1000)


def test_heldout_is_finite_deterministic_and_complete(cfg):
  first, again = list(heldout_batches(cfg, 4)), list(heldout_batches(cfg, 4))
  assert len(first) == len(again) > 1
  for ours, theirs in zip(first, again, strict=True):
    assert_equal(ours, theirs)
    assert ours.shape == (4, 24)
  # Every token is an input or the last of its window; the number of the latter is the number of rows.
  inputs = sum((batch.segment_ids > 0).sum() for batch in first)
  rows = sum((batch.segment_ids[:, 0] > 0).sum() for batch in first)
  tokens = read_meta(cfg.folder).heldout.tokens
  assert tokens - rows <= inputs <= tokens


def test_heldout_rows_are_limited_and_the_last_batch_is_padded(cfg):
  batches = list(heldout_batches(cfg, 4, rows=6))
  assert [batch.shape for batch in batches] == [(4, 24), (4, 24)]
  assert (batches[1].segment_ids[2:] == 0).all()
  assert (batches[1].weights[2:] == 0).all()
  assert (batches[1].segment_ids[:2, 0] == 1).all()


def test_heldout_parts_of_two_processes_make_the_whole(cfg):
  whole = list(heldout_batches(cfg, 4, rows=6))
  parts = [list(heldout_batches(cfg, 4, 6, index, 2)) for index in range(2)]
  for batch, left, right in zip(whole, *parts, strict=True):
    np.testing.assert_array_equal(batch.tokens, np.concatenate([left.tokens, right.tokens]))


def test_bytes_of_heldout_targets_are_bytes_of_the_text(data_folder):
  """One long row a document: all of its bytes but those of its first token are predicted."""
  cfg = DataConfig(folder=data_folder, seq_len=4000, packing="best_fit", pack_bins=1)
  lengths = load_token_bytes(data_folder)
  records = list(read_records(data_folder, "heldout"))
  counted = sum(target_bytes(batch, lengths) for batch in heldout_batches(cfg, 2))
  assert counted == sum(record.text_bytes - lengths[record.tokens[0]] for record in records)
  assert all(lengths[record.tokens].sum() == record.text_bytes for record in records)


def test_train_and_heldout_share_no_file(data_folder):
  paths = [{record.path for record in read_records(data_folder, split)} for split in ("train", "heldout")]
  assert paths[0]
  assert paths[1]
  assert not paths[0] & paths[1]


def test_iterator_protocol_gives_the_same_batches(cfg, train):
  called = train(cfg, 2)
  for batch in itertools.islice(train(cfg, 2), 3):
    assert_equal(batch, called.next_batch())
