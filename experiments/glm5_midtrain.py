"""GLM-5's mid-training, a stage a context length. Source: GLM-5 report §2 and App. A.

`--config=experiments/glm5_midtrain.py:32k`, `:128k` and `:200k` (202,752 tokens), in this order: each starts
from the parameters of the one before. Attention is dense MLA throughout; its keys and values are expanded a
few heads at a time, and a row lies on the devices of `context`.
"""

from experiments.glm5_744b import BATCH_TOKENS
from glm5_jax.config import DataConfig, MeshConfig, OptimConfig, RunConfig, TrainConfig, glm5_744b
from glm5_jax.errors import UserError
from glm5_jax.optim.schedules import MIDTRAIN_TOKENS

SEQ_LEN = {"32k": 32_768, "128k": 131_072, "200k": 202_752}
CONTEXT = {"32k": 1, "128k": 8, "200k": 8}  # devices of a row; ours
ROW_MULTIPLE = 256  # a micro-batch's rows divide over that many data-parallel groups; ours


def get_config(length: str = "32k") -> RunConfig:
  if length not in SEQ_LEN:
    raise UserError(f"experiments/glm5_midtrain.py:{length}: the length should be {', '.join(SEQ_LEN)}")
  seq_len = SEQ_LEN[length]
  micro_batches = max(1, round(BATCH_TOKENS / (ROW_MULTIPLE * seq_len)))
  rows = micro_batches * ROW_MULTIPLE
  steps = round(MIDTRAIN_TOKENS[length] / (rows * seq_len))
  return RunConfig(
    name=f"glm5_midtrain_{length}",
    model=glm5_744b().replace(remat="full", head_group=8, param_dtype="float32"),
    data=DataConfig(seq_len=seq_len, packing="best_fit", shards=ROW_MULTIPLE),
    optim=OptimConfig(name="muon_split", schedule=f"midtrain_{length}"),
    train=TrainConfig(
      steps=steps,
      batch_size=rows,
      grad_accum=micro_batches,
      mtp_weight=0.1,
      mtp_weight_final=0.1,
      router_bias_rate=0.0,
      balance_weight=1e-4,
      loss_chunk=4096,  # ours
      eval_every=200,
      checkpoint_every=100,
    ),
    mesh=MeshConfig(data=1, fsdp=-1, expert=64, context=CONTEXT[length]),  # ours
  )
