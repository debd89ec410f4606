"""GLM-5's forward pass in plain float64 NumPy, on tensors under Hugging Face's names.

Written from the formulas, sharing nothing with the model: no heads as axes, no stacked experts, no
masks, one query at a time. It exists for what the reference checkpoint lacks: MTP, IndexShare, groups.
"""

import numpy as np

LAYER_NORM_EPS = 1e-6


class Forward:
  """`cfg` gives sizes, `file` the tensors; one row of tokens at a time."""

  def __init__(self, cfg, file, hidden_first=False, recycle_before_norm=False):
    self.cfg = cfg
    self.file = {name: array.astype(np.float64) for name, array in file.items()}
    self.hidden_first = hidden_first  # mistake: eh_proj takes the hidden state first
    self.recycle_before_norm = recycle_before_norm  # mistake: depths hand on what is before shared_head.norm

  def trunk(self, tokens):
    """(hidden after the final norm [T, D], sets selected by each layer)."""
    x, selected, sets = self.file["model.embed_tokens.weight"][tokens], None, []
    for layer in range(self.cfg.num_hidden_layers):
      x, selected = self.layer(x, layer, selected)
      sets.append(selected)
    return self.norm(x, "model.norm.weight"), sets

  def logits(self, hidden):
    return hidden @ self.file["lm_head.weight"].T

  def mtp(self, hidden, tokens, depths):
    """Hidden states of each depth; depth k has a slot for each token that has one k places ahead."""
    prefix = f"model.layers.{self.cfg.num_hidden_layers}."
    outputs = []
    for depth in range(1, depths + 1):
      slots = len(tokens) - depth
      embedding = self.file["model.embed_tokens.weight"][tokens[depth:]]
      pair = [
        self.norm(embedding, prefix + "enorm.weight"),
        self.norm(hidden[:slots], prefix + "hnorm.weight"),
      ]
      u = np.concatenate(pair[::-1] if self.hidden_first else pair, axis=-1)
      raw, _ = self.layer(u @ self.file[prefix + "eh_proj.weight"].T, self.cfg.num_hidden_layers, None)
      outputs.append(self.norm(raw, prefix + "shared_head.norm.weight"))
      hidden = raw if self.recycle_before_norm else outputs[-1]
    return outputs

  def layer(self, x, layer, selected):
    prefix = f"model.layers.{layer}."
    h = self.norm(x, prefix + "input_layernorm.weight")
    attended, selected = self.attention(h, prefix + "self_attn.", selected)
    x = x + attended
    h = self.norm(x, prefix + "post_attention_layernorm.weight")
    moe = layer >= self.cfg.first_k_dense_replace
    return x + (self.moe if moe else self.swiglu)(h, prefix + "mlp."), selected

  def attention(self, h, prefix, selected):
    cfg, w = self.cfg, lambda name: self.file[prefix + name + ".weight"]
    P, R, H = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    T, C = len(h), cfg.kv_lora_rank
    query_latent = self.norm(h @ w("q_a_proj").T, prefix + "q_a_layernorm.weight", cfg.lora_norm_eps)
    q = (query_latent @ w("q_b_proj").T).reshape(T, -1, P + R)
    latent = h @ w("kv_a_proj_with_mqa").T
    c = self.norm(latent[:, :C], prefix + "kv_a_layernorm.weight", cfg.lora_norm_eps)
    kv = (c @ w("kv_b_proj").T).reshape(T, -1, P + H)
    rope_key, rope_q = self.rotate(latent[:, C:]), self.rotate(q[:, :, P:])
    if prefix + "indexer.wk.weight" in self.file:
      selected = self.select(h, query_latent, prefix + "indexer.")
    out = np.zeros((T, cfg.num_attention_heads, H))
    for t in range(T):
      keys = selected[t]
      for n in range(cfg.num_attention_heads):
        scores = kv[keys, n, :P] @ q[t, n, :P] + rope_key[keys] @ rope_q[t, n]
        p = np.exp((scores - scores.max()) / np.sqrt(P + R))
        out[t, n] = p / p.sum() @ kv[keys, n, P:]
    return out.reshape(T, -1) @ w("o_proj").T, selected

  def select(self, h, query_latent, prefix):
    cfg, R, T = self.cfg, self.cfg.qk_rope_head_dim, len(h)
    q = (query_latent @ self.file[prefix + "wq_b.weight"].T).reshape(T, cfg.index_n_heads, cfg.index_head_dim)
    k = h @ self.file[prefix + "wk.weight"].T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + LAYER_NORM_EPS)
    k = k * self.file[prefix + "k_norm.weight"] + self.file[prefix + "k_norm.bias"]
    q = np.concatenate([self.rotate(q[..., :R]), q[..., R:]], axis=-1)
    k = np.concatenate([self.rotate(k[..., :R]), k[..., R:]], axis=-1)
    gate = h @ self.file[prefix + "weights_proj.weight"].T / np.sqrt(cfg.index_n_heads)
    chosen = []
    for t in range(T):
      scores = gate[t] @ np.maximum(q[t] @ k[: t + 1].T / np.sqrt(cfg.index_head_dim), 0)
      chosen.append(np.sort(np.argsort(-scores, kind="stable")[: cfg.index_topk]))
    return chosen

  def rotate(self, x):
    """Interleaved pairs, position = first axis."""
    R = x.shape[-1]
    angle = np.arange(len(x))[:, None] * self.cfg.rope_theta ** (-np.arange(0, R, 2) / R)
    angle = angle.reshape(len(x), *[1] * (x.ndim - 2), R // 2)
    pair = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.stack([pair.real, pair.imag], axis=-1).reshape(x.shape)

  def moe(self, h, prefix):
    cfg = self.cfg
    scores = 1 / (1 + np.exp(-h @ self.file[prefix + "gate.weight"].T))
    choice = scores + self.file[prefix + "gate.e_score_correction_bias"]
    out = self.swiglu(h, prefix + "shared_experts.")
    for t in range(len(h)):
      groups = choice[t].reshape(cfg.n_group, -1)
      group_score = np.sort(groups, axis=-1)[:, -2:].sum(-1)
      for dropped in np.argsort(-group_score, kind="stable")[cfg.topk_group :]:
        groups[dropped] = -np.inf
      experts = np.argsort(-groups.reshape(-1), kind="stable")[: cfg.num_experts_per_tok]
      weights = scores[t, experts]
      if cfg.norm_topk_prob:
        weights = weights / weights.sum()
      for expert, weight in zip(experts, weights, strict=True):
        out[t] += cfg.routed_scaling_factor * weight * self.swiglu(h[t], f"{prefix}experts.{expert}.")
    return out

  def swiglu(self, h, prefix):
    gate, up, down = (self.file[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    a = h @ gate.T
    return (a / (1 + np.exp(-a)) * (h @ up.T)) @ down.T

  def norm(self, x, name, eps=None):
    rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + (eps or self.cfg.rms_norm_eps))
    return x / rms * self.file[name]
