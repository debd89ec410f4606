"""The programs of the table of kernels: what each computes, at which shapes, beside whom."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.kernel_row import Row
from experiments.benchmarks.kernel_rows_attention import ATTENTION
from experiments.benchmarks.kernel_rows_experts import EXPERTS
from pallas_kernels.lightning_indexer import select, select_paged
from pallas_kernels.topk import topk, topk_bits, topk_mask

TOPK = "top 2,048 of [64, 131072] float32"
SCORES = (((64, 131_072), "float32"),)
K = 2048


def _of(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
  return functools.partial(_selected, function, implementation)


def _selected(function, implementation, scores):
  return function(scores, K, implementation)


def _indices(scores, k, implementation):
  return topk(scores, k, implementation)[1]


LONG, HEADS, WIDTH = 131_072, 32, 128
SQUARE = f"indexer of a causal square of {LONG:,}, {HEADS} heads × {WIDTH}, bfloat16, top {K:,}"
SQUARE_ARGUMENTS = (
  ((1, LONG, HEADS, WIDTH), "bfloat16"),
  ((1, LONG, HEADS), "float32"),
  ((1, LONG, WIDTH), "bfloat16"),
  ((1, LONG), "int32"),
  ((1, LONG), "int32"),
  ((1, LONG), "int32"),
)
SQUARE_FLOPS = LONG**2 / 2 * HEADS * WIDTH * 2
DECODE = f"indexer of 64 sequences at {LONG:,}, one query each, top {K:,}"


def _square(implementation: str) -> Callable[..., Any]:
  def run(query, gate, key, slots, segments, key_segments):
    return select(query, gate, key, K, slots, segments, key_segments, implementation)

  return run


def _square_trips() -> tuple[float, ...]:
  """Averages over blocks of 64 queries, of which the i-th sees 64 · (i + 1) keys.

  Tiles of 512 scored; none cleared before and some behind; chunks of 4,096 counted, packed and finished,
  between which those with the cut are looked for by eights.
  """
  seen = [64 * (i + 1) for i in range(LONG // 64)]
  tiles, chunks, eights = (
    sum(-(-keys // size) for keys in seen) / len(seen) for size in (512, 4096, 8 * 4096)
  )
  return tiles, 0, 8 * chunks - tiles, chunks, chunks, eights, chunks


def _paged(query, gate, key_pages, page_table, slots):
  return select_paged(query, gate, key_pages, page_table, slots, K, "tpu")


def _decode(page: int, note: str = "") -> Row:
  """64 sequences of full length in pages; a program has 8 of them: 64 tiles of 2,048 keys, 32 chunks each."""
  pages = LONG // page
  return Row(
    DECODE,
    f"ours, pages of {page}",
    _paged,
    (
      ((64, 1, HEADS, WIDTH), "bfloat16"),
      ((64, 1, HEADS), "float32"),
      ((64 * pages, page, WIDTH), "bfloat16"),
      ((64, pages), "int32"),
      ((64, 1), "int32"),
    ),
    (("lightning_indexer_paged", (32, *[64] * 8, 8, 32, 4, 32)),),
    note=note,
  )


ROWS = (
  Row(TOPK, "ours, bits", _of(topk_bits, "tpu"), SCORES),
  Row(TOPK, "ours, bool mask", _of(topk_mask, "tpu"), SCORES),
  Row(TOPK, "ours, indices", _of(_indices, "tpu"), SCORES),
  Row(
    TOPK,
    "ours, values and indices",
    _of(topk, "tpu"),
    SCORES,
    (("topk_values", (4,)),),
    note="256 neighbouring selected positions of 8 rows span 4 · 8,192 of the row, of 16 at most",
  ),
  Row(TOPK, "reference, bool mask by bisection", _of(topk_mask, "reference"), SCORES),
  Row(TOPK, "jax.lax.top_k", lambda scores: jax.lax.top_k(scores, K), SCORES),
  Row(
    SQUARE,
    "ours, bits",
    _square("tpu"),
    SQUARE_ARGUMENTS,
    (("lightning_indexer", _square_trips()),),
    SQUARE_FLOPS,
    "trips are averages over the blocks of queries",
  ),
  Row(SQUARE, "reference, in blocks", _square("reference"), SQUARE_ARGUMENTS, flops=SQUARE_FLOPS),
  _decode(256),
  _decode(64, "all sequences are full"),
  *ATTENTION,
  *EXPERTS,
)


def structs(row: Row, sharding) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding) for shape, dtype in row.arguments]
