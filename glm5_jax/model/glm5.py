"""GLM-5: embedding, scanned segments of decoder layers, head, and the shared multi-token prediction layer."""

from typing import Any, cast

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn

from glm5_jax.config import ModelConfig
from glm5_jax.model.attention.context import (
  AttentionContext,
  Cache,
  LayerCache,
  Selection,
  write,
)
from glm5_jax.model.attention.selection import GATHER_QUERIES
from glm5_jax.model.block import Unit
from glm5_jax.model.layers import embed, project, rms_norm, rope_tables
from glm5_jax.model.mtp import MultiTokenPrediction
from glm5_jax.model.plan import Segment, layer_plan
from glm5_jax.model.weights import normal, ones, weight
from glm5_jax.parallel import spmd
from pallas_kernels.topk import bits

EMBED_AXES, HEAD_AXES = ("vocab", "embed"), ("embed", "vocab")


class ModelOutput(flax.struct.PyTreeNode):
  """hidden is after the final norm; logits are float32 and cost nothing under jit where unused.

  aux: "router_counts", a tree like the parameters' with [E] (or [repeats, E]) leaves; "balance", the sum
  over rows and layers of the sequence balance loss; "indexer_kl", by "layer_i" and "mtp" (its depths added),
  the sum over queries, {} unless the config asks for it; "mtp_hidden_KBTD" where MTP was asked for.
  """

  hidden_BTD: jax.Array
  logits_BTV: jax.Array
  aux: dict[str, Any]
  cache: Any = None  # a Cache where one was given


