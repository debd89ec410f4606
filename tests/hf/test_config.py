"""config.json in and out: what transformers does is reproduced, and what it cannot do is refused."""

import json

import pytest

from glm5_jax.config import ModelConfig, glm5_2_744b, glm5_744b, small, tiny
from glm5_jax.errors import UserError

# zai-org/GLM-5's config.json, without its bookkeeping.
OFFICIAL = {
  "architectures": ["GlmMoeDsaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "dtype": "bfloat16",
  "eos_token_id": [154820, 154827, 154829],
  "ep_size": 1,
  "first_k_dense_replace": 3,
  "hidden_act": "silu",
  "head_dim": 64,
  "hidden_size": 6144,
  "index_head_dim": 128,
  "index_n_heads": 32,
  "index_topk": 2048,
  "indexer_rope_interleave": True,
  "initializer_range": 0.02,
  "intermediate_size": 12288,
  "kv_lora_rank": 512,
  "max_position_embeddings": 202752,
  "moe_intermediate_size": 2048,
  "moe_layer_freq": 1,
  "model_type": "glm_moe_dsa",
  "n_group": 1,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "norm_topk_prob": True,
  "num_attention_heads": 64,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 78,
  "num_key_value_heads": 64,
  "num_nextn_predict_layers": 1,
  "pad_token_id": 154820,
  "pretraining_tp": 1,
  "q_lora_rank": 2048,
  "qk_head_dim": 256,
  "qk_nope_head_dim": 192,
  "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-05,
  "rope_interleave": True,
  "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
  "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid",
  "tie_word_embeddings": False,
  "topk_group": 1,
  "topk_method": "noaux_tc",
  "use_cache": True,
  "v_head_dim": 256,
  "vocab_size": 154880,
}


def test_the_released_file_is_our_preset_with_transformers_norms():
  assert ModelConfig.from_hf(OFFICIAL) == glm5_744b().replace(lora_norm_eps=1e-6, dsa_mode="sparse")


def test_glm5_2_shares_indexers_and_keeps_its_router_in_float32():
  owners = {0, 1, 2, *range(6, 78, 4)}
  hf = OFFICIAL | {
    "head_dim": 192,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "indexer_types": ["full" if i in owners else "shared" for i in range(78)],
    "moe_router_dtype": "float32",
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 1048576,
  }
  expected = glm5_2_744b().replace(lora_norm_eps=1e-6, dsa_mode="sparse")
  assert ModelConfig.from_hf(hf) == expected
  without_list = {key: value for key, value in hf.items() if key != "indexer_types"}
  assert ModelConfig.from_hf(without_list) == expected


def test_golden_file(golden):
  hf = json.loads((golden / "config.json").read_text())
  cfg = ModelConfig.from_hf(hf)
  assert (cfg.hidden_size, cfg.num_hidden_layers, cfg.index_topk, cfg.qk_rope_head_dim) == (64, 4, 8, 8)
  assert (cfg.dtype, cfg.param_dtype, cfg.eos_token_id, cfg.pad_token_id) == ("float32", "float32", (1,), 0)
  assert cfg.num_nextn_predict_layers == 0  # transformers drops the MTP layer, so its files state none
  assert all(cfg.owns_indexer(layer) for layer in range(4))
  assert [cfg.is_moe(layer) for layer in range(4)] == [False, True, True, True]
  written = cfg.to_hf()
  bookkeeping = {"output_router_logits", "transformers_version"}
  assert {key: written[key] for key in hf.keys() - bookkeeping} == {
    key: hf[key] for key in hf.keys() - bookkeeping
  }


@pytest.mark.parametrize("preset", [glm5_744b, glm5_2_744b, tiny, small])
def test_written_files_read_back_equal(preset):
  cfg = preset()
  ours = {name: getattr(cfg, name) for name in ("dsa_mode", "sliding_window", "scan_layers")}
  hf = json.loads(json.dumps(cfg.to_hf()))
  assert ModelConfig.from_hf(hf, **ours) == cfg


def test_every_readable_field_survives_the_round_trip():
  cfg = tiny().replace(
    indexer_types=("full", "shared", "full", "shared"),
    tie_word_embeddings=True,
    n_group=2,
    topk_group=1,
    norm_topk_prob=False,
    n_shared_experts=2,
    router_param_dtype="float32",
    param_dtype="bfloat16",
    dtype="bfloat16",
    lora_norm_eps=3e-5,
    eos_token_id=(3, 5),
    dsa_mode="sparse",
    sliding_window=4096,
  )
  assert ModelConfig.from_hf(json.loads(json.dumps(cfg.to_hf()))) == cfg


def test_absent_keys():
  hf = {k: v for k, v in OFFICIAL.items() if k not in ("rope_interleave", "indexer_rope_interleave", "dtype")}
  cfg = ModelConfig.from_hf(hf | {"torch_dtype": "float32"})
  assert cfg.rope_interleave and cfg.indexer_rope_interleave
  assert cfg.param_dtype == "float32"
  assert ModelConfig.from_hf(hf | {"pad_token_id": None, "eos_token_id": 7}).pad_token_id == 7
  shared = {"index_topk_freq": 2}  # transformers' offset is 2: layers 0, 1, 3, 5, … own an indexer
  assert [ModelConfig.from_hf(hf | shared).owns_indexer(layer) for layer in range(4)] == [
    True,
    True,
    False,
    True,
  ]
  none = {k: v for k, v in hf.items() if k != "num_nextn_predict_layers"}
  assert ModelConfig.from_hf(none).num_nextn_predict_layers == 0


def test_head_dim_is_ignored():
  assert ModelConfig.from_hf(OFFICIAL | {"head_dim": 192}) == ModelConfig.from_hf(OFFICIAL)


def test_lists_agree_with_or_replace_the_counts():
  types = ["dense"] * 2 + ["sparse"] * 76
  hf = {k: v for k, v in OFFICIAL.items() if k != "first_k_dense_replace"} | {"mlp_layer_types": types}
  assert ModelConfig.from_hf(hf).first_k_dense_replace == 2
  pattern = "F" + "FS" * 38 + "F"
  cfg = ModelConfig.from_hf(OFFICIAL | {"index_topk_pattern": pattern})
  assert [cfg.owns_indexer(layer) for layer in range(78)] == [letter == "F" for letter in pattern]


def test_ours_overrides():
  cfg = ModelConfig.from_hf(OFFICIAL, dsa_mode="dense", lora_norm_eps=1e-5)
  assert cfg == glm5_744b()


REFUSED = {
  "model_type": ({"model_type": "deepseek_v32"}, "model_type"),
  "no rope": ({"rope_parameters": None}, "rope_parameters"),
  "no theta": ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
  "yarn": ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4}}, "yarn"),
  "scaled rope": ({"rope_parameters": {"rope_theta": 1e6, "factor": 4}}, "factor"),
  "rope_scaling": ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
  "half-split indexer": ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
  "half-split attention": ({"rope_interleave": False}, "rope_interleave"),
  "softmax router": ({"scoring_func": "softmax"}, "scoring_func"),
  "greedy router": ({"topk_method": "greedy"}, "topk_method"),
  "gelu": ({"hidden_act": "gelu"}, "hidden_act"),
  "attention bias": ({"attention_bias": True}, "attention_bias"),
  "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
  "dense types": ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 76}, "mlp_layer_types[2]"),
  "short list": ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types has 3"),
  "unknown type": ({"mlp_layer_types": ["moe"] * 78}, "mlp_layer_types[0]"),
  "layer types": ({"layer_types": ["sliding_attention"] * 78}, "layer_types[0]"),
  "shared first": ({"indexer_types": ["shared"] * 78}, "indexer_types[0]"),
  "indexer types": ({"indexer_types": ["full"] * 77}, "indexer_types has 77"),
  "moe_layer_freq": ({"moe_layer_freq": 2}, "moe_layer_freq"),
  "kv heads": ({"num_key_value_heads": 8}, "num_key_value_heads"),
  "qk width": ({"qk_head_dim": 192}, "qk_head_dim"),
  "experts twice": ({"num_experts": 8}, "num_experts"),
  "string": ({"hidden_size": "6144"}, "hidden_size"),
  "bool": ({"num_hidden_layers": True}, "num_hidden_layers"),
  "dtype": ({"dtype": "int8"}, "dtype"),
  "no eos": ({"eos_token_id": None}, "eos_token_id"),
  "int4": ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
  "fp8 blocks": ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "[64, 64]"),
  "top-k over experts": ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
}


@pytest.mark.parametrize("change, named", REFUSED.values(), ids=REFUSED.keys())
def test_other_models_are_refused_by_name(change, named):
  with pytest.raises(UserError) as caught:
    ModelConfig.from_hf(OFFICIAL | change)
  assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_rope_base_is_never_a_default():
  without = {key: value for key, value in OFFICIAL.items() if key != "rope_parameters"}
  with pytest.raises(UserError, match="rope_parameters"):
    ModelConfig.from_hf(without)


def test_fp8_release_is_accepted():
  fp8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
  }
  assert ModelConfig.from_hf(OFFICIAL | {"quantization_config": fp8}) == ModelConfig.from_hf(OFFICIAL)


@pytest.mark.parametrize(
  "change, named",
  [
    ({"attention": "DDDS"}, "attention"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ({"rope_interleave": False}, "rope_interleave"),
  ],
)
def test_variants_that_transformers_cannot_run_are_not_written(change, named):
  with pytest.raises(UserError, match=named):
    tiny().replace(**change).to_hf()


def test_unknown_override_is_named():
  with pytest.raises(UserError, match="dsa_moed"):
    ModelConfig.from_hf(OFFICIAL, dsa_moed="dense")
