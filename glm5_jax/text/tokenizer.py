"""One small tokeniser class over sentencepiece `.model` files and Hugging Face `tokenizer.json` files.

Decoding works on bytes: every id stands for a fixed byte string, a text is their concatenation. Hence
`decode` is exact, bits per byte can be counted token by token, and streaming needs no library state.
"""

import codecs
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import sentencepiece
import tokenizers

from glm5_jax.errors import UserError
from glm5_jax.text.specials import END_OF_TEXT, SPECIAL_TOKENS

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")  # names looked for in a folder, in this order

_SPACE_MARK = "\u2581"  # sentencepiece writes a space like this inside its pieces
_REPLACEMENT = "\ufffd".encode()
_ROUND_TRIP_PROBES = ("Ab", " a  b\n\t c\r\n0123 \u00e9\u65e5\U0001f642\u2581<|x|> ")


class _Backend(Protocol):
  """What a library gives: the byte string of every id, the named special ids, and plain encoding."""

  token_bytes: list[bytes]
  specials: dict[str, int]
  identity: str  # everything that decides what `encode` returns; hashed into the fingerprint

  def encode_plain(self, texts: Sequence[str]) -> list[list[int]]: ...


class Tokenizer:
  """Text to ids and back. Build one with `load_tokenizer` or `train_tokenizer`.

  Attributes:
    vocab_size: ids are 0 … vocab_size - 1. A model's own vocabulary may be larger (padded).
    specials: id of every special token by name.
    fingerprint: 16 hexadecimal digits, equal exactly for tokenisers that encode alike.
  """

  def __init__(self, backend: _Backend, path: str):
    self._backend = backend
    self.path = path
    self.specials = dict(backend.specials)
    self.vocab_size = len(backend.token_bytes)
    self.fingerprint = hashlib.sha256(backend.identity.encode()).hexdigest()[:16]
    self._special_ids = frozenset(self.specials.values())
    names = sorted(self.specials, key=len, reverse=True)  # the longest name wins
    self._special_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

  def encode(self, text: str, allow_special: bool = False) -> list[int]:
    """Ids of `text`; nothing is added before or after.

    The name of a special token inside `text` is ordinary characters unless `allow_special` is set, so
    that a document about chat templates cannot end itself or speak as the user.
    """
    if not allow_special or self._special_pattern is None:
      return self.encode_many([text])[0]
    parts = self._special_pattern.split(text)  # odd entries are special names
    ids: list[int] = []
    for i, plain in enumerate(self.encode_many(parts[::2])):
      ids += plain
      ids += [self.specials[name] for name in parts[2 * i + 1 : 2 * i + 2]]
    return ids

  def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, special names as ordinary characters; uses all cores, in stable order.

    Raises:
      UserError: a text holds half a surrogate pair, as broken JSON or command lines do.
    """
    try:
      return self._backend.encode_plain(texts)
    except (TypeError, UnicodeEncodeError) as error:
      broken = [text for text in texts if any("\ud800" <= c <= "\udfff" for c in text)]
      if not broken:
        raise
      raise UserError(
        f"text {broken[0][:40]!a} holds half a surrogate pair, which is no character"
      ) from error

  def bytes_of(self, token: int) -> bytes:
    """The bytes `token` stands for: a special's name; U+FFFD for an id of a padded vocabulary."""
    if token < 0:
      raise ValueError(f"token id {token} is negative")
    return self._backend.token_bytes[token] if token < self.vocab_size else _REPLACEMENT

  def is_special(self, token: int) -> bool:
    return token in self._special_ids

  def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
    """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
    kept = (token for token in ids if not (skip_special and self.is_special(token)))
    return b"".join(self.bytes_of(token) for token in kept).decode("utf-8", errors="replace")

  def id_of(self, name: str) -> int:
    """Id of the special token `name`."""
    if name not in self.specials:
      raise UserError(f"tokenizer {self.path} has no special token {name}; it has {', '.join(self.specials)}")
    return self.specials[name]

  @property
  def eos_id(self) -> int:
    """Id of <|endoftext|>, which stands once after every document."""
    return self.id_of(END_OF_TEXT)

  @property
  def token_lengths(self) -> np.ndarray:
    """Bytes of text each id stands for, int32 [vocab_size]; 0 for special tokens, which are no text."""
    lengths = [len(piece) for piece in self._backend.token_bytes]
    return np.array([0 if i in self._special_ids else n for i, n in enumerate(lengths)], dtype=np.int32)

  def check_fits(self, vocab_size: int, fingerprint: str = "", owner: str = "the model") -> None:
    """Raises UserError unless `owner`, with this many ids and trained on this tokeniser, can use it.

    Args:
      vocab_size: the model's, at least the tokeniser's.
      fingerprint: of the tokeniser the checkpoint was trained with; "" when unknown.
      owner: named in the message.
    """
    if self.vocab_size > vocab_size:
      raise UserError(
        f"tokenizer {self.path} has {self.vocab_size} ids but {owner} has vocab_size {vocab_size}; "
        f"use the tokenizer it was trained with, or set model.vocab_size to at least {self.vocab_size}"
      )
    if fingerprint and fingerprint != self.fingerprint:
      raise UserError(
        f"tokenizer {self.path} has fingerprint {self.fingerprint} but {owner} was trained with "
        f"{fingerprint}; use the tokenizer of that data folder"
      )


class StreamDecoder:
  """Text of ids that arrive one by one; never emits part of a UTF-8 character.

  The concatenation of every `push` and the final `finish` equals `Tokenizer.decode` of all ids.
  """

  def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
    self._tokenizer = tokenizer
    self._skip_special = skip_special
    self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

  def push(self, token: int) -> str:
    """The characters that `token` completes, possibly none."""
    if self._skip_special and self._tokenizer.is_special(token):
      return ""
    return self._utf8.decode(self._tokenizer.bytes_of(token))

  def finish(self) -> str:
    """U+FFFD if the stream ended inside a character, else nothing."""
    return self._utf8.decode(b"", final=True)


class _SentencePiece:
  """A sentencepiece model; control and user-defined symbols are the special tokens."""

  def __init__(self, proto: bytes):
    self._processor = sp = sentencepiece.SentencePieceProcessor(model_proto=proto)
    self.token_bytes = []
    self.specials = {}
    scores = []
    plain_ids = set()
    for i in range(sp.vocab_size()):
      piece = sp.id_to_piece(i)
      if sp.is_byte(i):
        self.token_bytes.append(bytes([int(piece[3:5], 16)]))  # "<0x41>"
      else:
        self.token_bytes.append(piece.replace(_SPACE_MARK, " ").encode())
      if sp.is_control(i) or sp.is_unknown(i) or piece in SPECIAL_TOKENS:
        self.specials[piece] = i
      else:
        plain_ids.add(i)
      scores.append(sp.get_score(i))
    # A literal U+2581 would come back as a space, so it is spelt in bytes.
    self._space_mark_ids = [sp.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
    pieces = [piece.hex() for piece in self.token_bytes]
    self.identity = json.dumps([pieces, scores, sorted(plain_ids)])

  def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
    parts = [text.split(_SPACE_MARK) for text in texts]
    flat = [part for text in parts for part in text]
    encoded = iter(self._processor.encode(flat, num_threads=os.cpu_count() or 1))
    joined = []
    for text in parts:
      ids = list(next(encoded))
      for _ in text[1:]:
        ids += self._space_mark_ids
        ids += next(encoded)
      joined.append(ids)
    return joined


class _HuggingFace:
  """A byte-level BPE `tokenizer.json`, such as GLM's own; its added tokens are the special tokens."""

  def __init__(self, text: str):
    spec = json.loads(text)
    kinds = _types_in(spec.get("decoder"))
    if spec["model"]["type"] != "BPE" or "ByteLevel" not in kinds:
      raise ValueError(
        f"it is {spec['model']['type']} with decoder {kinds}, only byte-level BPE is supported"
      )
    self.specials = {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
    # Without its added tokens the library has nothing to find in plain text, not even those it
    # does not call special; without a post-processor it adds nothing.
    spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    plain = json.dumps(spec, ensure_ascii=False)
    self._tokenizer = tokenizers.Tokenizer.from_str(plain)
    self.identity = json.dumps([spec, self.specials], sort_keys=True)

    by_character = _byte_of_character()
    by_id = {i: piece for piece, i in self._tokenizer.get_vocab(with_added_tokens=False).items()}
    size = 1 + max(itertools.chain(by_id, self.specials.values()))
    self.token_bytes = [_REPLACEMENT] * size  # ids without a token
    for i, piece in by_id.items():
      known = all(character in by_character for character in piece)
      self.token_bytes[i] = bytes(by_character[c] for c in piece) if known else piece.encode()
    for name, i in self.specials.items():
      self.token_bytes[i] = name.encode()

  def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def _types_in(node: Any) -> list[str]:
  """The "type" of a component and of those it is made of."""
  if isinstance(node, dict):
    own = [node["type"]] if isinstance(node.get("type"), str) else []
    return own + [kind for value in node.values() for kind in _types_in(value)]
  return [kind for value in node for kind in _types_in(value)] if isinstance(node, list) else []


def _byte_of_character() -> dict[str, int]:
  """The byte behind each character of byte-level BPE.

  Printable Latin-1 bytes stand for themselves; the others take U+0100, U+0101 … in byte order.
  Source: the byte-level pre-tokeniser of GPT-2.
  """
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
  """Reads a sentencepiece `.model`, a Hugging Face `tokenizer.json`, or a folder that holds one of them.

  Raises:
    UserError: no such file, not a tokeniser, or one that does not give every text back unchanged.
  """
  path = os.fspath(path)
  if os.path.isdir(path):
    found = [name for name in TOKENIZER_FILES if os.path.exists(os.path.join(path, name))]
    if not found:
      raise UserError(f"folder {path} has no tokenizer: it needs {' or '.join(TOKENIZER_FILES)}")
    path = os.path.join(path, found[0])
  try:
    with open(path, "rb") as file:
      content = file.read()
  except OSError as error:
    raise UserError(f"tokenizer file {path} cannot be read: {error.strerror}") from error
  try:
    backend = _HuggingFace(content.decode()) if path.endswith(".json") else _SentencePiece(content)
    tokenizer = Tokenizer(backend, path)
    changed = _first_unfaithful(tokenizer)
  except Exception as error:  # the libraries raise bare Exception and RuntimeError on broken files
    kind = "Hugging Face tokenizer.json" if path.endswith(".json") else "sentencepiece .model"
    raise UserError(f"tokenizer file {path} cannot be read as a {kind}: {_first_line(error)}") from error
  if changed:
    raise UserError(
      f"tokenizer file {path} does not keep text as it is: {changed}; use a byte-level or byte-fallback one "
      "without normalisation, dummy prefix or user-defined symbols, or let launch.prepare train one"
    )
  return tokenizer


def _first_line(error: Exception) -> str:
  return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _first_unfaithful(tokenizer: Tokenizer) -> str:
  """How the tokeniser changes plain text, or ""."""
  for probe in _ROUND_TRIP_PROBES:
    back = tokenizer.decode(tokenizer.encode(probe))
    if back != probe:
      return f"{probe!r} comes back as {back!r}"
  for name, token in tokenizer.specials.items():
    if token in tokenizer.encode(name):
      return f"the plain text {name!r} becomes the special token"
  return ""


def train_tokenizer(
  texts: Iterable[str], vocab_size: int, path: str | os.PathLike, sample_bytes: int = 8 << 20
) -> Tokenizer:
  """Trains byte-fallback BPE that keeps every text as it is, and writes it to `path` (a `.model` file).

  Ids: the special tokens in GLM's order from 0, one unknown id that is never produced, the 256 bytes,
  then merges. Digits stand alone; spaces of an indentation merge. The same texts give the same file.

  Args:
    texts: read until `sample_bytes` of UTF-8 have been seen, so pass them in a mixed order.
    vocab_size: exact number of ids.
    path: overwritten at once at the end.
    sample_bytes: bound of time and memory; 8 MiB take about two seconds.

  Raises:
    UserError: vocab_size is too small for bytes and special tokens, or too large for these texts.
  """
  path = os.fspath(path)
  smallest = len(SPECIAL_TOKENS) + 1 + 256
  if vocab_size <= smallest:
    raise UserError(f"vocab_size {vocab_size} is too small: {smallest} ids are bytes and special tokens")
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=_sample(texts, sample_bytes),
      model_writer=model,
      model_type="bpe",
      vocab_size=vocab_size,
      byte_fallback=True,
      character_coverage=0.9995,  # rarer characters are spelt in bytes
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True,
      split_digits=True,
      control_symbols=list(SPECIAL_TOKENS),
      unk_id=len(SPECIAL_TOKENS),
      bos_id=-1,
      eos_id=-1,
      pad_id=-1,
      num_threads=1,
      minloglevel=2,
    )
  except RuntimeError as error:
    reason = str(error).split("] ")[-1].strip() or "the text is empty"
    raise UserError(
      f"no tokenizer of vocab_size {vocab_size} can be trained on this text: {reason}"
    ) from error
  temporary = f"{path}.partial"
  with open(temporary, "wb") as file:
    file.write(model.getvalue())
  os.replace(temporary, path)
  return load_tokenizer(path)


def _sample(texts: Iterable[str], sample_bytes: int) -> Iterator[str]:
  """The first `sample_bytes` of text, in pieces below the trainer's limit for one sentence."""
  width = 1024  # characters; at most 4096 bytes, the trainer skips longer sentences
  left = sample_bytes
  for text in texts:
    for start in range(0, len(text), width):
      piece = text[start : start + width]
      yield piece
      left -= len(piece.encode())
      if left <= 0:
        return
