"""Adds up a compiled program as it would run: loop bodies times trip counts, costlier branches taken."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from glm5_jax.compiler.collectives import MeshAxes, collective_of
from glm5_jax.compiler.flops import matmul_flops
from glm5_jax.compiler.hlo import HOST_SPACE, Instruction, Module, Shape
from glm5_jax.compiler.loops import Frame, trip_count

TOP = 10
# Custom calls that only tell the compiler something or wait for nothing.
_FREE_TARGETS = re.compile(
  r"AllocateBuffer|PrepareAsync|Assume|Sharding|Layout|Annotate|MoveTo|barrier", re.I
)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A Pallas call, as a caller sees it who wants to say how many FLOPs it does."""

  name: str
  op_name: str  # the path of scopes that it stands in
  operands: tuple[Shape, ...]
  results: tuple[Shape, ...]


FlopsOfKernel = float | Callable[[Kernel], float]


@dataclasses.dataclass(frozen=True)
class Op:
  """An instruction with the compiler's estimate: `cycles` in all `executions` together."""

  name: str
  kind: str
  op_name: str
  cycles: int
  executions: int


@dataclasses.dataclass(frozen=True)
class Unpriced:
  """Has no estimate of the compiler's; `cycles` is ours, at matrix-unit time, where FLOPs are known.

  Attributes:
    flops: of one execution, where known; `source` says from whom: "caller" or "kernel" (its own declaration).
    cycles: of all executions together, or None.
  """

  name: str
  kind: str
  op_name: str
  shape: str
  executions: int
  flops: float | None = None
  source: str = ""
  cycles: float | None = None


@dataclasses.dataclass(frozen=True)
class Exchange:
  """All collectives of one kind along the same axes; bytes a device, executions counted."""

  kind: str
  axis: str
  executions: int
  bytes: int
  wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Cost:
  """A program's cost on one device.

  Attributes:
    cycles: the compiler's estimates, added up.
    kernel_cycles: of the kernels whose FLOPs are known, as if the matrix units did nothing else.
    matmul_flops: of the matrix products outside kernels, recomputation included.
    host_bytes: copied to or from the host's memory.
    unknown_loops: op names of loops whose trip count depends on data, and how often they were counted.
    without_estimate: other instructions that should cost something but carry no estimate, by opcode.
  """

  cycles: int
  kernel_cycles: float
  matmul_flops: int
  host_bytes: int
  cycles_by_kind: dict[str, int]
  largest_ops: tuple[Op, ...]
  unpriced: tuple[Unpriced, ...]
  exchanges: tuple[Exchange, ...]
  unknown_loops: dict[str, int]
  without_estimate: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Execution:
  instruction: Instruction
  computation: str
  count: int


def executions(
  module: Module, unknown_loops: dict[str, int] | None = None, trips: Mapping[str, int] | None = None
) -> Iterator[Execution]:
  """Every instruction that is scheduled by itself, with how often it runs; fusions are not entered.

  Of a conditional the branch with the larger estimate is taken. Loops without a known trip count are
  followed as often as `trips` says of a part of their op name, or else once, and noted in `unknown_loops`.
  """
  noted = unknown_loops if unknown_loops is not None else {}
  yield from _walk(module, Frame(module.entry), 1, noted, trips or {})


def _walk(
  module: Module, frame: Frame, count: int, unknown: dict[str, int], expected: Mapping[str, int]
) -> Iterator[Execution]:
  for instruction in module.computations[frame.computation].values():
    yield Execution(instruction, frame.computation, count)
    if instruction.opcode == "while":
      trips = trip_count(module, frame, instruction)
      if trips is None:
        name = instruction.op_name or instruction.name
        unknown[name] = trips = next((times for part, times in expected.items() if part in name), 1)
      inner = Frame(instruction.called["body"], instruction, frame)
      if trips:
        yield from _walk(module, inner, count * trips, unknown, expected)
      yield from _walk(module, Frame(instruction.called["condition"]), count * (trips + 1), unknown, expected)
    elif instruction.opcode == "conditional":
      costliest = max(instruction.branches, key=lambda branch: _estimate(module, branch))
      yield from _walk(module, Frame(costliest), count, unknown, expected)
    elif instruction.opcode in ("call", "async-start"):
      callee = instruction.called.get("to_apply") or instruction.called.get("calls")
      if callee in module.computations:
        yield from _walk(module, Frame(callee), count, unknown, expected)


def _estimate(module: Module, computation: str) -> int:
  walked = _walk(module, Frame(computation), 1, {}, {})
  return sum((step.instruction.estimated_cycles or 0) * step.count for step in walked)


