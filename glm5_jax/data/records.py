"""A prepared data folder: ArrayRecord shards of token ids, the tokeniser, and meta.json that describes them.

  <folder>/meta.json  tokenizer.model | tokenizer.json  token_bytes.npy
  <folder>/train/00000.array_record …  <folder>/heldout/00000.array_record …

meta.json is written last, into a folder that gets its name only then: what has a meta.json is complete.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from array_record.python import array_record_data_source, array_record_module

from glm5_jax.errors import UserError
from glm5_jax.text.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 1
META_FILE = "meta.json"
TOKEN_BYTES_FILE = "token_bytes.npy"
SPLITS = ("train", "heldout")

_HEADER = struct.Struct("<IIB")  # bytes of text, bytes of the path, flags
_LAST, _WIDE = 1, 2  # the file ends here; ids are uint32 rather than uint16


@dataclasses.dataclass(frozen=True)
class Record:
  """A document: ids (int32 [n], <|endoftext|> at the end if its file ends here), bytes of text, origin."""

  tokens: np.ndarray
  text_bytes: int
  path: str
  last: bool


@dataclasses.dataclass
class SplitMeta:
  """Counts of one side of the split; `shards` maps file name to size in bytes."""

  files: int = 0
  documents: int = 0
  tokens: int = 0
  text_bytes: int = 0
  shards: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Meta:
  """meta.json. `arguments` are those of `prepare`; `skipped` counts files left out, by reason."""

  format_version: int
  arguments: dict[str, Any]
  tokenizer_file: str
  tokenizer_fingerprint: str
  vocab_size: int
  eos_id: int
  train: SplitMeta
  heldout: SplitMeta
  skipped: dict[str, int]

  @property
  def fingerprint(self) -> str:
    """16 hexadecimal digits that change with the content of the data."""
    content = dataclasses.asdict(self)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def encode_record(record: Record) -> bytes:
  wide = bool(record.tokens.size) and int(record.tokens.max()) > 0xFFFF
  path = record.path.encode(errors="surrogateescape")
  flags = _LAST * record.last | _WIDE * wide
  ids = record.tokens.astype("<u4" if wide else "<u2")
  return _HEADER.pack(record.text_bytes, len(path), flags) + path + ids.tobytes()


def decode_record(data: bytes) -> Record:
  text_bytes, path_length, flags = _HEADER.unpack_from(data)
  start = _HEADER.size + path_length
  ids = np.frombuffer(data, dtype="<u4" if flags & _WIDE else "<u2", offset=start)
  path = data[_HEADER.size : start].decode(errors="surrogateescape")
  return Record(ids.astype(np.int32), text_bytes, path, bool(flags & _LAST))


class SplitWriter:
  """Writes the records of one split into shards of about `shard_bytes`; `close` returns the counts."""

  def __init__(self, folder: str, shard_bytes: int = 64 << 20):
    os.makedirs(folder)
    self._folder = folder
    self._shard_bytes = shard_bytes
    self._writer: Any = None
    self._written = 0
    self._meta = SplitMeta()

  def write(self, record: Record) -> None:
    data = encode_record(record)
    if self._writer is None or self._written + len(data) > self._shard_bytes:
      self._close_shard()
      name = f"{len(self._meta.shards):05d}.array_record"
      self._meta.shards[name] = 0
      # One record a group: documents are read in random order.
      with _machine_errors(self._folder):
        self._writer = array_record_module.ArrayRecordWriter(os.path.join(self._folder, name), "group_size:1")
      self._written = 0
    with _machine_errors(self._folder):
      self._writer.write(data)
    self._written += len(data)
    self._meta.documents += 1
    self._meta.files += record.last
    self._meta.tokens += record.tokens.size
    self._meta.text_bytes += record.text_bytes

  def _close_shard(self) -> None:
    if self._writer is not None:
      with _machine_errors(self._folder):
        self._writer.close()
      self._writer = None

  def close(self) -> SplitMeta:
    self._close_shard()
    for name in self._meta.shards:
      self._meta.shards[name] = os.path.getsize(os.path.join(self._folder, name))
    return self._meta


@contextlib.contextmanager
def _machine_errors(folder: str) -> Iterator[None]:
  """ArrayRecord tells of a full disk or a missing right by RuntimeError."""
  try:
    yield
  except RuntimeError as error:
    raise UserError(f"cannot write {folder}: {str(error).split(';')[0]}") from error


def write_meta(folder: str, meta: Meta) -> None:
  with open(os.path.join(folder, META_FILE), "w", encoding="utf-8") as file:
    json.dump(dataclasses.asdict(meta), file, indent=2, sort_keys=True)
    file.flush()
    os.fsync(file.fileno())


def read_meta(folder: str) -> Meta:
  """The description of a finished data folder.

  Raises:
    UserError: the folder is missing, was not finished, is of another format, or lacks part of a shard.
  """
  path = os.path.join(folder, META_FILE)
  if not os.path.exists(path):
    state = "is no finished data folder (it has no meta.json)" if os.path.isdir(folder) else "does not exist"
    raise UserError(
      f"data.folder {folder or '(empty)'} {state}; make it with: python -m launch.prepare --out=…"
    )
  try:
    with open(path, encoding="utf-8") as file:
      content = json.load(file)
    version = content["format_version"]
    if version == FORMAT_VERSION:
      content.update({name: SplitMeta(**content[name]) for name in SPLITS})
      meta = Meta(**content)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise UserError(f"{path} is damaged ({error}); run launch.prepare again with --overwrite") from error
  if version != FORMAT_VERSION:
    raise UserError(
      f"{path} has format_version {version}, this program reads {FORMAT_VERSION}; run launch.prepare again"
    )
  _check_shards(folder, meta)
  return meta


def _check_shards(folder: str, meta: Meta) -> None:
  for split in SPLITS:
    for name, wanted in _split(meta, split).shards.items():
      path = os.path.join(folder, split, name)
      size = os.path.getsize(path) if os.path.exists(path) else 0
      if size != wanted:
        raise UserError(
          f"{path} has {size} bytes, meta.json says {wanted}; run launch.prepare again with --overwrite"
        )


def _split(meta: Meta, split: str) -> SplitMeta:
  return {"train": meta.train, "heldout": meta.heldout}[split]


def record_source(folder: str, meta: Meta, split: str):
  """Random access to the encoded records of a split ("train" or "heldout").

  Raises:
    UserError: the split has no document.
  """
  paths = [os.path.join(folder, split, name) for name in sorted(_split(meta, split).shards)]
  if not paths:
    raise UserError(
      f"data folder {folder} has no {split} documents; prepare it with more files or --heldout>0"
    )
  return array_record_data_source.ArrayRecordDataSource(paths)


def read_records(folder: str, split: str) -> Iterator[Record]:
  """All documents of a split in stored order."""
  for data in record_source(folder, read_meta(folder), split):
    yield decode_record(data)


def load_data_tokenizer(folder: str) -> Tokenizer:
  """The tokeniser of a data folder, checked against meta.json."""
  meta = read_meta(folder)
  tokenizer = load_tokenizer(os.path.join(folder, meta.tokenizer_file))
  tokenizer.check_fits(meta.vocab_size, meta.tokenizer_fingerprint, owner=f"data folder {folder}")
  return tokenizer


def load_token_bytes(folder: str) -> np.ndarray:
  """Bytes of text of every id, int32 [vocab_size]; 0 for special tokens."""
  return np.load(os.path.join(folder, TOKEN_BYTES_FILE))
