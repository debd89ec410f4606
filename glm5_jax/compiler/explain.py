"""Says why a program does not fit: which buffers, by how much, and which settings would help."""

import dataclasses
import re
from collections.abc import Collection, Sequence

from glm5_jax.compiler.memory import Assignment, Buffer
from glm5_jax.compiler.text import size
from glm5_jax.compiler.topology import Topology
from glm5_jax.errors import UserError

LISTED = 10


@dataclasses.dataclass(frozen=True)
class Dims:
  """Sizes of the model by which buffers are recognised; 0 where unknown. `layers`: of each scanned stack."""

  vocab: int = 0
  hidden: int = 0
  sequence: int = 0
  layers: tuple[int, ...] = ()
  tensor: int = 1  # shards of mesh.tensor, which divides the vocabulary


@dataclasses.dataclass(frozen=True)
class Advice:
  """A setting that would make some of the buffers smaller; `bytes` is what these hold now."""

  setting: str
  reason: str
  bytes: int


@dataclasses.dataclass(frozen=True)
class Explanation:
  """`needed` of `available` bytes a device; buffers largest first, advice by the bytes it is about."""

  topology: str
  needed: int
  available: int
  buffers: tuple[Buffer, ...]
  advice: tuple[Advice, ...]

  def line(self) -> str:
    """One line: how much over, the largest buffer, the settings."""
    over = f"{self.topology}: does not fit, {size(self.needed)} of {size(self.available)} a device"
    largest = f"; largest: {describe(self.buffers[0])}" if self.buffers else ""
    settings = ", ".join(advice.setting for advice in self.advice)
    return f"{over}{largest}" + (f"; would help: {settings}" if settings else "")

  def table(self) -> str:
    """Several lines for a terminal."""
    over, factor = self.needed - self.available, self.needed / self.available
    large = [buffer for buffer in self.buffers[:LISTED] if buffer.bytes * 1000 > self.needed]
    lines = [
      f"{self.topology}: the program needs {size(self.needed)} a device and {size(self.available)} are there "
      f"({size(over)} too much, {factor:.2f} times the memory).",
      "Largest buffers at the fullest moment:",
      *(f"  {size(buffer.bytes):>12}  {describe(buffer, with_bytes=False)}" for buffer in large),
    ]
    if self.advice:
      lines.append("Settings that would help:")
      lines += [f"  {size(a.bytes):>12}  {a.setting}: {a.reason}" for a in self.advice]
    return "\n".join(lines)


class DoesNotFit(UserError):
  """The compiler refused the program for its memory; `explanation` has the particulars."""

  def __init__(self, explanation: Explanation):
    super().__init__(explanation.line())
    self.explanation = explanation


def describe(buffer: Buffer, with_bytes: bool = True) -> str:
  where = f" {short_path(buffer.op_name)}" if buffer.op_name else ""
  held = f", {size(buffer.bytes)}" if with_bytes else ""
  return f"{buffer.kind} {buffer.shape}{held}{where}"


def short_path(op_name: str, length: int = 72) -> str:
  """The end of a path of scopes, without the wrappers that every path has."""
  parts = [part for part in op_name.split("/") if part not in ("while", "body", "closed_call", "shard_map")]
  text = "/".join(parts)
  return text if len(text) <= length else "…" + text[-length + 1 :]


def parse_refusal(message: str) -> tuple[int, int] | None:
  """Bytes needed and available from the compiler's message; None if it is not about memory."""
  if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
    return None
  amount = r"\(?([\d.]+)([KMGT]?)\)?"
  for pattern in (rf"required.*?{amount} exceeds available HBM {amount}", rf"Used {amount} of {amount} hbm"):
    if found := re.search(pattern, message):
      needed, needed_unit, available, available_unit = found.groups()
      return _bytes(needed, needed_unit), _bytes(available, available_unit)
  return None


def _bytes(number: str, unit: str) -> int:
  return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def explain(
  message: str, topology: Topology, assignment: Assignment | None = None, dims: Dims | None = None
) -> Explanation | None:
  """Reads a refusal; None if it was not for memory.

  Args:
    message: the text of the compiler's error.
    assignment: what it had laid out when it gave up.
    dims: the model's sizes, to tell logits, saved activations and the rest apart.
  """
  amounts = parse_refusal(message)
  if amounts is None:
    return None
  buffers = assignment.buffers if assignment else ()
  return Explanation(topology.name, *amounts, buffers, tuple(advise(buffers, dims or Dims())))


def advise(buffers: Sequence[Buffer], dims: Dims) -> list[Advice]:
  """What would make these buffers smaller, by the rules of `_rule`; most bytes first."""
  arguments = {buffer.shape.dims for buffer in buffers if buffer.kind == "argument"}
  totals: dict[tuple[str, str], int] = {}
  for buffer in buffers:
    rule = _rule(buffer, dims, arguments)
    totals[rule] = totals.get(rule, 0) + buffer.bytes
  whole = sum(totals.values())
  advice = [Advice(*rule, held) for rule, held in totals.items() if held >= whole / 50]
  return sorted(advice, key=lambda a: -a.bytes)


_STATE = ("mesh.fsdp", "parameters, gradients and optimiser state are split over it; or take more chips")
_LOGITS = ("train.loss_chunk", "logits of fewer tokens at a time")
_SAVED = ("model.remat", "layers keep their activations for the backward pass; recompute or offload them")
_SQUARE = ("mesh.context", "scores of all pairs of positions; split the sequence, or attend in blocks")
_EXPERTS = ("mesh.expert", "rows on their way to experts, and experts, are split over it")
_ROWS = ("train.grad_accum", "fewer rows at a time; or more chips along mesh.data or mesh.fsdp")
_EXPERT_WORDS = re.compile(r"expert|moe|dispatch|combine|ragged|all_to_all|gmm|grouped", re.I)


def _rule(buffer: Buffer, dims: Dims, arguments: Collection[tuple[int, ...]]) -> tuple[str, str]:
  shape = buffer.shape.dims
  vocabulary = ({dims.vocab, dims.vocab // dims.tensor} - {0}) & set(shape)
  if buffer.kind == "argument" or shape in arguments or (vocabulary and dims.hidden in shape):
    return _STATE
  if vocabulary and len(shape) > 1:
    return _LOGITS
  if dims.sequence and sum(size == dims.sequence for size in shape) >= 2:
    return _SQUARE
  if _EXPERT_WORDS.search(buffer.op_name):
    return _EXPERTS
  if len(shape) > 1 and shape[0] in dims.layers:
    return _SAVED
  return _STATE if buffer.kind == "output" else _ROWS