class GLM5(nn.Module):
  """Pure function of (params, tokens): `GLM5(cfg).apply({"params": p}, tokens_BT) -> ModelOutput`."""

  cfg: ModelConfig

  @nn.compact
  def __call__(
    self,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    cache: Cache | None = None,
    mtp_depths: int = 0,
    from_start: bool = False,
  ) -> ModelOutput:
    """Runs the trunk, and `mtp_depths` depths of multi-token prediction beside it.

    On a mesh with `context` the arguments are whole rows, and what is returned has this shard's slots.

    Args:
      tokens_BT: int32 ids.
      positions_BT: rope positions; None counts from 0 in each segment.
      segment_ids_BT: documents of a packed row, 1, 2, …; 0 is padding, which nothing attends to. None is
        one document a row.
      cache: the past; new tokens are appended to it and returned in `.cache`. Needs `scan_layers` off.
      mtp_depths: 0, or how many depths to compute in training form (from tokens of the same row).
      from_start: the cache is empty, so that attention need only read the new tokens (prefill).
    """
    cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
    embed_VD, head_DV = vocabulary_weights(self, cfg)
    norm_D = weight(self, "final_norm", (cfg.hidden_size,), ("embed",), ones, cfg.param_dtype)
    if segment_ids_BT is None:
      segment_ids_BT = jnp.ones_like(tokens_BT)
    ctx, cache = attention_context(cfg, positions_BT, segment_ids_BT, cache, from_start)

    x_BTD = embed(embed_VD, spmd.take_mine(tokens_BT), dtype)
    self.sow("intermediates", "embedding_BTD", x_BTD)
    x_BTD, layer_caches, aux = self._trunk(x_BTD, ctx, cache)
    hidden_BTD = rms_norm(x_BTD, norm_D, cfg.rms_norm_eps)
    if cfg.num_nextn_predict_layers and (mtp_depths or self.is_initializing()):
      mtp = MultiTokenPrediction(cfg, name="mtp")
      depths = range(1, max(mtp_depths, 1) + 1)
      ahead_KBT = jnp.stack([spmd.take_mine(_shifted(tokens_BT, k)) for k in depths])
      future = list(embed(embed_VD, ahead_KBT, dtype))  # one lookup: its gradient is as large as the table
      contexts = [ctx._replace(segments_BT=spmd.take_mine(with_successor(segment_ids_BT, k))) for k in depths]
      hiddens, _, mtp_aux = mtp(hidden_BTD, future, contexts)
      aux["mtp_hidden_KBTD"] = jnp.stack(hiddens)
      if "counts_E" in mtp_aux:  # a dense layer has none
        aux["router_counts"]["mtp"] = {"block": mtp_aux["counts_E"]}
        aux["balance"] += mtp_aux["balance"]
      if "indexer_kl" in mtp_aux:
        aux["indexer_kl"]["mtp"] = mtp_aux["indexer_kl"]
    logits_BTV = project(hidden_BTD, head_DV, dtype).astype(jnp.float32)
    if cache is not None:
      length = cache.length + tokens_BT.shape[1]
      cache = Cache(layer_caches, cache.segment_ids_BS, length)
    return ModelOutput(hidden_BTD, logits_BTV, aux, cache)

  def _trunk(self, x_BTD: jax.Array, ctx: AttentionContext, cache: Cache | None):
    cfg = self.cfg
    if cache is not None and cfg.scan_layers:
      raise ValueError("a cache needs scan_layers=False: pass the params and config of plan.unstack")
    aux: dict[str, Any] = {"router_counts": {}, "balance": jnp.zeros((), jnp.float32), "indexer_kl": {}}
    carry = (x_BTD, empty_selection(cfg, ctx, x_BTD.shape[0]))
    new_caches = []
    for segment in layer_plan(cfg):
      caches = (None,) * segment.period if cache is None else cache.layers[segment.start :][: segment.period]
      carry, (layer_caches, unit_aux) = self._unit(segment)(carry, caches, ctx)
      new_caches.extend(layer_caches)
      routed = {block: a for block, a in unit_aux.items() if "counts_E" in a}
      if routed:
        aux["router_counts"][segment.name] = {block: a["counts_E"] for block, a in routed.items()}
        aux["balance"] += sum(jnp.sum(a["balance"]) for a in routed.values())
      aux["indexer_kl"] |= _by_layer(segment, "indexer_kl", unit_aux)
    return carry[0], tuple(new_caches), aux

  def _unit(self, segment: Segment) -> nn.Module:
    if not segment.stacked:
      return Unit(self.cfg, segment.unit, name=segment.name)
    scanned = nn.scan(
      Unit,
      variable_axes={"params": 0, "intermediates": 0},
      split_rngs={"params": True},
      in_axes=(nn.broadcast, nn.broadcast),
      length=segment.repeats,
      metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scanned(self.cfg, segment.unit, name=segment.name)


def _by_layer(segment: Segment, name: str, unit_aux: dict[str, dict[str, jax.Array]]) -> dict[str, jax.Array]:
  """{"layer_7": scalar, …} of what some blocks of a segment return by that name, stacked where it is."""
  found = {}
  for j in range(segment.period):
    if (values := unit_aux[f"block_{j}"].get(name)) is not None:
      for r, value in enumerate(jnp.atleast_1d(values)):
        found[f"layer_{segment.start + r * segment.period + j}"] = value
  return found


def vocabulary_weights(module: nn.Module, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """Declares embedding [V, D] and head [D, V] on `module`; a tied head is the embedding's transpose."""
  V, D, store = cfg.vocab_size, cfg.hidden_size, cfg.param_dtype
  embed_VD = weight(module, "embed", (V, D), EMBED_AXES, normal(cfg), store, cfg.dtype)
  if cfg.tie_word_embeddings:
    return embed_VD, embed_VD.T
  return embed_VD, weight(module, "head", (D, V), HEAD_AXES, normal(cfg), store, cfg.dtype)


def head_of(params: dict[str, Any], cfg: ModelConfig) -> jax.Array:
  """The output projection [D, V] of a parameter tree, whole also on a mesh."""
  if cfg.tie_word_embeddings:
    return spmd.gather_weight(params["embed"], EMBED_AXES, cfg.dtype).T
  return spmd.gather_weight(params["head"], HEAD_AXES, cfg.dtype)


def attention_context(
  cfg: ModelConfig,
  positions_BT: jax.Array | None,
  segments_BT: jax.Array,
  cache: Cache | None,
  from_start: bool,
) -> tuple[AttentionContext, Cache | None]:
  """Positions, slots and visibility of a pass; with a cache, its segments with the new ones written.

  Positions and segments are those of whole rows; the context's are this shard's.
  """
  T = segments_BT.shape[1]
  offsets_T = jnp.arange(T, dtype=jnp.int32)
  if cache is None or from_start:
    slots_BT = jnp.broadcast_to(offsets_T, segments_BT.shape)
    if positions_BT is None:
      positions_BT = slots_BT - _segment_starts(segments_BT)
  else:
    slots_BT = jnp.broadcast_to(cache.length[..., None] + offsets_T, segments_BT.shape)
    if positions_BT is None:
      raise ValueError("positions_BT must be given with a filled cache: padding before a row is not position")
  key_segments = segments_BT
  if cache is not None:
    cache = cache._replace(segment_ids_BS=write(cache.segment_ids_BS, segments_BT, cache.length))
    key_segments = segments_BT if from_start else cache.segment_ids_BS
  tables = rope_tables(spmd.take_mine(positions_BT), cfg.qk_rope_head_dim, cfg.rope_theta)
  length = None if cache is None else cache.length
  mine = spmd.take_mine(slots_BT), spmd.take_mine(segments_BT)
  ctx = AttentionContext(tables, *mine, key_segments, length, from_start)
  return ctx, cache


def _segment_starts(segments_BT: jax.Array) -> jax.Array:
  """Slot at which each token's segment begins, [B, T]."""
  slots = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
  first = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
  return jax.lax.cummax(jnp.where(first, slots, 0), axis=1)


def _shifted(tokens_BT: jax.Array, k: int) -> jax.Array:
  """tokens[i + k] at slot i; never wraps: slots without a successor in the row get id 0, and no loss."""
  return jnp.pad(tokens_BT[:, k:], ((0, 0), (0, min(k, tokens_BT.shape[1]))))


def with_successor(segments_BT: jax.Array, k: int) -> jax.Array:
  """Segments, 0 where the token k places ahead is another document's: such slots have no input at depth k."""
  return jnp.where(_shifted(segments_BT, k) == segments_BT, segments_BT, 0)


def empty_selection(cfg: ModelConfig, ctx: AttentionContext, batch: int) -> Selection | None:
  """What IndexShare's scans start from; None where every sparse layer selects for itself."""
  S, k = ctx.key_segments_BS.shape[1], cfg.index_topk
  shared = any(cfg.attention_kind(i) == "D" and not cfg.owns_indexer(i) for i in range(cfg.num_hidden_layers))
  if not shared or cfg.dsa_mode != "sparse" or k >= S:
    return None
  if ctx.cache_length is not None and ctx.slots_BT.shape[1] <= GATHER_QUERIES:
    return Selection(indices_BTK=jnp.full((batch, ctx.slots_BT.shape[1], k), -1, jnp.int32))
  return Selection(bits_BTW=jnp.zeros((batch, ctx.slots_BT.shape[1], bits.words(S)), jnp.int32))


def init_cache(cfg: ModelConfig, batch: int, capacity: int, layers: int | None = None) -> Cache:
  """An empty cache of `capacity` slots a row for `layers` (default: the trunk's) layers.

  Indexer keys are kept only where selection can happen: sparse mode and capacity > index_topk.
  """
  dtype = jnp.dtype(cfg.dtype)
  scored = cfg.dsa_mode == "sparse" and capacity > cfg.index_topk

  def layer_cache(layer: int) -> LayerCache:
    latent = jnp.zeros((batch, capacity, cfg.latent_width), dtype)
    if not (scored and cfg.owns_indexer(layer)):
      return LayerCache(latent)
    return LayerCache(latent, jnp.zeros((batch, capacity, cfg.index_head_dim), cfg.index_dtype))

  ids = range(cfg.num_hidden_layers) if layers is None else [cfg.num_hidden_layers] * layers
  return Cache(
    tuple(layer_cache(i) for i in ids),
    jnp.zeros((batch, capacity), jnp.int32),
    jnp.zeros((), jnp.int32),
  )


class Draft(nn.Module):
  """The MTP layer alone, one depth, with a cache: what self-speculation loops. Reads the trunk's tree."""

  cfg: ModelConfig

  @nn.compact
  def __call__(
    self,
    hidden_BTD: jax.Array,
    next_tokens_BT: jax.Array,
    positions_BT: jax.Array,
    segment_ids_BT: jax.Array,
    cache: Cache,
    from_start: bool = False,
  ) -> ModelOutput:
    """hidden of the depth before (0: the trunk's) and the tokens one depth ahead → this depth's."""
    cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
    embed_VD, head_DV = vocabulary_weights(self, cfg)
    ctx, written = attention_context(cfg, positions_BT, segment_ids_BT, cache, from_start)
    cache = cast(Cache, written)
    mtp = MultiTokenPrediction(cfg, name="mtp")
    (hidden_BTD,), (layer_cache,), _ = mtp(
      hidden_BTD, [embed(embed_VD, next_tokens_BT, dtype)], [ctx], cache.layers
    )
    logits_BTV = project(hidden_BTD, head_DV, dtype).astype(jnp.float32)
    cache = Cache((layer_cache,), cache.segment_ids_BS, cache.length + next_tokens_BT.shape[1])
    return ModelOutput(hidden_BTD, logits_BTV, {}, cache)


def forward(
  params: dict[str, Any], cfg: ModelConfig, tokens_BT: jax.Array, *args: Any, **kwargs: Any
) -> ModelOutput:
  """`GLM5(cfg)` applied to parameters; arguments as in its call."""
  return cast(ModelOutput, GLM5(cfg).apply({"params": params}, tokens_BT, *args, **kwargs))


def draft(
  params: dict[str, Any], cfg: ModelConfig, hidden_BTD: jax.Array, *args: Any, **kwargs: Any
) -> ModelOutput:
  """`Draft(cfg)` applied to the trunk's parameters; arguments as in its call."""
  return cast(ModelOutput, Draft(cfg).apply({"params": params}, hidden_BTD, *args, **kwargs))
