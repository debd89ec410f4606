"""Model FLOPs: what the architecture needs for a token, whatever the program spends beyond that."""

import time

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.model import count_params

# Dense bfloat16 peak of a device in FLOP/s, by the prefix of its `device_kind`. Source: vendors' data sheets.
PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU7x": 2307e12,
}


def train_flops_per_token(cfg: ModelConfig, seq_len: int, mtp_depths: int) -> float:
  """Forward and backward FLOPs of one token: 6 per matrix weight it meets, plus attention's products.

  Embedding look-ups, norms, softmax and the router's top-k are not counted, nor is anything recomputed.
  A causal query meets (T + 1) / 2 keys on average, at most index_topk of them in sparse mode; the
  indexer, which has no backward pass here, counts 2 per weight and product where it runs.
  """
  counts = count_params(cfg)
  head = cfg.hidden_size * cfg.vocab_size
  indexers = sum(cfg.owns_indexer(i) for i in range(cfg.num_hidden_layers))
  index_weights = _indexer_weights(cfg)
  trunk = counts["active"] - indexers * index_weights + head
  depth = mtp_depths * (
    _mtp_active(cfg, counts["mtp"]) - index_weights * (cfg.attention_kind(0) == "D") + head
  )
  keys = (seq_len + 1) / 2
  sparse = cfg.dsa_mode == "sparse" and seq_len > cfg.index_topk
  attended = _mean_keys(seq_len, cfg.index_topk) if sparse else keys
  per_key = cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim)
  layers = cfg.num_hidden_layers + mtp_depths
  flops = 6.0 * (trunk + depth) + 6.0 * layers * per_key * attended
  if sparse:
    owners = indexers + mtp_depths
    flops += 2.0 * owners * (index_weights + cfg.index_n_heads * cfg.index_head_dim * keys)
  return flops


def _mean_keys(seq_len: int, most: int) -> float:
  """Mean over queries 1 … T of min(keys seen, most)."""
  short = min(seq_len, most)
  return (short * (short + 1) / 2 + (seq_len - short) * most) / seq_len


def _indexer_weights(cfg: ModelConfig) -> int:
  width = cfg.index_n_heads * cfg.index_head_dim
  return cfg.q_lora_rank * width + cfg.hidden_size * (cfg.index_head_dim + cfg.index_n_heads)


def _mtp_active(cfg: ModelConfig, total: int) -> int:
  if not cfg.num_nextn_predict_layers or not cfg.is_moe(cfg.num_hidden_layers):
    return total
  expert = 3 * cfg.hidden_size * cfg.moe_intermediate_size
  return total - (cfg.n_routed_experts - cfg.num_experts_per_tok) * expert


def peak_flops() -> tuple[float, str]:
  """(FLOP/s of all local devices, where the figure is from); measured by a matmul on an unlisted device."""
  devices = jax.local_devices()
  kind = devices[0].device_kind
  for name, flops in PEAK_FLOPS.items():
    if kind.startswith(name):
      return flops * len(devices), f"data sheet of {name}"
  return _measured_matmul(), "a 1024-cube float32 matmul"


def _measured_matmul(size: int = 1024, repeats: int = 8) -> float:
  a = jnp.ones((size, size), jnp.float32)
  matmul = jax.jit(lambda x: x @ x)
  matmul(a).block_until_ready()
  best = float("inf")
  for _ in range(repeats):
    start = time.perf_counter()
    matmul(a).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2.0 * size**3 / best
