import pytest

from glm5_jax.compiler.cost import program_cost
from glm5_jax.compiler.hlo import Shape, parse_module
from tests.compiler.hlo_texts import COLLECTIVES, SCAN, UNPRICED, nested

MESH = (("fsdp", 2), ("expert", 4))
PER_CYCLE = 1024


def cost_of(text: str, **options):
  return program_cost(parse_module(text), MESH, PER_CYCLE, **options)


def test_a_scan_counts_its_body_twelve_times():
  cost = cost_of(SCAN)
  assert cost.cycles == 117624 + 12 * (117624 + 631912)
  assert cost.matmul_flops == 12 * 2 * 4096**3
  assert cost.cycles_by_kind == {"fusion": 12 * 631912, "copy": 13 * 117624}
  assert [(op.name, op.cycles, op.executions) for op in cost.largest_ops] == [
    ("fusion.13", 12 * 631912, 12),
    ("copy.11", 12 * 117624, 12),
    ("copy.10", 117624, 1),
  ]
  assert cost.unknown_loops == {} and cost.unpriced == () and cost.exchanges == ()


def test_nested_loops_multiply():
  assert cost_of(nested(3, "constant(5)")).cycles == 3 * (1000 + 5 * 100)
  assert cost_of(nested(3, "carried")).cycles == 3 * (1000 + 6 * 100)


def test_a_loop_that_data_decides_counts_once_and_is_named():
  text = nested(3, "carried").replace("tuple(%zero, %six)", "tuple(%zero, %n)")
  cost = cost_of(text)
  assert cost.cycles == 3 * (1000 + 100)
  assert cost.unknown_loops == {"inner": 1}
  for times in (0, 4):
    cost = cost_of(text, trips={"outer": 9, "inn": times})
    assert cost.cycles == 3 * (1000 + times * 100) and cost.unknown_loops == {"inner": times}


def test_exchanges_add_up_by_kind_and_axis():
  twice = COLLECTIVES.replace(
    "  %total =",
    "  %again = bf16[1024,256]{1,0} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0)\n  %total =",
  )
  exchanges = {(e.kind, e.axis): (e.executions, e.bytes) for e in cost_of(twice).exchanges}
  assert exchanges["all-gather", "fsdp"] == (2, 2 * 1024 * 256 * 2)
  assert exchanges["all-gather", "expert"] == (1, 2048 * 256 * 2)
  wires = [e.wire_bytes for e in cost_of(twice).exchanges]
  assert wires == sorted(wires, reverse=True)


def test_what_has_no_estimate_is_listed_and_only_known_kernels_are_priced():
  cost = cost_of(UNPRICED)
  assert cost.cycles == 500  # the dearer branch
  listed = {item.name: (item.kind, item.executions, item.source, item.cycles) for item in cost.unpriced}
  assert listed == {
    "sort": ("sort", 1, "", None),
    "splash": ("pallas", 1, "", None),
    "gmm": ("pallas", 2, "kernel", 2 * 4096 / PER_CYCLE),
  }
  assert cost.kernel_cycles == 8
  assert cost.without_estimate == {"fusion": 1}
  assert cost.host_bytes == 64 * 128 * 4


def test_the_callers_price_comes_before_the_kernels_own():
  seen = []

  def price(kernel):
    seen.append(kernel)
    return 2048.0

  cost = cost_of(UNPRICED, priced_kernels={"attend": price, "gmm": 1024})
  prices = {item.name: (item.source, item.cycles) for item in cost.unpriced if item.kind == "pallas"}
  assert prices == {"splash": ("caller", 2.0), "gmm": ("caller", 2.0)}
  assert seen[0].operands == (Shape("f32", (8, 128), order=(1, 0), tile=(8, 128)),)
  assert (seen[0].name, seen[0].op_name) == ("splash", "jit(f)/attend/pallas_call")


@pytest.mark.parametrize(
  ("line", "flops"),
  [
    ("f32[16,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 16 * 64 * 32),
    ("f32[16,32] convolution(%a, %b), dim_labels=bf_io->bf", 2 * 16 * 64 * 32),
  ],
)
def test_flops_of_products(line, flops):
  text = (
    "ENTRY %main (a: f32[16,64], b: f32[64,32]) -> f32[16,32] {\n"
    "  %a = f32[16,64] parameter(0)\n  %b = f32[64,32] parameter(1)\n"
    f"  ROOT %c = {line}\n}}\n"
  )
  assert cost_of(text).matmul_flops == flops


def test_flops_of_a_batched_product_spelled_as_a_convolution_with_holes():
  """Batch 8 as a spatial dimension: of 8 × 8 meetings of window and image the diagonal alone holds data."""
  text = (
    "ENTRY %main (a: bf16[8,16,64], b: bf16[8,64,32]) -> bf16[8,16,32] {\n"
    "  %a = bf16[8,16,64] parameter(0)\n  %b = bf16[8,64,32] parameter(1)\n"
    "  ROOT %c = bf16[8,16,32] convolution(%a, %b), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, "
    "dim_labels=0bf_0io->0bf\n}\n"
  )
  assert cost_of(text).matmul_flops == 8 * 2 * 16 * 64 * 32
