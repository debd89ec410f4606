"""Model FLOPs: what the architecture needs for a token, whatever the program spends beyond that."""

import functools
import time

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig

# Dense bfloat16 peak of a jax device in FLOP/s, by the prefix of its `device_kind`; the first match counts.
# Source: vendors' data sheets. A TPU7x chip (2307e12) is two devices.
PEAK_FLOPS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 1153.5e12,
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
}


def train_flops_per_token(cfg: ModelConfig, seq_len: int, mtp_depths: int) -> float:
  """Forward and backward FLOPs of one token of a full row.

  Each matrix weight a token meets costs 2 forward and 4 backward, and so do attention's two products for
  each key (2 a number, forward). The shared MTP layer and the output head count once more for each depth.
  Embedding look-ups, norms, softmax and the router's top-k do not count, nor does anything recomputed.
  A causal query meets (T + 1) / 2 keys on average, fewer in a sliding window or where sparse attention
  selects. The indexer is frozen: 2 a weight and a product, and only in sparse mode on rows longer than
  index_topk, where it decides something.
  """
  head = cfg.hidden_size * cfg.vocab_size
  layers = [*range(cfg.num_hidden_layers), *[cfg.num_hidden_layers] * mtp_depths]
  weights = (1 + mtp_depths) * head + mtp_depths * 2 * cfg.hidden_size**2  # eh_proj: [2D, D]
  weights += sum(layer_weights(cfg, layer) for layer in layers)
  per_key = cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim)
  keys = sum(_mean_keys(seq_len, _most_keys(cfg, layer, seq_len)) for layer in layers)
  flops = 6.0 * (weights + per_key * keys)
  if cfg.dsa_mode == "sparse" and seq_len > cfg.index_topk:
    owners = sum(cfg.owns_indexer(layer) for layer in layers)
    scores = cfg.index_n_heads * cfg.index_head_dim * _mean_keys(seq_len, seq_len)
    flops += 2.0 * owners * (indexer_weights(cfg) + scores)
  return flops


def layer_weights(cfg: ModelConfig, layer: int) -> int:
  """Matrix weights of a layer that one token meets, the indexer's apart; num_hidden_layers is MTP's block."""
  D, Q, C, N = cfg.hidden_size, cfg.q_lora_rank, cfg.kv_lora_rank, cfg.num_attention_heads
  query = D * Q + Q * N * cfg.qk_head_dim
  key_value = D * cfg.latent_width + C * N * (cfg.qk_nope_head_dim + cfg.v_head_dim)
  attention = query + key_value + N * cfg.v_head_dim * D
  if not cfg.is_moe(layer):
    return attention + 3 * D * cfg.intermediate_size
  experts = cfg.num_experts_per_tok + cfg.n_shared_experts
  return attention + D * cfg.n_routed_experts + experts * 3 * D * cfg.moe_intermediate_size


def indexer_weights(cfg: ModelConfig) -> int:
  """Matrix weights of one lightning indexer."""
  width = cfg.index_n_heads * cfg.index_head_dim
  return cfg.q_lora_rank * width + cfg.hidden_size * (cfg.index_head_dim + cfg.index_n_heads)


def _most_keys(cfg: ModelConfig, layer: int, seq_len: int) -> int:
  kind = cfg.attention_kind(layer)
  if kind == "S":
    return cfg.sliding_window
  return cfg.index_topk if kind == "D" and cfg.dsa_mode == "sparse" else seq_len


def _mean_keys(seq_len: int, most: int) -> float:
  """Mean over queries 1 … T of min(keys at or before the query, most)."""
  short = min(seq_len, most)
  return (short * (short + 1) / 2 + (seq_len - short) * most) / seq_len


def peak_flops(dtype: str) -> tuple[float, str]:
  """(FLOP/s of one device, where the figure is from).

  Of bfloat16 where a data sheet is listed; elsewhere measured once by a matmul in `dtype`.
  """
  kind = jax.local_devices()[0].device_kind
  for name, flops in PEAK_FLOPS.items():
    if kind.startswith(name):
      return flops, f"data sheet of {name}, bfloat16"
  return _measured_matmul(dtype), f"a measured matmul, {dtype}"


@functools.cache
def _measured_matmul(dtype: str, size: int = 1024, repeats: int = 8) -> float:
  a = jnp.ones((size, size), dtype)
  matmul = jax.jit(lambda x: x @ x)
  matmul(a).block_until_ready()
  best = float("inf")
  for _ in range(repeats):
    start = time.perf_counter()
    matmul(a).block_until_ready()
    best = min(best, time.perf_counter() - start)
  return 2.0 * size**3 / best
