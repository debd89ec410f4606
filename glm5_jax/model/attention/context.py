"""What every attention kind is given and gives back, and the cache that decoding keeps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.parallel import spmd


class LayerCache(NamedTuple):
  """One layer's past. In the 744B shape 576 numbers a token, plus 128 where an indexer scores keys."""

  latent_BSL: jax.Array  # normalised latent, then rotated shared key: L = C + R
  index_key_BSJ: jax.Array | None = None  # rotated indexer keys; None where no key is ever scored


class Cache(NamedTuple):
  """All layers' past and which slots are filled.

  `length` is the number of slots written, a scalar when rows advance together (left-padded prompts),
  [B] when each row has its own (speculation).
  """

  layers: tuple[LayerCache, ...]
  segment_ids_BS: jax.Array  # 0 marks a slot that no query may see
  length: jax.Array


class Selection(NamedTuple):
  """Keys that a query may attend to, one set for all heads. Exactly one field is set."""

  bits_BTW: jax.Array | None = None  # int32, a bit a key; pallas_kernels.topk.bits has their order
  indices_BTK: jax.Array | None = None  # int32 ascending, −1 where there are fewer than K


class AttentionContext(NamedTuple):
  """Per forward pass, shared by all layers."""

  rope: tuple[jax.Array, jax.Array]  # cos, sin [B, T, R/2] float32
  slots_BT: jax.Array  # index of each query among the keys
  segments_BT: jax.Array  # segment of each query; 0 is padding
  key_segments_BS: jax.Array  # segment of each key
  cache_length: jax.Array | None = None  # where new keys are written; None without a cache
  from_start: bool = False  # cached pass that fills an empty cache: only the new keys need be read


class AttentionOutput(NamedTuple):
  """What an attention kind returns."""

  out_BTD: jax.Array
  selection: Selection | None  # handed on to a following layer that shares it
  cache: LayerCache | None
  indexer_kl: jax.Array | None = None  # scalar: sum over this shard's queries, where the config asks for it


def visible(ctx: AttentionContext, begin: int, end: int, keys: int) -> jax.Array:
  """bool [B, end − begin, keys]: causal, within one segment, never padding."""
  slots = jnp.arange(keys, dtype=jnp.int32)
  causal = slots[None, None] <= ctx.slots_BT[:, begin:end, None]
  query_segments = ctx.segments_BT[:, begin:end, None]
  same = ctx.key_segments_BS[:, None, :keys] == query_segments
  return causal & same & (query_segments != 0)


def query_blocks(cfg: ModelConfig, ctx: AttentionContext) -> list[tuple[int, int, int]]:
  """(begin, end, keys) of each block of queries: keys beyond a block's end are causally invisible.

  Without a cache this halves the work and bounds the memory of a block's [T, S] tensors. With one,
  slots are traced values, so every block sees all S slots. On a mesh with `context`, a shard has one
  piece of the row's first half and one of its second.
  """
  T, S = ctx.slots_BT.shape[1], ctx.key_segments_BS.shape[1]
  block = cfg.query_block or max(128, -(-T // 8))
  if spmd.size("context") > 1:
    pieces = ((0, T // 2, S // 2), (T // 2, T, S))
    return [(b, min(b + block, end), keys) for begin, end, keys in pieces for b in range(begin, end, block)]
  static = ctx.cache_length is None or ctx.from_start
  return [(b, min(b + block, T), min(b + block, T) if static else S) for b in range(0, T, block)]


def write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
  """Puts new [B, T, …] into cache [B, S, …] at slot `start`, a scalar or one per row [B].

  The caller guarantees start + T ≤ S: a dynamic update slice would otherwise shift, silently.
  """
  new = new.astype(cache.dtype)
  if start.ndim == 0:
    return jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=1)
  return jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice_in_dim(c, n, s, axis=0))(cache, new, start)
