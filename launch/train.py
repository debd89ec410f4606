"""Train, or resume by the same command.

python -m launch.train --config=experiments/quickstart.py --workdir=runs/x --config.data.folder=runs/data
"""

from absl import flags

from launch.common import config_flag, load_config, run

CONFIG = config_flag()
WORKDIR = flags.DEFINE_string("workdir", None, "the run's folder; the same command resumes what it holds")
flags.mark_flag_as_required("workdir")


def main(_argv) -> None:
  from glm5_jax.train.loop import train  # jax starts only once the flags are known to be right

  train(load_config(CONFIG.value), str(WORKDIR.value))


if __name__ == "__main__":
  run(main)
