"""Config dataclasses and the checks of config_checks: one row per bad input."""

import dataclasses

import pytest

from glm5_jax import config_checks
from glm5_jax.config import (
  DataConfig,
  ModelConfig,
  RunConfig,
  glm5_2_744b,
  glm5_744b,
  small,
  tiny,
)
from glm5_jax.errors import UserError

PRESETS = {"tiny": tiny, "small": small, "glm5_744b": glm5_744b, "glm5_2_744b": glm5_2_744b}


def make_run(**fields) -> RunConfig:
  """A valid small run with dotted fields replaced: make_run(**{"model.index_topk": 0})."""
  run = RunConfig(model=tiny(), data=DataConfig(seq_len=64))
  for path, value in fields.items():
    section, _, name = path.partition(".")
    assert hasattr(getattr(run, section), name), path
    setattr(getattr(run, section), name, value)
  return run


# Fields set on a valid run → field that the error names, and what it says would be right.
BAD_INPUTS = [
  # Sizes
  ({"model.vocab_size": 0}, "model.vocab_size=0", "at least 2"),
  ({"model.hidden_size": 0}, "model.hidden_size=0", "at least 1"),
  ({"model.num_hidden_layers": 0}, "model.num_hidden_layers=0", "at least 1"),
  ({"model.intermediate_size": -4}, "model.intermediate_size=-4", "at least 1"),
  ({"model.max_position_embeddings": 0}, "model.max_position_embeddings=0", "at least 1"),
  ({"model.hidden_size": 64.0}, "model.hidden_size=64.0", "of type int"),
  ({"model.hidden_size": True}, "model.hidden_size=True", "of type int"),
  ({"model.rope_interleave": 1}, "model.rope_interleave=1", "of type bool"),
  # Attention
  ({"model.num_attention_heads": 0}, "model.num_attention_heads=0", "at least 1"),
  ({"model.q_lora_rank": 0}, "model.q_lora_rank=0", "at least 1"),
  ({"model.kv_lora_rank": 0}, "model.kv_lora_rank=0", "at least 1"),
  ({"model.qk_nope_head_dim": 0}, "model.qk_nope_head_dim=0", "at least 1"),
  ({"model.qk_rope_head_dim": 0}, "model.qk_rope_head_dim=0", "at least 2"),
  ({"model.qk_rope_head_dim": 7}, "model.qk_rope_head_dim=7", "even"),
  ({"model.v_head_dim": -1}, "model.v_head_dim=-1", "at least 1"),
  ({"model.rope_theta": 0.0}, "model.rope_theta=0.0", "more than 0"),
  ({"model.attention": ""}, "model.attention=''", "D, F, S"),
  ({"model.attention": "DX"}, "model.attention='DX'", "D, F, S"),
  ({"model.attention": "DDDDS"}, "model.attention='DDDDS'", "num_hidden_layers=4"),
  ({"model.attention": "SD", "model.sliding_window": 0}, "model.sliding_window=0", "at least 1"),
  ({"model.attention_bias": True}, "model.attention_bias=True", "False"),
  ({"model.attention_dropout": 0.1}, "model.attention_dropout=0.1", "at most 0"),
  ({"model.query_block": -1}, "model.query_block=-1", "at least 0"),
  ({"model.mla_form": "absorb"}, "model.mla_form='absorb'", "'absorbed'"),
  ({"model.dsa_mode": "spars"}, "model.dsa_mode='spars'", "'sparse'"),
  # Lightning indexer
  ({"model.index_topk": 0}, "model.index_topk=0", "at least 1"),
  ({"model.index_n_heads": 0}, "model.index_n_heads=0", "at least 1"),
  ({"model.index_head_dim": 4}, "model.index_head_dim=4", "qk_rope_head_dim=8"),
  ({"model.index_topk_freq": 0}, "model.index_topk_freq=0", "at least 1"),
  (
    {"model.index_topk_freq": 4, "model.index_skip_topk_offset": 0},
    "model.index_skip_topk_offset=0",
    "layer 0 owns an indexer",
  ),
  (
    {"model.attention": "SSDD", "model.index_topk_freq": 4, "model.index_skip_topk_offset": 1},
    "model.index_skip_topk_offset=1",
    "layer 2 owns an indexer",
  ),
  ({"model.indexer_types": ("full",)}, "model.indexer_types=('full',)", "each of the 4 layers"),
  ({"model.indexer_types": ("full", "full", "full", "half")}, "model.indexer_types", "'full' or 'shared'"),
  ({"model.indexer_types": ("shared", "full", "full", "full")}, "model.indexer_types", "'full' at index 0"),
  ({"model.dsa_implementation": "fast"}, "model.dsa_implementation='fast'", "'reference'"),
  # Experts
  ({"model.num_experts_per_tok": 9}, "model.num_experts_per_tok=9", "n_routed_experts=8"),
  ({"model.num_experts_per_tok": 0}, "model.num_experts_per_tok=0", "at least 1"),
  ({"model.n_routed_experts": 0}, "model.n_routed_experts=0", "at least 1"),
  ({"model.n_shared_experts": -1}, "model.n_shared_experts=-1", "at least 0"),
  ({"model.moe_intermediate_size": 0}, "model.moe_intermediate_size=0", "at least 1"),
  ({"model.moe_layer_freq": 0}, "model.moe_layer_freq=0", "at least 1"),
  ({"model.first_k_dense_replace": -1}, "model.first_k_dense_replace=-1", "at least 0"),
  ({"model.n_group": 3}, "model.n_group=3", "a divisor of n_routed_experts=8"),
  ({"model.n_group": 8}, "model.n_group=8", "at most 4"),
  ({"model.n_group": 2, "model.topk_group": 3}, "model.topk_group=3", "n_group=2"),
  ({"model.n_group": 4, "model.num_experts_per_tok": 3}, "model.num_experts_per_tok=3", "at most 2"),
  ({"model.scoring_func": "softmax"}, "model.scoring_func='softmax'", "'sigmoid'"),
  ({"model.topk_method": "greedy"}, "model.topk_method='greedy'", "'noaux_tc'"),
  ({"model.moe_implementation": "gmm"}, "model.moe_implementation='gmm'", "'ragged'"),
  ({"model.routed_scaling_factor": float("inf")}, "model.routed_scaling_factor=inf", "a finite number"),
  # Numerics, tokens, multi-token prediction
  ({"model.dtype": "fp32"}, "model.dtype='fp32'", "'float32'"),
  ({"model.param_dtype": "int8"}, "model.param_dtype='int8'", "'bfloat16'"),
  ({"model.router_param_dtype": "f32"}, "model.router_param_dtype='f32'", "'float32'"),
  ({"model.remat": "all"}, "model.remat='all'", "'full'"),
  ({"model.hidden_act": "gelu"}, "model.hidden_act='gelu'", "'silu'"),
  ({"model.rms_norm_eps": 0.0}, "model.rms_norm_eps=0.0", "more than 0"),
  ({"model.rms_norm_eps": float("nan")}, "model.rms_norm_eps=nan", "a finite number"),
  ({"model.eos_token_id": (1, 128)}, "model.eos_token_id=(1, 128)", "0 … 127"),
  ({"model.eos_token_id": ("a",)}, "model.eos_token_id=('a',)", "a tuple of int"),
  ({"model.pad_token_id": -1}, "model.pad_token_id=-1", "0 … 127"),
  ({"model.num_nextn_predict_layers": 2}, "model.num_nextn_predict_layers=2", "at most 1"),
  ({"model.mtp_depths": 0}, "model.mtp_depths=0", "num_nextn_predict_layers=0"),
  # Data
  ({"data.seq_len": 257}, "data.seq_len=257", "max_position_embeddings=256"),
  ({"data.seq_len": 1}, "data.seq_len=1", "at least 2"),
  ({"data.seq_len": 3}, "model.mtp_depths=3", "data.seq_len=3"),
  ({"data.packing": "first_fit"}, "data.packing='first_fit'", "'best_fit'"),
  ({"data.pack_bins": 0}, "data.pack_bins=0", "at least 1"),
  ({"data.seed": -1}, "data.seed=-1", "at least 0"),
  # Optimiser
  ({"optim.name": "muonsplit"}, "optim.name='muonsplit'", "'muon_split'"),
  ({"optim.schedule": "cos"}, "optim.schedule='cos'", "'cosine'"),
  ({"optim.peak_lr": 0.0}, "optim.peak_lr=0.0", "more than 0"),
  ({"optim.peak_lr": 1e-5}, "optim.final_lr=4e-05", "peak_lr=1e-05"),
  ({"optim.warmup_steps": 1000}, "optim.warmup_steps=1000", "less than train.steps=1000"),
  ({"optim.decay_steps": 100}, "optim.warmup_steps=100", "less than optim.decay_steps=100"),
  ({"optim.schedule": "pretrain", "train.steps": 100}, "optim.warmup_steps=100", "less than train.steps=100"),
  ({"optim.warmup_steps": -1}, "optim.warmup_steps=-1", "at least 0"),
  ({"optim.decay_steps": -1}, "optim.decay_steps=-1", "at least 0"),
  ({"optim.momentum": 1.0}, "optim.momentum=1.0", "less than 1"),
  ({"optim.b2": -0.1}, "optim.b2=-0.1", "at least 0"),
  ({"optim.ns_steps": 0}, "optim.ns_steps=0", "at least 1"),
  ({"optim.ns_dtype": "float8"}, "optim.ns_dtype='float8'", "'float32'"),
  ({"optim.clip_norm": -1.0}, "optim.clip_norm=-1.0", "at least 0"),
  ({"optim.max_nonfinite": 0}, "optim.max_nonfinite=0", "at least 1"),
  # Training
  ({"train.stage": "sft"}, "train.stage='sft'", "'pretrain'"),
  ({"train.steps": 0}, "train.steps=0", "at least 1"),
  ({"train.batch_size": 0}, "train.batch_size=0", "at least 1"),
  ({"train.grad_accum": 3}, "train.grad_accum=3", "a divisor of batch_size=8"),
  ({"data.shards": 3}, "data.shards=3", "a divisor of the 8 rows of a batch"),
  ({"data.shards": 4, "train.batch_warmup": "6:10"}, "data.shards=4", "a divisor of the 6 rows of a batch"),
  ({"train.batch_warmup": "16"}, "train.batch_warmup='16'", "16:500,32:1000"),
  ({"train.batch_warmup": "4:x"}, "train.batch_warmup='4:x'", "16:500,32:1000"),
  ({"train.batch_warmup": "0:10"}, "train.batch_warmup='0:10'", "16:500,32:1000"),
  ({"train.batch_warmup": "4:10,6:10"}, "train.batch_warmup='4:10,6:10'", "rising"),
  ({"train.batch_warmup": "5:10", "train.grad_accum": 2}, "train.batch_warmup='5:10'", "grad_accum=2"),
  ({"train.loss_chunk": 0}, "train.loss_chunk=0", "at least 1"),
  ({"train.mtp_switch": 1.5}, "train.mtp_switch=1.5", "at most 1"),
  ({"train.log_every": 0}, "train.log_every=0", "at least 1"),
  ({"train.keep_checkpoints": 0}, "train.keep_checkpoints=0", "at least 1"),
  ({"train.profile_steps": "25:20"}, "train.profile_steps='25:20'", "20:25"),
  # Mesh
  ({"mesh.fsdp": 0}, "mesh.fsdp=0", "at least 1, or -1"),
  ({"mesh.fsdp": -1}, "mesh.fsdp=-1", "mesh.data already takes"),
  ({"mesh.expert": 3}, "mesh.expert=3", "model.n_routed_experts=8"),
  ({"mesh.context": 5}, "mesh.context=5", "data.seq_len=64"),
  ({"mesh.context": 4, "data.seq_len": 36}, "mesh.context=4", "2 · context = 8 divides data.seq_len=36"),
  ({"mesh.tensor": 8}, "mesh.tensor=8", "model.num_attention_heads=4"),
  ({"mesh.tensor": 4, "model.moe_intermediate_size": 30}, "mesh.tensor=4", "model.moe_intermediate_size=30"),
  ({"mesh.tensor": 4, "model.intermediate_size": 30}, "mesh.tensor=4", "model.intermediate_size=30"),
  ({"mesh.fsdp": 16}, "mesh.fsdp=16", "8 rows of a micro-batch"),
  ({"mesh.fsdp": 4, "mesh.expert": 4}, "mesh.fsdp=4", "data · fsdp · expert = 16 divides the 8 rows"),
  ({"mesh.fsdp": 8, "train.batch_warmup": "4:10"}, "mesh.fsdp=8", "4 rows of a micro-batch"),
  ({"mesh.dcn_data": 0}, "mesh.dcn_data=0", "at least 1"),
  ({"mesh.data": 4, "mesh.dcn_data": 3}, "mesh.dcn_data=3", "a divisor of mesh.data=4"),
  ({"mesh.data": 1, "mesh.fsdp": 4, "mesh.dcn_fsdp": 8}, "mesh.dcn_fsdp=8", "a divisor of mesh.fsdp=4"),
  ({"mesh.data": 8, "train.grad_accum": 2}, "mesh.data=8", "4 rows of a micro-batch"),
]


