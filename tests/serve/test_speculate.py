"""Self-speculation: the target's words whatever is drafted, drafts as in training, and a gain."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.errors import UserError
from glm5_jax.losses.pretrain import LossWeights, denominators, pretrain_loss
from glm5_jax.serve import speculate
from glm5_jax.serve.generate import Generator, row_keys
from glm5_jax.serve.sampling import Sampling, probabilities
from glm5_jax.serve.speculate import SpeculativeGenerator, make_generator
from tests.model import toy
from tests.serve.oracle import (
  argmax_continuation,
  cut,
  drafts_that_hold,
  full_logits,
  misfit,
  ragged_prompts,
  small,
)

GREEDY = Sampling(temperature=0.0)
PROMPTS = ragged_prompts(4)
COUNT = 24
MODELS = {
  "dense": small(),
  "sparse": small(dsa_mode="sparse"),
  # Compiles in half the time: one layer, no experts.
  "light": small(num_hidden_layers=1, first_k_dense_replace=2),
}
FAST = (("dense", 3), ("sparse", 2))
ALL = [
  pytest.param(mode, steps, marks=() if (mode, steps) in FAST else pytest.mark.slow)
  for mode in ("dense", "sparse")
  for steps in (1, 2, 3, 4)
]


@functools.cache
def continuations(mode: str) -> list[list[int]]:
  cfg = MODELS[mode]
  return [argmax_continuation(toy.params(cfg), cfg, prompt, COUNT + 8) for prompt in PROMPTS]


@pytest.mark.parametrize(("mode", "draft_steps"), ALL)
def test_greedy_output_is_that_of_full_passes(mode, draft_steps):
  """And each round accepts as many tokens as drafts computed as in training would have had accepted."""
  cfg = MODELS[mode]
  params = toy.params(cfg)
  generator = SpeculativeGenerator(params, cfg, draft_steps=draft_steps)
  expected = [row[:COUNT] for row in continuations(mode)]
  assert generator.generate(PROMPTS, COUNT, GREEDY) == expected

  held, rounds = np.zeros(draft_steps), 0
  for prompt, row in zip(PROMPTS, continuations(mode), strict=True):
    per_round = drafts_that_hold(params, cfg, prompt, row, COUNT, draft_steps)
    rounds += len(per_round)
    held += [(per_round >= k).sum() for k in range(1, draft_steps + 1)]
  assert 0 < held[0] < rounds  # drafts both hold and fail, else this shows little
  assert generator.acceptance.rounds == rounds
  np.testing.assert_allclose(np.array(generator.acceptance.accept_rate_K) * rounds, held, atol=1e-3)
  assert generator.acceptance.accept_length == pytest.approx(1 + held.sum() / rounds)


@pytest.mark.slow
def test_rows_of_a_batch_do_not_depend_on_each_other():
  cfg = MODELS["dense"]
  generator = SpeculativeGenerator(toy.params(cfg), cfg, draft_steps=3)
  for prompt, row in zip(PROMPTS, continuations("dense"), strict=True):
    assert generator.generate([prompt], COUNT, GREEDY) == [row[:COUNT]]


@pytest.mark.parametrize("sampling", [Sampling(), pytest.param(Sampling(0.7, 0.9), marks=pytest.mark.slow)])
def test_samples_have_the_target_distribution(sampling):
  """Every sequence of 4 tokens, counted over 16 thousand rows, against its probability by full passes."""
  cfg, rows, places = MODELS["light"], 1024, 4
  params, prompt = toy.params(cfg), PROMPTS[0]
  expected = np.ones((4,) * places)
  for cell in itertools.product(range(4), repeat=places - 1):
    logits = full_logits(params, cfg, [*prompt, *cell])[0, len(prompt) - 1 :]
    probs = np.asarray(probabilities(jnp.asarray(logits), sampling), np.float64)
    steps = [probs[i, token] for i, token in enumerate(cell)]
    expected[cell] = np.prod(steps) * probs[-1]
  counts = np.zeros_like(expected)
  generator = SpeculativeGenerator(params, cfg, draft_steps=2)
  for seed in range(16):
    drawn = np.array(generator.generate([prompt] * rows, places, sampling, seed))
    np.add.at(counts, tuple(drawn.T), 1)
  assert 0.1 < generator.acceptance.accept_rate_K[0] < 0.95
  assert misfit(counts, expected) < 5


def agreeing_model(cfg):
  """Weights by which the next token depends on the current one alone, and MTP computes just that.

  Attention and MLPs add nothing; MTP hands on the embedding half of its input.
  """

  def silence(path, leaf):
    return jnp.zeros_like(leaf) if path[-1].key in ("o_proj", "down_proj") else leaf

  params = jax.tree_util.tree_map_with_path(silence, toy.params(cfg))
  ones = jnp.ones(cfg.hidden_size)
  eh_proj = jnp.concatenate([jnp.eye(cfg.hidden_size), jnp.zeros((cfg.hidden_size,) * 2)])
  mtp = params["mtp"] | {"enorm": ones, "norm": params["final_norm"], "eh_proj": eh_proj}
  return params | {"mtp": mtp}


@pytest.mark.parametrize(("mode", "draft_steps"), ALL)
def test_draft_distributions_are_those_of_training(mode, draft_steps):
  """At the prompt's end and some rounds later: caches, positions, padding and recomputed slots all count."""
  cfg = MODELS[mode]
  generator = SpeculativeGenerator(toy.params(cfg), cfg, draft_steps=draft_steps)
  weights, flat_cfg = generator.params, generator.cfg
  padded, capacity = generator.prepare(PROMPTS, COUNT, extra=2 * draft_steps + 1)
  keys = row_keys(0, len(PROMPTS))
  fixed = (GREEDY, (), draft_steps)
  state = speculate._prefill(weights, flat_cfg, padded, keys, GREEDY, (), capacity, draft_steps)
  draft = jax.jit(speculate._draft, static_argnums=(1, 4, 6))
  draft_keys = jax.vmap(lambda key: jax.random.split(key, draft_steps))(keys)
  for _ in range(2):
    tokens_BS, _, probs_BKV = draft(
      weights, flat_cfg, state, padded.padding_B, Sampling(), draft_keys, draft_steps
    )
    for row, padding in enumerate(padded.padding_B.tolist()):
      known = int(state.known_B[row])
      ids = np.asarray(tokens_BS[row, padding : known + draft_steps]).tolist()
      logits = full_logits(toy.params(cfg), cfg, ids)[1 : draft_steps + 1, known - padding - 2]
      np.testing.assert_allclose(probs_BKV[row], jax.nn.softmax(logits), atol=2e-5)
    limit = jnp.int32(padded.tokens_BT.shape[1] + COUNT)
    state = speculate._rounds(weights, flat_cfg, state, padded.padding_B, limit, *fixed)


