"""How often the body of a while loop runs, read from the program.

Every scalar that decides about a loop is followed back to either a constant or `state[k] + offset`, where
`state` is what the loop carries. A loop counts if its condition compares one such value with a bound that
does not change, and its body adds a constant to that value.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from glm5_jax.compiler.hlo import Instruction, Module

# What passes its first operand on unchanged.
_TRANSPARENT = frozenset(
  ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier", "opt-barrier")
)
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_DEPTH = 32  # of a chain of instructions that is followed


@dataclasses.dataclass(frozen=True)
class Value:
  """A constant (`element` None) or element `element` of the loop's state, plus `offset`."""

  element: int | None
  offset: int


@dataclasses.dataclass(frozen=True)
class Frame:
  """One computation on the way down from the entry, with the loop whose body it is."""

  computation: str
  loop: Instruction | None = None
  parent: "Frame | None" = None


def trip_count(module: Module, frame: Frame, loop: Instruction) -> int | None:
  """Executions of the body of `loop`, an instruction of `frame.computation`; None where data decides."""
  if stated := re.search(r'known_trip_count\W+n\W+"?(\d+)', loop.attributes):
    return int(stated[1])
  condition, body = loop.called["condition"], loop.called["body"]
  comparison = _comparison(module, condition)
  if comparison is None:
    return None
  left, direction, right = comparison
  inner = Frame(body, loop, frame)
  if not _is_counter(module, inner, left):
    left, direction, right = right, _MIRRORED.get(direction, ""), left
  if left.element is None or not _is_counter(module, inner, left):
    return None
  step = _step(module, body, left.element)
  start, bound = _initial(module, inner, left), _constant(module, inner, right)
  if step is None or start is None or bound is None:
    return None
  return _count(start, bound, step.offset, direction)


def _count(start: int, bound: int, step: int, direction: str) -> int | None:
  """Values of start, start + step, … that satisfy the comparison before the first that does not."""
  if direction == "NE":
    return (bound - start) // step if (bound - start) % step == 0 and (bound - start) // step >= 0 else None
  if direction not in ("LT", "LE", "GT", "GE") or (step > 0) != (direction in ("LT", "LE")):
    return None
  distance = (bound - start) * (1 if step > 0 else -1) + (1 if direction in ("LE", "GE") else 0)
  return max(0, math.ceil(distance / abs(step)))


def _comparison(module: Module, condition: str) -> tuple[Value, str, Value] | None:
  """Both sides of the comparison that is the root of a condition, fused or not."""
  root: Instruction | None = module.root(condition)
  outside: tuple[str, Mapping[int, str]] | None = None
  computation = condition
  while root is not None and root.opcode in ("fusion", "copy", "bitcast"):
    if root.opcode == "fusion":
      outside = (computation, dict(enumerate(root.operands)))
      computation = root.called["calls"]
      root = module.root(computation)
    else:
      root = module.computations[computation].get(root.operands[0])
  if root is None or root.opcode != "compare":
    return None
  sides = [_trace(module, computation, name, outside) for name in root.operands]
  direction = re.search(r"direction=(\w+)", root.attributes)
  if direction is None or len(sides) != 2 or sides[0] is None or sides[1] is None:
    return None
  return sides[0], direction[1], sides[1]


def _trace(
  module: Module,
  computation: str,
  name: str,
  outside: tuple[str, Mapping[int, str]] | None = None,
  depth: int = 0,
) -> Value | None:
  """What instruction `name` holds; `outside` maps a fusion's parameters to the caller's instructions."""
  instruction = module.computations[computation].get(name)
  if instruction is None or depth > _DEPTH:
    return None

  def follow(operand: str) -> Value | None:
    return _trace(module, computation, operand, outside, depth + 1)

  match instruction.opcode:
    case "constant":
      literal = re.fullmatch(r"\{?(-?\d+)\}?", instruction.operands[0])
      return Value(None, int(literal[1])) if literal else None
    case "parameter" if outside is not None:
      caller, arguments = outside
      return _trace(module, caller, arguments[int(instruction.operands[0])], None, depth + 1)
    case "get-tuple-element":
      return _element(module, computation, instruction, depth)
    case "add" | "subtract":
      values = [follow(operand) for operand in instruction.operands]
      return _sum(values, -1 if instruction.opcode == "subtract" else 1)
    case "fusion":
      inner = instruction.called["calls"]
      arguments = dict(enumerate(instruction.operands))
      return _trace(module, inner, module.root(inner).name, (computation, arguments), depth + 1)
    case opcode if opcode in _TRANSPARENT:
      return follow(instruction.operands[0])
  return None


def _sum(values: list[Value | None], sign: int) -> Value | None:
  left, right = values
  if left is None or right is None:
    return None
  if right.element is not None:
    if left.element is not None or sign < 0:
      return None
    left, right = right, left
  return Value(left.element, left.offset + sign * right.offset)


def _element(module: Module, computation: str, instruction: Instruction, depth: int) -> Value | None:
  """Element of a tuple: of the state, of a tuple made here, or one that a loop passed on unchanged."""
  (index,) = instruction.integers("index")
  source = module.computations[computation].get(instruction.operands[0])
  while source is not None and source.opcode in _TRANSPARENT:
    source = module.computations[computation].get(source.operands[0])
  if source is None:
    return None
  if source.opcode == "parameter":
    return Value(index, 0)
  if source.opcode == "while":
    if _step(module, source.called["body"], index) != Value(index, 0):
      return None
    source = module.computations[computation].get(source.operands[0])
  if source is None or source.opcode != "tuple":
    return None
  return _trace(module, computation, source.operands[index], None, depth + 1)


def _step(module: Module, body: str, element: int) -> Value | None:
  """What the body leaves in an element of the state."""
  root = module.root(body)
  if root.opcode != "tuple" or element >= len(root.operands):
    return None
  return _trace(module, body, root.operands[element])


def _is_counter(module: Module, frame: Frame, value: Value) -> bool:
  if value.element is None:
    return False
  after = _step(module, frame.computation, value.element)
  return after is not None and after.element == value.element and after.offset != 0


def _initial(module: Module, frame: Frame, value: Value) -> int | None:
  """Value on entry to the loop whose body `frame` is."""
  if value.element is None:
    return value.offset
  if frame.loop is None or frame.parent is None:
    return None
  outer = frame.parent.computation
  state = module.computations[outer].get(frame.loop.operands[0])
  while state is not None and state.opcode in _TRANSPARENT:
    state = module.computations[outer].get(state.operands[0])
  if state is None or state.opcode != "tuple":
    return None
  before = _trace(module, outer, state.operands[value.element])
  known = None if before is None else _constant(module, frame.parent, before)
  return None if known is None else known + value.offset


def _constant(module: Module, frame: Frame, value: Value) -> int | None:
  """Value that does not change while the loop runs."""
  if value.element is None:
    return value.offset
  if frame.loop is None or _step(module, frame.computation, value.element) != Value(value.element, 0):
    return None
  return _initial(module, frame, value)
