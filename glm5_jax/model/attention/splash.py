"""Causal attention within documents by jax's splash kernels, for TPU. No [T, S] tensor reaches memory.

On a mesh with `context` a shard's queries lie in two pieces of the row (see parallel.spmd.my_slots); the
kernel's plan, which skips what no query of a block sees, is made for the whole row and cut to the shard.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from glm5_jax.parallel import spmd

BLOCK = 1024  # queries and keys of a tile; larger ones leave the matrix units idle less
RESULT = "splash_result"  # name of the output and its log-sum-exp, for rematerialisation
LANES = 128  # rows are cut into multiples of it


def fits(queries: int, keys: int) -> bool:
  """Whether the kernels can tile a row of this length."""
  return queries % LANES == 0 and keys % LANES == 0


def attend_causal(
  q_BNTK: jax.Array,
  k_BNSK: jax.Array,
  v_BNSH: jax.Array,
  segments_BT: jax.Array,
  key_segments_BS: jax.Array,
  scale: float,
  interpret: bool = False,
) -> jax.Array:
  """softmax(q·k · scale) · v over earlier keys of the same segment, [B, N, T, H]; 0 for segment 0."""
  N, T, S = q_BNTK.shape[1], q_BNTK.shape[2], k_BNSK.shape[2]
  kernel = _kernel(N, T, S, interpret)
  segments = kernels.SegmentIds(q=segments_BT, kv=key_segments_BS)
  q_BNTK = (q_BNTK * scale).astype(q_BNTK.dtype)
  out = jax.vmap(kernel)(q_BNTK, k_BNSK, v_BNSH, segments)
  # The kernel lets padding attend to padding.
  return jnp.where((segments_BT != 0)[:, None, :, None], out, 0)


def _kernel(heads: int, queries: int, keys: int, interpret: bool):
  """The kernel over this shard's queries."""
  shards = spmd.size("context")
  block_q, block_kv = _block(queries // 2 if shards > 1 else queries), _block(keys)
  sizes = kernels.BlockSizes(
    block_q=block_q,
    block_kv=block_kv,
    block_q_dkv=block_q,
    block_kv_dkv=block_kv,
    block_kv_dkv_compute=_block(
      block_kv, BLOCK // 2
    ),  # a whole tile of gradients does not fit the scratch memory
    block_q_dq=block_q,
    block_kv_dq=block_kv,
  )
  mask = masks.MultiHeadMask([_Causal(keys, shards)] * heads)
  whole = kernels.make_splash_mha(
    mask,
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=shards,
    residual_checkpoint_name=RESULT,
    interpret=interpret,
  )
  if shards == 1:
    return whole
  plans, kwargs = whole.tree_flatten()
  mine = [_cut(plan, shards) for plan in plans]
  return kernels.SplashAttentionKernel(*mine, **kwargs)


def _cut(plan, shards: int):
  """The part of a mask's plan that concerns this shard's queries."""

  def part(x, axis: int):
    if x is None:
      return None
    size = x.shape[axis] // shards
    return jax.lax.dynamic_slice_in_dim(x, spmd.index("context") * size, size, axis)

  return plan._replace(
    data_next=part(plan.data_next, 1),
    mask_next=part(plan.mask_next, 1),
    block_mask=part(plan.block_mask, 1),
    q_sequence=part(plan.q_sequence, 0),
  )


class _Causal(masks.CausalMask):
  """A row's causal mask with the queries in the order in which the shards of `context` hold them."""

  def __init__(self, length: int, shards: int):
    super().__init__((length, length))
    if shards > 1:
      pieces = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
      order = np.stack([np.arange(shards), 2 * shards - 1 - np.arange(shards)], axis=1)
      self.q_sequence = pieces[order.reshape(-1)].reshape(-1)

  __hash__ = masks.CausalMask.__hash__


def _block(length: int, most: int = BLOCK) -> int:
  """The largest multiple of LANES up to `most` that divides the length."""
  return max(size for size in range(LANES, min(most, length) + 1, LANES) if length % size == 0)
