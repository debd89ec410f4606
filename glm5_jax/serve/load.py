"""A trained model from whatever folder holds it: a run, its checkpoints, or Hugging Face's format."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from glm5_jax import hf
from glm5_jax.config import ModelConfig, RunConfig
from glm5_jax.errors import UserError
from glm5_jax.model import abstract_params
from glm5_jax.text.specials import END_OF_TEXT
from glm5_jax.text.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from glm5_jax.train.checkpoint import SUBFOLDER, load_params_checkpoint, read_description

# A turn ends where the document does, or where another speaker's begins. Source: GLM-5's eos_token_id.
STOP_NAMES = (END_OF_TEXT, "<|user|>", "<|observation|>")


@dataclasses.dataclass(frozen=True)
class ModelFolder:
  """What a folder says of its model, before weights are read.

  Attributes:
    run: the configuration it was trained with; only `run.model` is meaningful for a Hugging Face folder.
    step: None for a Hugging Face folder.
    tokenizer: kept beside the weights, or None.
    fingerprint: of the tokeniser the model was trained with, "" when unknown.
  """

  folder: Path
  run: RunConfig
  step: int | None
  tokenizer: Tokenizer | None
  fingerprint: str

  @property
  def cfg(self) -> ModelConfig:
    return self.run.model

  def check_tokenizer(self, tokenizer: Tokenizer) -> None:
    """Raises UserError, naming both, unless the model was trained with `tokenizer`."""
    tokenizer.check_fits(self.cfg.vocab_size, self.fingerprint, owner=f"the checkpoint {self.folder}")

  def own_tokenizer(self, path: str = "") -> Tokenizer:
    """The tokeniser at `path`, or the one kept beside the weights; checked. UserError when there is none."""
    tokenizer = load_tokenizer(path) if path else self.tokenizer
    if tokenizer is None:
      raise UserError(f"{self.folder} keeps no tokenizer ({' or '.join(TOKENIZER_FILES)}); set --tokenizer")
    self.check_tokenizer(tokenizer)
    return tokenizer

  def load_params(self, shardings: Any = None) -> Any:
    """The parameter tree of `cfg`, in its dtypes.

    Args:
      shardings: a tree of shardings like the parameters', such as `parallel.rules.param_shardings` gives.
        Every device reads its own part, and no host or device holds more than its parts. None: all on the
        first local device.

    Raises:
      UserError: a torn checkpoint, or weights of another shape than `cfg` has.
    """
    if self.step is None:
      return hf.load_params(self.folder, self.cfg, shardings)
    wanted = abstract_params(self.cfg)
    if shardings is not None:
      place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
      wanted = jax.tree.map(place, wanted, shardings)
    return load_params_checkpoint(self.folder, self.step, wanted)[0]


def open_model(folder: str | Path, step: int | None = None) -> ModelFolder:
  """Finds out what `folder` holds.

  Args:
    folder: a run's folder, a checkpoint folder, or a Hugging Face one (config.json and safetensors).
    step: None takes the newest complete one.

  Raises:
    UserError: there is no model, or a file of it is damaged.
  """
  folder = Path(folder)
  if not folder.is_dir():
    raise UserError(f"no folder {folder}; give a run's folder, a checkpoint's or a Hugging Face one")
  if hf.is_hf_folder(folder):
    if step is not None:
      raise UserError(f"{folder} is a Hugging Face folder, which has no steps; leave --step out")
    tokenizer = _find_tokenizer(folder)
    run = RunConfig(name=folder.resolve().name, model=hf.load_config(folder))
    return ModelFolder(folder, run, None, tokenizer, tokenizer.fingerprint if tokenizer else "")
  step, run, extra = read_description(folder, step)
  tokenizer = _find_tokenizer(folder.parent if folder.resolve().name == SUBFOLDER else folder)
  own = tokenizer.fingerprint if tokenizer else ""
  return ModelFolder(folder, run, step, tokenizer, extra.get("tokenizer", own))


def stop_ids(tokenizer: Tokenizer, cfg: ModelConfig) -> tuple[int, ...]:
  """Ids that end a text: the tokeniser's own by name; the config's where it names none of them."""
  named = tuple(tokenizer.specials[name] for name in STOP_NAMES if name in tokenizer.specials)
  return named or cfg.eos_token_id


def _find_tokenizer(folder: Path) -> Tokenizer | None:
  return load_tokenizer(folder) if any((folder / name).exists() for name in TOKENIZER_FILES) else None
