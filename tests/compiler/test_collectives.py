import math

import numpy as np
import pytest

from glm5_jax.compiler.collectives import collective_of, group_axes
from glm5_jax.compiler.hlo import parse_module
from tests.compiler.hlo_texts import COLLECTIVES

MESH = (("data", 2), ("fsdp", 4), ("expert", 2))


@pytest.mark.parametrize(
  ("groups", "axis", "size"),
  [
    ("{{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}", "expert", 2),
    ("{{0,2,4,6},{1,3,5,7},{8,10,12,14},{9,11,13,15}}", "fsdp", 4),
    ("{{0,8},{1,9},{2,10},{3,11},{4,12},{5,13},{6,14},{7,15}}", "data", 2),
    ("{}", "data × fsdp × expert", 16),
    ("{{0},{1},{2},{3},{4},{5},{6},{7},{8},{9},{10},{11},{12},{13},{14},{15}}", "none", 1),
    ("{{0,2},{4,6},{1,3},{5,7},{8,10},{12,14},{9,11},{13,15}}", "part of fsdp", 2),
    ("{{0,1,2},{3,4}}", "uneven groups", 3),
    ("[8,2]<=[16]", "expert", 2),
    ("[2,8]<=[16]", "fsdp × expert", 8),
    ("[4,4]<=[2,4,2]T(0,2,1)", "fsdp", 4),
    ("[8,2]<=[2,8]T(1,0)", "data", 2),
    ("[4,4]<=[2,4,2]T(1,0,2)", "data × expert", 4),
    ("mesh['a'=2,'b'=4,'c'=2] {'b'}", "fsdp", 4),
    ("mesh['a'=2,'b'=4,'c'=2] {'c','a'}", "data × expert", 4),
    ("mesh['a'=8,'b'=2], device_ids=([2,4,2]T(1,2,0)) {'b'}", "data", 2),
    ("mesh['a'=16] {'a':(2)4}", "fsdp", 4),  # the second factor of 2 × 4 × 2
    ("mesh['a'=16] {'a':(1)2}", "data", 2),
    ("mesh['a'=16] {'a':(2)2}", "part of fsdp", 2),
  ],
)
def test_axes_of_groups_in_every_spelling(groups, axis, size):
  assert group_axes(groups, MESH) == (axis, size)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_listed_groups_along_any_axes_are_recognised(axes):
  sizes = [size for _, size in MESH]
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  rest = [axis for axis in range(3) if axis not in axes]
  rows = ids.transpose(*rest, *axes).reshape(-1, math.prod(sizes[axis] for axis in axes))
  text = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"
  assert group_axes(text, MESH) == (" × ".join(MESH[axis][0] for axis in axes), rows.shape[1])


def found() -> dict[str, tuple]:
  module = parse_module(COLLECTIVES)
  mesh = (("fsdp", 2), ("expert", 4))
  return {
    instruction.name: (c.kind, c.axis, c.bytes, c.wire_bytes)
    for instruction in module.computations["main"].values()
    for c in collective_of(module, "main", instruction, mesh)
  }


def test_bytes_and_axes_of_each_kind():
  small, large, matrix = 512 * 256 * 2, 512 * 256 * 4, 4096 * 4096 * 2
  assert found() == {
    "gather": ("all-gather", "fsdp", 2 * small, small),
    "deal": ("all-to-all", "expert", large, large * 3 // 4),
    "start": ("all-gather", "expert", 4 * small, 3 * small),
    "total": ("all-reduce", "fsdp × expert", large, 2 * large * 7 // 8),
    "pass": ("collective-permute", "expert", small, small),
    # fused and padded by the compiler; the padding is not counted
    "scatter": ("reduce-scatter", "fsdp", matrix, matrix // 2),
  }
