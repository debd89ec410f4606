"""Compiles a run's training step for a TPU slice, without a TPU, and says whether it fits and what it costs.

python -m launch.compile --config=experiments/glm5_744b.py --topology=v5p:8x8x8 --rows=512

Needs libtpu: pip install "glm5-jax[tpu]". Writes compile.json and compile.html into a folder of the report's
own. `--config.…` flags change anything, for instance the mesh, train.batch_size or model.remat.
"""

from pathlib import Path

from absl import flags

from glm5_jax.errors import UserError
from launch.common import config_flag, load_config, run

CONFIG = config_flag()
TOPOLOGY = flags.DEFINE_string("topology", None, "the slice, such as v5p:8x8x8 or tpu7x:4x4x8")
SLICES = flags.DEFINE_integer("slices", 1, "how many, joined by the data-centre network", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 0, "rows of a step, in one micro-batch; 0: as configured", lower_bound=0)
FOLDER = flags.DEFINE_string("folder", "runs/compile", "where reports go, one folder each")


def main(_argv) -> None:
  config = load_config(CONFIG.value)
  if not TOPOLOGY.value:
    raise UserError("--topology is needed: the slice, such as v5p:8x8x8 or tpu7x:4x4x8")
  from glm5_jax.compiler import DoesNotFit
  from glm5_jax.train.ahead import compile_step, report_name

  try:
    report = compile_step(config, TOPOLOGY.value, SLICES.value, ROWS.value)
  except DoesNotFit as error:
    print(error.explanation.table(), flush=True)
    raise
  print(report.table())
  page = report.save(Path(FOLDER.value) / report_name(config, TOPOLOGY.value))
  print(f"written: {page} and {page.with_suffix('.json').name}")


if __name__ == "__main__":
  run(main)