@pytest.mark.parametrize(
  ("fields", "named", "right"), BAD_INPUTS, ids=[f"{row[1]}-{i}" for i, row in enumerate(BAD_INPUTS)]
)
def test_impossible_value_is_refused_in_one_line(fields, named, right):
  with pytest.raises(UserError) as caught:
    make_run(**fields).validate()
  message = str(caught.value)
  assert message.startswith(f"config.{named}") and right in message and "\n" not in message, message


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"model.num_nextn_predict_layers": 0, "model.mtp_depths": 0},
    {"model.attention": "F", "model.index_topk": 0, "model.sliding_window": 0},  # fields of kinds not used
    {"model.attention": "SFSD"},
    {"model.first_k_dense_replace": 9, "model.num_nextn_predict_layers": 0, "model.num_experts_per_tok": 9},
    {"model.n_group": 4, "model.topk_group": 2, "model.num_experts_per_tok": 4},
    {"model.index_topk_freq": 4},
    {"model.indexer_types": ("full", "shared", "shared", "full")},
    {"data.seq_len": 256},
    {"optim.schedule": "constant", "optim.peak_lr": 1e-5, "optim.warmup_steps": 1000},
    {"optim.schedule": "midtrain", "optim.warmup_steps": 1000},  # does not warm up
    {"optim.warmup_steps": 1000, "optim.decay_steps": 1001},
    {"optim.schedule": "dsa_warmup", "optim.peak_lr": 1e-5},  # a stage brings its own rates
    {"train.batch_warmup": "2:10, 4:20", "train.grad_accum": 2},
    {"mesh.data": 2, "mesh.fsdp": 2, "mesh.expert": 2, "mesh.tensor": 2, "mesh.context": 2},
    {"mesh.data": 4, "mesh.dcn_data": 2, "mesh.dcn_fsdp": 1},
    {"mesh.tensor": 4, "model.first_k_dense_replace": 0, "model.intermediate_size": 30},
    {"mesh.data": 1, "mesh.fsdp": -1},
  ],
)
def test_possible_values_pass(fields):
  make_run(**fields).validate()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
  PRESETS[name]().validate()


