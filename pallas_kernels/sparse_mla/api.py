"""Public interface of attention over selected keys, MLA in expanded form: keys and values of every head.

out[t] = Σ_s p[t, s] · v[s] with p = softmax of q[t] · k[s] · scale over the keys s that t selects, the same
for all heads. Source: DeepSeek-V3.2 report. The selection comes as bits from `lightning_indexer.select` and
is causal and within documents already: nothing else masks. A row that selects nothing has 0, with gradient 0.

Queries, keys and values are all float32 or all bfloat16; logits, the softmax and every sum are float32.
Probabilities are multiplied in the dtype of the values; float32 products take six passes of the matrix unit.

`implementation` is "reference" | "tpu" (Pallas) | "tpu_interpret" (the same kernels on any back end, slowly).
None picks by back end, and the reference for what the kernels do not take (widths of heads that are no
multiple of 128, more than 2^17 pairs of tiles). One asked for by name refuses those with a ValueError.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.sparse_mla import reference, tpu
from pallas_kernels.topk import bits

IMPLEMENTATIONS: dict[str, Any] = {
  "reference": reference,
  "tpu": tpu,
  "tpu_interpret": tpu.Interpreted,
}
RUN_ANYWHERE = ("reference", "tpu_interpret")
DTYPES = ("float32", "bfloat16")
RESULT = "sparse_mla_result"


def attend_bits(
  q_BNTK: jax.Array,
  k_BNSK: jax.Array,
  v_BNSH: jax.Array,
  bits_BTW: jax.Array,
  scale: float,
  implementation: str | None = None,
) -> jax.Array:
  """Attention of every query over its selected keys, [B, N, T, H] in v's dtype.

  A gradient passes to q, k and v. The backward pass needs the output and float32 [B, N, T] of log-sum-exp;
  both have the name RESULT, by which a rematerialisation policy can keep them.

  Args:
    bits_BTW: int32 [B, T, topk.bits.words(S)], a bit a key; bits behind S are 0. Rows may stand in any order,
      as on a shard that has some of the queries and all keys; tiles of queries whose rows select in the same
      places have more to skip.
    scale: of the logits; a Python number.

  Raises:
    ValueError: other dtypes, shapes that do not belong together, an unknown implementation, or one asked for
      by name that does not take these shapes.
  """
  _check(q_BNTK, k_BNSK, v_BNSH, bits_BTW)
  name = _pick(implementation, tpu.refusal(q_BNTK, k_BNSK, v_BNSH))
  return _attend(q_BNTK, k_BNSK, v_BNSH, bits_BTW, float(scale), name)


def _check(q_BNTK, k_BNSK, v_BNSH, bits_BTW) -> None:
  dtypes = [str(x.dtype) for x in (q_BNTK, k_BNSK, v_BNSH)]
  if len(set(dtypes)) > 1 or dtypes[0] not in DTYPES:
    raise ValueError(f"q, k and v are all float32 or all bfloat16, got {', '.join(dtypes)}")
  shapes = q_BNTK.shape, k_BNSK.shape, v_BNSH.shape
  q, k, v = shapes
  if {len(shape) for shape in shapes} != {4} or not (
    q[:2] == k[:2] == v[:2] and k[2] == v[2] and q[3] == k[3] and 0 not in q + k + v
  ):
    raise ValueError(f"q [B, N, T, K], k [B, N, S, K] and v [B, N, S, H] are needed, got {q}, {k}, {v}")
  needed = (q[0], q[2], bits.words(k[2]))
  if bits_BTW.shape != needed or bits_BTW.dtype != "int32":
    raise ValueError(
      f"bits int32 {needed} are needed for {q[2]} queries and {k[2]} keys, "
      f"got {bits_BTW.dtype} {bits_BTW.shape}"
    )


def _pick(implementation: str | None, refusal: str | None) -> str:
  name = implementation or ("tpu" if jax.default_backend() == "tpu" else "reference")
  if name not in IMPLEMENTATIONS:
    known = ", ".join(IMPLEMENTATIONS)
    raise ValueError(f"sparse_mla implementation {name!r} is unknown; known: {known}")
  if name == "reference" or refusal is None:
    return name
  if implementation:
    raise ValueError(f"sparse_mla implementation {name!r}: {refusal}")
  return "reference"


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale: float, name: str) -> jax.Array:
  return IMPLEMENTATIONS[name].forward(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale)[0]


def _attend_forward(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale: float, name: str):
  results = IMPLEMENTATIONS[name].forward(q_BNTK, k_BNSK, v_BNSH, bits_BTW, scale)
  out_BNTH, lse_BNT = (checkpoint_name(x, RESULT) for x in results)
  return out_BNTH, (q_BNTK, k_BNSK, v_BNSH, bits_BTW, out_BNTH, lse_BNT)


def _attend_backward(scale: float, name: str, kept, gradient_BNTH):
  return *IMPLEMENTATIONS[name].backward(*kept, gradient_BNTH, scale), None


_attend.defvjp(_attend_forward, _attend_backward)
