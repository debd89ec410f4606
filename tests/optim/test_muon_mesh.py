"""Muon on meshes of 8 devices: the same update, every matrix in once and out once, nothing gathered."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from glm5_jax.config import glm5_744b, tiny
from glm5_jax.optim.exchange import exchanged_bytes, layout, rounds
from tests.optim.muon_mesh import held_bytes, travellers

ROOT = Path(__file__).parents[2]
FAST = ("fsdp=2,tensor=2,expert=2",)
SLOW = (
  "fsdp=8",
  "expert=8",
  "fsdp=4,expert=2",
  "context=2,fsdp=4",
  "fsdp=2,context=2,expert=2",
  "data=2,fsdp=2,expert=2",
)


def measured(kind: str, meshes: tuple[str, ...]) -> dict:
  done = subprocess.run(
    [sys.executable, "-m", "tests.optim.muon_mesh", kind, *meshes],
    cwd=ROOT,
    env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(done.stdout)


@pytest.fixture(scope="module")
def fast() -> dict:
  return measured("scanned", FAST)


def check(result: dict) -> None:
  """Parameters and state after two steps; the exchanges; nothing else but sums of scalars."""
  assert result["apart"][0] < 5e-6, result["apart"]
  assert result["apart_when_one_head_is_scaled"][0] < 5e-4, result["apart_when_one_head_is_scaled"]
  found = result["collectives"]
  assert set(found) == {"all-to-all", "all-reduce"}
  assert sum(found["all-to-all"]) == result["counted"] > 0
  assert sum(found["all-reduce"]) < 1024


@pytest.mark.parametrize("mesh", FAST)
def test_mesh_equals_one_device(fast, mesh):
  """Pitfall 29. Gradient norm, clipping and the guard are in the program too."""
  check(fast[mesh])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "meshes"), [("scanned", SLOW), ("unscanned", FAST + SLOW)])
def test_more_meshes_equal_one_device(kind, meshes):
  results = measured(kind, meshes)
  for mesh in meshes:
    check(results[mesh])


def test_whole_matrices_cause_no_exchange(fast):
  assert fast["whole"] == {}


@pytest.mark.parametrize(
  "sizes",
  [
    {"fsdp": 8},
    {"expert": 8},
    {"fsdp": 4, "expert": 2},
    {"fsdp": 2, "tensor": 2, "expert": 2},
    {"context": 2, "fsdp": 4},
  ],
)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_bytes_stay_within_twice_the_momentum_of_a_chip(sizes, scan_layers):
  """As trained by default: the iteration and what travels for it in bfloat16, the momentum in float32."""
  layouts = travellers(tiny().replace(scan_layers=scan_layers), sizes)
  assert 0 < exchanged_bytes(layouts, "bfloat16") <= 2 * held_bytes(layouts)


@pytest.mark.parametrize(
  "sizes",
  [
    {"fsdp": 512},
    {"fsdp": 64, "expert": 8},
    {"fsdp": 8, "expert": 64},
    {"fsdp": 2, "expert": 256},
    {"fsdp": 8, "expert": 16, "tensor": 4},
    {"fsdp": 4, "expert": 32, "context": 4},
    {"fsdp": 16, "expert": 64},
  ],
)
def test_bytes_of_glm5_stay_within_twice_its_momentum_over_all_chips(sizes):
  """Here copies of the heads' momentum do not count: the bound is of the model's momentum, once."""
  layouts = travellers(glm5_744b(), sizes)
  momentum = held_bytes(travellers(glm5_744b(), {}))
  assert exchanged_bytes(layouts, "bfloat16") <= 2 * momentum / math.prod(sizes.values())


MATRIX = MuonDimensionNumbers((-2,), (-1,))


def test_weights_alike_up_to_transposition_share_an_exchange():
  sizes = {"fsdp": 8}
  gate = layout((3, 64, 96), MATRIX, PartitionSpec(None, "fsdp", None), sizes)
  down = layout((3, 96, 64), MATRIX, PartitionSpec(None, None, "fsdp"), sizes)
  other = layout((3, 64, 96), MATRIX, PartitionSpec(None, None, "fsdp"), sizes)
  whole = layout((3, 64, 96), MATRIX, PartitionSpec("fsdp", None, None), {"fsdp": 3})
  assert sorted(rounds([gate, whole, other, down, whole])) == [[0, 3], [1], [2], [4]]
  assert exchanged_bytes([gate, down, whole], "float32") == 2 * 64 * 96 * 4  # 6 matrices over 8 devices
  assert exchanged_bytes([gate, other], "float32") == 2 * 2 * 64 * 96 * 4


def test_large_weights_travel_alone_and_small_ones_join_them():
  shapes = {"gate": (75, 256, 6144, 2048), "up": (75, 256, 6144, 2048), "mtp": (256, 6144, 2048)}
  specs = {
    name: PartitionSpec(*(None,) * (len(shape) - 3), "expert", "fsdp") for name, shape in shapes.items()
  }
  sizes = {"fsdp": 8, "expert": 64}
  assert rounds([layout(shapes[name], MATRIX, specs[name], sizes) for name in shapes]) == [[0, 2], [1]]


def test_groups_with_copies_divide_the_matrices():
  """In travels a group's part of the batch, out the whole batch; along data nothing."""
  spec = PartitionSpec(None, "fsdp", None)
  for sizes, sent in (({"fsdp": 4}, 2), ({"fsdp": 4, "expert": 2}, 1.5), ({"fsdp": 4, "data": 2}, 2)):
    heads = layout((16, 64, 96), MATRIX, spec, sizes)
    assert exchanged_bytes([heads], "float32") == sent * 16 * 64 * 96 / 4 * 4


def test_a_layout_that_interleaves_is_refused():
  heads = MuonDimensionNumbers((-3, -2), (-1,))
  with pytest.raises(ValueError, match="only the first may be split"):
    layout((4, 16, 64), heads, PartitionSpec(None, "fsdp", None), {"fsdp": 2})


def test_parts_are_turned_and_turned_back():
  one = layout((2, 6, 3, 4), MuonDimensionNumbers((-3,), (-1,)))
  x = jnp.arange(144).reshape(2, 6, 3, 4)
  assert one.matrices(x).shape == (6, 4, 6)
  assert (one.matrices(x)[1] == x[0, :, 1].T).all()
  assert (one.weight(one.matrices(x)) == x).all()
