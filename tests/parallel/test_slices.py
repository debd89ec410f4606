"""Meshes over several slices of a pod: inner axes never leave one. Their numbers: test_mesh_equality."""

import importlib.util

import pytest

from glm5_jax.compiler import parse_topology, topology_devices
from glm5_jax.config import MeshConfig
from glm5_jax.parallel.mesh import make_mesh
from tests.parallel.mesh_equality import assert_slices_are_outermost


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu here: pip install -e '.[tpu]'"
)
@pytest.mark.parametrize(
  ("topology", "slices", "cfg"),
  [
    ("v5e:4x4", 2, MeshConfig(data=2, fsdp=16, dcn_data=2)),
    ("v5e:4x4", 2, MeshConfig(data=1, fsdp=8, tensor=4, dcn_fsdp=2)),
    ("v5p:2x2x4", 4, MeshConfig(data=2, fsdp=8, expert=4, dcn_data=2, dcn_fsdp=2)),
  ],
)
def test_devices_of_real_slices(topology, slices, cfg):
  mesh = make_mesh(cfg, topology_devices(parse_topology(topology, slices)))
  assert len({device.slice_index for device in mesh.devices.flat}) == slices
  assert_slices_are_outermost(mesh, cfg)
