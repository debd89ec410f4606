"""The one table between Hugging Face's tensors and our parameter tree.

Hugging Face keeps linear weights as [out, in] with heads flattened, one tensor per expert, W_UK and
W_UV in one kv_b_proj, and the MTP layer behind the last layer. We keep [in, out], heads as an axis,
experts stacked, equal layers stacked. Every tensor is a view (a reshape) of which each piece is a range
of one axis, transposed, at a place in our tree; read backwards, the same table exports.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.model import plan

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
  """Part of a tensor's view, and the place in our tree that it fills."""

  path: Path
  perm: tuple[int, ...]  # transposition from the view to our axes
  cut: tuple[int, int, int] | None = None  # (axis, start, stop) of the view; None takes all
  index: tuple[int, ...] = ()  # leading axes of the parameter: layer of a stack, expert


@dataclass(frozen=True)
class Tensor:
  """One tensor of a Hugging Face checkpoint."""

  name: str
  shape: Shape
  view: Shape
  pieces: tuple[Piece, ...]

  def piece_shape(self, piece: Piece) -> Shape:
    sizes = list(self.view)
    if piece.cut is not None:
      sizes[piece.cut[0]] = piece.cut[2] - piece.cut[1]
    return tuple(sizes[axis] for axis in piece.perm)


def tensors(cfg: ModelConfig, fused: frozenset[int] = frozenset()) -> Iterator[Tensor]:
  """Every tensor of the checkpoint of `cfg`, in order of layers, MTP (if any) as layer num_hidden_layers.

  Args:
    cfg: the architecture; `scan_layers` decides where in our tree a layer stands.
    fused: layers whose experts are stored as transformers holds them in memory (gate_up_proj [E, 2F, D]).
  """
  D, V = cfg.hidden_size, cfg.vocab_size
  yield Tensor("model.embed_tokens.weight", (V, D), (V, D), (Piece(("embed",), (0, 1)),))
  for layer in range(cfg.num_hidden_layers + cfg.num_nextn_predict_layers):
    path, index = plan.locate(cfg, layer)
    for row in _block(cfg, layer, layer in fused):
      yield _place(row, f"model.layers.{layer}.", path, () if index is None else (index,))
    if layer == cfg.num_hidden_layers:
      for row in _mtp(cfg):
        yield _place(row, f"model.layers.{layer}.", ("mtp",), ())
  yield _vector("model.norm.weight", "final_norm", D)
  if not cfg.tie_word_embeddings:
    yield _linear("lm_head.weight", "head", V, D)


def ignored(cfg: ModelConfig, name: str) -> bool:
  """Copies that some derivatives store and that the main embedding and head replace."""
  copies = {
    f"model.layers.{cfg.num_hidden_layers}.{end}"
    for end in ("shared_head.head.weight", "embed_tokens.weight")
  }
  return name in copies or (cfg.tie_word_embeddings and name == "lm_head.weight")


def fused_name(layer: int) -> str:
  return f"model.layers.{layer}.mlp.experts.gate_up_proj"


def param_specs(cfg: ModelConfig) -> dict[Path, tuple[Shape, np.dtype]]:
  """Shape and dtype of every parameter, as the table fills them."""
  leading: dict[Path, Shape] = {}
  shapes: dict[Path, Shape] = {}
  for tensor in tensors(cfg):
    for piece in tensor.pieces:
      shapes[piece.path] = tensor.piece_shape(piece)
      counts = tuple(i + 1 for i in piece.index)
      leading[piece.path] = tuple(map(max, counts, leading.get(piece.path, counts)))
  return {path: (leading[path] + shape, param_dtype(cfg, path)) for path, shape in shapes.items()}


def param_dtype(cfg: ModelConfig, path: Path) -> np.dtype:
  """At rest: param_dtype, but float32 for the selection bias and router_param_dtype for the router."""
  name = cfg.param_dtype
  if path[-1] == "router_bias":
    name = "float32"
  elif path[-1] == "router":
    name = cfg.router_param_dtype or cfg.param_dtype
  return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _block(cfg: ModelConfig, layer: int, fused: bool) -> Iterator[Tensor]:
  D = cfg.hidden_size
  yield _vector("input_layernorm.weight", "attn_norm", D)
  yield _vector("post_attention_layernorm.weight", "mlp_norm", D)
  for row in _attention(cfg):
    yield _place(row, "self_attn.", ("attn",), ())
  if cfg.owns_indexer(layer):
    for row in _indexer(cfg):
      yield _place(row, "self_attn.indexer.", ("attn", "indexer"), ())
  if cfg.is_moe(layer):
    for row in _moe(cfg, fused):
      yield _place(row, "mlp.", ("moe",), ())
  else:
    for row in _swiglu(D, cfg.intermediate_size):
      yield _place(row, "mlp.", ("mlp",), ())


