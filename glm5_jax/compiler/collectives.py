"""Who exchanges how many bytes with whom: kind, mesh axes and sizes of the collectives of a program."""

import dataclasses
import functools
import math
import re

import numpy as np

from glm5_jax.compiler.hlo import Instruction, Module

KINDS = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)
MeshAxes = tuple[tuple[str, int], ...]  # name and size, major first: tuple(mesh.shape.items())


@dataclasses.dataclass(frozen=True)
class Collective:
  """One execution, seen from one device.

  Attributes:
    bytes: of the whole array that it gathers, reduces or deals out, per device: the result of an all-gather,
      the operand of everything else. Of a ragged all-to-all this is its buffer, of which rows may be unused.
    wire_bytes: what a device sends when each byte takes the shortest way around a ring.
  """

  kind: str
  axis: str
  group: int
  bytes: int
  wire_bytes: int


def collective_of(module: Module, computation: str, instruction: Instruction, mesh: MeshAxes):
  """The collectives that this instruction starts, itself or fused; [] for the "-done" halves."""
  kind = instruction.opcode.removesuffix("-start")
  body = module.computations[computation]
  if kind in KINDS:
    operands = instruction.operands[:1] if kind in ("ragged-all-to-all", "collective-permute") else None
    names = instruction.operands if operands is None else operands
    sent = sum(shape.bytes for name in names if name in body for shape in body[name].shapes)
    return [_describe(kind, instruction, sent, mesh)]
  inner = instruction.called.get("calls", "")
  if instruction.opcode not in ("fusion", "async-start") or inner not in module.computations:
    return []
  if "-done" in instruction.name:  # the second half of a fused pair; the first was counted
    return []
  found = [c for i in module.computations[inner].values() for c in collective_of(module, inner, i, mesh)]
  if module.root(inner).opcode == "dynamic-slice" and [c.kind for c in found] == ["all-reduce"]:
    # The compiler's fused form of a reduce-scatter: all-reduce of the padded operand, then one's own slice.
    reduce = next(i for i in module.computations[inner].values() if i.opcode.startswith("all-reduce"))
    sent = sum(shape.bytes for shape in body[instruction.operands[0]].shapes)
    return [_describe("reduce-scatter", reduce, sent, mesh)]
  return found


def _describe(kind: str, instruction: Instruction, sent: int, mesh: MeshAxes) -> Collective:
  if kind == "collective-permute":
    return Collective(kind, _permuted_axes(instruction.attributes, mesh), 2, sent, sent)
  axis, group = group_axes(_groups_text(instruction.attributes), mesh)
  whole = sent * group if kind == "all-gather" else sent
  passes = 2 if kind == "all-reduce" else 1
  wire = whole if kind == "collective-broadcast" else passes * whole * (group - 1) // max(group, 1)
  return Collective(kind, axis, group, whole, wire)


def _groups_text(attributes: str) -> str:
  found = re.search(
    r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\{[^}]*\})", attributes
  )
  return found[1] if found else "{}"


@functools.lru_cache(maxsize=1024)
def group_axes(groups: str, mesh: MeshAxes) -> tuple[str, int]:
  """Names the mesh axes along which the members of each group differ, and the size of a group.

  Args:
    groups: replica groups in any of the compiler's forms: lists {{0,1},{2,3}}, iota [2,2]<=[4]T(1,0), or
      axes of an unnamed mesh, mesh['a'=2,'b'=2] {'a'}. Members are positions in the flat mesh.
    mesh: the axes of the mesh that the program was compiled for.

  Returns:
    ("fsdp × context", 16); ("part of fsdp", 4) where a group is only a part of an axis; ("none", 1) for
    groups of one device.
  """
  sizes = [size for _, size in mesh]
  table = _group_table(groups, math.prod(sizes))
  group = len(table[0])
  if any(len(row) != group for row in table):
    return "uneven groups", max(map(len, table))
  coordinates = np.stack(np.unravel_index(np.array(table), sizes), axis=-1)  # [groups, members, axes]
  varies = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
  names = [name for (name, _), moves in zip(mesh, varies, strict=True) if moves]
  whole = math.prod(size for (_, size), moves in zip(mesh, varies, strict=True) if moves)
  label = " × ".join(names) or "none"
  return (label if group == whole else f"part of {label}"), group


def _permuted_axes(attributes: str, mesh: MeshAxes) -> str:
  found = re.search(r"source_target_pairs=(\{\{.*?\}\})", attributes)
  pairs = np.array(_lists(found[1])) if found else np.zeros((0, 2), int)
  source, target = (np.stack(np.unravel_index(end, [size for _, size in mesh])) for end in pairs.T)
  moves = (source != target).any(axis=-1)
  return " × ".join(name for (name, _), moved in zip(mesh, moves, strict=True) if moved) or "none"


def _lists(text: str) -> list[list[int]]:
  return [[int(n) for n in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", text)]


def _group_table(text: str, devices: int) -> list[list[int]]:
  if text.startswith("["):
    shape, iota = re.fullmatch(r"(\[[\d,]+\])<=(.*)", text).groups()  # type: ignore[union-attr]
    return _iota(iota).reshape(_numbers(shape)).tolist()
  if text.startswith("mesh"):
    return _mesh_groups(text)
  return _lists(text) or [list(range(devices))]


def _numbers(text: str) -> list[int]:
  return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
  """[4,8,2]T(0,2,1): 0 … 63 in that shape, transposed, flat."""
  shape, _, order = text.partition("T")
  ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
  return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _mesh_groups(text: str) -> list[list[int]]:
  """Groups along the axes in braces; an axis may be taken in part: 'a':(2)4 is its second factor, 4."""
  axes_text, _, rest = text.removeprefix("mesh[").partition("]")
  axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", axes_text)]
  ids_text = re.search(r"device_ids=\((.*?\]?(?:T\([\d,]+\))?)\)\s", rest)
  listed = re.search(r"device_ids=\(?\[?(\d+(?:,\d+)*)\]?\)?\s", rest) if ids_text is None else None
  count = math.prod(size for _, size in axes)
  ids = _iota(ids_text[1]) if ids_text else np.array(_numbers(listed[1])) if listed else np.arange(count)
  wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", rest[rest.rindex("{") :])
  shape: list[int] = []
  grouped: list[int] = []
  for name, size in axes:
    part = next((w for w in wanted if w[0] == name), None)
    if part is None:
      shape.append(size)
      continue
    before, taken = (int(part[1]), int(part[2])) if part[1] else (1, size)
    grouped.append(len(shape) + 1)
    shape += [before, taken, size // (before * taken)]
  order = [axis for axis in range(len(shape)) if axis not in grouped] + grouped
  members = math.prod(shape[axis] for axis in grouped)
  return ids.reshape(shape).transpose(order).reshape(-1, members).tolist()
