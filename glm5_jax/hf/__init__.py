"""Hugging Face GLM-5 folders: weights and config.json, in and out."""

from glm5_jax.hf.load import is_hf_folder, load_config, load_params, open_params
from glm5_jax.hf.save import DEFAULT_SHARD_BYTES, save_params

__all__ = [
  "DEFAULT_SHARD_BYTES",
  "is_hf_folder",
  "load_config",
  "load_params",
  "open_params",
  "save_params",
]
