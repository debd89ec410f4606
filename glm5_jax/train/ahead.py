"""A run's training step compiled for a TPU slice that is not here."""

import copy
import dataclasses
import math
from collections.abc import Callable

import jax

from glm5_jax.compiler import Dims, Report, compile_program, parse_topology, topology_devices
from glm5_jax.compiler.cost import Kernel
from glm5_jax.config import RunConfig
from glm5_jax.data.batch import Batch
from glm5_jax.model.expert_parallel import MORE_ROUNDS
from glm5_jax.model.plan import layer_plan
from glm5_jax.parallel.mesh import check_shapes, describe, make_mesh, row_sharding
from glm5_jax.train.flops import train_flops_per_token
from glm5_jax.train.stages import optimizer_of
from glm5_jax.train.state import abstract_state
from glm5_jax.train.step import make_train_step, mtp_depths


def compile_step(run: RunConfig, topology: str, slices: int = 1, rows: int = 0) -> Report:
  """What the TPU compiler says of one step of `run` on a slice such as "v5p:8x8x8"; makes no array.

  `rows`: a step of that many rows in one micro-batch; 0 takes those of `run`.

  Raises:
    UserError: an unknown slice, libtpu is missing, the mesh does not fit the slice or the model does not fit
      the mesh; its subclass `DoesNotFit` where the program needs more memory than a device has.
  """
  place = parse_topology(topology, slices)
  run = _with_tpu_kernels(run)
  if rows:
    run.train = dataclasses.replace(run.train, batch_size=rows, batch_warmup="", grad_accum=1)
  rows = run.train.batch_size
  check_shapes(run.mesh, place.devices, rows // run.train.grad_accum, run.data.seq_len)
  mesh = make_mesh(run.mesh, topology_devices(place))
  optimizer = optimizer_of(run, mesh)
  state = abstract_state(run, optimizer, mesh)
  tokens = rows * run.data.seq_len
  expert_rows = tokens * mesh.shape["tensor"] // mesh.size * run.model.num_experts_per_tok  # of a device
  return compile_program(
    make_train_step(run, optimizer, mesh),
    (state, _abstract_batch(rows, run.data.seq_len, row_sharding(mesh))),
    place,
    mesh,
    model_flops=tokens * train_flops_per_token(run.model, run.data.seq_len, mtp_depths(run)),
    priced_kernels=SPLASH | DSA | {"grouped_matmul": _grouped_flops(expert_rows)},
    trips={MORE_ROUNDS: 0},
    title=f"{run.name or 'run'}: {rows} rows of {run.data.seq_len:,} tokens on {describe(mesh)}",
    dims=_dims(run),
  )


def _splash_flops(products: int) -> Callable[[Kernel], float]:
  """Of a splash kernel that makes so many products of [T, S] by the head width, half of each masked away."""

  def flops(kernel: Kernel) -> float:
    queries, keys = [
      shape.dims for shape in kernel.operands if shape.dtype == "bf16" and len(shape.dims) == 3
    ][:2]
    heads, T, width = queries
    return float(products * heads * T * keys[1] * width)

  return flops


SPLASH = {
  "splash_mha_fwd": _splash_flops(2),
  "splash_mha_dq": _splash_flops(3),
  "splash_mha_dkv": _splash_flops(4),
}


def _selected_flops(products: int) -> Callable[[Kernel], float]:
  """Of a sparse_mla kernel, where some query of every tile below the diagonal selects some key of it."""

  def flops(kernel: Kernel) -> float:
    (B, N, T, width), keys = [shape.dims for shape in kernel.operands if len(shape.dims) == 4][:2]
    return float(products * B * N * T * keys[2] * width)

  return flops


def _indexer_flops(kernel: Kernel) -> float:
  """Half of the products are masked away; of float32 each takes six passes."""
  query = next(shape for shape in kernel.operands if len(shape.dims) == 4)
  keys = kernel.operands[-1].dims
  return float(math.prod(query.dims) * keys[-2] * (6 if query.dtype == "f32" else 1))


def _loss_flops(index_products: int) -> Callable[[Kernel], float]:
  """Of a kernel of indexer_loss: one product with the main heads, some with the indexer's; half is masked."""

  def flops(kernel: Kernel) -> float:
    index, main = [math.prod(shape.dims) for shape in kernel.operands if len(shape.dims) == 4][:2]
    keys = next(shape.dims[-2] for shape in kernel.operands if len(shape.dims) == 3 and shape.dtype == "bf16")
    return float((index_products * index + main) * keys)

  return flops


DSA = {
  "indexer_loss_sums": _loss_flops(1),
  "indexer_loss": _loss_flops(4),
  "sparse_mla_forward": _selected_flops(2),
  "sparse_mla_dq": _selected_flops(3),
  "sparse_mla_dkv": _selected_flops(4),
  "lightning_indexer": _indexer_flops,
}


def _grouped_flops(rows: int) -> Callable[[Kernel], float]:
  """Of a grouped matmul, which skips what stays empty of a round: the rows of a balanced router."""

  def flops(kernel: Kernel) -> float:
    _, K, N = next(shape.dims for shape in kernel.operands + kernel.results if len(shape.dims) == 3)
    return 2.0 * rows * K * N

  return flops


def _with_tpu_kernels(run: RunConfig) -> RunConfig:
  """The implementations that a TPU would pick; here the back end that picks is a CPU."""
  run, model = copy.deepcopy(run), run.model
  run.model = model.replace(
    attention_implementation=model.attention_implementation or "splash",
    moe_implementation=model.moe_implementation or "tpu",
    dsa_implementation=model.dsa_implementation or "tpu",
  )
  return run


def _abstract_batch(rows: int, length: int, sharding) -> dict[str, jax.ShapeDtypeStruct]:
  names = [field.name for field in dataclasses.fields(Batch)]
  dtypes = dict.fromkeys(names, "int32") | {"weights": "float32"}
  return {name: jax.ShapeDtypeStruct((rows, length), dtypes[name], sharding=sharding) for name in names}


def _dims(run: RunConfig) -> Dims:
  model = run.model
  stacks = tuple(segment.repeats for segment in layer_plan(model) if segment.stacked)
  return Dims(model.vocab_size, model.hidden_size, run.data.seq_len, stacks, max(run.mesh.tensor, 1))


def report_name(run: RunConfig, topology: str) -> str:
  """A folder's name for the report of this run on this slice."""
  return f"{run.name or 'run'}-{topology}".replace(":", "-")
