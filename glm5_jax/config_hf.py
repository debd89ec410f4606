"""config.json of Hugging Face's GLM-5 (model_type "glm_moe_dsa") to and from `ModelConfig`.

What transformers does is fixed by its code, not by the file: both rotations use interleaved pairs, the
router is a sigmoid, the MTP layer is not run. A file that states otherwise is refused, since loading it
would silently give another model. Source: transformers 5.24.0, models/glm_moe_dsa.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from glm5_jax.errors import UserError

if TYPE_CHECKING:
  from glm5_jax.config import ModelConfig

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsaForCausalLM"
FP8_BLOCK = 128  # rows and columns that share one scale in the released fp8 checkpoints

TRANSFORMERS_LORA_NORM_EPS = 1e-6  # the two LoRA norms are built without the config's eps there
TRANSFORMERS_SKIP_OFFSET = 2  # its default of index_skip_topk_offset, where index_topk_freq stands alone

# Copied as they stand, under the same name on both sides.
_SAME = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "intermediate_size",
  "max_position_embeddings",
  "num_attention_heads",
  "q_lora_rank",
  "kv_lora_rank",
  "qk_nope_head_dim",
  "qk_rope_head_dim",
  "v_head_dim",
  "index_n_heads",
  "index_head_dim",
  "index_topk",
  "moe_layer_freq",
  "n_routed_experts",
  "num_experts_per_tok",
  "n_shared_experts",
  "moe_intermediate_size",
  "n_group",
  "topk_group",
  "norm_topk_prob",
  "routed_scaling_factor",
  "rms_norm_eps",
  "attention_dropout",
  "tie_word_embeddings",
  "initializer_range",
)

# Values that the architecture fixes: another one in the file means another model.
_FIXED: dict[str, Any] = {
  "rope_interleave": True,
  "indexer_rope_interleave": True,
  "scoring_func": "sigmoid",
  "topk_method": "noaux_tc",
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
  "rope_scaling": None,
}
_FIXED_OURS = ("rope_interleave", "indexer_rope_interleave", "scoring_func", "topk_method", "hidden_act")

_DTYPES = ("float32", "bfloat16", "float16")
_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # two names of the one kind


def from_hf(cls: type["ModelConfig"], hf: dict[str, Any], **ours) -> "ModelConfig":
  """The config that reproduces transformers' model for the dictionary of a config.json.

  Missing sizes take transformers' defaults, which are GLM-5's; missing rope settings do not (theirs is
  a base of 10000 that no GLM-5 uses). `head_dim` is ignored: it holds 64 or 192, neither of them a head
  size. Absent interleave flags mean interleaved, as transformers computes. `lora_norm_eps` is 1e-6
  unless the file has that key, which only `to_hf` writes.

  Args:
    cls: ModelConfig.
    hf: the parsed config.json.
    **ours: fields of ModelConfig that override what the file implies, such as dsa_mode="dense".
  Raises:
    UserError: the file is not GLM-5's, lacks something, contradicts itself or has an impossible size.
  """
  if not isinstance(hf, dict):
    raise UserError(
      f"config.json holds a {type(hf).__name__}; an object with model_type {MODEL_TYPE!r} is needed"
    )
  if hf.get("model_type") != MODEL_TYPE:
    raise UserError(f"config.json: model_type is {hf.get('model_type')!r}; only {MODEL_TYPE!r} can be read")
  _check_fixed(hf)
  defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}
  values = {name: _typed(hf, name, defaults[name]) for name in _SAME if hf.get(name) is not None}
  values |= _aliases(hf, values)
  values |= {name: _FIXED[name] for name in _FIXED_OURS}
  values["rope_theta"] = _rope_theta(hf)
  values |= _tokens(hf)
  values |= _numerics(hf)
  values["num_nextn_predict_layers"] = _typed(hf, "num_nextn_predict_layers", 0)
  layers = values.get("num_hidden_layers", defaults["num_hidden_layers"])
  values["first_k_dense_replace"] = _first_dense(hf, layers, defaults["first_k_dense_replace"])
  values |= _indexers(hf, layers)
  _check_layer_types(hf, layers)
  _check_derived(hf, defaults | values)
  unknown = sorted(set(ours) - set(defaults))
  if unknown:
    raise UserError(f"{unknown[0]} is not a field of {cls.__name__}; it has {', '.join(defaults)}")
  config = cls(**(values | ours))
  config.validate()
  return config


def to_hf(cfg: "ModelConfig") -> dict[str, Any]:
  """The complete config.json that transformers and `from_hf` read.

  `dtype` is the dtype of the weights at rest. Fields that describe a run rather than an architecture
  (dsa_mode, mtp_depths, scan_layers, dtype of activations …) have no place in the file.

  Raises:
    UserError: transformers' GLM-5 has no such model (another attention kind, half-split rotation …).
  """
  for name in _FIXED:
    if hasattr(cfg, name) and getattr(cfg, name) != _FIXED[name]:
      raise UserError(
        f"{name} is {getattr(cfg, name)!r}; transformers' GLM-5 knows {_FIXED[name]!r} only, so there is no "
        "config.json for it"
      )
  kinds = {cfg.attention_kind(layer) for layer in range(cfg.num_hidden_layers)}
  if kinds != {"D"}:
    raise UserError(f"attention is {cfg.attention!r}; transformers' GLM-5 has kind 'D' in every layer")
  layers = range(cfg.num_hidden_layers)
  hf: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
  hf |= {name: getattr(cfg, name) for name in _SAME} | _FIXED
  del hf["rope_scaling"]  # absent in released files; the base stands in rope_parameters
  hf |= {
    "num_key_value_heads": cfg.num_attention_heads,
    "qk_head_dim": cfg.qk_head_dim,
    "head_dim": cfg.qk_rope_head_dim,  # as released: transformers sizes its rotation by it
    "rope_parameters": {"rope_theta": cfg.rope_theta, "rope_type": "default"},
    "first_k_dense_replace": cfg.first_k_dense_replace,
    "mlp_layer_types": ["sparse" if cfg.is_moe(layer) else "dense" for layer in layers],
    "layer_types": [_LAYER_TYPES[0]] * cfg.num_hidden_layers,
    "num_nextn_predict_layers": cfg.num_nextn_predict_layers,
    "lora_norm_eps": cfg.lora_norm_eps,
    "dtype": cfg.param_dtype,
    "eos_token_id": cfg.eos_token_id[0] if len(cfg.eos_token_id) == 1 else list(cfg.eos_token_id),
    "pad_token_id": cfg.pad_token_id,
    "bos_token_id": None,
    "use_cache": True,
  }
  if cfg.indexer_types:
    hf["indexer_types"] = list(cfg.indexer_types)
  else:
    hf |= {"index_topk_freq": cfg.index_topk_freq, "index_skip_topk_offset": cfg.index_skip_topk_offset}
  if cfg.router_param_dtype:
    hf["moe_router_dtype"] = cfg.router_param_dtype
  return dict(sorted(hf.items()))


def _check_fixed(hf: dict[str, Any]) -> None:
  for name, right in _FIXED.items():
    if name in hf and hf[name] != right and not (hf[name] is None and right is False):
      raise UserError(
        f"config.json: {name} is {hf[name]!r}; transformers' GLM-5 always uses {right!r}, so this file "
        "describes another model"
      )
  quantization = hf.get("quantization_config")
  if quantization is not None:
    block = [FP8_BLOCK, FP8_BLOCK]
    if quantization.get("quant_method") != "fp8" or quantization.get("weight_block_size", block) != block:
      raise UserError(
        f"config.json: quantization_config has quant_method {quantization.get('quant_method')!r}, "
        f"weight_block_size {quantization.get('weight_block_size')}; only 'fp8' with {block} can be read"
      )


def _typed(hf: dict[str, Any], name: str, default: Any) -> Any:
  """hf[name] if it has the type of `default` (an int will do for a float); `default` if absent."""
  value = hf.get(name)
  if value is None:
    return default
  kind = type(default)
  if kind is float and type(value) is int:
    return float(value)
  if type(value) is not kind:
    raise UserError(f"config.json: {name} is {value!r}; {kind.__name__} is needed")
  return value


def _aliases(hf: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
  """Older names of n_routed_experts, which transformers still accepts."""
  found = {}
  for alias in ("num_experts", "num_local_experts"):
    if hf.get(alias) is None:
      continue
    found["n_routed_experts"] = _typed(hf, alias, 0)
    if values.get("n_routed_experts", found["n_routed_experts"]) != found["n_routed_experts"]:
      raise UserError(
        f"config.json: {alias} is {hf[alias]} but n_routed_experts is {hf['n_routed_experts']}; keep one"
      )
  return found


def _rope_theta(hf: dict[str, Any]) -> float:
  rope = hf.get("rope_parameters")
  wanted = '{"rope_theta": 1000000.0, "rope_type": "default"}'
  if not isinstance(rope, dict) or rope.get("rope_theta") is None:
    raise UserError(f"config.json: rope_parameters with a rope_theta is missing; GLM-5's is {wanted}")
  if rope.get("rope_type", "default") != "default":
    raise UserError(
      f"config.json: rope_parameters.rope_type is {rope['rope_type']!r}; only 'default' is known (no YaRN)"
    )
  unknown = sorted(set(rope) - {"rope_theta", "rope_type", "partial_rotary_factor"})
  if unknown or rope.get("partial_rotary_factor", 1.0) != 1.0:
    name = unknown[0] if unknown else "partial_rotary_factor"
    raise UserError(f"config.json: rope_parameters.{name} is {rope[name]!r}; expected {wanted}")
  return _typed(rope, "rope_theta", 1.0)


def _tokens(hf: dict[str, Any]) -> dict[str, Any]:
  eos = hf.get("eos_token_id")
  ids = eos if isinstance(eos, list | tuple) else [eos]
  if not ids or not all(type(i) is int for i in ids):
    raise UserError(f"config.json: eos_token_id is {eos!r}; an id or a list of ids is needed")
  pad = hf.get("pad_token_id")
  return {
    "eos_token_id": tuple(ids),
    "pad_token_id": ids[0] if pad is None else _typed(hf, "pad_token_id", 0),
  }


def _numerics(hf: dict[str, Any]) -> dict[str, Any]:
  dtype = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"  # bfloat16: as released
  router = hf.get("moe_router_dtype") or ""
  for name, value in (("dtype", dtype), ("moe_router_dtype", router or "float32")):
    if value not in _DTYPES:
      raise UserError(f"config.json: {name} is {value!r}; one of {', '.join(_DTYPES)} is needed")
  return {
    "dtype": dtype,
    "param_dtype": dtype,
    "router_param_dtype": router,
    "lora_norm_eps": _typed(hf, "lora_norm_eps", TRANSFORMERS_LORA_NORM_EPS),
    "dsa_mode": "sparse",
  }


def _per_layer(hf: dict[str, Any], name: str, layers: int, allowed: tuple[str, ...]) -> list[str] | None:
  """The list hf[name], one entry of `allowed` per layer, or None where the file has none."""
  types = hf.get(name)
  if types is None:
    return None
  if not isinstance(types, list | tuple) or len(types) != layers:
    count = len(types) if isinstance(types, list | tuple) else repr(types)
    raise UserError(f"config.json: {name} has {count} entries; num_hidden_layers asks for {layers}")
  for layer, kind in enumerate(types):
    if kind not in allowed:
      raise UserError(f"config.json: {name}[{layer}] is {kind!r}; it must be one of {', '.join(allowed)}")
  return list(types)


def _first_dense(hf: dict[str, Any], layers: int, default: int) -> int:
  """Number of leading dense layers, from mlp_layer_types or first_k_dense_replace, which must agree."""
  types = _per_layer(hf, "mlp_layer_types", layers, ("dense", "sparse"))
  stated = hf.get("first_k_dense_replace")
  count = _typed(hf, "first_k_dense_replace", default)
  if types is None:
    return count
  freq = _typed(hf, "moe_layer_freq", 1)
  if stated is None:
    count = types.index("sparse") if "sparse" in types else layers
  expected = ["sparse" if i >= count and i % freq == 0 else "dense" for i in range(layers)]
  for layer, (kind, right) in enumerate(zip(types, expected, strict=True)):
    if kind != right:
      raise UserError(
        f"config.json: mlp_layer_types[{layer}] is {kind!r}, but first_k_dense_replace {count} and "
        f"moe_layer_freq {freq} make it {right!r}"
      )
  return count


def _indexers(hf: dict[str, Any], layers: int) -> dict[str, Any]:
  """Which layers own an indexer. An explicit list wins over the schedule, as in transformers."""
  freq = _typed(hf, "index_topk_freq", 1)
  if freq < 1:
    raise UserError(f"config.json: index_topk_freq is {freq}; 1 or more is needed")
  schedule: dict[str, Any] = {}
  if hf.get("index_topk_freq") is not None:
    schedule["index_topk_freq"] = freq
    if freq > 1 or hf.get("index_skip_topk_offset") is not None:
      schedule["index_skip_topk_offset"] = _typed(hf, "index_skip_topk_offset", TRANSFORMERS_SKIP_OFFSET)
  types = _per_layer(hf, "indexer_types", layers, ("full", "shared"))
  pattern = hf.get("index_topk_pattern")
  if types is None and pattern is not None:
    names = {"F": "full", "S": "shared"}
    as_list = [names.get(letter, letter) for letter in pattern]
    types = _per_layer({"index_topk_pattern": as_list}, "index_topk_pattern", layers, ("full", "shared"))
  if not types:
    return schedule
  if types[0] != "full":
    raise UserError(
      "config.json: indexer_types[0] is 'shared'; the first layer has no set to share, so 'full'"
    )
  offset = schedule.get("index_skip_topk_offset", TRANSFORMERS_SKIP_OFFSET)
  derived = ["shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers)]
  if schedule and types == derived:
    return schedule
  return {"indexer_types": tuple(types)}


def _check_layer_types(hf: dict[str, Any], layers: int) -> None:
  _per_layer(hf, "layer_types", layers, _LAYER_TYPES)


def _check_derived(hf: dict[str, Any], values: dict[str, Any]) -> None:
  """Redundant numbers of the file must agree with those that they repeat."""
  if values["moe_layer_freq"] != 1 and hf.get("mlp_layer_types") is None:
    raise UserError(
      f"config.json: moe_layer_freq is {values['moe_layer_freq']}, which transformers ignores; write "
      "mlp_layer_types, one entry a layer"
    )
  right = {
    "num_key_value_heads": values["num_attention_heads"],
    "qk_head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
  }
  for name, value in right.items():
    if hf.get(name, value) != value:
      raise UserError(f"config.json: {name} is {hf[name]!r}; the other sizes make it {value}")
