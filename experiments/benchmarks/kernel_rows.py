"""The programs of the table of kernels: what each computes, at which shapes, beside whom."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.topk import topk, topk_bits, topk_mask

Array = tuple[tuple[int, ...], str]  # shape and dtype


@dataclass(frozen=True)
class Row:
  """One program.

  Attributes:
    task: rows of a task stand together and are compared with its first.
    arguments: of `function`, by shape and dtype.
    trips: of kernels' loops whose trip count depends on data, by a part of the kernel's name, those of the
      loops with the most bundles first; a loop without a number counts once (a transfer in pieces).
    note: what the trips stand for.
  """

  task: str
  name: str
  function: Callable[..., Any]
  arguments: tuple[Array, ...]
  trips: tuple[tuple[str, tuple[float, ...]], ...] = ()
  note: str = ""


TOPK = "top 2,048 of [64, 131072] float32"
SCORES = (((64, 131_072), "float32"),)
K = 2048


def _of(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
  return functools.partial(_selected, function, implementation)


def _selected(function, implementation, scores):
  return function(scores, K, implementation)


def _indices(scores, k, implementation):
  return topk(scores, k, implementation)[1]


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
    "256 neighbouring selected positions of 8 rows span up to 4 · 8,192 of the row's positions; at most 16",
  ),
  Row(TOPK, "reference, bool mask by bisection", _of(topk_mask, "reference"), SCORES),
  Row(TOPK, "jax.lax.top_k", lambda scores: jax.lax.top_k(scores, K), SCORES),
)


def structs(row: Row, sharding) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding) for shape, dtype in row.arguments]
