"""Buffer assignments and refusals, from the compiler's own texts cut down."""

import pytest

from glm5_jax.compiler.explain import Dims, DoesNotFit, advise, explain, parse_refusal
from glm5_jax.compiler.hlo import Shape, parse_module
from glm5_jax.compiler.memory import Buffer, parse_assignment
from glm5_jax.compiler.topology import parse_topology

GIB = 2**30
REFUSED = (
  "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (95.76G) "
  "exceeds available HBM (95.74G)."
)
MODULE = parse_module("""ENTRY %main (x: bf16[310000,4096], w: bf16[4096,151552]) -> bf16[310000,4096] {
  %x = bf16[310000,4096]{1,0} parameter(0), metadata={op_name="batch"}
  %w = bf16[4096,151552]{1,0} parameter(1), metadata={op_name="params['head']"}
  %logits = bf16[310000,151552]{1,0} fusion(%x, %w), metadata={op_name="jit(step)/head/dot_general"}
  %softmax = bf16[310000,151552]{1,0} copy(%logits), metadata={op_name="jit(step)/loss/exp"}
  ROOT %out = bf16[310000,4096]{1,0} fusion(%softmax, %w), metadata={op_name="jit(step)/dot_general"}
}
""")
# `softmax` takes the place of `logits`, and `early` is gone by then. Scalar memory and pointers do not count.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 2539520000, output shape is |bf16[310000,4096]|, maybe-live-out:
 value: <24 out @0> (size=2539520000,offset=0): bf16[310000,4096]{1,0:T(8,128)(2,1)}
allocation 1: size 2539520000, parameter 0, shape |bf16[310000,4096]| at ShapeIndex {}:
 value: <21 x @0> (size=2539520000,offset=0): bf16[310000,4096]{1,0:T(8,128)(2,1)}
allocation 2: size 1241513984, parameter 1, shape |bf16[4096,151552]| at ShapeIndex {}:
 value: <22 w @0> (size=1241513984,offset=0): bf16[4096,151552]{1,0:T(8,128)(2,1)}
allocation 3: size 4096, color 6, preallocated-temp:
 value: <9 scalar @6> (size=512,offset=0): s32[]{:T(128)S(6)}
allocation 4: size 93962241024, preallocated-temp:
 value: <23 logits @0> (size=93962240000,offset=1024): bf16[310000,151552]{1,0:T(8,128)(2,1)}
 value: <25 softmax{1} (phi) @0> (size=93962240000,offset=1024): bf16[310000,151552]{1,0:T(8,128)(2,1)}
 value: <26 softmax{} @0> (size=32,offset=0): (bf16[310000]{0}, bf16[310000,151552]{1,0})
 value: <27 early @0> (size=90000000000,offset=2048): f32[90,131072]{1,0:T(8,128)}
"""
LIVE = """HloLiveRange (max 6):
  BufferLiveRange:
    early{}:0-1
    x{}:0-6
    logits{}:2-3
    softmax{1}:3-4
    out{}:5-6
