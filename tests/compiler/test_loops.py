import pytest

from glm5_jax.compiler.hlo import parse_module
from glm5_jax.compiler.loops import Frame, trip_count
from tests.compiler.hlo_texts import SCAN, nested


def trips(text: str, loop: str) -> int | None:
  """Of the inner loop seen from the outer one's body, or of the only other one seen from the entry."""
  module = parse_module(text)
  frame = Frame(module.entry)
  if loop == "inner_while":
    frame = Frame("outer_body", module.find("outer_while"), frame)
  return trip_count(module, frame, module.find(loop))


def test_scan_by_its_condition():
  assert trips(SCAN, "while.9") == 12


def test_a_count_that_the_compiler_states_comes_first():
  stated = 'backend_config={"known_trip_count":{"n":"7"}}, metadata={op_name="jit(scan)/while"}'
  assert trips(SCAN.replace('metadata={op_name="jit(scan)/while"}', stated), "while.9") == 7


@pytest.mark.parametrize(
  ("step", "direction", "start", "bound", "rounds"),
  [
    (1, "LT", 0, 5, 5),
    (1, "LE", 0, 5, 6),
    (2, "LT", 0, 5, 3),
    (2, "LT", 1, 5, 2),
    (-1, "GT", 5, 0, 5),
    (-2, "GE", 4, 0, 3),
    (1, "NE", 0, 5, 5),
    (1, "LT", 9, 5, 0),
    (-1, "LT", 0, 5, None),  # runs away from its bound
    (2, "NE", 0, 5, None),  # steps over it
    (1, "EQ", 0, 5, None),
  ],
)
def test_counters(step, direction, start, bound, rounds):
  text = nested(3, f"constant({bound})", step, direction, start)
  assert trips(text, "inner_while") == rounds


def test_condition_in_a_fusion_with_its_sides_exchanged():
  assert trips(nested(3, "constant(5)"), "outer_while") == 3


def test_bound_that_two_loops_hand_on_unchanged():
  assert trips(nested(3, "carried"), "inner_while") == 6


def test_bound_that_the_outer_loop_changes_is_unknown():
  text = nested(3, "carried").replace("tuple(%outer_next, %outer_bound)", "tuple(%outer_next, %outer_next)")
  assert trips(text, "inner_while") is None


def test_bound_that_is_an_argument_of_the_program_is_unknown():
  assert trips(nested(3, "carried").replace("tuple(%zero, %six)", "tuple(%zero, %n)"), "inner_while") is None
