"""Public interface of top-k selection.

Rules, the same for every implementation: −0.0 counts as +0.0 and NaN as −∞; ties go to the lowest
index; an entry of −∞ is never selected. The set is therefore that of `jax.lax.top_k` on the cleaned
row, less its −∞ entries, on every back end, shard and batch layout.
"""

import jax

from pallas_kernels.topk import reference

IMPLEMENTATIONS = {"reference": reference}


def _pick(implementation: str | None):
  name = implementation or "reference"
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"topk implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}")
  return IMPLEMENTATIONS[name]


def _check(scores: jax.Array, k: int) -> None:
  if k < 1:
    raise ValueError(f"k = {k} selects nothing; k must be at least 1")
  if scores.dtype != "float32":
    raise ValueError(f"topk takes float32 scores, got {scores.dtype}")


def topk(scores: jax.Array, k: int, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
  """The min(k, S) largest of each row of float32 scores [..., S].

  Returns (values, indices), each [..., min(k, S)], indices int32 ascending; slots without a finite
  key hold −∞ and −1, at the end. Raises ValueError for k < 1, another dtype or an unknown name.
  """
  _check(scores, k)
  return _pick(implementation).topk(scores, min(k, scores.shape[-1]))


def topk_mask(scores: jax.Array, k: int, implementation: str | None = None) -> jax.Array:
  """The same selection as a boolean mask [..., S]."""
  _check(scores, k)
  return _pick(implementation).topk_mask(scores, min(k, scores.shape[-1]))
