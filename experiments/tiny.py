"""Every part of GLM-5 at a size that compiles in seconds: for tests and for trying out a change."""

from glm5_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig, tiny


def get_config() -> RunConfig:
  return RunConfig(
    name="tiny",
    model=tiny(),
    data=DataConfig(seq_len=64),
    optim=OptimConfig(peak_lr=2e-3, final_lr=2e-4, warmup_steps=10, ns_dtype="float32"),
    train=TrainConfig(
      steps=100, batch_size=4, loss_chunk=64, log_every=5, eval_every=50, eval_rows=8, checkpoint_every=50
    ),
  )
