"""The reader of VLIW schedules on texts by hand, and the table from results by hand."""

import importlib.util

import pytest

from experiments.benchmarks import kernel_cycles
from experiments.benchmarks.bundles import read_folder, read_program
from experiments.benchmarks.kernel_rows import ROWS, Row


def dump(bundles: dict[int, str], count: int) -> str:
  """A schedule as the compiler writes it: `count` bundles, empty ones but for those given."""
  legend = "= control target key start\nLB: loop body\n= control target key end\n\n"
  address = [
    f"{i:#5x}   : > {{ {bundles[i]} }}" if i in bundles else f"{i:#5x}   :  {{}}" for i in range(count)
  ]
  return legend + "\n".join(["     0   :  { %s0 = smov 0 }", *address[1:]])


def test_bundles_count_times_the_bounds_around_them():
  """20 bundles; 3 to 14 nine times, of which 5 to 9 four times each: a branch has four more behind it."""
  inner = "%p1_p2 = scmp.ge.s32.totalorder %s4_s5, 4 /* loop exit test */"
  outer = "%p7_p0 = scmp.ge.s32.totalorder (%p1_p2), %s8_s1, 9 /* loop exit test */"
  text = dump(
    {
      4: f"{outer}  ;;  {inner}",
      5: "%9 = sbr.rel (!%p1_p2) target bundleno = 5 (0x5), region = 3",
      10: "%10 = sbr.rel (!%p7_p0) target bundleno = 3 (0x3), region = 2",
    },
    20,
  )
  program = read_program("kernel.1", text)
  assert program and program.bundles == 20 and not program.one_core
  assert [(loop.begin, loop.end, loop.bound) for loop in program.loops] == [(3, 15, 9), (5, 10, 4)]
  assert program.cycles() == 8 + 9 * (7 + 4 * 5)


def test_trips_that_depend_on_data_are_asked_for():
  """30 bundles, 1 to 16 in a loop, 20 to 24 in a short one that passes on a transfer."""
  text = dump(
    {
      12: "%2 = sbr.rel (!%p1_p2) target bundleno = 1 (0x1), region = 1",
      # A transfer described over several lines, behind whose last a branch stands.
      20: "%3 = dma.hbm_to_vmem /*\nbase_bounds: (8, 32)\n */  ;;  %4 = sbr.rel target bundleno = 20",
    },
    30,
  )
  program = read_program("kernel.1", text)
  assert program is not None
  assert program.cycles([10, 2]) == 30 + 9 * 16 + 5
  with pytest.raises(ValueError, match=r"kernel.1: 0 trip counts given, .*: bundles 1-17, bundles 20-25"):
    program.cycles()
  assert kernel_cycles.kernel_cycles(program, {"other": (7,), "kernel": (10,)}) == 30 + 9 * 16
  for trips in ({"kernel": (1, 2)}, {"other": (10,)}):
    with pytest.raises(ValueError, match=r"kernel.1: \d trip counts for loops of \[16\] bundles"):
      kernel_cycles.kernel_cycles(program, trips)


def test_a_kernel_on_one_core_of_two_is_noticed():
  text = dump({2: "%2 = sbr.rel (%p1_p2) target bundleno = 19 (0x13), region = 1"}, 20)
  on_two = text.replace("%s0 = smov 0", "%s0 = sld [smem:[#allocation0]] /* core id */")
  assert [getattr(read_program("k", t), "one_core", None) for t in (text, on_two)] == [False, True]


def test_a_grid_of_dynamic_size_is_shared_by_the_cores():
  """Both leave before the loop where there is no step; no core is idle. 20 bundles, 5 to 18 in the loop."""
  text = dump(
    {
      1: "%p1_p2 = scmp.le.s32.totalorder %s7_s1, 0",
      2: "%2 = sbr.rel (%p1_p2) target bundleno = 19 (0x13), region = 1",
      14: "%3 = sbr.rel (!%p3_p2) target bundleno = 5 (0x5), region = 2",
    },
    20,
  )
  on_two = read_program("grid", text.replace("%s0 = smov 0", "%s0 = sld [smem:[#allocation0]] /* core id */"))
  on_one = read_program("grid", text)
  assert on_one and on_two and not on_one.one_core and not on_two.one_core
  assert kernel_cycles.kernel_cycles(on_one, {}, {"grid": 100}) == 6 + 14 * 102
  assert kernel_cycles.kernel_cycles(on_two, {}, {"grid": 100}) == 6 + 14 * 52


def test_only_the_last_schedule_of_each_program_is_read(tmp_path):
  for name in ("kernel.1-64-", "kernel.1-58-schedule-analysis_", "<late-finalization>-9-"):
    (tmp_path / f"17-{name}packed-bundles-post-ra.txt").write_text(dump({}, 7))
  (tmp_path / "17-kernel.1-40-packed-bundles-pre-ra.txt").write_text(dump({}, 7))
  (tmp_path / "18-nothing-64-packed-bundles-post-ra.txt").write_text("= control target key start\n")
  assert [(program.name, program.bundles) for program in read_folder(tmp_path)] == [("kernel.1", 7)]


def test_the_table_compares_with_the_first_row_and_tells_failures():
  rows = [Row("sums", name, lambda: 0, ()) for name in ("ours", "theirs", "broken", "absent")]
  result = {"compile_s": 1.25, "one_core": [], "cycles": 1000}
  results = {
    ("sumsours", "v5p"): result,
    ("sumstheirs", "v5p"): result | {"cycles": 2500, "one_core": ["sum.1"]},
    ("sumsbroken", "v5p"): {"error": "too large"},
  }
  lines = kernel_cycles.render(rows, results, ["v5p"]).splitlines()
  assert lines[4:8] == [
    "| ours | 1,000, 1.2 s |",
    "| theirs | 2,500 (2.50 ×), one core, 1.2 s |",
    "| broken | too large |",
    "| absent | – |",
  ]


def test_names_of_rows_are_unique():
  assert len({(row.task, row.name) for row in ROWS}) == len(ROWS)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_row_through_the_compiler():
  """The bits of [64, 131072] on v5p, both cores: at most a tenth of the sort's 5.46 M cycles."""
  result = kernel_cycles.measure_apart(0, "v5p")
  assert 100_000 < result["cycles"] < 546_000 and result["one_core"] == []
