"""Small programs through the real TPU compiler; one compiles in seconds."""

import functools
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax.compiler import Dims, DoesNotFit, compile_program, parse_topology, topology_devices
from glm5_jax.compiler.page import html_page

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason='libtpu is not installed (pip install "glm5-jax[tpu]")'
)
SIDE, LAYERS = 4096, 6
AXES = {"fsdp": 2, "expert": 2}


@pytest.fixture(scope="module")
def slice_of_four():
  topology = parse_topology("v5p:2x2x1")
  mesh = Mesh(np.array(topology_devices(topology)).reshape(tuple(AXES.values())), tuple(AXES))
  return topology, mesh


REPLICATED = P()


def struct(mesh, shape, spec=REPLICATED, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def scan(x, w):
  return jax.lax.scan(lambda c, wi: (jnp.tanh(c @ wi), None), x, w)[0]


@pytest.fixture(scope="module")
def scanned(slice_of_four):
  topology, mesh = slice_of_four
  args = (struct(mesh, (SIDE, SIDE)), struct(mesh, (LAYERS, SIDE, SIDE)))
  flops = topology.devices * LAYERS * 2 * SIDE**3
  return compile_program(jax.jit(scan), args, topology, mesh, model_flops=flops, title="scan of products")


def test_scan_of_products_costs_little_more_than_the_matrix_units_need(scanned):
  assert scanned.cost.matmul_flops == LAYERS * 2 * SIDE**3
  ideal = scanned.cost.matmul_flops / scanned.topology.generation.flops_per_cycle
  products = scanned.cost.cycles_by_kind["fusion"]
  assert 1.0 < products / ideal < 1.3  # the compiler prices these products at 1.2 of ideal
  assert scanned.utilisation == pytest.approx(ideal / scanned.cycles)
  assert scanned.cost.unknown_loops == {} and scanned.cost.exchanges == ()


def test_memory_of_the_scan(scanned):
  matrix = SIDE * SIDE * 2
  assert scanned.memory.arguments == (LAYERS + 1) * matrix
  assert scanned.memory.outputs == matrix
  assert scanned.memory.host == 0
  assert (LAYERS + 2) * matrix <= scanned.memory.needed <= (LAYERS + 4) * matrix
  first = scanned.buffers[0]
  assert (first.kind, str(first.shape), first.bytes) == ("argument", "bf16[6,4096,4096]", LAYERS * matrix)
  assert scanned.headroom == 1 - scanned.memory.needed / scanned.topology.generation.usable_hbm_bytes


def test_report_as_json_table_and_page(scanned, tmp_path):
  page = scanned.save(tmp_path)
  saved = json.loads((tmp_path / "compile.json").read_text())
  assert saved["topology"] == "v5p:2x2x1" and saved["chips"] == 4 and saved["mesh"] == AXES
  assert saved["utilisation"] == scanned.utilisation
  assert saved["cost"]["cycles"] == scanned.cost.cycles
  assert saved["buffers"][0]["shape"] == "bf16[6,4096,4096]"
  table = scanned.table()
  assert "scan of products on v5p:2x2x1: 4 chips" in table
  assert "a ranking, not a measurement" in table
  text = page.read_text()
  assert text == html_page(scanned)
  assert "prefers-color-scheme: dark" in text
  assert not re.search(r"https?://|src=|@import|url\(", text)


def exchange(mesh):
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P("fsdp"), P("expert")),
    out_specs=(P(), P("expert"), P("fsdp"), P()),
    check_vma=False,
  )
  def body(x, y):
    return (
      jax.lax.all_gather(x, "fsdp", tiled=True),
      jax.lax.all_to_all(y, "expert", 0, 0, tiled=True),
      jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]),
      jax.lax.psum(y, ("fsdp", "expert")),
    )

  return jax.jit(body)


def test_exchanges_over_named_axes_to_the_byte(slice_of_four):
  topology, mesh = slice_of_four
  args = (struct(mesh, (1024, 256), P("fsdp")), struct(mesh, (1024, 256), P("expert"), jnp.float32))
  report = compile_program(exchange(mesh), args, topology, mesh)
  half, words = 512 * 256 * 2, 512 * 256 * 4
  assert {(e.kind, e.axis): (e.executions, e.bytes, e.wire_bytes) for e in report.cost.exchanges} == {
    ("all-gather", "fsdp"): (1, 2 * half, half),
    ("all-to-all", "expert"): (1, words, words // 2),
    ("collective-permute", "fsdp"): (1, half, half),
    ("all-reduce", "fsdp × expert"): (1, words, 2 * words * 3 // 4),
  }
  assert report.wire_seconds == report.wire_bytes / 600e9


def test_gathers_inside_a_loop_count_each_round_and_scatters_are_recognised(slice_of_four):
  topology, mesh = slice_of_four
  axes = ("fsdp", "expert")

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P(), P(None, axes)), out_specs=P(axes), check_vma=False
  )
  def body(x, w):
    y, _ = jax.lax.scan(lambda c, wi: (c @ jax.lax.all_gather(wi, axes, tiled=True), None), x, w)
    return jax.lax.psum_scatter(y, axes, tiled=True)

  args = (struct(mesh, (SIDE, SIDE)), struct(mesh, (LAYERS, SIDE, SIDE), P(None, axes)))
  report = compile_program(jax.jit(body), args, topology, mesh)
  found = {(e.kind, e.axis): (e.executions, e.bytes) for e in report.cost.exchanges}
  assert found["all-gather", "fsdp × expert"] == (LAYERS, LAYERS * SIDE * SIDE * 2)
  assert found["reduce-scatter", "fsdp × expert"] == (1, SIDE * SIDE * 2)


