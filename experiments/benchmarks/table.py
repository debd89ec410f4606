"""Speed on CPU beside peers of the same shape, in one run: a table to read and runs/bench/cpu.json.

  python -m experiments.benchmarks.table                      # everything, three interleaved rounds
  python -m experiments.benchmarks.table --only ours,sketch   # some programs
  python -m experiments.benchmarks.table --resume             # go on where an interrupted table stopped

Each program is a process of its own, one at a time, so that none shares its threads or its memory.
Machines differ by a factor of two and change by the minute: read the ratios, not the rates.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments.benchmarks import maxtext_peer
from experiments.benchmarks.config import LENGTH, ROWS, bench_6m, maxtext_tiny, train_flops

FOLDER = Path("runs/bench")
HERE = "experiments.benchmarks"
Results = dict[str, dict[str, float]]  # program → measure → median over the rounds


@dataclass(frozen=True)
class Program:
  """One process to time. `missing()` tells whether what it needs is not installed."""

  name: str
  command: list[str]
  missing: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Target:
  """Ours against a peer. `faster`: the ratio is how many times as fast, for rates and for times."""

  title: str
  peer: str
  measure: str
  at_least: float
  ours: str = "ours"
  smaller_is_better: bool = False


TARGETS = (
  Target("training", "transformers", "train_tokens_per_s", 2.0),
  Target("training", "sketch", "train_tokens_per_s", 1.2),
  Target("generation, 8 prompts", "transformers", "generate_8_tokens_per_s", 3.0),
  Target("generation, 1 prompt", "transformers", "generate_1_tokens_per_s", 2.3),
  Target("decode step, batch 8", "sketch", "decode_8_ms", 1.0, smaller_is_better=True),
  Target("decode step, batch 1", "sketch", "decode_1_ms", 1.0, smaller_is_better=True),
  Target("training", "maxtext ragged_dot", "train_tokens_per_s", 2.0, ours="ours maxtext-shape"),
  Target("training", "maxtext dense_experts", "train_tokens_per_s", 2.0, ours="ours maxtext-shape"),
)
COMPILE_LIMIT_S = 40.0
MEASURES = (  # title, key, digits after the point
  ("training, tokens/s", "train_tokens_per_s", 0),
  ("training, GFLOP/s", "train_gflops", 1),
  ("matmul 2048³, GFLOP/s", "matmul_gflops", 1),
  ("generation, 1 prompt, tokens/s", "generate_1_tokens_per_s", 0),
  ("generation, 8 prompts, tokens/s", "generate_8_tokens_per_s", 0),
  ("decode step, batch 1, ms", "decode_1_ms", 2),
  ("decode step, batch 8, ms", "decode_8_ms", 2),
  ("compile the training step, s", "compile_s", 1),
  ("compile generation, s", "generate_compile_s", 1),
)


def programs() -> list[Program]:
  """In the order of a round."""
  python, shape = sys.executable, json.dumps(bench_6m().to_hf())

  def no_torch() -> bool:
    return not all(importlib.util.find_spec(name) for name in ("torch", "transformers"))

  def no_maxtext() -> bool:
    return not (maxtext_peer.VENV / "complete").exists()

  peer = str(Path(__file__).with_name("transformers_peer.py"))
  listed = [
    Program("ours", [python, "-m", f"{HERE}.ours", "--shape", "bench_6m"]),
    Program("sketch", [python, "-m", f"{HERE}.sketch_floor"]),
    Program("transformers", [python, peer, "--shape", shape], no_torch),
    Program("ours maxtext-shape", [python, "-m", f"{HERE}.ours", "--shape", "maxtext_tiny"]),
  ]
  for path in maxtext_peer.PATHS:
    listed.append(
      Program(f"maxtext {path}", [python, "-m", f"{HERE}.maxtext_peer", "--path", path], no_maxtext)
    )
  return listed


def measure(program: Program) -> dict:
  """Runs the process. Its last line of output is JSON; a failure becomes {"error": last line of stderr}."""
  run = subprocess.run(program.command, capture_output=True, text=True)
  if run.returncode:
    return {"error": (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]}
  return json.loads(run.stdout.strip().splitlines()[-1])


def run_rounds(chosen: list[Program], rounds: int, log: Path, resume: bool) -> list[dict]:
  """Entries {"round", "program", "result", "load"}, each appended to `log` as soon as it is measured."""
  entries = []
  if resume and log.exists():
    entries = [json.loads(line) for line in log.read_text().splitlines()]
  done = {(entry["round"], entry["program"]) for entry in entries if "error" not in entry["result"]}
  log.parent.mkdir(parents=True, exist_ok=True)
  with log.open("a" if resume else "w") as file:
    for number in range(1, rounds + 1):
      for program in chosen:
        if (number, program.name) in done:
          continue
        load = os.getloadavg()[0]
        print(f"round {number} of {rounds}: {program.name} … ", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        result = measure(program)
        outcome = result.get("error", f"{time.perf_counter() - start:.0f} s")
        print(outcome, file=sys.stderr, flush=True)
        entries.append({"round": number, "program": program.name, "result": result, "load": load})
        file.write(json.dumps(entries[-1]) + "\n")
        file.flush()
  return entries


def medians(entries: list[dict]) -> Results:
  """Each program's numbers, median over the rounds that succeeded."""
  values: dict[str, dict[str, list[float]]] = {}
  for entry in entries:
    for key, value in entry["result"].items():
      if isinstance(value, int | float):
        values.setdefault(entry["program"], {}).setdefault(key, []).append(value)
  return {name: {key: statistics.median(v) for key, v in found.items()} for name, found in values.items()}


