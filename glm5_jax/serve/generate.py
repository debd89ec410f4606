"""Batched generation with the latent cache, several tokens a dispatch, plain or self-speculative."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.model import forward, init_cache
from glm5_jax.model.attention.context import Cache
from glm5_jax.model.plan import unstack
from glm5_jax.serve.sampling import Sampling, sample

PROMPT_BUCKET = 32  # prompts are left-padded to a multiple, so that few shapes are compiled
CAPACITY_BUCKET = 64
CHUNK = 16  # tokens made a dispatch, at most


class Prompts(NamedTuple):
  """Left-padded prompts: every row's next token goes to the same slot."""

  tokens_BT: jax.Array  # int32
  segments_BT: jax.Array  # 1, or 0 where padding
  padding_B: jax.Array  # int32 slots of padding before each row


class DecodeState(NamedTuple):
  """Between two tokens of plain decoding."""

  cache: Cache
  token_B: jax.Array  # drawn, not yet run through the model
  done_B: jax.Array
  keys: jax.Array  # one a row


class Generator:
  """Generates from fixed parameters. Compiled functions are kept for each shape met.

  Args:
    params: of `cfg`, stacked or not; kept unstacked.
    cfg: sparse attention decodes by `cfg.dsa_mode`.
    stop_ids: tokens that end a row and are returned; None takes `cfg.eos_token_id`.
  """

  def __init__(self, params: Any, cfg: ModelConfig, stop_ids: Sequence[int] | None = None):
    self.params, self.cfg = unstack(params, cfg)
    self.stop_ids = tuple(cfg.eos_token_id if stop_ids is None else stop_ids)

  def generate(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    seed: int = 0,
  ) -> list[list[int]]:
    """New ids of each prompt, its stop id included."""
    out: list[list[int]] = [[] for _ in prompts]
    for new in self.stream(prompts, max_new_tokens, sampling, seed):
      for row, ids in zip(out, new, strict=True):
        row.extend(ids)
    return out

  def stream(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    seed: int = 0,
  ) -> Iterator[list[list[int]]]:
    """Yields the next few ids of each row; [] once a row has stopped.

    Raises UserError for an empty prompt, ids outside the vocabulary, or a request past
    max_position_embeddings.
    """
    sampling.check()
    chunk = even_chunk(max_new_tokens - 1)
    padded, capacity = self.prepare(prompts, max_new_tokens, extra=_waste(max_new_tokens - 1, chunk))
    keys = row_keys(seed, len(prompts))
    state = _prefill(self.params, self.cfg, padded, keys, sampling, self.stop_ids, capacity)
    left = max_new_tokens - 1
    ended = np.zeros(len(prompts), bool)
    yield self._unfinished(np.asarray(state.token_B)[:, None], ended)
    while left > 0 and not ended.all():
      state, new_BC = _decode(self.params, self.cfg, state, padded.padding_B, sampling, self.stop_ids, chunk)
      yield self._unfinished(np.asarray(new_BC)[:, :left], ended)
      left -= chunk

  def summary(self) -> str:
    """What the newest request gained by speculation, as an end to a sentence; "" without."""
    return ""

  def prepare(
    self, prompts: Sequence[Sequence[int]], max_new_tokens: int, extra: int = 0
  ) -> tuple[Prompts, int]:
    """Left-padded prompts and the cache capacity for them, `extra` slots for tokens thrown away included."""
    check_request(prompts, max_new_tokens, self.cfg)
    width = _round_up(max(len(p) for p in prompts), PROMPT_BUCKET)
    tokens = np.zeros((len(prompts), width), np.int32)
    segments = np.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
      tokens[row, width - len(prompt) :] = prompt
      segments[row, width - len(prompt) :] = 1
    padding = width - segments.sum(1, dtype=np.int32)
    capacity = _round_up(width + max_new_tokens + extra, CAPACITY_BUCKET)
    return Prompts(jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(padding)), capacity

  def _unfinished(self, new_BC: np.ndarray, ended: np.ndarray) -> list[list[int]]:
    """Each row's ids up to its stop; updates `ended`."""
    out: list[list[int]] = []
    for row, ids in enumerate(new_BC.tolist()):
      if ended[row]:
        out.append([])
        continue
      stop = next((i for i, token in enumerate(ids) if token in self.stop_ids), None)
      ended[row] = stop is not None
      out.append(ids if stop is None else ids[: stop + 1])
    return out


