"""The lightning indexer in plain jnp: the oracle, and what runs where there is no kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels.topk import reference as topk
from pallas_kernels.topk.bits import pack

QUERY_BLOCK = 256  # scores of so many queries exist at a time


def scores(query_BTIJ: jax.Array, gate_BTI: jax.Array, key_BSJ: jax.Array) -> jax.Array:
  """Σ_i gate[t, i] · ReLU(query_i[t] · key[s]) in float32 [B, T, S].

  Heads are added one after another, so that [I, T, S] never exists; the order is part of the result.
  """

  def add_head(score_BTS, head):
    query_BTJ, gate_BT = head
    dots_BTS = jnp.einsum(
      "btj,bsj->bts",
      query_BTJ,
      key_BSJ,
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )
    return score_BTS + jax.nn.relu(dots_BTS) * gate_BT[..., None], None

  B, T, _, _ = query_BTIJ.shape
  heads = (jnp.moveaxis(query_BTIJ, 2, 0), jnp.moveaxis(gate_BTI, 2, 0))
  return jax.lax.scan(add_head, jnp.zeros((B, T, key_BSJ.shape[1]), jnp.float32), heads)[0]


def select(query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS) -> jax.Array:
  """See api.select."""
  T, block = query_BTIJ.shape[1], QUERY_BLOCK
  rows = (query_BTIJ, gate_BTI, slots_BT, segments_BT)

  def one(piece):
    query, gate, slots, segments = piece
    seen = visible(slots, segments, key_segments_BS)
    return pack(topk.topk_mask(jnp.where(seen, scores(query, gate, key_BSJ), -jnp.inf), k))

  def cut(x):
    x = jnp.pad(x, [(0, 0), (0, -T % block)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)

  if T <= QUERY_BLOCK:
    return one(rows)
  bits = jnp.moveaxis(jax.lax.map(one, tuple(cut(x) for x in rows)), 0, 1)
  return bits.reshape(bits.shape[0], -1, bits.shape[-1])[:, :T]


def select_indices(query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS) -> jax.Array:
  """See api.select_indices."""
  seen = visible(slots_BT, segments_BT, key_segments_BS)
  return topk.topk(jnp.where(seen, scores(query_BTIJ, gate_BTI, key_BSJ), -jnp.inf), k)[1]


def select_paged(query_BTIJ, gate_BTI, key_pages_PLJ, page_table_BN, slots_BT, k) -> jax.Array:
  """See api.select_paged."""
  key_BSJ = key_pages_PLJ.at[page_table_BN].get(mode="clip")
  key_BSJ = key_BSJ.reshape(key_BSJ.shape[0], -1, key_BSJ.shape[-1])
  ones_BS = jnp.ones(key_BSJ.shape[:2], jnp.int32)
  return select_indices(query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, jnp.ones_like(slots_BT), ones_BS)


def visible(slots_BT: jax.Array, segments_BT: jax.Array, key_segments_BS: jax.Array) -> jax.Array:
  """bool [B, T, S]: keys at or before the query's slot, in its segment, which is not 0."""
  key_slots = jnp.arange(key_segments_BS.shape[1], dtype=jnp.int32)
  same = key_segments_BS[:, None, :] == segments_BT[..., None]
  return same & (key_slots <= slots_BT[..., None]) & (segments_BT != 0)[..., None]
