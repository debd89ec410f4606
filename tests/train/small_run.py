"""A training run of seconds: every part of GLM-5 on a few small files, and ways to look at what it left."""

import dataclasses
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from experiments import tiny
from glm5_jax.config import RunConfig
from glm5_jax.data.prepare import PrepareConfig, prepare
from glm5_jax.train.checkpoint_files import complete_steps
from glm5_jax.train.report import METRICS_FILE
from glm5_jax.train.resume import compare_configs

TIMES = {"tokens_per_s", "mfu", "data_wait", "step_s"}  # metrics that differ from run to run
# Without these a step compiles in a quarter of the time.
PLAIN = {
  "model.num_hidden_layers": 1,
  "model.attention": "F",
  "model.num_nextn_predict_layers": 0,
  "optim.name": "adamw",
}


def write_data(folder: Path, tokenizer: str = "") -> str:
  """A prepared data folder of about 7,500 training and 1,500 held-out tokens, vocabulary 360."""
  texts = folder / "texts"
  texts.mkdir(parents=True)
  for i in range(40):
    lines = [f"def function_{i}_{j}(value):\n    return value + {j * i}\n" for j in range(1 + i * 7 % 23)]
    (texts / f"file_{i:03d}.py").write_text("".join(lines))
  out = str(folder / "data")
  wanted = PrepareConfig(out, [str(texts)], tokenizer=tokenizer, vocab_size=360, heldout=0.2)
  prepare(wanted, report=lambda line: None)
  return out


def small_run(data: str, **fields: Any) -> RunConfig:
  """experiments/tiny.py, smaller, with dotted fields replaced: small_run(data, **{"train.steps": 8})."""
  run = tiny.get_config()
  ours = {
    "model.vocab_size": 512,
    "model.num_hidden_layers": 2,
    "model.mtp_depths": 2,
    "data.folder": data,
    "data.seq_len": 32,
    "optim.warmup_steps": 2,
    "optim.ns_steps": 2,
    "train.steps": 6,
    "train.log_every": 1,
    "train.eval_every": 3,
    "train.eval_rows": 6,
    "train.checkpoint_every": 2,
  }
  for path, value in (ours | fields).items():
    *sections, name = path.split(".")
    owner = getattr(run, sections[0]) if sections else run
    assert hasattr(owner, name), path
    setattr(owner, name, value)
  return run


def as_flags(run: RunConfig) -> list[str]:
  """The command line that makes `run` of experiments/tiny.py."""
  changes = compare_configs(tiny.get_config(), run)
  return ["--config=experiments/tiny.py", *(f"--config.{field}={new}" for field, _, new in changes)]


@dataclasses.dataclass
class Lines:
  """A `report` that keeps what it is told, and sends `signals` when a line matches `at`."""

  at: str = ""
  signals: tuple[signal.Signals, ...] = ()

  def __post_init__(self):
    self.lines: list[str] = []

  def __call__(self, line: str) -> None:
    self.lines.append(line)
    if self.at and re.search(self.at, line):
      for number in self.signals:
        signal.raise_signal(number)

  def matching(self, pattern: str) -> list[str]:
    return [line for line in self.lines if re.search(pattern, line)]


def entries(workdir: Path) -> Iterator[dict[str, Any]]:
  for line in (workdir / METRICS_FILE).read_text().splitlines():
    yield json.loads(line)


def metrics(workdir: Path, training_only: bool = False) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl, in order, without the times."""
  kept = [{name: v for name, v in entry.items() if name not in TIMES} for entry in entries(workdir)]
  return [entry for entry in kept if not training_only or "loss" in entry]


def saved(workdir: Path, step: int | None = None) -> dict[str, Any]:
  """A checkpoint's checksum of every array, the data position and the loop's values; None: the newest."""
  folder = workdir / "checkpoints"
  step = max(complete_steps(folder)) if step is None else step
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    loop = reader.restore(folder / str(step) / "loop", args=ocp.args.JsonRestore())
  assert {"step", "rng", "tokens", "params/embed"} <= loop["checksums"].keys()
  return {"at": step, **loop}


def contents(workdir: Path) -> dict[str, bytes]:
  """Every file of a run except its lock, which says nothing."""
  files = (path for path in workdir.rglob("*") if path.is_file() and path.name != "lock")
  return {str(path.relative_to(workdir)): path.read_bytes() for path in files}
