"""Static cycles of our kernels beside what they replace, for three generations of TPU, without a TPU.

  python -m experiments.benchmarks.kernel_cycles                        # every row, about twenty minutes
  python -m experiments.benchmarks.kernel_cycles --only top --on v5p    # rows with "top" in the task or name

"its products" are the matrix products of the task at the peak of the matrix units.
A kernel, and a sort, costs its VLIW bundles times the bounds of its loops, or the time its operands and
results take from and to memory if that is longer; every other instruction what the compiler estimates.
Figures are of one device: a v5p chip with both cores, one of the two of a tpu7x chip. Deterministic.
Each program is compiled in a process of its own; results are kept in runs/kernels.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from experiments.benchmarks.bundles import DUMP_FLAGS, Program, read_folder

FOLDER = Path("runs/kernels")
TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
LIMIT_S = 900
PIPELINE = 2  # steps of a grid that only fetch or write
TRANSFER_LOOP = 12  # bundles; shorter loops without a bound pass on a transfer in pieces
Result = dict


def measure(index: int, generation: str) -> Result:
  """Compiles a row in this process, whose libtpu writes its schedules to the folder that DUMP names."""
  import jax
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from experiments.benchmarks.kernel_rows import ROWS, structs
  from glm5_jax.compiler import parse_topology, topology_devices
  from glm5_jax.compiler.hlo import parse_module

  row, topology = ROWS[index], parse_topology(TOPOLOGIES[generation])
  mesh = Mesh(np.array(topology_devices(topology)[:1]), ("one",))
  lowered = jax.jit(row.function).lower(*structs(row, NamedSharding(mesh, PartitionSpec())))
  started = time.monotonic()
  compiled = lowered.compile()
  seconds = time.monotonic() - started
  schedules = {program.name: program for program in read_folder(Path(os.environ["DUMP"]))}
  module = parse_module(compiled.as_text() or "")
  parts, one_core = _parts(module, schedules, row, topology.generation)
  return {
    "cycles": sum(parts.values()),
    "parts": dict(sorted(parts.items(), key=lambda part: -part[1])),
    "one_core": one_core,
    "compile_s": seconds,
    "matmul_cycles": row.flops and row.flops / topology.generation.flops_per_cycle,
    "temporary_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
  }


def _parts(module, schedules: dict[str, Program], row, generation) -> tuple[dict[str, float], list[str]]:
  """Cycles by instruction, and the kernels that leave one of two cores idle."""
  from glm5_jax.compiler.cost import executions

  parts: dict[str, float] = {}
  one_core = []
  trips = row.trips_on(generation.name)
  for step in executions(module):
    instruction = step.instruction
    cycles: float | None = instruction.estimated_cycles
    if cycles is None and instruction.opcode in ("custom-call", "sort") and instruction.name in schedules:
      program = schedules[instruction.name]
      body = module.computations[step.computation]
      shapes = [*instruction.shapes, *(s for name in instruction.operands for s in body[name].shapes)]
      moved = next((size for part, size in row.moved if part in program.name), 0)
      moved = max(moved, sum(shape.padded_bytes for shape in shapes))
      seconds = moved / generation.hbm_bytes_per_second
      bundles = kernel_cycles(program, trips, dict(row.grids)) * row.computed
      cycles = max(bundles, seconds * generation.ghz * 1e9)
      one_core += [program.name] if program.one_core else []
    if cycles:
      parts[instruction.name] = parts.get(instruction.name, 0) + cycles * step.count
  return parts, one_core


def kernel_cycles(
  program: Program, trips: dict[str, tuple[float, ...]], grids: Mapping[str, float] = MappingProxyType({})
) -> float:
  """Bundles times bounds; `trips` and `grids` as in kernel_rows.Row.

  Raises:
    ValueError: as many trip counts are needed as there are loops of that kind and more than a few bundles.
  """
  unknown = [loop for loop in program.loops if loop.bound is None]
  large = [loop for loop in unknown if loop.end - loop.begin >= TRANSFER_LOOP]
  given = next((counts for part, counts in trips.items() if part in program.name), ())
  given = *(steps / program.cores + PIPELINE for part, steps in grids.items() if part in program.name), *given
  if len(given) != len(large):
    sizes = [loop.end - loop.begin for loop in large]
    raise ValueError(f"{program.name}: {len(given)} trip counts for loops of {sizes} bundles")
  counts = dict(zip(large, given, strict=True))
  return program.cycles([counts.get(loop, 1) for loop in unknown])


def measure_apart(index: int, generation: str) -> Result:
  """`measure` in a process of its own. A failure becomes {"error": last line of stderr}."""
  with tempfile.TemporaryDirectory(prefix="glm5-kernel-") as folder:
    environment = os.environ | {
      "DUMP": folder,
      "JAX_PLATFORMS": "cpu",
      "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {DUMP_FLAGS.format(folder=folder)}",
    }
    command = [sys.executable, "-m", __spec__.name, "--measure", str(index), generation]
    try:
      done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
      return {"error": f"not compiled in {LIMIT_S} s"}
  if done.returncode:
    return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
  return json.loads(done.stdout.strip().splitlines()[-1])


def render(rows, results: dict[tuple[str, str], Result], generations: list[str]) -> str:
  """A table a task: cycles, beside them how many times those of the task's first row, and compile time."""
  lines = []
  for task in dict.fromkeys(row.task for row in rows):
    mine = [row for row in rows if row.task == task]
    lines += [f"## {task}", "", "| cycles | " + " | ".join(generations) + " |"]
    lines.append("|---|" + "---:|" * len(generations))
    for row in mine:
      cells = [_cell(results, mine[0], row, generation) for generation in generations]
      lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{row.name}: {row.note}." for row in mine if row.note), ""]
  return "\n".join(lines)


