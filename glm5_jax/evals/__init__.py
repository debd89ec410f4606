"""Measures of a model: one file a task, looked up by name, and the baselines that they stand beside."""

from collections.abc import Callable, Iterable, Sequence

from glm5_jax.config import ModelConfig
from glm5_jax.errors import UserError
from glm5_jax.evals import accept_length, lm, needle
from glm5_jax.evals.context import EvalContext, Limits, NeedleLimits, evaluation_mesh, open_context

__all__ = [
  "TASKS",
  "EvalContext",
  "Limits",
  "NeedleLimits",
  "check_tasks",
  "choose_tasks",
  "default_tasks",
  "evaluate",
  "evaluation_mesh",
  "open_context",
  "table",
]

Scores = dict[str, float]

# A new task is a file with such a function, and a line here.
TASKS: dict[str, Callable[[EvalContext], Scores]] = {
  "lm": lm.run,
  "accept_length": accept_length.run,
  "needle": needle.run,
}
ASKED_FOR = {"needle"}  # run only where named: what it should hide, and how long the texts are, is a choice
WITHOUT_DATA = {"needle"}  # can do without a data folder


def default_tasks(cfg: ModelConfig) -> list[str]:
  """Every task that the model has the parts for, but for those that are run only where named."""
  names = [name for name in TASKS if name not in ASKED_FOR]
  return [name for name in names if name != "accept_length" or cfg.num_nextn_predict_layers]


def check_tasks(names: Iterable[str]) -> None:
  """Raises UserError for a name that is no task."""
  for name in names:
    if name not in TASKS:
      raise UserError(f"no task {name!r}; there are {', '.join(TASKS)}")


def choose_tasks(context: EvalContext, named: Sequence[str] = ()) -> tuple[list[str], list[str]]:
  """Tasks to run: the named ones, or all that the model has the parts for and the devices can run.

  Returns:
    (names of tasks, lines that tell of a task which does not use all devices, or is left out).

  Raises:
    UserError: a named one is unknown, or cannot run on these devices.
  """
  tasks = list(named) or default_tasks(context.cfg)
  check_tasks(tasks)
  if context.mesh is None or "accept_length" not in tasks:
    return tasks, []
  reason = context.why_not_on_one_device()
  if not reason:
    return tasks, ["accept_length generates on one of the devices"]
  if named:
    context.on_one_device()  # which tells the reason
  tasks.remove("accept_length")
  return tasks, [f"accept_length is left out: it generates on one device, and {reason}"]


def evaluate(context: EvalContext, names: Iterable[str]) -> dict[str, Scores]:
  """Scores of each task by name. Raises UserError for an unknown name before anything runs."""
  names = list(names)
  check_tasks(names)
  return {name: TASKS[name](context) for name in names}


def table(results: dict[str, Scores]) -> str:
  """One line a score, for people; a score "x" with its standard error "x_se" is one."""
  lines = []
  for task, scores in results.items():
    lines.append(task)
    width = max(24, *map(len, scores))
    for name, value in scores.items():
      if name.removesuffix("_se") in scores and name.endswith("_se"):
        continue
      shown = f"{value:,.0f}" if value == int(value) and abs(value) >= 2 else f"{value:.4f}"
      error = f" ± {scores[name + '_se']:.4f}" if name + "_se" in scores else ""
      lines.append(f"  {name:<{width}} {shown:>14}{error}")
  return "\n".join(lines)
