"""Weights in and out: every tensor used, every parameter filled, nothing changed on the way."""

import errno
import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from glm5_jax import hf
from glm5_jax.config import glm5_2_744b, glm5_744b, tiny
from glm5_jax.errors import UserError
from glm5_jax.hf import names
from tests.hf.conftest import write_tensors

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn


def test_the_table_fills_the_models_parameters():
  from glm5_jax.model import abstract_params

  small_shared = tiny().replace(num_hidden_layers=7, index_topk_freq=2, router_param_dtype="float32")
  configs = [
    glm5_744b(),
    glm5_2_744b(),
    tiny(),
    tiny().replace(scan_layers=False, num_nextn_predict_layers=0, tie_word_embeddings=True),
    small_shared.replace(param_dtype="bfloat16", n_shared_experts=2),
  ]
  for cfg in configs:
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(cfg))
    model = {tuple(key.key for key in path): (leaf.shape, leaf.dtype) for path, leaf in leaves}
    assert names.param_specs(cfg) == model


def test_the_table_of_the_release():
  """Names and shapes as the released checkpoint lists them."""
  table = {tensor.name: tensor.shape for tensor in names.tensors(glm5_744b())}
  layer = "model.layers.78."  # MTP has everything of an MoE layer, and four tensors more
  expected = {
    "model.embed_tokens.weight": (154880, 6144),
    "lm_head.weight": (154880, 6144),
    "model.norm.weight": (6144,),
    layer + "input_layernorm.weight": (6144,),
    layer + "post_attention_layernorm.weight": (6144,),
    layer + "self_attn.q_a_proj.weight": (2048, 6144),
    layer + "self_attn.q_a_layernorm.weight": (2048,),
    layer + "self_attn.q_b_proj.weight": (16384, 2048),
    layer + "self_attn.kv_a_proj_with_mqa.weight": (576, 6144),
    layer + "self_attn.kv_a_layernorm.weight": (512,),
    layer + "self_attn.kv_b_proj.weight": (28672, 512),
    layer + "self_attn.o_proj.weight": (6144, 16384),
    layer + "self_attn.indexer.wq_b.weight": (4096, 2048),
    layer + "self_attn.indexer.wk.weight": (128, 6144),
    layer + "self_attn.indexer.weights_proj.weight": (32, 6144),
    layer + "self_attn.indexer.k_norm.weight": (128,),
    layer + "self_attn.indexer.k_norm.bias": (128,),
    layer + "mlp.gate.weight": (256, 6144),
    layer + "mlp.gate.e_score_correction_bias": (256,),
    layer + "mlp.experts.255.gate_proj.weight": (2048, 6144),
    layer + "mlp.experts.255.up_proj.weight": (2048, 6144),
    layer + "mlp.experts.255.down_proj.weight": (6144, 2048),
    layer + "mlp.shared_experts.gate_proj.weight": (2048, 6144),
    layer + "mlp.shared_experts.down_proj.weight": (6144, 2048),
    layer + "eh_proj.weight": (6144, 12288),
    layer + "enorm.weight": (6144,),
    layer + "hnorm.weight": (6144,),
    layer + "shared_head.norm.weight": (6144,),
    "model.layers.0.mlp.gate_proj.weight": (12288, 6144),
    "model.layers.2.mlp.down_proj.weight": (6144, 12288),
    "model.layers.77.mlp.experts.0.up_proj.weight": (2048, 6144),
  }
  assert expected.items() <= table.items()
  attention_and_norms, moe = 14, 2 + 3 * 256 + 3
  assert len(table) == 3 + 79 * attention_and_norms + 3 * 3 + 76 * moe + 4
  shared = [name for name in table if name.endswith("indexer.wk.weight")]
  owners = [tensor.name for tensor in names.tensors(glm5_2_744b()) if tensor.name in shared]
  assert len(owners) == 21 + 1


