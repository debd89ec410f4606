"""Needles: what is hidden and asked, which predictions count, and scores on every mesh and in both modes."""

import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import evals
from glm5_jax.data.records import read_records
from glm5_jax.errors import UserError
from glm5_jax.evals import needle
from glm5_jax.evals.context import NeedleLimits
from glm5_jax.evals.needle_text import DIGITS, filler_text, heldout_text, make_rows
from glm5_jax.model import forward
from glm5_jax.serve.generate import Generator
from glm5_jax.serve.load import open_model
from glm5_jax.serve.sampling import Sampling
from glm5_jax.text.tokenizer import load_tokenizer, train_tokenizer
from tests.evals import runs
from tests.model import toy

SPEC = NeedleLimits(prompts=3, keys=3, values=2, queries=2)
LENGTH = 768


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  return runs.make_data(tmp_path_factory.mktemp("needle") / "data")


@pytest.fixture(scope="module")
def tokenizer(data):
  return load_tokenizer(data)


@pytest.fixture(scope="module")
def context(data):
  return evals.open_context(open_model(runs.make_run(data.parent / "run", data)))


@pytest.fixture(scope="module")
def without_digits(tmp_path_factory):
  """Byte-fallback ids of a tokeniser that never saw a digit."""
  return train_tokenizer(
    ["only words, none of them numbers. " * 9], 312, tmp_path_factory.mktemp("t") / "t.model"
  )


def shares(cfg, tokens, asked, queries, params=None):
  return needle.retrieved(params or toy.params(cfg), cfg, tokens, asked, queries, rows=2)


def check_prompt(text: str, answers: list[str], spec: NeedleLimits) -> None:
  """Against a reader of plain text: each key's numbers, in order, stand in the text as often as asked."""
  body, question = text.split("\nEach key with its numbers, in the order of the text above:")
  hidden = re.findall(rf"\nA number of (\w+) is (\d{{{DIGITS}}})\.\n", body)
  assert len(hidden) == len({number for _, number in hidden}) == spec.keys * spec.values
  assert len({key for key, _ in hidden}) == spec.keys
  assert all(body.count(key) == spec.values for key, _ in hidden)
  asked = re.findall(r"\nThe numbers of (\w+) are([ \d,]+)", question)
  assert len({key for key, _ in asked}) == len(asked) == spec.queries
  for (key, numbers), answer in zip(asked, answers, strict=True):
    assert numbers == ",".join(f" {number}" for other, number in hidden if other == key)
    assert numbers.replace(",", "") == answer
  assert question == "".join(f"\nThe numbers of {key} are{numbers}" for key, numbers in asked)


@pytest.mark.parametrize("values, queries", [(1, 1), (2, 2), (1, 3), (3, 1)])
def test_needles_are_in_the_prompt_exactly_as_asked(data, tokenizer, values, queries):
  spec = dataclasses.replace(SPEC, values=values, queries=queries)
  tokens, asked = make_rows(spec, LENGTH, heldout_text(str(data), tokenizer), tokenizer, seed=5)
  assert tokens.shape == asked.shape == (3, LENGTH) and tokens.dtype == asked.dtype == np.int32
  for row, questions in zip(tokens, asked, strict=True):
    scored = [row[1:][questions[:-1] == q] for q in range(1, queries + 1)]
    check_prompt(tokenizer.decode(row), [tokenizer.decode(ids) for ids in scored], spec)
    assert questions.max() == queries and questions[-1] == 0


def test_any_tokenizer_and_filler_words(without_digits):
  tokens, asked = make_rows(SPEC, LENGTH, filler_text(without_digits), without_digits, seed=1)
  for row, questions in zip(tokens, asked, strict=True):
    answers = [without_digits.decode(row[1:][questions[:-1] == q]) for q in (1, 2)]
    check_prompt(without_digits.decode(row), answers, SPEC)
  assert (np.unique(asked[asked > 0], return_counts=True)[1] >= 2 * 2 * DIGITS).all()


def test_prompts_depend_on_the_seed_and_their_number_alone(data, tokenizer):
  def rows(seed=0, **changes):
    return make_rows(
      dataclasses.replace(SPEC, **changes), LENGTH, heldout_text(str(data), tokenizer), tokenizer, seed
    )

  tokens, asked = rows()
  for left, right in zip(rows(prompts=5), (tokens, asked), strict=True):
    np.testing.assert_array_equal(left[:3], right)
  assert not (rows(seed=1)[0] == tokens).all(axis=1).any()
  assert len(np.unique(tokens, axis=0)) == 3


