"""Static cycles of a compiled TPU program from the VLIW bundles that libtpu writes down.

A bundle is issued a cycle, empty ones (latency) included, so that the cycles of a kernel are its bundles,
each times the bounds of the loops around it. What is not in them: waiting for DMA, and matrix units that are
pushed faster than they take. Bounds are those of the compiled code: a pipelined grid of G steps on a core
loops G + 2 times, of which two only fetch or write. Both sides of a branch count. A grid whose size is an
array is one loop without a bound.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DUMP_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"  # of LIBTPU_INIT_ARGS
SUFFIX = "packed-bundles-post-ra.txt"
DELAY = 4  # bundles behind a branch that are still executed
_FILE = re.compile(rf"\d+-(?P<name>.+?)-\d+-{SUFFIX}$")
_BUNDLE = re.compile(r"^\s*(?P<address>0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*(?:>\s*)*\{")
_BRANCH = re.compile(
  r"sbr\.rel (?:\((?P<negated>!?)%(?P<predicate>\w+)\) )?target bundleno = (?P<target>\d+)"
)
_ZERO_TRIPS = re.compile(r"%(?P<predicate>\w+) = scmp\.le\.s32\.totalorder %\w+, 0\b")
_EXIT = re.compile(r"%(?P<predicate>\w+) = scmp\.\w+\.s32\.totalorder (?:\(!?%\w+\), )?%\w+, (?P<bound>\d+)")


@dataclass(frozen=True)
class Loop:
  """Bundles begin to end − 1; `bound` is None where the trip count depends on data."""

  begin: int
  end: int
  bound: int | None


@dataclass(frozen=True)
class Program:
  """One schedule: a Pallas kernel or a fusion.

  Attributes:
    one_core: on a chip of two cores, the other does nothing.
    cores: that share the work.
  """

  name: str
  bundles: int
  loops: tuple[Loop, ...]
  one_core: bool
  cores: int

  def cycles(self, trips: Sequence[float] = ()) -> float:
    """Bundles times bounds; `trips` are those of the loops whose bound depends on data, in order.

    Raises:
      ValueError: another number of such loops.
    """
    open_loops = [loop for loop in self.loops if loop.bound is None]
    if len(open_loops) != len(trips):
      places = ", ".join(f"bundles {loop.begin}-{loop.end}" for loop in open_loops) or "none"
      raise ValueError(f"{self.name}: {len(trips)} trip counts given, loops that need one: {places}")
    known = dict(zip(open_loops, trips, strict=True))
    weights = [1.0] * self.bundles
    for loop in self.loops:
      times = known[loop] if loop.bound is None else loop.bound
      for i in range(loop.begin, loop.end):
        weights[i] *= times
    return sum(weights)


def read_folder(folder: Path) -> list[Program]:
  """Every program whose schedule was written to the folder, in the order of writing."""
  programs = []
  for path in sorted(folder.glob(f"*-{SUFFIX}")):
    match = _FILE.match(path.name)
    if match and not match["name"].startswith("<") and "schedule-analysis" not in path.name:
      program = read_program(match["name"], path.read_text(errors="replace"))
      programs += [program] if program else []
  return programs


def read_program(name: str, text: str) -> Program | None:
  """Reads one dump; None where it holds no bundle."""
  bundles: list[str] = []
  for line in text.splitlines():
    if _BUNDLE.match(line):
      bundles.append(line)
    elif bundles:  # descriptions of transfers go over several lines
      bundles[-1] += "\n" + line
  if not bundles:
    return None
  bounds = {m["predicate"]: int(m["bound"]) for b in bundles if "loop exit test" in b for m in _tests(b)}
  branches = [(i, branch) for i, bundle in enumerate(bundles) for branch in _BRANCH.finditer(bundle)]
  loops = [
    Loop(int(branch["target"]), min(i + 1 + DELAY, len(bundles)), bounds.get(branch["predicate"] or ""))
    for i, branch in branches
    if int(branch["target"]) <= i
  ]
  loops.sort(key=lambda loop: (loop.begin, -loop.end))
  start = loops[0].begin if loops else len(bundles)
  end = max((loop.end for loop in loops), default=len(bundles) * 9 // 10)
  # The second core of two leaves at once, from before any loop to behind all of them; as both do where a
  # grid of dynamic size has no step.
  empty = {m["predicate"] for bundle in bundles[:start] for m in _ZERO_TRIPS.finditer(bundle)}
  leaves = any(
    i < start and int(branch["target"]) >= end and branch["predicate"] not in empty for i, branch in branches
  )
  two = "core id" in bundles[0]
  return Program(name, len(bundles), tuple(loops), two and leaves, 2 if two and not leaves else 1)


def _tests(bundle: str) -> list[re.Match[str]]:
  return [m for part in bundle.split(";;") if "loop exit test" in part for m in _EXIT.finditer(part)]
