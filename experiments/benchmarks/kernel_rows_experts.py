"""Rows of the table of kernels: the grouped matmul of a mixture of experts, forward and both gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.kernel_row import Array, Row, Trips
from pallas_kernels.grouped_matmul import grouped_matmul, tpu

M, K, N = 32_768, 6144, 2048  # rows, in, out
SIZES = (8191, 1021, 4099, 7001, 3001, 509, 6007, 2939)  # no boundary is one of blocks of rows
E = len(SIZES)
FLOPS = 2.0 * M * K * N

X: Array = ((M, K), "bfloat16")
W: Array = ((E, K, N), "bfloat16")
GRAD: Array = ((M, N), "bfloat16")
SIZES_E: Array = ((E,), "int32")

SHAPE = f"{M:,} rows × {K:,} × {N:,}, {E} groups, bfloat16"
FORWARD = f"grouped matmul of {SHAPE}"
OF_ROWS = f"its gradient of the rows, {SHAPE}"
OF_MATRICES = f"its gradient of the matrices, {SHAPE}"


def _forward(product: Callable[..., Any]) -> Callable[..., Any]:
  return lambda x, w, sizes: product(x, w, sizes)


def _of_rows(product: Callable[..., Any]) -> Callable[..., Any]:
  return lambda x, w, sizes, grad: jax.vjp(lambda x: product(x, w, sizes), x)[1](grad)


def _of_matrices(product: Callable[..., Any]) -> Callable[..., Any]:
  return lambda x, w, sizes, grad: jax.vjp(lambda w: product(x, w, sizes), w)[1](grad)


def _ours(x, w, sizes):
  return grouped_matmul(x, w, sizes, "tpu")


def _dense(equation: str, *arguments: Array) -> tuple[Callable[..., Any], tuple[Array, ...]]:
  """XLA's product of as many groups of equal size."""

  def rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 3 else (E, M // E, shape[1])

  return lambda a, b: jnp.einsum(equation, a, b), tuple((rows(shape), kind) for shape, kind in arguments)


def _visits(tile: int, empty: bool = False) -> tuple[np.ndarray, np.ndarray]:
  """First row, and the one behind the last, of the tile of each visit."""
  plan = tpu.visits(jnp.array(SIZES, jnp.int32), M, tile, empty=empty, rest=True)
  return np.asarray(plan.begin_V), np.asarray(plan.end_V)


def _per_step(generation: str, visits: int, parts: int, *counts: int) -> tuple[float, ...]:
  """Counts of all visits of a part of the matrices as averages over the steps of a core; two do nothing."""
  parts //= 2 if generation == "v5p" else 1
  return tuple(count * parts / (visits * parts + 2) for count in counts)


def _trips_of_rows(parts: int) -> Callable[[str], Trips]:
  """Blocks multiplied, and cleared, in a visit."""
  begin, end = _visits(tpu.TILE_ROWS)
  behind = -(-end // tpu.BLOCK_ROWS)
  multiplied = int(np.sum(behind - begin // tpu.BLOCK_ROWS))
  cleared = int(np.sum(tpu.TILE_ROWS // tpu.BLOCK_ROWS - behind))
  return lambda generation: (
    ("grouped_matmul", _per_step(generation, begin.size, parts, multiplied, cleared)),
  )


def _trips_of_matrices(parts: int) -> Callable[[str], Trips]:
  """Strips of the sum cleared, blocks multiplied, and strips written, in a visit."""
  begin, end = _visits(tpu.TILE_ROWS, empty=True)
  multiplied = int(np.sum(-(-end // tpu.BLOCK_ROWS) - begin // tpu.BLOCK_ROWS))
  strips = E * tpu.SUM_ROWS // tpu.SUM_STRIP
  return lambda generation: (
    ("grouped_matmul", _per_step(generation, begin.size, parts, strips, multiplied, strips)),
  )


def _ragged_trips(parts: int, parts_of_v5p: int) -> Callable[[str], Trips]:
  """Of XLA's kernel, by the tiles that it writes beside it as "ragged_dot_tiling"."""

  def trips(generation: str) -> Trips:
    tile, count = (128, parts_of_v5p) if generation == "v5p" else (256, parts)
    visits = M // tile + E - 1
    return ("ragged-dot-none", (visits * count,)), ("ragged-dot-metadata", (visits / E,))

  return trips


def _moved(x_times: int, grad_times: int) -> tuple[tuple[str, float], ...]:
  """Matrices once; rows of both kinds as often as there are parts of the other's width."""
  return (("grouped_matmul", 2.0 * (E * K * N + M * K * x_times + M * N * grad_times)),)


ALL = (X, W, SIZES_E, GRAD)
UNBALANCED = "groups of " + ", ".join(map(str, SIZES))
EXPERTS = (
  Row(FORWARD, "ours", _forward(_ours), ALL[:3], _trips_of_rows(N // 1024), FLOPS, UNBALANCED, _moved(2, 1)),
  Row(FORWARD, "XLA's batched matmul, equal groups", *_dense("gbk,gkn->gbn", X, W), flops=FLOPS),
  Row(
    FORWARD,
    "jax.lax.ragged_dot",
    _forward(jax.lax.ragged_dot),
    ALL[:3],
    _ragged_trips(N // 512, N // 128),
    flops=FLOPS,
  ),
  Row(OF_ROWS, "ours", _of_rows(_ours), ALL, _trips_of_rows(K // 3072), FLOPS, UNBALANCED, _moved(1, 2)),
  Row(OF_ROWS, "XLA's batched matmul, equal groups", *_dense("gbn,gkn->gbk", GRAD, W), flops=FLOPS),
  Row(
    OF_ROWS,
    "jax.lax.ragged_dot",
    _of_rows(jax.lax.ragged_dot),
    ALL,
    _ragged_trips(-(-K // 1792), -(-K // 640)),
    flops=FLOPS,
  ),
  Row(
    OF_MATRICES,
    "ours",
    _of_matrices(_ours),
    ALL,
    _trips_of_matrices(K // 1024),
    FLOPS,
    UNBALANCED,
    _moved(1, 6),
  ),
  Row(OF_MATRICES, "XLA's batched matmul, equal groups", *_dense("gbk,gbn->gkn", X, GRAD), flops=FLOPS),
  Row(OF_MATRICES, "jax.lax.ragged_dot", _of_matrices(jax.lax.ragged_dot), ALL, flops=FLOPS),
)