def test_tables_of_checks_name_fields_that_exist():
  sections = {f.name: getattr(RunConfig(), f.name) for f in dataclasses.fields(RunConfig) if f.name != "name"}
  known = {f"{name}.{f.name}" for name, section in sections.items() for f in dataclasses.fields(section)}
  tables = [config_checks._CHOICES, config_checks._BOUNDS, config_checks._POSITIVE, config_checks._BELOW_ONE]
  assert {field for table in tables for field in table} <= known


def test_letters_and_names_are_those_of_the_registries():
  from glm5_jax.model.attention import ATTENTION
  from glm5_jax.model.block import REMAT
  from glm5_jax.optim import schedules
  from glm5_jax.train.stages import STAGES
  from pallas_kernels.grouped_matmul import api as grouped_matmul
  from pallas_kernels.topk import api as topk

  assert set(config_checks.ATTENTION_LETTERS) == set(ATTENTION)
  assert set(config_checks.REMAT) == set(REMAT)
  assert (*schedules.SHAPES, *schedules.STAGES) == config_checks.SCHEDULES
  stages = schedules.STAGES.items()
  warming = [name for name, stage in stages if stage.warmup and stage.shape != "constant"]
  assert ("cosine", "linear", *warming) == config_checks.WARMING_SCHEDULES
  assert set(config_checks.STAGE_MODES) == set(STAGES)
  assert set(config_checks.TOPK) == set(topk.IMPLEMENTATIONS)
  assert set(config_checks.GROUPED_MATMUL) == set(grouped_matmul.IMPLEMENTATIONS)


