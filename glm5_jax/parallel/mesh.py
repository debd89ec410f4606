"""The device mesh of a run: five axes, of which any may be 1.

`data` replicates parameters; `fsdp` shards parameters and rows; `expert` shards experts and rows;
`context` shards a row's tokens; `tensor` shards heads and feed-forward widths. The name `stage` is
reserved for pipeline stages. Later axes lie on neighbouring chips.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from glm5_jax.config import MeshConfig
from glm5_jax.errors import UserError

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROW_AXES = ("data", "fsdp", "expert")  # what the rows of a batch are dealt over
TOKEN_AXES = (*ROW_AXES, "context")  # what all tokens are dealt over
ROWS = PartitionSpec(
  ROW_AXES
)  # of a batch [B, T]; each shard of `context` reads whole rows and takes its slots


def axis_sizes(cfg: MeshConfig, devices: int) -> dict[str, int]:
  """Devices along each axis, the −1 of `cfg` resolved.

  Raises:
    UserError: the sizes do not multiply to `devices`.
  """
  sizes = {axis: getattr(cfg, axis) for axis in AXES}
  known = math.prod(size for size in sizes.values() if size != -1)
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  product = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "1"
  if known > devices:
    needed = f"a multiple of {known}" if open_axes else known
    raise UserError(
      f"config.mesh: {product} needs {needed} devices, {devices} found; "
      f"for a dry run on CPU set JAX_NUM_CPU_DEVICES={known}"
    )
  if open_axes:
    if devices % known:
      raise UserError(f"config.mesh: {product} does not divide the {devices} devices found")
    sizes[open_axes[0]] = devices // known
  elif known < devices:
    raise UserError(
      f"config.mesh: {product} uses {known} of the {devices} devices found and would leave the rest idle; "
      "set one axis to -1"
    )
  return sizes


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh over `devices` (default: all of them); inner axes lie on neighbouring chips.

  `cfg.dcn_data` and `cfg.dcn_fsdp` say how many slices of a multi-slice pod lie along these two axes.

  Raises:
    UserError: sizes that do not multiply to the devices, or slices that do not divide an axis.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = axis_sizes(cfg, len(devices))
  slices = {"data": cfg.dcn_data, "fsdp": cfg.dcn_fsdp}
  for axis, count in slices.items():
    if sizes[axis] % count:
      raise UserError(f"config.mesh.dcn_{axis}={count}: should divide mesh.{axis}={sizes[axis]}")
  dcn = tuple(slices.get(axis, 1) for axis in AXES)
  ici = tuple(sizes[axis] // outer for axis, outer in zip(AXES, dcn, strict=True))
  if math.prod(dcn) > 1:
    found = len({getattr(device, "slice_index", 0) for device in devices})
    if found != math.prod(dcn):
      raise UserError(
        f"config.mesh: dcn_data {cfg.dcn_data} × dcn_fsdp {cfg.dcn_fsdp} needs {math.prod(dcn)} slices, "
        f"{found} found"
      )
    array = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
  elif devices[0].platform == "cpu":
    array = np.array(devices).reshape(ici)  # in order: a process's devices stay together
  else:
    array = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
  return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def row_sharding(mesh: Mesh) -> NamedSharding:
  """Of every field of a batch, [B, T]."""
  return NamedSharding(mesh, ROWS)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def describe(mesh: Mesh) -> str:
  """ "fsdp 4 × expert 2", or "1 device"."""
  large = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
  return " × ".join(large) or "1 device"


def check_shapes(cfg: MeshConfig, devices: int, rows: int, length: int) -> None:
  """Raises UserError unless `rows` of a micro-batch and the tokens of a row divide over the mesh."""
  sizes = axis_sizes(cfg, devices)
  shards = math.prod(sizes[axis] for axis in ROW_AXES)
  if rows % shards:
    parts = " · ".join(f"{axis} {sizes[axis]}" for axis in ROW_AXES)
    raise UserError(
      f"train.batch_size / train.grad_accum = {rows} rows: should be a multiple of {shards}, "
      f"the mesh's {parts}"
    )
  if length % (2 * sizes["context"] if sizes["context"] > 1 else 1):
    raise UserError(
      f"data.seq_len={length}: should be a multiple of {2 * sizes['context']}, "
      f"two pieces for each of the {sizes['context']} shards of mesh.context"
    )
