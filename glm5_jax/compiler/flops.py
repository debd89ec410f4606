"""Multiply-adds of the matrix products in a compiled program.

The TPU compiler writes every product as a convolution: batch dimensions become spatial ones with windows,
strides and dilations of which only some positions meet data. Those alone are counted, as XLA's own cost
analysis does.
"""

import functools
import math
import re

import numpy as np

from glm5_jax.compiler.hlo import Computation, Instruction, Module, Shape


def matmul_flops(module: Module, computation: str, instruction: Instruction) -> int:
  """FLOPs of one execution of a dot, a convolution, or a fusion with such inside; 0 for anything else."""
  body = module.computations[computation]
  if instruction.opcode == "dot":
    return _dot(body, instruction)
  if instruction.opcode == "convolution":
    return _convolution(body, instruction)
  if instruction.opcode == "fusion":
    inner = instruction.called.get("calls", "")
    return sum(matmul_flops(module, inner, i) for i in module.computations.get(inner, {}).values())
  return 0


def _operands(body: Computation, instruction: Instruction) -> tuple[Shape, Shape] | None:
  shapes = [body[name].shapes for name in instruction.operands[:2] if name in body]
  return (shapes[0][0], shapes[1][0]) if len(shapes) == 2 and all(shapes) else None


def _dot(body: Computation, instruction: Instruction) -> int:
  operands = _operands(body, instruction)
  if operands is None:
    return 0
  contracted = math.prod(operands[0].dims[d] for d in instruction.integers("lhs_contracting_dims"))
  return 2 * math.prod(instruction.shapes[0].dims) * contracted


def _convolution(body: Computation, instruction: Instruction) -> int:
  operands = _operands(body, instruction)
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
  if operands is None or labels is None:
    return 0
  (image, kernel), output = operands, instruction.shapes[0]
  image_labels, kernel_labels, output_labels = labels.groups()
  flops = 2 * output.dims[output_labels.index("b")] * output.dims[output_labels.index("f")]
  flops *= kernel.dims[kernel_labels.index("i")]
  window = _window(instruction.attributes)
  for axis in range(len(kernel_labels) - 2):
    label = str(axis)
    flops *= _meetings(
      image.dims[image_labels.index(label)],
      output.dims[output_labels.index(label)],
      kernel.dims[kernel_labels.index(label)],
      int(window["stride"][axis]) if "stride" in window else 1,
      int(window["pad"][axis].split("_")[0]) if "pad" in window else 0,
      int(window["lhs_dilate"][axis]) if "lhs_dilate" in window else 1,
      int(window["rhs_dilate"][axis]) if "rhs_dilate" in window else 1,
    )
  return flops


def _window(attributes: str) -> dict[str, list[str]]:
  """`window={size=8x1 pad=0_0x7_7}` as lists, an entry a spatial dimension."""
  found = re.search(r"window=\{([^}]*)\}", attributes)
  parts = re.findall(r"(\w+)=(\S+)", found[1]) if found else []
  return {key: value.split("x") for key, value in parts}


@functools.lru_cache(maxsize=4096)
def _meetings(image: int, output: int, kernel: int, stride: int, pad: int, dilate: int, spread: int) -> int:
  """Pairs of output position and kernel position, along one dimension, that read an element of the image."""
  if kernel == stride == dilate == 1 and pad == 0:
    return output
  length = (image - 1) * dilate + 1
  starts = np.arange(output, dtype=np.int64) * stride - pad
  total = 0
  for tap in range(kernel):
    places = starts + tap * spread
    total += int(((places >= 0) & (places < length) & (places % dilate == 0)).sum())
  return total