"""


def test_buffers_at_the_fullest_moment():
  found = parse_assignment(ASSIGNMENT, LIVE, "", MODULE)
  assert [(b.kind, str(b.shape), b.bytes, b.op_name) for b in found.buffers] == [
    ("temporary", "bf16[310000,151552]", 93962240000, "jit(step)/head/dot_general"),
    ("output", "bf16[310000,4096]", 2539520000, "jit(step)/dot_general"),
    ("argument", "bf16[310000,4096]", 2539520000, "batch"),
    ("argument", "bf16[4096,151552]", 1241513984, "params['head']"),
  ]
  assert found.total_bytes == 93962241024 + 2 * 2539520000 + 1241513984


def test_the_compilers_own_sum_comes_first_and_without_live_ranges_all_places_are_listed():
  usage = "Memory Space: default (color=0)\nTotal bytes: 102822314016 (95.76GiB)\n"
  found = parse_assignment(ASSIGNMENT, "", usage, MODULE)
  assert found.total_bytes == 102822314016
  assert [b.name for b in found.buffers][:2] == ["logits", "early"]


def test_temporaries_that_never_meet_do_not_add_up():
  """Two of 6 that overlap are fuller than one of 10 alone."""
  assignment = "allocation 0: size 100, preallocated-temp:\n" + "".join(
    f" value: <{i} {name} @0> (size={count},offset={offset}): f32[{count}]{{0}}\n"
    for i, (name, count, offset) in enumerate([("ten", 10, 0), ("six", 6, 20), ("seven", 7, 40)])
  )
  live = "    ten{}:0-1\n    six{}:2-5\n    seven{}:4-9\n"
  assert [b.name for b in parse_assignment(assignment, live, "", MODULE).buffers] == ["seven", "six"]
  apart = live.replace("six{}:2-5", "six{}:2-3")
  assert [b.name for b in parse_assignment(assignment, apart, "", MODULE).buffers] == ["ten"]


@pytest.mark.parametrize(
  ("message", "amounts"),
  [
    (REFUSED, (int(95.76 * GIB), int(95.74 * GIB))),
    ("RESOURCE_EXHAUSTED: … Used 17.50G of 15.75G hbm. Exceeded …", (int(17.5 * GIB), int(15.75 * GIB))),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem", None),
    ("INVALID_ARGUMENT: required (9G) exceeds available HBM (8G)", None),
  ],
)
def test_amounts_in_a_refusal(message, amounts):
  assert parse_refusal(message) == amounts


def test_explanation_names_buffers_excess_and_settings():
  assignment = parse_assignment(ASSIGNMENT, LIVE, "", MODULE)
  explanation = explain(REFUSED, parse_topology("v5p:2x2x1"), assignment, Dims(vocab=151552, hidden=4096))
  error = str(DoesNotFit(explanation))
  assert "\n" not in error
  assert "95.76 GiB of 95.74 GiB a device" in error
  assert "bf16[310000,151552], 87.51 GiB jit(step)/head/dot_general" in error
  assert "would help: train.loss_chunk, mesh.fsdp" in error
  table = explanation.table()
  assert "20.48 MiB too much" in table
  assert table.count("GiB  ") == 4 + 2  # buffers, then advice


def test_what_is_not_about_memory_is_not_explained():
  assert explain("INTERNAL: something else", parse_topology("v5p:2x2x1")) is None


DIMS = Dims(vocab=1000, hidden=64, sequence=4096, layers=(75, 3), tensor=4)


@pytest.mark.parametrize(
  ("kind", "shape", "op_name", "setting"),
  [
    ("argument", (75, 64, 8), "state.params", "mesh.fsdp"),
    ("temporary", (75, 64, 8), "jit(step)/optim/mul", "mesh.fsdp"),  # shaped like an argument
    ("output", (7, 9), "", "mesh.fsdp"),
    ("temporary", (8192, 1000), "jit(step)/loss/dot_general", "train.loss_chunk"),
    ("temporary", (2, 512, 250), "jit(step)/loss/dot_general", "train.loss_chunk"),  # split over tensor
    ("temporary", (1000, 64), "jit(step)/embed/all_gather", "mesh.fsdp"),
    ("temporary", (75, 4096, 64), "jit(step)/while/dynamic_update_slice", "model.remat"),
    ("temporary", (64, 4096, 4096), "jit(step)/attend/softmax", "mesh.context"),
    ("temporary", (32768, 64), "jit(step)/moe/all_to_all", "mesh.expert"),
    ("temporary", (32768, 64), "jit(step)/mlp/dot_general", "train.grad_accum"),
  ],
)
def test_advice_for_a_buffer(kind, shape, op_name, setting):
  state = Buffer("w", "argument", Shape("f32", (75, 64, 8)), 10, "state.params")
  buffer = Buffer("b", kind, Shape("bf16", shape), 1000, op_name)
  assert advise([buffer, state], DIMS)[0].setting == setting
  assert advise([buffer], DIMS)[0].bytes == 1000


def test_advice_leaves_out_what_hardly_matters():
  large = Buffer("a", "temporary", Shape("bf16", (75, 4096, 64)), 10_000, "")
  small = Buffer("b", "temporary", Shape("bf16", (5, 1000)), 100, "")
  assert [a.setting for a in advise([large, small], DIMS)] == ["model.remat"]
