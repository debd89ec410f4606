"""Every field of a run. Names are Hugging Face's where GLM-5's config.json has one.

The dataclasses are mutable so that `--config.optim.peak_lr=1e-3` can set a leaf, and hashable by
value so that a `ModelConfig` can be a static argument of jit and an attribute of a Flax module.
"""

import dataclasses
import json
from typing import Any

from glm5_jax.errors import UserError


@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig:
  """Architecture and numerics. Defaults are GLM-5 (744B); source: zai-org/GLM-5 config.json."""

  # Sizes
  vocab_size: int = 154_880
  hidden_size: int = 6144
  num_hidden_layers: int = 78
  intermediate_size: int = 12_288
  max_position_embeddings: int = 202_752

  # Multi-head latent attention
  num_attention_heads: int = 64
  q_lora_rank: int = 2048
  kv_lora_rank: int = 512
  qk_nope_head_dim: int = 192
  qk_rope_head_dim: int = 64
  v_head_dim: int = 256
  rope_theta: float = 1e6
  rope_interleave: bool = True

  # Lightning indexer (DeepSeek sparse attention)
  index_n_heads: int = 32
  index_head_dim: int = 128
  index_topk: int = 2048
  indexer_rope_interleave: bool = True
  index_topk_freq: int = 1  # GLM-5.2 (IndexShare): 4, one owner of a selected set in four layers
  index_skip_topk_offset: int = 3  # layer i owns an indexer iff max(i - offset + 1, 0) % freq == 0
  indexer_types: tuple[str, ...] = ()  # "full" | "shared" per layer; () derives it from the two above

  # Mixture of experts
  first_k_dense_replace: int = 3
  moe_layer_freq: int = 1
  n_routed_experts: int = 256
  num_experts_per_tok: int = 8
  n_shared_experts: int = 1
  moe_intermediate_size: int = 2048
  n_group: int = 1
  topk_group: int = 1
  norm_topk_prob: bool = True
  routed_scaling_factor: float = 2.5
  scoring_func: str = "sigmoid"
  topk_method: str = "noaux_tc"

  # Norms, initialisation, tokens
  rms_norm_eps: float = 1e-5
  lora_norm_eps: float = 1e-5  # transformers builds these two norms with 1e-6; training stacks use 1e-5
  hidden_act: str = "silu"
  attention_bias: bool = False
  attention_dropout: float = 0.0
  tie_word_embeddings: bool = False
  initializer_range: float = 0.02
  eos_token_id: tuple[int, ...] = (154_820, 154_827, 154_829)
  pad_token_id: int = 154_820

  # Multi-token prediction
  num_nextn_predict_layers: int = 1  # layers stored; 0 removes MTP
  mtp_depths: int = 3  # depths predicted in training; all share the one stored layer

  # Ours: which attention runs where, and how
  attention: str = "D"  # one letter a layer (a key of model.attention.ATTENTION), repeated to fill
  dsa_mode: str = "dense"  # "dense": plain MLA, indexer idle (pre-training); "sparse": selected keys only
  mla_form: str = "auto"  # "expanded" | "absorbed" | "auto" (fewest FLOPs for the shape)
  sliding_window: int = 4096  # keys seen by an "S" layer
  query_block: int = 0  # queries attended at a time, bounds memory; 0 picks by shape
  head_group: int = 0  # heads expanded at a time by the TPU kernels, bounds memory on long rows; 0: all
  moe_implementation: str = ""  # a name of pallas_kernels.grouped_matmul; "" picks by back end
  attention_implementation: str = ""  # "reference" | "splash" (TPU); "" picks by back end
  dsa_implementation: str = ""  # of the kernels of sparse attention, a name of pallas_kernels.topk; "" picks
  index_dtype: str = "float32"  # in which indexer queries and keys are multiplied; sums are float32
  indexer_loss: bool = False  # compute each indexer's KL to attention; the stages that train indexers set it

  # Ours: numerics and compilation
  dtype: str = "bfloat16"  # activations
  param_dtype: str = "bfloat16"  # weights at rest
  router_param_dtype: str = ""  # "" follows param_dtype; GLM-5.2 keeps router weights in float32
  scan_layers: bool = True  # stack equal layers and scan; False unrolls (small models, decoding)
  remat: str = "none"  # or a name of model.block.REMAT: what the backward pass is given, what it recomputes

  def __post_init__(self):
    # Flags and JSON hand over lists or single numbers; hashing needs tuples.
    ids = self.eos_token_id
    self.eos_token_id = (ids,) if isinstance(ids, int) else tuple(ids)
    self.indexer_types = tuple(self.indexer_types)

  def replace(self, **changes) -> "ModelConfig":
    return dataclasses.replace(self, **changes)

  @property
  def qk_head_dim(self) -> int:
    """Width of an expanded query or key; its inverse square root is the softmax scale."""
    return self.qk_nope_head_dim + self.qk_rope_head_dim

  @property
  def latent_width(self) -> int:
    """Numbers cached per token and layer by MLA: latent plus rotated shared key (576 in GLM-5)."""
    return self.kv_lora_rank + self.qk_rope_head_dim

  def attention_kind(self, layer: int) -> str:
    """The letter of `layer` (0-based). The MTP layer, index num_hidden_layers, takes the last one's."""
    last = self.num_hidden_layers - 1
    return self.attention[min(layer, last) % len(self.attention)]

  def is_moe(self, layer: int) -> bool:
    return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

  def owns_indexer(self, layer: int) -> bool:
    """Whether a DSA layer scores keys itself rather than reusing the previous owner's selected set."""
    if self.attention_kind(layer) != "D":
      return False
    if layer >= self.num_hidden_layers:  # the MTP layer always owns one
      return True
    if self.indexer_types:
      return self.indexer_types[layer] == "full"
    return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

  def validate(self) -> None:
    """Raises UserError naming the first impossible field and what would be right."""
    from glm5_jax import config_checks

    config_checks.check_model(self)

  @classmethod
  def from_hf(cls, hf: dict[str, Any], **ours) -> "ModelConfig":
    """A config that reproduces transformers' model for this `config.json`; `ours` overrides fields."""
    from glm5_jax import config_hf

    return config_hf.from_hf(cls, hf, **ours)

  def to_hf(self) -> dict[str, Any]:
    """The `config.json` dictionary of this architecture."""
    from glm5_jax import config_hf

    return config_hf.to_hf(self)


