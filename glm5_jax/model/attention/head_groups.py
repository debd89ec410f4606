"""Attention of a few heads at a time, for rows so long that all heads' keys and values would not fit.

At 200 K tokens the expanded keys and values of 64 heads are 13 GB a layer, and their gradients as much again;
the latent that all of them are made of is 0.2 GB. So a group of heads is expanded, attended to and summed
into the output before the next; the backward pass expands it again, for a few per cent of what attention to a
row of that length costs, but keeps what the kernel returned.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from glm5_jax.model.attention import splash
from glm5_jax.model.attention.latent import Latent
from pallas_kernels import sparse_mla

KEEP_RESULTS = jax.checkpoint_policies.save_only_these_names(splash.RESULT, sparse_mla.RESULT)


def sum_over_groups(attend: Callable[[Latent], jax.Array], latent: Latent, heads: int) -> jax.Array:
  """[B, T, D]: `attend(latent)`, a sum over heads, with `heads` of them at a time; 0 takes all at once.

  `heads` divides the heads of this shard (config_checks sees to it).
  """
  N = latent.o_NHD.shape[0]
  if not heads or heads >= N:
    return attend(latent)

  def groups(w: jax.Array, axis: int) -> jax.Array:
    split = w.reshape(*w.shape[:axis], N // heads, heads, *w.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)

  def of_group(weights: tuple[jax.Array, ...]) -> jax.Array:
    up_QNK, k_b_CNP, v_b_CNH, o_NHD = weights
    query = latent.query._replace(up_QNK=up_QNK)
    part = latent._replace(query=query, k_b_CNP=k_b_CNP, v_b_CNH=v_b_CNH, o_NHD=o_NHD)
    return attend(part).astype(jnp.float32)

  def add_group(total_BTD: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    return total_BTD + jax.checkpoint(of_group, prevent_cse=False, policy=KEEP_RESULTS)(weights), None

  weights = (
    groups(latent.query.up_QNK, 1),
    groups(latent.k_b_CNP, 1),
    groups(latent.v_b_CNH, 1),
    groups(latent.o_NHD, 0),
  )
  B, T = latent.query.rank_BTQ.shape[:2]
  D = latent.o_NHD.shape[-1]
  total_BTD, _ = jax.lax.scan(add_group, jnp.zeros((B, T, D), jnp.float32), weights)
  return total_BTD.astype(latent.keys_BSL.dtype)
