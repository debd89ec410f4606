import json
import string

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.errors import UserError
from glm5_jax.text.specials import SPECIAL_TOKENS
from glm5_jax.text.tokenizer import StreamDecoder, load_tokenizer, train_tokenizer

CORPUS = [
  "def area(width, height):\n    if width < 0:\n\t\treturn None\n    return width * height  # 3.14159\n",
  "The quick brown fox jumps over the lazy dog; 1234567890 times.\r\n\r\nÉté, naïve, 日本語, 🙂.\n",
  string.printable,
] * 3
AWKWARD = [
  "",
  " ",
  "  \n\t  x",
  "a\u2581b\u2581",  # the mark that sentencepiece uses for a space
  "\u2585\u2047\ufffd\ufeff",
  "\0\x01\x7f",
  "<unk><0x41><s>",
  "\r\r\n\n\u2028\u0085",
  "e\u0301\u00e9 ﬁ Ａ",  # composed, decomposed, compatibility forms: a normaliser would merge them
  "🙂👩‍👩‍👧 日本語\U0010ffff",
]


def byte_level_json(folder):
  """A tokenizer.json like GLM's: byte-level BPE, added tokens of which only some are called special."""
  library = tokenizers.Tokenizer(tokenizers.models.BPE())
  library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = tokenizers.decoders.ByteLevel()
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
  library.train_from_iterator(CORPUS, trainer)
  for name in SPECIAL_TOKENS:
    library.add_tokens([tokenizers.AddedToken(name, special=name.startswith("<|"), normalized=False)])
  path = folder / "tokenizer.json"
  library.save(str(path))
  return path


@pytest.fixture(scope="module", params=["sentencepiece", "huggingface"])
def tokenizer(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  if request.param == "sentencepiece":
    return train_tokenizer(CORPUS, 420, folder / "tokenizer.model")
  return load_tokenizer(byte_level_json(folder))


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back_unchanged(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_unchanged(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.token_lengths[ids].sum() == len(text.encode())  # [] indexes as well


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(alphabet=" \u2581ab\n🙂"), max_size=6))
def test_many_at_once_equal_one_by_one(tokenizer, texts):
  assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]


def test_half_a_surrogate_pair_is_one_clear_line(tokenizer):
  with pytest.raises(UserError, match="half a surrogate pair"):
    tokenizer.encode("a \ud83d b")


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_special_names_in_plain_text_stay_text(tokenizer, name):
  text = f"a{name}{name} b"
  ids = tokenizer.encode(text)
  assert not any(tokenizer.is_special(token) for token in ids)
  assert tokenizer.decode(ids, skip_special=True) == text


def test_allowed_special_names_become_their_ids(tokenizer):
  text = "[gMASK]<sop><|user|>hi </think>\u2581<|endoftext|>"
  ids = tokenizer.encode(text, allow_special=True)
  found = [token for token in ids if tokenizer.is_special(token)]
  names = ["[gMASK]", "<sop>", "<|user|>", "</think>", "<|endoftext|>"]
  assert found == [tokenizer.id_of(name) for name in names]
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(ids, skip_special=True) == "hi \u2581"


def test_special_tokens_have_no_bytes_of_text(tokenizer):
  assert tokenizer.token_lengths[[tokenizer.id_of(name) for name in SPECIAL_TOKENS]].sum() == 0
  assert tokenizer.token_lengths.shape == (tokenizer.vocab_size,)
  assert tokenizer.token_lengths.dtype == np.int32


def test_special_ids_follow_glm_order(tokenizer):
  ids = [tokenizer.id_of(name) for name in SPECIAL_TOKENS]
  assert ids == list(range(ids[0], ids[0] + 36))
  assert tokenizer.eos_id == ids[0]


def test_trained_tokenizer_begins_with_end_of_text(tmp_path):
  assert train_tokenizer(CORPUS, 420, tmp_path / "t.model").eos_id == 0


def test_unknown_special_is_named(tokenizer):
  with pytest.raises(UserError, match=r"no special token <\|nobody\|>"):
    tokenizer.id_of("<|nobody|>")


def test_id_of_a_padded_vocabulary_decodes_to_the_replacement_character(tokenizer):
  assert tokenizer.decode([tokenizer.vocab_size + 5]) == "\ufffd"
  with pytest.raises(ValueError, match="negative"):
    tokenizer.decode([-1])


def test_emoji_split_over_tokens_comes_out_whole(tokenizer):
  ids = tokenizer.encode("a🦊b")
  assert len(ids) >= 4  # the emoji is spelt in several tokens
  stream = StreamDecoder(tokenizer)
  pieces = [stream.push(token) for token in ids]
  assert [piece for piece in pieces if piece] == ["a", "🦊", "b"]
  assert stream.finish() == ""


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stream_equals_decode_for_any_ids(tokenizer, data):
  ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
  for skip in (False, True):
    stream = StreamDecoder(tokenizer, skip_special=skip)
    text = "".join(stream.push(token) for token in ids) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="ab é日🙂\n"))