def test_pallas_kernel_is_listed_and_priced_when_its_flops_are_known(slice_of_four):
  from jax.experimental import pallas as pl

  topology, mesh = slice_of_four

  def kernel(x_ref, y_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

  def body(x, y):
    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((256, 256), jnp.float32), name="product")
    return call(x, y)

  mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
  args = (struct(mesh, (256, 256)), struct(mesh, (256, 256)))
  flops = 2 * 256**3
  unpriced = compile_program(jax.jit(mapped), args, topology, mesh)
  (item,) = unpriced.cost.unpriced
  assert (item.name, item.kind, item.executions, item.cycles) == ("product", "pallas", 1, None)
  assert any("1 pallas product" in note for note in unpriced.caveats())
  priced = compile_program(jax.jit(mapped), args, topology, mesh, priced_kernels={"product": flops})
  assert priced.cost.kernel_cycles == flops / topology.generation.flops_per_cycle
  assert priced.cycles == unpriced.cycles + priced.cost.kernel_cycles


def test_weights_in_host_memory_are_counted_there(slice_of_four):
  topology, mesh = slice_of_four
  there = NamedSharding(mesh, P(), memory_kind="pinned_host")
  weights = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16, sharding=there)

  def body(x, w):
    return x @ jax.device_put(w, jax.memory.Space.Device)

  report = compile_program(jax.jit(body), (struct(mesh, (SIDE, SIDE)), weights), topology, mesh)
  assert report.memory.host == report.cost.host_bytes == SIDE * SIDE * 2
  assert "host memory" in report.table()


@pytest.mark.slow
def test_activations_that_go_to_the_host_and_back_are_counted(slice_of_four):
  topology, mesh = slice_of_four
  layers, rows, width = 4, 8192, 1024
  policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["input"],
    offload_src="device",
    offload_dst="pinned_host",
  )

  def layer(x, w):
    x = checkpoint_name(x, "input")
    return jnp.tanh(jnp.tanh(x @ w) @ w.T), None

  def gradient(x, ws):
    def loss(ws):
      return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0].astype(jnp.float32).sum()

    return jax.grad(loss)(ws)

  args = (struct(mesh, (rows, width)), struct(mesh, (layers, width, width)))
  report = compile_program(jax.jit(gradient), args, topology, mesh)
  saved = layers * rows * width * 2
  assert report.memory.host == saved
  assert report.cost.host_bytes == 2 * saved


def test_a_program_that_is_too_large_is_explained(slice_of_four):
  """Logits of 310,000 tokens over 151,552 words, and activations of 90 layers kept for the backward pass."""
  topology, mesh = slice_of_four
  dims = Dims(vocab=151552, layers=(90,))
  args = (struct(mesh, (310_000, 4096)), struct(mesh, (4096, 151552)))
  with pytest.raises(DoesNotFit, match=r"of 95\.74 GiB a device.*would help: train\.loss_chunk") as refusal:
    compile_program(jax.jit(lambda x, w: ((x @ w) @ w.T, x + 1)), args, topology, mesh, dims=dims)
  largest = refusal.value.explanation.buffers[0]
  assert (largest.kind, largest.shape.dims) == ("temporary", (310_000, 151552))

  def gradient(x, ws):
    return jax.grad(lambda ws: scan(x, ws).astype(jnp.float32).sum())(ws)

  args = (struct(mesh, (2**17, 4096)), struct(mesh, (90, 4096, 4096)))
  with pytest.raises(DoesNotFit) as refusal:
    compile_program(jax.jit(gradient), args, topology, mesh, dims=dims)
  explanation = refusal.value.explanation
  assert explanation.advice[0].setting == "model.remat"
  assert sum(buffer.shape.dims == (90, 2**17, 4096) for buffer in explanation.buffers) == 3
  assert explanation.needed > 3 * 90 * 2**17 * 4096 * 2


def test_an_error_of_another_kind_keeps_its_type(slice_of_four):
  topology, mesh = slice_of_four
  with pytest.raises(TypeError, match="incompatible shapes"):
    compile_program(jax.jit(jnp.add), (struct(mesh, (3,)), struct(mesh, (4,))), topology, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_generation_compiles_near_its_ideal_and_refuses_at_the_memory_in_our_table(name):
  topology = parse_topology(name)
  devices = topology_devices(topology)
  assert len(devices) == topology.devices
  mesh = Mesh(np.array(devices), ("x",))
  args = (struct(mesh, (4096, 4096)), struct(mesh, (4096, 4096)))
  report = compile_program(jax.jit(jnp.matmul), args, topology, mesh)
  ideal = report.cost.matmul_flops / topology.generation.flops_per_cycle
  assert 1.0 < report.cycles / ideal < 1.6
  with pytest.raises(DoesNotFit) as refusal:
    compile_program(jax.jit(lambda x: x + 1), (struct(mesh, (2**20, 2**17)),), topology, mesh)
  assert refusal.value.explanation.available == topology.generation.usable_hbm_bytes