@pytest.fixture(scope="module")
def agreeing():
  """(params, cfg, prompts, their greedy continuations)."""
  cfg = MODELS["light"].replace(vocab_size=64)
  params, prompts = agreeing_model(cfg), ragged_prompts(64)
  return params, cfg, prompts, [argmax_continuation(params, cfg, prompt, 21) for prompt in prompts]


def test_a_drafter_that_agrees_is_accepted_whole(agreeing):
  params, cfg, prompts, expected = agreeing
  generator = SpeculativeGenerator(params, cfg, draft_steps=3)
  assert generator.generate(prompts, 21, GREEDY) == expected
  assert generator.acceptance == (4.0, [1.0, 1.0, 1.0], 20)  # 1 from the prompt, then 5 rounds of 4, 4 times


def test_a_stop_inside_an_accepted_run_ends_the_row(agreeing):
  params, cfg, prompts, free = agreeing
  # Rounds begin at 1, 5, 9 …: the token at 6 is a draft that holds, with another one after it.
  stop_ids = (free[0][6],)
  expected = [cut(row, stop_ids) for row in free]
  assert len(expected[0]) == 7 and max(map(len, expected)) == 21
  generator = SpeculativeGenerator(params, cfg, stop_ids, draft_steps=3)
  assert generator.generate(prompts, 21, GREEDY) == expected


def test_learning_a_periodic_text_makes_rounds_longer():
  """60 steps on a repeated phrase: MTP's drafts hold, depth by depth, and the text goes on as it should."""
  cfg = MODELS["light"].replace(vocab_size=16, mtp_depths=2)
  phrase = np.random.default_rng(1).permutation(16)[:10]
  rows = np.stack([np.roll(np.tile(phrase, 5), shift) for shift in range(8)]).astype(np.int32)
  tokens, targets = jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  batch = {
    "tokens": tokens,
    "targets": targets,
    "weights": jnp.ones(tokens.shape),
    "positions": positions,
    "segment_ids": jnp.ones_like(tokens),
  }
  optimizer = optax.adam(3e-3)

  @jax.jit
  def steps(params):
    def step(carry, _):
      params, state = carry
      loss = functools.partial(
        pretrain_loss,
        batch=batch,
        cfg=cfg,
        denominator=denominators(batch, 2),
        weights=LossWeights(mtp=1.0, balance=0.0),
        chunk=512,
      )
      grads = jax.grad(lambda p: loss(p)[0])(params)
      updates, state = optimizer.update(grads, state)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), length=60)[0][0]

  generator = SpeculativeGenerator(steps(toy.params(cfg)), cfg, draft_steps=2)
  prompts = [np.roll(phrase, shift).tolist() * 2 for shift in (0, 3)]
  out = generator.generate(prompts, 20, GREEDY)
  assert out == [(prompt * 2)[:20] for prompt in prompts]
  assert generator.acceptance.accept_length > 1.5


def test_bad_requests_are_one_line():
  cfg = MODELS["dense"]
  params = toy.params(cfg)
  for steps in (-1, 16):
    with pytest.raises(UserError, match=f"draft_steps {steps} must lie between 1 and 15"):
      make_generator(params, cfg, draft_steps=steps)
  with pytest.raises(UserError, match="needs an MTP layer; this model has num_nextn_predict_layers=0"):
    make_generator(params, cfg.replace(num_nextn_predict_layers=0), draft_steps=1)
  with pytest.raises(UserError, match="a prompt is empty"):
    make_generator(params, cfg, draft_steps=1).generate([[]], 4)
  assert type(make_generator(params, cfg)) is Generator
