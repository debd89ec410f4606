"""Which files are training text, and their text in pieces that fit into memory."""

import codecs
import collections
import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence

from glm5_jax.errors import UserError

DEFAULT_SUFFIXES = (".py", ".txt", ".rst", ".md")
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})

_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """A usable file: UTF-8 without NUL bytes, not empty, and no copy of another."""

  path: str
  size: int  # bytes
  key: int  # 128 bits of sha256(seed, content): places the file, wherever it lies and whatever its name


@dataclasses.dataclass
class Collection:
  """What was found.

  Attributes:
    files: in the order of `key`, a fixed random order.
    skipped: number of files left out, by reason: empty, binary, not UTF-8, unreadable, duplicate.
  """

  files: list[SourceFile]
  skipped: collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class Piece:
  """A document, or a part of one that is too long for one record."""

  path: str
  text: str
  size: int  # bytes
  last: bool  # whether the file ends here, so that <|endoftext|> follows


def default_sources() -> list[str]:
  """The standard library of the running interpreter: real code and prose on every machine."""
  return [sysconfig.get_path("stdlib")]


def collect(sources: Sequence[str], suffixes: Sequence[str] = DEFAULT_SUFFIXES, seed: int = 0) -> Collection:
  """Finds the usable files of folders (or single files). Reads each file once, a block at a time.

  Hidden folders, installed packages and caches are not entered, links to folders not followed.

  Args:
    sources: folders or files.
    suffixes: endings of the file names to take; none takes every file of the folders.
    seed: changes the order and the held-out split.

  Raises:
    UserError: a source does not exist, or no usable file was found.
  """
  for source in sources:
    if not os.path.exists(source):
      raise UserError(f"source {source} does not exist; --sources takes folders or files, comma separated")
  files: dict[int, SourceFile] = {}
  skipped: collections.Counter[str] = collections.Counter()
  for path in _walk(sources, tuple(suffixes)):
    checked = _check(path, seed)
    if isinstance(checked, str):
      skipped[checked] += 1
    elif checked.key in files:
      skipped["duplicate"] += 1
    else:
      files[checked.key] = checked
  if not files:
    wanted = " ".join(suffixes) or "any"
    found = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "no file of that kind"
    raise UserError(f"no text in {', '.join(sources)}: {found} (wanted: UTF-8 files, suffixes {wanted})")
  return Collection([files[key] for key in sorted(files)], skipped)


def _walk(sources: Sequence[str], suffixes: tuple[str, ...]) -> Iterator[str]:
  """Paths in a fixed order, so that the first of several equal files is always the same."""
  for source in sources:
    if os.path.isfile(source):
      yield source
    for folder, subfolders, names in os.walk(source):
      subfolders[:] = sorted(n for n in subfolders if n not in SKIPPED_FOLDERS and not n.startswith("."))
      for name in sorted(names):
        if not suffixes or name.endswith(suffixes):
          yield os.path.join(folder, name)


def _check(path: str, seed: int) -> SourceFile | str:
  """The file, or the reason why it is not usable."""
  digest = hashlib.sha256(f"{seed}:".encode())
  utf8 = codecs.getincrementaldecoder("utf-8")()
  size = 0
  try:
    if not os.path.isfile(path):  # a broken link, a pipe, a device
      return "unreadable"
    with open(path, "rb") as file:
      while block := file.read(_BLOCK):
        if b"\0" in block:
          return "binary"
        utf8.decode(block)
        digest.update(block)
        size += len(block)
    utf8.decode(b"", final=True)
  except UnicodeDecodeError:
    return "not UTF-8"
  except OSError:
    return "unreadable"
  return SourceFile(path, size, int.from_bytes(digest.digest()[:16])) if size else "empty"


def limit_bytes(files: Sequence[SourceFile], max_bytes: int) -> list[SourceFile]:
  """Whole files in order until one no longer fits into `max_bytes` (too large first ones are passed over).

  0 keeps all.
  """
  if max_bytes == 0:
    return list(files)
  kept, total = [], 0
  for file in files:
    if total + file.size <= max_bytes:
      kept.append(file)
      total += file.size
    elif kept:
      break
  if not kept:
    smallest = min(file.size for file in files)
    raise UserError(f"max_bytes {max_bytes} is less than every file; the smallest has {smallest} bytes")
  return kept


def split_heldout(files: Sequence[SourceFile], fraction: float) -> tuple[list[SourceFile], list[SourceFile]]:
  """(train, heldout): whole files, about `fraction` of them held out by their content's hash.

  A file stays on its side when others come or go. At least one file stands on each side unless
  `fraction` is 0.
  """
  if not 0 <= fraction < 1:
    raise UserError(f"heldout {fraction} is not a fraction; use 0 <= heldout < 1, such as 0.02")
  if fraction == 0:
    return list(files), []
  if len(files) < 2:
    raise UserError(f"heldout {fraction} needs at least 2 files, one is held out; found {len(files)}")
  # The low bits, since the high ones give the order.
  draw = {file.key: (file.key % 2**64) / 2**64 for file in files}
  heldout = {key for key, value in draw.items() if value < fraction} or {min(draw, key=draw.__getitem__)}
  if len(heldout) == len(files):
    heldout.remove(max(heldout, key=draw.__getitem__))
  train = [file for file in files if file.key not in heldout]
  return train, [file for file in files if file.key in heldout]


def read_pieces(file: SourceFile, max_bytes: int = _BLOCK) -> Iterator[Piece]:
  """The file's text in pieces of at most `max_bytes`, never more of it in memory.

  A piece ends after the last line end that fits; a single longer line is cut between characters. The
  pieces joined are the file, byte for byte.

  Args:
    max_bytes: at least 4, the longest UTF-8 character.
  """
  with open(file.path, "rb") as source:
    kept = b""
    while True:
      block = kept + source.read(max_bytes + 1 - len(kept))
      if len(block) <= max_bytes:
        yield Piece(file.path, block.decode(), len(block), last=True)
        return
      cut = block.rfind(b"\n", 0, max_bytes) + 1 or _character_start(block, max_bytes)
      yield Piece(file.path, block[:cut].decode(), cut, last=False)
      kept = block[cut:]


def _character_start(block: bytes, cut: int) -> int:
  """The last place at or before `cut` where a UTF-8 character begins."""
  while block[cut] & 0xC0 == 0x80:  # a continuation byte
    cut -= 1
  return cut
