"""Hugging Face GLM-5 folders: weights and config.json, in and out."""

from glm5_jax.hf.load import LoadedPiece, iter_params, load_config, load_params
from glm5_jax.hf.save import save_params

__all__ = ["LoadedPiece", "iter_params", "load_config", "load_params", "save_params"]
