"""Scores any checkpoint on held-out text.

python -m launch.evaluate --checkpoint=runs/x [--data=runs/data] [--tasks=lm,accept_length] [--json=x.json]

The folder may be a run's, a checkpoint's, or a Hugging Face one; without --data it is the run's own.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from glm5_jax.errors import UserError
from launch.common import run

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "folder of a run, a checkpoint, or Hugging Face's")
_STEP = flags.DEFINE_integer("step", None, "step of a checkpoint; the newest by default")
_DATA = flags.DEFINE_string("data", None, "prepared data folder; the run's by default")
_TASKS = flags.DEFINE_list("tasks", [], "what to measure; by default all that the model has the parts for")
_SEQ_LEN = flags.DEFINE_integer("seq_len", None, "tokens a row; the run's by default", lower_bound=2)
_ROWS = flags.DEFINE_integer("rows", 0, "held-out rows scored; 0: all", lower_bound=0)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "rows at a time", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 8, "held-out documents continued", lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "tokens of each given", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "tokens of each made", lower_bound=1)
_DRAFT_STEPS = flags.DEFINE_integer("draft_steps", 0, "tokens drafted a round; 0: as trained", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "of the choice of prompts and of sampling")
_JSON = flags.DEFINE_string("json", None, "file to write the scores to")


def main(_: Sequence[str]) -> None:
  if not _CHECKPOINT.value:
    raise UserError("--checkpoint is needed: the folder of a run, a checkpoint, or Hugging Face's")
  if _JSON.value and not Path(_JSON.value).parent.is_dir():
    raise UserError(f"--json: no folder {Path(_JSON.value).parent} to write to")
  # jax starts only once the flags are known to be right
  from glm5_jax import evals
  from glm5_jax.serve.load import open_model

  evals.check_tasks(_TASKS.value)
  model = open_model(_CHECKPOINT.value, _STEP.value)
  context = evals.open_context(
    model,
    _DATA.value,
    _SEQ_LEN.value,
    _SEED.value,
    evals.Limits(
      rows=_ROWS.value,
      batch_size=_BATCH_SIZE.value,
      prompts=_PROMPTS.value,
      prompt_tokens=_PROMPT_TOKENS.value,
      new_tokens=_NEW_TOKENS.value,
      draft_steps=_DRAFT_STEPS.value,
    ),
  )
  results = evals.evaluate(context, _TASKS.value or evals.default_tasks(model.cfg))
  step = "" if model.step is None else f", step {model.step}"
  print(f"{model.folder}{step}, on the held-out documents of {context.data.folder}")
  print(evals.table(results))
  if _JSON.value:
    origin = {"checkpoint": str(model.folder), "step": model.step, "data": context.data.folder}
    Path(_JSON.value).write_text(json.dumps(origin | {"tasks": results}, indent=2) + "\n")


if __name__ == "__main__":
  run(main)
