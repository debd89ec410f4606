"""Public interface of the lightning indexer: scores of keys and the selection among them, in one.

score[t, s] = Σ_i gate[t, i] · ReLU(query_i[t] · key[s]), every scale of the formula folded into the gate.
Source: DeepSeek-V3.2 report. A query sees the keys at slots up to its own, in its own segment; segment 0 sees
nothing and is seen by nobody. Of those the k with the highest scores are selected, by the rules of
`pallas_kernels.topk`: ties to the lowest slot, a score of −∞ or NaN never, with at most k visible keys all.

Queries and keys are both float32 or both bfloat16, gates become float32, every sum is float32. bfloat16
products are exact, so one pass of the matrix unit; float32 ones take six passes, which costs as much more.
No gradient passes. Scores of a whole sequence never exist; a block of queries at a time has them.

`implementation` is "reference" | "tpu" (Pallas) | "tpu_interpret" (the same kernels on any back end, slowly).
None picks by back end, and the reference for what the kernels do not take (index_head_dim other than 128,
heads that are no multiple of 8, more than 2^19 keys, odd sizes of pages). One that is asked for by name
refuses those with a ValueError. The TPU kernels add heads in an order of their own, the same in all of them,
so that prefill and decoding select alike; the reference adds them one after another.
"""

from typing import Any

import jax

from pallas_kernels.lightning_indexer import paged, reference, tpu

IMPLEMENTATIONS: dict[str, Any] = {
  "reference": reference,
  "tpu": tpu,
  "tpu_interpret": tpu.Interpreted,
}
RUN_ANYWHERE = ("reference", "tpu_interpret")
DTYPES = ("float32", "bfloat16")


def _pick(implementation: str | None, refusal: str | None):
  name = implementation or ("tpu" if jax.default_backend() == "tpu" else "reference")
  if name not in IMPLEMENTATIONS:
    known = ", ".join(IMPLEMENTATIONS)
    raise ValueError(f"lightning_indexer implementation {name!r} is unknown; known: {known}")
  if name == "reference" or refusal is None:
    return IMPLEMENTATIONS[name]
  if implementation:
    raise ValueError(f"lightning_indexer implementation {name!r}: {refusal}")
  return reference


def _check(query_BTIJ, gate_BTI, keys, k: int, **by_shape: tuple[jax.Array, tuple[int, ...]]) -> None:
  if k < 1:
    raise ValueError(f"k = {k} selects nothing; k must be at least 1")
  if query_BTIJ.dtype != keys.dtype or query_BTIJ.dtype not in DTYPES:
    raise ValueError(
      f"queries and keys are both float32 or both bfloat16, got {query_BTIJ.dtype} and {keys.dtype}"
    )
  if query_BTIJ.ndim != 4 or keys.ndim != 3 or query_BTIJ.shape[3] != keys.shape[2]:
    raise ValueError(
      f"queries [B, T, I, J] and keys [·, ·, J] are needed, got {query_BTIJ.shape}, {keys.shape}"
    )
  for name, (array, shape) in {"gate": (gate_BTI, query_BTIJ.shape[:3]), **by_shape}.items():
    if array.shape != shape:
      raise ValueError(f"{name} of shape {shape} is needed for queries {query_BTIJ.shape}, got {array.shape}")


def select(
  query_BTIJ: jax.Array,
  gate_BTI: jax.Array,
  key_BSJ: jax.Array,
  k: int,
  slots_BT: jax.Array,
  segments_BT: jax.Array,
  key_segments_BS: jax.Array,
  implementation: str | None = None,
) -> jax.Array:
  """Selected keys of every query: int32 [B, T, bits.words(S)], a bit a key; see `topk.bits` for their order.

  Args:
    query_BTIJ, key_BSJ: rotated indexer queries and keys.
    gate_BTI: with the scales of the formula.
    k: keys a query; more than S is S.
    slots_BT: int32, index of each query among the keys.
    segments_BT, key_segments_BS: int32, 0 for padding and unwritten slots. Segments that stand in order, as
      packing makes them, let whole tiles of other documents be skipped.
    implementation: see the module.

  Raises:
    ValueError: k < 1, other dtypes, shapes that do not belong together, an unknown implementation, or one
      asked for by name that does not take these shapes.
  """
  args = _checked(query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS)
  return _pick(implementation, tpu.refusal(query_BTIJ, key_BSJ)).select(*args)


def select_indices(
  query_BTIJ: jax.Array,
  gate_BTI: jax.Array,
  key_BSJ: jax.Array,
  k: int,
  slots_BT: jax.Array,
  segments_BT: jax.Array,
  key_segments_BS: jax.Array,
  implementation: str | None = None,
) -> jax.Array:
  """The same selection as int32 [B, T, min(k, S)], ascending, −1 at the end: what few queries gather by."""
  args = _checked(query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS)
  return _pick(implementation, tpu.refusal(query_BTIJ, key_BSJ)).select_indices(*args)


def _checked(query_BTIJ, gate_BTI, key_BSJ, k, slots_BT, segments_BT, key_segments_BS) -> tuple:
  rows = query_BTIJ.shape[:2]
  _check(
    query_BTIJ, gate_BTI, key_BSJ, k, slots=(slots_BT, rows), segments=(segments_BT, rows),
    key_segments=(key_segments_BS, (rows[0], key_BSJ.shape[1])),
  )  # fmt: skip
  floats = jax.lax.stop_gradient((query_BTIJ, gate_BTI, key_BSJ))
  return *floats, min(k, key_BSJ.shape[1]), slots_BT, segments_BT, key_segments_BS


def select_paged(
  query_BTIJ: jax.Array,
  gate_BTI: jax.Array,
  key_pages_PLJ: jax.Array,
  page_table_BN: jax.Array,
  slots_BT: jax.Array,
  k: int,
  implementation: str | None = None,
) -> jax.Array:
  """Selected keys of a few queries a sequence, whose keys lie in pages: int32 [B, T, min(k, N · L)].

  Indices are positions in the sequence, ascending, −1 at the end: position p is row p % L of page
  page_table[b, p // L].

  Args:
    key_pages_PLJ: P pages of L keys, of all sequences.
    page_table_BN: int32, the n-th page of every sequence. Pages past a sequence's last query are not read for
      it and may be anything.
    slots_BT: int32, position of each query, which sees the keys up to it; −1 sees nothing.
    implementation: see the module.

  Raises:
    ValueError: as `select`.
  """
  B, T = query_BTIJ.shape[:2]
  table = (page_table_BN, (B, *page_table_BN.shape[1:2]))
  _check(query_BTIJ, gate_BTI, key_pages_PLJ, k, slots=(slots_BT, (B, T)), page_table=table)
  k = min(k, page_table_BN.shape[1] * key_pages_PLJ.shape[1])
  floats = jax.lax.stop_gradient((query_BTIJ, gate_BTI, key_pages_PLJ))
  refusal = paged.refusal(query_BTIJ, key_pages_PLJ, page_table_BN)
  return _pick(implementation, refusal).select_paged(*floats, page_table_BN, slots_BT, k)