def test_the_text_is_held_out_text(data, tokenizer):
  """Without specials; a few documents serve again for a long one."""
  text = heldout_text(str(data), tokenizer)(np.random.default_rng(0), 50_000)
  assert text.size == 50_000 and not np.isin(text, list(tokenizer.specials.values())).any()
  documents = [tokenizer.decode(r.tokens, skip_special=True) for r in read_records(str(data), "heldout")]
  head = tokenizer.decode(text[:40])
  assert any(document.startswith(head) or head.startswith(document) for document in documents)


class Oracle:
  """In place of the model: its logits are those of one token, certainly."""

  def __init__(self, vocabulary: int, ahead: int = 0):
    self.vocabulary, self.ahead = vocabulary, ahead

  def places_on(self, params, cfg, tokens_BT):
    """The token that stands so many places on."""
    return self._certain(jnp.roll(tokens_BT, -self.ahead, axis=1))

  def one_more(self, params, cfg, tokens_BT):
    """One more than the token itself."""
    return self._certain((tokens_BT + 1) % self.vocabulary)

  def _certain(self, ids_BT):
    return types.SimpleNamespace(hidden_BTD=jax.nn.one_hot(ids_BT, self.vocabulary))


@pytest.mark.parametrize("ahead, expected", [(1, 1.0), (0, 0.0), (2, 0.0)])
def test_an_oracle_scores_one_and_one_that_is_a_place_off_none(data, tokenizer, monkeypatch, ahead, expected):
  monkeypatch.setattr(needle, "forward", Oracle(runs.VOCABULARY, ahead).places_on)
  monkeypatch.setattr(needle, "head_of", lambda params, cfg: jnp.eye(runs.VOCABULARY))
  cfg = runs.config(rope_theta=1e5 + ahead)  # not traced by another test
  tokens, asked = make_rows(SPEC, LENGTH, heldout_text(str(data), tokenizer), tokenizer, seed=0)
  exact, token = shares(cfg, tokens, asked, SPEC.queries, params={"none": jnp.zeros(1)})
  assert exact.tolist() == [expected] * 3
  assert (token == 1).all() if expected else (token < 0.5).all()


def test_one_wrong_token_costs_its_question_alone(monkeypatch):
  """Counted by hand: question 1 has three tokens of which one is wrong, question 2 two right ones."""
  monkeypatch.setattr(needle, "forward", Oracle(8).one_more)
  monkeypatch.setattr(needle, "head_of", lambda params, cfg: jnp.eye(8))
  tokens = np.array([[0, 1, 2, 7, 0, 1, 2, 2]], np.int32)
  asked = np.array([[1, 1, 1, 0, 2, 2, 0, 0]], np.int32)
  exact, token = shares(runs.config(rope_theta=3e5), tokens, asked, 2, params={"none": jnp.zeros(1)})
  assert (exact.tolist(), token.tolist()) == ([0.5], [0.8])


def test_a_random_model_knows_nothing(context):
  spec = NeedleLimits(lengths=(200,), prompts=4, keys=2)
  scores = needle.run(dataclasses.replace(context, limits=evals.Limits(needle=spec)))
  assert list(scores) == ["exact_200", "exact_200_se", "token_200", "token_200_se", "prompts"]
  assert scores["exact_200"] == scores["exact_200_se"] == 0 and scores["token_200"] < 0.3


def test_retrieved_is_what_greedy_decoding_writes():
  """The model's own greedy continuation, put where the answer stands, scores 1; with a change, less."""
  cfg = runs.config(num_nextn_predict_layers=0)
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, cfg.vocab_size, 20).tolist()
  [new] = Generator(toy.params(cfg), cfg, stop_ids=()).generate([prompt], 6, Sampling(temperature=0.0))
  tokens = np.array([prompt + new] * 2, np.int32)
  tokens[1, -1] = (tokens[1, -1] + 1) % cfg.vocab_size
  asked = np.zeros_like(tokens)
  asked[:, 19:-1] = 1
  exact, token = shares(cfg, tokens, asked, 1)
  assert (exact.tolist(), token.tolist()) == ([1.0, 0.0], [1.0, 5 / 6])


def compared(context, length, topk):
  spec = NeedleLimits(lengths=(length,), prompts=3, keys=2, dsa_modes=("dense", "sparse"))
  cfg = context.cfg.replace(index_topk=topk)
  return needle.run(dataclasses.replace(context, cfg=cfg, limits=evals.Limits(needle=spec)))


def test_modes_agree_exactly_where_all_keys_are_selected(context):
  scores = compared(context, 200, topk=200)
  for name in ("exact_200", "token_200"):
    assert scores[f"{name}_dense"] == scores[f"{name}_sparse"]
    assert scores[f"{name}_sparse_minus_dense"] == scores[f"{name}_sparse_minus_dense_se"] == 0.0
  assert "exact_200_sparse_minus_dense " in evals.table({"needle": scores})