def test_batch_warmup_stages():
  assert config_checks.parse_batch_warmup("") == ()
  assert config_checks.parse_batch_warmup("16:500,32:1000") == ((16, 500), (32, 1000))


def test_json_keeps_every_field():
  run = make_run(**{"model.eos_token_id": (1, 2), "optim.peak_lr": 3e-3, "mesh.fsdp": 2})
  again = RunConfig.from_json(run.to_json())
  assert again == run and hash(again) == hash(run)


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ('{"optim": {"peek_lr": 1.0}}', "config.optim.peek_lr is not a field"),
    ('{"optim": 3}', "config.optim is a section"),
  ],
)
def test_json_that_does_not_fit_is_refused(text, said):
  with pytest.raises(UserError, match=said):
    RunConfig.from_json(text)


def test_model_configs_hash_by_value():
  assert hash(tiny()) == hash(tiny()) and tiny() == tiny()
  assert tiny().replace(hidden_size=32) != tiny()


def test_single_eos_id_becomes_a_tuple():
  assert ModelConfig(eos_token_id=5).eos_token_id == (5,)


def test_indexshare_owners_of_glm5_2():
  """Layers 0, 1, 2, 6, 10, …, 74 own one (21 of 78); in GLM-5 every layer does, and the MTP layer."""
  owners = [i for i in range(78) if glm5_2_744b().owns_indexer(i)]
  assert owners == [0, 1, 2, *range(6, 75, 4)] and len(owners) == 21
  assert all(glm5_744b().owns_indexer(i) for i in range(79))


def test_layer_kinds_of_glm5():
  cfg = glm5_744b()
  assert [i for i in range(78) if not cfg.is_moe(i)] == [0, 1, 2]
  assert cfg.latent_width == 576 and cfg.qk_head_dim == 256


def test_attention_pattern_repeats_and_the_mtp_layer_takes_the_last():
  cfg = tiny().replace(attention="SF")
  assert [cfg.attention_kind(i) for i in range(5)] == ["S", "F", "S", "F", "F"]
