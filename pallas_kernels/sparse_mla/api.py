"""Public interface of attention over selected keys.

out[t] = Σ_s softmax_s(q[t] · k[s] · scale) · v[s] over the keys s that the bits of query t mark, in float32
inside. The selection holds everything that decides what a query sees: causality, documents and padding are
already in it. A query that selects nothing gives 0, with gradient 0.

`implementation` is "reference" | "tpu" (Pallas) | "tpu_interpret" (the same kernels on any back end, slowly).
None picks by back end, and the reference for what the kernels do not take (head widths that are no multiple
of 128, an empty batch). One that is asked for by name refuses those with a ValueError.
"""

from typing import Any

import jax

from pallas_kernels.sparse_mla import reference, tpu
from pallas_kernels.topk import bits

IMPLEMENTATIONS: dict[str, Any] = {
  "reference": reference,
  "tpu": tpu,
  "tpu_interpret": tpu.Interpreted,
}
RUN_ANYWHERE = ("reference", "tpu_interpret")
RESULT = tpu.RESULT  # name of the kernels' output and log-sum-exp, for rematerialisation


def attend_bits(
  q_BNTK: jax.Array,
  k_BNSK: jax.Array,
  v_BNSH: jax.Array,
  bits_BTW: jax.Array,
  scale: float,
  implementation: str | None = None,
) -> jax.Array:
  """[B, N, T, H] in v's dtype; differentiable in q, k and v.

  Args:
    q_BNTK, k_BNSK, v_BNSH: expanded heads, all float32 or all bfloat16.
    bits_BTW: int32, the selected keys of each query, one set for all heads, as `topk.bits` orders them.
    scale: of the logits.

  Raises:
    ValueError: shapes or dtypes that do not belong together, an unknown implementation, or one asked for by
      name that does not take these shapes.
  """
  _check(q_BNTK, k_BNSK, v_BNSH, bits_BTW)
  name = implementation or ("tpu" if jax.default_backend() == "tpu" else "reference")
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"sparse_mla implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}")
  refusal = None if name == "reference" else tpu.refusal(q_BNTK, k_BNSK, v_BNSH)
  if refusal and implementation:
    raise ValueError(f"sparse_mla implementation {name!r}: {refusal}")
  chosen = IMPLEMENTATIONS["reference" if refusal else name]
  return chosen.attend_bits(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale)


def _check(q, k, v, bits_BTW) -> None:
  if {q.dtype, k.dtype, v.dtype} not in ({jax.numpy.dtype("float32")}, {jax.numpy.dtype("bfloat16")}):
    raise ValueError(f"q, k and v are all float32 or all bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}")
  B, N, T, K = q.shape
  S = k.shape[2]
  if k.shape != (B, N, S, K) or v.shape[:3] != (B, N, S):
    raise ValueError(
      f"q [B, N, T, K], k [B, N, S, K] and v [B, N, S, H] are needed, got {q.shape}, {k.shape}, {v.shape}"
    )
  if bits_BTW.shape != (B, T, bits.words(S)) or bits_BTW.dtype != "int32":
    wanted = (B, T, bits.words(S))
    raise ValueError(f"bits int32 {wanted} are needed for {S} keys, got {bits_BTW.dtype} {bits_BTW.shape}")
