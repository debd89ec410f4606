"""Writes a run's one-page report: python -m launch.report --workdir=runs/x --evaluation=… [--sample=…]"""

from collections.abc import Sequence

from absl import flags

from glm5_jax.errors import UserError
from launch.common import run

_WORKDIR = flags.DEFINE_string("workdir", None, "a run's folder; report.html is written there")
_EVALUATION = flags.DEFINE_string("evaluation", None, "scores written by launch.evaluate --json")
_SAMPLE = flags.DEFINE_string("sample", None, "text written by launch.generate")


def main(_: Sequence[str]) -> None:
  from glm5_jax.train.run_report import report_run

  if not _WORKDIR.value or not _EVALUATION.value:
    raise UserError("--workdir and --evaluation are needed: a run's folder and its scores")
  print(report_run(_WORKDIR.value, _EVALUATION.value, _SAMPLE.value))


if __name__ == "__main__":
  run(main)