@dataclasses.dataclass(unsafe_hash=True)
class DataConfig:
  """Where tokens come from and how rows are made of documents."""

  folder: str = ""  # written by launch.prepare: tokenizer.model, train/*.array_record, heldout/*, meta.json
  seq_len: int = 512
  packing: str = "truncate"  # "truncate": cut at row ends (pre-training); "best_fit": whole documents
  pack_bins: int = 64  # open rows that best_fit chooses between, in each shard
  shuffle: bool = True  # documents, every epoch in another order; then rows
  shuffle_window: int = 512  # rows mixed after packing: a long document fills many in a row; 1 leaves them
  # Streams that documents are dealt into; each gives an equal run of every batch's rows. Batches depend on
  # it, not on how many processes read. With 1 any batch size will do, and each of several processes packs
  # all rows to keep its own; a multiple of the processes spares them that.
  shards: int = 1
  seed: int = 0
  prefetch: int = 4  # batches made ahead, in threads


@dataclasses.dataclass(unsafe_hash=True)
class OptimConfig:
  """Optimiser and schedule. Sources: GLM-5 report §2 and App. A; GLM-4.5 report §2.4."""

  name: str = "muon_split"  # "muon_split" | "muon" (whole matrices) | "adamw"
  peak_lr: float = 2e-4
  final_lr: float = 4e-5
  schedule: str = "cosine"  # "cosine" | "linear" | "constant" | a staged one of optim.schedules
  warmup_steps: int = 100  # not published; ours
  decay_steps: int = 0  # 0: train.steps
  momentum: float = 0.95
  ns_steps: int = 5
  ns_dtype: str = "bfloat16"  # arithmetic of Newton–Schulz
  update_rms: float = 0.2  # step = lr · update_rms · sqrt(max(rows, cols)) · X
  b1: float = 0.9  # AdamW, for embeddings, head, norms, biases, indexer
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off
  max_nonfinite: int = 5  # stop after this many non-finite gradients in a row (each skips its update)