def _cell(results, first, row, generation: str) -> str:
  result, base = (results.get((r.task + r.name, generation), {}) for r in (row, first))
  if "error" in result:
    return result["error"][:60]
  if not result:
    return "–"
  times = f" ({result['cycles'] / base['cycles']:.2f} ×)" if base.get("cycles") and row != first else ""
  matmul = result.get("matmul_cycles")
  times += f", {result['cycles'] / matmul:.2f} × its products" if matmul else ""
  half = ", one core" if result["one_core"] else ""
  return f"{result['cycles']:,.0f}{times}{half}, {result['compile_s']:.1f} s"


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", default="", help="part of a task or a name")
  parser.add_argument("--on", default=",".join(TOPOLOGIES), help="generations")
  parser.add_argument("--resume", action="store_true", help="keep what runs/kernels already has")
  parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.measure:
    print(json.dumps(measure(int(args.measure[0]), args.measure[1])))
    return
  from experiments.benchmarks.kernel_rows import ROWS

  generations = args.on.split(",")
  if unknown := set(generations) - set(TOPOLOGIES):
    parser.error(f"--on: {', '.join(sorted(unknown))} is unknown; known are {', '.join(TOPOLOGIES)}")
  rows = [row for row in ROWS if args.only.lower() in f"{row.task} {row.name}".lower()]
  FOLDER.mkdir(parents=True, exist_ok=True)
  results = {}
  for row in rows:
    for generation in generations:
      name = re.sub(r"\W+", "-", f"{row.task} {row.name} {generation}")
      place = FOLDER / f"{name}.json"
      if not (args.resume and place.exists()):
        print(f"{row.task}: {row.name}, {generation} …", file=sys.stderr, flush=True)
        result = measure_apart(ROWS.index(row), generation)
        place.write_text(json.dumps(result, indent=1))
      results[row.task + row.name, generation] = json.loads(place.read_text())
  print(render(rows, results, generations))


if __name__ == "__main__":
  main(sys.argv[1:])
