r"""Scores any checkpoint on held-out text.

python -m launch.evaluate --checkpoint=runs/x [--data=runs/data] [--tasks=lm,accept_length] [--json=x.json]
python -m launch.evaluate --checkpoint=runs/x --tasks=needle --needle_lengths=4096,32768 \
  --dsa_modes=dense,sparse

The folder may be a run's, a checkpoint's, or a Hugging Face one; without --data it is the run's own. All
devices work together, each with its part of the parameters, as --mesh says; in several processes with
--coordinator, --processes and --process_id, as for launch.train.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from glm5_jax.config import MeshConfig
from glm5_jax.errors import UserError
from launch.common import distributed_flags, run

_TOGETHER = distributed_flags()

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
_NEEDLE_LENGTHS = flags.DEFINE_list(
  "needle_lengths", [], "tokens of a prompt with needles; the run's by default"
)
_NEEDLE_PROMPTS = flags.DEFINE_integer("needle_prompts", 32, "of each length", lower_bound=2)
_NEEDLE_KEYS = flags.DEFINE_integer("needle_keys", 4, "hidden in a prompt", lower_bound=1)
_NEEDLE_VALUES = flags.DEFINE_integer("needle_values", 1, "numbers hidden under a key", lower_bound=1)
_NEEDLE_QUERIES = flags.DEFINE_integer("needle_queries", 1, "keys asked for in a prompt", lower_bound=1)
_DSA_MODES = flags.DEFINE_list(
  "dsa_modes", [], "attention that needles are looked for with, dense,sparse to compare; the run's by default"
)
_SEED = flags.DEFINE_integer("seed", 0, "of the choice of prompts and of sampling")
_MESH = flags.DEFINE_list(
  "mesh",
  [],
  "devices along axes, as in fsdp=4,expert=2, -1 for what is left; by default all along fsdp, or where the "
  "model does not divide so, along data",
)
_JSON = flags.DEFINE_string("json", None, "file to write the scores to")


def main(_: Sequence[str]) -> None:
  if not _CHECKPOINT.value:
    raise UserError("--checkpoint is needed: the folder of a run, a checkpoint, or Hugging Face's")
  if _JSON.value and not Path(_JSON.value).parent.is_dir():
    raise UserError(f"--json: no folder {Path(_JSON.value).parent} to write to")
  mesh = _mesh(_MESH.value) if _MESH.value else None
  with _TOGETHER():
    _evaluate(_CHECKPOINT.value, mesh)


def _evaluate(folder: str, mesh: MeshConfig | None) -> None:
  # jax starts only once the flags are known to be right
  import jax

  from glm5_jax import evals
  from glm5_jax.serve.load import open_model
  from glm5_jax.train.placement import devices_of

  evals.check_tasks(_TASKS.value)
  model = open_model(folder, _STEP.value)
  limits = evals.Limits(
    rows=_ROWS.value,
    batch_size=_BATCH_SIZE.value,
    prompts=_PROMPTS.value,
    prompt_tokens=_PROMPT_TOKENS.value,
    new_tokens=_NEW_TOKENS.value,
    draft_steps=_DRAFT_STEPS.value,
    needle=_needles(),
  )
  needs_data = not _TASKS.value or not evals.WITHOUT_DATA.issuperset(_TASKS.value)
  context = evals.open_context(model, _DATA.value, _SEQ_LEN.value, _SEED.value, limits, mesh, needs_data)
  tasks, notes = evals.choose_tasks(context, _TASKS.value)
  results = evals.evaluate(context, tasks)
  if jax.process_index() != 0:
    return
  step = "" if model.step is None else f", step {model.step}"
  devices = devices_of(context.mesh)
  text = f"the held-out documents of {context.data.folder}" if context.data.folder else "made-up words"
  print(f"{model.folder}{step}, on {text}, on {devices}")
  print("\n".join([*notes, evals.table(results)]))
  if _JSON.value:
    origin = {
      "checkpoint": str(model.folder),
      "step": model.step,
      "data": context.data.folder,
      "devices": devices,
    }
    Path(_JSON.value).write_text(json.dumps(origin | {"tasks": results}, indent=2) + "\n")


def _needles():
  """evals.NeedleLimits of the flags."""
  from glm5_jax import evals

  for length in _NEEDLE_LENGTHS.value:
    if not length.isdecimal():
      raise UserError(f"--needle_lengths: {length!r} should be a number of tokens")
  return evals.NeedleLimits(
    lengths=tuple(map(int, _NEEDLE_LENGTHS.value)),
    prompts=_NEEDLE_PROMPTS.value,
    keys=_NEEDLE_KEYS.value,
    values=_NEEDLE_VALUES.value,
    queries=_NEEDLE_QUERIES.value,
    dsa_modes=tuple(_DSA_MODES.value),
  )


def _mesh(settings: Sequence[str]) -> MeshConfig:
  """Of "fsdp=4", …; `data` takes the devices left where nothing else does."""
  sizes: dict[str, int] = {}
  fields = [field.name for field in dataclasses.fields(MeshConfig)]
  for setting in settings:
    axis, _, size = setting.partition("=")
    if axis not in fields or axis in sizes:
      raise UserError(f"--mesh: {setting!r} should be an axis, once, and a number, of {', '.join(fields)}")
    left = size == "-1" and -1 not in sizes.values() and not axis.startswith("dcn_")
    if not left and not (size.isdecimal() and int(size) >= 1):
      raise UserError(f"--mesh: {setting!r} should be at least 1, or -1, for one axis, for the devices left")
    sizes[axis] = int(size)
  return MeshConfig(**({"data": 1 if -1 in sizes.values() else -1} | sizes))


if __name__ == "__main__":
  run(main)