def _attention(cfg: ModelConfig) -> Iterator[Tensor]:
  D, N, Q, C = cfg.hidden_size, cfg.num_attention_heads, cfg.q_lora_rank, cfg.kv_lora_rank
  P, R, H = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
  yield _linear("q_a_proj.weight", "q_a_proj", Q, D)
  yield _vector("q_a_layernorm.weight", "q_a_norm", Q)
  yield _heads("q_b_proj.weight", "q_b_proj", N, P + R, Q)
  yield _linear("kv_a_proj_with_mqa.weight", "kv_a_proj", C + R, D)
  yield _vector("kv_a_layernorm.weight", "kv_a_norm", C)
  up_projections = (
    Piece(("k_b_proj",), (2, 0, 1), cut=(1, 0, P)),
    Piece(("v_b_proj",), (2, 0, 1), cut=(1, P, P + H)),
  )
  yield Tensor("kv_b_proj.weight", (N * (P + H), C), (N, P + H, C), up_projections)
  yield Tensor("o_proj.weight", (D, N * H), (D, N, H), (Piece(("o_proj",), (1, 2, 0)),))


def _indexer(cfg: ModelConfig) -> Iterator[Tensor]:
  D, heads, width = cfg.hidden_size, cfg.index_n_heads, cfg.index_head_dim
  yield _heads("wq_b.weight", "wq_b", heads, width, cfg.q_lora_rank)
  yield _linear("wk.weight", "wk", width, D)
  yield _vector("k_norm.weight", "k_norm_scale", width)
  yield _vector("k_norm.bias", "k_norm_bias", width)
  yield _linear("weights_proj.weight", "weights_proj", heads, D)


def _moe(cfg: ModelConfig, fused: bool) -> Iterator[Tensor]:
  D, E, F = cfg.hidden_size, cfg.n_routed_experts, cfg.moe_intermediate_size
  yield _linear("gate.weight", "router", E, D)
  yield _vector("gate.e_score_correction_bias", "router_bias", E)
  if fused:
    halves = (
      Piece(("experts", "gate_proj"), (0, 2, 1), cut=(1, 0, F)),
      Piece(("experts", "up_proj"), (0, 2, 1), cut=(1, F, 2 * F)),
    )
    yield Tensor("experts.gate_up_proj", (E, 2 * F, D), (E, 2 * F, D), halves)
    yield Tensor("experts.down_proj", (E, D, F), (E, D, F), (Piece(("experts", "down_proj"), (0, 2, 1)),))
  else:
    for expert in range(E):
      for row in _swiglu(D, F):
        yield _place(row, f"experts.{expert}.", ("experts",), (expert,))
  for row in _swiglu(D, F * cfg.n_shared_experts):
    yield _place(row, "shared_experts.", ("shared",), ())


def _mtp(cfg: ModelConfig) -> Iterator[Tensor]:
  D = cfg.hidden_size
  yield _vector("enorm.weight", "enorm", D)
  yield _vector("hnorm.weight", "hnorm", D)
  yield _linear("eh_proj.weight", "eh_proj", D, 2 * D)
  yield _vector("shared_head.norm.weight", "norm", D)


def _swiglu(D: int, F: int) -> Iterator[Tensor]:
  yield _linear("gate_proj.weight", "gate_proj", F, D)
  yield _linear("up_proj.weight", "up_proj", F, D)
  yield _linear("down_proj.weight", "down_proj", D, F)


def _vector(name: str, ours: str, width: int) -> Tensor:
  return Tensor(name, (width,), (width,), (Piece((ours,), (0,)),))


def _linear(name: str, ours: str, out: int, into: int) -> Tensor:
  return Tensor(name, (out, into), (out, into), (Piece((ours,), (1, 0)),))


def _heads(name: str, ours: str, heads: int, width: int, into: int) -> Tensor:
  """[heads · width, in] -> ours [in, heads, width]."""
  return Tensor(name, (heads * width, into), (heads, width, into), (Piece((ours,), (2, 0, 1)),))


def _place(row: Tensor, prefix: str, path: Path, index: tuple[int, ...]) -> Tensor:
  """`row` below a name prefix, a path and leading indices."""
  pieces = tuple(replace(p, path=path + p.path, index=index + p.index) for p in row.pieces)
  return replace(row, name=prefix + row.name, pieces=pieces)
