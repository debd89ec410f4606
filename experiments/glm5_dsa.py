"""From dense to sparse attention, and training on sparse attention. Source: GLM-5 report §2 and App. A.

`--config=experiments/glm5_dsa.py:warmup` trains the indexers alone on the model that mid-training has left
(`--config.train.start_from=…`), `:sparse` everything on what the warm-up has left, and `:learner` is a step
of the kind that reinforcement learning makes on what that has left: 128 K tokens a row, selection as in the
rollouts, indexers at rest.
"""

from experiments.glm5_midtrain import ROW_MULTIPLE, SEQ_LEN
from glm5_jax.config import (
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimConfig,
  RunConfig,
  TrainConfig,
  glm5_744b,
)
from glm5_jax.errors import UserError

WARMUP_STEPS, WARMUP_ROWS = 1000, 16  # published: 14 rows; 16 divide over devices
SPARSE_TOKENS = 20 * 10**9


def get_config(stage: str = "warmup") -> RunConfig:
  makers = {"warmup": _warmup, "sparse": _sparse, "learner": _learner}
  if stage not in makers:
    raise UserError(f"experiments/glm5_dsa.py:{stage}: the stage should be {', '.join(makers)}")
  return makers[stage]()


def _warmup() -> RunConfig:
  train = TrainConfig(
    stage="dsa_warmup",
    steps=WARMUP_STEPS,
    batch_size=WARMUP_ROWS,
    loss_chunk=4096,  # ours
    eval_every=100,
    checkpoint_every=100,
  )
  mesh = MeshConfig(data=1, fsdp=-1, expert=16, context=8)  # ours: one row an expert-parallel group
  return _run("warmup", "200k", _model(dsa_mode="dense"), OptimConfig(schedule="dsa_warmup"), train, mesh)


def _sparse() -> RunConfig:
  steps = round(SPARSE_TOKENS / (ROW_MULTIPLE * SEQ_LEN["200k"]))
  model = _model(dsa_mode="sparse")
  optim = OptimConfig(name="muon_split", schedule="dsa_sparse")
  return _run("sparse", "200k", model, optim, _train("dsa_sparse", steps), _mesh())


def _learner() -> RunConfig:
  optim = OptimConfig(name="muon_split", schedule="constant", peak_lr=1e-6, warmup_steps=0)  # rate: ours
  return _run("learner", "128k", _model(dsa_mode="sparse"), optim, _train("pretrain", 1000), _mesh())


def _model(**fields) -> ModelConfig:
  # float32 products of indexers would take six passes of the matrix unit; GLM-5 computes them in float8.
  return glm5_744b().replace(
    remat="full", head_group=8, param_dtype="float32", index_dtype="bfloat16", **fields
  )


def _train(stage: str, steps: int) -> TrainConfig:
  return TrainConfig(
    stage=stage,
    steps=steps,
    batch_size=ROW_MULTIPLE,  # not published; ours
    mtp_weight=0.1,
    mtp_weight_final=0.1,
    router_bias_rate=0.0,
    loss_chunk=4096,
    eval_every=100,
    checkpoint_every=50,
  )


def _mesh() -> MeshConfig:
  return MeshConfig(data=1, fsdp=-1, expert=64, context=8)


def _run(
  name: str, length: str, model: ModelConfig, optim: OptimConfig, train: TrainConfig, mesh: MeshConfig
) -> RunConfig:
  data = DataConfig(seq_len=SEQ_LEN[length], packing="best_fit", shards=train.batch_size)
  return RunConfig(name=f"glm5_dsa_{name}", model=model, data=data, optim=optim, train=train, mesh=mesh)