def add_flops(results: Results) -> None:
  """Training GFLOP/s of every program from one count of the shape's operations (config.train_flops)."""
  for name, found in results.items():
    cfg = maxtext_tiny() if "maxtext" in name else bench_6m()
    if "train_step_s" in found:
      found["train_gflops"] = train_flops(cfg, ROWS, LENGTH) / found["train_step_s"] / 1e9


def rate_table(results: Results, columns: list[str]) -> list[str]:
  """Lines of measures × programs."""
  width = max(14, *(len(column) + 2 for column in columns))
  lines = [" " * 34 + "".join(f"{column:>{width}}" for column in columns)]
  for title, key, digits in MEASURES:
    if any(key in results[column] for column in columns):
      cells = (f"{results[c][key]:,.{digits}f}" if key in results[c] else "–" for c in columns)
      lines.append(f"{title:<34}" + "".join(f"{cell:>{width}}" for cell in cells))
  return lines


def compare(results: Results) -> list[dict]:
  """Every target whose two sides were measured: ratio (above 1: ours is faster) and whether it is met."""
  rows = []
  for target in TARGETS:
    ours = results.get(target.ours, {}).get(target.measure)
    peer = results.get(target.peer, {}).get(target.measure)
    if ours is None or peer is None:
      continue
    ratio = peer / ours if target.smaller_is_better else ours / peer
    row = {"what": f"{target.title}, times as fast as {target.peer}", "value": ratio, "sign": "≥"}
    rows.append(row | {"target": target.at_least, "met": ratio >= target.at_least})
  for key, title in (("compile_s", "the training step"), ("generate_compile_s", "generation")):
    seconds = results.get("ours", {}).get(key)
    if seconds is not None:
      row = {"what": f"compile {title}, seconds", "value": seconds, "sign": "<"}
      rows.append(row | {"target": COMPILE_LIMIT_S, "met": seconds < COMPILE_LIMIT_S})
  return rows


def render(results: Results, rows: list[dict], rounds: int, notes: list[str]) -> str:
  """The page that is printed."""
  lines = []
  groups = (
    ("6 M parameters, 8 × 512 tokens, float32", [n for n in results if "maxtext" not in n]),
    ("MaxText's tiny shape, 8 × 512 tokens, float32", [n for n in results if "maxtext" in n]),
  )
  for title, columns in groups:
    if columns:
      lines += [f"{title}; {os.cpu_count()} CPU cores; median of {rounds}", *rate_table(results, columns), ""]
  if rows:
    lines.append(f"{'':<58}{'measured':>9}{'target':>9}")
  for row in rows:
    goal = f"{row['sign']} {row['target']:g}"
    lines.append(f"{row['what']:<58}{row['value']:>9.2f}{goal:>9}   {'met' if row['met'] else 'MISSED'}")
  lines.append("")
  lines += notes
  lines.append("GFLOP/s: operations of the shape (config.train_flops), the same count for every program.")
  return "\n".join(lines)


def notes_on(entries: list[dict], missing: list[Program]) -> list[str]:
  """What a reader must know beside the numbers: absent peers, failures, a busy machine."""
  notes = [f"{program.name}: not installed: make bench" for program in missing]
  failed = {entry["program"]: entry["result"]["error"] for entry in entries if "error" in entry["result"]}
  notes += [f"{name} failed: {error}" for name, error in failed.items()]
  # The load average still remembers the previous program of the table itself, hence the margin.
  if any(entry["load"] > 2 * (os.cpu_count() or 1) for entry in entries):
    notes.append("The machine was busy with other work: measure again when it is idle.")
  return notes


def main(argv: list[str]) -> int:
  names = [program.name for program in programs()]
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--only", default="", help=f"comma-separated beginnings of: {', '.join(names)}")
  parser.add_argument("--resume", action="store_true", help="keep what runs/bench/rounds.jsonl already holds")
  args = parser.parse_args(argv)

  wanted = tuple(args.only.split(",")) if args.only else ("",)
  selected = [program for program in programs() if program.name.startswith(wanted)]
  if not selected or args.rounds < 1:
    parser.error(
      f"--only names no program of {', '.join(names)}" if args.rounds else "--rounds must be at least 1"
    )
  missing = [program for program in selected if program.missing()]
  chosen = [program for program in selected if program not in missing]

  entries = run_rounds(chosen, args.rounds, FOLDER / "rounds.jsonl", args.resume)
  results = medians(entries)
  add_flops(results)
  rows = compare(results)
  notes = notes_on(entries, missing)
  print(render(results, rows, args.rounds, notes))
  document = {"medians": results, "targets": rows, "notes": notes, "rounds": entries}
  (FOLDER / "cpu.json").write_text(json.dumps(document, indent=1))
  return 1 if any("error" in entry["result"] for entry in entries) else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