def test_sparse_is_another_model_where_keys_are_left_out(context, monkeypatch):
  """Both modes reach the model."""
  modes = []
  monkeypatch.setattr(needle, "forward", lambda p, cfg, t: modes.append(cfg.dsa_mode) or forward(p, cfg, t))
  compared(context, 200, topk=9)
  assert modes == ["dense", "sparse"]


def test_means_errors_and_paired_differences():
  first, second = np.array([0.0, 1.0, 1.0, 0.0]), np.array([0.0, 0.5, 0.5, 0.0])
  scores = needle.compare("x", {"dense": first, "sparse": second}, ("dense", "sparse"))
  assert scores["x_dense"] == 0.5 and scores["x_dense_se"] == pytest.approx(np.sqrt(1 / 3) / 2)
  assert scores["x_sparse_minus_dense"] == -0.25
  assert scores["x_sparse_minus_dense_se"] == pytest.approx(np.sqrt(1 / 12) / 2)
  shown = evals.table({"needle": scores})
  assert "x_dense " in shown and "0.5000 ± 0.2887" in shown and "_se" not in shown


def test_scores_are_the_same_on_every_mesh(on_devices):
  code = """
import json
import jax, numpy as np
from glm5_jax.config import MeshConfig
from glm5_jax.evals import needle
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.parallel.mesh import make_mesh
from glm5_jax.parallel.rules import param_shardings
from tests.evals.test_needle import runs, toy
cfg = runs.config(vocab_size=8, first_k_dense_replace=0, dsa_mode="sparse", index_topk=8)
params = toy.params(cfg)
rng = np.random.default_rng(0)
tokens = rng.integers(0, 8, (5, 24)).astype(np.int32)
asked = rng.integers(0, 3, tokens.shape).astype(np.int32)
out = [needle.retrieved(params, cfg, tokens, asked, 2, 3)]
for sizes in ({"fsdp": 4, "expert": 2}, {"context": 2, "tensor": 2, "expert": 2}):
  mesh = make_mesh(MeshConfig(**{"data": 1} | sizes))
  there = jax.device_put(params, param_shardings(mesh, logical_axes(cfg), abstract_params(cfg)))
  out.append(needle.retrieved(there, cfg, tokens, asked, 2, 3, mesh))
print(json.dumps([[part.tolist() for part in pair] for pair in out]))
"""
  alone, *others = json.loads(on_devices(code))
  assert len(set(alone[1])) > 1  # there is something to get wrong
  assert others == [alone, alone]


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    (
      {"lengths": (60,)},
      r"length of 60 is too short: 4 needles, .* take \d+ tokens; set --needle_lengths to at",
    ),
    ({"lengths": (257,)}, "257 is more than the model's max_position_embeddings 256"),
    ({"queries": 5}, "--needle_queries=5: only --needle_keys=4 can be asked for"),
    ({"prompts": 1}, "2 prompts for a standard error"),
    ({"dsa_modes": ("dense", "thin")}, "--dsa_modes: dense,thin should be dense, sparse, or both"),
    ({"dsa_modes": ("dense", "dense")}, "once each"),
  ],
)
def test_mistakes_are_told_in_one_line(context, changes, said):
  spec = dataclasses.replace(NeedleLimits(lengths=(200,)), **changes)
  with pytest.raises(UserError, match=said) as error:
    needle.run(dataclasses.replace(context, limits=evals.Limits(needle=spec)))
  assert "\n" not in str(error.value)


def test_what_the_model_or_the_mesh_cannot_do(context):
  there = types.SimpleNamespace(shape={"context": 4})
  spec = NeedleLimits(lengths=(132,), dsa_modes=("sparse",))
  changed = dataclasses.replace(context, limits=evals.Limits(needle=spec), mesh=there)
  with pytest.raises(UserError, match="132 should be a multiple of 8, for the mesh's context"):
    needle.run(changed)
  with pytest.raises(UserError, match="'F' has no sparse layer"):
    needle.run(dataclasses.replace(changed, mesh=None, cfg=context.cfg.replace(attention="F")))


def test_the_least_length_that_an_error_names_is_enough(data, tokenizer):
  haystack = heldout_text(str(data), tokenizer)
  with pytest.raises(UserError) as error:
    make_rows(SPEC, 100, haystack, tokenizer, seed=0)
  least = int(re.search(r"at least (\d+)", str(error.value))[1])
  assert make_rows(dataclasses.replace(SPEC, prompts=1), least, haystack, tokenizer, seed=0)[0].shape == (
    1,
    least,
  )