@dataclasses.dataclass(unsafe_hash=True)
class TrainConfig:
  """One stage of training."""

  stage: str = "pretrain"  # a name of train.stages.STAGES: what is trained, by which loss
  start_from: str = ""  # a run, checkpoint or Hugging Face folder whose parameters a fresh run begins with
  steps: int = 1000
  batch_size: int = 8  # rows a step, over all micro-batches
  batch_warmup: str = ""  # "16:500,32:1000": rows a step until that step, then batch_size
  grad_accum: int = 1  # micro-batches a step
  loss: str = ""  # a name of losses.BATCH_LOSSES; "" takes the stage's
  loss_chunk: int = 1024  # tokens projected to the vocabulary at a time
  mtp_weight: float = 0.3  # λ before the switch
  mtp_weight_final: float = 0.1  # λ after it
  mtp_switch: float = 0.55  # share of the steps at which λ and the bias rate switch (15 T of 27 T tokens)
  router_bias_rate: float = 1e-3  # γ of the selection bias before the switch, 0 after
  balance_weight: float = 1e-4  # α of the sequence balance loss
  indexer_weight: float = 1.0  # of the indexers' KL, summed over layers; not published, ours
  seed: int = 0
  log_every: int = 10
  eval_every: int = 100
  eval_rows: int = 64  # held-out rows per evaluation; 0 evaluates all
  checkpoint_every: int = 100
  keep_checkpoints: int = 2
  profile_steps: str = ""  # "20:25" writes a profiler trace of these steps


@dataclasses.dataclass(unsafe_hash=True)
class MeshConfig:
  """Devices along each mesh axis; -1 takes what is left."""

  data: int = -1
  fsdp: int = 1
  expert: int = 1
  context: int = 1
  tensor: int = 1
  dcn_data: int = 1  # slices of a multi-slice pod along data, joined by the data-centre network
  dcn_fsdp: int = 1  # and along fsdp


@dataclasses.dataclass(unsafe_hash=True)
class RunConfig:
  """The root: what an experiment file's get_config() returns."""

  name: str = ""
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

  def validate(self) -> None:
    """Raises UserError naming the first impossible field and what would be right."""
    from glm5_jax import config_checks

    config_checks.check_run(self)

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

  @classmethod
  def from_json(cls, text: str) -> "RunConfig":
    """Reads `to_json`; an unknown field raises UserError."""
    return _build(cls, json.loads(text), where="config")


def _build(cls, values: dict[str, Any], where: str):
  fields = {field.name: field for field in dataclasses.fields(cls)}
  kwargs: dict[str, Any] = {}
  for name, value in values.items():
    if name not in fields:
      raise UserError(f"{where}.{name} is not a field of {cls.__name__}; it has {', '.join(fields)}")
    kind = fields[name].type
    if dataclasses.is_dataclass(kind):
      if not isinstance(value, dict):
        raise UserError(f"{where}.{name} is a section, not the value {value!r}")
      kwargs[name] = _build(kind, value, f"{where}.{name}")
    else:
      kwargs[name] = tuple(value) if isinstance(value, list) else value
  return cls(**kwargs)


def glm5_744b() -> ModelConfig:
  """GLM-5 and GLM-5.1, exactly as released."""
  return ModelConfig()


def glm5_2_744b() -> ModelConfig:
  """GLM-5.2: IndexShare, longer rope base and context, router weights in float32."""
  return ModelConfig(
    rope_theta=8e6,
    max_position_embeddings=1_048_576,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    router_param_dtype="float32",
  )


def tiny() -> ModelConfig:
  """For tests: every part of the architecture, compiled in seconds. 16 index heads, since few make ties."""
  return ModelConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=4,
    intermediate_size=96,
    max_position_embeddings=256,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=8,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    sliding_window=8,
    eos_token_id=(1,),
    pad_token_id=0,
    dtype="float32",
    param_dtype="float32",
  )


def small() -> ModelConfig:
  """The quickstart's: a few million parameters, trained on two cores in minutes."""
  return ModelConfig(
    vocab_size=2048,
    hidden_size=192,
    num_hidden_layers=4,
    intermediate_size=512,
    max_position_embeddings=2048,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=48,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=64,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    sliding_window=128,
    eos_token_id=(0,),
    pad_token_id=0,
    dtype="float32",
    param_dtype="float32",
    scan_layers=False,
  )
