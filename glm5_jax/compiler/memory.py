"""Which buffers a program holds at its fullest, from what the compiler writes about its buffer assignment."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from glm5_jax.compiler.hlo import Instruction, Module, Shape, parse_shapes

_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(?:, color (\d+))?, ?(.*):$")
_VALUE = re.compile(
  r" value: <\d+ ([\w.\-<>~]+?)(\{[\d,]*\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_DEVICE_MEMORY = 0  # the colour of HBM in the buffer assignment


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
  """`total_bytes` is what the compiler compares with the device's memory; `buffers` are live at the peak."""

  total_bytes: int
  buffers: tuple[Buffer, ...]


def read_assignment(folder: Path, module: Module) -> Assignment | None:
  """Reads the compiler's dump of the one module in `folder`; None where it wrote none.

  Buffers that share a place (the state of a loop and what is written into it) count once. Largest first.
  """
  texts = {
    what: next(iter(sorted(folder.glob(f"*after_optimizations-{what}.txt"))), None)
    for what in ("buffer-assignment", "live-range", "memory-usage-report")
  }
  if texts["buffer-assignment"] is None:
    return None
  read = {what: path.read_text(errors="replace") if path else "" for what, path in texts.items()}
  return parse_assignment(read["buffer-assignment"], read["live-range"], read["memory-usage-report"], module)


def parse_assignment(assignment: str, live_ranges: str, usage: str, module: Module) -> Assignment:
  """The same, from the texts of the three files; the last two may be empty."""
  live = _live_at_peak(live_ranges)
  total = 0
  places: dict[tuple[int, int], list[Buffer]] = {}
  allocation = (0, "")
  for line in assignment.splitlines():
    if head := _ALLOCATION.match(line):
      number, size, colour, description = head.groups()
      in_memory = int(colour or 0) == _DEVICE_MEMORY and "thread-local" not in description
      total += int(size) if in_memory else 0
      allocation = (int(number), _kind(description) if in_memory else "")
    elif allocation[1] and (value := _VALUE.match(line)):
      name, element, _, size, offset, text = value.groups()
      if text.startswith("(") or (live is not None and name + (element or "{}") not in live):
        continue  # a table of pointers, or not there at the peak
      buffer = Buffer(name, allocation[1], parse_shapes(text)[0], int(size), "")
      places.setdefault((allocation[0], int(offset)), []).append(buffer)
  stated = re.search(r"\(color=0\)\s*\nTotal bytes: (\d+)", usage)
  buffers = [_named(values, module) for values in places.values()]
  buffers.sort(key=lambda buffer: -buffer.bytes)
  return Assignment(int(stated[1]) if stated else total, tuple(buffers))


def _kind(description: str) -> str:
  if description.startswith("parameter"):
    return "argument"
  if "live-out" in description:
    return "output"
  return "constant" if description.startswith("constant") else "temporary"


def _live_at_peak(live_ranges: str) -> set[str] | None:
  """Names with their element, "while.30{2}"; None where the file says nothing of the peak."""
  _, found, listing = live_ranges.partition("(peak):\n")
  if not found:
    return None
  names = set()
  for line in listing.splitlines():
    entry = re.match(r"\s+([\w.\-<>~]+\{[\d,]*\}): \d+ bytes \(cumulative", line)
    if entry is None:
      break
    names.add(entry[1])
  return names


def _named(values: Iterable[Buffer], module: Module) -> Buffer:
  """The largest of the values that share a place, named after the one that says most about its origin."""
  ordered = sorted(values, key=lambda value: -value.bytes)
  largest = [value for value in ordered if value.bytes == ordered[0].bytes]

  def origin(value: Buffer) -> tuple[int, str]:
    instruction = module.find(value.name)
    if instruction is None or not instruction.op_name:
      return 0, ""
    return _saying(instruction), instruction.op_name

  best = max(largest, key=lambda value: origin(value)[0])
  return dataclasses.replace(best, op_name=origin(best)[1])


def _saying(instruction: Instruction) -> int:
  """Parameters of loops and copies tell less about where a buffer comes from than what computes it."""
  if instruction.opcode in ("while", "parameter", "get-tuple-element", "tuple"):
    return 1
  return 2 if instruction.opcode in ("copy", "copy-start", "bitcast", "custom-call", "broadcast") else 3
