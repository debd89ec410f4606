"""The grouped matmul that a CPU picks beside one batched matmul of equal groups: a ratio of times.

  python -m experiments.benchmarks.experts_cpu [--rounds 15]

Both run in turns, in rounds, and the ratio is of their medians, so that it carries over to other machines.
Groups are unbalanced and one is empty; "aligned" is how the model hands them in, each padded to whole blocks.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import grouped_matmul, row_alignment

# The 6 M-parameter benchmark's two products of one training step: 8 × 512 tokens, top 2 of 8 experts.
ROWS, GROUPS = 8192, 8
SHAPES = ((256, 256), (128, 256))
SHARES = (0.31, 0.02, 0.17, 0.0, 0.24, 0.05, 0.12, 0.09)


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rounds", type=int, default=15)
  rounds = parser.parse_args(argv).rounds
  block = row_alignment(ROWS, GROUPS)
  print("| rows × in × out | groups | forward | with both gradients |\n|---|---|---:|---:|")
  for width_in, width_out in SHAPES:
    for name, alignment in (("aligned", block), ("any size", 1)):
      ratios = [f"{ratio(width_in, width_out, alignment, both, rounds):.2f} ×" for both in (False, True)]
      print(f"| {ROWS:,} × {width_in} × {width_out} | {name} | " + " | ".join(ratios) + " |", flush=True)


def ratio(width_in: int, width_out: int, alignment: int, gradients: bool, rounds: int) -> float:
  """Median time of the grouped matmul over that of the batched one."""
  rng = np.random.default_rng(0)
  shapes = (ROWS, width_in), (GROUPS, width_in, width_out), (ROWS, width_out)
  x, w, grad = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
  sizes = jnp.asarray(np.array(SHARES) * ROWS // alignment * alignment, jnp.int32)
  x_GBK, grad_GBN = (a.reshape(GROUPS, -1, a.shape[1]) for a in (x, grad))

  def grouped(x, w):
    return grouped_matmul(x, w, sizes, alignment=alignment)

  def batched(x, w):
    return jnp.einsum("gbk,gkn->gbn", x, w)

  ours, theirs = _program(grouped, gradients), _program(batched, gradients)
  times: tuple[list[float], list[float]] = ([], [])
  for _ in range(rounds):
    for program, operands, seconds in (
      (ours, (x, w, grad), times[0]),
      (theirs, (x_GBK, w, grad_GBN), times[1]),
    ):
      seconds.append(_seconds(program, operands))
  return statistics.median(times[0]) / statistics.median(times[1])


def _program(product: Callable[..., Any], gradients: bool) -> Callable[..., Any]:
  def run(x, w, grad):
    if not gradients:
      return product(x, w)
    out, pull = jax.vjp(product, x, w)
    return out, *pull(grad)

  return jax.jit(run)


def _seconds(program: Callable[..., Any], operands: tuple[jax.Array, ...]) -> float:
  """Of one run; programs and operands are warm."""
  jax.block_until_ready(program(*operands))
  started = time.perf_counter()
  jax.block_until_ready(program(*operands))
  return time.perf_counter() - started


if __name__ == "__main__":
  main(sys.argv[1:])
