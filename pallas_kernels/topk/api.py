"""Public interface of top-k selection.

Rules, the same for every implementation: −0.0 counts as +0.0 and NaN as −∞; ties go to the lowest
index; an entry of −∞ is never selected. The set is therefore that of `jax.lax.top_k` on the cleaned
row, less its −∞ entries, on every back end, shard and batch layout. No gradient passes.

`implementation` is "reference" | "tpu" (Pallas) | "tpu_interpret" (the same kernels on any back end, slowly).
None picks by back end, and the reference for what the kernels do not take: no or empty rows, or rows of more
than 2^18 scores. One that is asked for by name refuses those with a ValueError.
"""

from typing import Any

import jax

from pallas_kernels.topk import reference, tpu

IMPLEMENTATIONS: dict[str, Any] = {
  "reference": reference,
  "tpu": tpu,
  "tpu_interpret": tpu.Interpreted,
}
RUN_ANYWHERE = ("reference", "tpu_interpret")


def _pick(implementation: str | None, scores: jax.Array):
  name = implementation or ("tpu" if jax.default_backend() == "tpu" else "reference")
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"topk implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}")
  refusal = None if name == "reference" else tpu.refusal(scores)
  if refusal and implementation:
    raise ValueError(f"topk implementation {name!r}: {refusal}")
  return IMPLEMENTATIONS["reference" if refusal else name]


def _checked(scores: jax.Array, k: int) -> tuple[jax.Array, int]:
  if k < 1:
    raise ValueError(f"k = {k} selects nothing; k must be at least 1")
  if scores.dtype != "float32":
    raise ValueError(f"topk takes float32 scores, got {scores.dtype}")
  return jax.lax.stop_gradient(scores), min(k, scores.shape[-1])


def topk(scores: jax.Array, k: int, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
  """The min(k, S) largest of each row of float32 scores [..., S].

  Returns (values, indices), each [..., min(k, S)], indices int32 ascending; slots without a finite
  key hold −∞ and −1, at the end. Raises ValueError for k < 1, another dtype or an unknown name.
  """
  scores, k = _checked(scores, k)
  return _pick(implementation, scores).topk(scores, k)


def topk_mask(scores: jax.Array, k: int, implementation: str | None = None) -> jax.Array:
  """The same selection as a boolean mask [..., S]."""
  scores, k = _checked(scores, k)
  return _pick(implementation, scores).topk_mask(scores, k)


def topk_bits(scores: jax.Array, k: int, implementation: str | None = None) -> jax.Array:
  """The same selection as int32 words [..., bits.words(S)], a bit a position; see `bits` for their order."""
  scores, k = _checked(scores, k)
  return _pick(implementation, scores).topk_bits(scores, k)