def test_golden_values_stand_where_the_names_say(golden):
  """Spot checks of every transform against the file, by plain index arithmetic."""
  cfg = hf.load_config(golden)
  params = hf.load_params(golden, cfg)
  file = load_file(golden / "model.safetensors")
  N, P, R, H = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
  block = params["layers_1"]["block_0"]  # layers 1, 2, 3, stacked
  attn, prefix = block["attn"], "model.layers.3.self_attn."
  kv_b, q_b, o = (file[prefix + f"{name}.weight"] for name in ("kv_b_proj", "q_b_proj", "o_proj"))
  wq_b = file[prefix + "indexer.wq_b.weight"]
  for head in range(N):
    np.testing.assert_array_equal(attn["k_b_proj"][2, 5, head], kv_b[head * (P + H) :, 5][:P])
    np.testing.assert_array_equal(attn["v_b_proj"][2, 5, head], kv_b[head * (P + H) + P :, 5][:H])
    np.testing.assert_array_equal(attn["q_b_proj"][2, 7, head], q_b[head * (P + R) :, 7][: P + R])
    np.testing.assert_array_equal(attn["o_proj"][2, head, :, 9], o[9, head * H :][:H])
  np.testing.assert_array_equal(attn["indexer"]["wq_b"][2, 3, 31], wq_b[31 * 16 :, 3])
  moe = block["moe"]
  for layer, expert in ((1, 0), (3, 7)):
    for name in ("gate_proj", "up_proj", "down_proj"):
      stored = file[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"]
      np.testing.assert_array_equal(moe["experts"][name][layer - 1, expert], stored.T)
  bias = file["model.layers.2.mlp.gate.e_score_correction_bias"]
  np.testing.assert_array_equal(moe["router_bias"][1], bias)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000])
def test_export_then_import_is_bit_equal(
  cfg, random_params, assert_same_trees, tmp_path, param_dtype, max_shard_bytes
):
  cfg = cfg.replace(param_dtype=param_dtype, dtype=param_dtype, router_param_dtype="float32")
  params = random_params(cfg)
  assert params["mtp"]["block"]["moe"]["router_bias"].dtype == np.float32
  hf.save_params(jax.tree.map(jax.numpy.asarray, params), cfg, tmp_path, max_shard_bytes)
  assert_same_trees(hf.load_params(tmp_path, cfg), params)
  read = hf.load_config(tmp_path, dsa_mode=cfg.dsa_mode, sliding_window=cfg.sliding_window)
  assert read == cfg
  shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert (len(shards) > 5) == (max_shard_bytes == 30_000)
  assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_layouts_hold_the_same_weights(cfg, random_params, assert_same_trees, tmp_path):
  from glm5_jax.model import plan

  scanned = cfg.replace(num_hidden_layers=6, scan_layers=True)
  params = random_params(scanned)
  hf.save_params(params, scanned, tmp_path / "scanned")
  flat, flat_cfg = plan.unstack(params, scanned)
  assert_same_trees(hf.load_params(tmp_path / "scanned", flat_cfg), flat)
  hf.save_params(flat, flat_cfg, tmp_path / "flat")
  assert (tmp_path / "flat/model.safetensors").read_bytes() == (
    tmp_path / "scanned/model.safetensors"
  ).read_bytes()


def test_files_are_what_the_safetensors_package_and_the_index_say(cfg, random_params, tmp_path):
  cfg = cfg.replace(param_dtype="bfloat16")
  hf.save_params(random_params(cfg), cfg, tmp_path, max_shard_bytes=20_000)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  tensors, size = {}, 0
  for path in sorted(tmp_path.glob("model-*.safetensors")):
    with safe_open(path, "np") as file:
      assert file.metadata() == {"format": "pt"}
      for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
        assert index["weight_map"][name] == path.name
        tensors[name] = file.get_tensor(name)
        size += tensors[name].nbytes
  assert {tensor.name for tensor in names.tensors(cfg)} == tensors.keys() == index["weight_map"].keys()
  assert index["metadata"]["total_size"] == size
  assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == np.float32
  assert tensors["lm_head.weight"].dtype == BF16


