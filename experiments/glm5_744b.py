"""GLM-5's pre-training at 4K context. Source: GLM-5 report §2 and App. A; GLM-4.5 report §2.4.

`--config=experiments/glm5_744b.py:5.2` gives GLM-5.2's architecture.
"""

from glm5_jax.config import (
  DataConfig,
  MeshConfig,
  OptimConfig,
  RunConfig,
  TrainConfig,
  glm5_2_744b,
  glm5_744b,
)
from glm5_jax.errors import UserError

SEQ_LEN = 4096  # tokens a row
TOKENS = 27 * 10**12  # the whole of pre-training
SWITCH_TOKENS = 15 * 10**12  # λ of MTP falls to 0.1 and the router's bias rate to 0
BATCH_TOKENS = 64 * 10**6  # a step, after the warm-up
FIRST_BATCH_TOKENS = 16 * 10**6
WARMUP_TOKENS = 500 * 10**9  # over which the batch grows
WARMUP_STAGES = 6  # the growth's shape is not published: equal shares of tokens, equal jumps of size; ours
ROW_MULTIPLE = 256  # a batch's rows divide over that many data-parallel groups; ours

MODELS = {"5": glm5_744b, "5.1": glm5_744b, "5.2": glm5_2_744b}


def get_config(version: str = "5") -> RunConfig:
  if version not in MODELS:
    raise UserError(f"experiments/glm5_744b.py:{version}: the version should be {' or '.join(MODELS)}")
  steps = steps_until(TOKENS)
  return RunConfig(
    name=f"glm{version}_744b",
    model=MODELS[version]().replace(remat="attention", param_dtype="float32"),
    data=DataConfig(seq_len=SEQ_LEN, packing="truncate", shards=ROW_MULTIPLE),
    optim=OptimConfig(name="muon_split", peak_lr=2e-4, final_lr=4e-5, schedule="cosine", warmup_steps=2000),
    train=TrainConfig(
      steps=steps,
      batch_size=rows(BATCH_TOKENS),
      batch_warmup=",".join(f"{rows}:{until}" for rows, until in batch_warmup()),
      mtp_weight=0.3,
      mtp_weight_final=0.1,
      mtp_switch=steps_until(SWITCH_TOKENS) / steps,
      router_bias_rate=1e-3,
      balance_weight=1e-4,
      loss_chunk=SEQ_LEN,  # ours
      eval_every=1000,
      checkpoint_every=500,
    ),
    mesh=MeshConfig(data=1, fsdp=-1, expert=64),  # ours: four experts a device
  )


def rows(tokens: float) -> int:
  """Rows of a batch of about `tokens`, as a multiple of ROW_MULTIPLE."""
  return round(tokens / SEQ_LEN / ROW_MULTIPLE) * ROW_MULTIPLE


def batch_warmup() -> list[tuple[int, int]]:
  """(rows, until_step) of each stage of the batch's growth."""
  stages, step = [], 0
  for i in range(WARMUP_STAGES):
    batch = rows(FIRST_BATCH_TOKENS + (BATCH_TOKENS - FIRST_BATCH_TOKENS) * i / WARMUP_STAGES)
    step += round(WARMUP_TOKENS / WARMUP_STAGES / (batch * SEQ_LEN))
    stages.append((batch, step))
  return stages


def steps_until(tokens: int) -> int:
  """Steps that train on `tokens`, more than WARMUP_TOKENS."""
  return batch_warmup()[-1][1] + round((tokens - WARMUP_TOKENS) / (rows(BATCH_TOKENS) * SEQ_LEN))
