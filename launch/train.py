"""Train, or resume by the same command.

python -m launch.train --config=experiments/quickstart.py --workdir=runs/x --config.data.folder=runs/data

In several processes: on a pod the same command in each; elsewhere with --coordinator, --processes and
--process_id.
"""

from absl import flags

from launch.common import config_flag, distributed_flags, load_config, run

CONFIG = config_flag()
TOGETHER = distributed_flags()
WORKDIR = flags.DEFINE_string("workdir", None, "the run's folder; the same command resumes what it holds")
flags.mark_flag_as_required("workdir")


def main(_argv) -> None:
  config = load_config(CONFIG.value)
  with TOGETHER():
    from glm5_jax.train.loop import train  # jax starts only once the flags are known to be right

    train(config, str(WORKDIR.value))


if __name__ == "__main__":
  run(main)
