"""What every task is given, and how a folder becomes that."""

import dataclasses
from typing import Any

from glm5_jax.config import DataConfig, ModelConfig
from glm5_jax.data.records import load_data_tokenizer
from glm5_jax.errors import UserError
from glm5_jax.serve.load import ModelFolder
from glm5_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Limits:
  """How much of the held-out documents a task looks at."""

  rows: int = 0  # packed rows; 0 takes all
  batch_size: int = 8
  prompts: int = 8
  prompt_tokens: int = 64
  new_tokens: int = 64
  draft_steps: int = 0  # tokens drafted a round; 0 takes the depths the model was trained with


@dataclasses.dataclass(frozen=True)
class EvalContext:
  """A model, the data folder it is judged on, and the tokeniser of both."""

  params: Any
  cfg: ModelConfig
  data: DataConfig
  tokenizer: Tokenizer
  seed: int = 0
  limits: Limits = Limits()


def open_context(
  model: ModelFolder,
  data_folder: str | None = None,
  seq_len: int | None = None,
  seed: int = 0,
  limits: Limits = Limits(),
) -> EvalContext:
  """Reads the model's weights to judge it on a data folder, the one it was trained on by default.

  Raises:
    UserError: no data folder is known, its tokeniser is not the model's, or a checkpoint that is damaged.
  """
  data = model.run.data
  folder = data_folder or data.folder
  if not folder:
    raise UserError(f"{model.folder} names no data folder; set --data to one made by launch.prepare")
  tokenizer = load_data_tokenizer(folder)
  model.check_tokenizer(tokenizer)
  seq_len = seq_len or min(data.seq_len, model.cfg.max_position_embeddings)
  data = dataclasses.replace(data, folder=folder, seq_len=seq_len)
  return EvalContext(model.load_params(), model.cfg, data, tokenizer, seed, limits)
