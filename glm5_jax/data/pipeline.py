"""Batches of a prepared data folder: endless and resumable for training, finite for evaluation."""

import itertools
from collections.abc import Iterator
from typing import Any

import grain

from glm5_jax.config import DataConfig
from glm5_jax.data.batch import Batch, stack_rows
from glm5_jax.data.packing import pack
from glm5_jax.data.records import Meta, decode_record, read_meta, record_source
from glm5_jax.errors import UserError

STATE_FORMAT = 1

# Few documents are read ahead: one may have a million tokens.
_READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


class TrainIterator:
  """Endless batches; every epoch in another order. Made by `make_train_iterator`.

  `get_state` is a small JSON-able dictionary: the place after the last batch that was returned, whatever
  has been made ahead. After `set_state` the batches are those of an uninterrupted run. The number of rows
  may change from batch to batch, and between runs.
  """

  def __init__(self, cfg: DataConfig, batch_size: int, process_index: int = 0, process_count: int = 1):
    if not 0 <= process_index < process_count:
      raise UserError(f"process_index {process_index} must be between 0 and {process_count - 1}")
    self._meta = read_meta(cfg.folder)
    self._process_count = process_count
    self._batch_size = batch_size
    self._settings = {
      "data": self._meta.fingerprint,
      "seq_len": cfg.seq_len,
      "packing": cfg.packing,
      "pack_bins": cfg.pack_bins if cfg.packing == "best_fit" else 0,
      "shuffle": cfg.shuffle,
      "shuffle_window": cfg.shuffle_window if cfg.shuffle else 1,
      "seed": cfg.seed,
      "process_index": process_index,
      "process_count": process_count,
    }
    documents = train_documents(cfg, self._meta, process_index, process_count)
    rows = pack(documents, cfg.packing, cfg.seq_len, cfg.pack_bins, cfg.seed, cfg.shuffle)
    if cfg.shuffle and cfg.shuffle_window > 1:
      rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=cfg.shuffle_window, seed=cfg.seed)
    ahead = cfg.prefetch * self._local(batch_size)
    self._rows = iter(grain.experimental.ThreadPrefetchIterDataset(rows, prefetch_buffer_size=ahead))

  def _local(self, rows: int) -> int:
    if rows < 1 or rows % self._process_count:
      raise UserError(
        f"train.batch_size {rows} must be a positive multiple of the {self._process_count} processes"
      )
    return rows // self._process_count

  def next_batch(self, batch_size: int = 0) -> Batch:
    """This process's share of the next `batch_size` rows (over all processes; 0: the usual number)."""
    return stack_rows([next(self._rows) for _ in range(self._local(batch_size or self._batch_size))])

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    return self.next_batch()

  def get_state(self) -> dict[str, Any]:
    return {"format": STATE_FORMAT, "settings": self._settings, "position": self._rows.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues where `get_state` was called, in this run or another.

    Raises:
      UserError: the state was saved with other data, settings or number of processes.
    """
    if state.get("format") != STATE_FORMAT:
      raise UserError(f"data position has format {state.get('format')}, this program reads {STATE_FORMAT}")
    for name, now in self._settings.items():
      saved = state["settings"][name]
      if saved == now:
        continue
      if name in ("process_index", "process_count"):
        what, advice = name, f"resume with {state['settings']['process_count']} processes"
      elif name == "data":
        what, advice = "content of data.folder", "resume with the folder as it was"
      else:
        what, advice = f"data.{name}", f"set it back to {saved}"
      raise UserError(
        f"{what} was {saved} when the data position was saved and is {now}; {advice} or begin another run"
      )
    self._rows.set_state(_with_tuples(state["position"]))

  def close(self) -> None:
    """Stops the threads that read ahead; the iterator is of no use afterwards."""
    self._rows.close()
    del self._rows  # grain's own clean-up fails when it comes as late as the interpreter's end


def make_train_iterator(
  cfg: DataConfig, batch_size: int, process_index: int = 0, process_count: int = 1
) -> TrainIterator:
  """Batches of cfg.folder's training documents, [batch_size / process_count, seq_len] each.

  Args:
    batch_size: rows over all processes; only decides the default of `next_batch` and how many rows are
      made ahead.
    process_index, process_count: the documents of an epoch are dealt out to the processes, each to one.

  Raises:
    UserError: no finished data folder, an impossible setting, or fewer documents than processes.
  """
  return TrainIterator(cfg, batch_size, process_index, process_count)


def heldout_batches(
  cfg: DataConfig, batch_size: int, rows: int = 0, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
  """The held-out documents once, in stored order, the same on every call.

  Every process packs all rows and takes its part of each batch. The last batch is filled up with padding
  rows (segment 0, weight 0), so that all have the shape [batch_size / process_count, seq_len].

  Args:
    rows: how many rows over all batches; 0 takes all there are.
  """
  if batch_size < 1 or batch_size % process_count:
    raise UserError(
      f"evaluation batch_size {batch_size} must be a positive multiple of {process_count} processes"
    )
  source = record_source(cfg.folder, read_meta(cfg.folder), "heldout")
  documents = grain.MapDataset.source(source).map(_tokens).to_iter_dataset(_READ)
  packed = pack(documents, cfg.packing, cfg.seq_len, cfg.pack_bins, cfg.seed, shuffle=False)
  return _split_batches(itertools.islice(packed, rows or None), batch_size, process_index, process_count)


def _split_batches(rows, batch_size: int, process_index: int, process_count: int) -> Iterator[Batch]:
  local = batch_size // process_count
  mine = slice(process_index * local, (process_index + 1) * local)
  while chunk := list(itertools.islice(rows, batch_size)):
    whole = stack_rows(chunk, size=batch_size)
    yield Batch(**{name: array[mine] for name, array in vars(whole).items()})


def train_documents(cfg: DataConfig, meta: Meta, process_index: int, process_count: int) -> grain.IterDataset:
  """The endless {"tokens": int32 [n]} of one process, whole documents; every epoch in another order."""
  source = record_source(cfg.folder, meta, "train")
  if len(source) < process_count:
    raise UserError(f"data folder {cfg.folder} has {len(source)} documents for {process_count} processes")
  documents = grain.MapDataset.source(source).seed(cfg.seed)
  if cfg.shuffle:
    documents = documents.shuffle()
  mine = documents[process_index::process_count]
  return mine.map(_tokens).repeat().to_iter_dataset(_READ)


def _tokens(data: bytes) -> dict[str, Any]:
  return {"tokens": decode_record(data).tokens}


def _with_tuples(tree: Any) -> Any:
  """The tree with lists as tuples again: grain compares places as tuples, JSON makes them lists."""
  if isinstance(tree, dict):
    return {key: _with_tuples(value) for key, value in tree.items()}
  return tuple(_with_tuples(value) for value in tree) if isinstance(tree, (list, tuple)) else tree
