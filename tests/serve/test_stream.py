"""Text as it comes: whole characters, rows in order, nothing lost."""

import pytest

from glm5_jax.serve.sampling import Sampling
from glm5_jax.serve.stream import Meter, continue_texts, stream_text
from glm5_jax.text.tokenizer import train_tokenizer

STOP = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
  return train_tokenizer(["some plain words, said again and again\n"] * 40, 310, path)


class Scripted:
  """Says what it is told to, one id a row at a time."""

  stop_ids = (STOP,)

  def __init__(self, rows):
    self.rows = rows

  def stream(self, prompts, max_new_tokens, sampling, seed):
    assert len(prompts) == len(self.rows)
    for i in range(max(map(len, self.rows))):
      yield [row[i : i + 1] for row in self.rows]


def pieces(tokenizer, rows, count, meter=None):
  prompts = [[1]] * len(rows)
  return list(stream_text(Scripted(rows), tokenizer, prompts, count, Sampling(), meter=meter))


def test_characters_of_several_bytes_come_whole(tokenizer):
  ids = tokenizer.encode("é日本🙂!")
  assert len(ids) > 8  # spelt in bytes
  texts = [text for _, text in pieces(tokenizer, [ids], len(ids))]
  assert texts == ["é", "日", "本", "🙂", "!"]


def test_a_character_cut_off_by_the_limit_is_marked(tokenizer):
  ids = tokenizer.encode("a日")[:2]
  assert pieces(tokenizer, [ids], 2) == [(0, "a"), (0, "\ufffd")]


def test_rows_come_in_order_and_live_once_it_is_their_turn(tokenizer):
  ids = [tokenizer.encode(word) for word in ("aaaa", "b", "xyxyxyxy")]
  rows = [ids[0] + [STOP], ids[1] + [STOP], ids[2]]
  assert len(ids[0]) < len(ids[2])
  out = pieces(tokenizer, rows, len(ids[2]))
  assert [row for row, _ in out] == sorted(row for row, _ in out)
  for row, word in enumerate(("aaaa", "b", "xyxyxyxy")):
    assert "".join(text for i, text in out if i == row) == word  # the stop is no text
  assert sum(row == 2 for row, _ in out) > 1


def test_a_row_that_says_nothing_still_shows_its_prompt(tokenizer):
  a = tokenizer.encode("a")
  said = continue_texts(Scripted([[STOP], a, [STOP]]), tokenizer, ["p", "q", "r"], 1, Sampling())
  assert "".join(said) == "--- 1 of 3\np\n\n--- 2 of 3\nqa\n\n--- 3 of 3\nr\n"
  assert "".join(continue_texts(Scripted([a]), tokenizer, ["p"], 1, Sampling())) == "pa\n"


def test_meter_counts_tokens_and_waits_for_compilation(tokenizer, monkeypatch):
  times = iter([0.0, 8.0, 9.0, 9.5, 10.0])
  monkeypatch.setattr("time.perf_counter", lambda: next(times))
  meter = Meter()
  ids = tokenizer.encode("xyxy")
  rows = [(ids * 4)[:4], [*ids[:2], STOP]]
  pieces(tokenizer, rows, 4, meter)
  assert (meter.tokens, meter.seconds, meter.tokens_per_s) == (7, 10.0, 3.0)
  assert str(meter) == "7 tokens in 10.0 s, 3 tokens/s once compiled"
