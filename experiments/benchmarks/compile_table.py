"""The full-size programs, each compiled for a TPU slice on this machine: does it fit, what does it cost?

  python -m experiments.benchmarks.compile_table                # all that are not in runs/compile yet
  python -m experiments.benchmarks.compile_table --turn 17      # one of them, another for every number

Every program is a process of its own; what is finished stays when the table is interrupted.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("runs/compile")
LIMIT_S = 3600
GIB = 2**30


@dataclass(frozen=True)
class Program:
  """One row: what `launch.compile` is asked for."""

  name: str
  topology: str
  flags: tuple[str, ...]
  in_turn: bool = True  # False: longer than a check of every commit should take

  @property
  def folder(self) -> Path:
    return FOLDER / f"{self.name} {self.topology}".replace(" ", "-").replace(":", "-")

  @property
  def command(self) -> list[str]:
    return ["launch.compile", f"--topology={self.topology}", *self.flags]


PRETRAIN = ("--config=experiments/glm5_744b.py", "--rows=512")
MIDTRAIN = "--config=experiments/glm5_midtrain.py:"
LEARNER = ("--config=experiments/glm5_dsa.py:learner", "--rows=256")
SPARSE_32K = (
  "--config=experiments/glm5_dsa.py:sparse",
  "--config.data.seq_len=32768",
  "--config.mesh.context=1",
  "--rows=512",
)


def of_pretraining(*settings: str) -> Program:
  """The first program with other settings: what a setting costs and saves."""
  return Program(f"pre-training 4K, {' '.join(settings)}", "v5p:8x8x8", (*PRETRAIN, *_flags(settings)), False)


def _flags(settings: Iterable[str]) -> tuple[str, ...]:
  sections = {"remat": "model", "loss_chunk": "train"}
  return tuple(f"--config.{sections[setting.partition('=')[0]]}.{setting}" for setting in settings)


PROGRAMS = (
  Program("pre-training 4K", "v5p:8x8x8", PRETRAIN),
  Program("pre-training 4K", "tpu7x:4x8x8", PRETRAIN),
  Program("sparse learner 131,072", "v5p:8x16x16", LEARNER),
  Program("sparse learner 131,072", "tpu7x:8x8x16", LEARNER),
  Program("mid-training 131,072", "v5p:8x16x16", (f"{MIDTRAIN}128k", "--rows=256"), in_turn=False),
  Program("mid-training 131,072", "tpu7x:8x8x16", (f"{MIDTRAIN}128k", "--rows=256"), in_turn=False),
  Program("mid-training 202,752", "v5p:8x16x16", (f"{MIDTRAIN}200k", "--rows=256"), in_turn=False),
  Program("mid-training 202,752", "tpu7x:8x8x16", (f"{MIDTRAIN}200k", "--rows=256"), in_turn=False),
  of_pretraining("remat=full"),
  of_pretraining("remat=full", "loss_chunk=16384"),
  of_pretraining("remat=full", "loss_chunk=1024"),
  of_pretraining("remat=offload", "loss_chunk=1024"),
  Program("sparse training 32,768", "v5p:8x8x8", SPARSE_32K, in_turn=False),
)


def compile_one(program: Program) -> None:
  """Runs the command and keeps its report. Raises SystemExit where it fails."""
  print(f"{program.name} on {program.topology}: python -m {' '.join(program.command)}", flush=True)
  parent = program.folder / "report"
  command = [sys.executable, "-m", *program.command, f"--folder={parent}"]
  done = subprocess.run(command, timeout=LIMIT_S)
  if done.returncode:
    raise SystemExit(done.returncode)


def report(program: Program) -> dict | None:
  found = sorted(program.folder.glob("report/*/compile.json"))
  return json.loads(found[0].read_text(encoding="utf-8")) if found else None


def table() -> str:
  """Markdown, one row a finished program."""
  lines = [
    "| program | command | memory a device | state, temporaries, host | cycles, of kernels | compiling |",
    "|---|---|---|---|---|---|",
  ]
  for program in PROGRAMS:
    if found := report(program):
      memory = found["memory"]
      parts = memory["arguments"], memory["temporaries"], found["host_bytes"]
      lines.append(
        f"| {program.name} | `python -m {' '.join(program.command)}` "
        f"| {memory['needed'] / GIB:.1f} of {found['hbm_bytes'] / GIB:.1f} GiB, {found['headroom']:.0%} "
        f"| {', '.join(f'{part / GIB:.1f}' for part in parts)} GiB "
        f"| {found['cycles'] / 1e9:.2f} G, {found['kernel_cycles'] / 1e9:.2f} G "
        f"| {found['compile_seconds'] / 60:.1f} min, {found['peak_rss'] / GIB:.1f} GiB |"
      )
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--turn", type=int, help="compile the program whose turn it is, finished or not")
  args = parser.parse_args(argv)
  if args.turn is not None:
    turns = [program for program in PROGRAMS if program.in_turn]
    compile_one(turns[args.turn % len(turns)])
  else:
    for program in PROGRAMS:
      if report(program) is None:
        compile_one(program)
  print(table())


if __name__ == "__main__":
  main(sys.argv[1:])
