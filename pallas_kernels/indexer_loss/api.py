"""Public interface of the loss that trains the lightning indexer.

KL(p_t ‖ softmax(I_t)) of every query t: p_t is the mean of the main heads' softmax attention, I_t the scores
of `pallas_kernels.lightning_indexer`. Both are over the keys that the bits of t mark: all that it sees in the
dense warm-up, the selected ones, and so renormalised there, in the sparse stage. p is a constant, so that the
derivative by a score is softmax(I) − p. Source: DeepSeek-V3.2 report. A query that marks nothing has 0, with
gradient 0.

`implementation` is "reference" | "tpu" (Pallas) | "tpu_interpret" (the same kernels on any back end, slowly).
None picks by back end, and the reference for what the kernels do not take (index_head_dim that is no multiple
of 128). One that is asked for by name refuses that with a ValueError.
"""

from typing import Any

import jax

from pallas_kernels.indexer_loss import reference, tpu
from pallas_kernels.topk import bits

IMPLEMENTATIONS: dict[str, Any] = {
  "reference": reference,
  "tpu": tpu,
  "tpu_interpret": tpu.Interpreted,
}
RUN_ANYWHERE = ("reference", "tpu_interpret")


def indexer_loss(
  query_BTIJ: jax.Array,
  gate_BTI: jax.Array,
  key_BSJ: jax.Array,
  q_BNTL: jax.Array,
  k_BSL: jax.Array,
  bits_BTW: jax.Array,
  scale: float,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """(sum over queries, float32 scalar; KL of each, [B, T]).

  A gradient passes from the sum to the first three arguments, and none from the second result: the kernels
  form gradients while distributions are at hand, and can because the sum's cotangent is one number.

  Args:
    query_BTIJ, gate_BTI, key_BSJ: of the indexer, as `lightning_indexer.select` takes them.
    q_BNTL, k_BSL: queries of N heads in absorbed form and the keys that all of them share.
    bits_BTW: the keys that count, int32 words as `topk.bits` orders them.
    scale: of the main attention's logits.

  Raises:
    ValueError: bits of another shape, an unknown implementation, or one asked for by name that does not take
      these shapes.
  """
  name = implementation or ("tpu" if jax.default_backend() == "tpu" else "reference")
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"indexer_loss implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}")
  wanted = (*query_BTIJ.shape[:2], bits.words(key_BSJ.shape[1]))
  if bits_BTW.shape != wanted:
    raise ValueError(f"bits of shape {wanted} are needed, got {bits_BTW.shape}")
  refusal = None if name == "reference" else tpu.refusal(query_BTIJ, q_BNTL)
  if refusal and implementation:
    raise ValueError(f"indexer_loss implementation {name!r}: {refusal}")
  chosen = IMPLEMENTATIONS["reference" if refusal else name]
  q_BNTL, k_BSL = jax.lax.stop_gradient((q_BNTL, k_BSL))
  total, kl_BT = chosen.indexer_loss(query_BTIJ, gate_BTI, key_BSJ, q_BNTL, k_BSL, bits_BTW, scale)
  return total, jax.lax.stop_gradient(kl_BT)
