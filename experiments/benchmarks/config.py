"""The two shapes that the speed comparisons run, and the count of their floating-point operations."""

from glm5_jax.config import ModelConfig

ROWS, LENGTH = 8, 512  # one training step's tokens
PROMPT, NEW = 64, 64  # generation: tokens of a prompt, tokens made


def bench_6m() -> ModelConfig:
  """6 M parameters, every part of GLM-5 but MTP; sparse mode, as transformers' class computes it."""
  return ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    num_hidden_layers=4,
    intermediate_size=512,
    max_position_embeddings=2048,
    num_attention_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=64,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=128,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    num_nextn_predict_layers=0,
    attention="D",
    dsa_mode="sparse",
    eos_token_id=(1,),
    pad_token_id=0,
    dtype="float32",
    param_dtype="float32",
    scan_layers=False,
  )


def maxtext_tiny() -> ModelConfig:
  """The DeepSeek-like shape that MaxText runs: plain MLA, no indexer, no MTP."""
  return ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    num_hidden_layers=4,
    intermediate_size=512,
    max_position_embeddings=2048,
    num_attention_heads=4,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    num_nextn_predict_layers=0,
    attention="F",
    eos_token_id=(1,),
    pad_token_id=0,
    dtype="float32",
    param_dtype="float32",
    scan_layers=False,
  )


def train_flops(cfg: ModelConfig, rows: int, length: int) -> float:
  """Floating-point operations of one training step, counted from the shape and not from the program.

  Two per weight and token forward and four backward, over the weights a token meets (head in, embedding
  out, top-k and shared experts); attention scores and values over all length² pairs, as a masked dense
  computation has them; the indexer forward only, since it gets no gradient here. Recomputation, padding
  of experts, norms, softmax and selection are not counted, so the rate is comparable between programs.
  """
  hidden, heads = cfg.hidden_size, cfg.num_attention_heads
  mla = hidden * (cfg.q_lora_rank + cfg.latent_width) + cfg.q_lora_rank * heads * cfg.qk_head_dim
  mla += cfg.kv_lora_rank * heads * (cfg.qk_nope_head_dim + cfg.v_head_dim) + heads * cfg.v_head_dim * hidden
  indexer = cfg.q_lora_rank * cfg.index_n_heads * cfg.index_head_dim
  indexer += (
    hidden * (cfg.index_head_dim + cfg.index_n_heads) + cfg.index_n_heads * cfg.index_head_dim * length
  )

  trained, forward_only = hidden * cfg.vocab_size, 0
  for layer in range(cfg.num_hidden_layers):
    trained += mla + heads * (cfg.qk_head_dim + cfg.v_head_dim) * length
    if cfg.is_moe(layer):
      experts = cfg.num_experts_per_tok + cfg.n_shared_experts
      trained += 3 * hidden * cfg.moe_intermediate_size * experts + hidden * cfg.n_routed_experts
    else:
      trained += 3 * hidden * cfg.intermediate_size
    if cfg.owns_indexer(layer) and cfg.dsa_mode == "sparse":
      forward_only += indexer
  return float(rows * length * (6 * trained + 2 * forward_only))
