"""Folders of text to a data folder: collect, split, train or load a tokeniser, write token ids."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from tqdm import tqdm

from glm5_jax.data import records
from glm5_jax.data.sources import (
  DEFAULT_SUFFIXES,
  Piece,
  SourceFile,
  collect,
  default_sources,
  limit_bytes,
  read_pieces,
  split_heldout,
)
from glm5_jax.errors import UserError
from glm5_jax.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

_GROUP_BYTES = 4 << 20  # text tokenised at a time, on all cores


@dataclasses.dataclass
class PrepareConfig:
  """What to make a data folder of.

  Attributes:
    out: the folder to make.
    sources: folders or files; none means the standard library of the running interpreter.
    tokenizer: an existing file or folder; "" trains one.
    vocab_size: of the tokeniser to train.
    heldout: fraction of the files that are held out.
    max_bytes: of text in all; 0 takes everything.
    suffixes: of the files to take; none takes every file.
    seed: of file order and held-out split.
    document_bytes: longer files become several documents, cut at line ends.
  """

  out: str
  sources: Sequence[str] = ()
  tokenizer: str = ""
  vocab_size: int = 2048
  heldout: float = 0.02
  max_bytes: int = 0
  suffixes: Sequence[str] = DEFAULT_SUFFIXES
  seed: int = 0
  document_bytes: int = 1 << 20


def prepare(
  cfg: PrepareConfig, overwrite: bool = False, report: Callable[[str], None] = print
) -> records.Meta:
  """Makes the data folder `cfg.out`, or finds that it is there already.

  The folder is built under another name and renamed at the end: a prepare that was killed leaves only
  `<out>.partial`, which the next one clears away.

  Args:
    overwrite: replaces a data folder that was made with other arguments or is damaged.
    report: takes lines for the user.

  Raises:
    UserError: `out` holds something else, no usable text, a broken tokeniser, no space left.
  """
  if not cfg.out:
    raise UserError("--out is empty; name the folder to make, such as --out=runs/data")
  out = os.path.abspath(cfg.out)
  given = load_tokenizer(cfg.tokenizer) if cfg.tokenizer else None
  arguments = _arguments(cfg, given)
  if not overwrite and (done := _finished(out, arguments)):
    report(f"{cfg.out} is prepared already: {summary(done)}")
    return done
  _check_replaceable(out)
  partial = f"{out}.partial"
  try:
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    meta = _build(cfg, arguments, given, partial, report)
    _move_into_place(partial, out)
  except UnicodeDecodeError as error:
    raise UserError(f"a source file changed while it was read ({error}); run launch.prepare again") from error
  except OSError as error:
    raise UserError(f"cannot write {error.filename or partial}: {error.strerror or error}") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  report(f"{cfg.out}: {summary(meta)}")
  return meta


def summary(meta: records.Meta) -> str:
  """One line: what a data folder holds."""
  parts = [
    f"{name} {side.files} files, {side.text_bytes / 1e6:.2f} MB, {side.tokens:,} tokens"
    for name, side in (("train", meta.train), ("heldout", meta.heldout))
  ]
  skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(meta.skipped.items())) or "none"
  return f"{'; '.join(parts)}; vocabulary {meta.vocab_size}; left out: {skipped}"


def _arguments(cfg: PrepareConfig, given: Tokenizer | None) -> dict:
  """What decides the content; equal arguments need no second run."""
  return {
    "sources": [os.path.abspath(source) for source in cfg.sources or default_sources()],
    "tokenizer": given.fingerprint if given else "trained",
    "vocab_size": given.vocab_size if given else cfg.vocab_size,
    "heldout": cfg.heldout,
    "max_bytes": cfg.max_bytes,
    "suffixes": list(cfg.suffixes),
    "seed": cfg.seed,
    "document_bytes": cfg.document_bytes,
  }


def _finished(out: str, arguments: dict) -> records.Meta | None:
  """The description of a folder made with these arguments; None if there is none yet."""
  if not os.path.exists(os.path.join(out, records.META_FILE)):
    return None
  meta = records.read_meta(out)
  for name, now in arguments.items():
    before = meta.arguments.get(name)
    if before != now:
      raise UserError(
        f"{out} was prepared with {name} {before}, now it is {now}; choose another --out or add --overwrite"
      )
  return meta


def _check_replaceable(out: str) -> None:
  """Refuses to replace anything but a data folder."""
  holds_other = os.path.isdir(out) and os.listdir(out) and records.META_FILE not in os.listdir(out)
  if holds_other or os.path.isfile(out):
    raise UserError(f"--out {out} exists and is no data folder; name a new or empty folder")


def _move_into_place(partial: str, out: str) -> None:
  """Renames, so that at every moment `out` is a whole folder or none."""
  if not os.path.isdir(out):
    os.rename(partial, out)
    return
  old = f"{out}.old"
  shutil.rmtree(old, ignore_errors=True)
  os.rename(out, old)
  os.rename(partial, out)
  shutil.rmtree(old)


def _build(
  cfg: PrepareConfig, arguments: dict, given: Tokenizer | None, folder: str, report: Callable[[str], None]
) -> records.Meta:
  """Writes everything into `folder`, meta.json last."""
  found = collect(arguments["sources"], cfg.suffixes, cfg.seed)
  files = limit_bytes(found.files, cfg.max_bytes)
  if left_out := len(found.files) - len(files):
    found.skipped["over max_bytes"] = left_out
  train, heldout = split_heldout(files, cfg.heldout)
  report(
    f"found {len(files)} files, {sum(file.size for file in files) / 1e6:.2f} MB; {len(heldout)} held out"
  )

  tokenizer = given or _train(cfg, train, folder, report)
  name = "tokenizer.json" if tokenizer.path.endswith(".json") else "tokenizer.model"
  if given:
    shutil.copyfile(given.path, os.path.join(folder, name))
  np.save(os.path.join(folder, records.TOKEN_BYTES_FILE), tokenizer.token_lengths)

  sides = {
    split: _write_split(os.path.join(folder, split), files, tokenizer, cfg.document_bytes, split)
    for split, files in (("train", train), ("heldout", heldout))
  }
  meta = records.Meta(
    format_version=records.FORMAT_VERSION,
    arguments=arguments,
    tokenizer_file=name,
    tokenizer_fingerprint=tokenizer.fingerprint,
    vocab_size=tokenizer.vocab_size,
    eos_id=tokenizer.eos_id,
    skipped=dict(found.skipped),
    **sides,
  )
  records.write_meta(folder, meta)
  return meta


def _train(
  cfg: PrepareConfig, files: Sequence[SourceFile], folder: str, report: Callable[[str], None]
) -> Tokenizer:
  """A tokeniser trained on the training files alone, read in their random order."""
  report(f"training a tokenizer of {cfg.vocab_size} ids")
  texts = (piece.text for piece in _pieces(files, cfg.document_bytes))
  return train_tokenizer(texts, cfg.vocab_size, os.path.join(folder, "tokenizer.model"))


def _pieces(files: Sequence[SourceFile], document_bytes: int) -> Iterator[Piece]:
  for file in files:
    yield from read_pieces(file, document_bytes)


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
  group: list[Piece] = []
  size = 0
  for piece in pieces:
    group.append(piece)
    size += piece.size
    if size >= _GROUP_BYTES:
      yield group
      group, size = [], 0
  if group:
    yield group


def _write_split(
  folder: str, files: Sequence[SourceFile], tokenizer: Tokenizer, document_bytes: int, name: str
) -> records.SplitMeta:
  """Tokenises the files; <|endoftext|> follows the last token of each file, and nothing else."""
  writer = records.SplitWriter(folder)
  total = sum(file.size for file in files)
  # disable=None: no bar where the output is no terminal.
  with tqdm(total=total, desc=f"tokenising {name}", unit="B", unit_scale=True, disable=None) as bar:
    for group in _groups(_pieces(files, document_bytes)):
      for piece, ids in zip(group, tokenizer.encode_many([piece.text for piece in group]), strict=True):
        tokens = np.array([*ids, tokenizer.eos_id] if piece.last else ids, dtype=np.int32)
        writer.write(records.Record(tokens, piece.size, piece.path, piece.last))
        bar.update(piece.size)
  return writer.close()
