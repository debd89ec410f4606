"""The report of one program compiled for a TPU slice: memory, cycles, exchanges; as JSON, table or page."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5_jax.compiler.cost import TOP, Cost
from glm5_jax.compiler.explain import describe, short_path
from glm5_jax.compiler.memory import Buffer
from glm5_jax.compiler.text import seconds, si, size
from glm5_jax.compiler.topology import Topology


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a device as the compiler laid them out.

  Attributes:
    aliased: of the outputs, what lies in donated arguments.
    needed: what the compiler compares with the device's memory: arguments, outputs that are not aliased,
      temporaries and constants, gaps between them included.
    host_*: in the memory of the host, for each device.
  """

  arguments: int
  outputs: int
  aliased: int
  temporaries: int
  code: int
  needed: int
  host_arguments: int = 0
  host_outputs: int = 0
  host_temporaries: int = 0

  @property
  def host(self) -> int:
    return self.host_arguments + self.host_outputs + self.host_temporaries


@dataclasses.dataclass(frozen=True)
class Report:
  """What the compiler says of one program. Everything is of one device unless its name says otherwise.

  Attributes:
    model_flops: of the whole program over all devices, counted by the caller from the model; None if not.
    compile_seconds: of the compiler alone; `lower_seconds` is tracing and lowering before it.
    peak_rss: bytes of this process's memory at its largest so far.
  """

  title: str
  topology: Topology
  mesh: dict[str, int]
  memory: Memory
  buffers: tuple[Buffer, ...]
  cost: Cost
  model_flops: float | None
  lower_seconds: float
  compile_seconds: float
  peak_rss: int

  @property
  def headroom(self) -> float:
    """Share of the device's usable memory that is left."""
    return 1 - self.memory.needed / self.topology.generation.usable_hbm_bytes

  @property
  def cycles(self) -> float:
    """The compiler's estimate and the kernels' matrix-unit time."""
    return self.cost.cycles + self.cost.kernel_cycles

  @property
  def seconds(self) -> float:
    return self.cycles / self.topology.generation.ghz / 1e9

  @property
  def wire_bytes(self) -> int:
    return sum(exchange.wire_bytes for exchange in self.cost.exchanges)

  @property
  def wire_seconds(self) -> float:
    """A lower bound: all links of the device busy at their published bandwidth."""
    return self.wire_bytes / self.topology.generation.link_bytes_per_second

  @property
  def utilisation(self) -> float | None:
    """Model FLOPs over what the matrix units could do in `cycles`."""
    if self.model_flops is None or not self.cycles:
      return None
    return self.model_flops / self.topology.devices / (self.cycles * self.topology.generation.flops_per_cycle)

  def caveats(self) -> list[str]:
    """What the estimate leaves out, in sentences."""
    unpriced = [item for item in self.cost.unpriced if item.cycles is None]
    notes = [
      "Cycles are the compiler's estimates of its instructions, added up: a ranking, not a measurement.",
      "Collectives are not in them; the time given for those is a lower bound, and some of it overlaps.",
      "Copies between host and device and waiting for them are not in them.",
    ]
    if any(item.cycles is not None for item in self.cost.unpriced):
      notes.append("Kernels are counted at matrix-unit time, as if nothing else held them up.")
    if unpriced:
      notes.append(
        f"{sum(i.executions for i in unpriced):,} executions without any price: {_names(unpriced)}."
      )
    if self.cost.without_estimate:
      silent = ", ".join(f"{count:,} {kind}" for kind, count in self.cost.without_estimate.items())
      notes.append(f"Executions of instructions that carry no estimate: {silent}.")
    if self.cost.unknown_loops:
      loops = ", ".join(
        f"{times} × {short_path(name, 48)}" for name, times in self.cost.unknown_loops.items()
      )
      notes.append(f"Loops whose trip count depends on data, counted as: {loops}.")
    return notes

  def to_dict(self) -> dict[str, Any]:
    """Everything, derived figures included, ready for JSON."""
    generation = self.topology.generation
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    fields |= {name: dataclasses.asdict(fields[name]) for name in ("memory", "cost")}
    fields["buffers"] = [_plain_buffer(buffer) for buffer in self.buffers]
    return fields | {
      "topology": str(self.topology),
      "chips": self.topology.chips,
      "devices": self.topology.devices,
      "hbm_bytes": generation.usable_hbm_bytes,
      "host_bytes": self.memory.host,
      "headroom": self.headroom,
      "cycles": self.cycles,
      "kernel_cycles": self.cost.kernel_cycles,
      "seconds": self.seconds,
      "wire_bytes": self.wire_bytes,
      "wire_seconds": self.wire_seconds,
      "utilisation": self.utilisation,
      "caveats": self.caveats(),
    }

  def to_json(self) -> str:
    return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

  def table(self) -> str:
    """Several lines for a terminal."""
    return "\n".join(_table(self))

  def save(self, folder: str | Path) -> Path:
    """Writes compile.json and compile.html into `folder`; returns the path of the page."""
    from glm5_jax.compiler.page import html_page

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / "compile.json").write_text(self.to_json(), encoding="utf-8")
    page = place / "compile.html"
    page.write_text(html_page(self), encoding="utf-8")
    return page


