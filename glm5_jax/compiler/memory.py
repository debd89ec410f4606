"""Which buffers a program holds at its fullest, from what the compiler writes about its buffer assignment."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from glm5_jax.compiler.hlo import Instruction, Module, Shape, parse_shapes

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(?:, color (\d+))?, ?(.*):$")
_VALUE = re.compile(
  r" value: <\d+ ([\w.\-<>~]+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_RANGE = re.compile(r"\s+([\w.\-<>~]+\{[\d,]*\}):(\d+)-(\d+)$")
_DEVICE_MEMORY = 0  # the colour of HBM in the buffer assignment

Place = tuple[int, int]  # allocation and offset in it


@dataclasses.dataclass(frozen=True)
class Buffer:
  """Bytes of one place in device memory. `kind`: "argument", "output", "temporary" or "constant"."""

  name: str
  kind: str
  shape: Shape
  bytes: int
  op_name: str  # the path of scopes of the instruction that fills it; an argument's own path


@dataclasses.dataclass(frozen=True)
class Assignment:
  """`total_bytes` is what the compiler compares with the device's memory; `buffers` are there at the peak."""

  total_bytes: int
  buffers: tuple[Buffer, ...]


class _Value(NamedTuple):
  """A line of the buffer assignment; `key` is its name in the live ranges."""

  name: str
  key: str
  kind: str
  shape: Shape
  bytes: int


def read_assignment(folder: Path, module: Module) -> Assignment | None:
  """Reads the compiler's dump of the one module in `folder`; None where it wrote none."""

  def text(what: str) -> str | None:
    path = next(iter(sorted(folder.glob(f"*after_optimizations-{what}.txt"))), None)
    return path.read_text(errors="replace") if path else None

  assignment = text("buffer-assignment")
  if assignment is None:
    return None
  return parse_assignment(assignment, text("live-range") or "", text("memory-usage-report") or "", module)


def parse_assignment(assignment: str, live_ranges: str, usage: str, module: Module) -> Assignment:
  """Reads the texts of the three files, of which the last two may be empty.

  Values that share a place (the state of a loop and what is written into it) are one buffer. Arguments and
  outputs hold their places all the time; of the temporaries those are given that are there when they are
  most together, without `live_ranges` all of them. Largest first.
  """
  total = 0
  places: dict[Place, list[_Value]] = {}
  number, kind = 0, ""
  for line in assignment.splitlines():
    if head := _ALLOCATION.match(line):
      number, colour, description = int(head[1]), int(head[3] or 0), head[4]
      counts = colour == _DEVICE_MEMORY and "thread-local" not in description
      total += int(head[2]) if counts else 0
      kind = _kind(description) if counts else ""
    elif kind and (value := _VALUE.match(line)):
      name, element, size, offset, text = value.groups()
      if not text.startswith("("):  # a tuple's own value is a table of pointers
        found = _Value(name, name + (element or "{}"), kind, parse_shapes(text)[0], int(size))
        places.setdefault((number, int(offset)), []).append(found)
  stated = re.search(r"\(color=0\)\s*\nTotal bytes: (\d+)", usage)
  ranges = {m[1]: (int(m[2]), int(m[3])) for line in live_ranges.splitlines() if (m := _RANGE.match(line))}
  moment = _fullest_moment(places, ranges)
  buffers = [_buffer(values, there, module) for values, there in _there(places, ranges, moment)]
  buffers.sort(key=lambda buffer: -buffer.bytes)
  return Assignment(int(stated[1]) if stated else total, tuple(buffers))


def _kind(description: str) -> str:
  if description.startswith("parameter"):
    return "argument"
  if "live-out" in description:
    return "output"
  return "constant" if description.startswith("constant") else "temporary"


def _fullest_moment(places: Mapping[Place, Sequence[_Value]], ranges: Mapping[str, tuple[int, int]]) -> int:
  """Position in the schedule at which the temporaries are largest together."""
  events = []  # (position, whether a value begins, its place, its bytes); ends go before beginnings
  for place, values in places.items():
    for value in values:
      if value.kind == "temporary" and value.key in ranges:
        start, end = ranges[value.key]
        events += [(start, True, place, value.bytes), (end + 1, False, place, value.bytes)]
  held: dict[Place, Counter[int]] = {}
  total = most = moment = 0
  for position, begins, place, count in sorted(events, key=lambda event: event[:2]):
    sizes = held.setdefault(place, Counter())
    before = max(sizes, default=0)
    sizes[count] += 1 if begins else -1
    if not sizes[count]:
      del sizes[count]
    total += max(sizes, default=0) - before
    if total > most:
      most, moment = total, position
  return moment


def _there(
  places: Mapping[Place, Sequence[_Value]], ranges: Mapping[str, tuple[int, int]], moment: int
) -> Iterator[tuple[Sequence[_Value], Sequence[_Value]]]:
  """The values of each occupied place: all that ever lie there, and those that do at that moment."""
  for values in places.values():
    there = [v for v in values if v.kind != "temporary" or not ranges or _covers(ranges.get(v.key), moment)]
    if there:
      yield values, there


def _covers(interval: tuple[int, int] | None, moment: int) -> bool:
  return interval is not None and interval[0] <= moment <= interval[1]


def _buffer(values: Sequence[_Value], there: Sequence[_Value], module: Module) -> Buffer:
  """The largest value that is there, named after the one of its shape that says most about its origin."""
  largest = max(there, key=lambda value: value.bytes)
  alike = [value for value in values if value.shape.dims == largest.shape.dims]
  best = max(alike, key=lambda value: (_telling(module.find(value.name)), value in there))
  instruction = module.find(best.name)
  op_name = instruction.op_name if instruction else ""
  return Buffer(largest.name, largest.kind, largest.shape, largest.bytes, op_name)


def _telling(instruction: Instruction | None) -> int:
  """Parameters of loops and copies tell less about where a buffer comes from than what computes it."""
  if instruction is None or not instruction.op_name:
    return 0
  if instruction.opcode in ("while", "parameter", "get-tuple-element", "tuple"):
    return 1
  return 2 if instruction.opcode in ("copy", "copy-start", "bitcast", "custom-call", "broadcast") else 3
