"""Programs compiled for TPU slices on a machine without one, and what the compiler says of them."""

from glm5_jax.compiler.explain import Dims, DoesNotFit
from glm5_jax.compiler.program import compile_program
from glm5_jax.compiler.report import Report
from glm5_jax.compiler.topology import GENERATIONS, Topology, parse_topology, topology_devices

__all__ = [
  "GENERATIONS",
  "Dims",
  "DoesNotFit",
  "Report",
  "Topology",
  "compile_program",
  "parse_topology",
  "topology_devices",
]
