import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5_jax.compiler.hlo import Shape, parse_module, parse_shapes
from tests.compiler.hlo_texts import SCAN, UNPRICED


def test_shape_with_layout_tiles_and_memory_space():
  (shape,) = parse_shapes("bf16[12,4096,100]{1,2,0:T(8,128)(2,1)S(5)}")
  assert shape == Shape("bf16", (12, 4096, 100), order=(1, 2, 0), tile=(8, 128), space=5)
  assert str(shape) == "bf16[12,4096,100]"


@pytest.mark.parametrize(
  ("text", "elements", "padded"),
  [
    ("f32[3,100]{1,0:T(8,128)}", 1200, 8 * 128 * 4),
    ("f32[100,3]{0,1:T(8,128)}", 1200, 8 * 128 * 4),  # minor dimension first: 3 rows of 100
    ("f32[262144,1]{1,0:T(8,128)}", 2**20, 2**27),  # the trailing 1 costs 128 times the memory
    ("s32[]{:T(128)}", 4, 4),
    ("bf16[5]{0:T(1024)(128)(2,1)}", 10, 2048),
    ("s4[3,3]{1,0}", 5, 5),
    ("pred[7]", 7, 7),
    ("token[]", 0, 0),
  ],
)
def test_bytes_of_an_array_and_with_its_padding(text, elements, padded):
  (shape,) = parse_shapes(text)
  assert (shape.bytes, shape.padded_bytes) == (elements, padded)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.sampled_from([(), (128,), (8, 128)]))
def test_padding_never_makes_an_array_smaller_and_whole_tiles_need_none(dims, tile):
  shape = Shape("f32", tuple(dims), tile=tile)
  assert shape.padded_bytes >= shape.bytes
  whole = Shape("f32", (*dims, 8, 128), tile=tile)
  assert whole.padded_bytes == whole.bytes


def test_tuple_types_are_read_in_order():
  shapes = parse_shapes("(s32[]{:T(128)}, bf16[4,8]{1,0}, /*index=5*/(f32[2], u8[3]))")
  assert [str(shape) for shape in shapes] == ["s32[]", "bf16[4,8]", "f32[2]", "u8[3]"]


def test_module_has_its_computations_and_instructions_in_order():
  module = parse_module(SCAN)
  assert module.entry == "main"
  assert list(module.computations) == [
    "bitcast_fusion", "slice_fusion", "matmul_fusion", "body", "condition", "main",
  ]  # fmt: skip
  assert list(module.computations["condition"]) == ["constant.5", "state.1", "gte.26", "lt.3"]
  assert module.root("body").opcode == "tuple"
  assert module.root("body").operands == ("add.4", "fusion.13", "gte.52", "gte.53")
  loop = module.computations["main"]["while.9"]
  assert loop.called == {"condition": "condition", "body": "body"}
  fusion = module.find("fusion.13")
  assert fusion.op_name == "jit(scan)/while/body/closed_call/dot_general"
  assert fusion.estimated_cycles == 631912
  assert module.find("gte.26").integers("index") == (0,)


def test_lines_that_the_printer_breaks_are_joined_and_quoted_parentheses_do_not_count():
  module = parse_module(UNPRICED)
  kernel = module.find("splash.1")
  assert kernel.target == "tpu_custom_call"
  assert kernel.operands == ("sort.3",)
  assert "splash (causal)" in kernel.text and '"body"' in kernel.text
  assert module.find("conditional").branches == ("cheap", "dear")
  assert module.find("silent").estimated_cycles is None  # printed as the largest integer


def test_text_that_is_no_module_is_refused():
  with pytest.raises(ValueError, match="no ENTRY computation"):
    parse_module("HloModule empty\n")
