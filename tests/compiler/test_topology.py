import importlib.util
import subprocess
import sys

import pytest

from glm5_jax.compiler import GENERATIONS, parse_topology, topology_devices
from glm5_jax.errors import UserError


@pytest.mark.parametrize(
  ("text", "chips", "devices"),
  [("v5p:8x8x16", 1024, 1024), ("v5e:16x16", 256, 256), ("v6e:4x8", 32, 32), ("tpu7x:4x4x8", 128, 256)],
)
def test_chips_and_devices(text, chips, devices):
  topology = parse_topology(text)
  assert (topology.chips, topology.devices, str(topology)) == (chips, devices, text)
  twice = parse_topology(text, slices=2)
  assert (twice.chips, twice.devices, str(twice)) == (2 * chips, 2 * devices, f"2 × {text}")


def test_cycles_times_clock_are_the_published_peaks():
  peaks = {name: g.peak_flops * g.devices_per_chip / 1e12 for name, g in GENERATIONS.items()}
  assert peaks == pytest.approx({"v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 2307}, rel=2e-3)
  memory = {name: g.hbm_bytes_per_chip / 2**30 for name, g in GENERATIONS.items()}
  assert memory == {"v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("v9:2x2", r"unknown generation 'v9'; known are v5e, v5p, v6e, tpu7x"),
    ("v5p-1024", r"unknown generation 'v5p-1024'; known are"),
    ("", r"unknown generation ''; known are"),
    ("v5p", r"v5p takes 3 sizes in chips, as in v5p:4x4x4"),
    ("v5p:8x8", r"v5p takes 3 sizes"),
    ("v6e:4x4x4", r"v6e takes 2 sizes in chips, as in v6e:4x4"),
    ("v5p:2xtwox1", r"v5p takes 3 sizes"),
    ("v5p:3x2x1", r"a host holds 2x2 chips"),
    ("v5p:0x2x1", r"a host holds 2x2 chips"),
    ("v6e:16x32", r"512 chips, but a v6e pod has 256"),
  ],
)
def test_impossible_topologies_are_refused(text, message):
  with pytest.raises(UserError, match=message) as refusal:
    parse_topology(text)
  assert "\n" not in str(refusal.value) and repr(text) in str(refusal.value)


def test_slices_are_positive():
  with pytest.raises(UserError, match="0 slices should be 1 or more"):
    parse_topology("v5p:2x2x1", slices=0)


def test_missing_libtpu_names_the_extra(monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find_spec(name))
  monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
  with pytest.raises(UserError, match=r'pip install "glm5-jax\[tpu\]"'):
    topology_devices(parse_topology("v5p:2x2x1"))


def test_reading_a_report_needs_no_accelerator_library():
  """Topologies, parsing and refusals work before, and without, loading libtpu."""
  code = (
    "import sys; from glm5_jax.compiler import compile_program, parse_topology; "
    "parse_topology('v5p:2x2x1'); print('libtpu' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
  assert done.stdout.strip() == "False", done.stderr
