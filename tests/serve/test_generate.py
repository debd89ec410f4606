"""Cached, batched, left-padded generation says what full passes say."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5_jax.config import glm5_744b
from glm5_jax.errors import UserError
from glm5_jax.model import init_cache
from glm5_jax.serve import generate
from glm5_jax.serve.generate import Generator
from glm5_jax.serve.sampling import Sampling
from tests.model import toy
from tests.serve.oracle import argmax_continuation, cut, ragged_prompts, small

GREEDY = Sampling(temperature=0.0)
VOCABULARY = 64
KINDS = {
  "dense": {},
  "sparse": {"dsa_mode": "sparse"},
  "shared selection": {"dsa_mode": "sparse", "index_topk_freq": 2, "index_skip_topk_offset": 1},
  "sliding window": {"attention": "SD"},
}
FAST = ("dense", "sparse")


@pytest.mark.parametrize("kind", [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_greedy_batch_equals_full_passes(kind):
  """Rows of 1 to 40 tokens beside each other: padding, positions, cache and selection all count."""
  cfg = small(VOCABULARY, **KINDS[kind])
  params, prompts = toy.params(cfg), ragged_prompts(VOCABULARY)
  expected = [argmax_continuation(params, cfg, prompt, 18) for prompt in prompts]
  assert len({token for row in expected for token in row}) > 10  # not one token over and over
  assert Generator(params, cfg).generate(prompts, 18, GREEDY) == expected


@pytest.fixture(scope="module")
def model():
  cfg = small(VOCABULARY)
  return toy.params(cfg), cfg


def test_stacked_and_unstacked_weights_say_the_same(model):
  params, cfg = model
  flat = cfg.replace(scan_layers=False)
  prompts = ragged_prompts(VOCABULARY)
  assert Generator(toy.params(flat), flat).generate(prompts, 18, GREEDY) == Generator(params, cfg).generate(
    prompts, 18, GREEDY
  )


@pytest.mark.parametrize("count", [1, 2, 17])
def test_exactly_as_many_tokens_as_asked_for(model, count):
  params, cfg = model
  prompts = ragged_prompts(VOCABULARY)
  longest = Generator(params, cfg).generate(prompts, 18, GREEDY)
  chunks = list(Generator(params, cfg).stream(prompts, count, GREEDY))
  assert [[token for chunk in chunks for token in chunk[row]] for row in range(len(prompts))] == [
    row[:count] for row in longest
  ]


def test_a_stop_ends_its_row_and_is_returned(model):
  params, cfg = model
  prompts = ragged_prompts(VOCABULARY)
  free = Generator(params, cfg).generate(prompts, 18, GREEDY)
  # The first row stops at its first token, another later, and one perhaps never.
  stop_ids = (free[0][0], free[1][9])
  expected = [cut(row, stop_ids) for row in free]
  assert len(expected[0]) == 1 and len(expected[1]) > 1
  generator = Generator(params, cfg, stop_ids)
  assert generator.generate(prompts, 18, GREEDY) == expected
  assert list(generator.stream(prompts[:1], 18, GREEDY)) == [
    [[stop_ids[0]]]
  ]  # no more work after all stopped
  assert Generator(params, cfg.replace(eos_token_id=stop_ids)).stop_ids == stop_ids


def test_a_seed_decides_the_samples(model):
  params, cfg = model
  prompts, generator = ragged_prompts(VOCABULARY), Generator(params, cfg)
  first = generator.generate(prompts, 18, Sampling(), seed=1)
  assert first == generator.generate(prompts, 18, Sampling(), seed=1)
  assert first != generator.generate(prompts, 18, Sampling(), seed=2)
  twins = generator.generate([prompts[0]] * 4, 18, Sampling(), seed=1)
  assert len({tuple(row) for row in twins}) == 4  # rows do not share their random numbers


def test_744b_keeps_576_numbers_a_token():
  """bfloat16; indexer keys only where keys can be selected."""
  dense = jax.eval_shape(lambda: init_cache(glm5_744b(), 2, 4096))
  assert [layer.latent_BSL.shape for layer in dense.layers] == [(2, 4096, 576)] * 78
  assert all(layer.latent_BSL.dtype == "bfloat16" and layer.index_key_BSJ is None for layer in dense.layers)
  sparse = jax.eval_shape(lambda: init_cache(glm5_744b().replace(dsa_mode="sparse"), 2, 4096))
  assert [layer.index_key_BSJ.shape for layer in sparse.layers] == [(2, 4096, 128)] * 78
  short = jax.eval_shape(lambda: init_cache(glm5_744b().replace(dsa_mode="sparse"), 2, 2048))
  assert all(layer.index_key_BSJ is None for layer in short.layers)


@given(st.integers(0, 5000))
def test_one_chunk_size_serves_a_request(tokens):
  chunk = generate.even_chunk(tokens)
  assert 1 <= chunk <= generate.CHUNK
  allowed = range(min(generate.CHUNK // 2, chunk), min(generate.CHUNK, max(tokens, 1)) + 1)
  waste = -tokens % chunk
  assert waste == min(-tokens % other for other in allowed)
  assert waste < generate.CHUNK // 2 and (waste == 0 or tokens > generate.CHUNK)


@pytest.mark.parametrize(
  ("prompts", "count", "sampling", "said"),
  [
    ([], 4, GREEDY, "a prompt is empty"),
    ([[1], []], 4, GREEDY, "a prompt is empty"),
    ([[1]], 0, GREEDY, "max_new_tokens 0 must be at least 1"),
    ([[1] * 200], 57, GREEDY, "need 257 positions; this model has 256"),
    ([[1, 64]], 4, GREEDY, "must lie in 0 … 63"),
    ([[-1]], 4, GREEDY, "must lie in 0 … 63"),
    ([[1]], 4, Sampling(temperature=-1.0), "temperature -1.0 must be 0"),
    ([[1]], 4, Sampling(temperature=1e-9), "temperature 1e-09 must be 0"),
    ([[1]], 4, Sampling(temperature=float("nan")), "temperature nan must be"),
    ([[1]], 4, Sampling(temperature=float("inf")), "temperature inf must be"),
    ([[1]], 4, Sampling(top_p=0.0), "top_p 0.0 must be above 0"),
    ([[1]], 4, Sampling(top_p=1.5), "top_p 1.5 must be above 0"),
  ],
)
def test_bad_requests_are_one_line(model, prompts, count, sampling, said):
  params, cfg = model
  with pytest.raises(UserError, match=said) as error:
    Generator(params, cfg).generate(prompts, count, sampling)
  assert "\n" not in str(error.value)