def test_fused_experts_are_read(golden, assert_same_trees, tmp_path):
  """As transformers holds them in memory: gate_up_proj [E, 2F, D], down_proj [E, D, F]."""
  cfg = hf.load_config(golden)
  file = load_file(golden / "model.safetensors")
  for layer in (1, 3):  # 2 stays apart: files may mix
    prefix = f"model.layers.{layer}.mlp.experts."
    parts = {
      part: np.stack([file.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(8)])
      for part in ("gate", "up", "down")
    }
    file[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
    file[prefix + "down_proj"] = parts["down"]
  save_file(file, tmp_path / "model.safetensors")
  assert_same_trees(hf.load_params(tmp_path, cfg), hf.load_params(golden, cfg))


def test_extra_copies_of_embedding_and_head_are_ignored(cfg, random_params, assert_same_trees, tmp_path):
  params = random_params(cfg)
  hf.save_params(params, cfg, tmp_path)
  file = load_file(tmp_path / "model.safetensors")
  file["model.layers.4.shared_head.head.weight"] = file["lm_head.weight"]
  file["model.layers.4.embed_tokens.weight"] = file["model.embed_tokens.weight"]
  save_file(file, tmp_path / "model.safetensors")
  assert_same_trees(hf.load_params(tmp_path, cfg), params)


def test_tied_head(cfg, random_params, assert_same_trees, tmp_path):
  cfg = cfg.replace(tie_word_embeddings=True)
  params = random_params(cfg)
  hf.save_params(params, cfg, tmp_path)
  file = load_file(tmp_path / "model.safetensors")
  assert "lm_head.weight" not in file
  file["lm_head.weight"] = file["model.embed_tokens.weight"]
  save_file(file, tmp_path / "model.safetensors")
  assert_same_trees(hf.load_params(tmp_path, cfg), params)


def test_fp8_checkpoint(random_params, to_fp8, tmp_path):
  """Matrices in float8 except embedding, head, norms, router and the indexer's gate, as in the release."""
  cfg = tiny().replace(hidden_size=132, intermediate_size=300, num_hidden_layers=2)
  params = random_params(cfg)
  hf.save_params(params, cfg, tmp_path)
  file = load_file(tmp_path / "model.safetensors")
  specs, arrays, restored = {}, [], {}
  for name, array in file.items():
    keep = array.ndim != 2 or any(part in name for part in ("embed", "lm_head", "mlp.gate.", "weights_proj"))
    stored = {name: array}
    if not keep:
      values, scale, restored[name] = to_fp8(array)
      stored = {name: values, name + "_scale_inv": scale}
    specs |= {key: (value.shape, value.dtype) for key, value in stored.items()}
    arrays += stored.values()
  write_tensors(tmp_path / "model.safetensors", specs, arrays)
  loaded = hf.load_params(tmp_path, cfg)
  hf.save_params(loaded, cfg, tmp_path / "again")
  again = load_file(tmp_path / "again" / "model.safetensors")
  assert len(restored) > 40
  for name, array in file.items():
    np.testing.assert_array_equal(again[name], restored.get(name, array), err_msg=name)

  del specs["model.layers.0.mlp.up_proj.weight_scale_inv"]
  arrays = [
    again[name] if name not in restored else restored[name].astype(FP8) for name in specs if name in again
  ]
  specs = {name: spec for name, spec in specs.items() if name in again}
  write_tensors(tmp_path / "model.safetensors", specs, arrays)
  with pytest.raises(UserError, match=r"_scale_inv is missing, needs \["):
    hf.load_params(tmp_path, cfg)


def test_memory_stays_near_target_plus_largest_tensor(random_params, tmp_path):
  cfg = tiny().replace(
    n_routed_experts=64, moe_intermediate_size=256, vocab_size=4000, num_nextn_predict_layers=0
  )
  params = random_params(cfg)
  target = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  largest = params["embed"].nbytes
  assert target > 30 * largest
  hf.save_params(params, cfg, tmp_path / "warm")  # allocate what only the first call does
  tracemalloc.start()
  try:
    hf.save_params(params, cfg, tmp_path / "hf", max_shard_bytes=10 * largest)
    saving = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    hf.load_params(tmp_path / "hf", cfg)
    loading = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert saving < 4 * largest + 2_000_000
  assert loading < target + 4 * largest + 2_000_000


def test_values_are_rounded_to_the_dtype_at_rest(golden):
  cfg = hf.load_config(golden, param_dtype="bfloat16")
  params = hf.load_params(golden, cfg)
  exact = hf.load_params(golden, hf.load_config(golden))
  np.testing.assert_array_equal(params["embed"], np.asarray(exact["embed"]).astype(BF16))
  bias = params["layers_1"]["block_0"]["moe"]["router_bias"]
  np.testing.assert_array_equal(bias, exact["layers_1"]["block_0"]["moe"]["router_bias"])


def _rewrite(folder, change):
  file = load_file(folder / "model.safetensors")
  change(file)
  save_file(file, folder / "model.safetensors")


BROKEN = {
  "left over": (
    lambda f: f.update({"model.extra.weight": np.zeros(2, np.float32)}),
    "model.extra.weight is left over",
  ),
  "missing": (lambda f: f.pop("model.norm.weight"), "model.norm.weight is missing"),
  "shape": (
    lambda f: f.update({"lm_head.weight": np.zeros((7, 40), np.float32)}),
    "lm_head.weight has shape [7, 40]; this config needs [131, 40]",
  ),
  "integers": (
    lambda f: f.update({"lm_head.weight": np.zeros((131, 40), np.int8)}),
    "lm_head.weight has dtype I8",
  ),
}


@pytest.mark.parametrize("change, message", BROKEN.values(), ids=BROKEN.keys())
def test_what_does_not_fit_is_named(cfg, random_params, tmp_path, change, message):
  hf.save_params(random_params(cfg), cfg, tmp_path)
  _rewrite(tmp_path, change)
  with pytest.raises(UserError) as caught:
    hf.load_params(tmp_path, cfg)
  assert message in str(caught.value)


def test_the_mtp_layer_is_never_dropped_silently(cfg, random_params, assert_same_trees, tmp_path):
  params = random_params(cfg)
  hf.save_params(params, cfg, tmp_path)
  without = cfg.replace(num_nextn_predict_layers=0)
  with pytest.raises(UserError, match="num_nextn_predict_layers"):
    hf.load_params(tmp_path, without)
  trunk = {name: value for name, value in params.items() if name != "mtp"}
  assert_same_trees(hf.load_params(tmp_path, without, drop_mtp=True), trunk)
  hf.save_params(trunk, without, tmp_path / "trunk")
  with pytest.raises(UserError, match=r"model\.layers\.4\..* and \d+ more are missing"):
    hf.load_params(tmp_path / "trunk", cfg)


def test_torn_and_missing_files(cfg, random_params, tmp_path):
  hf.save_params(random_params(cfg), cfg, tmp_path, max_shard_bytes=60_000)
  shards = sorted(tmp_path.glob("model-*.safetensors"))
  data = shards[1].read_bytes()
  for header in (b"not json", b'["list"]', b'{"a": 1} '):
    junk = len(header).to_bytes(8, "little") + header
    shards[1].write_bytes(junk)
    with pytest.raises(UserError, match="no safetensors file"):
      hf.load_params(tmp_path, cfg)
  for torn in (data[:-1], data[:100], data[:7]):
    shards[1].write_bytes(torn)
    with pytest.raises(UserError, match=shards[1].name):
      hf.load_params(tmp_path, cfg)
  shards[1].unlink()
  with pytest.raises(UserError, match=f"{shards[1].name} is missing"):
    hf.load_params(tmp_path, cfg)
  shards[1].write_bytes(shards[0].read_bytes())
  with pytest.raises(UserError, match="which does not hold it"):
    hf.load_params(tmp_path, cfg)
  (tmp_path / "model.safetensors.index.json").unlink()
  with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
    hf.load_params(tmp_path, cfg)
  with pytest.raises(UserError, match="no folder"):
    hf.load_params(tmp_path / "nowhere", cfg)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
    hf.load_config(tmp_path)


def test_saving_never_overwrites_and_never_leaves_half(cfg, random_params, tmp_path, monkeypatch):
  params = random_params(cfg)
  (tmp_path / "tokenizer.json").write_text("{}")
  hf.save_params(params, cfg, tmp_path)
  before = (tmp_path / "config.json").read_bytes()
  other = cfg.replace(index_topk=9)
  with pytest.raises(UserError, match=r"already holds config\.json"):
    hf.save_params(params, other, tmp_path)
  (tmp_path / "model.safetensors").unlink()  # a run's folder has a config.json of its own
  with pytest.raises(UserError, match=r"already holds config\.json"):
    hf.save_params(params, other, tmp_path)
  assert (tmp_path / "config.json").read_bytes() == before

  def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr("os.fsync", full)
  with pytest.raises(UserError, match="No space left"):
    hf.save_params(params, cfg, tmp_path / "full")
  assert not list((tmp_path / "full").iterdir())


def test_parameters_of_another_config_are_named(cfg, random_params, tmp_path):
  params = random_params(cfg)
  with pytest.raises(UserError, match=r"embed has shape \[131, 40\]; this config needs \[132, 40\]"):
    hf.save_params(params, cfg.replace(vocab_size=132), tmp_path)
  with pytest.raises(UserError, match=r"mtp\.\S+ has no place"):
    hf.save_params(params, cfg.replace(num_nextn_predict_layers=0), tmp_path)
  del params["final_norm"]
  with pytest.raises(UserError, match="final_norm is missing"):
    hf.save_params(params, cfg, tmp_path)
  assert not list(tmp_path.iterdir())
