"""Public interface of the grouped matmul, dropless and differentiable.

Every implementation: rows past sum(group_sizes) give 0 and get no gradient, unless the caller wants nothing
of them; an empty group's weight gradient is exactly 0.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import blocks, ragged, reference, tpu

IMPLEMENTATIONS: dict[str, Any] = {
  "reference": reference,
  "ragged": ragged,
  "blocks": blocks,
  "tpu": tpu,
  "tpu_interpret": tpu.Interpreted,
}
RUN_ANYWHERE = tuple(name for name in IMPLEMENTATIONS if name != "tpu")
BY_BACKEND = {"cpu": "blocks", "tpu": "tpu"}


def _pick(implementation: str | None):
  name = implementation or BY_BACKEND.get(jax.default_backend(), "ragged")
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f"grouped_matmul implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}"
    )
  return IMPLEMENTATIONS[name]


def row_alignment(rows: int, groups: int, implementation: str | None = None) -> int:
  """The multiple that group sizes are best padded to before `grouped_matmul`, at this shape; 1: none."""
  return _pick(implementation).row_alignment(rows, groups)


def grouped_matmul(
  x_MK: jax.Array,
  w_EKN: jax.Array,
  group_sizes_E: jax.Array,
  implementation: str | None = None,
  alignment: int = 1,
  zero_rest: bool = True,
) -> jax.Array:
  """Row m of group e becomes x[m] @ w[e]; float32 accumulation, result [M, N] in x's dtype.

  Args:
    x_MK: rows in group order.
    w_EKN: one matrix a group.
    group_sizes_E: int32, with a sum of at most M.
    implementation: "reference" | "ragged" (jax.lax.ragged_dot) | "blocks" (a loop over blocks of
      rows) | "tpu" (Pallas kernels) | "tpu_interpret"; None picks by back end, since ragged_dot is about ten
      times slower on CPU, uses one of v5p's two cores, and has masked dense weight gradients.
    alignment: what the caller promises every group size to be a multiple of, where an implementation asks
      for that by `row_alignment`. Rows past the last group must be finite where that is "reference".
    zero_rest: False where nobody reads the rows past the last group, of the result and of x's gradient: they
      may then hold anything, and need not be written.
  """
  if x_MK.ndim != 2 or w_EKN.ndim != 3 or x_MK.shape[1] != w_EKN.shape[1]:
    raise ValueError(f"grouped_matmul needs x [M, K] and w [E, K, N], got {x_MK.shape} and {w_EKN.shape}")
  if group_sizes_E.shape != w_EKN.shape[:1]:
    raise ValueError(f"{w_EKN.shape[0]} matrices need as many group sizes, got {group_sizes_E.shape}")
  if not x_MK.shape[0]:
    return jnp.zeros((0, w_EKN.shape[2]), x_MK.dtype)
  return _pick(implementation).grouped_matmul(x_MK, w_EKN, group_sizes_E, alignment, zero_rest)
