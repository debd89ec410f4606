"""A few million parameters, trained in minutes on two cores: what `make quickstart` runs."""

from glm5_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig, small


def get_config() -> RunConfig:
  return RunConfig(
    name="quickstart",
    model=small(),
    data=DataConfig(seq_len=256),
    optim=OptimConfig(peak_lr=4e-3, final_lr=4e-4, warmup_steps=15, ns_dtype="float32"),
    train=TrainConfig(
      steps=120, batch_size=16, log_every=10, eval_every=40, eval_rows=32, checkpoint_every=40
    ),
  )
