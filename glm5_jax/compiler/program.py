"""Compiles a jitted function for a slice that is not here, and reports what the compiler says of it."""

import contextlib
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from glm5_jax.compiler.cost import FlopsOfKernel, program_cost
from glm5_jax.compiler.explain import Dims, DoesNotFit, explain
from glm5_jax.compiler.hlo import Module, parse_module
from glm5_jax.compiler.memory import Assignment, Buffer, read_assignment
from glm5_jax.compiler.report import Memory, Report
from glm5_jax.compiler.topology import Topology


def compile_program(
  jitted: Any,
  args: Sequence[Any],
  topology: Topology,
  mesh: Mesh,
  model_flops: float | None = None,
  priced_kernels: Mapping[str, FlopsOfKernel] | None = None,
  trips: Mapping[str, int] | None = None,
  title: str = "program",
  dims: Dims | None = None,
) -> Report:
  """Compiles `jitted(*args)` ahead of time and reads the result.

  Args:
    jitted: a `jax.jit` function.
    args: its arguments as trees of ShapeDtypeStructs with shardings on `mesh`.
    topology: what to compile for.
    mesh: of the topology's devices, see `topology_devices`.
    model_flops: of one run over all devices, for the utilisation.
    priced_kernels: FLOPs of one execution of a Pallas kernel on one device, by a part of its name or scope.
    trips: of loops whose trip count depends on data, by a part of their op name; 1 for others.
    title: what the report calls the program.
    dims: sizes of the model, to explain a refusal by.

  Raises:
    DoesNotFit: (a UserError) the program needs more memory than a device has; `.explanation` says what of.
  """
  with tempfile.TemporaryDirectory(prefix="glm5-compile-") as name, _no_cache():
    dump = Path(name)
    started = time.monotonic()
    lowered = jitted.lower(*args)
    between = time.monotonic()
    try:
      compiled = lowered.compile(compiler_options={"xla_dump_to": name})
    except jax.errors.JaxRuntimeError as error:
      explanation = explain(str(error), topology, _refused_assignment(dump), dims)
      if explanation is None:
        raise
      raise DoesNotFit(explanation) from None
    ended = time.monotonic()
    module = parse_module(compiled.as_text())
    assignment = read_assignment(dump, module)
  flops_per_cycle = topology.generation.flops_per_cycle
  return Report(
    title=title,
    topology=topology,
    mesh=dict(mesh.shape),
    memory=_memory(compiled.memory_analysis(), assignment),
    buffers=assignment.buffers if assignment else _largest_values(module),
    cost=program_cost(module, tuple(mesh.shape.items()), flops_per_cycle, priced_kernels, trips),
    model_flops=model_flops,
    lower_seconds=between - started,
    compile_seconds=ended - between,
    peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  )


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
  """Programs for devices that are not here can be put into jax's persistent cache but not taken out of it."""
  enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
  compilation_cache.reset_cache()
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


def _refused_assignment(dump: Path) -> Assignment | None:
  """What had been laid out when the compiler gave up."""
  texts = sorted(dump.glob("*after_optimizations.txt"))
  return read_assignment(dump, parse_module(texts[0].read_text(errors="replace"))) if texts else None


def _memory(stats: Any, assignment: Assignment | None) -> Memory:
  added = (
    stats.argument_size_in_bytes
    + stats.output_size_in_bytes
    - stats.alias_size_in_bytes
    + stats.temp_size_in_bytes
  )
  return Memory(
    arguments=stats.argument_size_in_bytes,
    outputs=stats.output_size_in_bytes,
    aliased=stats.alias_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
    needed=assignment.total_bytes if assignment else added,
    host_arguments=stats.host_argument_size_in_bytes,
    host_outputs=stats.host_output_size_in_bytes,
    host_temporaries=stats.host_temp_size_in_bytes,
  )


def _largest_values(module: Module) -> tuple[Buffer, ...]:
  """Arrays of the entry computation, where the compiler wrote no assignment. Some may share a place."""
  passing = ("get-tuple-element", "tuple", "bitcast", "while", "conditional", "call")
  buffers = [
    Buffer(
      i.name, "argument" if i.opcode == "parameter" else "temporary", shape, shape.padded_bytes, i.op_name
    )
    for name, body in module.computations.items()
    if name == module.entry
    for i in body.values()
    if i.opcode not in passing
    for shape in i.shapes
  ]
  return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))
