"""From nothing to a trained, resumed, evaluated and sampled GLM-5: runs the other commands and shows them.

  python -m launch.quickstart [--workdir=runs/quickstart] [--sources=FOLDER,…]

Training is interrupted once on the way, by SIGTERM, and goes on from its checkpoint by the same command.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from launch.common import run

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "the run's folder")
_CONFIG = flags.DEFINE_string("config", "experiments/quickstart.py", "experiment to train")
_SOURCES = flags.DEFINE_list("sources", [], "folders of text; none: this interpreter's standard library")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 2048, "ids of the tokeniser; the config's vocabulary")
_INTERRUPT_AT = flags.DEFINE_integer("interrupt_at", 60, "logged step after which training is interrupted")
_PROMPT = flags.DEFINE_string("prompt", 'def main():\n  """', "what the trained model continues")
_OVERRIDES = flags.DEFINE_multi_string("set", [], "a config override, as in --set=train.steps=20")


def main(_: Sequence[str]) -> None:
  began = time.monotonic()
  folder = Path(_WORKDIR.value)
  data, scores, sample = folder / "data", folder / "evaluation.json", folder / "sample.txt"
  train = ["train", f"--config={_CONFIG.value}", f"--workdir={folder}", f"--config.data.folder={data}"]
  train += [f"--config.{override}" for override in _OVERRIDES.value]

  _command("prepare", f"--out={data}", f"--vocab_size={_VOCAB_SIZE.value}", *_sources())
  _command(*train, interrupt_at=_INTERRUPT_AT.value)
  _command(*train)
  _command("evaluate", f"--checkpoint={folder}", f"--json={scores}")
  text = _command(
    "generate",
    f"--checkpoint={folder}",
    f"--prompt={_PROMPT.value}",
    "--max_new_tokens=160",
    "--temperature=0.7",
    "--speculate=3",
  )
  sample.write_text(text)
  _command("report", f"--workdir={folder}", f"--evaluation={scores}", f"--sample={sample}")
  minutes = (time.monotonic() - began) / 60
  print(
    f"\nDone in {minutes:.1f} minutes. Open {folder / 'report.html'}; the commands above are all there is."
  )


def _sources() -> list[str]:
  return [f"--sources={','.join(_SOURCES.value)}"] if _SOURCES.value else []


def _command(name: str, *arguments: str, interrupt_at: int = 0) -> str:
  """Runs `python -m launch.<name>`, showing it and its output, which is returned; exits if it fails.

  With `interrupt_at`, sends SIGTERM once a progress line tells of that step.
  """
  print("\n$", shlex.join(["python", "-m", f"launch.{name}", *arguments]), flush=True)
  command = [sys.executable, "-u", "-m", f"launch.{name}", *arguments]
  # What one command compiled, the next one need not.
  environment = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(_WORKDIR.value).absolute() / "jax_cache"),
    **os.environ,
  }
  output = []
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, text=True, errors="replace", env=environment
  ) as process:
    assert process.stdout is not None
    while piece := process.stdout.read(1) if name == "generate" else process.stdout.readline():
      sys.stdout.write(piece)
      sys.stdout.flush()
      output.append(piece)
      step = re.match(r"step (\d+)/", piece)
      if interrupt_at and step and int(step[1]) >= interrupt_at:
        interrupt_at = 0
        print("(interrupting it on purpose)", flush=True)
        process.send_signal(signal.SIGTERM)
  if process.returncode:
    sys.exit(process.returncode)
  return "".join(output)


if __name__ == "__main__":
  run(main)
