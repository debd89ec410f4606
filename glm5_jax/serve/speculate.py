"""Self-speculation: the shared MTP layer drafts K tokens, the trunk verifies them in one pass.

Depth k of the draft is computed exactly as in training: it has a cache of its own, and at slot i it sees
the token k places ahead. Slots whose look-ahead token was only a draft are computed again once it is
known; since at most K tokens are accepted a round, running each depth over the last 2K slots covers them
and the new ones. Drafting past the trained depths goes on in the same way.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.model import draft, forward, init_cache
from glm5_jax.model.attention.context import Cache
from glm5_jax.serve.generate import PROMPT_BUCKET, Generator, Prompts, is_stop, row_keys
from glm5_jax.serve.sampling import Sampling, probabilities, sample, verify

ROUNDS = 4  # draft-and-verify rounds a dispatch


class SpecState(NamedTuple):
  """Between two rounds. Token j stands in slot j; the newest one has not been run through the trunk."""

  tokens_BS: jax.Array  # known tokens, then drafts of no further use
  known_B: jax.Array  # slots filled with known tokens, padding included
  trunk: Cache  # slots 0 … known − 2
  drafts: tuple[Cache, ...]  # one a depth
  window_BWD: jax.Array  # trunk's hidden states of slots known − 1 − W … known − 2
  done_B: jax.Array
  keys: jax.Array
  accepted_K: jax.Array  # float32, rounds in which draft k was accepted, over unfinished rows
  rounds: jax.Array  # float32, rounds over unfinished rows


class Acceptance(NamedTuple):
  """What speculation gained: tokens made a verification (accepted + 1), and how often each draft held."""

  accept_length: float
  accept_rate_K: list[float]
  rounds: int


class SpeculativeGenerator(Generator):
  """A Generator that drafts `draft_steps` tokens a round; same distribution, greedy output the same.

  `acceptance` tells what the newest request gained.
  """

  def __init__(
    self, params: Any, cfg: ModelConfig, stop_ids: Sequence[int] | None = None, draft_steps: int = 3
  ):
    if not cfg.num_nextn_predict_layers:
      raise UserError("self-speculation needs an MTP layer; this model has num_nextn_predict_layers=0")
    if not 1 <= draft_steps <= PROMPT_BUCKET // 2 - 1:
      raise UserError(f"draft_steps {draft_steps} must lie between 1 and {PROMPT_BUCKET // 2 - 1}")
    super().__init__(params, cfg, stop_ids)
    self.draft_steps = draft_steps
    self.acceptance = Acceptance(0.0, [], 0)

  def stream(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    seed: int = 0,
  ) -> Iterator[list[list[int]]]:
    """As Generator.stream; the number of ids yielded differs from row to row."""
    sampling.check()
    K = self.draft_steps
    padded, capacity = self.prepare(prompts, max_new_tokens, extra=2 * K + 1)
    keys = row_keys(seed, len(prompts))
    state = _prefill(self.params, self.cfg, padded, keys, sampling, self.stop_ids, capacity, K)
    width = padded.tokens_BT.shape[1]
    seen = np.full(len(prompts), width)
    ended = np.zeros(len(prompts), bool)
    while True:
      known = np.minimum(np.asarray(state.known_B), width + max_new_tokens)
      tokens = np.asarray(state.tokens_BS)
      fresh = [tokens[row, seen[row] : known[row]].tolist() for row in range(len(prompts))]
      yield [self._unfinished(np.asarray([ids]), ended[row : row + 1])[0] for row, ids in enumerate(fresh)]
      seen, ended = known, ended | (known >= width + max_new_tokens)
      self._record(state)
      if ended.all():
        return
      limit = jnp.int32(width + max_new_tokens)
      state = _rounds(self.params, self.cfg, state, padded.padding_B, limit, sampling, self.stop_ids, K)

  def summary(self) -> str:
    rates = " ".join(f"{rate:.0%}" for rate in self.acceptance.accept_rate_K)
    return f"; {self.acceptance.accept_length:.2f} tokens a round, drafts held: {rates}"

  def _record(self, state: SpecState) -> None:
    rounds = float(state.rounds)
    rates = [float(a) / max(rounds, 1.0) for a in np.asarray(state.accepted_K)]
    self.acceptance = Acceptance(1.0 + sum(rates), rates, int(rounds))


def make_generator(
  params: Any, cfg: ModelConfig, stop_ids: Sequence[int] | None = None, draft_steps: int = 0
) -> Generator:
  """A plain generator for `draft_steps` 0, else a self-speculative one."""
  if draft_steps:
    return SpeculativeGenerator(params, cfg, stop_ids, draft_steps)
  return Generator(params, cfg, stop_ids)


@functools.partial(jax.jit, static_argnames=("cfg", "sampling", "stop_ids", "capacity", "depths"))
def _prefill(params, cfg, prompts: Prompts, keys, sampling, stop_ids, capacity, depths) -> SpecState:
  B, T = prompts.tokens_BT.shape
  out = forward(
    params,
    cfg,
    prompts.tokens_BT,
    None,
    prompts.segments_BT,
    init_cache(cfg, B, capacity),
    from_start=True,
  )
  pairs = jax.vmap(jax.random.split)(keys)
  first_B = sample(pairs[:, 1], out.logits_BTV[:, -1], sampling)
  tokens_BS = jnp.zeros((B, capacity), jnp.int32).at[:, :T].set(prompts.tokens_BT).at[:, T].set(first_B)
  positions_BT = jnp.maximum(jnp.arange(T) - prompts.padding_B[:, None], 0)
  hidden_BTD, drafts = out.hidden_BTD, []
  for k in range(1, depths + 1):
    drafted = draft(
      params,
      cfg,
      hidden_BTD,
      tokens_BS[:, k : k + T],
      positions_BT,
      prompts.segments_BT,
      init_cache(cfg, B, capacity, layers=1),
      from_start=True,
    )
    hidden_BTD = drafted.hidden_BTD
    drafts.append(drafted.cache)
  return SpecState(
    tokens_BS=tokens_BS,
    known_B=jnp.full((B,), T + 1, jnp.int32),
    trunk=out.cache._replace(length=jnp.full((B,), T, jnp.int32)),
    drafts=tuple(drafts),
    window_BWD=out.hidden_BTD[:, T - 2 * depths :],
    done_B=is_stop(first_B, stop_ids),
    keys=pairs[:, 0],
    accepted_K=jnp.zeros((depths,), jnp.float32),
    rounds=jnp.zeros((), jnp.float32),
  )


@functools.partial(
  jax.jit, static_argnames=("cfg", "sampling", "stop_ids", "depths"), donate_argnames="state"
)
def _rounds(params, cfg, state: SpecState, padding_B, limit, sampling, stop_ids, depths) -> SpecState:
  def body(state, _):
    return _round(params, cfg, state, padding_B, limit, sampling, stop_ids, depths), None

  return jax.lax.scan(body, state, length=ROUNDS)[0]


def _round(params, cfg, state: SpecState, padding_B, limit, sampling, stop_ids, depths) -> SpecState:
  """Draft, verify, keep what was accepted and one token more."""
  K, known_B = depths, state.known_B
  pairs = jax.vmap(lambda key: jax.random.split(key, K + 2))(state.keys)
  tokens_BS, drafts, draft_probs = _draft(params, cfg, state, padding_B, sampling, pairs[:, 2:], K)
  slots_BJ = (known_B - 1)[:, None] + jnp.arange(K + 1)
  tokens_BJ = jnp.take_along_axis(tokens_BS, slots_BJ, axis=1)
  out = forward(
    params,
    cfg,
    tokens_BJ,
    slots_BJ - padding_B[:, None],
    jnp.ones_like(tokens_BJ),
    state.trunk._replace(length=known_B - 1),
  )
  target_BJV = probabilities(out.logits_BTV, sampling)
  accepted_B, next_B = verify(pairs[:, 1], target_BJV, draft_probs, tokens_BJ[:, 1:])
  new_BJ = jnp.concatenate([tokens_BJ[:, 1:], next_B[:, None]], axis=1)
  new_BJ = jnp.where(jnp.arange(K + 1) == accepted_B[:, None], next_B[:, None], new_BJ)
  grown_B = jnp.where(state.done_B, 0, accepted_B + 1)
  stopped_B = jnp.any(is_stop(new_BJ, stop_ids) & (jnp.arange(K + 1) < grown_B[:, None]), axis=1)
  hidden = jnp.concatenate([state.window_BWD, out.hidden_BTD], axis=1)
  running_B = (~state.done_B).astype(jnp.float32)
  held_BK = (jnp.arange(K) < accepted_B[:, None]) * running_B[:, None]
  return SpecState(
    tokens_BS=_put(tokens_BS, new_BJ, known_B),
    known_B=known_B + grown_B,
    trunk=out.cache._replace(length=known_B + grown_B - 1),
    drafts=drafts,
    window_BWD=_take(hidden, grown_B, state.window_BWD.shape[1]),
    done_B=state.done_B | stopped_B | (known_B + grown_B >= limit),
    keys=pairs[:, 0],
    accepted_K=state.accepted_K + jnp.sum(held_BK, axis=0),
    rounds=state.rounds + jnp.sum(running_B),
  )


def _draft(params, cfg, state: SpecState, padding_B, sampling, keys_BK, depths):
  """Draws `depths` tokens after the known ones; returns (tokens with drafts, caches, distributions BKV)."""
  W = state.window_BWD.shape[1]
  begin_B = state.known_B - 1 - W
  slots_BW = begin_B[:, None] + jnp.arange(W)
  segments_BW = (slots_BW >= padding_B[:, None]).astype(jnp.int32)
  positions_BW = jnp.maximum(slots_BW - padding_B[:, None], 0)
  tokens_BS, hidden_BWD, caches, probs = state.tokens_BS, state.window_BWD, [], []
  for k in range(1, depths + 1):
    out = draft(
      params,
      cfg,
      hidden_BWD,
      _take(tokens_BS, begin_B + k, W),
      positions_BW,
      segments_BW,
      state.drafts[k - 1]._replace(length=begin_B),
    )
    hidden_BWD = out.hidden_BTD
    caches.append(out.cache._replace(length=state.drafts[k - 1].length))
    probs.append(probabilities(out.logits_BTV[:, -1], sampling))
    drafted_B = sample(keys_BK[:, k - 1], out.logits_BTV[:, -1], sampling)
    tokens_BS = _put(tokens_BS, drafted_B[:, None], state.known_B + k - 1)
  return tokens_BS, tuple(caches), jnp.stack(probs, axis=1)


def _put(rows: jax.Array, new: jax.Array, start_B: jax.Array) -> jax.Array:
  """Writes new [B, n] into rows [B, S] at each row's start."""
  return jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(rows, new, start_B, 0)


def _take(rows: jax.Array, start_B: jax.Array, size: int) -> jax.Array:
  """rows[b, start_b : start_b + size]."""
  return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size, axis=0))(rows, start_B)