def _names(items) -> str:
  kinds: dict[str, int] = {}
  for item in items:
    key = item.kind if item.kind == "sort" else f"{item.kind} {item.name}"
    kinds[key] = kinds.get(key, 0) + item.executions
  return ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda pair: -pair[1]))


def _plain_buffer(buffer: Buffer) -> dict[str, Any]:
  return {**dataclasses.asdict(buffer), "shape": str(buffer.shape)}


def headline(report: Report) -> list[tuple[str, str]]:
  """The figures that come first, as name and text."""
  generation = report.topology.generation
  rows = [
    ("mesh", " × ".join(f"{name} {n}" for name, n in report.mesh.items() if n > 1) or "1 device"),
    ("memory needed", f"{size(report.memory.needed)} of {size(generation.usable_hbm_bytes)}"),
    ("headroom", f"{report.headroom:.1%}"),
    ("estimated cycles", f"{si(report.cycles)}, {seconds(report.seconds)} at {generation.ghz} GHz"),
  ]
  if report.cost.kernel_cycles:
    rows.append(("of which kernels", si(report.cost.kernel_cycles)))
  if report.utilisation is not None:
    rows.append(("model FLOPs, all devices", si(report.model_flops or 0)))
    rows.append(("utilisation, estimate", f"{report.utilisation:.1%} without the time of collectives"))
  rows.append(("matrix products, a device", f"{si(report.cost.matmul_flops)} FLOP outside kernels"))
  rows.append(("collectives send", f"{size(report.wire_bytes)}, {seconds(report.wire_seconds)} or more"))
  if report.cost.host_bytes:
    rows.append(("copied from and to hosts", size(report.cost.host_bytes)))
  rows.append(("compiled in", f"{report.compile_seconds:.1f} s, traced in {report.lower_seconds:.1f} s"))
  rows.append(("memory of the compiler", size(report.peak_rss)))
  return rows


def memory_rows(report: Report) -> list[tuple[str, int]]:
  memory = report.memory
  rows = [
    ("arguments", memory.arguments),
    ("outputs", memory.outputs),
    ("of these in donated arguments", memory.aliased),
    ("temporaries", memory.temporaries),
  ]
  return [*rows, *([("host memory", memory.host)] if memory.host else [])]


def heading(report: Report) -> str:
  topology = report.topology
  devices = "" if topology.devices == topology.chips else f", {topology.devices:,} devices"
  return f"{report.title} on {topology}: {topology.chips:,} chips{devices}; figures are of one device"


def _table(report: Report) -> Iterator[str]:
  yield heading(report)
  for name, text in headline(report):
    yield f"  {name:<26} {text}"
  for name, count in memory_rows(report):
    yield f"  {name:<30} {size(count):>12}"
  if report.cost.exchanges:
    yield f"  {'collective':<22} {'axis':<22} {'runs':>8} {'array bytes':>14} {'sent':>14}"
    for e in report.cost.exchanges:
      yield f"  {e.kind:<22} {e.axis:<22} {e.executions:>8,} {size(e.bytes):>14} {size(e.wire_bytes):>14}"
  yield "  Largest buffers"
  for buffer in report.buffers[:TOP]:
    yield f"  {size(buffer.bytes):>14}  {describe(buffer, with_bytes=False)}"
  yield "  Largest operations, in cycles"
  for op in report.cost.largest_ops:
    yield f"  {op.cycles:>14,}  {op.executions:>6,} × {op.kind:<12} {short_path(op.op_name or op.name)}"
  if report.cost.unpriced:
    yield "  Without the compiler's estimate"
    for item in report.cost.unpriced[:TOP]:
      price = "unpriced" if item.cycles is None else f"{item.cycles:,.0f}"
      yield f"  {price:>14}  {item.executions:>6,} × {item.kind:<12} {short_path(item.op_name or item.name)}"
  for note in report.caveats():
    yield f"  * {note}"
