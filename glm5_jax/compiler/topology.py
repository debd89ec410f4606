"""TPU slices by name, and their devices without the hardware.

A *chip* is what is bought and counted; a *device* is what a program runs on and what jax lists. A tpu7x
chip holds two devices, chips of the other generations are one device each.
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

from glm5_jax.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
  """What one generation of TPU can do. Figures are of a device unless they say chip.

  Sources: the system architecture pages of Cloud TPU (memory, bandwidths, pod sizes); FLOP/s a cycle are
  2 × (matrix units × side²), bf16, and the clock is the one that makes them the published peak.
  """

  name: str
  flops_per_cycle: int
  ghz: float
  hbm_bytes: int  # as published
  usable_hbm_bytes: int  # what the compiler lets a program have, read from its refusals
  hbm_bytes_per_second: float
  link_bytes_per_second: float  # out of a device over all of its interconnect links, one direction
  devices_per_chip: int
  dimensions: int  # of the torus
  chips_per_pod: int

  @property
  def peak_flops(self) -> float:
    """bf16 FLOP/s of a device."""
    return self.flops_per_cycle * self.ghz * 1e9

  @property
  def hbm_bytes_per_chip(self) -> int:
    return self.hbm_bytes * self.devices_per_chip


def _mxu(units: int, side: int) -> int:
  return 2 * units * side * side


GENERATIONS = {
  generation.name: generation
  for generation in (
    Generation("v5e", _mxu(4, 128), 1.5, 16 * GIB, int(15.75 * GIB), 819e9, 200e9, 1, 2, 256),
    Generation("v5p", _mxu(8, 128), 1.75, 95 * GIB, int(95.74 * GIB), 2765e9, 600e9, 1, 3, 8960),
    Generation("v6e", _mxu(4, 256), 1.75, 32 * GIB, int(31.25 * GIB), 1638e9, 400e9, 1, 2, 256),
    Generation("tpu7x", _mxu(4, 256), 2.2, 96 * GIB, int(94.75 * GIB), 3690e9, 300e9, 2, 3, 9216),
  )
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """`slices` equal tori of chips of one generation."""

  generation: Generation
  shape: tuple[int, ...]
  slices: int = 1

  @property
  def name(self) -> str:
    """As jax spells it, for example "v5p:8x8x16"."""
    return f"{self.generation.name}:{'x'.join(map(str, self.shape))}"

  @property
  def chips(self) -> int:
    return math.prod(self.shape) * self.slices

  @property
  def devices(self) -> int:
    return self.chips * self.generation.devices_per_chip

  def __str__(self) -> str:
    return self.name if self.slices == 1 else f"{self.slices} × {self.name}"


def parse_topology(text: str, slices: int = 1) -> Topology:
  """Reads "v5p:8x8x16".

  Raises:
    UserError: unknown generation (the known ones are listed), or a shape no slice has.
  """
  name, _, shape_text = text.partition(":")
  generation = GENERATIONS.get(name)
  if generation is None:
    raise UserError(
      f"topology {text!r}: unknown generation {name!r}; known are {', '.join(GENERATIONS)}, "
      'as in "v5p:8x8x16" or "v6e:16x16"'
    )
  example = "x".join(["4"] * generation.dimensions)
  if not re.fullmatch(r"\d+(x\d+)*", shape_text) or len(shape_text.split("x")) != generation.dimensions:
    raise UserError(
      f"topology {text!r}: {name} takes {generation.dimensions} sizes in chips, as in {name}:{example}"
    )
  shape = tuple(int(size) for size in shape_text.split("x"))
  if any(size % 2 for size in shape[:2]) or min(shape) < 1:
    raise UserError(
      f"topology {text!r}: a host holds 2x2 chips, so the first two sizes should be even and all positive"
    )
  if math.prod(shape) > generation.chips_per_pod:
    raise UserError(
      f"topology {text!r}: {math.prod(shape)} chips, but a {name} pod has {generation.chips_per_pod}"
    )
  if slices < 1:
    raise UserError(f"topology {text!r}: {slices} slices should be 1 or more")
  return Topology(generation, shape, slices)


def topology_devices(topology: Topology) -> list[Any]:
  """jax devices to make a Mesh of and compile for; they cannot run anything.

  Raises:
    UserError: libtpu is missing.
  """
  if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
    raise UserError('compiling for TPU needs libtpu: pip install "glm5-jax[tpu]"')
  # Read once, when libtpu is loaded. Without them it asks a metadata server for the machine it is on, and
  # two processes that compile at the same time end each other.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  from jax.experimental import topologies

  options = {"num_slices": topology.slices} if topology.slices > 1 else {}
  return list(topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options).devices)
