"""A prepared data folder and a run's folder with a small random model, as commands meet them."""

import shutil
from pathlib import Path

from glm5_jax.config import DataConfig, ModelConfig, RunConfig
from glm5_jax.data.prepare import PrepareConfig, prepare
from glm5_jax.data.records import load_data_tokenizer
from glm5_jax.train.checkpoint import SUBFOLDER, Checkpointer
from tests.data.conftest import write_texts
from tests.model import toy

VOCABULARY = 360
STEP = 7


def config(**changes) -> ModelConfig:
  """One dense layer and a dense MTP layer, which compile quickly."""
  light = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 1,
    "mtp_depths": 2,
    "eos_token_id": (0,),
  }
  return toy.config(**light | changes)


def make_data(folder: Path, vocab_size: int = VOCABULARY) -> Path:
  """A data folder, with a tokeniser of its own, of files written beside it."""
  texts = write_texts(folder.with_name(folder.name + "_texts"))
  prepare(
    PrepareConfig(str(folder), [str(texts)], vocab_size=vocab_size, heldout=0.2), report=lambda line: None
  )
  return folder


def make_run(folder: Path, data: Path, **changes) -> Path:
  """A run's folder as training leaves it: tokeniser, and a checkpoint that knows its fingerprint."""
  cfg, tokenizer = config(**changes), load_data_tokenizer(str(data))
  folder.mkdir(parents=True)
  shutil.copy(tokenizer.path, folder)
  run = RunConfig(name="small", model=cfg, data=DataConfig(folder=str(data), seq_len=64))
  checkpoints = Checkpointer(folder / SUBFOLDER, keep=1, config=run)
  checkpoints.save(STEP, {"params": toy.params(cfg)}, {}, {"tokenizer": tokenizer.fingerprint})
  checkpoints.close()
  return folder
