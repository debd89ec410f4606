"""Converts weights: a Hugging Face GLM-5 folder to a checkpoint of ours, or back.

python -m launch.convert --source=GLM-5/ --target=runs/glm5        Hugging Face -> ours
python -m launch.convert --source=runs/glm5 --target=exported/     ours -> Hugging Face

A few megabytes are read and written at a time, whatever the model's size; of a checkpoint that a training run
saved, as much as one of its devices held of one parameter. No accelerator is needed.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from glm5_jax import hf
from glm5_jax.config import RunConfig
from glm5_jax.errors import UserError
from glm5_jax.train.checkpoint_import import import_params_checkpoint
from glm5_jax.train.checkpoint_lazy import open_params_checkpoint
from launch.common import run

_SOURCE = flags.DEFINE_string(
  "source", None, "Hugging Face folder (it has a config.json), or a checkpoint or run folder"
)
_TARGET = flags.DEFINE_string("target", None, "folder to write the other form to; must hold no model yet")
_STEP = flags.DEFINE_integer("step", None, "step of a source checkpoint; the newest by default")
_SHARD_BYTES = flags.DEFINE_integer(
  "max_shard_bytes", hf.DEFAULT_SHARD_BYTES, "largest safetensors file", lower_bound=1
)
_DROP_MTP = flags.DEFINE_bool("drop_mtp", False, "leave a Hugging Face folder's MTP layer out")


def main(_: Sequence[str]) -> None:
  if not _SOURCE.value or not _TARGET.value:
    raise UserError(
      "--source and --target are needed: a Hugging Face folder and a checkpoint folder, or reversed"
    )
  source, target = Path(_SOURCE.value), Path(_TARGET.value)
  if hf.is_hf_folder(source):
    ours = {"num_nextn_predict_layers": 0} if _DROP_MTP.value else {}
    cfg = hf.load_config(source, **ours)
    params = hf.open_params(source, cfg, drop_mtp=_DROP_MTP.value)
    import_params_checkpoint(target, params, RunConfig(name=source.resolve().name, model=cfg))
  else:
    params, config = open_params_checkpoint(source, _STEP.value)
    cfg = config.model
    hf.save_params(params, cfg, target, _SHARD_BYTES.value)
    if cfg.dsa_mode == "dense":
      print(
        f"note: transformers attends to {cfg.index_topk} selected keys; these weights were run with all keys"
      )
  count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
  print(
    f"{target}: {count:,} parameters in {cfg.num_hidden_layers} layers + {cfg.num_nextn_predict_layers} MTP"
  )


if __name__ == "__main__":
  run(main)