def program_cost(
  module: Module,
  mesh: MeshAxes,
  flops_per_cycle: int,
  priced_kernels: Mapping[str, FlopsOfKernel] | None = None,
  trips: Mapping[str, int] | None = None,
) -> Cost:
  """Adds up the whole module.

  Args:
    mesh: name and size of the mesh's axes, major first.
    flops_per_cycle: of a device, for the kernels.
    priced_kernels: FLOPs of one execution on one device, or a function of the Kernel that says so, by a
      part of the kernel's name or op name; the first that matches counts, before what the kernel declares.
    trips: of loops whose trip count depends on data, by a part of their op name; 1 for others.
  """
  unknown: dict[str, int] = {}
  by_kind: Counter[str] = Counter()
  silent: Counter[str] = Counter()
  ops: dict[tuple[str, str], Op] = {}
  unpriced: list[Unpriced] = []
  exchanged: dict[tuple[str, str], list[int]] = {}
  flops = host = 0
  for step in executions(module, unknown, trips):
    instruction, count = step.instruction, step.count
    flops += matmul_flops(module, step.computation, instruction) * count
    host += _host_bytes(instruction) * count
    collectives = collective_of(module, step.computation, instruction, mesh)
    for one in collectives:
      total = exchanged.setdefault((one.kind, one.axis), [0, 0, 0])
      for i, amount in enumerate((1, one.bytes, one.wire_bytes)):
        total[i] += amount * count
    cycles = instruction.estimated_cycles
    if cycles is not None:
      by_kind[instruction.opcode] += cycles * count
      _add(ops, Op(instruction.name, instruction.opcode, instruction.op_name, cycles * count, count))
    elif item := _unpriced(module, step, flops_per_cycle, priced_kernels or {}):
      unpriced.append(item)
    elif not collectives and instruction.opcode in _COSTLY:
      silent[instruction.opcode] += count
  return Cost(
    cycles=sum(by_kind.values()),
    kernel_cycles=sum(item.cycles or 0 for item in unpriced),
    matmul_flops=flops,
    host_bytes=host,
    cycles_by_kind=dict(by_kind.most_common()),
    largest_ops=tuple(sorted(ops.values(), key=lambda op: -op.cycles)[:TOP]),
    unpriced=_merged(unpriced),
    exchanges=tuple(
      sorted((Exchange(*key, *total) for key, total in exchanged.items()), key=lambda e: -e.wire_bytes)
    ),
    unknown_loops=unknown,
    without_estimate=dict(silent.most_common()),
  )


# Opcodes that take time when they stand alone. Scalars among them are too small to matter.
_COSTLY = frozenset(
  (
    "fusion",
    "convolution",
    "dot",
    "scatter",
    "gather",
    "reduce",
    "transpose",
    "concatenate",
    "select-and-scatter",
  )
)


def _unpriced(
  module: Module, step: Execution, flops_per_cycle: int, prices: Mapping[str, FlopsOfKernel]
) -> Unpriced | None:
  """The entry of a Pallas kernel, a sort or another custom call; None for anything else."""
  instruction = step.instruction
  shape = ", ".join(map(str, instruction.shapes))
  base = instruction.name.rstrip("0123456789").rstrip(".")
  if instruction.opcode == "sort":
    return Unpriced(base, "sort", instruction.op_name, shape, step.count)
  if instruction.opcode != "custom-call" or _FREE_TARGETS.search(instruction.target):
    return None
  if instruction.target != "tpu_custom_call":
    return Unpriced(base, instruction.target, instruction.op_name, shape, step.count)
  body = module.computations[step.computation]
  operands = tuple(s for name in instruction.operands if name in body for s in body[name].shapes)
  flops, source = _kernel_flops(
    instruction, Kernel(base, instruction.op_name, operands, instruction.shapes), prices
  )
  cycles = None if flops is None else flops / flops_per_cycle * step.count
  return Unpriced(base, "pallas", instruction.op_name, shape, step.count, flops, source, cycles)


def _kernel_flops(
  instruction: Instruction, kernel: Kernel, prices: Mapping[str, FlopsOfKernel]
) -> tuple[float | None, str]:
  for part, price in prices.items():
    if part in kernel.name or part in kernel.op_name:
      return float(price(kernel) if callable(price) else price), "caller"
  declared = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.attributes)
  return (float(declared[1]), "kernel") if declared and int(declared[1]) else (None, "")


def _add(ops: dict[tuple[str, str], Op], op: Op) -> None:
  """Equal operations, such as copies that unrolling made, count as one."""
  key = op.kind, op.op_name or op.name
  if before := ops.get(key):
    op = dataclasses.replace(
      op, cycles=op.cycles + before.cycles, executions=op.executions + before.executions
    )
  ops[key] = op


def _merged(items: list[Unpriced]) -> tuple[Unpriced, ...]:
  """Equal calls at different places as one; the most cycles, then the most executions, first."""
  merged: dict[tuple, Unpriced] = {}
  for item in items:
    key = (item.name, item.kind, item.op_name, item.shape, item.flops, item.source)
    if before := merged.get(key):
      cycles = None if item.cycles is None else item.cycles + (before.cycles or 0)
      item = dataclasses.replace(item, executions=item.executions + before.executions, cycles=cycles)
    merged[key] = item
  return tuple(sorted(merged.values(), key=lambda item: (-(item.cycles or 0), -item.executions)))


def _host_bytes(instruction: Instruction) -> int:
  """Bytes that a copy moves between the host's memory and the device's; the type lists both ends."""
  if not instruction.opcode.endswith("-start") or (
    "copy" not in instruction.opcode and "slice" not in instruction.opcode
  ):
    return 0
  ends = [shape for shape in instruction.shapes if shape.dims]
  on_host = sum(shape.space == HOST_SPACE for shape in ends)
  if not ends or on_host in (0, len(ends)):
    return 0
  return (max if instruction.opcode == "copy-start" else min)(shape.bytes for shape in ends)
