"""Meshes and rules by arithmetic; no device is needed but the one there is."""

import types

import jax
import pytest
from jax.sharding import PartitionSpec

from glm5_jax.config import MeshConfig, glm5_744b, tiny
from glm5_jax.errors import UserError
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.model.expert_parallel import capacity
from glm5_jax.parallel import spmd
from glm5_jax.parallel.mesh import AXES, axis_sizes, check_shapes, make_mesh
from glm5_jax.parallel.rules import RULES, gathered_axes, param_shardings, spec, unsplit_axes


def mesh_of(**sizes):
  """What rules read of a mesh, without its devices."""
  return types.SimpleNamespace(shape=dict.fromkeys(AXES, 1) | sizes)


def test_the_open_axis_takes_what_is_left():
  cfg = MeshConfig(data=2, fsdp=-1, expert=4)
  assert axis_sizes(cfg, 64) == {"data": 2, "fsdp": 8, "expert": 4, "context": 1, "tensor": 1}


@pytest.mark.parametrize(
  ("cfg", "devices", "said"),
  [
    (MeshConfig(data=2, fsdp=4), 1, "data 2 × fsdp 4 needs 8 devices, 1 found"),
    (MeshConfig(data=2, fsdp=2), 8, "uses 4 of the 8 devices found and would leave the rest idle"),
    (MeshConfig(data=-1, expert=3), 8, "expert 3 does not divide the 8 devices"),
  ],
)
def test_wrong_products_are_refused_with_the_numbers(cfg, devices, said):
  with pytest.raises(UserError, match=said):
    axis_sizes(cfg, devices)


def test_slices_must_divide_their_axis_and_be_there():
  with pytest.raises(UserError, match=r"dcn_data=3: should divide mesh\.data=1"):
    make_mesh(MeshConfig(data=1, dcn_data=3), jax.devices()[:1])
  devices = [types.SimpleNamespace(slice_index=0, platform="tpu") for _ in range(4)]
  with pytest.raises(UserError, match="dcn_data 2 × dcn_fsdp 1 needs 2 slices, 1 found"):
    make_mesh(MeshConfig(data=2, fsdp=2, dcn_data=2), devices)


def test_rows_and_slots_must_divide():
  cfg = MeshConfig(data=1, fsdp=2, expert=2, context=2)
  check_shapes(cfg, 8, rows=8, length=64)
  with pytest.raises(UserError, match=r"6 rows: should be a multiple of 4, .* fsdp 2 · expert 2"):
    check_shapes(cfg, 8, rows=6, length=64)
  with pytest.raises(UserError, match=r"data\.seq_len=62: should be a multiple of 4"):
    check_shapes(cfg, 8, rows=8, length=62)


def test_every_axis_of_every_weight_has_a_rule():
  for axes in jax.tree.leaves(logical_axes(glm5_744b()), is_leaf=lambda x: isinstance(x, PartitionSpec)):
    assert set(filter(None, axes)) <= set(RULES), axes


def test_layouts():
  assert spec(("layers", "experts", "embed", "mlp")) == PartitionSpec(
    None, "expert", ("fsdp", "context"), "tensor"
  )
  assert spec(("embed", "mlp")) == PartitionSpec(("fsdp", "context", "expert"), "tensor")
  assert spec(("layers", "embed")) == PartitionSpec(None, None)  # vectors are whole
  assert gathered_axes(("experts", "embed", "mlp")) == ((), ("fsdp", "context"), ())
  assert gathered_axes(("heads", "head_dim", "embed")) == ((), (), ("fsdp", "context", "expert"))
  assert unsplit_axes(spec(("kv_rank", "heads", "head_dim"))) == ("data", "expert")
  assert unsplit_axes(PartitionSpec()) == AXES


def test_a_weight_that_does_not_divide_is_refused_with_the_numbers():
  cfg = tiny()
  shapes, logical = abstract_params(cfg), logical_axes(cfg)
  with pytest.raises(UserError, match=r"attn/.*: \d+ does not divide over the mesh's fsdp 7 = 7|fsdp 7 = 7"):
    param_shardings(mesh_of(fsdp=7), logical, shapes)


def test_without_a_mesh_everything_is_whole():
  x = jax.numpy.arange(12.0).reshape(3, 4)
  assert spmd.size("data", "tensor") == 1 and spmd.index("context") == 0 and spmd.my_slots(64) is None
  for same in (spmd.psum(x), spmd.take_mine(x), spmd.gather_slots(x), spmd.my_share(x)):
    assert same is x
  assert spmd.gather_weight(x, ("embed", "mlp"), "bfloat16") is x


@pytest.mark.parametrize(("pairs", "shards"), [(32_768, 64), (32_768, 8), (10, 4), (1, 2)])
def test_a_round_holds_a_quarter_more_than_the_balanced_share(pairs, shards):
  rows = capacity(pairs, shards)
  assert rows % 8 == 0 and 1.25 * pairs / shards < rows <= 1.25 * pairs / shards + 9
