"""Text as it is generated: whole characters, rows in order, and how fast it came."""

import time
from collections.abc import Iterator, Sequence

from glm5_jax.serve.generate import Generator
from glm5_jax.serve.sampling import Sampling
from glm5_jax.text.tokenizer import StreamDecoder, Tokenizer


class Meter:
  """Counts tokens as they come. Its rate leaves out the first two arrivals, which may wait for a compiler."""

  def __init__(self) -> None:
    self.tokens = 0
    self._start = time.perf_counter()
    self._arrivals: list[tuple[float, int]] = []  # seconds since the start, tokens so far

  def add(self, tokens: int) -> None:
    self.tokens += tokens
    self._arrivals.append((time.perf_counter() - self._start, self.tokens))

  @property
  def seconds(self) -> float:
    """From the start to the last arrival."""
    return self._arrivals[-1][0] if self._arrivals else 0.0

  @property
  def tokens_per_s(self) -> float | None:
    """After the second arrival; None if there was none after it."""
    if len(self._arrivals) < 3:
      return None
    (begin, before), (end, after) = self._arrivals[1], self._arrivals[-1]
    return (after - before) / max(end - begin, 1e-9)

  def __str__(self) -> str:
    text = f"{self.tokens} tokens in {self.seconds:.1f} s"
    return text if self.tokens_per_s is None else f"{text}, {self.tokens_per_s:.0f} tokens/s once compiled"


def stream_text(
  generator: Generator,
  tokenizer: Tokenizer,
  prompts: Sequence[Sequence[int]],
  max_new_tokens: int,
  sampling: Sampling,
  seed: int = 0,
  meter: Meter | None = None,
) -> Iterator[tuple[int, str]]:
  """Yields (row, text that continues it), rows ascending, never part of a UTF-8 character.

  The first unfinished row comes as it is made; rows after it are held back until it has ended. Special
  tokens, the one that stops a row included, are no text.

  Raises:
    UserError: as Generator.stream.
  """
  decoders = [StreamDecoder(tokenizer, skip_special=True) for _ in prompts]
  held = [""] * len(prompts)
  left = [max_new_tokens] * len(prompts)
  row = 0
  for new in generator.stream(prompts, max_new_tokens, sampling, seed):
    if meter:
      meter.add(sum(map(len, new)))
    for i, ids in enumerate(new):
      if not ids:
        continue
      held[i] += "".join(map(decoders[i].push, ids))
      left[i] = 0 if ids[-1] in generator.stop_ids else left[i] - len(ids)
      if not left[i]:
        held[i] += decoders[i].finish()
    while row < len(prompts):
      if held[row]:
        yield row, held[row]
        held[row] = ""
      if left[row]:
        break
      row += 1


def continue_texts(
  generator: Generator,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  max_new_tokens: int,
  sampling: Sampling,
  seed: int = 0,
  meter: Meter | None = None,
) -> Iterator[str]:
  """Yields what to print piece by piece: each prompt and its continuation, with headings between several.

  Names of special tokens in a prompt are ordinary characters. Raises UserError as Generator.stream.
  """
  begun = -1
  ids = tokenizer.encode_many(prompts)
  for row, text in stream_text(generator, tokenizer, ids, max_new_tokens, sampling, seed, meter):
    if row != begun:
      yield from (_opening(prompts, i) for i in range(begun + 1, row + 1))
      begun = row
    yield text
  yield from (_opening(prompts, i) for i in range(begun + 1, len(prompts)))
  yield "\n"


def _opening(prompts: Sequence[str], row: int) -> str:
  """What stands before a row's continuation; rows that have none still show their prompt."""
  if len(prompts) == 1:
    return prompts[row]
  gap = "\n\n" if row else ""
  return f"{gap}--- {row + 1} of {len(prompts)}\n{prompts[row]}"
