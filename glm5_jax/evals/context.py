"""What every task is given, and how a folder becomes that."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from glm5_jax.config import DataConfig, MeshConfig, ModelConfig
from glm5_jax.data.records import load_data_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.model import abstract_params, logical_axes
from glm5_jax.parallel.mesh import ROW_AXES, axis_sizes, check_shapes, make_mesh
from glm5_jax.parallel.rules import param_shardings
from glm5_jax.serve.load import ModelFolder
from glm5_jax.text.tokenizer import Tokenizer

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class NeedleLimits:
  """What the needle task hides and asks for.

  Attributes:
    lengths: tokens of a prompt with its answer; none: the context's seq_len.
    keys: hidden in a prompt, each under `values` numbers.
    queries: keys asked for, one after another.
    dsa_modes: "dense", "sparse" attention to compare; none: the model's own.
  """

  lengths: tuple[int, ...] = ()
  prompts: int = 32
  keys: int = 4
  values: int = 1
  queries: int = 1
  dsa_modes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Limits:
  """How much of the held-out documents a task looks at."""

  rows: int = 0  # packed rows; 0 takes all
  batch_size: int = 8
  prompts: int = 8
  prompt_tokens: int = 64
  new_tokens: int = 64
  draft_steps: int = 0  # tokens drafted a round; 0 takes the depths the model was trained with
  needle: NeedleLimits = NeedleLimits()


@dataclasses.dataclass(frozen=True)
class EvalContext:
  """A model, the data folder it is judged on, and the tokeniser of both.

  Attributes:
    mesh: over which the parameters are dealt out; None: they are on one device.
  """

  params: Any
  cfg: ModelConfig
  data: DataConfig
  tokenizer: Tokenizer
  seed: int = 0
  limits: Limits = Limits()
  mesh: Mesh | None = None

  def why_not_on_one_device(self) -> str:
    """What keeps this process's first device from having all parameters; "" where nothing does."""
    if self.mesh is None:
      return ""
    if jax.process_count() > 1:
      return f"the parameters are dealt out over {jax.process_count()} processes"
    device = jax.local_devices()[0]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
    known = device.memory_stats() or {}  # of a CPU nothing is known
    free = known.get("bytes_limit", size) - known.get("bytes_in_use", 0)
    if size > free:
      free_there = f"{free / GIB:.1f} GiB free on a {device.device_kind}"
      return f"{size / GIB:.1f} GiB of parameters do not fit the {free_there}"
    return ""

  def on_one_device(self) -> Any:
    """All parameters on this process's first device, for what does not run on a mesh.

    Raises:
      UserError: it cannot have them.
    """
    if reason := self.why_not_on_one_device():
      raise UserError(f"generation runs on one device, and {reason}; evaluate with --tasks=lm")
    if self.mesh is None:
      return self.params
    return jax.device_put(self.params, SingleDeviceSharding(jax.local_devices()[0]))


def open_context(
  model: ModelFolder,
  data_folder: str | None = None,
  seq_len: int | None = None,
  seed: int = 0,
  limits: Limits = Limits(),
  mesh: MeshConfig | None = None,
  needs_data: bool = True,
) -> EvalContext:
  """Reads the model's weights, each to where it lies, to judge it on a data folder.

  Args:
    data_folder: None takes the one it was trained on.
    mesh: over all devices of all processes; see `evaluation_mesh`.
    needs_data: False where no data folder will do as well, if the model keeps its tokeniser beside it.

  Raises:
    UserError: no data folder is known, its tokeniser is not the model's, a checkpoint that is damaged, or
      a mesh that the devices, the model or the rows do not divide over.
  """
  data = model.run.data
  folder = data_folder or data.folder
  if not folder and needs_data:
    raise UserError(f"{model.folder} names no data folder; set --data to one made by launch.prepare")
  tokenizer = load_data_tokenizer(folder) if folder else model.own_tokenizer()
  model.check_tokenizer(tokenizer)
  seq_len = seq_len or min(data.seq_len, model.cfg.max_position_embeddings)
  data = dataclasses.replace(data, folder=folder, seq_len=seq_len)
  placed, shardings = evaluation_mesh(model.cfg, seq_len, mesh)
  return EvalContext(model.load_params(shardings), model.cfg, data, tokenizer, seed, limits, placed)


def evaluation_mesh(
  cfg: ModelConfig, seq_len: int, wanted: MeshConfig | None = None
) -> tuple[Mesh | None, Any]:
  """The mesh over all devices, and a tree of the parameters' shardings on it; (None, None) for one device.

  Args:
    wanted: None splits the parameters over all devices (fsdp), or where they do not divide copies them to
      each (data). Scores do not depend on it.

  Raises:
    UserError: sizes that do not multiply to the devices, or a parameter or `seq_len` that does not divide.
  """
  if wanted is None:
    try:
      return evaluation_mesh(cfg, seq_len, MeshConfig(data=1, fsdp=-1))
    except UserError:
      wanted = MeshConfig(data=-1)
  sizes = axis_sizes(wanted, jax.device_count())
  check_shapes(wanted, jax.device_count(), math.prod(sizes[axis] for axis in ROW_AXES), seq_len)
  if jax.device_count() == 1:
    return None, None
  mesh = make_mesh(wanted)
  return mesh, param_shardings(mesh, logical_axes(cfg), abstract_params(cfg))
