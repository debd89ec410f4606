"""Batches of a prepared data folder: endless and resumable for training, finite for evaluation.

The training stream is dealt into `data.shards` shards, each a stream of rows of its own. A batch of B rows
takes the next B / shards rows of every shard: row i comes from shard i · shards // B. So a batch is the same
whoever makes it, and a reader that needs some of its rows reads only the shards behind them.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import grain

from glm5_jax.config import DataConfig
from glm5_jax.data.batch import Batch, stack_rows
from glm5_jax.data.packing import pack
from glm5_jax.data.records import Meta, decode_record, read_meta, record_source
from glm5_jax.errors import UserError

STATE_FORMAT = 2  # 1 dealt documents out to processes and stood for one of them
_WINDOW_START = "parent_window_start_state"  # in grain's state of a shuffled window


class TrainIterator:
  """Endless batches; every epoch in another order. Made by `make_train_iterator`.

  `get_state` is a small JSON-able dictionary: the place after the last batch that was returned, whatever
  has been made ahead, of every shard that this reader reads; `merge_states` joins those of all readers.
  After `set_state` the batches are those of an uninterrupted run, for any number of readers. The number of
  rows may change from batch to batch, and between runs.
  """

  def __init__(self, cfg: DataConfig, batch_size: int, part: int | Sequence[int] = 0, parts: int = 1):
    self._mine = _checked_parts(part, parts)
    self._parts, self._shards, self._batch_size = parts, cfg.shards, batch_size
    self._check_rows(batch_size)
    meta = read_meta(cfg.folder)
    self._settings = {
      "data": meta.fingerprint,
      "seq_len": cfg.seq_len,
      "packing": cfg.packing,
      "pack_bins": cfg.pack_bins if cfg.packing == "best_fit" else 0,
      "shuffle": cfg.shuffle,
      "shuffle_window": cfg.shuffle_window if cfg.shuffle else 1,
      "seed": cfg.seed,
      "shards": cfg.shards,
    }
    self._read = _shards_behind(self._mine, parts, cfg.shards)
    self._rows_taken = 0  # of each shard
    # A round has one row of each shard that is read, so what is made ahead does not depend on batch sizes.
    rounds = grain.experimental.ZipIterDataset(_row_streams(cfg, meta, self._read))
    window = cfg.shuffle_window // cfg.shards  # of rounds: as many rows are mixed for any number of shards
    self._mixes = cfg.shuffle and window > 1
    if self._mixes:
      rounds = grain.experimental.WindowShuffleIterDataset(rounds, window_size=window, seed=cfg.seed)
    ahead = cfg.prefetch * (batch_size // cfg.shards)
    self._rounds = iter(grain.experimental.ThreadPrefetchIterDataset(rounds, prefetch_buffer_size=ahead))

  def _check_rows(self, rows: int) -> None:
    if self._shards < 1:
      raise UserError(f"data.shards {self._shards} must be at least 1")
    if rows < 1 or rows % self._parts:
      raise UserError(f"train.batch_size {rows} must be a positive multiple of the {self._parts} readers")
    if rows % self._shards:
      raise UserError(f"train.batch_size {rows} must be a multiple of data.shards {self._shards}")

  def next_batch(self, batch_size: int = 0) -> Batch:
    """This reader's rows of the next `batch_size` (over all readers; 0: the usual number), in their order."""
    total = batch_size or self._batch_size
    self._check_rows(total)
    share = total // self._shards
    rounds = [next(self._rounds) for _ in range(share)]
    self._rows_taken += share
    place = {shard: k for k, shard in enumerate(self._read)}
    mine = _rows_of(self._mine, self._parts, total)
    return stack_rows([rounds[i % share][place[i // share]] for i in mine])

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    return self.next_batch()

  def get_state(self) -> dict[str, Any]:
    place = dict(self._rounds.get_state())
    parents = place.pop(_WINDOW_START) if self._mixes else place
    return {
      "format": STATE_FORMAT,
      "settings": self._settings,
      "rows_taken": self._rows_taken,
      "window": place if self._mixes else {},
      "positions": {str(shard): at for shard, at in zip(self._read, parents["parents"], strict=True)},
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues where `get_state` was called, in this run or another, by any number of readers.

    Raises:
      UserError: the state was saved with other data or settings, or lacks a shard that is read here.
    """
    _check_format(state)
    for name, now in self._settings.items():
      saved = state["settings"][name]
      if saved == now:
        continue
      if name == "data":
        what, advice = "content of data.folder", "resume with the folder as it was"
      else:
        what, advice = f"data.{name}", f"set it back to {saved}"
      raise UserError(
        f"{what} was {saved} when the data position was saved and is {now}; {advice} or begin another run"
      )
    positions = state["positions"]
    missing = [shard for shard in self._read if str(shard) not in positions]
    if missing:
      raise UserError(_lacks(missing, self._shards))
    parents = {"parents": [_with_tuples(positions[str(shard)]) for shard in self._read]}
    self._rounds.set_state({**state["window"], _WINDOW_START: parents} if self._mixes else parents)
    self._rows_taken = state["rows_taken"]

  def close(self) -> None:
    """Stops the threads that read ahead; the iterator is of no use afterwards."""
    self._rounds.close()
    del self._rounds  # grain's own clean-up fails when it comes as late as the interpreter's end


def make_train_iterator(
  cfg: DataConfig, batch_size: int, part: int | Sequence[int] = 0, parts: int = 1
) -> TrainIterator:
  """Batches of cfg.folder's training documents, [batch_size · len(part) / parts, seq_len] each.

  Args:
    batch_size: rows over all readers; only decides the default of `next_batch` and how many rows are
      made ahead.
    part, parts: every batch is cut into `parts` equal runs of rows, of which this reader makes number
      `part`, or several, in the order given. A reader also makes, and drops, the other rows of its shards:
      with data.shards a multiple of the parts there are none.

  Raises:
    UserError: no finished data folder, an impossible setting, fewer documents than shards, or a batch that
      does not divide over shards and parts.
  """
  return TrainIterator(cfg, batch_size, part, parts)


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """One state with the positions of all shards, from the states of all readers after the same batch.

  Raises:
    UserError: states of different runs or batches, or a shard that none of them has.
  """
  first = states[0]
  positions: dict[str, Any] = {}
  for state in states:
    _check_format(state)
    for name in ("settings", "rows_taken", "window"):
      if state[name] != first[name]:
        raise UserError(
          f"readers disagree on where the data stands: {name} {first[name]} of one, {state[name]} of another"
        )
    positions |= state["positions"]
  shards = range(first["settings"]["shards"])
  missing = [shard for shard in shards if str(shard) not in positions]
  if missing:
    raise UserError(_lacks(missing, len(shards)))
  return {**first, "positions": {str(shard): positions[str(shard)] for shard in shards}}


def heldout_batches(
  cfg: DataConfig, batch_size: int, rows: int = 0, part: int | Sequence[int] = 0, parts: int = 1
) -> Iterator[Batch]:
  """The held-out documents once, in stored order, the same on every call.

  Every reader packs all rows and takes its part of each batch. The last batch is filled up with padding
  rows (segment 0, weight 0), so that all have the shape [batch_size · len(part) / parts, seq_len].

  Args:
    rows: how many rows over all batches; 0 takes all there are.
    part, parts: as for `make_train_iterator`.
  """
  mine = _checked_parts(part, parts)
  if batch_size < 1 or batch_size % parts:
    raise UserError(f"evaluation batch_size {batch_size} must be a positive multiple of the {parts} readers")
  source = record_source(cfg.folder, read_meta(cfg.folder), "heldout")
  documents = grain.MapDataset.source(source).map(_tokens).to_iter_dataset(_read_options(1))
  packed = pack(documents, cfg.packing, cfg.seq_len, cfg.pack_bins, cfg.seed, shuffle=False)
  return _split_batches(itertools.islice(packed, rows or None), batch_size, _rows_of(mine, parts, batch_size))


def _split_batches(rows, batch_size: int, mine: list[int]) -> Iterator[Batch]:
  while chunk := list(itertools.islice(rows, batch_size)):
    whole = stack_rows(chunk, size=batch_size)
    yield Batch(**{name: array[mine] for name, array in vars(whole).items()})


def train_documents(cfg: DataConfig, meta: Meta, shards: Sequence[int]) -> list[grain.IterDataset]:
  """The endless {"tokens": int32 [n]} of each shard named, whole documents; every epoch in another order.

  In every epoch each document belongs to one shard, not the same one every time.
  """
  source = record_source(cfg.folder, meta, "train")
  if len(source) < cfg.shards:
    raise UserError(
      f"data.shards {cfg.shards} must be at most the {len(source)} documents of data folder {cfg.folder}"
    )
  documents = grain.MapDataset.source(source).seed(cfg.seed)
  if cfg.shuffle:
    documents = documents.shuffle()
  read = _read_options(len(shards))
  return [documents[i :: cfg.shards].map(_tokens).repeat().to_iter_dataset(read) for i in shards]


def _row_streams(cfg: DataConfig, meta: Meta, shards: Sequence[int]) -> list[grain.IterDataset]:
  """The endless rows of each shard named, [seq_len] arrays under the names of `Batch`."""
  documents = train_documents(cfg, meta, shards)
  return [
    pack(stream, cfg.packing, cfg.seq_len, cfg.pack_bins, cfg.seed + shard, cfg.shuffle)
    for shard, stream in zip(shards, documents, strict=True)
  ]


def _read_options(streams: int) -> grain.ReadOptions:
  """Few documents are read ahead, over all of a reader's streams: one may have a million tokens."""
  return grain.ReadOptions(num_threads=max(1, 2 // streams), prefetch_buffer_size=max(1, 8 // streams))


def _checked_parts(part: int | Sequence[int], parts: int) -> list[int]:
  mine = [part] if isinstance(part, int) else list(part)
  if not mine or not all(0 <= p < parts for p in mine):
    raise UserError(f"part {part} of a batch must be between 0 and {parts - 1}")
  return mine


def _rows_of(mine: Sequence[int], parts: int, rows: int) -> list[int]:
  """Numbers of the rows that lie in the parts `mine` of a batch."""
  size = rows // parts
  return [i for part in mine for i in range(part * size, (part + 1) * size)]


def _shards_behind(mine: Sequence[int], parts: int, shards: int) -> list[int]:
  """Shards that the rows of these parts come from, for every batch that divides over both."""
  return sorted({i for p in mine for i in range(p * shards // parts, -(-(p + 1) * shards // parts))})


def _check_format(state: dict[str, Any]) -> None:
  if state.get("format") != STATE_FORMAT:
    raise UserError(
      f"data position has format {state.get('format')}, this program reads {STATE_FORMAT}; "
      "resume with the version that saved it or begin another run"
    )


def _lacks(missing: Sequence[int], shards: int) -> str:
  return (
    f"data position lacks {len(missing)} of {shards} shards ({', '.join(map(str, missing[:8]))}); "
    "it must be merged from those of all processes"
  )


def _tokens(data: bytes) -> dict[str, Any]:
  return {"tokens": decode_record(data).tokens}


def _with_tuples(tree: Any) -> Any:
  """The tree with lists as tuples again: grain compares places as tuples, JSON makes them lists."""
  if isinstance(tree, dict):
    return {key: _with_tuples(value) for key, value in tree.items()}
  return tuple(_with_tuples(value) for value in tree) if isinstance(tree, (list, tuple)) else tree
