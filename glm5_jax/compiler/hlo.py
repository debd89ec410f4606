"""Reads the text of a scheduled HLO module: computations, instructions, shapes and their layouts."""

import dataclasses
import functools
import math
import re

# Bits of an element.
BITS = {
  **dict.fromkeys(("s2", "u2"), 2),
  **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
  **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e3m4", "f8e8m0fnu"), 8),
  **dict.fromkeys(("f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz"), 8),
  **dict.fromkeys(("s16", "u16", "bf16", "f16"), 16),
  **dict.fromkeys(("s32", "u32", "f32"), 32),
  **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
  "c128": 128,
}
HOST_SPACE = 5  # the memory space that the TPU compiler prints as S(5)

_END = re.compile(r"\}(, execution_thread.*)?$")  # of a computation; a Pallas call may print a line "}}, …"
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-<>~]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-<>~]+) \(.*\{\s*$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|called_computation)=%?([\w.\-<>~]+)")
_NO_ESTIMATE = 2**63 - 1  # how the compiler prints that it has none


@dataclasses.dataclass(frozen=True)
class Shape:
  """One array: element type, logical dimensions, and where and how it lies in memory."""

  dtype: str
  dims: tuple[int, ...]
  order: tuple[int, ...] = ()  # dimension numbers, minor first
  tile: tuple[int, ...] = ()
  space: int = 0

  @property
  def bytes(self) -> int:
    """Of the elements alone."""
    return math.ceil(math.prod(self.dims) * BITS.get(self.dtype, 0) / 8)

  @property
  def padded_bytes(self) -> int:
    """With the last physical dimensions filled up to whole tiles, as it lies in memory."""
    order = self.order if len(self.order) == len(self.dims) else tuple(reversed(range(len(self.dims))))
    physical = [self.dims[d] for d in reversed(order)]
    count = min(len(self.tile), len(physical))
    for axis in range(1, count + 1):
      tile = self.tile[-axis]
      physical[-axis] = -(-physical[-axis] // tile) * tile
    return math.ceil(math.prod(physical) * BITS.get(self.dtype, 0) / 8)

  def __str__(self) -> str:
    return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.lru_cache(maxsize=65536)
def parse_shapes(text: str) -> tuple[Shape, ...]:
  """The arrays of a type, those of a tuple in order: "(f32[2,3]{1,0:T(8,128)}, s32[])"."""
  return tuple(_shape(*match.groups()) for match in _SHAPE.finditer(text))


def _shape(dtype: str, dims_text: str, layout: str | None) -> Shape:
  dims = _integers(dims_text.replace("<=", ""))
  if not layout:
    return Shape(dtype, dims)
  order, _, rest = layout.partition(":")
  tile = re.search(r"T\(([\d,]+)\)", rest)
  space = re.search(r"S\((\d+)\)", rest)
  return Shape(
    dtype, dims, _integers(order), _integers(tile[1]) if tile else (), int(space[1]) if space else 0
  )


def _integers(text: str) -> tuple[int, ...]:
  return tuple(int(number) for number in text.split(",") if number)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation. `text` is the whole line; attributes are read from it when asked for."""

  name: str
  opcode: str
  type: str
  operands: tuple[str, ...]  # names; of a constant or parameter, what stands in its parentheses
  text: str
  attributes: str  # what follows the operands
  is_root: bool = False

  @property
  def shapes(self) -> tuple[Shape, ...]:
    return parse_shapes(self.type)

  @functools.cached_property
  def called(self) -> dict[str, str]:
    """Computations by the attribute that names them: calls, to_apply, body, condition."""
    return dict(_CALLED.findall(self.attributes))

  @functools.cached_property
  def branches(self) -> tuple[str, ...]:
    """Computations of a conditional."""
    if listed := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
      return tuple(name.strip().lstrip("%") for name in listed[1].split(","))
    return tuple(re.findall(r"\b(?:true|false)_computation=%?([\w.\-<>~]+)", self.attributes))

  @property
  def op_name(self) -> str:
    """The path of scopes in the program that it came from."""
    found = re.search(r'op_name="([^"]*)"', self.attributes)
    return found[1] if found else ""

  @property
  def estimated_cycles(self) -> int | None:
    """The compiler's own estimate of one execution."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
    return int(found[1]) if found and int(found[1]) != _NO_ESTIMATE else None

  @property
  def target(self) -> str:
    """What a custom call calls."""
    found = re.search(r'custom_call_target="([^"]+)"', self.attributes)
    return found[1] if found else ""

  def integers(self, attribute: str) -> tuple[int, ...]:
    """`dimensions={1,2}` or `index=3` as numbers; () where there is none."""
    found = re.search(rf"\b{attribute}=\{{?([\d,]*)", self.attributes)
    return _integers(found[1]) if found else ()


Computation = dict[str, Instruction]  # by name, in the order of the schedule


@dataclasses.dataclass(frozen=True)
class Module:
  computations: dict[str, Computation]
  entry: str

  def root(self, computation: str) -> Instruction:
    instructions = list(self.computations[computation].values())
    return next((i for i in instructions if i.is_root), instructions[-1])

  def find(self, name: str) -> Instruction | None:
    """An instruction by name; names are unique in a module."""
    return self._index.get(name)

  @functools.cached_property
  def _index(self) -> Computation:
    return {name: i for body in self.computations.values() for name, i in body.items()}


def parse_module(text: str) -> Module:
  """Reads what `compiled.as_text()` prints.

  Raises:
    ValueError: there is no ENTRY computation.
  """
  computations: dict[str, Computation] = {}
  current: Computation | None = None
  entry = ""
  for line in _whole_lines(text):
    if _END.match(line):
      current = None
    elif current is None:
      if (head := _COMPUTATION.match(line)) and " -> " in line:
        current = computations.setdefault(head[2], {})
        entry = head[2] if head[1] else entry
    elif (instruction := _instruction(line)) is not None:
      current[instruction.name] = instruction
  if not entry:
    raise ValueError("no ENTRY computation in the HLO text")
  return Module(computations, entry)


def _whole_lines(text: str):
  """Lines, with those that the printer breaks (inside metadata of kernels) joined again."""
  pending = ""
  for line in text.splitlines():
    begins = _END.match(line) or _INSTRUCTION.match(line) or (line[:1] not in (" ", "") and pending == "")
    if begins or (line.endswith("{") and " -> " in line):
      if pending:
        yield pending
      pending = line
    elif line.strip():
      pending = f"{pending} {line}" if pending else line
    elif pending:
      yield pending
      pending = ""
  if pending:
    yield pending


def _instruction(line: str) -> Instruction | None:
  head = _INSTRUCTION.match(line)
  if not head:
    return None
  type_end = _closing(line, head.end()) + 1 if line[head.end()] == "(" else line.index(" ", head.end())
  opcode = re.match(r"\s*([\w\-]+)\(", line[type_end : type_end + 80])
  if not opcode:
    return None
  opening = type_end + opcode.end() - 1
  closing = _closing(line, opening)
  inside = line[opening + 1 : closing]
  literal = opcode[1] in ("constant", "parameter")
  return Instruction(
    name=head[2],
    opcode=opcode[1],
    type=line[head.end() : type_end],
    operands=(inside,) if literal else tuple(re.findall(r"%([\w.\-<>~]+)", inside)),
    text=line,
    attributes=line[closing + 1 :],
    is_root=bool(head[1]),
  )


def _closing(line: str, opening: int) -> int:
  """Index of the parenthesis that closes the one at `opening`."""
  depth = 0
  for match in re.compile(r"[()]").finditer(line, opening):
    depth += 1 if match[0] == "(" else -1
    if depth == 0:
      return match.start()
  return len(line)