def check_request(prompts: Sequence[Sequence[int]], max_new_tokens: int, cfg: ModelConfig) -> None:
  """Raises UserError for what cannot be generated."""
  if not prompts or not all(len(p) for p in prompts):
    raise UserError("a prompt is empty; give at least one token")
  if max_new_tokens < 1:
    raise UserError(f"max_new_tokens {max_new_tokens} must be at least 1")
  longest = max(len(p) for p in prompts) + max_new_tokens
  if longest > cfg.max_position_embeddings:
    raise UserError(
      f"prompt and new tokens need {longest} positions; this model has {cfg.max_position_embeddings}"
    )
  for prompt in prompts:
    if min(prompt) < 0 or max(prompt) >= cfg.vocab_size:
      raise UserError(f"prompt ids must lie in 0 … {cfg.vocab_size - 1}; was another tokeniser used?")


def even_chunk(tokens: int) -> int:
  """How many to make a dispatch, so that one program, compiled once, makes `tokens` with the least waste."""
  most = max(1, min(CHUNK, tokens))
  return min(range(min(CHUNK // 2, most), most + 1), key=lambda chunk: (_waste(tokens, chunk), -chunk))


def _waste(tokens: int, chunk: int) -> int:
  return -tokens % chunk


def row_keys(seed: int, rows: int) -> jax.Array:
  """An independent random key a row."""
  return jax.random.split(jax.random.key(seed), rows)


def is_stop(tokens: jax.Array, stop_ids: tuple[int, ...]) -> jax.Array:
  """Elementwise, whether a token ends its row."""
  return functools.reduce(jnp.logical_or, (tokens == i for i in stop_ids), jnp.zeros(tokens.shape, bool))


def _round_up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple


def _split(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(keys to keep, keys to use), a pair for each row."""
  pairs = jax.vmap(jax.random.split)(keys)
  return pairs[:, 0], pairs[:, 1]


@functools.partial(jax.jit, static_argnames=("cfg", "sampling", "stop_ids", "capacity"))
def _prefill(params, cfg, prompts: Prompts, keys, sampling, stop_ids, capacity) -> DecodeState:
  cache = init_cache(cfg, prompts.tokens_BT.shape[0], capacity)
  out = forward(params, cfg, prompts.tokens_BT, None, prompts.segments_BT, cache, from_start=True)
  keys, use = _split(keys)
  token_B = sample(use, out.logits_BTV[:, -1], sampling)
  return DecodeState(out.cache, token_B, is_stop(token_B, stop_ids), keys)


@functools.partial(jax.jit, static_argnames=("cfg", "sampling", "stop_ids", "steps"), donate_argnames="state")
def _decode(params, cfg, state: DecodeState, padding_B, sampling, stop_ids, steps):
  """`steps` more tokens [B, steps]; rows that are done repeat arbitrary ids."""

  def step(state: DecodeState, _):
    cache = state.cache
    segments_B1 = jnp.ones((padding_B.shape[0], 1), jnp.int32)
    positions_B1 = (cache.length - padding_B)[:, None]
    out = forward(params, cfg, state.token_B[:, None], positions_B1, segments_B1, cache)
    keys, use = _split(state.keys)
    token_B = sample(use, out.logits_BTV[:, 0], sampling)
    return DecodeState(out.cache, token_B, state.done_B | is_stop(token_B, stop_ids), keys), token_B

  state, new_CB = jax.lax.scan(step, state, length=steps)
  return state, new_CB.T
