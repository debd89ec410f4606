"""Public interface of the loss that trains the lightning indexer.

KL(p_t ‖ softmax(I_t)) of every query t: p_t is the mean of the main heads' softmax attention, I_t the scores
of `pallas_kernels.lightning_indexer`. Both are over the keys that t sees (dense warm-up), or over the
selected ones among them and renormalised there (sparse stage). p is a constant, so that the derivative by a
score is softmax(I) − p. Source: DeepSeek-V3.2 report. A query that sees nothing has 0, with gradient 0.

`implementation` is "reference"; None picks.
"""

from typing import Any

import jax

from pallas_kernels.indexer_loss import reference

IMPLEMENTATIONS: dict[str, Any] = {"reference": reference}


def indexer_loss(
  query_BTIJ: jax.Array,
  gate_BTI: jax.Array,
  key_BSJ: jax.Array,
  q_BNTL: jax.Array,
  k_BSL: jax.Array,
  slots_BT: jax.Array,
  segments_BT: jax.Array,
  key_segments_BS: jax.Array,
  bits_BTW: jax.Array | None = None,
  *,
  scale: float,
  implementation: str | None = None,
) -> jax.Array:
  """KL of every query, float32 [B, T]; a gradient passes to the first three arguments only.

  Args:
    query_BTIJ, gate_BTI, key_BSJ: of the indexer, as `lightning_indexer.select` takes them.
    q_BNTL, k_BSL: queries of N heads in absorbed form and the keys that all of them share.
    slots_BT, segments_BT, key_segments_BS: as in `lightning_indexer.select`.
    bits_BTW: the selection, int32 words as `topk.bits` orders them; None for every visible key.
    scale: of the main attention's logits.

  Raises:
    ValueError: an unknown implementation.
  """
  name = implementation or "reference"
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"indexer_loss implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}")
  q_BNTL, k_BSL = jax.lax.stop_gradient((q_BNTL, k_BSL))
  return IMPLEMENTATIONS[name].indexer_loss(
    query_BTIJ, gate_BTI, key_BSJ, q_BNTL, k_BSL, slots_BT, segments_BT, key_segments_BS, bits_BTW, scale
  )