def test_stream_never_emits_half_a_character(tokenizer, text):
  stream = StreamDecoder(tokenizer)
  seen = ""
  for token in tokenizer.encode(text):
    seen += stream.push(token)
    assert text.startswith(seen)
  assert seen == text


def test_stream_that_ends_inside_a_character_says_so(tokenizer):
  stream = StreamDecoder(tokenizer)
  assert "".join(stream.push(token) for token in tokenizer.encode("🦊")[:-1]) == ""
  assert stream.finish() == "\ufffd"


def test_training_is_deterministic_and_bounded(tmp_path):
  first = train_tokenizer(CORPUS, 420, tmp_path / "a.model")
  again = train_tokenizer(iter(CORPUS), 420, tmp_path / "b.model")
  assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
  assert first.fingerprint == again.fingerprint
  assert train_tokenizer(CORPUS, 421, tmp_path / "c.model").fingerprint != first.fingerprint

  def endless():
    while True:
      yield from CORPUS

  assert train_tokenizer(endless(), 420, tmp_path / "d.model", sample_bytes=5000).vocab_size == 420


def test_indentation_merges_and_digits_stand_alone(tmp_path):
  tokenizer = train_tokenizer(["def f():\n" + "    return 12345\n" * 50], 320, tmp_path / "t.model")
  assert len(tokenizer.encode("    ")) == 1
  assert len(tokenizer.encode("12345")) == 5


@pytest.mark.parametrize(
  ("vocab_size", "message"), [(100, "too small: 293"), (300, "no tokenizer"), (50_000, "too high")]
)
def test_impossible_vocabulary_size_is_one_clear_line(tmp_path, vocab_size, message):
  with pytest.raises(UserError, match=message) as error:
    train_tokenizer(CORPUS, vocab_size, tmp_path / "t.model")
  assert "\n" not in str(error.value)
  assert not list(tmp_path.iterdir())


def test_no_text_is_one_clear_line(tmp_path):
  with pytest.raises(UserError, match="no tokenizer of vocab_size 420"):
    train_tokenizer([], 420, tmp_path / "t.model")


def test_fits_only_its_own_model(tokenizer):
  tokenizer.check_fits(tokenizer.vocab_size + 24, tokenizer.fingerprint)
  with pytest.raises(UserError, match=f"has {tokenizer.vocab_size} ids but checkpoint x has vocab_size 100"):
    tokenizer.check_fits(100, owner="checkpoint x")
  with pytest.raises(UserError, match="trained with 0123456789abcdef"):
    tokenizer.check_fits(tokenizer.vocab_size, "0123456789abcdef")


def test_loads_from_its_folder_with_the_same_fingerprint(tokenizer):
  again = load_tokenizer(tokenizer.path.rpartition("/")[0])
  assert again.fingerprint == tokenizer.fingerprint
  assert again.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("t.model", b"not a model", "cannot be read as a sentencepiece"),
    ("t.model", b"", "cannot be read as a sentencepiece"),
    ("t.json", b"{", "cannot be read as a Hugging Face"),
    ("t.json", b"\xff\xfe", "cannot be read as a Hugging Face"),
    ("t.json", b"[]", "cannot be read as a Hugging Face"),
    ("t.json", b'{"model": {"type": "Unigram"}}', "only byte-level BPE"),
  ],
)
def test_broken_file_is_one_clear_line(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=message) as error:
    load_tokenizer(tmp_path / name)
  assert "\n" not in str(error.value)


def test_missing_file_or_folder_content_is_named(tmp_path):
  with pytest.raises(UserError, match="cannot be read: No such file"):
    load_tokenizer(tmp_path / "absent.model")
  with pytest.raises(UserError, match=r"needs tokenizer.model or tokenizer.json"):
    load_tokenizer(tmp_path)


def test_tokenizer_that_changes_text_is_refused(tmp_path):
  (tmp_path / "text").write_text("".join(CORPUS))
  sentencepiece.SentencePieceTrainer.train(
    input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=400, model_type="bpe",
    byte_fallback=True, minloglevel=2,
  )  # fmt: skip
  with pytest.raises(UserError, match="does not keep text as it is"):
    load_tokenizer(tmp_path / "m.model")

  spec = json.loads(byte_level_json(tmp_path).read_text())
  prefix = {**spec["pre_tokenizer"], "add_prefix_space": True}
  for change in ({"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": prefix}):
    (tmp_path / "changed.json").write_text(json.dumps(spec | change))
    with pytest.raises(UserError, match="does not keep text as it is"):
      load_tokenizer(tmp_path / "changed.json")
