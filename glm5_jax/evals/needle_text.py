"""Prompts that hide numbers under keys in a long text and ask for some of them at its end.

The idea is that of RULER (Hsieh et al., 2024, section 3): several keys, values and queries. Words and
code are our own. Every piece of text is encoded by itself, so that a number has the same ids where it is
hidden and where it is asked for, whatever the tokeniser does with digits and spaces.
"""

from collections.abc import Callable, Iterable

import numpy as np

from glm5_jax.data.records import decode_record, read_meta, record_source
from glm5_jax.errors import UserError
from glm5_jax.evals.context import NeedleLimits
from glm5_jax.text.tokenizer import Tokenizer

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
KEY_SYLLABLES, WORD_SYLLABLES = 4, 2  # a key is no word of the filler
DIGITS = 7
FILLER_WORDS = 200

Ids = list[int]
Haystack = Callable[[np.random.Generator, int], np.ndarray]  # (random, tokens) → int32 [tokens] of text


def make_rows(
  spec: NeedleLimits, length: int, haystack: Haystack, tokenizer: Tokenizer, seed: int
) -> tuple[np.ndarray, np.ndarray]:
  """`spec.prompts` prompts with their answers, of exactly `length` tokens.

  A prompt depends on the seed and its number alone: more prompts keep the first ones.

  Returns:
    tokens int32 [P, length] and asked int32 [P, length]: the number of the question, 1, 2, …, where the
    *next* token is part of a value that answers it, else 0.

  Raises:
    UserError: `length` has no room for what is hidden and asked.
  """
  rows = [
    _make_row(np.random.default_rng([seed, number]), spec, length, haystack, tokenizer)
    for number in range(spec.prompts)
  ]
  tokens, asked = (np.stack(part) for part in zip(*rows, strict=True))
  return tokens, asked


def _make_row(rng, spec: NeedleLimits, length: int, haystack: Haystack, tokenizer: Tokenizer):
  encode = tokenizer.encode
  keys = _distinct(lambda: _word(rng, KEY_SYLLABLES), spec.keys)
  values = _distinct(lambda: str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS)), spec.keys * spec.values)
  hidden = [(keys[i % spec.keys], value) for i, value in enumerate(values)]
  hidden = [hidden[i] for i in rng.permutation(len(hidden))]
  asked_keys = [keys[i] for i in rng.permutation(spec.keys)[: spec.queries]]

  needles = [
    [*encode("\nA number of"), *encode(f" {key}"), *encode(" is"), *encode(f" {value}"), *encode(".\n")]
    for key, value in hidden
  ]
  end: Ids = encode("\nEach key with its numbers, in the order of the text above:")
  answer_of: Ids = [0] * len(end)  # beside each id, the question that it answers
  for question, key in enumerate(asked_keys, start=1):
    for i, value in enumerate(value for other, value in hidden if other == key):
      given = encode(",") if i else [*encode("\nThe numbers of"), *encode(f" {key}"), *encode(" are")]
      answer = encode(f" {value}")
      end += [*given, *answer]
      answer_of += [0] * len(given) + [question] * len(answer)

  fixed = len(end) + sum(map(len, needles))
  room = length - fixed
  if room < len(needles):
    raise UserError(
      f"a needle length of {length} is too short: {len(needles)} needles, {spec.queries} questions and their "
      f"answers take {fixed} tokens; set --needle_lengths to at least {fixed + len(needles)}, or hide fewer"
    )
  pieces = np.split(haystack(rng, room), np.sort(rng.choice(room, len(needles), replace=False)))
  text: list[Iterable[int]] = [pieces[0]]
  for needle, piece in zip(needles, pieces[1:], strict=True):
    text += [needle, piece]
  tokens = np.concatenate([np.asarray(part, np.int32) for part in [*text, end]])
  asked = np.zeros(length, np.int32)
  asked[length - len(end) - 1 : -1] = answer_of  # a token is predicted from the one before it
  return tokens, asked


def heldout_text(folder: str, tokenizer: Tokenizer) -> Haystack:
  """Held-out documents of a data folder in random order, without special tokens; again if they are few.

  Raises:
    UserError: they hold no text.
  """
  source = record_source(folder, read_meta(folder), "heldout")
  specials = np.array(sorted(tokenizer.specials.values()), np.int32)

  def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    parts: list[np.ndarray] = []
    while count > 0:
      before = count
      for i in rng.permutation(len(source)):
        ids = decode_record(source[int(i)]).tokens
        parts.append(ids[~np.isin(ids, specials)][:count].astype(np.int32))
        count -= parts[-1].size
        if not count:
          break
      if count == before:
        raise UserError(f"the held-out documents of {folder} hold no text to hide needles in")
    return np.concatenate(parts)

  return draw


def filler_text(tokenizer: Tokenizer) -> Haystack:
  """Sentences of made-up words, for a model without a data folder."""

  def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    words = _distinct(lambda: _word(rng, WORD_SYLLABLES), FILLER_WORDS)
    ids: Ids = []
    while len(ids) < count:
      sentence = " ".join(words[i] for i in rng.integers(len(words), size=12))
      ids += tokenizer.encode(f" {sentence}.")
    return np.array(ids[:count], np.int32)

  return draw


def _word(rng: np.random.Generator, syllables: int) -> str:
  pick = lambda letters: letters[rng.integers(len(letters))]  # noqa: E731
  return "".join(pick(CONSONANTS) + pick(VOWELS) for _ in range(syllables))


def _distinct(draw: Callable[[], str], count: int) -> list[str]:
  found: dict[str, None] = {}
  while len(found) < count:
    found[draw()] = None
  return list(found)
