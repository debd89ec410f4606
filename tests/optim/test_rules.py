"""Every parameter has a deliberate entry, and the entry is the specified one."""

import jax
import jax.numpy as jnp
import pytest

from glm5_jax.config import glm5_2_744b, glm5_744b, small, tiny
from glm5_jax.errors import UserError
from glm5_jax.model import abstract_params
from glm5_jax.optim.groups import labels
from glm5_jax.optim.muon_split import dimension_numbers
from glm5_jax.optim.rules import path_name

CONFIGS = {"tiny": tiny, "small": small, "glm5": glm5_744b, "glm5.2": glm5_2_744b}


def named(tree):
  is_leaf = lambda x: x is None or hasattr(x, "reduction_axis")  # noqa: E731
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {path_name(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("name", CONFIGS)
def test_groups_follow_the_reports(name, abstract):
  cfg = CONFIGS[name]()
  groups = named(labels(abstract(cfg), cfg))
  for path, group in groups.items():
    last = path.split("/")[-1]
    if last == "router_bias":
      expected = "frozen"
    elif "norm" in last:
      expected = "adamw_no_decay"
    elif path in ("embed", "head") or "indexer" in path:
      expected = "adamw"
    else:
      expected = "muon"
    assert group == expected, path
  assert {"muon", "adamw", "adamw_no_decay", "frozen"} == set(groups.values())
  router = "mtp/block/moe/router"
  assert groups[router] == "muon" and groups["mtp/eh_proj"] == "muon"


@pytest.mark.parametrize("name", CONFIGS)
def test_matrix_sizes_under_muon_split(name, abstract):
  cfg = CONFIGS[name]()
  tree = abstract(cfg)
  n, d, h = cfg.num_attention_heads, cfg.hidden_size, cfg.v_head_dim
  per_matrix = {
    "q_b_proj": (cfg.q_lora_rank, cfg.qk_head_dim),
    "k_b_proj": (cfg.kv_lora_rank, cfg.qk_nope_head_dim),
    "v_b_proj": (cfg.kv_lora_rank, h),
    "o_proj": (n * h, d),
    "router": (d, cfg.n_routed_experts),
    "eh_proj": (2 * d, d),
  }
  seen = set()
  for path, dims in named(dimension_numbers(tree, cfg)).items():
    leaf = named(tree)[path]
    last = path.split("/")[-1]
    if dims is None:
      continue
    rows, cols = (jnp.prod(jnp.array([leaf.shape[a] for a in axes])) for axes in dims)
    if last in per_matrix:
      seen.add(last)
      assert (rows, cols) == per_matrix[last], path
    if "experts" in path:
      assert {int(rows), int(cols)} == {d, cfg.moe_intermediate_size}
  assert seen == set(per_matrix)


def test_plain_muon_takes_all_heads_as_one_matrix(abstract):
  cfg = tiny()
  whole = named(dimension_numbers(abstract(cfg), cfg, split=False))
  assert whole["mtp/block/attn/q_b_proj"] == ((-3,), (-2, -1))
  assert whole["mtp/block/attn/k_b_proj"] == ((-3,), (-2, -1))
  split = named(dimension_numbers(abstract(cfg), cfg))
  differing = {path.split("/")[-1] for path in split if split[path] != whole[path]}
  assert differing == {"q_b_proj", "k_b_proj", "v_b_proj"}


def test_unknown_parameter_raises(abstract):
  tree = abstract(tiny())
  tree["mtp"]["block"]["attn"]["gate"] = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  with pytest.raises(
    UserError, match=r"mtp/block/attn/gate has no optimiser rule; add 'attn/gate' to .*rules\.py"
  ):
    dimension_numbers(tree, tiny())


def test_a_missing_or_extra_stack_axis_raises(abstract):
  """A stacked tree read with the unstacked config would orthogonalise across layers."""
  cfg = tiny()
  with pytest.raises(UserError, match="wants 2 axes"):
    labels({"embed": jax.ShapeDtypeStruct((2, 128, 64), jnp.float32)}, cfg)
  tree = abstract(cfg)
  tree["layers_1"] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree["layers_1"])
  with pytest.raises(UserError, match=r"layers_1/block_0/attn/.* wants"):
    labels(tree, cfg)


def test_frozen_patterns(abstract):
  cfg = tiny()
  tree = abstract(cfg)
  frozen = named(labels(tree, cfg, frozen=("indexer", "layers_0/*")))
  for path, group in frozen.items():
    expected = "indexer" in path or path.startswith("layers_0/") or path.endswith("router_bias")
    assert (group == "frozen") == expected, path
  only_indexer = named(labels(tree, cfg, frozen=("~indexer",)))
  assert all((group == "frozen") != ("indexer" in path) for path, group in only_indexer.items())


def test_adamw_takes_over_muons_matrices(abstract):
  cfg = tiny()
  groups = named(labels(abstract(cfg), cfg, "adamw"))
  assert "muon" not in groups.values()
  assert groups["mtp/eh_proj"] == "adamw"


def test_unknown_optimizer_lists_the_names(abstract):
  with pytest.raises(UserError, match=r"config\.optim\.name='sgd': should be one of muon_split, muon, adamw"):
    labels(abstract(tiny()), tiny(), "sgd")


@pytest.mark.parametrize("name", CONFIGS)
def test_hand_written_tree_is_the_models(name, abstract):
  """What these tests call every parameter is every parameter."""
  cfg = CONFIGS[name]()
  shapes = lambda tree: {path: leaf.shape for path, leaf in named(tree).items()}  # noqa: E731
  assert shapes(abstract_params(cfg)) == shapes(abstract(cfg))
