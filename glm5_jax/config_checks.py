"""Refuses impossible configs where the user's value enters, not as a shape error from deep inside XLA.

Tables hold what concerns one field alone; functions hold what concerns several. Every failure is one
UserError that names field, value and what would be right.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from glm5_jax.config import ModelConfig, RunConfig
from glm5_jax.errors import UserError

# Names of registries that lie above this module; tests hold them equal.
ATTENTION_LETTERS = ("D", "F", "S")  # model.attention.ATTENTION
TOPK = ("reference", "tpu", "tpu_interpret")
GROUPED_MATMUL = (  # pallas_kernels.grouped_matmul
  *("reference", "ragged", "blocks", "tpu", "tpu_interpret"),
)
ATTENTION_CORES = ("reference", "splash", "splash_interpret")  # model.attention.latent
SCHEDULES = (  # optim.schedules: SHAPES and STAGES
  *("cosine", "linear", "constant"),
  *("pretrain", "midtrain", "midtrain_32k", "midtrain_128k", "midtrain_200k", "dsa_warmup", "dsa_sparse"),
)
WARMING_SCHEDULES = ("cosine", "linear", "pretrain")  # those that warm up before they decay
# train.stages.STAGES, each with the model.dsa_mode that it needs
STAGE_MODES = {"pretrain": None, "dsa_warmup": "dense", "dsa_sparse": "sparse"}
DTYPES = ("bfloat16", "float32")
REMAT = ("full", "dots", "attention", "offload")  # model.block.REMAT

_CHOICES: Mapping[str, tuple[str, ...]] = {
  "model.scoring_func": ("sigmoid",),
  "model.topk_method": ("noaux_tc",),
  "model.hidden_act": ("silu",),
  "model.dsa_mode": ("dense", "sparse"),
  "model.mla_form": ("auto", "expanded", "absorbed"),
  "model.dsa_implementation": ("", *TOPK),
  "model.moe_implementation": ("", *GROUPED_MATMUL),
  "model.attention_implementation": ("", *ATTENTION_CORES),
  "model.index_dtype": ("float32", "bfloat16"),
  "model.dtype": DTYPES,
  "model.param_dtype": DTYPES,
  "model.router_param_dtype": ("", *DTYPES),
  "model.remat": ("none", *REMAT),
  "data.packing": ("truncate", "best_fit"),
  "optim.name": ("muon_split", "muon", "adamw"),
  "optim.schedule": SCHEDULES,
  "optim.ns_dtype": DTYPES,
  "train.stage": tuple(STAGE_MODES),
}

# Inclusive bounds; None leaves a side open.
_BOUNDS: Mapping[str, tuple[float | None, float | None]] = {
  "model.vocab_size": (2, None),
  "model.hidden_size": (1, None),
  "model.num_hidden_layers": (1, None),
  "model.intermediate_size": (1, None),
  "model.max_position_embeddings": (1, None),
  "model.num_attention_heads": (1, None),
  "model.q_lora_rank": (1, None),
  "model.kv_lora_rank": (1, None),
  "model.qk_nope_head_dim": (1, None),
  "model.qk_rope_head_dim": (2, None),
  "model.v_head_dim": (1, None),
  "model.first_k_dense_replace": (0, None),
  "model.moe_layer_freq": (1, None),
  "model.n_routed_experts": (1, None),
  "model.num_experts_per_tok": (1, None),
  "model.n_shared_experts": (0, None),
  "model.moe_intermediate_size": (1, None),
  "model.n_group": (1, None),
  "model.topk_group": (1, None),
  "model.attention_dropout": (0, 0),
  "model.num_nextn_predict_layers": (0, 1),
  "model.query_block": (0, None),
  "model.head_group": (0, None),
  "data.seq_len": (2, None),
  "data.pack_bins": (1, None),
  "data.shuffle_window": (1, None),
  "data.shards": (1, None),
  "data.seed": (0, None),
  "data.prefetch": (0, None),
  "optim.final_lr": (0, None),
  "optim.warmup_steps": (0, None),
  "optim.decay_steps": (0, None),
  "optim.ns_steps": (1, None),
  "optim.weight_decay": (0, None),
  "optim.clip_norm": (0, None),
  "optim.max_nonfinite": (1, None),
  "train.steps": (1, None),
  "train.batch_size": (1, None),
  "train.grad_accum": (1, None),
  "train.loss_chunk": (1, None),
  "train.mtp_weight": (0, None),
  "train.mtp_weight_final": (0, None),
  "train.mtp_switch": (0, 1),
  "train.router_bias_rate": (0, None),
  "train.balance_weight": (0, None),
  "train.seed": (0, None),
  "train.log_every": (1, None),
  "train.eval_every": (1, None),
  "train.eval_rows": (0, None),
  "train.checkpoint_every": (1, None),
  "train.keep_checkpoints": (1, None),
  "mesh.dcn_data": (1, None),
  "mesh.dcn_fsdp": (1, None),
}

_POSITIVE = (
  "model.rope_theta",
  "model.routed_scaling_factor",
  "model.rms_norm_eps",
  "model.lora_norm_eps",
  "model.initializer_range",
  "optim.peak_lr",
  "optim.update_rms",
  "optim.eps",
)
_BELOW_ONE = ("optim.momentum", "optim.b1", "optim.b2")  # decay rates of running means: 0 ≤ rate < 1


def check_model(cfg: ModelConfig) -> None:
  """Raises UserError naming the first impossible field and what would be right."""
  _check_fields(cfg, "model")
  _check_attention(cfg)
  if any(map(cfg.is_moe, range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers))):
    _check_experts(cfg)
  _check_tokens(cfg)
  if cfg.num_nextn_predict_layers and cfg.mtp_depths < 1:
    _fail("model.mtp_depths", cfg.mtp_depths, "at least 1, or num_nextn_predict_layers=0 for no MTP")


def check_run(run: RunConfig) -> None:
  """`check_model` and everything that concerns a run. Device counts are checked where devices are known."""
  check_model(run.model)
  for section in ("data", "optim", "train", "mesh"):
    _check_fields(getattr(run, section), section)
  _check_lengths(run)
  _check_optim(run)
  _check_batches(run)
  _check_mesh(run)
  _check_stage(run)
  if run.train.profile_steps:
    _profile_steps(run.train.profile_steps)


def parse_batch_warmup(text: str) -> tuple[tuple[int, int], ...]:
  """`TrainConfig.batch_warmup` as ((rows, until_step), …), steps rising; "" is ().

  Raises:
    UserError: not of the form "16:500,32:1000", or steps that do not rise.
  """
  right = 'rows:until_step pairs with rising steps, such as "16:500,32:1000"'
  stages: list[tuple[int, int]] = []
  for part in filter(None, text.split(",")):
    rows, colon, until = part.partition(":")
    if not (colon and rows.strip().isdecimal() and until.strip().isdecimal() and int(rows) > 0):
      _fail("train.batch_warmup", text, right)
    if int(until) <= (stages[-1][1] if stages else 0):
      _fail("train.batch_warmup", text, right)
    stages.append((int(rows), int(until)))
  return tuple(stages)


def _fail(field: str, value: Any, right: str) -> typing.NoReturn:
  raise UserError(f"config.{field}={value!r}: should be {right}")


def _check_fields(section: Any, name: str) -> None:
  """Types, choices and bounds of each field alone."""
  for field in dataclasses.fields(section):
    path, value = f"{name}.{field.name}", getattr(section, field.name)
    _check_type(path, value, field.type)
    if path in _CHOICES and value not in _CHOICES[path]:
      _fail(path, value, " or ".join(repr(choice) for choice in _CHOICES[path]))
    low, high = _BOUNDS.get(path, (None, None))
    if low is not None and value < low:
      _fail(path, value, f"at least {low}")
    if high is not None and value > high:
      _fail(path, value, f"at most {high}")
    if path in _POSITIVE and value <= 0:
      _fail(path, value, "more than 0")
    if path in _BELOW_ONE and not 0 <= value < 1:
      _fail(path, value, "at least 0 and less than 1")


def _check_type(path: str, value: Any, kind: Any) -> None:
  if typing.get_origin(kind) is tuple:
    element = typing.get_args(kind)[0]
    if not isinstance(value, tuple) or not all(type(item) is element for item in value):
      _fail(path, value, f"a tuple of {element.__name__}")
  elif kind is float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
      _fail(path, value, "a finite number")
  elif type(value) is not kind:
    _fail(path, value, f"of type {kind.__name__}")


def _check_attention(cfg: ModelConfig) -> None:
  if cfg.qk_rope_head_dim % 2:
    _fail("model.qk_rope_head_dim", cfg.qk_rope_head_dim, "even, since rope turns pairs")
  if cfg.attention_bias:
    _fail("model.attention_bias", True, "False: GLM-5's projections have no bias")
  if not cfg.attention or set(cfg.attention) - set(ATTENTION_LETTERS):
    _fail("model.attention", cfg.attention, f"one or more of the letters {', '.join(ATTENTION_LETTERS)}")
  if len(cfg.attention) > cfg.num_hidden_layers:
    _fail("model.attention", cfg.attention, f"at most num_hidden_layers={cfg.num_hidden_layers} letters")
  if "S" in cfg.attention and cfg.sliding_window < 1:
    _fail("model.sliding_window", cfg.sliding_window, "at least 1")
  if "D" in cfg.attention:
    _check_indexer(cfg)


def _check_indexer(cfg: ModelConfig) -> None:
  for name in ("index_n_heads", "index_topk", "index_topk_freq"):
    if getattr(cfg, name) < 1:
      _fail(f"model.{name}", getattr(cfg, name), "at least 1")
  if cfg.index_head_dim < cfg.qk_rope_head_dim:
    right = f"at least qk_rope_head_dim={cfg.qk_rope_head_dim}, the dims that rope turns"
    _fail("model.index_head_dim", cfg.index_head_dim, right)
  types = cfg.indexer_types
  if types and (len(types) != cfg.num_hidden_layers or set(types) - {"full", "shared"}):
    right = f"empty, or 'full' or 'shared' for each of the {cfg.num_hidden_layers} layers"
    _fail("model.indexer_types", types, right)
  layers = range(cfg.num_hidden_layers)
  first = next((i for i in layers if cfg.attention_kind(i) == "D"), None)
  if first is not None and not cfg.owns_indexer(first):
    where = f"layer {first} has no earlier one whose selected keys it could share"
    if types:
      _fail("model.indexer_types", types, f"'full' at index {first}: {where}")
    right = f"such that layer {first} owns an indexer: {where}"
    _fail("model.index_skip_topk_offset", cfg.index_skip_topk_offset, right)


def _check_experts(cfg: ModelConfig) -> None:
  experts, groups = cfg.n_routed_experts, cfg.n_group
  if cfg.num_experts_per_tok > experts:
    _fail("model.num_experts_per_tok", cfg.num_experts_per_tok, f"at most n_routed_experts={experts}")
  if experts % groups:
    _fail("model.n_group", groups, f"a divisor of n_routed_experts={experts}")
  if cfg.topk_group > groups:
    _fail("model.topk_group", cfg.topk_group, f"at most n_group={groups}")
  if groups > 1 and experts // groups < 2:
    right = f"at most {experts // 2}: a group is scored by its two best experts"
    _fail("model.n_group", groups, right)
  reachable = experts // groups * cfg.topk_group
  if cfg.num_experts_per_tok > reachable:
    right = f"at most {reachable}, the experts in topk_group={cfg.topk_group} of n_group={groups} groups"
    _fail("model.num_experts_per_tok", cfg.num_experts_per_tok, right)


def _check_tokens(cfg: ModelConfig) -> None:
  right = f"in 0 … {cfg.vocab_size - 1} (vocab_size={cfg.vocab_size})"
  if not all(0 <= token < cfg.vocab_size for token in cfg.eos_token_id):
    _fail("model.eos_token_id", cfg.eos_token_id, right)
  if not 0 <= cfg.pad_token_id < cfg.vocab_size:
    _fail("model.pad_token_id", cfg.pad_token_id, right)


def _check_lengths(run: RunConfig) -> None:
  seq_len, longest = run.data.seq_len, run.model.max_position_embeddings
  if seq_len > longest:
    _fail("data.seq_len", seq_len, f"at most model.max_position_embeddings={longest}")
  if run.model.num_nextn_predict_layers and run.model.mtp_depths >= seq_len:
    _fail("model.mtp_depths", run.model.mtp_depths, f"less than data.seq_len={seq_len}")


def _check_optim(run: RunConfig) -> None:
  optim = run.optim
  if optim.schedule in ("cosine", "linear") and optim.final_lr > optim.peak_lr:
    _fail("optim.final_lr", optim.final_lr, f"at most peak_lr={optim.peak_lr}")
  end = optim.decay_steps or run.train.steps
  if optim.schedule in WARMING_SCHEDULES and optim.warmup_steps >= end:
    field = "optim.decay_steps" if optim.decay_steps else "train.steps"
    _fail("optim.warmup_steps", optim.warmup_steps, f"less than {field}={end}, where the decay ends")


def _check_stage(run: RunConfig) -> None:
  stage, model = run.train.stage, run.model
  mode = STAGE_MODES[stage]
  if mode is None:
    return
  if model.dsa_mode != mode:
    _fail("model.dsa_mode", model.dsa_mode, f"{mode!r} in stage {stage}")
  if not any(map(model.owns_indexer, range(model.num_hidden_layers))):
    _fail("model.attention", model.attention, f"with a D: stage {stage} trains indexers")


def _check_batches(run: RunConfig) -> None:
  accum = run.train.grad_accum
  if run.train.batch_size % accum:
    _fail("train.grad_accum", accum, f"a divisor of batch_size={run.train.batch_size}")
  warmup = [rows for rows, _ in parse_batch_warmup(run.train.batch_warmup)]
  for rows in (run.train.batch_size, *warmup):
    if rows % run.data.shards:
      _fail("data.shards", run.data.shards, f"a divisor of the {rows} rows of a batch")
  for rows in warmup:
    if rows % accum:
      _fail("train.batch_warmup", run.train.batch_warmup, f"in multiples of grad_accum={accum} rows")


def _check_mesh(run: RunConfig) -> None:
  mesh, model = run.mesh, run.model
  sizes = {name: size for name, size in dataclasses.asdict(mesh).items() if not name.startswith("dcn_")}
  for axis, size in sizes.items():
    if size != -1 and size < 1:
      _fail(f"mesh.{axis}", size, "at least 1, or -1 for the devices left")
  rest = [axis for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    _fail(f"mesh.{rest[1]}", -1, f"a number, since mesh.{rest[0]} already takes the devices left")
  if mesh.data > 1:
    _divides("mesh.dcn_data", mesh.dcn_data, "mesh.data", mesh.data)
  if mesh.fsdp > 1:
    _divides("mesh.dcn_fsdp", mesh.dcn_fsdp, "mesh.fsdp", mesh.fsdp)
  _divides("mesh.expert", mesh.expert, "model.n_routed_experts", model.n_routed_experts)
  if mesh.context > 1 and run.data.seq_len % (2 * mesh.context):
    right = f"such that 2 · context = {2 * mesh.context} divides data.seq_len={run.data.seq_len}"
    _fail("mesh.context", mesh.context, f"{right}: each shard takes two pieces of a row")
  for name in ("num_attention_heads", *_feed_forward_widths(model)):
    _divides("mesh.tensor", mesh.tensor, f"model.{name}", getattr(model, name))
  heads = model.num_attention_heads // max(mesh.tensor, 1)
  _divides("model.head_group", model.head_group, "the heads of a device,", heads)
  for rows in (run.train.batch_size, *(rows for rows, _ in parse_batch_warmup(run.train.batch_warmup))):
    _check_row_shards(sizes, rows // run.train.grad_accum)


def _feed_forward_widths(cfg: ModelConfig) -> list[str]:
  """The fields that say them, of the kinds of layers there are."""
  kinds = {cfg.is_moe(layer) for layer in range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers)}
  return ["moe_intermediate_size" if moe else "intermediate_size" for moe in sorted(kinds)]


def _check_row_shards(sizes: Mapping[str, int], rows: int) -> None:
  """Rows of a micro-batch lie on these axes; one of -1 is known only with the devices."""
  known = {axis: max(sizes[axis], 1) for axis in ("data", "fsdp", "expert")}
  shards = math.prod(known.values())
  if rows % shards:
    axis = next(axis for axis, size in known.items() if size > 1)
    right = f"such that data · fsdp · expert = {shards} divides the {rows} rows of a micro-batch"
    _fail(f"mesh.{axis}", sizes[axis], right)


def _divides(field: str, size: int, of: str, total: int) -> None:
  if size > 1 and total % size:
    _fail(field, size, f"a divisor of {of}={total}")


def _profile_steps(text: str) -> None:
  first, colon, last = text.partition(":")
  if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
    _fail("train.profile_steps", text, 'first:last with first < last, such as "20:25"')
