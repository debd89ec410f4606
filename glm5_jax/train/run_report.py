"""A run's report page from what stands in its folder: config, metrics, scores, sample, baselines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5_jax.config import RunConfig
from glm5_jax.data.records import load_data_tokenizer, read_records
from glm5_jax.errors import UserError
from glm5_jax.evals.baselines import MarkovByteModel, gzip_bits_per_byte
from glm5_jax.model import count_params
from glm5_jax.train.report import METRICS_FILE, Report, Sample, read_metrics, write_report


def report_run(workdir: str | Path, evaluation: str | Path, sample: str | Path | None = None) -> str:
  """Writes `workdir`/report.html; returns one line that compares the model with its baselines.

  Args:
    workdir: a run's folder, with config.json and metrics.jsonl.
    evaluation: the file of `launch.evaluate --json`; its "lm" task is needed.
    sample: a text file to show, prompt included.

  Raises:
    UserError: a file is missing or not what it should be.
  """
  run = RunConfig.from_json(_read(Path(workdir) / "config.json", "train the run first"))
  scores = json.loads(_read(Path(evaluation), "write it with launch.evaluate --json"))
  tasks: dict[str, dict[str, Any]] = scores["tasks"]
  if "lm" not in tasks:
    raise UserError(f"{evaluation} has no scores of the lm task; evaluate with --tasks=lm,accept_length")
  lm, drafts = tasks["lm"], tasks.get("accept_length", {})
  baselines = byte_baselines(scores["data"])
  depths = sum(name.startswith("mtp_accuracy_") for name in lm)
  text = _read(Path(sample), "write it with launch.generate") if sample else ""
  path = write_report(
    workdir,
    Report(
      title=run.name or Path(workdir).name,
      config=run,
      heldout_bpb=lm["bits_per_byte"],
      baselines=baselines,
      accuracy=[lm["accuracy"], *(lm[f"mtp_accuracy_{k}"] for k in range(1, depths + 1))],
      accept_length=drafts.get("accept_length"),
      samples=[Sample("", text)] if text else [],
      facts=_facts(run, read_metrics(Path(workdir) / METRICS_FILE)),
    ),
  )
  beside = ", ".join(f"{name} {bits:.3f}" for name, bits in baselines.items())
  return f"held-out bits per byte {lm['bits_per_byte']:.3f} (beside {beside}); report in {path}"


def _facts(run: RunConfig, metrics: list[dict[str, Any]]) -> dict[str, str]:
  counts = count_params(run.model)
  facts = {
    "parameters": f"{counts['total'] / 1e6:,.2f} M, of which {counts['active'] / 1e6:,.2f} M a token meets",
    "parameters of the MTP layer": f"{counts['mtp'] / 1e6:,.2f} M",
  }
  if tokens := [entry["tokens"] for entry in metrics if entry.get("tokens")]:
    facts["targets trained on"] = f"{tokens[-1]:,.0f}"
  return facts


def byte_baselines(data_folder: str) -> dict[str, float]:
  """Bits per byte of an order-2 byte model fitted on the training documents, and of gzip -9, held out."""

  def documents(split: str) -> Iterator[bytes]:
    tokenizer = load_data_tokenizer(data_folder)
    return (tokenizer.decode(r.tokens, skip_special=True).encode() for r in read_records(data_folder, split))

  model = MarkovByteModel(documents("train"))
  return {
    "order-2 Markov": model.bits_per_byte(documents("heldout")),
    "gzip -9": gzip_bits_per_byte(documents("heldout")),
  }


def _read(path: Path, advice: str) -> str:
  try:
    return path.read_text(encoding="utf-8")
  except FileNotFoundError:
    raise UserError(f"{path} does not exist; {advice}") from None
